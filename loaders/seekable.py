"""Cut a crop out of an encoded JPEG, so that only the crop need be decoded.

Entropy decoding is the slowest part of reading a JPEG, and it must start at the first byte, unless the
file has restart markers: what lies between two of them (an interval) decodes alone. The intervals
that a crop touches, copied behind the header with a smaller size written into it, are a
complete, smaller JPEG of exactly the same pixels.

Without restart markers one thing is left to save: everything below the crop. A smaller height in the header
lets the decoder stop there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packer.errors import BadImageError
from packer.jpeg import Buffer, JpegHeader, is_jpeg, parse_header

Int64s = npt.NDArray[np.int64]

def _numbers(count: int) -> bytes:
    """The second bytes of `count` restart markers: RST0 … RST7 in turn."""
    return (b"\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7" * (count // 8 + 1))[:count]


class Piece(NamedTuple):
    """A JPEG cut out of another: its pixel (0, 0) is the other's (top, left).

    `whole` says that it is a JPEG without fault; otherwise bytes follow its last row, which a strict decoder
    reports.
    """

    data: Buffer
    top: int
    left: int
    height: int
    width: int
    whole: bool


def has_restart(data: Buffer) -> bool:
    """Whether crops of this JPEG can be decoded alone (so it has restart markers, in a usable place).

    >>> has_restart(b"no picture")
    False
    """
    try:
        return is_jpeg(data) and parse_header(data).seekable
    except BadImageError:
        return False


def cut(
    data: Buffer, header: JpegHeader, top: int, left: int, bottom: int, right: int, *, scale: int = 1
) -> Piece | None:
    """The smallest JPEG that holds rows top…bottom and columns left…right, pixel for pixel.

    Args:
        data: a JPEG.
        header: its header.
        top: first row, pixels.
        left: first column, pixels.
        bottom: row behind the last.
        right: column behind the last.
        scale: the piece will be decoded at 1/scale (1, 2, 4 or 8), and the scaled pixels shall be equal too.

    Returns:
        The piece, or None where nothing can be saved or the file is not as its header says.
    """
    if not header.sequential or header.height == 0:
        return None
    region = _widen(header, top, left, bottom, right, scale)
    if header.seekable:
        piece = _splice(data, header, *region)
        if piece is not None:
            return piece
    return _cut_below(data, header, region[2])


def _widen(header: JpegHeader, top: int, left: int, bottom: int, right: int, scale: int) -> tuple[int, int, int, int]:
    """The region with a margin of what its pixels depend on.

    Where chroma has fewer samples than luma, the decoder interpolates between neighbouring chroma samples
    (each two pixels of the scaled picture wide), and leaves that out in pictures only a few samples wide.
    """
    margin = 2 * scale if header.mcu_width > 8 or header.mcu_height > 8 else 0
    least = 16 * scale
    top, left = max(0, top - margin), max(0, left - margin)
    bottom, right = min(header.height, bottom + margin), min(header.width, right + margin)
    if bottom - top < least:
        bottom = min(header.height, top + least)
        top = max(0, bottom - least)
    if right - left < least:
        right = min(header.width, left + least)
        left = max(0, right - least)
    return top, left, bottom, right


def _splice(data: Buffer, header: JpegHeader, top: int, left: int, bottom: int, right: int) -> Piece | None:
    interval, per_row = header.restart_interval, header.mcus_per_row
    across = max(1, per_row // interval)  # tiles side by side; an interval of several rows is one wide tile
    tile_width = header.mcu_width * min(interval, per_row)
    tile_height = header.mcu_height * max(1, interval // per_row)
    row0, row1 = top // tile_height, -(-bottom // tile_height)
    column0, column1 = left // tile_width, -(-right // tile_width)
    down = -(-header.mcu_rows // max(1, interval // per_row))
    if (row1 - row0) * (column1 - column0) == down * across:
        return None
    ends = _interval_ends(data, header.scan_at, row1 * across, down * across)
    if ends is None:
        return None
    top, left = row0 * tile_height, column0 * tile_width
    height, width = min(header.height, row1 * tile_height) - top, min(header.width, column1 * tile_width) - left
    # ends[i] is where interval i begins, ends[i + 1] where the marker behind it ends.
    begin = ends[:-1].reshape(-1, across)[row0:row1, column0:column1]
    end = ends[1:].reshape(-1, across)[row0:row1, column0:column1]
    head = bytearray(data[: header.scan_at])
    struct.pack_into(">HH", head, header.frame_at + 5, height, width)
    view = memoryview(data)
    if column1 - column0 == across:
        parts = [view[begin[0, 0] : end[-1, -1]]]
    else:
        parts = [view[a:b] for a, b in zip(begin[:, 0].tolist(), end[:, -1].tolist(), strict=True)]
    spliced = bytearray().join((head, *parts))
    markers = len(head) - 1 + (end - begin).ravel().cumsum()
    numbered = np.frombuffer(spliced, np.uint8)
    numbered[markers] = np.frombuffer(_numbers(len(markers)), np.uint8)
    numbered[markers[-1]] = 0xD9  # the marker behind the last interval ends the image
    return Piece(spliced, top, left, height, width, whole=True)


def _interval_ends(data: Buffer, scan_at: int, wanted: int, total: int) -> Int64s | None:
    """Offsets int64 (wanted + 1,): the scan's first byte, then the byte behind each interval's marker.

    None where the markers are not those of `total` intervals: a damaged or truncated file.
    """
    scan = np.frombuffer(data, np.uint8)[scan_at:]
    escapes = np.flatnonzero(scan[:-1] == 0xFF)
    codes = scan[1:].take(escapes)
    genuine = codes.nonzero()[0][:total]  # FF 00 stands for a data byte FF
    codes = codes.take(genuine)
    if len(codes) < total or codes[-1] != 0xD9 or codes[:-1].tobytes() != _numbers(total - 1):
        return None
    ends = np.empty(wanted + 1, np.int64)
    ends[0] = scan_at
    np.add(escapes.take(genuine[:wanted]), scan_at + 2, out=ends[1:])
    return ends


def _cut_below(data: Buffer, header: JpegHeader, bottom: int) -> Piece | None:
    """The rows above `bottom`, by writing that height into a copy of the header."""
    height = -(-bottom // header.mcu_height) * header.mcu_height
    # Copying the bytes costs as much as decoding 1 % of them. A file that does not end as a JPEG does may
    # be truncated, which only decoding all of it can tell.
    if height > 0.95 * header.height or data[-2:] != b"\xff\xd9":
        return None
    shorter = bytearray(data)
    struct.pack_into(">H", shorter, header.frame_at + 5, height)
    return Piece(shorter, 0, 0, height, header.width, whole=False)
