"""From slices to stacks: which belong together, in which order, how far apart; and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.sources.ct.errors import (
    CtError,
    DuplicateSliceError,
    GantryTiltError,
    MissingGeometryError,
    MissingSliceError,
    MixedGeometryError,
    SpacingError,
)
from packer.strings import Int64s

Floats = npt.NDArray[np.float64]

#: Directions of the same stack differ by less (in each component).
DIRECTION_TOLERANCE = 1e-3
#: Slices nearer to each other than this lie at the same position, mm.
SAME_POSITION_MM = 1e-3
#: Real spacings jitter (6.958 to 7.071 mm); a larger part of the median is no jitter.
SPACING_TOLERANCE = 0.1
#: A gap of so many times the median spacing is where a slice is missing.
GAP = 1.5
#: Larger angles between the stack and the normal of its slices are a tilted gantry, degrees.
MOST_TILT_DEG = 0.5
#: A volume of fewer slices is none.
FEWEST_SLICES = 3

#: Columns of a geometry: ipp, iop, spacing (row, column), rows, columns.
_IPP, _IOP, _REST = slice(0, 3), slice(3, 9), slice(9, 13)
GEOMETRY_COLUMNS = 13


@dataclass(frozen=True, eq=False)
class Stack:
    """Slices of one size, orientation and spacing, in ascending order along their normal.

    Attributes:
        members: positions of the slices in whatever they were given as.
        position_mm: float64 (n,), along the normal (row × column direction).
        spacing_mm: the median distance of neighbours where all agree with it, else None.
        tilt_deg: angle between the stack and the normal; None for a single slice.
        problems: what keeps it from being a volume.
    """

    members: Int64s
    position_mm: Floats
    spacing_mm: float | None
    tilt_deg: float | None
    problems: tuple[CtError, ...]


def split_by_geometry(geometry: Floats) -> list[Int64s]:
    """Positions of slices that can lie in one stack, each group in the order given; the largest group first.

    Args:
        geometry: float64 (n, 13): ipp, iop, spacing, rows and columns of each slice.
    """
    left = np.arange(len(geometry))
    groups = []
    while len(left):
        first = geometry[left[0]]
        rest = geometry[left]
        same = (np.abs(rest[:, _IOP] - first[_IOP]) <= DIRECTION_TOLERANCE).all(1) & np.isclose(
            rest[:, _REST], first[_REST], rtol=1e-3, atol=0
        ).all(1)
        groups.append(left[same])
        left = left[~same]
    return sorted(groups, key=len, reverse=True)


def mixed_geometry(groups: Sequence[Int64s]) -> MixedGeometryError:
    """The error for a series of several geometries, for those who want one."""
    counts = ", ".join(str(len(group)) for group in groups)
    return MixedGeometryError(
        f"the slices of one series have {len(groups)} geometries ({counts} slices); without --strict-series "
        "each becomes a series of its own"
    )


def normal_of(iop: Sequence[float] | Floats) -> Floats:
    """Unit vector along which slices ascend: row × column direction."""
    normal = np.cross(np.asarray(iop[:3], np.float64), np.asarray(iop[3:], np.float64))
    length = float(np.linalg.norm(normal))
    if not length > 0.5:
        raise MissingGeometryError("the two directions of ImageOrientationPatient are the same")
    return np.asarray(normal / length, np.float64)


def stack(geometry: Floats, members: Int64s) -> Stack:
    """Order slices and measure the stack.

    Args:
        geometry: as `split_by_geometry` takes it.
        members: positions of the slices of one group; ties in position keep this order.
    """
    rows = geometry[members]
    normal = normal_of(rows[0, _IOP])
    position = rows[:, _IPP] @ normal
    order = np.argsort(position, kind="stable")
    position = position[order]
    ipp = rows[order][:, _IPP]
    spacing, problem = _spacing(position)
    tilt = _tilt_deg(ipp, normal)
    problems = [] if problem is None else [problem]
    if tilt is not None and tilt > MOST_TILT_DEG:
        problems.append(
            GantryTiltError(
                f"the stack leans by {tilt:.2f} degrees (limit {MOST_TILT_DEG}); pack it with --sample slice"
            )
        )
    return Stack(members[order], position, spacing, tilt, tuple(problems))


def _spacing(position: Floats) -> tuple[float | None, CtError | None]:
    gaps = np.diff(position)
    if not len(gaps):
        return None, None
    median = float(np.median(gaps))
    if np.all(np.abs(gaps - median) <= SPACING_TOLERANCE * median):
        return median, None
    widest = int(np.argmax(gaps))
    where = f"{gaps[widest]:.3f} mm between {position[widest]:.3f} and {position[widest + 1]:.3f} mm"
    if gaps[widest] >= GAP * median:
        count = int((gaps >= GAP * median).sum())
        more = f" (and {count - 1} more)" if count > 1 else ""
        return None, MissingSliceError(
            f"a gap of {where}{more}, where the median is {median:.3f}; complete the series or use --sample slice"
        )
    return None, SpacingError(
        f"slices lie {gaps.min():.3f} to {gaps.max():.3f} mm apart (median {median:.3f}); use --sample slice"
    )


def _tilt_deg(ipp: Floats, normal: Floats) -> float | None:
    """The angle between the way from the first slice to the last and their normal."""
    if len(ipp) < 2:
        return None
    way = ipp[-1] - ipp[0]
    along = float(way @ normal)
    across = float(np.linalg.norm(way - along * normal))
    return math.degrees(math.atan2(across, abs(along)))


def without_duplicates(found: Stack, same_pixels: Callable[[int, int], bool]) -> tuple[Int64s, Int64s]:
    """Which members to keep, and which repeat one of them.

    Args:
        found: the stack, whose members may share positions.
        same_pixels: whether two members have equal pixels; asked only for neighbours at one position.

    Returns:
        Members to keep, in order, and those left out.

    Raises:
        DuplicateSliceError: two slices at one position have different pixels.
    """
    kept: list[int] = []
    repeats: list[int] = []
    last_position = -math.inf
    for member, position in zip(found.members.tolist(), found.position_mm.tolist(), strict=True):
        if position - last_position > SAME_POSITION_MM:
            kept.append(member)
            last_position = position
        elif same_pixels(kept[-1], member):
            repeats.append(member)
        else:
            raise DuplicateSliceError(
                f"two slices lie at {position:.3f} mm and have different pixels (several phases or reconstructions in "
                "one series?); take them apart, or leave one out with --exclude"
            )
    return np.array(kept, np.int64), np.array(repeats, np.int64)


def affine_lps(ipp: Sequence[float], iop: Sequence[float], spacing_mm: Sequence[float], step: Floats) -> Floats:
    """float64 (4, 4): (column, row, slice, 1) to LPS mm, as ITK has it.

    Args:
        ipp: of the first slice; see `Header`.
        iop: of all slices.
        spacing_mm: between rows, between columns.
        step: from one slice to the next, LPS mm.
    """
    affine = np.eye(4)
    affine[:3, 0] = np.asarray(iop[:3]) * spacing_mm[1]
    affine[:3, 1] = np.asarray(iop[3:]) * spacing_mm[0]
    affine[:3, 2] = step
    affine[:3, 3] = ipp
    return affine
