"""Making shards that others wrote readable by index: `packer index`.

Every shard is read once, front to back; headers are checked, contents checksummed, images' sizes
noted. The shards are never written to. What the headers say becomes the same index, names and
manifest that packing writes.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from packer import npy
from packer.engines import Report, local_engine, no_report
from packer.errors import (
    BadImageError,
    DamagedShardError,
    ManifestError,
    OutputError,
    ProblemsError,
    ShardError,
    UsageError,
)
from packer.finish import finish
from packer.formats import get_format
from packer.formats.base import Format, Found, FoundSample
from packer.imaging import probe
from packer.index import Names, Rows, empty_rows
from packer.known import keep_known
from packer.manifest import FILE, Manifest, Shard, Split
from packer.patterns import find_shards, group_by_split
from packer.sample import field_name, is_image_field, is_picture_array, label_of, printable
from packer.sources.base import StringsBuilder
from packer.storage import exclusive, open_regular, output_error
from packer.strings import Int64s, Strings

#: `source.layout` of a manifest made here, not by packing.
LAYOUT = "shards"

_LABEL_FIELD = "cls"
_MAX_FIELDS = 256  # every field is three columns of every row
_PIECE = 8 << 20
_MAX_IN_MEMORY = 64 << 20  # larger contents are checksummed piece by piece, and not probed
_REPORT_EVERY = 256


def index_folder(
    where: str | os.PathLike[str],
    *,
    splits: Mapping[str, str] | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Report | None = None,
) -> Manifest:
    """Write index, names, the format's sidecars and the manifest beside shards.

    What a sample is, is the format's to say (`packer.formats.base.Format.walk`; in a tar, a run of consecutive
    members with one key). Its label is what the container states, or else the number in its `cls` field. `.jpeg`
    and `.JPG` become the field `jpg`, as in packing, unless the sample has both.

    Args:
        where: a folder of shards, or a pattern (see `packer.patterns.find_shards`).
        splits: split → glob over shard names; by default a word of the shard's name, or else its folder's
            name (`train`, `val`, `valid`, `validation`, `dev`, `test`), or else `train`.
        force: replace what packing wrote. Class names, original paths and the like are kept
            where the shards are still the very same.
        workers: processes; None takes one per CPU that may be used.
        progress: called with (samples, bytes) done since the last call.

    Returns:
        The manifest. Its `source` counts what is in no sample, by reason; and under `lost` the samples
        of which packing knew what their shards do not tell.

    Raises:
        ProblemsError: truncated or damaged shards, or keys used twice in a split; all are listed.
        SourceError, UsageError: no shards, or in a place where they cannot be indexed.
        OutputError: the folder holds a packed dataset (see `force`), or cannot be written.

    >>> index_folder("cc3m/{00000..00331}.tar").samples                      # doctest: +SKIP
    2905954
    """
    folder, names, format_ = find_shards(os.fspath(where))
    beside = _sidecars(folder)
    names = [name for name in names if name not in beside]
    grouped = group_by_split(folder, names, splits)
    _refuse_overwriting(names, grouped, format_)
    before = _check_free(folder, force=force)
    with exclusive(folder, folder):
        shards = _read_all(folder, names, format_, workers, progress or no_report)
        return _write(folder, grouped, shards, format_, before)


def _sidecars(folder: str) -> frozenset[str]:
    """Files beside the shards that packer wrote: an HDF5 one looks like a shard."""
    with contextlib.suppress(ManifestError):  # said later
        return frozenset(Manifest.load(folder).sidecars)
    return frozenset()


def _write(
    folder: str,
    grouped: Mapping[str, Sequence[str]],
    shards: Mapping[str, _Indexed],
    format_: Format,
    before: Manifest | None,
) -> Manifest:
    """Everything that stands beside the shards, the manifest last."""
    fields = _field_order(shards.values(), before)
    parts = [_join(split, [shards[name] for name in listed], fields) for split, listed in grouped.items()]
    _refuse_doubles(parts)
    manifest = Manifest(
        format_.name,
        fields,
        {split.name: split for split, _, _ in parts},
        source=_describe(shards.values(), format_),
    )
    if before is not None:
        parts, manifest = keep_known(folder, before, parts, manifest, packed=before.source.get("layout") != LAYOUT)
    try:
        os.unlink(os.path.join(folder, FILE))  # from here until the end the folder is not complete
    except FileNotFoundError:
        pass
    except OSError as error:
        raise output_error(os.path.join(folder, FILE), error) from error
    return finish(
        folder,
        format=format_.name,
        splits=parts,
        fields=fields,
        classes=manifest.classes,
        source=manifest.source,
        options=manifest.options,
        fingerprint=manifest.fingerprint,
    )


def _refuse_overwriting(shards: Sequence[str], splits: Iterable[str], format_: Format) -> None:
    """Shards are never written to, not even those that are called like what is written beside them."""
    parts = [Split(name, ()) for name in splits]
    written = {FILE, *(name for part in parts for name in (part.index_file, part.names_file))}
    # A file of virtual datasets gives way to a shard of its name.
    written |= {name for part in parts for name in part.beside(format_) if not name.endswith(format_.suffix)}
    for name in sorted(written.intersection(shards)):
        raise UsageError(
            f"the shard {printable(name)!r} is called like a file of the index; rename it to end in {format_.suffix}"
        )


def _check_free(folder: str, *, force: bool) -> Manifest | None:
    """The manifest that stands there already, if it can be read and replaced."""
    if not os.access(folder, os.W_OK | os.X_OK):  # before hours of reading
        raise OutputError(f"cannot write into {printable(folder)}, and an index stands beside its shards")
    if os.path.isdir(os.path.join(folder, ".packer")):
        raise OutputError(f"{folder} holds an unfinished job; run its 'packer shard' command again to finish it")
    if not os.path.exists(os.path.join(folder, FILE)):
        return None
    try:
        manifest = Manifest.load(folder)
    except ManifestError as error:
        if force:
            return None
        raise OutputError(
            f"{error}; --force replaces it, without the class names and original paths that packing knew"
        ) from error
    if manifest.source.get("layout") != LAYOUT and not force:
        raise OutputError(f"{folder} is a packed dataset and has its index; --force makes it again from the shards")
    return manifest


# --- one shard ---------------------------------------------------------------------------------


@dataclass
class _Column:
    """One field of a shard's samples; absent where `samples` has a gap."""

    samples: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    checksums: array[int] = field(default_factory=lambda: array("I"))
    names: StringsBuilder = field(default_factory=StringsBuilder)


