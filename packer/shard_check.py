"""Checking one shard: every byte against its checksum, every index row against the shard's own headers."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer import npy
from packer.engines import Report
from packer.errors import BadArrayError, BadImageError, ShardError
from packer.formats import get_format
from packer.formats.base import FoundSample
from packer.imaging import decode_check
from packer.index import Rows
from packer.manifest import Shard
from packer.sample import field_name, is_image_field, is_picture_array, printable
from packer.strings import Strings

#: Of one shard. A shard of another dataset, or damaged headers, could give a line for every sample.
MAX_PROBLEMS = 100

_CHUNK = 4 << 20
_ROWS_AT_ONCE = 4096
_INTEGER = re.compile(rb"\s*(-?[0-9]{1,18})\s*")
_MAX_LABEL_BYTES = 64


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where.

    Attributes:
        file: name of the file inside the dataset's folder.
        what: what is wrong with it.
        sample: number of the sample in its split, if the problem is about one.
        key: its key, as printable text.
        field: the field, if the problem is about one.
        offset: byte offset in the file.

    >>> str(Problem("train-000000.tar", "crc32c mismatch", 12, "cat/1", "jpg", 8192))
    "train-000000.tar, sample 12 'cat/1', field 'jpg', offset 8192: crc32c mismatch"
    """

    file: str
    what: str
    sample: int | None = None
    key: str | None = None
    field: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        where = [printable(self.file)]
        if self.sample is not None:
            where.append(f"sample {self.sample}" + ("" if self.key is None else f" '{self.key}'"))
        if self.field is not None:
            where.append(f"field '{printable(self.field)}'")
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        return f"{', '.join(where)}: {printable(self.what)}"


@dataclass(frozen=True, eq=False)
class ShardCheck:
    """Everything that the check of one shard needs; picklable.

    Attributes:
        path: of the shard file.
        format: the format's name.
        shard: what the manifest says of it.
        first: number of its first sample in the split.
        fields: field names.
        rows: its rows of the index, or None where the index cannot be read.
        keys: its samples' keys, or None where the names cannot be read.
        made_labels: bool per sample: packing wrote the field `cls`, so it holds the label and nothing else.
        deep: decode every image and array.
    """

    path: str
    format: str
    shard: Shard
    first: int
    fields: tuple[str, ...]
    rows: Rows | None
    keys: Strings | None
    made_labels: npt.NDArray[np.bool_] | None
    deep: bool


def check_shard(task: ShardCheck, report: Report) -> list[Problem]:
    """Check one shard file; returns every problem found, in the order of the file, at most `MAX_PROBLEMS` + 1."""
    found = _Found(task.shard.name)
    try:
        fd = os.open(task.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode):
                _Check(task, fd, facts.st_size, found, report).run()
            else:
                found.append(Problem(task.shard.name, "not a regular file"))
        finally:
            os.close(fd)
    except FileNotFoundError:
        found.append(Problem(task.shard.name, "missing"))
    except OSError as error:
        found.append(Problem(task.shard.name, f"cannot be read: {error.strerror}"))
    report(task.shard.samples, 0)
    return found.listed()


@dataclass
class _Found:
    """Problems, the first of them kept and all of them counted."""

    file: str
    kept: list[Problem] = field(default_factory=list)
    count: int = 0

    def append(self, problem: Problem) -> None:
        self.count += 1
        if len(self.kept) < MAX_PROBLEMS:
            self.kept.append(problem)

    def listed(self) -> list[Problem]:
        more = self.count - len(self.kept)
        return [*self.kept, Problem(self.file, f"… and {more:,} more problems")] if more else self.kept


