"""HDF5 shards: the payloads of all samples in one contiguous dataset, and what they are beside it.

    /data                     uint8 (bytes,)  payloads, sample after sample, a sample's fields side by side
    /key                      UTF-8 (n,)      keys, of fixed length, padded with zeros
    /label                    int64 (n,)      −1 without a label; the attribute `classes` names the labels
    /height, /width           int32 (n,)      of the first image as stored; −1 where unknown
    /fields/<field>/offset    int64 (n,)      where in /data the field begins
    /fields/<field>/length    int64 (n,)      −1 where the sample lacks the field
    /fields/<field>/array     (n, …)          `.npy` fields that all have one shape and type: the arrays themselves,
                                              chunks of one sample each that lie inside /data behind their headers

So `f["data"][offset[i] : offset[i] + length[i]]` is a field's file, byte for byte, and `array[i]` its array; a `cls`
file that says ` 1` keeps its bytes beside the number in /label. An empty payload takes one byte, so that the order
of offsets is the order of fields. Nothing in a shard depends on a clock, a path or a library's version.

Payloads are appended as they come, at the speed of a tar; the structures follow in the end (`hdf5_objects`), and
the superblock, at the beginning, is written last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING

import numpy as np

from packer.formats import hdf5_objects as objects
from packer.formats.base import NOTHING, About, Batch, FoundSample, Mask, ReadPiece, Seen, Written
from packer.formats.hdf5_table import Table
from packer.formats.shard_file import ShardFile
from packer.strings import Int64s

if TYPE_CHECKING:
    from packer.manifest import Manifest, Split
    from packer.sources.base import Scan

#: Where /data begins.
HEAD = 64

_PIECE_BYTES = 4 << 20
_OBJECT_BYTES = 320  # an object header with attributes, its link and alignment; generous


class Hdf5Format:
    """`hdf5`: see `packer.formats.base.Format`."""

    name = "hdf5"
    title = "HDF5"
    suffix = ".h5"
    suffixes = (".h5", ".hdf5", ".hdf", ".he5")
    packed_suffixes = (".h5.gz", ".hdf5.gz")
    beside = (".h5",)
    max_field_bytes = 1 << 60

    def sample_bytes(self, scan: Scan) -> Int64s:
        """int64 (n,): payloads, and a row of every column; at most, as some columns are as wide as the widest key."""
        fields = _fields(scan)
        arrays = sum(_is_array(name) for name in fields)
        longest = int(scan.keys.lengths.max(initial=1))
        each = longest + 8 + 2 * 4 + 16 * len(fields) + 80 * arrays
        if scan.made_cls:
            each += len(str(int(scan.label.max(initial=0))))
        total = np.concatenate([[0], np.cumsum(np.maximum(scan.sizes, 1))])[scan.first]
        return np.diff(total) + each

    def overhead(self, scan: Scan) -> int:
        """Superblock and object headers, at most; class names too."""
        fields = _fields(scan)
        names = sum(4 * len(name.encode("utf-8", "surrogateescape")) for name in fields)
        trees = sum(2 * objects.tree_bytes(1, 8) for name in fields if _is_array(name))
        return HEAD + (12 + 5 * len(fields)) * _OBJECT_BYTES + names + trees + _classes_bytes(scan.classes)

    def writer(self, path: str, *, about: About = NOTHING, durable: bool = True) -> Hdf5Writer:
        """Start a shard at this path; see `Format.writer`."""
        return Hdf5Writer(path, about, durable=durable)

    def recognises(self, head: bytes) -> bool:
        """Whether a superblock's signature stands where it may."""
        return any(head.startswith(objects.SIGNATURE, at) for at in (0, 512, 1024, 2048))

    def write_out(self, path: str, target: str) -> bool:
        """Write a stranger's file out as a shard of our schema; see `packer.formats.hdf5_foreign`."""
        from packer.formats import hdf5_foreign

        return hdf5_foreign.is_foreign(path) and hdf5_foreign.write_out(path, target) > 0

    def walk(self, path: str, skipped: MutableMapping[str, int] | None = None) -> Iterator[FoundSample]:
        """Every sample of a shard by its own headers; see `Format.walk`."""
        from packer.formats.hdf5_reader import walk

        return walk(path, skipped)

    def sidecars(
        self, folder: str, split: Split, manifest: Manifest
    ) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
        """One HDF5 file of virtual datasets, through which a split's shards look like one."""
        from packer.formats.hdf5_virtual import virtual_file

        name = split.name + self.beside[0]
        if name not in {shard.name for shard in split.shards}:
            content = virtual_file(folder, split, manifest)
            if content is not None:
                yield name, [content]