@dataclass
class _Indexed:
    """What one shard holds, or what is wrong with it."""

    name: str
    size: int = 0
    crc32c: int = 0
    keys: StringsBuilder = field(default_factory=StringsBuilder)
    columns: dict[str, _Column] = field(default_factory=dict)
    labels: array[int] = field(default_factory=lambda: array("q"))
    heights: array[int] = field(default_factory=lambda: array("i"))
    widths: array[int] = field(default_factory=lambda: array("i"))
    skipped: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    problem: str | None = None

    @property
    def samples(self) -> int:
        """How many samples the shard has."""
        return len(self.labels)


class _Task(NamedTuple):
    """One shard to be read."""

    path: str
    format: str


def _read_all(
    folder: str, names: Sequence[str], format_: Format, workers: int | None, progress: Report
) -> dict[str, _Indexed]:
    tasks = [_Task(os.path.join(folder, name), format_.name) for name in names]
    done = {result.name: result for result in local_engine(workers, len(names)).run(_index_shard, tasks, progress)}
    bad = [(printable(name), problem) for name in names if (problem := done[name].problem)]
    if bad:
        raise ProblemsError(
            f"{len(bad)} of {len(names)} shards cannot be indexed; nothing was written:",
            bad,
            "fetch or write them again, or move them away; then run the same command again",
        )
    return {name: done[name] for name in names}


def _index_shard(task: _Task, report: Report) -> _Indexed:
    """Read one shard. A defect of the shard becomes `problem`, so that all shards' defects are told at once."""
    name = os.path.basename(task.path)
    try:
        fd = open_regular(task.path)
    except OSError as error:
        return _Indexed(name, problem=error.strerror)
    try:
        return _ShardPass(fd, name, report).run(get_format(task.format), task.path)
    except DamagedShardError as error:
        return _Indexed(name, problem=f"at offset {error.offset}: {error.what}")
    except (ShardError, OSError) as error:
        return _Indexed(name, problem=str(error))
    finally:
        os.close(fd)


