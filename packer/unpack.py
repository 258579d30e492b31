"""Unpacking: the files of a packed dataset, byte for byte, under their original names.

Names come out of a file, so none is trusted: all are checked before the first byte is written,
files are made new (never opened through a link) below a folder that did not exist before, and
nothing has its final place until everything is written and every checksum has been compared.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from packer.engines import Report, local_engine, no_report
from packer.errors import ManifestError, ShardError, UnsafeNameError, UsageError
from packer.index import Rows
from packer.packed import Packed, PackedSplit
from packer.safe_tree import WORK_NAME, Place, Tree, unsafe
from packer.sample import is_picture_array, printable
from packer.strings import Int64s, Strings, repeated

_SHOWN = 20
_WINDOW = 4 << 20


@dataclass(frozen=True)
class Unpacked:
    """What unpacking wrote.

    Attributes:
        samples, files, bytes: how much.
        made: fields that packing had made (such as `cls`), which no file was the source of.
    """

    samples: int
    files: int
    bytes: int
    made: int


def unpack(
    folder: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    split: str | None = None,
    keys: frozenset[bytes] | None = None,
    limit: int | None = None,
    workers: int | None = None,
    progress: Report | None = None,
) -> Unpacked:
    """Restore the files of a packed dataset.

    Args:
        folder: the packed dataset.
        dst: a folder that is new or empty. It stays so until all is written (to the page cache, as tar does).
        split: only this split.
        keys: only samples with one of these keys or original paths.
        limit: only the first so many of them.
        workers: processes; None takes one per CPU that may be used.
        progress: called with (files, bytes) done since the last call.

    Raises:
        UnsafeNameError: a name would leave `dst`, or two files would have the same; nothing was written.
        ManifestError: no packed dataset, or its index or names file is damaged; nothing was written.
        ShardError: a shard is truncated, or a checksum differs; what was written is removed.
        OutputError: `dst` is not empty, or cannot be written.
        UsageError: no such split, or keys that no sample has.

    >>> unpack("out/", "restored/", split="val").files                       # doctest: +SKIP
    50000
    """
    return unpack_prepared(prepare_unpack(folder, split=split, keys=keys, limit=limit), dst, workers, progress)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Files chosen and their names checked; nothing written yet.

    Attributes:
        result: what unpacking will have written.
    """

    result: Unpacked
    parts: list[_Files]


def prepare_unpack(
    folder: str | os.PathLike[str],
    *,
    split: str | None = None,
    keys: frozenset[bytes] | None = None,
    limit: int | None = None,
) -> Prepared:
    """The first half of `unpack`: choose, and refuse what cannot be restored."""
    dataset = Packed(folder)
    splits = list(dataset.only(split).values())
    for packed in splits:
        packed.check_sidecars()
    parts = [_Files.of(packed, chosen) for packed, chosen in zip(splits, _choose(splits, keys, limit), strict=True)]
    _check_names(dataset.folder, parts)
    result = Unpacked(
        samples=sum(part.samples for part in parts),
        files=sum(len(part.paths) for part in parts),
        bytes=sum(int(part.length.sum()) for part in parts),
        made=sum(part.made for part in parts),
    )
    return Prepared(result, parts)


def unpack_prepared(
    prepared: Prepared, dst: str | os.PathLike[str], workers: int | None = None, progress: Report | None = None
) -> Unpacked:
    """The second half of `unpack`: write."""
    with Place(os.fspath(dst)) as place:
        shards = sum(len(part.packed.shards) for part in prepared.parts)
        tasks = (task for part in prepared.parts for task in part.tasks(place.work))
        for _ in local_engine(workers, shards).run(_write_files, tasks, progress or no_report):
            pass
        place.finish()
    return prepared.result


# ---------------------------------------------------------------- what to write


