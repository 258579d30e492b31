"""Lossless transcoding of JPEGs so that a loader can decode a crop alone.

`jpegtran` writes the same coefficients again, with restart markers and Huffman tables made for the picture: any
decoder gives the same pixels, EXIF and colour profile stay, and the size hardly changes. What
lies between two markers can then be decoded without what stands before it (`loaders.seekable`). Every result is decoded
and compared with the original before it takes its place.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass

from packer import jpeg
from packer.errors import BadImageError, MissingToolError
from packer.sample import is_image_field

#: Pixels between two markers. Measured with random crops to 224 of 500×375 pictures: 32 decodes as fast as 16,
#: 8 % faster than 64, and costs 0.4 % of size where 16 costs 0.8 %.
TARGET_WIDTH = 32
MAX_GROWTH = 0.03
_TIMEOUT_S = 120
_OTHER_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


@functools.cache
def jpegtran_path() -> str:
    """Where the `jpegtran` program is.

    Raises:
        MissingToolError: it is not installed; the message says how to install it.
    """
    path = shutil.which("jpegtran")
    if path is None:
        raise MissingToolError(
            "jpegtran",
            "making JPEGs seekable",
            "it comes with libjpeg-turbo: apt install libjpeg-turbo-progs, dnf install libjpeg-turbo-utils, "
            "brew install jpeg-turbo or conda install libjpeg-turbo",
        )
    return path


def make_seekable(data: bytes | memoryview) -> bytes | None:
    """The same picture with restart markers, or None where it is better left as it is.

    Args:
        data: an encoded image.

    Raises:
        MissingToolError: `jpegtran` is not installed.
    """
    return seekable_or_reason(data)[0]


def seekable_or_reason(data: bytes | memoryview) -> tuple[bytes | None, str]:
    """A seekable JPEG of the very same pixels, or the reason why the picture is left as it is.

    Args:
        data: an encoded image.

    Returns:
        (JPEG, "") or (None, reason); reasons are few and can be counted.

    Raises:
        MissingToolError: `jpegtran` is not installed.

    >>> seekable_or_reason(b"GIF89a")
    (None, 'not a JPEG')
    """
    header, reason = _suitable(data)
    if header is None:
        return None, reason
    if _interval_width(header) <= 2 * TARGET_WIDTH:
        return None, "seekable already"
    for interval in _intervals(header):
        if interval == header.restart_interval:
            return None, "seekable already"
        transcoded, reason = _transcode(data, header, interval)
        if transcoded is None:
            return None, reason
        if len(transcoded) <= (1 + MAX_GROWTH) * len(data):
            return (transcoded, "") if _same_pixels(data, transcoded) else (None, "would not decode to equal pixels")
    return None, f"would grow by more than {MAX_GROWTH:.0%}"


def _suitable(data: bytes | memoryview) -> tuple[jpeg.JpegHeader | None, str]:
    if not jpeg.is_jpeg(data):
        return None, "not a JPEG"
    try:
        header = jpeg.parse_header(data)
    except BadImageError:
        return None, "damaged header"
    if header.frame == jpeg.PROGRESSIVE:
        return None, "progressive"
    if header.components not in (1, 3):
        return None, "CMYK"
    if not header.sequential or header.height == 0:
        return None, "not baseline (arithmetic, lossless, 12-bit or several scans)"
    end = _OTHER_MARKER.search(data, header.scan_at)
    if end is None or end[0] != b"\xff\xd9":
        return None, "truncated, or several scans"
    if end.end() != len(data):
        return None, "bytes after the end of the image (such as a second picture)"
    return header, ""


def _interval_width(header: jpeg.JpegHeader) -> float:
    """Pixels that an interval is wide; infinite where there are none that could be used."""
    return header.restart_interval * header.mcu_width if header.seekable else float("inf")


def _intervals(header: jpeg.JpegHeader) -> list[int]:
    """Divisors of the row's MCUs, the nearest to the target and two larger ones, for where that one costs too much."""
    row, target = header.mcus_per_row, max(1, TARGET_WIDTH // header.mcu_width)
    divisors = [n for n in range(1, row + 1) if row % n == 0]
    best = min(divisors, key=lambda n: max(n / target, target / n))
    larger = [n for n in divisors if n > best]
    return [best, *larger[:1], *larger[-1:]] if len(larger) > 1 else [best, *larger]


def _transcode(data: bytes | memoryview, header: jpeg.JpegHeader, interval: int) -> tuple[bytes | None, str]:
    """The JPEG with a marker every `interval` MCUs, or why there is none."""
    command = [jpegtran_path(), "-copy", "all", "-optimize", "-restart", f"{interval}B"]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return None, f"jpegtran took longer than {_TIMEOUT_S} s"
    if done.returncode != 0 or done.stderr:
        return None, "refused by jpegtran as damaged"
    try:
        made = jpeg.parse_header(done.stdout)
    except BadImageError:
        return None, "jpegtran gave no JPEG"
    expected = header._replace(restart_interval=interval)
    same = (made.sequential, *made[1:8]) == (expected.sequential, *expected[1:8])
    if not same or _metadata(done.stdout, made) != _metadata(data, header):
        return None, "jpegtran would change more than the restart interval"
    return done.stdout, ""


def _metadata(data: bytes | memoryview, header: jpeg.JpegHeader) -> list[bytes]:
    """EXIF, XMP, colour profile, comments …: all but the segments of JFIF and Adobe, which every encoder rewrites."""
    kept = [bytes(data[at : at + size]) for marker, at, size in jpeg.segments(data, header) if marker in _METADATA]
    return [segment for segment in kept if segment[4:9] not in (b"JFIF\0", b"JFXX\0", b"Adobe")]


_METADATA = frozenset((*range(0xE0, 0xF0), 0xFE))


def _same_pixels(one: bytes | memoryview, other: bytes) -> bool:
    import numpy as np
    import simplejpeg

    try:
        before, after = (simplejpeg.decode_jpeg(data, "RGB", strict=False) for data in (one, other))
    except ValueError:
        return False
    return np.array_equal(before, after)


@dataclass(frozen=True)
class SeekableJpeg:
    """Make JPEGs seekable while packing; see `packer.shard.Encoder`. Everything else keeps its very bytes."""

    def fingerprint(self) -> str:
        """Options and the version of jpegtran: another may give other bytes."""
        said = subprocess.run(  # noqa: S603
            [jpegtran_path(), "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )
        lines = (said.stderr or said.stdout).splitlines()
        return f"seekable JPEG every {TARGET_WIDTH} pixels, {lines[0].strip() if lines else 'unknown jpegtran'}"

    def check_available(self) -> None:
        """Raise `MissingToolError` where jpegtran is not installed."""
        jpegtran_path()

    def encode(self, field: str, data: memoryview) -> tuple[bytes | None, str]:
        """See `packer.shard.Encoder.encode`."""
        if not is_image_field(field):
            return None, ""
        made, reason = seekable_or_reason(data)
        return made, "made seekable" if made is not None else f"kept as they were: {reason}"
