"""HDF5 files that others wrote: what their samples are, read through h5py with bounded memory and written out anew.

Three layouts are recognised, links and files elsewhere refused:

- a table: root datasets whose first dimension is the sample: `images` (n, h, w, 3), `labels` (n,), …;
- a group for each sample, its datasets the fields;
- a dataset for each sample: encoded files as one-dimensional uint8.

Encoded files (uint8 of varying length, or opaque) become the field that their first bytes tell. uint8 arrays of
(h, w), (h, w, 1), (h, w, 3) or (h, w, 4) become `png`, which loses nothing; texts `txt`; other numbers `npy`. Whole
numbers called like a label are the label. Where a field is not its sample's only one of a kind, its dataset's name
comes first.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from packer.errors import ShardError
from packer.formats.base import NOTHING, Batch, Seen
from packer.formats.hdf5 import Hdf5Writer
from packer.formats.hdf5_reader import H5PY_RAISES, is_ours, open_file
from packer.sample import bad_fields, escape_key, printable, split_extension
from packer.strings import Strings

LABELS = frozenset(("label", "labels", "target", "targets", "class", "classes", "cls", "y"))
KEYS = frozenset(("key", "keys", "id", "ids", "name", "names", "filename", "filenames", "path", "paths"))

_SLAB_BYTES = 8 << 20
_MAX_SAMPLE_BYTES = 1 << 30
#: A dataset that claims so many times more bytes than are stored, and more than so many, is refused.
_MAX_GROWTH, _GROWTH_ALLOWED = 1000, 1 << 30
_MAGICS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif",
           b"\x93NUMPY": "npy"}  # fmt: skip

Fields = dict[str, bytes]


def is_foreign(path: str) -> bool:
    """Whether this is an HDF5 file of another schema than ours. Raises ShardError where it is no HDF5 file."""
    with open_file(path) as file:
        return not is_ours(file)


def write_out(path: str, target: str) -> int:
    """Write a stranger's file out as a shard of our schema; returns the number of samples.

    Raises:
        ShardError: damaged, of no layout that is known, or with parts in other places.
    """
    writer = Hdf5Writer(target, NOTHING, durable=False)
    count = 0
    try:
        with open_file(path) as file:
            try:
                for key, fields, label in _samples(file, path):
                    _write(writer, key, fields if label < 0 else fields | {"cls": b"%d" % label}, label)
                    count += 1
            except H5PY_RAISES as error:
                raise ShardError(f"{printable(path)}: damaged: {error}") from error
        if not count:
            raise ShardError(f"{printable(path)}: no sample in it")
        writer.close()
    finally:
        writer.abort()
    return count


def _write(writer: Hdf5Writer, key: bytes, fields: Fields, label: int) -> None:
    sizes = np.array([len(data) for data in fields.values()], np.int64)
    labels = np.array([label], np.int64)
    batch = Batch(Strings.of([key]), np.array([0, len(fields)]), list(fields), np.arange(len(fields)), sizes, labels)
    buffer, places = writer.layout(batch)
    for place, data in zip(places.tolist(), fields.values(), strict=True):
        buffer[place : place + len(data)] = data
    writer.commit(Seen(labels, np.full((1, 2), -1, np.int32)))


def _samples(file: Any, path: str) -> Iterator[tuple[bytes, Fields, int]]:
    """(key, fields, label) of every sample."""
    stem = split_extension(os.fsencode(os.path.basename(path)))[0]
    datasets, groups = _children(file, path)
    if datasets and groups:
        raise _refusal(path, f"datasets ({_shape(next(iter(datasets.values())))}) beside groups ({next(iter(groups))})")
    if groups:
        for name, group in groups.items():
            inside, deeper = _children(group, path)
            if deeper or not inside:
                raise _refusal(path, f"the group {name!r} does not hold a sample's datasets alone")
            yield _of_values(escape_key(stem + b"/" + _encoded(name)), {n: (d, d[()]) for n, d in inside.items()}, path)
    elif datasets and all(d.dtype == np.uint8 and d.ndim == 1 for d in datasets.values()):
        for name, dataset in datasets.items():
            stripped = split_extension(_encoded(name))[0]
            yield _of_values(escape_key(stem + b"/" + stripped), {name: (dataset, dataset[()])}, path)
    else:
        yield from _of_table(datasets, stem, path)


def _refusal(path: str, what: str) -> ShardError:
    return ShardError(f"{printable(path)}: its samples cannot be told: {printable(what)}")


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _shape(dataset: Any) -> str:
    return f"{dataset.name} {tuple(dataset.shape)} {dataset.dtype}"


# ---------------------------------------------------------------- what may be read


def _children(group: Any, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Datasets and groups in a group, in order of names, each looked at."""
    datasets, groups = {}, {}
    for name in sorted(group):
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise ShardError(
                f"{printable(path)}: {printable(name)} is a link ({type(link).__name__}), which is not followed: copy "
                "what it points to into the file (h5copy)"
            )
        found = group[name]
        if isinstance(found, h5py.Dataset):
            _check(found, path)
            datasets[name] = found
        elif isinstance(found, h5py.Group):
            groups[name] = found
    return datasets, groups


