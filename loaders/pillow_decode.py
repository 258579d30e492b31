"""Decode with Pillow: every format but plain JPEG, and the JPEGs that the fast decoder refuses.

What Pillow gives is the reference for what a picture looks like, with three differences: 16-bit grey
is scaled to 8 bits rather than clipped to white, a palette goes by way of RGBA, and every failure is a `BadImageError`.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from packer.errors import BadImageError, UsageError
from packer.imaging import probe

# What Pillow's readers raise on damaged files. Warnings are here for programs that turn them into errors.
_FAILURES = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error,
             zlib.error, Warning)
_PLUG_INS = {"heif": "pillow-heif (pip install pillow-heif, then pillow_heif.register_heif_opener())",
             "avif": "AVIF (Pillow 11.3 and newer have it)"}
MODES = ("RGB", "L", "I;16", None)


def open_image(data: bytes | bytearray | memoryview, max_pixels: int) -> Image.Image:
    """Read the header; pixels are decoded when asked for. A TIFF with an orientation comes upright.

    Raises:
        BadImageError: no format that Pillow knows, damaged, or more than `max_pixels` pixels.
    """
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        info = probe(data)  # says more of what the bytes are, mostly by raising
        plug_in = _PLUG_INS.get(info.format, "its plug-in")
        raise BadImageError(f"damaged {info.format}, or Pillow lacks {plug_in}") from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"{error}; a larger limit is PIL.Image.MAX_IMAGE_PIXELS") from error
    except _FAILURES as error:
        raise BadImageError(f"cannot read the header: {error}") from error
    check_pixels(image.height, image.width, max_pixels)
    if image.format == "TIFF" and exif_orientation(image) != 1:
        _load(image)  # Pillow turns TIFFs upright by itself; only then is the size that of the pixels
    return image


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except _FAILURES as error:
        raise BadImageError(f"cannot decode: {error}") from error


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Raise `BadImageError` for a picture of no pixels or of more than `max_pixels`."""
    if not 0 < height * width <= max_pixels:
        raise BadImageError(f"claims {width}×{height} pixels; the limit (max_pixels) is {max_pixels:,}")


def exif_orientation(image: Image.Image) -> int:
    """The orientation tag, 1 to 8; 1 where it is absent or damaged."""
    try:
        value = image.getexif().get(0x0112, 1)
    except _FAILURES:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def to_array(image: Image.Image, mode: str | None) -> npt.NDArray[Any]:
    """The first frame's pixels as a new array (H, W, C), not turned upright.

    Args:
        image: from `open_image`.
        mode: "RGB" or "L": uint8, C = 3 or 1. "I;16": uint16, C = 1, 8-bit samples times 257. None: as the
            file holds them (palette indices, 16 bits, alpha, CMYK); 1-bit pixels become 0 and 255.

    Raises:
        BadImageError: the pixels are damaged or cut short, or their range is unknown.
        UsageError: another mode.
    """
    if mode not in MODES:
        raise UsageError(f"mode is one of {', '.join(map(repr, MODES))}, not {mode!r}")
    _load(image)
    try:
        pixels = _convert(image, mode)
    except _FAILURES as error:
        raise BadImageError(f"cannot convert {image.mode} to {mode}: {error}") from error
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _convert(image: Image.Image, mode: str | None) -> npt.NDArray[Any]:
    if mode is None:
        if image.mode == "1":
            return np.array(image.convert("L"))
        pixels = np.array(image)
        return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if image.mode.startswith("I") or image.mode == "F":
        grey = _as_16_bits(np.asarray(image), image.mode)
        if mode == "I;16":
            return grey
        eight = ((grey.astype(np.uint32) + 128) // 257).astype(np.uint8)
        return np.repeat(eight[..., None], 3, axis=2) if mode == "RGB" else eight
    if image.mode in ("P", "PA"):  # a palette may hold alpha, which Pillow warns of when it goes straight to RGB
        image = image.convert("RGBA")
    if mode == "RGB":
        return np.array(image.convert("RGB"))
    grey = np.array(image.convert("L"))
    return grey.astype(np.uint16) * np.uint16(257) if mode == "I;16" else grey


def _as_16_bits(samples: npt.NDArray[Any], mode: str) -> npt.NDArray[np.uint16]:
    if mode == "F" or samples.min() < 0 or samples.max() > 65535:
        raise BadImageError(f"{samples.dtype} samples from {samples.min()} to {samples.max()} have no range that "
                            "is known; decode with mode=None and scale them")
    return samples.astype(np.uint16)
