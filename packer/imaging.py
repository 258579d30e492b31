"""Knowing a picture by its first and last bytes, without decoding it.

`probe` names the format and the size, and refuses what can never be an image: other bytes, a file
cut short, a header that claims more pixels than `MAX_PIXELS`. It reads structure only (some 0.5 µs
for an ordinary JPEG), so packing can afford it for every file; damage inside the compressed data
is found by decoding (`packer verify --deep`).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from packer.errors import BadImageError
from packer.image_headers import MAX_PIXELS, Buffer, ImageInfo, read_structure

if TYPE_CHECKING:
    from PIL.Image import Image

# The way nearly every encoder begins: JFIF, one or two quantisation tables, the frame header.
_PLAIN_JPEG = re.compile(
    rb"\xff\xd8\xff\xe0\x00\x10.{14}\xff\xdb(?:\x00\x84.{130}|\x00\x43.{65}(?:\xff\xdb\x00\x43.{65})?)"
    rb"\xff[\xc0-\xc2]\x00[\x0b\x11]\x08(....)",
    re.DOTALL,
)


def probe(data: Buffer) -> ImageInfo:
    """Name format and size of a whole encoded image.

    Args:
        data: all of the file's bytes.

    Returns:
        The format by content (never by name), and the stored size in pixels; (−1, −1) for formats
        whose size needs a decoder (AVIF, HEIF and TIFF variants).

    Raises:
        BadImageError: not an image, cut short, of no size, or of more than `MAX_PIXELS` pixels.

    >>> probe(b"P5 7 3 255 " + bytes(7 * 3))
    ImageInfo(format='netpbm', height=3, width=7)
    """
    plain = _PLAIN_JPEG.match(data)
    if plain and data[-2:] == b"\xff\xd9":
        info = ImageInfo("jpeg", *struct.unpack(">HH", plain[1]))
    else:
        info = read_structure(data)
        if min(info[1:]) < 0:  # a number alone would say less than none
            return info._replace(height=-1, width=-1)
    if info.height * info.width > MAX_PIXELS:
        raise BadImageError(
            f"claims {info.width}×{info.height} pixels, more than the limit of {MAX_PIXELS:,}: "
            "a decompression bomb, or scale it down first"
        )
    if info.height == 0 or info.width == 0:
        raise BadImageError(f"claims {info.width}×{info.height} pixels: no picture")
    return info


def probe_all(
    views: Sequence[memoryview], look: Callable[[Buffer], ImageInfo] = probe
) -> tuple[npt.NDArray[np.int32], dict[int, BadImageError]]:
    """`probe` for many images, the ordinary JPEGs among them without a Python object each.

    Args:
        views: encoded images.
        look: what to call for each of the others: `probe`, `decode_check`.

    Returns:
        int32 (n, 2): height and width of each, −1 where unknown; and by position what is wrong with the bad ones.
    """
    sizes = np.full((len(views), 2), -1, np.int32)
    bad: dict[int, BadImageError] = {}
    plain: list[int] = []
    found: list[bytes] = []
    match = _PLAIN_JPEG.match if look is probe else _never
    for i, view in enumerate(views):
        header = match(view)
        if header is not None and view[-1] == 0xD9 and view[-2] == 0xFF:
            plain.append(i)
            found.append(header[1])
            continue
        try:
            sizes[i] = look(view)[1:]
        except BadImageError as error:
            bad[i] = error.with_traceback(None)  # whose frames would hold on to the views
    sizes[plain] = np.frombuffer(b"".join(found), ">u2").reshape(-1, 2)
    pixels = sizes[:, 0].astype(np.int64) * sizes[:, 1]
    for i in np.flatnonzero((pixels == 0) | (pixels > MAX_PIXELS)).tolist():
        try:
            probe(views[i])
        except BadImageError as error:
            bad[i] = error.with_traceback(None)  # whose frames would hold on to the views
    return sizes, bad


def _never(_data: Buffer) -> None:
    return None


#: What Pillow's readers let through on damaged files, besides its `DecompressionBombError`.
PILLOW_RAISES = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, AttributeError, RuntimeError,
    struct.error, zlib.error,
)  # fmt: skip


@contextmanager
def opened(data: Buffer) -> Iterator[tuple[ImageInfo, Image]]:
    """What `probe` says, and the first frame as Pillow decodes it; closed at the end.

    What Pillow raises on damaged pictures, here or in the body of the `with`, becomes a BadImageError.

    Raises:
        BadImageError: `probe` refuses it, or Pillow cannot decode it whole.
    """
    import io
    import warnings

    import PIL.Image

    info = probe(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a corrupt EXIF block does not damage pixels
            with PIL.Image.open(io.BytesIO(data)) as image:
                image.load()
                yield info, image
    except PIL.UnidentifiedImageError as error:  # its message holds an address in memory
        raise BadImageError(f"{info.format} that no installed decoder reads") from error
    except MemoryError as error:
        bytearray(4 * info.height * info.width)  # raises again where memory is short, and not the file damaged
        raise BadImageError(f"{info.format} that does not decode: its layout cannot be") from error
    except (*PILLOW_RAISES, PIL.Image.DecompressionBombError) as error:
        raise BadImageError(f"{info.format} that does not decode: {error}") from error


def decode_check(data: Buffer) -> ImageInfo:
    """`probe`, and decode every pixel of the first frame.

    Raises:
        BadImageError: `probe` refuses it, or Pillow cannot decode it whole.
    """
    with opened(data) as (info, image):
        return info if info.height > 0 else info._replace(height=image.height, width=image.width)


__all__ = ["MAX_PIXELS", "PILLOW_RAISES", "Buffer", "ImageInfo", "decode_check", "opened", "probe", "probe_all"]
