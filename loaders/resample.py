"""Pixels to the tensor: resize with antialiasing, mirror, turn, lay out as channels, normalise.

The resize is torch's for uint8, a port of Pillow's own arithmetic: the result is within one level of
`Image.resize(..., BILINEAR)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loaders.geometry import TURNS, Crop, upright

Pixels = npt.NDArray[np.uint8]


class Affine(NamedTuple):
    """Per channel, `pixel * scale + bias`: float32 tensors of shape (3, 1, 1), for pixels 0 to 255."""

    scale: torch.Tensor
    bias: torch.Tensor


def affine(mean: Sequence[float], std: Sequence[float]) -> Affine:
    """The map that normalises: mean and standard deviation on the scale 0 to 1, as torchvision takes them.

    >>> affine(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).bias.flatten().tolist()
    [-1.0, -1.0, -1.0]
    """
    means, stds = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    return Affine((1 / (255 * stds)).float(), (-means / stds).float())


class Span(NamedTuple):
    """One axis of a resize: pixels start…stop, enlarged by `factor`, without the first `skip` results.

    Attributes:
        start: first pixel.
        stop: pixel behind the last.
        pad: how often the first pixel is repeated before itself.
        skip: results to drop.
        factor: pixels out per pixel in.
        exact: all of the result is wanted, so its size is given rather than the factor.
    """

    start: int
    stop: int
    pad: int
    skip: int
    factor: float
    exact: bool


_UP = 1 + 1e-9  # the size of a resize by a factor is rounded down: never let it come out one short


def span(start: float, extent: float, size: int, limit: int) -> Span:
    """Which of an axis' `limit` pixels to resize so that `extent` of them from `start` on become `size`.

    Whole pixels are resized alone, as Pillow resizes a crop. A fractional extent is part of a larger resize (as a
    centre crop after a resize is, or a crop of a picture decoded at half its size): its neighbours take part, and
    the first pixel is one that falls onto the grid of the result, to within 1/100 of a pixel where 64 candidates
    hold such a one. It may lie before the edge.
    """
    if start % 1 == 0 and extent % 1 == 0:
        return Span(int(start), int(start + extent), 0, 0, size / extent * _UP, exact=True)
    step = extent / size  # pixels in per pixel out
    reach = max(1.0, step)  # half the triangle filter's width
    latest = max(0, math.floor(start - reach))
    first, miss = latest, 1.0
    for candidate in range(latest, latest - 64, -1):
        offset = (start - candidate) / step
        distance = abs(offset - round(offset))
        if distance < miss:
            first, miss = candidate, distance
            if miss < 0.01:
                break
    skip = round((start - first) / step)
    stop = min(limit, math.ceil(start + extent + reach))
    factor = max(1 / step, (skip + size) / (stop - first)) * _UP
    return Span(max(first, 0), stop, max(-first, 0), skip, factor, exact=False)


def spans(crop: Crop, size: tuple[int, int], limits: tuple[int, int], scale: int = 1) -> tuple[Span, Span]:
    """Rows and columns to resize for a crop of a picture that is decoded at 1/scale; limits: its (H, W) then."""
    return (
        span(crop.top / scale, crop.height / scale, size[0], limits[0]),
        span(crop.left / scale, crop.width / scale, size[1], limits[1]),
    )


def resize(pixels: Pixels, rows: Span, columns: Span, size: tuple[int, int]) -> Pixels:
    """Resize the pixels of two spans, (H, W, 3) uint8, to `size` = (height, width); may return a view."""
    exact = rows.exact and columns.exact
    if exact and pixels.shape[:2] == size:
        return pixels
    # Packed rows of interleaved channels take torch's vectorised path; a view of a larger picture does not.
    if rows.pad or columns.pad:
        pixels = np.pad(pixels, ((rows.pad, 0), (columns.pad, 0), (0, 0)), mode="edge")
    packed = torch.from_numpy(np.ascontiguousarray(pixels))
    tensor = packed.unsqueeze(0).permute(0, 3, 1, 2)  # in this order the strides say that channels are last
    if exact:
        resized = torch.nn.functional.interpolate(tensor, size=size, mode="bilinear", antialias=True)
    else:
        resized = torch.nn.functional.interpolate(
            tensor, scale_factor=(rows.factor, columns.factor), mode="bilinear", antialias=True,
            recompute_scale_factor=False,
        )
    top, left = rows.skip, columns.skip
    return resized[0, :, top : top + size[0], left : left + size[1]].permute(1, 2, 0).numpy()


def store(
    pixels: Pixels, out: torch.Tensor, *, orientation: int = 1, flip: bool = False, normalize: Affine | None = None
) -> None:
    """Write stored pixels (H, W, 3) upright into `out` (3, h, w): uint8, or a float type (normalised).

    Mirroring, turning and the change to channels first are one strided copy. `out` may have any strides; one of
    channels-last memory takes the pixels without rearranging.
    """
    if out.stride(0) == 1 and orientation == 1:  # channels last
        channels_last = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
        out.copy_(channels_last.flip(-1) if flip else channels_last)
    else:
        view = upright(pixels, orientation)
        planes = (view[:, ::-1] if flip else view).transpose(2, 0, 1)
        if out.dtype == torch.uint8:
            np.copyto(out.numpy(), planes)
            return
        # Casting and scaling run at full speed where the channels are packed.
        out.copy_(torch.from_numpy(np.ascontiguousarray(planes)))
    if normalize is not None:
        out.mul_(normalize.scale).add_(normalize.bias)


def stored_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """(height, width) before turning upright, given that after."""
    return size[::-1] if TURNS[orientation].transpose else size