class _Ranges:
    """The byte ranges that the index rows speak of, in file order, equal ones (hard links) together.

    Attributes:
        sample, field: int64 (r,): whose range it is; the sample counted within the shard.
        offset, length: int64 (r,), sorted by offset, then by length.
        stored: uint32 (r,): the crc32c in the index.
        part: int64 (r,): position in `begins` and `ends`.
        begins, ends: the distinct ranges.
    """

    def __init__(self, rows: Rows, fields: tuple[str, ...]) -> None:
        present = [np.flatnonzero(rows[f"{name}:length"] >= 0) for name in fields]
        empty = np.zeros(0, np.int64)
        sample = np.concatenate([empty, *present])
        number = np.repeat(np.arange(len(fields)), [len(p) for p in present])
        columns = [
            np.concatenate(
                [
                    empty,
                    *(rows[f"{name}:{what}"][at].astype(np.int64) for name, at in zip(fields, present, strict=True)),
                ]
            )
            for what in ("offset", "length", "crc32c")
        ]
        order = np.lexsort((columns[1], columns[0]))
        self.sample, self.field = sample[order], number[order]
        self.offset, self.length, self.stored = (column[order] for column in columns)

    def take(self, keep: npt.NDArray[np.bool_]) -> None:
        """Go on with these only, and number the distinct ones."""
        self.sample, self.field, self.offset = self.sample[keep], self.field[keep], self.offset[keep]
        self.length, self.stored = self.length[keep], self.stored[keep]
        new = np.ones(len(self.offset), bool)
        new[1:] = (np.diff(self.offset) != 0) | (np.diff(self.length) != 0)
        self.part = np.cumsum(new) - 1
        self.begins: list[int] = self.offset[new].tolist()
        self.ends: list[int] = (self.offset[new] + self.length[new]).tolist()

    def __len__(self) -> int:
        return len(self.offset)