def _choose(splits: list[PackedSplit], keys: frozenset[bytes] | None, limit: int | None) -> Iterator[Int64s]:
    """Per split the numbers of the samples that are wanted, ascending."""
    left = limit
    found: set[bytes] = set()
    wanted = []
    for packed in splits:
        samples = np.arange(len(packed.rows))  # opening the index compares its length with the manifest
        if keys is not None:
            listed = np.zeros(len(samples), bool)
            for column in (packed.names.keys, *packed.names.paths):
                hits = [i for i, name in enumerate(column) if name in keys]
                found.update(column[i] for i in hits)
                listed[hits] = True
            samples = np.flatnonzero(listed)
        wanted.append(samples[:left])
        left = None if left is None else left - len(wanted[-1])
    if keys is not None and (missing := keys - found):
        names = ", ".join(repr(printable(name)) for name in sorted(missing)[:5])
        raise UsageError(f"{len(missing)} of the {len(keys)} listed keys are in no sample: {names}")
    return iter(wanted)


@dataclass(frozen=True, eq=False)
class _Files:
    """The files of one split, one entry each, ordered by shard and offset.

    Attributes:
        packed: the split.
        samples: how many samples they belong to.
        made: fields of these samples that have no file.
        sample, shard, offset, length, crc32c: int64 per file.
        paths: per file.
    """

    packed: PackedSplit
    samples: int
    made: int
    sample: Int64s
    shard: Int64s
    offset: Int64s
    length: Int64s
    crc32c: Int64s
    paths: Strings

    @staticmethod
    def of(packed: PackedSplit, samples: Int64s) -> _Files:
        rows: Rows = packed.rows[samples]
        columns: list[list[Int64s]] = [[], [], [], []]
        paths: list[Strings] = []
        made = 0
        for name, column in zip(packed.fields, _paths(packed), strict=True):
            has_path = column.lengths[samples] > 0
            present = rows[f"{name}:length"] >= 0
            made += int(np.count_nonzero(present & ~has_path))
            at = np.flatnonzero(present & has_path)
            paths.append(column.take(samples[at]))
            places = (rows[f"{name}:{what}"][at].astype(np.int64) for what in ("offset", "length", "crc32c"))
            for whole, piece in zip(columns, (samples[at], *places), strict=True):
                whole.append(piece)
        sample, offset, length, crc = (np.concatenate([np.zeros(0, np.int64), *pieces]) for pieces in columns)
        shard_of = np.zeros(len(packed.rows), np.int64)
        shard_of[samples] = rows["shard"]
        order = np.lexsort((offset, shard_of[sample]))
        sample = sample[order]
        return _Files(
            packed=packed,
            samples=len(samples),
            made=made,
            sample=sample,
            shard=shard_of[sample],
            offset=offset[order],
            length=length[order],
            crc32c=crc[order],
            paths=Strings.concatenate(paths).take(order),
        )

    def tasks(self, work: str) -> Iterator[_Task]:
        """One task per shard."""
        shards = self.packed.shards
        if len(self.shard) and not 0 <= self.shard[0] <= self.shard[-1] < len(shards):
            index = os.path.join(self.packed.folder, self.packed.split.index_file)
            raise ManifestError(
                f"{index} names a shard that dataset.json does not have; run: packer verify {self.packed.folder}"
            )
        bounds = np.searchsorted(self.shard, np.arange(len(shards) + 1)).tolist()
        for number in range(len(shards)):
            part = slice(bounds[number], bounds[number + 1])
            if part.start < part.stop:
                paths = self.paths.take(np.arange(part.start, part.stop))
                yield _Task(
                    self.packed, number, work, self.sample[part], self.offset[part], self.length[part],
                    self.crc32c[part], paths,
                )  # fmt: skip


def _paths(packed: PackedSplit) -> tuple[Strings, ...]:
    """Where each field's file goes: its original path; CT, whose paths are not kept, `key.field`."""
    columns = packed.names.paths
    if any(column.lengths.any() for column in columns) or not any(map(is_picture_array, packed.fields)):
        return columns
    keys = list(packed.names.keys)
    return tuple(Strings.of(key + b"." + field.encode() for key in keys) for field in packed.fields)


