"""The structure of a JPEG file: its frame, its restart interval, its orientation.

Reads markers only, no pixels. ISO/IEC 10918-1 (ITU-T T.81) Annex B gives the byte layout; the EXIF
block is a TIFF structure (CIPA DC-008).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from packer.errors import BadImageError

Buffer = bytes | bytearray | memoryview

BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2
_NOT_FRAMES = frozenset((0xC4, 0xC8, 0xCC))  # DHT, JPG, DAC lie among the frame markers
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">BHHB")


class JpegHeader(NamedTuple):
    """What stands before the first entropy-coded byte. Sizes are pixels as stored (no orientation).

    Attributes:
        frame: code of the frame marker: `BASELINE`, `EXTENDED`, `PROGRESSIVE` or another.
        precision: bits per sample.
        height: rows.
        width: columns.
        components: 1 grey, 3 colour, 4 CMYK or YCCK.
        mcu_height: rows of a minimum coded unit, the tile of pixels that is coded at once.
        mcu_width: columns of a minimum coded unit.
        restart_interval: MCUs between restart markers; 0 where there are none.
        one_scan: the first scan holds all components, as in nearly every sequential JPEG.
        frame_at: offset of the frame marker.
        scan_at: offset of the first entropy-coded byte.
        exif_at: offset of the EXIF block's TIFF header, −1 where there is none.
    """

    frame: int
    precision: int
    height: int
    width: int
    components: int
    mcu_height: int
    mcu_width: int
    restart_interval: int
    one_scan: bool
    frame_at: int
    scan_at: int
    exif_at: int

    @property
    def mcus_per_row(self) -> int:
        """MCUs side by side; the last may reach over the picture's edge."""
        return -(-self.width // self.mcu_width)

    @property
    def mcu_rows(self) -> int:
        """Rows of MCUs; the last may reach over the picture's edge."""
        return -(-self.height // self.mcu_height)

    @property
    def sequential(self) -> bool:
        """8-bit Huffman-coded samples, from the top down, in one scan: what can be cut without decoding."""
        return (
            self.one_scan and self.precision == 8 and self.frame in (BASELINE, EXTENDED) and self.components in (1, 3)
        )

    @property
    def seekable(self) -> bool:
        """Restart markers lie so that some of the intervals make a rectangle.

        That is so where a row of MCUs is a whole number of intervals, or an interval a whole number of rows.
        """
        interval, row = self.restart_interval, self.mcus_per_row
        return interval > 0 and self.sequential and (row % interval == 0 or interval % row == 0)


def is_jpeg(data: Buffer) -> bool:
    """Whether the bytes begin as every JPEG does."""
    return data[:3] == b"\xff\xd8\xff"


def parse_header(data: Buffer) -> JpegHeader:
    """Read a JPEG's header (some 4 µs).

    Raises:
        BadImageError: the header is damaged or cut short.

    >>> parse_header(b"not a JPEG")
    Traceback (most recent call last):
    packer.errors.BadImageError: damaged JPEG: no marker at byte 2
    """
    try:
        return _parse(data)
    except (IndexError, struct.error) as error:
        raise BadImageError("truncated JPEG: the file ends inside its header") from error


def _parse(data: Buffer) -> JpegHeader:
    at, frame_at, interval, exif_at = 2, -1, 0, -1
    while True:
        lead, marker, length = _SEGMENT.unpack_from(data, at)
        if lead != 0xFF:
            raise BadImageError(f"damaged JPEG: no marker at byte {at}")
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in _STANDALONE:
            at += 2
            continue
        if marker == 0xD9 or length < 2:
            raise BadImageError(f"damaged JPEG: it ends before its first scan (byte {at})")
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES:
            frame_at = at
        elif marker == 0xDD:
            interval = data[at + 4] << 8 | data[at + 5]
        elif marker == 0xE1 and exif_at < 0 and data[at + 4 : at + 10] == b"Exif\0\0":
            exif_at = at + 10
        at += 2 + length
    if frame_at < 0:
        raise BadImageError("damaged JPEG: no frame header before the first scan")
    precision, height, width, components = _FRAME.unpack_from(data, frame_at + 4)
    mcu_height = mcu_width = 8
    if components != 1:  # a scan of one component is coded block by block, whatever its sampling factors
        factors = data[frame_at + 11 : frame_at + 10 + 3 * components : 3]
        mcu_height, mcu_width = _mcu(factors)
    return JpegHeader(
        data[frame_at + 1],
        precision,
        height,
        width,
        components,
        mcu_height,
        mcu_width,
        interval,
        data[at + 4] == components,
        frame_at,
        at + 2 + length,
        exif_at,
    )


def _mcu(factors: Iterable[int]) -> tuple[int, int]:
    """(height, width) in pixels of an MCU, given the bytes that hold each component's sampling factors."""
    across = down = 0
    for factor in factors:
        across, down = max(across, factor >> 4), max(down, factor & 15)
    if not (across and down):
        raise BadImageError("damaged JPEG: no sampling factors")
    return 8 * down, 8 * across


def segments(data: Buffer, header: JpegHeader) -> Iterator[tuple[int, int, int]]:
    """(marker code, offset of the marker, bytes with it) of each segment before the scan's header."""
    at = 2
    while at < header.scan_at:
        _, marker, length = _SEGMENT.unpack_from(data, at)
        if marker == 0xDA:
            return
        size = 1 if marker == 0xFF else 2 if marker in _STANDALONE else 2 + length
        if size > 2:
            yield marker, at, size
        at += size


def orientation(data: Buffer, header: JpegHeader) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) where the tag is absent or the block is damaged."""
    return 1 if header.exif_at < 0 else _tiff_orientation(data, header.exif_at)


def _tiff_orientation(data: Buffer, at: int) -> int:
    order = "<" if data[at : at + 2] == b"II" else ">"
    try:
        (directory,) = struct.unpack_from(order + "I", data, at + 4)
        (entries,) = struct.unpack_from(order + "H", data, at + directory)
        for entry in range(at + directory + 2, at + directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", data, entry)
            if tag == 0x0112 and kind == 3:
                (value,) = struct.unpack_from(order + "H", data, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass  # a damaged block says nothing about the picture, as viewers take it too
    return 1