class _ShardPass:
    """One reading of one shard."""

    def __init__(self, fd: int, name: str, report: Report) -> None:
        self._file = _Contents(fd, name)
        self._report = report
        self.found = _Indexed(name)

    def run(self, format_: Format, path: str) -> _Indexed:
        found = self.found
        reported = 0
        for sample in format_.walk(path, found.skipped):
            self._sample(sample)
            if found.samples % _REPORT_EVERY == 0:
                self._report(_REPORT_EVERY, self._file.at - reported)
                reported = self._file.at
        found.size, found.crc32c = self._file.finish()
        self._report(found.samples % _REPORT_EVERY, found.size - reported)
        return found

    def _sample(self, sample: FoundSample) -> None:
        found, number = self.found, self.found.samples
        label = -1 if sample.label is None else sample.label
        height = width = -1
        for raw, place in sample.fields.items():
            name = field_name(raw)
            if name != raw and name in sample.fields:
                name = raw
            column = found.columns.get(name) or self._column(name, place)
            checksum, view = self._file.read(place)
            column.samples.append(number)
            column.offsets.append(place.offset)
            column.lengths.append(place.length)
            column.checksums.append(checksum)
            column.names.extend([place.name])
            if name == _LABEL_FIELD and sample.label is None:
                label = self._label(view)
            elif height < 0 and is_image_field(name):
                height, width = self._size(view)
            elif height < 0 and is_picture_array(name) and view is not None:
                height, width = npy.size(view)
        found.keys.extend([sample.key])
        found.labels.append(label)
        found.heights.append(height)
        found.widths.append(width)

    def _column(self, name: str, place: Found) -> _Column:
        if len(self.found.columns) == _MAX_FIELDS:
            raise DamagedShardError(
                self.found.name,
                place.offset,
                f"more than {_MAX_FIELDS} different fields: these are not samples with the same few extensions",
            )
        return self.found.columns.setdefault(name, _Column())

    def _label(self, view: memoryview | None) -> int:
        label = -1 if view is None else label_of(view)
        return label if label >= 0 else self._unknown("label: a 'cls' that is no class number")

    def _size(self, view: memoryview | None) -> tuple[int, int]:
        with contextlib.suppress(BadImageError):
            if view is not None:
                info = probe(view)
                return info.height, info.width
        return self._unknown("image size: no whole image of a known format"), -1

    def _unknown(self, what: str) -> int:
        self.found.unknown[what] = self.found.unknown.get(what, 0) + 1
        return -1


class _Contents:
    """A shard's bytes, read once from front to back and checksummed on the way."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self._size = os.fstat(fd).st_size
        self._buffer = memoryview(bytearray(_PIECE))
        self._crc = 0
        self.at = 0  # how far the shard's own checksum has come

    def read(self, place: Found) -> tuple[int, memoryview | None]:
        """A field's crc32c and content, valid until the next call; no content where it is huge."""
        start, end = place.offset, place.offset + place.length
        if start < self.at:  # a hard link, say: its content has passed by
            return self._pieces(start, end, 0) if place.length > _MAX_IN_MEMORY else self._again(start, place.length)
        if end - self.at > _MAX_IN_MEMORY:
            self._advance(start)
            checksum, _ = self._pieces(start, end, 0)
            self._advance(end)
            return checksum, None
        read = self._fill(self.at, end - self.at)
        self._crc = crc32c(read, self._crc)
        view = read[start - self.at :]
        self.at = end
        return crc32c(view), view

    def finish(self) -> tuple[int, int]:
        """Size and crc32c of the whole shard."""
        self._advance(self._size)
        if os.fstat(self._fd).st_size != self._size:
            raise DamagedShardError(
                self._name, self._size, "the file changed while it was read; let it come to rest first"
            )
        return self._size, self._crc

    def _again(self, start: int, size: int) -> tuple[int, memoryview]:
        view = self._fill(start, size)
        return crc32c(view), view

    def _advance(self, to: int) -> None:
        self._crc, _ = self._pieces(self.at, to, self._crc)
        self.at = to

    def _pieces(self, start: int, end: int, checksum: int) -> tuple[int, None]:
        for at in range(start, end, _PIECE):
            checksum = crc32c(self._fill(at, min(_PIECE, end - at)), checksum)
        return checksum, None

    def _fill(self, start: int, size: int) -> memoryview:
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size))
        view = self._buffer[:size]
        got = 0
        while got < size:
            more = os.preadv(self._fd, [view[got:]], start + got)
            if more == 0:
                raise DamagedShardError(self._name, start + got, "the file shrank while it was read")
            got += more
        return view


