"""Verifying a packed dataset: what `dataset.json` says, what the index says, and what the shards hold must agree."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer.engines import Report, local_engine, no_report
from packer.errors import ManifestError, UsageError
from packer.formats import get_format
from packer.index import Names, Rows, load_rows
from packer.indexing import LAYOUT as INDEXED_LAYOUT
from packer.manifest import FILE, Manifest, Shard, Split, checksum, read_json
from packer.safe_tree import unsafe
from packer.sample import printable
from packer.shard_check import Problem, ShardCheck, check_shard
from packer.storage import PARTIAL
from packer.strings import Strings, repeated

REPORT = "report.json"
_CHUNK = 4 << 20
#: Lines about one thing, so that a foreign index does not give millions.
SHOWN = 100


@dataclass(frozen=True)
class Verified:
    """What verifying found.

    Attributes:
        problems: all problems, in the dataset's order; empty if everything is as it was written.
        samples, shards, bytes: how much was checked.
    """

    problems: list[Problem]
    samples: int
    shards: int
    bytes: int


def verify(
    folder: str | os.PathLike[str], *, deep: bool = False, workers: int | None = None, progress: Report | None = None
) -> Verified:
    """Check everything that is stored: every byte of every shard is read once.

    Checked are: file sizes, crc32c of every field, shard, index and names file and of `dataset.json`
    itself; that the index agrees with the shards' own headers, sample by sample and in order; that
    labels agree with the `cls` fields; that keys are unique in their split; that original paths are
    safe and unique, so that they can be restored; that no shard file is missing or left over.

    Args:
        folder: a packed dataset.
        deep: decode every image and array too.
        workers: processes; None takes one per CPU that may be used.
        progress: called with (samples, bytes) done since the last call.

    Raises:
        ManifestError: the folder holds no `dataset.json`. (A damaged one is a problem found.)

    >>> verify("out/").problems                                              # doctest: +SKIP
    []
    """
    folder = os.fspath(folder)
    try:
        manifest = Manifest.load(folder)
        get_format(manifest.format)
    except (ManifestError, UsageError) as error:
        if not os.path.lexists(os.path.join(folder, FILE)):
            raise
        return Verified([Problem(FILE, str(error))], 0, 0, 0)
    problems = [*_check_manifest(folder), *_check_files(folder, manifest), *_check_report(folder, manifest)]
    order = {shard.name: number for number, shard in enumerate(_shards(manifest))}
    tasks = (
        task
        for split in manifest.splits.values()
        for task in _split_tasks(folder, manifest, split, problems, deep=deep)
    )
    in_shards: list[Problem] = []
    for found in local_engine(workers, len(order)).run(check_shard, tasks, progress or no_report):
        in_shards += found
    in_shards.sort(key=lambda problem: order[problem.file])
    return Verified([*problems, *in_shards], manifest.samples, len(order), manifest.bytes)


def _shards(manifest: Manifest) -> Iterator[Shard]:
    return (shard for split in manifest.splits.values() for shard in split.shards)


# ---------------------------------------------------------------- the folder


def _check_manifest(folder: str) -> Iterator[Problem]:
    value = read_json(os.path.join(folder, FILE))
    if value.get("crc32c") != checksum(value):
        yield Problem(FILE, "changed since it was written: its own crc32c does not fit")


def _check_files(folder: str, manifest: Manifest) -> Iterator[Problem]:
    """Files that should be there and are not are found when they are opened; here, those that should not."""
    names = [shard.name for shard in _shards(manifest)]
    if len(set(names)) < len(names):
        yield from (Problem(FILE, f"lists {printable(name)} twice") for name, n in Counter(names).items() if n > 1)
    format_ = get_format(manifest.format)
    known = {*names, *manifest.sidecars}
    for split in manifest.splits.values():
        known |= {split.index_file, split.names_file, *split.beside(format_)}
    # The index of a stranger's shards may cover some of a folder only.
    strangers = manifest.source.get("layout") == INDEXED_LAYOUT
    with os.scandir(folder) as entries:
        for name in sorted(entry.name for entry in entries):
            if name in known:
                continue
            if name.endswith(format_.suffix) and not strangers:
                yield Problem(name, "a shard that dataset.json does not know; readers of all shards would take it in")
            elif name.endswith((".index.npy", ".names")):
                yield Problem(name, "belongs to no split of dataset.json")
            elif name.endswith(PARTIAL):
                yield Problem(name, "left over from an interrupted run")


def _check_report(folder: str, manifest: Manifest) -> Iterator[Problem]:
    """The list of what packing left out: it is there, and lists as much as `dataset.json` counts."""
    if "broken" not in manifest.source:  # not made by packing
        return
    try:
        entries = read_json(os.path.join(folder, REPORT))["skipped"]
        listed = Counter((str(entry["kind"]), str(entry["reason"])) for entry in entries)
    except FileNotFoundError:
        yield Problem(REPORT, "missing")
    except OSError as error:
        yield Problem(REPORT, f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        yield Problem(REPORT, f"cannot be read: {error}")
    except (KeyError, TypeError, IndexError):
        yield Problem(REPORT, "is not the list of files that packing left out")
    else:
        skipped = {reason: count for (kind, reason), count in listed.items() if kind == "rule"}
        broken = sum(count for (kind, _), count in listed.items() if kind == "broken")
        if skipped != manifest.source.get("skipped", {}) or broken != manifest.source["broken"]:
            yield Problem(REPORT, "does not list as many files left out as dataset.json counts")


# ---------------------------------------------------------------- one split


def _split_tasks(
    folder: str, manifest: Manifest, split: Split, problems: list[Problem], *, deep: bool
) -> Iterator[ShardCheck]:
    """Check what stands beside the shards (into `problems`), then hand out the shards, each with its part of it."""
    rows, names = _open_sidecars(folder, manifest, split, problems)
    if rows is not None:
        problems += _check_rows(rows, split, manifest)
    if names is not None:
        problems += _check_keys(names.keys, split)
        problems += _check_paths(names, split, manifest)
    made = names.paths[manifest.fields.index("cls")].lengths == 0 if names and "cls" in manifest.fields else None
    begin = 0
    for shard in split.shards:
        end = begin + shard.samples
        yield ShardCheck(
            path=os.path.join(folder, shard.name),
            format=manifest.format,
            shard=shard,
            first=begin,
            fields=manifest.fields,
            rows=None if rows is None else np.array(rows[begin:end]),
            keys=None if names is None else _slice(names.keys, begin, end),
            made_labels=None if made is None else made[begin:end],
            deep=deep,
        )
        begin = end


def _slice(strings: Strings, begin: int, end: int) -> Strings:
    ends = strings.ends[begin : end + 1]
    return Strings(strings.blob[int(ends[0]) : int(ends[-1])], ends - ends[0])


def _open_sidecars(
    folder: str, manifest: Manifest, split: Split, problems: list[Problem]
) -> tuple[Rows | None, Names | None]:
    rows = names = None
    for file in (split.index_file, split.names_file):
        problems += _check_sidecar(folder, file, manifest)
    try:
        rows = load_rows(os.path.join(folder, split.index_file), split.samples, manifest.fields)
    except ManifestError as error:
        problems.append(Problem(split.index_file, str(error)))
    try:
        names = Names.load(os.path.join(folder, split.names_file), split.samples, manifest.fields)
    except ManifestError as error:
        problems.append(Problem(split.names_file, str(error)))
    for file in split.beside(get_format(manifest.format)):
        path = os.path.join(folder, file)
        if not os.path.isfile(path):
            problems.append(Problem(file, "not a regular file" if os.path.lexists(path) else "missing"))
        problems += _check_sidecar(folder, file, manifest)
    return rows, names


def _check_sidecar(folder: str, name: str, manifest: Manifest) -> Iterator[Problem]:
    """Size and crc32c. A file that is missing is reported by whoever opens it."""
    path = os.path.join(folder, name)
    facts = manifest.sidecars.get(name)
    if facts is None:
        yield Problem(FILE, f"has no checksum of {name}")
    elif os.path.isfile(path):
        try:
            size, found = _size_and_crc32c(path)
        except OSError as error:
            yield Problem(name, f"cannot be read: {error.strerror}")
            return
        if size != facts["bytes"]:
            yield Problem(name, f"{size} bytes, dataset.json says {facts['bytes']}")
        elif found != facts["crc32c"]:
            yield Problem(name, f"crc32c mismatch: 0x{found:08x}, dataset.json says 0x{facts['crc32c']:08x}")


def _size_and_crc32c(path: str) -> tuple[int, int]:
    size = found = 0
    with open(path, "rb", buffering=0) as f:
        while data := f.read(_CHUNK):
            size += len(data)
            found = crc32c(data, found)
    return size, found


def _check_rows(rows: Rows, split: Split, manifest: Manifest) -> Iterator[Problem]:
    """What can be said of the rows without looking at a shard."""
    file = split.index_file
    shard = np.repeat(np.arange(len(split.shards)), [shard.samples for shard in split.shards])
    yield from _each(file, rows["shard"] != shard, "is in another shard by the index than by dataset.json")
    last = np.iinfo(np.int64).max if manifest.classes is None else len(manifest.classes) - 1
    yield from _each(file, (rows["label"] < -1) | (rows["label"] > last), "has a label that is no class")
    absent = np.ones(len(rows), bool)
    for name in manifest.fields:
        length = rows[f"{name}:length"]
        yield from _each(file, length < -1, f"has a negative length of field {name!r}")
        absent &= length < 0
    yield from _each(file, absent, "has no field at all")


def _each(file: str, wrong: npt.NDArray[np.bool_], what: str) -> Iterator[Problem]:
    """A line for each of the first samples that are wrong, and one for the rest."""
    samples = np.flatnonzero(wrong)
    yield from (Problem(file, what, sample) for sample in samples[:SHOWN].tolist())
    if len(samples) > SHOWN:
        yield Problem(file, f"… and {len(samples) - SHOWN:,} more that each {what}")


def _check_keys(keys: Strings, split: Split) -> Iterator[Problem]:
    first: dict[bytes, int] = {}
    count = 0
    for sample in repeated(keys).tolist():
        key = keys[sample]
        if first.setdefault(key, sample) != sample:
            count += 1
            if count <= SHOWN:
                yield Problem(split.names_file, f"has the same key as sample {first[key]}", sample, printable(key))
    if count > SHOWN:
        yield Problem(split.names_file, f"… and {count - SHOWN:,} more keys used before")


def _check_paths(names: Names, split: Split, manifest: Manifest) -> Iterator[Problem]:
    """Original paths stay below their folder, and no two files have one: else they cannot be restored."""
    # Hard links of strangers' shards may give one member to several samples.
    strangers = manifest.source.get("layout") == INDEXED_LAYOUT
    count = 0
    for what, sample, field, path in _bad_paths(names, manifest.fields, repeats=not strangers):
        count += 1
        if count <= SHOWN:
            said = f"the original path '{printable(path)}' {what}"
            yield Problem(split.names_file, said, sample, printable(names.keys[sample]), field)
    if count > SHOWN:
        yield Problem(split.names_file, f"… and {count - SHOWN:,} more original paths that cannot be restored")


def _bad_paths(names: Names, fields: Sequence[str], *, repeats: bool) -> Iterator[tuple[str, int, str, bytes]]:
    """(what is wrong, sample, field, path)"""
    for field, column in zip(fields, names.paths, strict=True):
        for sample, path in enumerate(column):
            if path and (why := unsafe(path)):
                yield why, sample, field, path
    if not repeats:
        return
    total = len(names.keys)
    first: dict[bytes, int] = {}
    for at in repeated(Strings.concatenate(names.paths)).tolist():
        number, sample = divmod(at, total)
        path = names.paths[number][sample]
        if path and first.setdefault(path, at) != at:
            yield f"is that of sample {first[path] % total} too", sample, fields[number], path
