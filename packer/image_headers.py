"""What the structure of an image file says: its format, its size, and whether it is all there.

One reader per format, each bounded in time and memory whatever the bytes are. Formats: JPEG (ITU-T T.81,
Annex B), PNG (W3C PNG-3), GIF89a, BMP, WebP (RFC 9649), TIFF 6.0, netpbm, and the ISO base media file format
(ISO/IEC 14496-12) of AVIF and HEIF.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from packer.errors import BadImageError

Buffer = bytes | bytearray | memoryview

#: Twice Pillow's warning limit: where Pillow itself refuses a picture as a decompression bomb.
MAX_PIXELS = 178_956_970
_MOST_PARTS = 100_000  # segments, chunks, blocks or boxes of one file; more is an attack on time
_NETPBM_HEADER = 4096  # bytes of a netpbm header, comments included


class ImageInfo(NamedTuple):
    """What a picture's header says. Size as decoders give it: as stored, before any EXIF orientation."""

    format: str
    height: int
    width: int


def read_structure(data: Buffer) -> ImageInfo:
    """Walk through the parts of a whole encoded image.

    Raises:
        BadImageError: no known format, or damaged, or cut short.
    """
    if len(data) == 0:
        raise BadImageError("empty file (0 bytes)")
    head = bytes(data[:32])
    for magic, read in _READERS:
        if magic.match(head):
            try:
                return read(data)
            except (IndexError, struct.error) as error:
                raise BadImageError("truncated: the file ends too early") from error
    raise BadImageError(f"not an image that is known here: begins with {_describe(head)}")


def _describe(head: bytes) -> str:
    if not any(head):
        return "zero bytes (an interrupted copy?)"
    if head.startswith(b"\x1f\x8b"):
        return "the gzip magic; unpack it first"
    if head[:12] == b"\x00\x00\x00\x0cJXL \r\n\x87\n" or head.startswith(b"\xff\x0a"):
        return "the JPEG XL magic, which no installed decoder reads"
    if (stray := head.find(b"\xff\xd8\xff")) > 0:
        return f"{stray} stray bytes before a JPEG"
    return repr(head[:12])


def _parts() -> Iterator[None]:
    """As many turns as any honest file needs."""
    for _ in range(_MOST_PARTS):
        yield
    raise BadImageError(f"damaged: more than {_MOST_PARTS:,} parts")


# ---------------------------------------------------------------- JPEG

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_MARKER = re.compile(rb"\xff([^\x00\xff])")  # with stray and fill bytes before it, as libjpeg reads on
_END_OF_IMAGE = re.compile(rb"\xff\xd9")


def _jpeg(data: Buffer) -> ImageInfo:
    at = 2
    size: tuple[int, int] | None = None
    for _ in _parts():
        found = _MARKER.search(data, at)
        if found is None:
            raise BadImageError("truncated JPEG: it ends before its first scan")
        marker, at = found[1][0], found.end()
        if marker in _STANDALONE:
            continue
        if marker == 0xD9:
            raise BadImageError("damaged JPEG: it ends before its first scan")
        if marker == 0xDA:
            break
        (length,) = struct.unpack_from(">H", data, at)
        if marker in _FRAMES and size is None:
            size = struct.unpack_from(">HH", data, at + 3)
        at += max(length, 2)
    if size is None:
        raise BadImageError("damaged JPEG: no frame header before the first scan")
    # Entropy-coded data never holds FF D9 (FF is followed by 00 there), so any end marker after
    # the first scan header ends a picture, whatever garbage may follow it.
    if bytes(data[-2:]) != b"\xff\xd9" and _END_OF_IMAGE.search(data, at) is None:
        raise BadImageError("truncated JPEG: no end-of-image marker")
    return ImageInfo("jpeg", *size)


# ---------------------------------------------------------------- PNG, GIF, WebP, AVIF, HEIF: chunks, blocks and boxes


