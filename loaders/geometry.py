"""Crops: one rectangle of a picture, and the same rectangle of its masks and boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle in pixels of the (upright) picture; may be fractional; `flip` mirrors it left-right."""

    top: float
    left: float
    height: float
    width: float
    flip: bool = False


def apply_to_mask(mask: npt.NDArray[np.generic], crop: Crop, size: tuple[int, int]) -> npt.NDArray[np.generic]:
    """The crop of a mask (H, W) or (H, W, C), nearest neighbour, to `size` = (height, width); dtype kept."""
    raise NotImplementedError


def apply_to_boxes(
    boxes: npt.NDArray[np.float32], crop: Crop, *, image_size: tuple[int, int], size: tuple[int, int],
    layout: str = "yolo", min_visible: float = 0.1, min_pixels: float = 1.0,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Boxes (N, 5) class + cx, cy, w, h normalised ("yolo") or x0, y0, x1, y1 pixels ("xyxy") -> (kept boxes, keep)."""
    raise NotImplementedError
