"""Statistics of CT slices and volumes: the Hounsfield units, and the series' spacings and lengths.

Mean and standard deviation are over all voxels together. Voxels of up to 16 bits are counted value by value, so
they are exact; of others each array's own mean and squared deviations are added up without rounding errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.ct_samples import has_array, millimetres, pixel_spacing, record_of, series_of
from packer.errors import BadArrayError
from packer.packed import PackedSplit
from packer.spread import Bin, Spread, spread

LOWEST_HU, HIGHEST_HU, BIN_HU = -1024, 3072, 64

_BINS = (HIGHEST_HU - LOWEST_HU) // BIN_HU
_LEAST, _MOST = -(1 << 15), (1 << 16) - 1  # of int16 and uint16
_BELIEVED = 1e9  # no HU are so far from 0
_AT_ONCE = 1 << 20  # voxels; bounds the temporary arrays
_KEPT = 100  # broken arrays that are named, of one split


@dataclass(frozen=True)
class Range:
    """Least, median (the lower of the two middle ones) and greatest of some distances in mm."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Hounsfield:
    """What decoding showed.

    Attributes:
        arrays: slices or volumes that were decoded.
        voxels: how many they have together, without those left out.
        left_out: voxels that are NaN, infinite, or beyond ±10⁹.
        min, max, mean, std: in HU; None without a voxel.
        below: voxels below −1024 HU.
        bins: of 64 HU each, from −1024 HU to 3072 HU.
        above: voxels of 3072 HU or more.
        undecodable: `(sample number, reason)` of the first that do not decode.
        failed: how many do not decode.
    """

    arrays: int
    voxels: int
    left_out: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    below: int
    bins: tuple[Bin, ...]
    above: int
    undecodable: tuple[tuple[int, str], ...]
    failed: int


@dataclass(frozen=True)
class CtStats:
    """Statistics of a split's CT.

    Attributes:
        samples: slices or volumes.
        series: how many series they are.
        patients: how many patients the series are of, as far as their records say.
        units: series by the unit of their values: `HU`, `unknown`.
        slices: of each series.
        row_mm, column_mm, slice_mm: distances between rows, columns and slices, of each series; None where no record
            says them.
        hu: from decoding `hu.arrays` of the samples.
    """

    samples: int
    series: int
    patients: int
    units: dict[str, int]
    slices: Spread | None
    row_mm: Range | None
    column_mm: Range | None
    slice_mm: Range | None
    hu: Hounsfield


class HuCounts:
    """How often each value occurs. Adding up is exact, so the order of tasks makes no difference."""

    def __init__(self) -> None:
        self._values = np.zeros(_MOST - _LEAST + 1, np.int64)  # of arrays of up to 16 bits
        self._bins = np.zeros(_BINS + 2, np.int64)  # of others: below, bins, above
        self._moments: list[tuple[int, float, float]] = []  # of others: voxels, mean, squared deviations
        self._limits: list[float] = []
        self._arrays = self._left_out = self._failed = 0
        self._failures: list[tuple[int, str]] = []

    def fail(self, sample: int, reason: str) -> None:
        """Note an array that does not decode."""
        self._failed += 1
        self._failures = sorted([*self._failures, (sample, reason)])[:_KEPT]

    def count(self, array: npt.NDArray[Any]) -> None:
        """Count the voxels of an array of real numbers, of any shape."""
        self._arrays += 1
        flat = array.reshape(-1)
        for i in range(0, len(flat), _AT_ONCE):
            part = flat[i : i + _AT_ONCE]
            if part.dtype.kind in "iub" and part.dtype.itemsize <= 2:
                counts = np.bincount(part.astype(np.int64) - _LEAST)
                self._values[: len(counts)] += counts
            else:
                self._count_wide(part.astype(np.float64))

    def _count_wide(self, part: npt.NDArray[np.float64]) -> None:
        known = part[np.abs(part) <= _BELIEVED]  # which NaN is not
        self._left_out += len(part) - len(known)
        if not len(known):
            return
        mean = float(known.mean())
        self._moments.append((len(known), mean, float(np.square(known - mean).sum())))
        limits = [*self._limits, float(known.min()), float(known.max())]
        self._limits = [min(limits), max(limits)]
        self._bins += np.bincount(_bin_of(known), minlength=_BINS + 2)

    def add(self, other: HuCounts) -> None:
        """Add another task's counts."""
        self._values += other._values
        self._bins += other._bins
        self._moments += other._moments
        limits = self._limits + other._limits
        self._limits = [min(limits), max(limits)] if limits else []
        self._arrays += other._arrays
        self._left_out += other._left_out
        self._failed += other._failed
        self._failures = sorted([*self._failures, *other._failures])[:_KEPT]

    def result(self) -> Hounsfield:
        """All that was counted, together."""
        values = np.flatnonzero(self._values)
        counts = self._values[values]
        hu = values + _LEAST
        bins = self._bins + np.bincount(_bin_of(hu), counts, _BINS + 2).astype(np.int64)
        limits = self._limits + [float(end) for end in hu[[0, -1]]] if len(hu) else self._limits
        moments = self._moments + ([_moments(hu.tolist(), counts.tolist())] if len(hu) else [])
        voxels = sum(n for n, _, _ in moments)
        mean = std = None
        if voxels:
            mean = math.fsum(n * each for n, each, _ in moments) / voxels
            std = math.sqrt(math.fsum(m2 + n * (each - mean) ** 2 for n, each, m2 in moments) / voxels)
        below, *inside, above = bins.tolist()
        edges = range(LOWEST_HU, HIGHEST_HU, BIN_HU)
        return Hounsfield(
            arrays=self._arrays,
            voxels=voxels,
            left_out=self._left_out,
            min=min(limits, default=None),
            max=max(limits, default=None),
            mean=mean,
            std=std,
            below=below,
            bins=tuple(Bin(low, low + BIN_HU, n) for low, n in zip(edges, inside, strict=True)),
            above=above,
            undecodable=tuple(self._failures),
            failed=self._failed,
        )