FORMAT = Hdf5Format()


def _fields(scan: Scan) -> tuple[str, ...]:
    return (*scan.fields, "cls") if scan.made_cls else scan.fields


def _is_array(field: str) -> bool:
    return field == "npy" or field.endswith(".npy")


def _classes_bytes(classes: tuple[str, ...] | None) -> int:
    encoded = [len(name.encode("utf-8", "surrogateescape")) for name in classes or ()]
    return len(encoded) * max(encoded, default=0)


class Hdf5Writer:
    """Writes one HDF5 file; see `packer.formats.base.ShardWriter`."""

    def __init__(self, path: str, about: About, *, durable: bool = True) -> None:
        self._file = ShardFile(path, durable=durable)
        self._about = about
        self._table = Table()
        self._batch: Batch | None = None
        self._buffer = np.empty(0, np.uint8)
        head = self._file.take(HEAD)
        head[:HEAD] = 0
        self._file.write(head, HEAD)

    def layout(self, batch: Batch) -> tuple[memoryview, Int64s]:
        """Make room for a batch; see `ShardWriter.layout`."""
        self._batch = batch
        ends = np.cumsum(np.maximum(batch.sizes, 1))
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])
        self._buffer = self._file.take(int(self._starts[-1]))
        self._buffer[self._starts[:-1][batch.sizes == 0]] = 0
        return self._buffer.data, self._starts[:-1]

    def commit(self, seen: Seen, keep: Mask | None = None) -> Int64s:
        """Write the batch out; see `ShardWriter.commit`."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("commit without layout")
        self._batch = None
        starts, offsets = self._starts, self._starts[:-1] + self._file.size
        used = int(starts[-1])
        if keep is not None and not keep.all():
            # Close the gaps of samples left out: later ones move forward.
            kept_files = np.repeat(keep, np.diff(batch.first))
            rooms = np.diff(starts)
            kept_bytes = np.repeat(kept_files, rooms)
            used = int(rooms[kept_files].sum())
            gone = np.cumsum(np.where(kept_files, 0, rooms))
            starts = np.append(starts[:-1] - gone, used)
            offsets = np.where(kept_files, offsets - gone, -1)
            self._buffer[:used] = self._buffer[: len(kept_bytes)][kept_bytes]
        self._table.add(batch, seen, keep, offsets - HEAD)
        for field in self._table.arrays(batch.fields, _is_array):
            for i in np.flatnonzero((offsets >= 0) & (batch.field == batch.fields.index(field))).tolist():
                begin = int(starts[i])
                self._table.see_array(field, bytes(self._buffer[begin : begin + min(int(batch.sizes[i]), 4096)]))
        self._file.write(self._buffer, used)
        return offsets

    def stream(self, batch: Batch, seen: Seen, read: ReadPiece) -> Int64s:
        """Write a batch piece by piece; see `ShardWriter.stream`."""
        offsets = []
        for i, (field, size) in enumerate(zip(batch.field.tolist(), batch.sizes.tolist(), strict=True)):
            offsets.append(self._file.size)
            for begin in range(0, max(size, 1), _PIECE_BYTES):
                used = min(_PIECE_BYTES, size - begin)
                buffer = self._file.take(_PIECE_BYTES)
                buffer[:1] = 0
                if used:
                    read(i, begin, buffer.data[:used])
                if begin == 0 and _is_array(batch.fields[field]):
                    self._table.see_array(batch.fields[field], bytes(buffer[: min(used, 4096)]))
                self._file.write(buffer, max(used, 1))
        absolute = np.array(offsets, np.int64)
        self._table.add(batch, seen, None, absolute - HEAD)
        return absolute

    def close(self) -> Written:
        """Describe what was written, and make the file durable."""
        data_bytes = self._file.size - HEAD
        tail, root = self._table.tail(self._about, HEAD, data_bytes)
        for begin in range(0, len(tail), _PIECE_BYTES):
            part = np.frombuffer(tail, np.uint8)[begin : begin + _PIECE_BYTES]
            buffer = self._file.take(len(part))
            buffer[: len(part)] = part
            self._file.write(buffer, len(part))
        return self._file.close(objects.superblock(root, self._file.size))

    def abort(self) -> None:
        """Let go of the file as it is."""
        self._file.abort()