def _check_names(folder: str, parts: list[_Files]) -> None:
    """Refuse every name that would not become a file of its own below the folder to write."""
    paths = Strings.concatenate(part.paths for part in parts)
    if len(paths) == 0:
        raise UsageError(f"{folder}: these samples have no original files, so there is nothing to restore")
    problems = [(path, reason) for path in paths if (reason := unsafe(path))]
    if not problems:
        folders = _folders(paths)
        problems = [(path, "is the name of a file and of a folder") for path in paths if path in folders]
        counts = Counter(paths[i] for i in repeated(paths).tolist())
        problems += [(path, f"is the name of {n} files") for path, n in counts.items() if n > 1]
    if problems:
        lines = [f"  {printable(path[:300])!r} {reason}" for path, reason in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"  … and {len(problems) - _SHOWN:,} more")
        raise UnsafeNameError(
            f"{folder} holds {len(problems):,} name(s) that cannot be restored; nothing was written:\n"
            + "\n".join(lines)
            + "\nchoose other samples with --split or --keys, or restore from a source that you trust"
        )


def _folders(paths: Strings) -> set[bytes]:
    """Every folder that these files lie in, at any depth, and the one that is written to."""
    folders = {path.rpartition(b"/")[0] for path in paths}
    for path in list(folders):
        above = path.rpartition(b"/")[0]
        while above and above not in folders:
            folders.add(above)
            above = above.rpartition(b"/")[0]
    return folders | {os.fsencode(WORK_NAME)}


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, eq=False)
class _Task:
    """The files that come out of one shard, in its order; columns as in `_Files`."""

    packed: PackedSplit
    shard: int
    work: str
    sample: Int64s
    offset: Int64s
    length: Int64s
    crc32c: Int64s
    paths: Strings

    def complain(self, i: int, what: str) -> ShardError:
        """An error that leads to file i's sample."""
        shard = printable(self.packed.shards[self.shard].name)
        return ShardError(
            f"{shard}, sample {self.sample[i]} ({printable(self.paths[i])!r}), offset {self.offset[i]}: {what}; "
            f"nothing was kept; run: packer verify {self.packed.folder}"
        )


def _write_files(task: _Task, report: Report) -> int:
    """Write one shard's files; returns how many."""
    try:
        shard = task.packed.descriptor(task.shard)
        size = os.fstat(shard).st_size
        beyond = (task.offset < 0) | (task.length > size - task.offset)
        if beyond.any():
            raise task.complain(int(np.argmax(beyond)), f"truncated: the shard ends at offset {size}")
        with Tree(task.work) as tree:
            for begin, end in _windows(task.offset.tolist(), task.length.tolist()):
                _write_window(task, tree, begin, end)
                report(end - begin, int(task.length[begin:end].sum()))
    finally:
        task.packed.close()
    return len(task.paths)


def _windows(offsets: list[int], lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Cut the files, sorted by offset, into runs that one read of `_WINDOW` bytes covers; a larger one is its own."""
    begin = 0
    for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        alone = lengths[begin] > _WINDOW
        if i > begin and (alone or offset + length - offsets[begin] > _WINDOW):
            yield begin, i
            begin = i
    if offsets:
        yield begin, len(offsets)


def _write_window(task: _Task, tree: Tree, begin: int, end: int) -> None:
    first = int(task.offset[begin])
    until = int((task.offset[begin:end] + task.length[begin:end]).max())
    if until - first > _WINDOW:  # one large file
        _write_large(task, tree, begin, first, until)
        return
    view = memoryview(bytearray(until - first))
    task.packed.read_into(task.shard, first, view)
    paths = task.paths.slice(begin, end)
    places = zip(task.offset[begin:end].tolist(), task.length[begin:end].tolist(), strict=True)
    for i, (path, (offset, length)) in enumerate(zip(paths, places, strict=True), begin):
        content = view[offset - first : offset - first + length]
        if crc32c(content) != task.crc32c[i]:
            raise task.complain(i, "damaged: crc32c mismatch")
        with tree.create(path) as file:
            file.write(content)


def _write_large(task: _Task, tree: Tree, i: int, begin: int, end: int) -> None:
    checksum = 0
    buffer = memoryview(bytearray(_WINDOW))
    with tree.create(task.paths[i]) as file:
        for at in range(begin, end, _WINDOW):
            view = buffer[: end - at]
            task.packed.read_into(task.shard, at, view)
            checksum = crc32c(view, checksum)
            file.write(view)
    if checksum != task.crc32c[i]:
        raise task.complain(i, "damaged: crc32c mismatch")
