"""Index files of other readers beside the shards: DALI's `.idx`, energon's `.tar.idx` and `.nv-meta`.

All are made from the shards' own headers, which are read once, so that they fit whoever wrote the shards. Nothing that
is there already is changed, but files of these names.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packer.errors import OutputError, UsageError
from packer.formats.tar_reader import BLOCK, Member, group_samples, iter_members
from packer.formats.tfrecord import FOOT, HEAD
from packer.formats.tfrecord_reader import iter_records
from packer.manifest import Manifest
from packer.packed import Packed
from packer.sample import printable
from packer.storage import write_atomic

_META = ".nv-meta"
_TABLES = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
                      byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
                           content_byte_size INTEGER);
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


def export(folder: str | os.PathLike[str], kind: str) -> list[str]:
    """Write what another reader wants to have beside the shards of a packed dataset.

    Args:
        folder: the dataset, of tar shards, or (for DALI) of TFRecords.
        kind: a name in `EXPORTS`: "dali" or "energon".

    Returns:
        Names of the files and folders written, in `folder`.

    Raises:
        UsageError: no such kind, or one that does not read such shards.
        ShardError: a shard is truncated or damaged.
        OutputError: the folder cannot be written.

    >>> export("out/", "dali")                                                   # doctest: +SKIP
    ['train-000000.idx', 'train-000001.idx']
    """
    if kind not in EXPORTS:
        raise UsageError(f"unknown export {kind!r}; choose one of: {', '.join(EXPORTS)}")
    packed = Packed(folder)
    if packed.manifest.format not in EXPORTS[kind].formats:
        raise UsageError(
            f"{kind} reads {' and '.join(EXPORTS[kind].formats)} shards, {packed.folder} holds "
            f"{packed.manifest.format}: convert it with 'packer shard {packed.folder} OUT --format "
            f"{EXPORTS[kind].formats[0]}'"
        )
    return list(EXPORTS[kind].write(packed.folder, packed.manifest))


def _shards(manifest: Manifest) -> list[str]:
    return [shard.name for split in manifest.splits.values() for shard in split.shards]


@dataclass(frozen=True)
class _Sample:
    """One sample of a tar shard: its key, where its first header begins, its members by extension as written."""

    key: bytes
    begin: int
    members: list[tuple[bytes, Member]]


def _tar_samples(path: str) -> Iterator[_Sample]:
    for key, fields in group_samples((member for member in iter_members(path) if member.kind == "file"), path):
        members = list(fields.values())
        yield _Sample(key, members[0].offset, [(member.name[len(key) + 1 :], member) for member in members])


# ---------------------------------------------------------------- DALI


def _dali(folder: str, manifest: Manifest) -> Iterator[str]:
    """For `fn.readers.webdataset` and `fn.readers.tfrecord`: what wds2idx and tfrecord2idx write."""
    for name in _shards(manifest):
        path, index = os.path.join(folder, name), name.partition(".")[0] + ".idx"
        lines = _tfrecord_lines(path) if manifest.format == "tfrecord" else _tar_lines(path)
        write_atomic(os.path.join(folder, index), [b"".join(lines)])
        yield index


def _tfrecord_lines(path: str) -> Iterator[bytes]:
    for record in iter_records(path):
        yield b"%d %d\n" % (record.begin - HEAD, record.end - record.begin + HEAD + FOOT)


def _tar_lines(path: str) -> list[bytes]:
    samples = list(_tar_samples(path))
    # Version 1.2 adds the member's name, in which DALI takes a space for its end.
    named = not any(bytes(member.name.split()[0]) != member.name for s in samples for _, member in s.members)
    lines = [b"v1.%d %d\n" % (2 if named else 1, len(samples))]
    for sample in samples:
        parts = [b"%s %d %d" % (extension, m.data_offset, m.size) for extension, m in sample.members]
        if named:
            parts = [part + b" " + m.name for part, (_, m) in zip(parts, sample.members, strict=True)]
        lines.append(b" ".join(parts) + b"\n")
    return lines


# ---------------------------------------------------------------- energon


def _energon(folder: str, manifest: Manifest) -> Iterator[str]:
    """What `energon prepare` writes: samples come as dictionaries (`CrudeWebdataset`)."""
    meta = os.path.join(folder, _META)
    os.makedirs(meta, exist_ok=True)
    database = os.path.join(meta, "index.sqlite")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(database)
    try:
        with contextlib.closing(sqlite3.connect(database)) as db:
            db.executescript(_TABLES)
            for number, name in enumerate(_shards(manifest)):
                offsets = _add_shard(db, number, os.path.join(folder, name))
                write_atomic(os.path.join(folder, name + ".idx"), [struct.pack(f"<{len(offsets)}Q", *offsets)])
                yield name + ".idx"
            db.commit()
    except sqlite3.Error as error:
        raise OutputError(f"cannot write {database}: {error}") from error
    counts = {shard.name: shard.samples for split in manifest.splits.values() for shard in split.shards}
    splits = {split.name: [shard.name for shard in split.shards] for split in manifest.splits.values()}
    facts = json.dumps([vars(shard) for split in manifest.splits.values() for shard in split.shards])
    files = {
        ".info.json": json.dumps({"shard_counts": counts}, indent=2) + "\n",
        # JSON is YAML too.
        "split.yaml": json.dumps({"split_parts": splits, "exclude": []}, indent=2) + "\n",
        "dataset.yaml": "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
        "index.uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, facts)),
    }
    for name, text in files.items():
        write_atomic(os.path.join(meta, name), [text.encode("utf-8")])
    yield _META


def _add_shard(db: sqlite3.Connection, number: int, path: str) -> list[int]:
    """Put a shard's samples into the tables; returns where each begins, and where the last one ends."""
    offsets: list[int] = []
    end = 0
    before: tuple[str, int] | None = None

    def finish_sample(until: int) -> None:
        if before is not None:
            key, begin = before
            row = (number, key, len(offsets) - 1, begin, until - begin)
            try:
                db.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError as error:
                raise UsageError(
                    f"the key {printable(key)!r} is used twice, in {os.path.basename(path)} and before: energon wants "
                    "keys that differ in all splits"
                ) from error

    for sample in _tar_samples(path):
        finish_sample(sample.begin)
        before = sample.key.decode("utf-8", "backslashreplace"), sample.begin
        offsets.append(sample.begin)
        for extension, member in sample.members:
            part = extension.decode("utf-8", "backslashreplace")
            db.execute(
                "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
                (number, len(offsets) - 1, part, member.data_offset, member.size),
            )
            end = member.data_offset + -(-member.size // BLOCK) * BLOCK
    finish_sample(end)
    return [*offsets, end]


@dataclass(frozen=True)
class _Export:
    """What reads such files: which shards it takes, how they are written, and what the command line says."""

    formats: tuple[str, ...]
    write: Callable[[str, Manifest], Iterator[str]]
    help: str


EXPORTS = {
    "dali": _Export(("webdataset", "tfrecord"), _dali, "an .idx beside each shard"),
    "energon": _Export(("webdataset",), _energon, "a .tar.idx beside each shard, and .nv-meta/"),
}
