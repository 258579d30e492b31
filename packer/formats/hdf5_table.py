"""What an HDF5 shard says of its samples: collected while they are written, laid out behind them in the end."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.formats import hdf5_objects as objects
from packer.formats.base import About, Batch, Mask, Seen
from packer.strings import Int64s

#: The version of the schema that `packer.formats.hdf5` tells; an attribute of the root.
SCHEMA = 1

_ALIGNMENT = 8
_MAX_CHUNK = 2**32 - 1


@dataclass
class _Column:
    """One field: where each sample's payload is."""

    sample: array[int] = field(default_factory=lambda: array("q"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    length: array[int] = field(default_factory=lambda: array("q"))
    header: bytes | None = b""  # of the `.npy` files, as long as all have the same; None when they do not


class Table:
    """The columns of a shard."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._labels = array("q")
        self._heights = array("i")
        self._widths = array("i")
        self._columns: dict[str, _Column] = {}

    def add(self, batch: Batch, seen: Seen, keep: Mask | None, offsets: Int64s) -> None:
        """Note the samples of a batch that were kept, and where in /data (per file, of kept ones) each field is."""
        kept = np.ones(len(batch.keys), bool) if keep is None else keep
        number = len(self._keys) + np.cumsum(kept) - 1
        kept_files = np.repeat(kept, np.diff(batch.first))
        samples = np.repeat(number, np.diff(batch.first))
        for number_of_field, name in enumerate(batch.fields):
            files = np.flatnonzero(kept_files & (batch.field == number_of_field))
            if len(files):
                column = self._columns.setdefault(name, _Column())
                column.sample.extend(samples[files].tolist())
                column.offset.extend(offsets[files].tolist())
                column.length.extend(batch.sizes[files].tolist())
        self._keys += [key for key, good in zip(batch.keys, kept.tolist(), strict=True) if good]
        self._labels.extend(seen.labels[kept].tolist())
        self._heights.extend(seen.image_sizes[kept, 0].tolist())
        self._widths.extend(seen.image_sizes[kept, 1].tolist())

    def arrays(self, fields: Sequence[str], is_array: Callable[[str], bool]) -> list[str]:
        """Those fields that may yet become typed datasets."""
        return [
            name
            for name in dict.fromkeys(fields)
            if is_array(name) and self._columns.setdefault(name, _Column()).header is not None
        ]

    def see_array(self, name: str, begin: bytes) -> None:
        """Compare how a `.npy` payload begins with the ones before."""
        column = self._columns.setdefault(name, _Column())
        if column.header is not None:
            header = npy_head(begin)
            column.header = header if header is not None and column.header in (b"", header) else None

    def tail(self, about: About, data: int, data_bytes: int) -> tuple[bytes, int]:
        """All that follows the payloads.

        Args:
            about: of the dataset.
            data: where /data begins in the file.
            data_bytes: how long it is.

        Returns:
            The bytes, and the address of the root group.
        """
        out = _Tail(data + data_bytes)
        samples = len(self._keys)
        links = {"data": out.put(objects.contiguous(np.dtype("u1"), (data_bytes,), data))}
        keys = np.array(self._keys, f"S{max(1, *map(len, self._keys))}") if samples else np.zeros(0, "S1")
        links["key"] = out.column(keys)
        links["label"] = out.column(np.array(self._labels, "<i8"), _classes(about.classes))
        if (names := about.classes) is not None and not _fits(names):
            links["classes"] = out.column(np.array([name.encode("utf-8", "surrogateescape") for name in names]))
        for name, values in (("height", self._heights), ("width", self._widths)):
            links[name] = out.column(np.array(values, "<i4"), {"units": "pixels"})
        fields = {
            name: self._field(out, column, data) for name, column in sorted(self._columns.items()) if column.sample
        }
        links["fields"] = out.put(objects.group(fields))
        root = out.put(objects.group(links, {"creator": "packer-loaders", "schema": SCHEMA}))
        return bytes(out.bytes), root

    def _field(self, out: _Tail, column: _Column, data: int) -> int:
        samples = len(self._keys)
        where = np.array(column.sample, np.int64)
        offset, length = np.zeros(samples, "<i8"), np.full(samples, -1, "<i8")
        offset[where], length[where] = column.offset, column.length
        links = {"offset": out.column(offset, {"units": "bytes"}), "length": out.column(length, {"units": "bytes"})}
        if len(where) == samples and column.header:
            found = read_npy_head(column.header)
            if found is not None and (length == len(column.header) + found.nbytes).all():
                tree, top = objects.chunk_tree(
                    offset + data + len(column.header), found.nbytes, 1 + len(found.shape), out.here
                )
                out.put(tree)
                links["array"] = out.put(objects.chunked(found.dtype, (samples, *found.shape), top))
        return out.put(objects.group(links))


class _Tail:
    """Structures in the making, each at an address that is known as it is put."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.bytes = bytearray(-begin % _ALIGNMENT)

    @property
    def here(self) -> int:
        """Where the next structure will lie in the file."""
        return self._begin + len(self.bytes)

    def put(self, content: bytes) -> int:
        """Append a structure; returns its address."""
        address = self.here
        self.bytes += content
        self.bytes += bytes(-len(content) % _ALIGNMENT)
        return address

    def column(self, values: npt.NDArray[Any], attributes: dict[str, objects.Attribute] | None = None) -> int:
        """Append a dataset; returns its address."""
        return self.put(objects.contiguous(values.dtype, values.shape, self.put(values.tobytes()), attributes))


def _fits(classes: Sequence[str]) -> bool:
    lengths = [len(name.encode("utf-8", "surrogateescape")) for name in classes]
    return len(lengths) * max(lengths, default=1) <= objects.MAX_ATTRIBUTE_BYTES


def _classes(classes: Sequence[str] | None) -> dict[str, objects.Attribute] | None:
    return {"classes": classes} if classes and _fits(classes) else None


@dataclass(frozen=True)
class NpyHead:
    """What the header of a `.npy` file says."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def npy_head(begin: bytes) -> bytes | None:
    """The header of a `.npy` file that begins like this; None where it is none, or a very long one."""
    if begin[:6] != b"\x93NUMPY" or len(begin) < 12:
        return None
    wide = begin[6] >= 2
    end = 12 + int.from_bytes(begin[8:12], "little") if wide else 10 + int.from_bytes(begin[8:10], "little")
    return begin[:end] if end <= len(begin) else None


def read_npy_head(header: bytes) -> NpyHead | None:
    """The type and shape, where a typed dataset can hold such arrays: numbers, in C order, not empty."""
    try:
        stream = io.BytesIO(header)
        major, _ = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except (ValueError, TypeError, EOFError, SyntaxError):
        return None
    found = NpyHead(dtype, shape)
    good = objects.has_type(dtype) and not (fortran and len(shape) > 1) and 0 < found.nbytes <= _MAX_CHUNK
    return found if good and len(shape) < 32 else None
