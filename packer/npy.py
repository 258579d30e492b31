r"""Arrays in `.npy` and zstd-compressed `.npy.zst` bytes, read without trusting them.

numpy's own reader evaluates the header as Python and believes the size it names. This one knows the three keys that
numpy writes, in any order, and numbers alone as elements; the payload must be as long as the shape says, to the byte.

    >>> import io
    >>> stream = io.BytesIO()
    >>> np.save(stream, np.array([[-1000, 40]], np.int16))
    >>> decode(stream.getvalue()).tolist(), parse_header(stream.getvalue()).shape
    ([[-1000, 40]], (1, 2))
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import threading
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from packer.errors import BadArrayError, MissingExtraError

Buffer = bytes | bytearray | memoryview

MAX_BYTES = 1 << 32
"""Larger arrays are not believed: 4 GiB holds 8,192 slices of 512×512."""

_MAGIC = b"\x93NUMPY"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_HEADER = 1 << 12
_MAX_RANK = 32
_ITEM = r"""\s*(?:'descr'\s*:\s*'(?P<descr{0}>[<>|=]?[biufc][0-9]{{1,2}})'
              |'fortran_order'\s*:\s*(?P<order{0}>True|False)
              |'shape'\s*:\s*\(\s*(?P<shape{0}>(?:[0-9]{{1,18}}L?\s*,\s*)*(?:[0-9]{{1,18}}L?\s*)?)\))\s*"""
_HEADER = re.compile(r"\{" + ",".join(_ITEM.format(i) for i in range(3)) + r",?\s*\}\s*", re.VERBOSE | re.ASCII)
_KINDS = frozenset(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"))


class NpyHeader(NamedTuple):
    """What an array's bytes begin with.

    Attributes:
        dtype: of the elements as stored, in their byte order.
        shape: lengths of the axes.
        fortran_order: the first axis varies fastest.
        offset: where the elements begin.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_array_field(field: str) -> bool:
    """Whether a field holds one array: its extension is `npy`, or `npy.zst`.

    >>> is_array_field("ct.npy"), is_array_field("npy.zst"), is_array_field("x.zst")
    (True, True, False)
    """
    return f".{field}".endswith((".npy", ".npy.zst"))


def is_zstd(data: Buffer) -> bool:
    """Whether the bytes are a zstd frame."""
    return bytes(data[:4]) == _ZSTD_MAGIC


def parse_header(data: Buffer) -> NpyHeader:
    """The header of plain `.npy` bytes, or of their beginning.

    Raises:
        BadArrayError: no `.npy` header of an array of numbers, or one that claims more than `MAX_BYTES`.
    """
    if bytes(data[:6]) != _MAGIC:
        raise BadArrayError("no .npy array: it does not begin with \\x93NUMPY")
    version = bytes(data[6:8])
    width = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}.get(version)
    if width is None:
        raise BadArrayError(f"a .npy array of the unknown version {version.hex(' ') or '(cut short)'}")
    length = int.from_bytes(data[8 : 8 + width], "little")
    end = 8 + width + length
    if length > _MAX_HEADER:
        raise BadArrayError(f"a .npy header of {length} bytes, more than the limit of {_MAX_HEADER}")
    if len(data) < end:
        raise BadArrayError(f"truncated: {len(data)} bytes, and the .npy header alone has {end}")
    return _parse_text(bytes(data[8 + width : end]), end)


@functools.lru_cache(maxsize=256)
def _parse_text(text: bytes, offset: int) -> NpyHeader:
    """Cached: the slices of a dataset have one header, or a few."""
    match = _HEADER.fullmatch(text.decode("latin-1"))
    found: dict[str, str] = (
        {} if match is None else {name[:-1]: value for name, value in match.groupdict().items() if value is not None}
    )
    if len(found) < 3:
        raise BadArrayError(
            f"a .npy header that is not of one plain array of numbers: {text[:120]!r}; "
            "objects, records and text are not read"
        )
    if found["descr"].lstrip("<>|=") not in _KINDS:
        raise BadArrayError(f"a .npy array of the unknown type {found['descr']!r}")
    shape = tuple(int(part.strip().rstrip("L")) for part in found["shape"].split(",") if part.strip())
    if len(shape) == 1 and "," not in found["shape"]:
        raise BadArrayError(f"a .npy header whose shape is a number, not a tuple: {text[:120]!r}")
    header = NpyHeader(np.dtype(found["descr"]), shape, found["order"] == "True", offset)
    if len(shape) > _MAX_RANK or max(header.nbytes, *shape, 0) > MAX_BYTES:
        raise BadArrayError(f"a .npy array of shape {shape}, larger than the limit of {MAX_BYTES:,} bytes")
    return header