class _Check:
    """One pass over one shard."""

    def __init__(self, task: ShardCheck, fd: int, size: int, found: _Found, report: Report) -> None:
        self.task, self.fd, self.size, self.found, self.report = task, fd, size, found, report
        self._crc = 0
        self._damage_named = False  # then the checksum of the whole file says nothing new

    def run(self) -> None:
        task = self.task
        if self.size != task.shard.bytes:
            self._say_size()
        if task.rows is not None:
            ranges = _Ranges(task.rows, task.fields)
            ranges.take(self._plausible(ranges))
            self._read(ranges)
            self._check_labels(task.rows)
        else:
            self._read(_Ranges(np.zeros(0, np.dtype([])), ()))
        if self.size == task.shard.bytes:
            self._compare_headers()
        if self.size == task.shard.bytes and self._crc != task.shard.crc32c and not self._damage_named:
            where = ": bytes outside the samples were changed" if task.rows is not None and not self.found.count else ""
            self._say(f"crc32c of the whole file differs from dataset.json{where}")

    # ---- saying where

    def _say(self, what: str, sample: int | None = None, field: str | None = None, offset: int | None = None) -> None:
        key = None if sample is None or self.task.keys is None else printable(self.task.keys[sample])
        number = None if sample is None else self.task.first + sample
        self.found.append(Problem(self.task.shard.name, what, number, key, field, offset))

    def _say_size(self) -> None:
        size, expected = self.size, self.task.shard.bytes
        if size > expected:
            return self._say(
                f"{size - expected} bytes too long: {size} bytes, dataset.json says {expected}", offset=expected
            )
        return self._say(f"truncated: {size} bytes, dataset.json says {expected}", self._sample_at(size), offset=size)

    def _sample_at(self, offset: int) -> int | None:
        """The first sample with a field that begins or ends behind this offset: the one that damage here hits."""
        rows = self.task.rows
        if rows is None:
            return None
        hit = np.zeros(len(rows), bool)
        for name in self.task.fields:
            begin, length = rows[f"{name}:offset"], rows[f"{name}:length"]
            hit |= (length >= 0) & ((begin >= offset) | (length > offset - begin))
        return int(np.argmax(hit)) if hit.any() else None

    # ---- payloads

    def _plausible(self, ranges: _Ranges) -> npt.NDArray[np.bool_]:
        """Which ranges lie inside the file and overlap no earlier one, (r,). The others are reported."""
        outside = (ranges.offset < 0) | (ranges.length > self.size - ranges.offset)
        ends = np.where(outside, 0, ranges.offset + np.where(outside, 0, ranges.length))
        reached = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
        twin = np.zeros(len(ranges), bool)
        twin[1:] = (np.diff(ranges.offset) == 0) & (np.diff(ranges.length) == 0)
        overlapping = ~outside & ~twin & (ranges.offset < reached)
        if self.size >= self.task.shard.bytes:  # of a truncated file that much is known
            for i in np.flatnonzero(outside).tolist():
                self._about(
                    ranges, i, f"the index says {ranges.length[i]} bytes, beyond the end of the file ({self.size})"
                )
        for i in np.flatnonzero(overlapping).tolist():
            self._about(ranges, i, "the index has it overlap another field")
        return ~(outside | overlapping)

    def _about(self, ranges: _Ranges, i: int, what: str) -> None:
        self._say(what, int(ranges.sample[i]), self.task.fields[int(ranges.field[i])], int(ranges.offset[i]))

    def _read(self, ranges: _Ranges) -> None:
        """Read the file once, front to back: checksum of the whole and of every range."""
        begins, ends, checksums = ranges.begins if len(ranges) else [], ranges.ends if len(ranges) else [], []
        at = done = so_far = 0
        for begin, view in self._chunks():
            self._crc = crc32c(view, self._crc)
            end = begin + len(view)
            while at < len(begins) and begins[at] < end:
                so_far = crc32c(view[max(begins[at] - begin, 0) : ends[at] - begin], so_far)
                if ends[at] > end:
                    break
                checksums.append(so_far)
                so_far = 0
                at += 1
            done = self._compare_checksums(ranges, done, checksums)
            self.report(0, len(view))
        checksums += [0] * (len(begins) - len(checksums))  # empty ranges at the very end
        self._compare_checksums(ranges, done, checksums)

    def _chunks(self) -> Iterator[tuple[int, memoryview]]:
        buffer = memoryview(bytearray(min(_CHUNK, self.size)))
        at = 0
        while at < self.size:
            got = os.preadv(self.fd, [buffer[: self.size - at]], at)
            if not got:
                self._say("the file shrank while it was read", offset=at)
                return
            yield at, buffer[:got]
            at += got

    def _compare_checksums(self, ranges: _Ranges, done: int, checksums: list[int]) -> int:
        """Compare the ranges that were read since the last call; returns how many are through."""
        until = int(np.searchsorted(ranges.part, len(checksums))) if len(ranges) else 0
        computed = np.array(checksums, np.int64)[ranges.part[done:until]] if until > done else np.zeros(0, np.int64)
        same = computed == ranges.stored[done:until]
        self._damage_named |= not same.all()
        for i in (done + np.flatnonzero(~same)).tolist():
            self._about(
                ranges,
                i,
                f"crc32c mismatch: 0x{checksums[ranges.part[i]]:08x}, the index says 0x{int(ranges.stored[i]):08x}",
            )
        if self.task.deep:
            for i in (done + np.flatnonzero(same)).tolist():
                self._decode(ranges, i)
        return until

    def _decode(self, ranges: _Ranges, i: int) -> None:
        name = self.task.fields[int(ranges.field[i])]
        if npy.is_array_field(name):
            self._decode_array(ranges, i, name)
        if not is_image_field(name):
            return
        try:
            info = decode_check(self._pread(int(ranges.offset[i]), int(ranges.length[i])))
        except BadImageError as error:
            self._about(ranges, i, str(error))
            return
        self._compare_size(ranges, i, info.height, info.width)

    def _decode_array(self, ranges: _Ranges, i: int, name: str) -> None:
        try:
            array = npy.decode(self._pread(int(ranges.offset[i]), int(ranges.length[i])))
        except BadArrayError as error:
            self._about(ranges, i, str(error))
            return
        if is_picture_array(name) and array.ndim in (2, 3):
            self._compare_size(ranges, i, array.shape[-2], array.shape[-1])

    def _compare_size(self, ranges: _Ranges, i: int, height: int, width: int) -> None:
        """The index holds the size of a sample's first image."""
        rows = self.task.rows
        if rows is None:
            return
        row = rows[int(ranges.sample[i])]
        offset = int(ranges.offset[i])
        earlier = any(
            is_image_field(name) and row[f"{name}:length"] >= 0 and row[f"{name}:offset"] < offset
            for name in self.task.fields
        )
        stored = (int(row["height"]), int(row["width"]))
        if not earlier and stored != (-1, -1) and stored != (height, width):
            self._about(ranges, i, f"the picture is {width}×{height}, the index says {stored[1]}×{stored[0]}")

    def _pread(self, offset: int, length: int) -> bytes:
        data = os.pread(self.fd, length, offset)
        while len(data) < length:
            more = os.pread(self.fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    # ---- labels

    def _check_labels(self, rows: Rows) -> None:
        """The label in the index against the bytes of `cls`; whose checksums hold, so most need no look at them."""
        if "cls" not in self.task.fields:
            return
        labels, lengths, checksums = rows["label"], rows["cls:length"], rows["cls:crc32c"]
        unique, inverse = np.unique(labels, return_inverse=True)
        texts = [b"%d" % label for label in unique.tolist()]
        plain = (np.array([crc32c(text) for text in texts], np.int64)[inverse] == checksums) & (
            np.array([len(text) for text in texts], np.int64)[inverse] == lengths
        )
        made = np.zeros(len(rows), bool) if self.task.made_labels is None else self.task.made_labels
        for i in np.flatnonzero(~plain & (lengths >= 0) & ((labels >= 0) | made)).tolist():
            offset, length = int(rows["cls:offset"][i]), int(lengths[i])
            if offset < 0 or length > self.size - offset:
                continue  # reported before
            data = self._pread(offset, min(length, _MAX_LABEL_BYTES))
            number = _INTEGER.fullmatch(data)
            if made[i] or (number and int(number[1]) != labels[i]):
                self._say(f"it holds {data[:20]!r}, the index says label {labels[i]}", i, "cls", offset)

    # ---- headers

    def _compare_headers(self) -> None:
        """Every field by the shard's own headers, sample by sample, against the index."""
        try:
            samples = get_format(self.task.format).walk(self.task.path)
            if self.task.rows is None or self.task.keys is None:
                for _ in samples:
                    pass
            else:
                self._compare_samples(samples, self.task.rows, self.task.keys)
        except ShardError as error:
            self._damage_named = True
            offset = getattr(error, "offset", None)
            self._say(
                getattr(error, "what", str(error)), None if offset is None else self._sample_at(offset), offset=offset
            )

    def _compare_samples(self, samples: Iterable[FoundSample], rows: Rows, keys: Strings) -> None:
        expected = self._expected(rows, keys)
        number = 0
        for number, (key, found, label) in enumerate(samples, 1):
            fields = {name: (field.offset, field.length) for name, field in found.items()}
            known = next(expected, None)
            first = min((offset for offset, _ in fields.values()), default=None)
            if known is None:
                return self._say(f"holds sample '{printable(key)}', which the index does not know", offset=first)
            if key != known[0]:  # from here on nothing would fit; one line says it
                return self._say(f"the shard holds '{printable(key)}' in its place", number - 1, offset=first)
            self._compare_fields(number - 1, _as_indexed(fields), known[1])
            if label is not None and label != rows["label"][number - 1]:
                self._say(f"the shard says label {label}, the index {rows['label'][number - 1]}", number - 1)
        if number < len(rows):
            self._say(f"not in the shard, which ends after {number} of {len(rows)} samples", number)
        return None

    def _compare_fields(
        self, sample: int, found: dict[str, tuple[int, int]], known: dict[str, tuple[int, int]]
    ) -> None:
        if found == known:
            return
        for name in sorted(found.keys() | known.keys()):
            if name not in known:
                self._say("the index does not know this field", sample, name, found[name][0])
            elif name not in found:
                self._say("the shard does not have this field", sample, name, known[name][0])
            elif found[name] != known[name]:
                (offset, length), (index_offset, index_length) = found[name], known[name]
                self._say(
                    f"{length} bytes in the shard, the index says {index_length} at offset {index_offset}",
                    sample,
                    name,
                    offset,
                )

    def _expected(self, rows: Rows, keys: Strings) -> Iterator[tuple[bytes, dict[str, tuple[int, int]]]]:
        """Key and fields of each sample, by the index."""
        fields = self.task.fields
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[begin : begin + _ROWS_AT_ONCE]
            columns = [
                list(zip(part[f"{name}:offset"].tolist(), part[f"{name}:length"].tolist(), strict=True))
                for name in fields
            ]
            for i in range(len(part)):
                places = {name: column[i] for name, column in zip(fields, columns, strict=True) if column[i][1] >= 0}
                yield keys[begin + i], places


def _as_indexed(fields: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Fields by the names that the index has: `jpeg` is `jpg`, unless the sample has both."""
    return {(name if (common := field_name(name)) in fields else common): place for name, place in fields.items()}
