"""Encoded bytes to pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loaders.geometry import Crop

MAX_PIXELS = 178_956_970
Affine = tuple[torch.Tensor, torch.Tensor]
"""(scale, bias), float32 (3, 1, 1): normalised = pixel * scale + bias."""


def affine(mean: Sequence[float], std: Sequence[float]) -> Affine:
    """(scale, bias) for `(pixel / 255 - mean) / std`."""
    raise NotImplementedError


def image_size(data: bytes | memoryview, *, orient: bool = False) -> tuple[int, int]:
    """(height, width) from the header alone."""
    raise NotImplementedError


def decode_image(
    data: bytes | memoryview, *, mode: str | None = "RGB", orient: bool = False, max_pixels: int = MAX_PIXELS
) -> npt.NDArray[np.generic]:
    """The whole image as (H, W, C)."""
    raise NotImplementedError


def decode_crop_into(
    data: bytes | memoryview, box: Crop, out: torch.Tensor, *, normalize: Affine | None = None,
    orient: bool = False, dct_scaling: bool = True, max_pixels: int = MAX_PIXELS,
) -> None:
    """Decode only what `box` needs, resize to `out` (3, h, w), uint8 or float32 (normalised)."""
    raise NotImplementedError


def decode_many_into(
    datas: Sequence[bytes | memoryview], out: torch.Tensor, *, normalize: Affine | None = None
) -> None:
    """Decode pictures that all are exactly (H, W) into `out` (B, 3, H, W): the fast path for small pictures."""
    raise NotImplementedError
