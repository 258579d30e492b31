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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packer.errors import BadImageError

Buffer = bytes | bytearray | memoryview

#: Twice Pillow's warning limit: where Pillow itself refuses a picture as a decompression bomb.
MAX_PIXELS = 178_956_970


class ImageInfo(NamedTuple):
    """What a picture's header says. Size as stored, before any EXIF orientation."""

    format: str
    height: int
    width: int


# The way nearly every encoder begins: JFIF, one or two quantisation tables, the frame header.
_PLAIN_JPEG = re.compile(
    rb"\xff\xd8\xff\xe0\x00\x10.{14}\xff\xdb(?:\x00\x84.{130}|\x00\x43.{65}(?:\xff\xdb\x00\x43.{65})?)"
    rb"\xff[\xc0-\xc2]\x00[\x0b\x11]\x08(....)",
    re.DOTALL,
)
_FRAME_HEADERS = frozenset((0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF))


def probe(data: Buffer) -> ImageInfo:
    """Name format and size of a whole encoded image.

    Args:
        data: all of the file's bytes.

    Returns:
        The format by content (never by name), and the stored size in pixels; (−1, −1) for formats
        whose size needs a decoder (AVIF, HEIF and TIFF variants).

    Raises:
        BadImageError: not an image, cut short, of no size, or of more than `MAX_PIXELS` pixels.

    >>> probe(b"GIF89a" + bytes([7, 0, 3, 0, 0, 0, 0]) + b",;")
    ImageInfo(format='gif', height=3, width=7)
    """
    plain = _PLAIN_JPEG.match(data)
    if plain and data[-2:] == b"\xff\xd9":
        info = ImageInfo("jpeg", *struct.unpack(">HH", plain[1]))
    else:
        info = _probe_slowly(data)
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
            bad[i] = error
    sizes[plain] = np.frombuffer(b"".join(found), ">u2").reshape(-1, 2)
    pixels = sizes[:, 0].astype(np.int64) * sizes[:, 1]
    for i in np.flatnonzero((pixels == 0) | (pixels > MAX_PIXELS)).tolist():
        try:
            probe(views[i])
        except BadImageError as error:
            bad[i] = error
    return sizes, bad


def _never(_data: Buffer) -> None:
    return None


def _probe_slowly(data: Buffer) -> ImageInfo:
    if len(data) == 0:
        raise BadImageError("empty file (0 bytes)")
    head = bytes(data[:32])
    for magic, read in _READERS:
        if magic.match(head):
            try:
                return read(data)
            except (IndexError, struct.error) as error:
                raise BadImageError("truncated: the file ends inside its header") from error
    raise BadImageError(f"not an image that is known here: begins with {_describe(head)}")


def _describe(head: bytes) -> str:
    if not any(head):
        return "zero bytes (an interrupted copy?)"
    if head.startswith(b"\x1f\x8b"):
        return "the gzip magic; unpack it first"
    if head[:12] == b"\x00\x00\x00\x0cJXL \r\n\x87\n" or head.startswith(b"\xff\x0a"):
        return "the JPEG XL magic, which no installed decoder reads"
    if b"\xff\xd8\xff" in head:
        return f"{head.index(bytes((255, 216, 255)))} stray bytes before a JPEG"
    return repr(head[:12])


def _jpeg(data: Buffer) -> ImageInfo:
    at = 2
    size: tuple[int, int] | None = None
    while True:
        if data[at] != 0xFF:
            raise BadImageError(f"damaged JPEG: no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker in (0x01, 0xD8) or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        if marker == 0xD9:
            raise BadImageError("damaged JPEG: it ends before its first scan")
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker in _FRAME_HEADERS and size is None:
            size = struct.unpack_from(">HH", data, at + 5)
        if marker == 0xDA:
            break
        at += 2 + max(length, 2)
    if size is None:
        raise BadImageError("damaged JPEG: no frame header before the first scan")
    # Entropy-coded data never holds FF D9 (FF is followed by 00 there), so any end marker after
    # the first scan header ends a picture, whatever garbage may follow it.
    if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[at:]).rfind(b"\xff\xd9") < 0:
        raise BadImageError("truncated JPEG: no end-of-image marker")
    return ImageInfo("jpeg", *size)


