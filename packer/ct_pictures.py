"""A CT slice as a small picture for people: windowed to grey, the border of its mask in colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer.ct_samples import array_field, pixel_spacing, record_of, voxels
from packer.errors import BadArrayError
from packer.packed import PackedSplit

if TYPE_CHECKING:
    from PIL.Image import Image

CENTRE_HU, WIDTH_HU = 40, 400  # soft tissue
OUTLINE_RGB = (255, 64, 48)

_MOST_STRETCHED = 8.0  # pixels longer than this are drawn as if they were so long


class SlicePicture(NamedTuple):
    """A slice to look at.

    Attributes:
        rgb: mode RGB; pixels as wide and high in proportion as they are in the patient.
        caption: which slice of which series it is, and where, a line each.
        window: how its values became grey.
        pixels: (height, width) as stored.
    """

    rgb: Image
    caption: tuple[str, ...]
    window: str
    pixels: tuple[int, int]


def slice_picture(packed: PackedSplit, sample: int, short_side: int, long_side: int) -> SlicePicture:
    """A sample's slice, or the middle one of its volume, shrunk to fit the sides.

    Args:
        packed: the split.
        sample: number of a sample that has a slice or a volume.
        short_side: pixels at most; smaller slices keep their size.
        long_side: pixels at most.

    Raises:
        BadArrayError: its array, its mask or its record is damaged, or they do not fit each other.
        ShardError: a shard is truncated or damaged.

    >>> slice_picture(dataset["train"], 0, 144, 320).rgb.size                # doctest: +SKIP
    (144, 144)
    """
    from PIL.Image import Resampling, fromarray

    record = record_of(packed, sample)
    field = array_field(packed, sample)
    volume = voxels(packed, sample, field or "ct.npy")
    at = volume.shape[0] // 2
    hounsfield = record.get("units", "HU") == "HU"
    grey = windowed(volume[at], hounsfield=hounsfield)
    size = _size(grey.shape, record, short_side, long_side)
    rgb = np.repeat(np.asarray(fromarray(grey).resize(size, Resampling.LANCZOS))[:, :, None], 3, axis=2)
    mask = next((name for name in packed.fields if name in ("mask.npy", "mask.npy.zst")), None)
    if mask is not None and packed.rows[sample][f"{mask}:length"] >= 0:
        region = voxels(packed, sample, mask)
        if region.shape != volume.shape:
            raise BadArrayError(f"{mask} has the shape {region.shape[1:]}, {field} {volume.shape[1:]}"
                                if len(region) == len(volume) else f"{mask} has {len(region)} slices, "
                                f"{field} {len(volume)}")  # fmt: skip
        rgb[border(shrink(region[at] != 0, (size[1], size[0])))] = OUTLINE_RGB
    window = f"window {CENTRE_HU}/{WIDTH_HU} HU" if hounsfield else "from least to greatest value"
    return SlicePicture(fromarray(rgb), _caption(record, at, len(volume)), window, (grey.shape[0], grey.shape[1]))


def windowed(values: npt.NDArray[Any], *, hounsfield: bool) -> npt.NDArray[np.uint8]:
    """Values (H, W) as grey, uint8: HU through the window, others from their least to their greatest.

    >>> windowed(np.array([[-160, 40, 240, 3000]]), hounsfield=True).tolist()
    [[0, 128, 255, 255]]
    """
    low, high = CENTRE_HU - WIDTH_HU / 2, CENTRE_HU + WIDTH_HU / 2
    wide = values.astype(np.float64)
    known = np.isfinite(wide)
    if not hounsfield and known.any():
        low, high = float(wide[known].min()), float(wide[known].max())
    wide[~known] = low
    # Halved, for float64's own limits would be too far apart.
    share = (np.clip(wide, low, high) / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)
    return np.floor(share * 255 + 0.5).astype(np.uint8)


def shrink(region: npt.NDArray[np.bool_], shape: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """A region (H, W) on a grid of another shape. What is small stays: one pixel of it is enough.

    >>> shrink(np.eye(4, dtype=bool), (2, 2)).tolist()
    [[True, False], [False, True]]
    """
    for axis, length in enumerate(shape):
        starts = np.arange(length) * region.shape[axis] // length
        if length < region.shape[axis]:
            region = np.logical_or.reduceat(region, starts, axis=axis)
        else:
            region = region.take(starts, axis=axis)
    return region


def border(region: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Those pixels of a region (H, W) with a side on the outside of it, or of the picture.

    >>> border(np.ones((3, 3), bool)).astype(int).tolist()
    [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
    """
    around = np.pad(region, 1)
    inside = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    edge: npt.NDArray[np.bool_] = region & ~inside
    return edge


def _size(shape: tuple[int, ...], record: Mapping[str, Any], short_side: int, long_side: int) -> tuple[int, int]:
    """(width, height) of the picture."""
    row_mm, column_mm = pixel_spacing(record)
    ratio = row_mm / column_mm if row_mm and column_mm else 1.0
    ratio = min(max(ratio, 1 / _MOST_STRETCHED), _MOST_STRETCHED)
    height, width = shape[0] * max(ratio, 1.0), shape[1] * max(1 / ratio, 1.0)
    scale = min(short_side / min(height, width), long_side / max(height, width), 1.0)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def _caption(record: Mapping[str, Any], at: int, depth: int) -> tuple[str, ...]:
    """Which series, which slice of it, and where; no more of the record than that."""
    index, count, position = record.get("index"), record.get("n_slices"), record.get("position_mm")
    if depth > 1:
        positions = record.get("positions")
        index, count = at, depth
        position = positions[at] if isinstance(positions, list) and len(positions) == depth else None
    lines: list[str] = []
    if isinstance(series := record.get("series"), str):
        lines.append(series[:64])
    if isinstance(index, int) and isinstance(count, int) and 0 <= index < count < 1 << 31:
        lines.append(f"slice {index} of {count}")
    if isinstance(position, int | float) and abs(position) < 1e6:
        lines.append(f"{position:.1f} mm")
    return tuple(lines)