# --- all shards together -----------------------------------------------------------------------


def _describe(shards: Iterable[_Indexed], format_: Format) -> dict[str, Any]:
    """The manifest's `source`: what is in no sample, and what could not be told of those that are."""
    skipped: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for shard in shards:
        skipped.update(shard.skipped)
        unknown.update(shard.unknown)
    rule = f"{format_.title} shards, made elsewhere"
    return {"layout": LAYOUT, "rule": rule, "skipped": dict(skipped), "unknown": dict(unknown)}


def _field_order(shards: Iterable[_Indexed], before: Manifest | None) -> tuple[str, ...]:
    """All fields: as the old manifest lists them if they are the same, else pictures first, then by name."""
    names = {name for shard in shards for name in shard.columns}
    if before is not None and set(before.fields) == names:
        return before.fields
    return tuple(sorted(names, key=lambda name: (name != "jpg", not is_image_field(name), name)))


def _join(split: str, shards: Sequence[_Indexed], fields: Sequence[str]) -> tuple[Split, Rows, Names]:
    """Index and names of one split."""
    firsts = np.concatenate([[0], np.cumsum([shard.samples for shard in shards])]).astype(np.int64)
    rows = empty_rows(int(firsts[-1]), fields)
    for number, (shard, first) in enumerate(zip(shards, firsts[:-1], strict=True)):
        mine = rows[first : first + shard.samples]
        mine["shard"] = number
        mine["label"], mine["height"], mine["width"] = shard.labels, shard.heights, shard.widths
        for name, column in shard.columns.items():
            at = np.frombuffer(column.samples, np.int64)
            mine[f"{name}:offset"][at] = column.offsets
            mine[f"{name}:length"][at] = column.lengths
            mine[f"{name}:crc32c"][at] = column.checksums
    names = Names(
        Strings.concatenate(shard.keys.build() for shard in shards),
        tuple(_member_names(name, shards, firsts) for name in fields),
    )
    facts = tuple(Shard(shard.name, shard.samples, shard.size, shard.crc32c) for shard in shards)
    return Split(split, facts), rows, names


def _member_names(name: str, shards: Sequence[_Indexed], firsts: Int64s) -> Strings:
    """Per sample the member's name, empty where the sample lacks the field."""
    ends = np.zeros(int(firsts[-1]) + 1, np.int64)
    blob = bytearray()
    for shard, first in zip(shards, firsts[:-1], strict=True):
        if column := shard.columns.get(name):
            listed = column.names.build()
            ends[1 + first + np.frombuffer(column.samples, np.int64)] = listed.lengths
            blob += listed.blob
    return Strings(memoryview(bytes(blob)), np.cumsum(ends))


def _refuse_doubles(parts: Sequence[tuple[Split, Rows, Names]]) -> None:
    """Within a split a key must name one sample."""
    twice: list[tuple[str, str]] = []
    for split, rows, names in parts:
        hashes = np.fromiter(map(hash, names.keys), np.int64, len(names.keys))
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        where: dict[bytes, list[str]] = {}
        for i in np.flatnonzero(counts[inverse] > 1).tolist():  # few: equal keys, or equal hashes by chance
            where.setdefault(names.keys[i], []).append(split.shards[int(rows["shard"][i])].name)
        twice += [
            (printable(key), f"{split.name}: in {' and '.join(shards)}")
            for key, shards in where.items()
            if len(shards) > 1
        ]
    if twice:
        raise ProblemsError(
            f"{len(twice)} key(s) are used by more than one sample; nothing was written:",
            twice,
            "a sample's files must follow one another in its shard, and its key must be its own; "
            "if the shards belong to different splits, say so with --split",
        )