def _png(data: Buffer) -> ImageInfo:
    if bytes(data[12:16]) != b"IHDR":
        raise BadImageError("damaged PNG: the first chunk is not IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    if bytes(data[-8:-4]) != b"IEND":
        at = 8
        while True:
            if at + 8 > len(data):
                raise BadImageError("truncated PNG: no IEND chunk")
            (length,) = struct.unpack_from(">I", data, at)
            if bytes(data[at + 4 : at + 8]) == b"IEND":
                break
            at += 12 + length
    return ImageInfo("png", height, width)


def _gif(data: Buffer) -> ImageInfo:
    width, height = struct.unpack_from("<HH", data, 6)
    if b"\x3b" not in bytes(data[13:][-64:]) and bytes(data).rfind(b"\x00\x3b") < 0:
        raise BadImageError("truncated GIF: no trailer")
    return ImageInfo("gif", height, width)


def _bmp(data: Buffer) -> ImageInfo:
    size, _, start, header = struct.unpack_from("<IIII", data, 2)
    if header == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    if start > len(data) or size > len(data):
        raise BadImageError(f"truncated BMP: {len(data)} of {size} bytes")
    return ImageInfo("bmp", abs(height), abs(width))


def _webp(data: Buffer) -> ImageInfo:
    (size,) = struct.unpack_from("<I", data, 4)
    if size + 8 > len(data):
        raise BadImageError(f"truncated WebP: {len(data)} of {size + 8} bytes")
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", data, 26))
    else:
        raise BadImageError(f"damaged WebP: first chunk {kind!r}")
    return ImageInfo("webp", height, width)


def _tiff(data: Buffer) -> ImageInfo:
    order = "<" if data[0] == 0x49 else ">"
    (version, at) = struct.unpack_from(order + "HI", data, 2)
    if version != 42:  # BigTIFF
        return ImageInfo("tiff", -1, -1)
    (entries,) = struct.unpack_from(order + "H", data, at)
    found = {}
    for i in range(entries):
        tag, kind, _, value = struct.unpack_from(order + "HHII", data, at + 2 + 12 * i)
        if tag in (256, 257):
            found[tag] = value >> 16 if kind == 3 and order == ">" else value
    return ImageInfo("tiff", found.get(257, -1), found.get(256, -1))


def _netpbm(data: Buffer) -> ImageInfo:
    match = _NETPBM.match(data)
    if not match:
        raise BadImageError("damaged netpbm header")
    kind, width, height = match[1], int(match[2]), int(match[3])
    if kind in b"456":
        samples = {b"4": (width + 7) // 8 * height, b"5": width * height, b"6": 3 * width * height}[kind]
        if len(data) - match.end() < samples:
            raise BadImageError("truncated netpbm: fewer bytes than its header says")
    return ImageInfo("netpbm", height, width)


def _isobmff(data: Buffer) -> ImageInfo:
    brand = bytes(data[8:12])
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
        if size == 0:
            break
        if size < 8 or at + size > len(data):
            raise BadImageError("truncated: the last box is longer than the file")
        at += size
    # The item properties hold 'ispe' boxes, one per image item; the largest is the picture.
    sizes = [struct.unpack(">II", m[1]) for m in _ISPE.finditer(data)]
    width, height = max(sizes, key=lambda s: s[0] * s[1], default=(-1, -1))
    return ImageInfo("avif" if brand in (b"avif", b"avis") else "heif", height, width)


_NETPBM = re.compile(rb"P([1-6])(?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")
_ISPE = re.compile(rb"ispe\x00\x00\x00\x00(.{8})", re.DOTALL)
_READERS: tuple[tuple[re.Pattern[bytes], Callable[[Buffer], ImageInfo]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
    (re.compile(rb"BM"), _bmp),
    (re.compile(rb"II[\x2a\x2b]\x00|MM\x00[\x2a\x2b]"), _tiff),
    (re.compile(rb"P[1-6]\s"), _netpbm),
    (re.compile(rb"....ftyp(?:avif|avis|heic|heix|hevc|heim|heis|mif1|msf1)", re.DOTALL), _isobmff),
)

#: What Pillow's readers let through on damaged files, besides its `DecompressionBombError`.
PILLOW_RAISES = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error, zlib.error,
)  # fmt: skip


def decode_check(data: Buffer) -> ImageInfo:
    """`probe`, and decode every pixel of the first frame.

    Raises:
        BadImageError: `probe` refuses it, or Pillow cannot decode it whole.
    """
    import io
    import warnings

    from PIL import Image

    info = probe(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a corrupt EXIF block does not damage pixels
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                return info if info.height > 0 else info._replace(height=image.height, width=image.width)
    except (*PILLOW_RAISES, Image.DecompressionBombError) as error:
        raise BadImageError(f"{info.format} that does not decode: {error}") from error