def _check(dataset: Any, path: str, depth: int = 0) -> None:
    """Refuse data elsewhere, and claims of more than is there."""
    what = f"{printable(path)}: {printable(dataset.name)}"
    if dataset.id.get_create_plist().get_external_count():
        raise ShardError(f"{what} is stored in files outside (external storage), which are not read: h5repack it")
    if dataset.dtype.kind == "O" and h5py.check_dtype(ref=dataset.dtype) is not None:
        raise ShardError(f"{what} holds references, which are not followed")
    if dataset.shape is None:
        raise ShardError(f"{what} is empty (no shape)")
    if dataset.is_virtual:
        _check_virtual(dataset, path, what, depth)
        return
    claimed, stored = dataset.size * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if claimed > _GROWTH_ALLOWED and claimed > _MAX_GROWTH * stored:
        raise ShardError(f"{what} claims {claimed} bytes, of which {stored} are stored: refused")
    if dataset.ndim and dataset.shape[0] and claimed // dataset.shape[0] > _MAX_SAMPLE_BYTES:
        raise ShardError(f"{what} has rows of {claimed // dataset.shape[0]} bytes; the limit is {_MAX_SAMPLE_BYTES}")


def _check_virtual(dataset: Any, path: str, what: str, depth: int) -> None:
    """Sources of a virtual dataset lie in its own folder, are there, and are themselves no way out of it."""
    folder = os.path.realpath(os.path.dirname(path) or ".")
    if depth > 2:
        raise ShardError(f"{what}: virtual datasets of virtual datasets of virtual datasets: refused")
    for source in dataset.virtual_sources():
        if source.file_name == ".":
            _check(dataset.file[source.dset_name], path, depth + 1)
            continue
        target = os.path.join(os.path.dirname(path), source.file_name)
        if os.path.dirname(os.path.realpath(target)) != folder or "%" in source.file_name:
            raise ShardError(f"{what} is virtual, over {printable(source.file_name)} outside its folder: refused")
        with open_file(target) as file:
            if source.dset_name not in file:
                raise ShardError(f"{what} is virtual, over {printable(source.dset_name)}, which {target} has not")
            _check(file[source.dset_name], target, depth + 1)


# ---------------------------------------------------------------- samples


def _of_table(datasets: dict[str, Any], stem: bytes, path: str) -> Iterator[tuple[bytes, Fields, int]]:
    """Samples of root datasets with a common first dimension."""
    if not datasets:
        return
    longest = max(datasets.values(), key=lambda d: d.ndim)
    for dataset in datasets.values():
        if dataset.ndim == 0 or dataset.shape[0] != longest.shape[0]:
            raise _refusal(path, f"datasets of different lengths: {_shape(longest)} and {_shape(dataset)}")
    count = longest.shape[0]
    row_bytes = sum(d.dtype.itemsize * int(np.prod(d.shape[1:], dtype=np.int64)) for d in datasets.values())
    step = max(1, min(1024, _SLAB_BYTES // max(row_bytes, 1)))
    named = next((n for n in datasets if n.lower() in KEYS and datasets[n].ndim == 1 and _is_text(datasets[n])), None)
    for begin in range(0, count, step):
        slab = {name: dataset[begin : begin + step] for name, dataset in datasets.items()}
        for i in range(min(step, count - begin)):
            key = escape_key(stem + b"/%08d" % (begin + i))
            if named is not None:
                key = _key(slab[named][i])
            yield _of_values(key, {n: (datasets[n], slab[n][i]) for n in datasets if n != named}, path)


def _key(value: bytes | str) -> bytes:
    raw = _encoded(value) if isinstance(value, str) else bytes(value)
    folder, slash, name = raw.rpartition(b"/")
    return escape_key(folder + slash + split_extension(name)[0])


def _is_text(dataset: Any) -> bool:
    return dataset.dtype.kind == "S" or h5py.check_string_dtype(dataset.dtype) is not None


def _of_values(key: bytes, values: dict[str, tuple[Any, Any]], path: str) -> tuple[bytes, Fields, int]:
    """A sample of its datasets' values."""
    label = -1
    found: list[tuple[str, str, bytes]] = []
    for name, (dataset, value) in values.items():
        array = value if isinstance(value, str | bytes | np.void) else np.asarray(value)
        if name.lower() in LABELS and isinstance(array, np.ndarray) and array.size == 1 and array.dtype.kind in "iu":
            label = max(int(array.reshape(())), -1)
        else:
            found.append((name, *_field(dataset, array, path)))
    kinds = Counter(kind for _, kind, _ in found)
    fields = {(kind if kinds[kind] == 1 else f"{name.lower()}.{kind}"): data for name, kind, data in found}
    if not fields:
        raise _refusal(path, f"no field beside the label of {printable(key)}")
    if bad := bad_fields(fields):
        raise _refusal(path, f"{bad[0]!r} cannot be a field's name")
    return key, fields, label


def _field(dataset: Any, value: Any, path: str) -> tuple[str, bytes]:
    """Which kind of file a value becomes, and its bytes."""
    if isinstance(value, str | bytes):
        data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        return _sniffed(data, "txt"), data
    if isinstance(value, np.void) and value.dtype.names is None:
        return _sniffed(value.tobytes(), "bin"), value.tobytes()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        encoded = value.dtype == np.uint8 and value.ndim == 1
        if encoded and (kind := _sniffed(value.tobytes()[:16], "")):
            return kind, value.tobytes()
        if value.dtype == np.uint8 and value.size and (value.ndim == 2 or value.shape[2:] in ((1,), (3,), (4,))):
            return "png", _png(value)
        out = io.BytesIO()
        np.save(out, value, allow_pickle=False)
        return "npy", out.getvalue()
    raise _refusal(path, f"{_shape(dataset)} is neither numbers, text nor bytes")


def _sniffed(data: bytes, otherwise: str) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for magic, kind in _MAGICS.items() if data.startswith(magic)), otherwise)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels).save(out, "png", compress_level=1)
    return out.getvalue()
