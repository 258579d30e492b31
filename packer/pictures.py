"""A sample's picture as RGB pixels, as loaders give it; for statistics and thumbnails, not for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packer.errors import BadImageError
from packer.imaging import PILLOW_RAISES, Buffer, opened
from packer.sample import is_image_field

if TYPE_CHECKING:
    from PIL.Image import Image


class Picture(NamedTuple):
    """A decoded picture.

    Attributes:
        format: by content, as `packer.imaging.probe` names it.
        mode: Pillow's name for the pixels as stored: `RGB`, `L`, `CMYK`, `P`, `I;16` …
        rgb: (H, W) of mode RGB, as stored (before any EXIF orientation), without alpha.
        orientation: the EXIF tag, 1 to 8.
    """

    format: str
    mode: str
    rgb: Image
    orientation: int


def picture_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """The fields that hold the picture itself (`jpg`, not `mask.png`), or else every image field.

    >>> picture_fields(["jpg", "mask.png", "cls", "png"]), picture_fields(["left.jpg"])
    (('jpg', 'png'), ('left.jpg',))
    """
    images = tuple(field for field in fields if is_image_field(field))
    return tuple(field for field in images if "." not in field) or images


def decode_rgb(data: Buffer) -> Picture:
    """Decode the first frame. 16-bit grey is scaled to 8 bits, never clipped; CMYK and palettes are converted.

    Raises:
        BadImageError: no image, damaged, too large, or of samples whose range is unknown (float, 32 bits).
    """
    with opened(data) as (info, image):
        return Picture(info.format, image.mode, _rgb(image), _orientation(image))


def _rgb(image: Image) -> Image:
    from PIL.Image import fromarray

    if image.mode.startswith("I") or image.mode == "F":
        samples = np.asarray(image)
        if image.mode == "F" or samples.min() < 0 or samples.max() > 65535:
            raise BadImageError(f"{image.mode} samples from {samples.min()} to {samples.max()}: their range is unknown")
        image = fromarray(((samples.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("P", "PA"):  # a palette may hold alpha, which Pillow warns of when it goes straight to RGB
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
    except PILLOW_RAISES:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
