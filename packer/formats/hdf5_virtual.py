"""`<split>.h5`: an HDF5 file of virtual datasets, through which the shards of a split look like one file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from packer.errors import ShardError
from packer.formats.hdf5_objects import MAX_ATTRIBUTE_BYTES
from packer.formats.hdf5_reader import H5PY_RAISES, is_ours, open_file
from packer.formats.hdf5_table import SCHEMA
from packer.sample import printable

if TYPE_CHECKING:
    from packer.manifest import Manifest, Split


_ANY_NAME = ("utf-8", "surrogateescape")


class _Part:
    """One shard, as far as the file of virtual datasets must know it."""

    def __init__(self, name: str, file: Any) -> None:
        self.name = name
        self.bytes = int(file["data"].shape[0])
        self.samples = int(file["key"].shape[0])
        self.key_bytes = int(file["key"].dtype.itemsize)
        self.fields = list(file["fields"])
        self.arrays = {
            field: (file[f"fields/{field}/array"].dtype, file[f"fields/{field}/array"].shape[1:])
            for field in self.fields
            if "array" in file[f"fields/{field}"]
        }
        self.offsets = {field: file[f"fields/{field}/offset"][()] for field in self.fields}


def virtual_file(folder: str, split: Split, manifest: Manifest) -> bytes | None:
    """The file's content, or None where the shards are not of our schema.

    `data`, `key`, `label`, `height`, `width` and every `length` and `array` are virtual; `offset`s are stored, as they
    count from the beginning of the joined `data`. HDF5 fills in for a shard that is missing: its samples then have
    the label −1 and no field, rather than zeros that look like data.

    Raises:
        ShardError: a shard cannot be read.
    """
    parts: list[_Part] = []
    for shard in split.shards:
        path = os.path.join(folder, shard.name)
        with open_file(path) as file:
            try:
                if not is_ours(file):
                    return None
                parts.append(_Part(shard.name, file))
            except H5PY_RAISES as error:
                raise ShardError(f"{printable(path)}: damaged: {error}") from error
    with h5py.File("split.h5", "w", driver="core", backing_store=False) as file:
        _write(file, parts, manifest)
        file.flush()
        return bytes(file.id.get_file_image())


def _write(file: Any, parts: list[_Part], manifest: Manifest) -> None:
    told = {"source": json.dumps(manifest.source), "options": json.dumps(manifest.options)}
    for name, text in {"creator": "packer-loaders", **told, "fingerprint": manifest.fingerprint}.items():
        if len(text.encode()) <= MAX_ATTRIBUTE_BYTES:
            file.attrs[name] = _texts([text])[0]
    file.attrs["schema"], file.attrs["virtual"] = SCHEMA, 1
    samples = [part.samples for part in parts]
    _join(file, parts, "data", np.dtype("u1"), (), 0, lambda part: part.bytes)
    _join(file, parts, "key", _text_type(max(part.key_bytes for part in parts)), (), None)
    _join(file, parts, "label", np.dtype("<i8"), (), -1)
    for name in ("height", "width"):
        _join(file, parts, name, np.dtype("<i4"), (), -1)
        file[name].attrs["units"] = "pixels"
    if manifest.classes:
        file.create_dataset("classes", data=_texts(manifest.classes), track_times=False)
    starts = np.cumsum([0, *(part.bytes for part in parts)])
    for field in sorted({name for part in parts for name in part.fields}):
        nothing = [np.zeros(n, np.int64) for n in samples]
        offsets = [
            part.offsets.get(field, zeros) + start
            for part, zeros, start in zip(parts, nothing, starts[:-1], strict=True)
        ]
        group = f"fields/{field}"
        file.create_dataset(f"{group}/offset", data=np.concatenate(offsets), track_times=False).attrs["units"] = "bytes"
        having = [part if field in part.fields else None for part in parts]
        _join(file, having, f"{group}/length", np.dtype("<i8"), (), -1, sizes=samples)
        kinds = {part.arrays.get(field) for part in parts}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            _join(file, parts, f"{group}/array", kind[0], kind[1], 0)


def _text_type(size: int) -> np.dtype[Any]:
    """UTF-8 of a fixed length: to HDF5 another type than ASCII, without a conversion."""
    dtype: np.dtype[Any] = h5py.string_dtype("utf-8", size)
    return dtype


def _texts(texts: Sequence[str]) -> npt.NDArray[Any]:
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    return np.array(encoded, _text_type(max(1, *map(len, encoded))))


def _join(
    file: Any,
    parts: list[_Part] | list[_Part | None],
    name: str,
    dtype: np.dtype[Any],
    rest: tuple[int, ...],
    fill: int | None,
    size: Callable[[_Part], int] = lambda part: part.samples,
    *,
    sizes: list[int] | None = None,
) -> None:
    """One virtual dataset over the same one of every part; a part that is None has none and is filled in."""
    lengths = sizes or [0 if part is None else size(part) for part in parts]
    space = h5py.h5s.create_simple((sum(lengths), *rest))
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_obj_track_times(False)  # the same bytes each time
    if fill is not None:
        create.set_fill_value(np.array(fill, dtype))
    begin = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None and length:
            space.select_hyperslab((begin, *(0 for _ in rest)), (length, *rest))
            create.set_virtual(
                space, part.name.encode(), name.encode(*_ANY_NAME), h5py.h5s.create_simple((length, *rest))
            )
        begin += length
    space.select_all()
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(dtype, logical=True)
    h5py.h5d.create(file.id, name.encode(*_ANY_NAME), kind, space, create, lcpl=links)