def _bin_of(hu: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """0 below, 1 and on within, the last above."""
    bins: npt.NDArray[np.int64] = (np.clip((hu - LOWEST_HU) // BIN_HU, -1, _BINS) + 1).astype(np.int64)
    return bins


def _moments(values: list[int], counts: list[int]) -> tuple[int, float, float]:
    """(n, mean, squared deviations), by exact integers."""
    n = sum(counts)
    first = sum(value * count for value, count in zip(values, counts, strict=True))
    second = sum(value * value * count for value, count in zip(values, counts, strict=True))
    return n, first / n, (n * second - first * first) / n


def ct_stats(packed: PackedSplit, hu: HuCounts | None) -> CtStats | None:
    """Statistics of a split, its voxels already counted; None where it has no slices or volumes.

    Reads one record of each series.

    Raises:
        ShardError: a shard is truncated or damaged.
    """
    members: dict[str, list[int]] = {}
    for sample in np.flatnonzero(has_array(packed)).tolist():
        members.setdefault(series_of(packed.key(sample), packed.fields), []).append(sample)
    if not members:
        return None
    records = {name: _record(packed, samples[0]) for name, samples in members.items()}
    packed.close()
    facts = list(records.values())
    slices = [_slices(records[name], len(samples), packed) for name, samples in members.items()]
    rows, columns = zip(*map(pixel_spacing, facts), strict=True)
    known = np.array([count for count in slices if count is not None], np.int64)
    return CtStats(
        samples=sum(map(len, members.values())),
        series=len(members),
        patients=len({one["patient"] for one in facts if isinstance(one.get("patient"), str)}),
        units=dict(Counter("HU" if one.get("units") == "HU" else "unknown" for one in facts).most_common()),
        slices=spread(known) if len(known) else None,
        row_mm=_range(rows),
        column_mm=_range(columns),
        slice_mm=_range(tuple(millimetres(one.get("slice_spacing_mm")) for one in facts)),
        hu=(hu or HuCounts()).result(),
    )


def _record(packed: PackedSplit, sample: int) -> Mapping[str, Any]:
    try:
        return record_of(packed, sample)
    except BadArrayError:
        return {}


def _slices(record: Mapping[str, Any], samples: int, packed: PackedSplit) -> int | None:
    """How many slices a series has: its samples, or what its volume's record says."""
    if any(field.startswith("ct.") for field in packed.fields):
        return samples
    count = record.get("n_slices")
    return count if isinstance(count, int) and 0 < count < 1 << 31 else None


def _range(values: tuple[float | None, ...]) -> Range | None:
    known = sorted(value for value in values if value is not None)
    return Range(known[0], known[(len(known) - 1) // 2], known[-1]) if known else None