def _png(data: Buffer) -> ImageInfo:
    if bytes(data[12:16]) != b"IHDR":
        raise BadImageError("damaged PNG: the first chunk is not IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    if bytes(data[-8:-4]) == b"IEND":
        return ImageInfo("png", height, width)
    at = 8
    pixels: list[tuple[int, int]] = []  # where the compressed pixels lie
    for _ in _parts():
        if at == len(data) and _inflates(data, pixels, width, height):
            break  # every decoder does without the last chunk
        if at + 8 > len(data):
            raise BadImageError("truncated PNG: no IEND chunk")
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            break
        if kind == b"IDAT":
            pixels.append((at + 8, at + 8 + length))
        at += 12 + length
    return ImageInfo("png", height, width)


def _inflates(data: Buffer, pieces: list[tuple[int, int]], width: int, height: int) -> bool:
    """Whether a PNG's compressed pixels are complete: the end of the stream comes within what they can be at most."""
    left = min(width * height, MAX_PIXELS) * 8 + height * 8 + 64
    inflater = zlib.decompressobj()
    try:
        for start, stop in pieces:
            piece: Buffer = data[start:stop]
            while len(piece) and left > 0 and not inflater.eof:
                left -= len(inflater.decompress(piece, 1 << 18))
                piece = inflater.unconsumed_tail
    except zlib.error:
        return False
    return inflater.eof


def _gif(data: Buffer) -> ImageInfo:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _colour_table_bytes(flags)
    pictures = 0
    for _ in _parts():
        kind = data[at]
        if kind == 0x3B:
            break
        if kind == 0x21:  # an extension
            at = _after_blocks(data, at + 2)
        elif kind == 0x2C:
            left, top, across, down, flags = struct.unpack_from("<HHHHB", data, at + 1)
            if pictures == 0:  # the canvas grows where its first picture does not fit
                width, height = max(width, left + across), max(height, top + down)
            pictures += 1
            at = _after_blocks(data, at + 11 + _colour_table_bytes(flags))
        else:  # padding between blocks
            at += 1
    if pictures == 0:
        raise BadImageError("damaged GIF: it ends before its first picture")
    return ImageInfo("gif", height, width)


def _colour_table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_blocks(data: Buffer, at: int) -> int:
    while size := data[at]:
        at += size + 1
    return at + 1


def _webp(data: Buffer) -> ImageInfo:
    size, kind, chunk = struct.unpack_from("<I4x4sI", data, 4)
    if size + 8 > len(data) or (kind != b"VP8X" and chunk + 20 > len(data)):
        raise BadImageError(f"truncated WebP: {len(data)} of {max(size + 8, chunk + 20)} bytes")
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", data, 24)
        width, height = (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1
    elif kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and bytes(data[23:26]) == b"\x9d\x01\x2a":
        width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", data, 26))
    else:
        raise BadImageError(f"damaged WebP: first chunk {kind!r}")
    return ImageInfo("webp", height, width)


_ITEM_DATA = re.compile(rb"idat")
_SPATIAL_EXTENTS = re.compile(rb"ispe\x00\x00\x00\x00(.{8})", re.DOTALL)


def _isobmff(data: Buffer) -> ImageInfo:
    at = 0
    boxes: set[bytes] = set()
    for _ in _parts():
        if at == len(data):
            break
        size, kind = struct.unpack_from(">I4s", data, at)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
        if size == 0:  # up to the end of the file
            size = len(data) - at
        if size < 8 or at + size > len(data):
            raise BadImageError("truncated: the last box is longer than the file")
        at += size
        boxes.add(kind)
    if not boxes & {b"meta", b"moov"} or (b"mdat" not in boxes and _ITEM_DATA.search(data) is None):
        raise BadImageError("truncated: the boxes that hold the picture are missing")
    # The item properties hold an 'ispe' box per image item; the largest is the picture.
    sizes = (struct.unpack(">II", found[1]) for found in _SPATIAL_EXTENTS.finditer(data))
    width, height = max(sizes, key=lambda size: size[0] * size[1], default=(-1, -1))
    return ImageInfo("avif" if bytes(data[8:12]) in (b"avif", b"avis") else "heif", height, width)


# ---------------------------------------------------------------- BMP, TIFF, netpbm: headers that say how much follows

_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_BMP_PLAIN = (0, 3)  # uncompressed, with or without bit masks


def _bmp(data: Buffer) -> ImageInfo:
    start, header = struct.unpack_from("<II", data, 10)
    if header not in _BMP_HEADERS:
        raise BadImageError(f"damaged BMP: a header of {header} bytes")
    if header == 12:
        width, height, bits = struct.unpack_from("<HH2xH", data, 18)
        compression = stored = 0
    else:
        width, height, bits, compression, stored = struct.unpack_from("<Ii2xHII", data, 18)
    height = abs(height)
    if compression in _BMP_PLAIN:
        row = (width * bits + 7) // 8  # the last row may lack its padding
        stored = (row + 3) // 4 * 4 * (height - 1) + row if height else 0
    if start + stored > len(data):
        raise BadImageError(f"truncated BMP: {len(data)} of {start + stored} bytes")
    return ImageInfo("bmp", height, width)


_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_BITS, _TIFF_COMPRESSION, _TIFF_ORIENTATION, _TIFF_SAMPLES = (
    256,
    257,
    258,
    259,
    274,
    277,
)
_TIFF_PLACES = ((273, 279), (324, 325))  # offsets and byte counts, of strips or of tiles
_TIFF_TAGS = {256, 257, 258, 259, 274, 277, 320, *sum(_TIFF_PLACES, ())}  # 320: the colours of a palette
_TIFF_KINDS = {3: ("H", 2), 4: ("I", 4)}


def _tiff(data: Buffer) -> ImageInfo:
    order = "<" if data[0] == 0x49 else ">"
    version, at = struct.unpack_from(order + "HI", data, 2)
    if version != 42:  # BigTIFF
        return ImageInfo("tiff", -1, -1)
    (entries,) = struct.unpack_from(order + "H", data, at)
    data[at + 1 + 12 * entries]  # the last entry is there
    tags: dict[int, tuple[int, ...]] = {}
    for entry in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from(order + "HHI", data, entry)
        if tag not in _TIFF_TAGS or kind not in _TIFF_KINDS or tag in tags:
            continue
        if count > _MOST_PARTS:
            raise BadImageError(f"damaged TIFF: {count:,} values for one tag")
        code, bytes_each = _TIFF_KINDS[kind]
        (where,) = (entry + 8,) if count * bytes_each <= 4 else struct.unpack_from(order + "I", data, entry + 8)
        tags[tag] = struct.unpack_from(f"{order}{count}{code}", data, where)
    width, height = ((tags.get(tag) or (-1,))[0] for tag in (_TIFF_WIDTH, _TIFF_HEIGHT))
    _check_tiff_data(tags, width, height, len(data))
    # Unlike EXIF's, this orientation belongs to the format: decoders give the picture upright.
    lies = (tags.get(_TIFF_ORIENTATION) or (1,))[0] in (5, 6, 7, 8)
    return ImageInfo("tiff", width, height) if lies else ImageInfo("tiff", height, width)


def _check_tiff_data(tags: dict[int, tuple[int, ...]], width: int, height: int, size: int) -> None:
    for offsets_tag, counts_tag in _TIFF_PLACES:
        places = list(zip(tags.get(offsets_tag, ()), tags.get(counts_tag, ()), strict=False))
        if tags.get(_TIFF_COMPRESSION, (1,)) == (1,):
            # Some writers count too many bytes: what matters is that as many as the picture needs are there.
            bits = (tags.get(_TIFF_BITS) or (1,))[0] * (tags.get(_TIFF_SAMPLES) or (1,))[0]
            there = sum(max(0, min(count, size - offset)) for offset, count in places)
            cut = bool(places) and there < (width * bits + 7) // 8 * height
        else:
            cut = any(offset + count > size for offset, count in places)
        if cut:
            raise BadImageError("truncated TIFF: pixel data lie beyond the end of the file")


_GAP = rb"(?:\s|#[^\n]*\n)+"
_NETPBM = re.compile(
    rb"P(?:([14])" + _GAP + rb"(\d{1,9})" + _GAP + rb"(\d{1,9})|"
    rb"([2356])" + _GAP + rb"(\d{1,9})" + _GAP + rb"(\d{1,9})" + _GAP + rb"(\d{1,5}))\s"
)


def _netpbm(data: Buffer) -> ImageInfo:
    head = _NETPBM.match(bytes(data[:_NETPBM_HEADER]))
    if head is None:
        raise BadImageError("damaged netpbm header")
    kind, width, height = int(head[1] or head[4]), int(head[2] or head[5]), int(head[3] or head[6])
    most = int(head[7] or 1)
    if not 0 < most < 65536:
        raise BadImageError(f"damaged netpbm header: the largest sample is {most}")
    samples = width * height * (3 if kind in (3, 6) else 1)
    if kind == 4:
        least = (width + 7) // 8 * height
    elif kind in (5, 6):
        least = samples * (1 if most < 256 else 2)
    else:  # text: a digit for each sample, and in all but bitmaps a space before the next
        least = samples if kind == 1 else 2 * samples - 1
    if len(data) - head.end() < least:
        raise BadImageError("truncated netpbm: fewer bytes than its header says")
    return ImageInfo("netpbm", height, width)


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
