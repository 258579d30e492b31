"""Reading an HDF5 shard's own structures, through h5py: which samples it holds, and where their bytes lie."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from packer.errors import ShardError
from packer.formats.base import Found, FoundSample
from packer.formats.hdf5_table import SCHEMA
from packer.sample import bad_fields, printable
from packer.storage import open_regular

_ROWS_AT_ONCE = 4096
#: What h5py raises for files that are damaged.
H5PY_RAISES = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError, AttributeError)


def walk(path: str, skipped: MutableMapping[str, int] | None = None) -> Iterator[FoundSample]:
    """Every sample of a shard of our schema, in order; see `packer.formats.base.Format.walk`.

    Raises:
        ShardError: truncated, damaged, or of another schema.
    """
    del skipped  # everything in such a file belongs to a sample
    with open_file(path) as file:
        try:
            yield from _Samples(file, path)
        except H5PY_RAISES as error:
            raise ShardError(f"{printable(path)}: damaged: {error}") from error


def open_file(path: str) -> Any:
    """The file, read-only and without a lock, so that read-only network mounts do.

    Raises:
        ShardError: not an HDF5 file, truncated, or damaged where it begins.
    """
    try:
        os.close(open_regular(path))  # a pipe would block
        return h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise ShardError(f"{printable(path)}: no such file") from error
    except H5PY_RAISES as error:
        raise ShardError(f"{printable(path)}: not a whole HDF5 file: {error}") from error


def is_ours(file: Any) -> bool:
    """Whether an open file says that it has our schema."""
    return "schema" in file.attrs and file.attrs.get("creator") == b"packer-loaders"


class _Samples:
    """The samples of an open shard of our schema."""

    def __init__(self, file: Any, path: str) -> None:
        self._path = path
        if not is_ours(file):
            raise ShardError(
                f"{printable(path)}: an HDF5 file of another schema: its samples cannot be told; "
                "convert it with 'packer shard'"
            )
        if "virtual" in file.attrs:
            raise ShardError(
                f"{printable(path)}: shows the shards beside it as one file and holds no sample itself: name those "
                "shards by a pattern, or the whole dataset by its folder"
            )
        if int(file.attrs["schema"]) != SCHEMA:
            raise ShardError(f"{printable(path)}: schema {file.attrs['schema']}, this packer reads {SCHEMA}: update it")
        data = self._contiguous(file, "data", "u1")
        self._base, self._size = data.id.get_offset() or 0, data.shape[0]
        self._key = self._contiguous(file, "key", "S")
        self._label = self._contiguous(file, "label", "i8")
        self._fields = {name: self._columns(file, name) for name in file["fields"]}
        if bad := bad_fields(self._fields):
            raise ShardError(f"{printable(path)}: {printable(bad[0])!r} cannot be a field's name")

    def _columns(self, file: Any, name: str) -> tuple[Any, Any]:
        return self._contiguous(file, f"fields/{name}/offset", "i8"), self._contiguous(
            file, f"fields/{name}/length", "i8"
        )

    def _contiguous(self, file: Any, name: str, kind: str) -> Any:
        """A dataset in one piece of this very file, of the expected type and length."""
        dataset = file[name]
        place = dataset.id.get_create_plist() if isinstance(dataset, h5py.Dataset) else None
        whole = place is not None and place.get_layout() == h5py.h5d.CONTIGUOUS and place.get_external_count() == 0
        same = whole and dataset.ndim == 1 and (dataset.dtype.kind if kind == "S" else dataset.dtype.str[1:]) == kind
        if not same or dataset.file != file:
            raise ShardError(f"{printable(self._path)}: {printable(name)} is not the dataset that it should be")
        if name not in ("data", "key") and dataset.shape != self._key.shape:
            raise ShardError(
                f"{printable(self._path)}: {printable(name)} has {dataset.shape} rows, not {self._key.shape}"
            )
        return dataset

    def __iter__(self) -> Iterator[FoundSample]:
        for begin in range(0, self._key.shape[0], _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            columns = {
                name: self._places(name, offset[part], length[part]) for name, (offset, length) in self._fields.items()
            }
            labels = self._label[part].tolist()
            for i, key in enumerate(self._key[part].tolist()):
                found = [
                    (offsets[i], lengths[i], name) for name, (offsets, lengths) in columns.items() if lengths[i] >= 0
                ]
                fields = {
                    name: Found(offset, length, key + b"." + name.encode("utf-8", "surrogateescape"))
                    for offset, length, name in sorted(found)
                }
                yield FoundSample(key, fields, labels[i])

    def _places(
        self, name: str, offset: npt.NDArray[np.int64], length: npt.NDArray[np.int64]
    ) -> tuple[list[int], list[int]]:
        wrong = (length < -1) | (
            (length >= 0) & ((offset < 0) | (offset > self._size) | (length > self._size - offset))
        )
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ShardError(
                f"{printable(self._path)}: damaged: field {name!r} is said to lie at {offset[at]}, {length[at]} bytes "
                f"long, in {self._size} bytes of data"
            )
        return (offset + self._base).tolist(), length.tolist()
