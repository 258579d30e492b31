"""Crops: one rectangle of a picture, and what it does to the picture's masks, boxes and orientation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packer.errors import UsageError


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle of a picture, and whether it is mirrored.

    Attributes:
        top: first row, pixels from the picture's upper edge; may be fractional.
        left: first column, pixels from the picture's left edge; may be fractional.
        height: rows.
        width: columns.
        flip: mirror left-right after cropping.
    """

    top: float
    left: float
    height: float
    width: float
    flip: bool = False


class Turn(NamedTuple):
    """How stored rows and columns become upright ones: mirror up-down, mirror left-right, then transpose."""

    up_down: bool
    left_right: bool
    transpose: bool


#: EXIF orientation 1…8 (CIPA DC-008, tag 0x0112), at index 1…8.
TURNS = (
    Turn(False, False, False),
    Turn(False, False, False), Turn(False, True, False), Turn(True, True, False), Turn(True, False, False),
    Turn(False, False, True), Turn(True, False, True), Turn(True, True, True), Turn(False, True, True),
)


def upright(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """A view of stored pixels (H, W, …) as they are meant to be seen."""
    up_down, left_right, transpose = TURNS[orientation]
    view = pixels[:: -1 if up_down else 1, :: -1 if left_right else 1]
    return view.swapaxes(0, 1) if transpose else view


def stored_crop(crop: Crop, orientation: int, height: int, width: int) -> Crop:
    """Where a crop of the upright picture lies among the stored pixels; (height, width) are the stored size."""
    if orientation == 1:
        return crop
    up_down, left_right, transpose = TURNS[orientation]
    top, left, rows, columns = crop.top, crop.left, crop.height, crop.width
    if transpose:
        top, left, rows, columns = left, top, columns, rows
    if up_down:
        top = height - top - rows
    if left_right:
        left = width - left - columns
    return Crop(top, left, rows, columns, crop.flip)


def apply_to_mask(mask: npt.NDArray[Any], crop: Crop, size: tuple[int, int]) -> npt.NDArray[Any]:
    """The part of a mask that belongs to a crop of its picture.

    Each output pixel takes the value of the mask pixel under its centre (as Pillow's NEAREST), so no new
    values arise.

    Args:
        mask: (H, W) or (H, W, C), any dtype, as large as the (upright) picture.
        crop: what the transform returned for the picture.
        size: (height, width) of the result, that of the transformed picture.

    Returns:
        (height, width[, C]) of the same dtype, a new array.

    >>> apply_to_mask(np.array([[1, 2, 3]]), Crop(0, 1, 1, 2, flip=True), (1, 4)).tolist()
    [[3, 3, 2, 2]]
    """
    rows = _under_centres(crop.top, crop.height, size[0], mask.shape[0])
    columns = _under_centres(crop.left, crop.width, size[1], mask.shape[1])
    if crop.flip:
        columns = columns[::-1]
    return mask[rows[:, None], columns[None, :]]


def _under_centres(start: float, extent: float, size: int, limit: int) -> npt.NDArray[np.int64]:
    places = np.floor(start + (np.arange(size) + 0.5) * (extent / size))
    pixels: npt.NDArray[np.int64] = places.clip(0, limit - 1).astype(np.int64)
    return pixels


def apply_to_boxes(
    boxes: npt.NDArray[Any],
    crop: Crop,
    *,
    image_size: tuple[int, int],
    size: tuple[int, int],
    layout: Literal["yolo", "xyxy"] = "yolo",
    min_visible: float = 0.1,
    min_pixels: float = 1.0,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Object boxes after a crop of their picture: moved, scaled, mirrored, clipped to the crop.

    A box is dropped when less than `min_visible` of its area lies in the crop, or when what is left is
    narrower or lower than `min_pixels` in the output.

    Args:
        boxes: (N, ≥ 5), one row an object: class, then four numbers; further columns are kept as they are.
            "yolo": centre x, centre y, width, height as fractions of the picture (in and out).
            "xyxy": left, top, right, bottom in pixels (of the picture in, of the output out).
        crop: what the transform returned for the picture.
        image_size: (height, width) of the (upright) picture, pixels.
        size: (height, width) of the transformed picture, pixels.
        layout: which of the two.
        min_visible: fraction of the area, 0 to 1.
        min_pixels: side length in output pixels.

    Returns:
        The boxes that are left, float32 (M, ≥ 5), in the order they came in; and bool (N,), which those are, for
        whatever else is known of each object.

    Raises:
        UsageError: another layout, or fewer than five columns.

    >>> apply_to_boxes(np.array([[7, 10, 10, 30, 20.0]]), Crop(0, 20, 40, 40), image_size=(40, 80),
    ...                size=(20, 20), layout="xyxy")[0].tolist()
    [[7.0, 0.0, 5.0, 5.0, 10.0]]
    """
    rows = np.array(boxes, np.float64).reshape(len(boxes), -1 if len(boxes) else 5)
    if rows.shape[1] < 5:
        raise UsageError(f"boxes need 5 columns (class and 4 numbers), got an array of shape {np.shape(boxes)}")
    if layout not in ("yolo", "xyxy"):
        raise UsageError(f"layout of boxes is 'yolo' or 'xyxy', not {layout!r}")
    low, high = rows[:, 1:3], rows[:, 3:5]
    if layout == "yolo":
        low, high = (low - high / 2) * image_size[::-1], (low + high / 2) * image_size[::-1]
    scale = np.array([size[1] / crop.width, size[0] / crop.height])
    low, high = (low - (crop.left, crop.top)) * scale, (high - (crop.left, crop.top)) * scale
    if crop.flip:
        low[:, 0], high[:, 0] = size[1] - high[:, 0], size[1] - low[:, 0]
    area = (high - low).prod(1)
    low, high = low.clip(0, size[::-1]), high.clip(0, size[::-1])
    sides = high - low
    keep = (sides >= min_pixels).all(1) & (sides.prod(1) >= min_visible * area) & (area > 0)
    if layout == "yolo":
        low, high = (low + high) / 2 / size[::-1], sides / size[::-1]
    rows[:, 1:3], rows[:, 3:5] = low, high
    return rows[keep].astype(np.float32), keep