def size(data: Buffer) -> tuple[int, int]:
    """(height, width) of a slice (H, W) or a volume (D, H, W), by the header alone; (−1, −1) of anything else."""
    try:
        shape = parse_header(_beginning(data)).shape
    except (BadArrayError, MissingExtraError):
        return -1, -1
    return (shape[-2], shape[-1]) if len(shape) in (2, 3) and min(shape) > 0 and max(shape) < 1 << 31 else (-1, -1)


def _beginning(data: Buffer) -> Buffer:
    """The first bytes of an array, as many as a header may have; of a zstd frame no more is decompressed."""
    if not is_zstd(data):
        return data
    zstandard = _zstandard()
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            return cast(bytes, reader.read(_MAX_HEADER + 12))
    except zstandard.ZstdError as error:
        raise BadArrayError(f"a damaged zstd frame: {error}") from error


def view(data: Buffer) -> npt.NDArray[Any]:
    """The array in plain `.npy` bytes, as it lies there: nothing is copied, the byte order is the file's.

    Raises:
        BadArrayError: no array of numbers, or not exactly as many bytes as its shape says.
    """
    header = parse_header(data)
    if len(data) - header.offset != header.nbytes:
        raise BadArrayError(
            f"{len(data) - header.offset} bytes of elements, and shape {header.shape} of {header.dtype} "
            f"needs {header.nbytes}"
        )
    flat = np.frombuffer(data, header.dtype, math.prod(header.shape), header.offset)
    return flat.reshape(header.shape, order="F" if header.fortran_order else "C")


def native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values in C order and this machine's byte order; the array itself where it has them."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)


def decode(data: Buffer) -> npt.NDArray[Any]:
    """The array in `.npy` or `.npy.zst` bytes, C-contiguous, native byte order, maybe a read-only view.

    Raises:
        BadArrayError: no array of numbers, damaged, or larger than `MAX_BYTES`.
        MissingExtraError: zstd, and zstandard is not installed.
    """
    return native(view(plain(data)))


def plain(data: Buffer) -> Buffer:
    """The `.npy` bytes: decompressed if they are a zstd frame, else as they are.

    Never takes more memory than the frame says that it holds, and refuses one that says nothing, or lies.

    Raises:
        BadArrayError: a damaged frame, or one of more than `MAX_BYTES` bytes.
        MissingExtraError: zstd, and zstandard is not installed.
    """
    if not is_zstd(data):
        return data
    zstandard = _zstandard()
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_BYTES + _MAX_HEADER:
            said = "does not say how much" if size < 0 else f"says that {size:,} bytes"
            raise BadArrayError(f"a zstd frame that {said} it holds: at most {MAX_BYTES:,} bytes are read")
        unpacked: bytes = _decompressor().decompress(data, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadArrayError(f"a damaged zstd frame: {error}") from error
    except MemoryError:
        raise BadArrayError(f"a zstd frame of {size:,} bytes: there is not the memory for it") from None
    return unpacked


def encode(array: npt.NDArray[Any], *, zstd_level: int | None = None) -> bytes:
    """`.npy` bytes of an array, version 1; compressed by zstd at a level, if one is given.

    >>> len(encode(np.zeros((512, 512), np.int16)))
    524416
    """
    import io

    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array, order="C"), (1, 0), allow_pickle=False)
    if zstd_level is None:
        return stream.getvalue()
    return cast(bytes, _zstandard().ZstdCompressor(level=zstd_level).compress(stream.getvalue()))


class _Local(threading.local):
    decompressor: Any = None


_local = _Local()


def _decompressor() -> Any:
    """Each thread's own: they cannot be shared, and take longer to make than a slice to decode."""
    if _local.decompressor is None:
        _local.decompressor = _zstandard().ZstdDecompressor(max_window_size=1 << 27)
    return _local.decompressor


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise MissingExtraError("zstandard", "codecs", "reading .npy.zst arrays") from error
