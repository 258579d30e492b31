"""The output folder of a packing job: no stranger's files in it, nobody else at work in it.

The state of an unfinished job lies in `OUT/.packer/`: the lock, `job.json` (the plan's fingerprint)
and what each finished shard holds. Once `dataset.json` stands, the state is worth nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from crc32c import crc32c

from packer.errors import OutputError
from packer.formats import get_format
from packer.manifest import FILE, Manifest
from packer.storage import exclusive, output_error, write_json

STATE = ".packer"
_LOCK, _JOB = "lock", "job.json"
_NOT_FOREIGN = frozenset((STATE, "lost+found"))  # a fresh file system has the latter


def complete(out: str, job: Mapping[str, Any]) -> Manifest | None:
    """The manifest, if the folder holds the finished dataset of this very job.

    Args:
        out: the folder; it need not exist.
        job: as `own` takes it.

    Raises:
        OutputError: it holds another dataset, or this one with a file lost, cut or changed.
        ManifestError: its manifest cannot be read.
    """
    if not os.path.lexists(os.path.join(out, FILE)):
        return None
    manifest = Manifest.load(out)
    if manifest.fingerprint != job["fingerprint"]:
        raise OutputError(
            f"{out} already holds a dataset of {manifest.samples} samples that differs from this one "
            f"({_differences({'options': manifest.options}, {'options': job['options']}) or 'it has other files'}); "
            "choose another folder, or delete it first"
        )
    _check_files(out, manifest)
    shutil.rmtree(os.path.join(out, STATE), ignore_errors=True)  # killed between the manifest and this
    return manifest


def _check_files(out: str, manifest: Manifest) -> None:
    """Every file is there, readable and as long as it was; those beside the shards hold what they held."""
    damage = []
    for split in manifest.splits.values():
        damage += [_damage(os.path.join(out, shard.name), shard.bytes) for shard in split.shards]
        for name in (split.index_file, split.names_file, *split.beside(get_format(manifest.format))):
            if name not in manifest.sidecars:
                damage.append(_damage(os.path.join(out, name)))
    for name, facts in manifest.sidecars.items():
        damage.append(_damage(os.path.join(out, name), facts["bytes"], facts["crc32c"]))
    if found := [line for line in damage if line]:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise OutputError(f"{out} was complete, but {found[0]}{more}; delete the folder and pack again")


def _damage(path: str, size: int | None = None, checksum: int | None = None) -> str:
    """What is wrong with a file, '' for nothing. A pipe in its place does not block."""
    name = os.path.basename(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as f:
            facts = os.fstat(f.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return f"{name} is not a regular file"
            if size is not None and facts.st_size != size:
                return f"{name} now has {facts.st_size} bytes instead of {size}"
            found = 0
            while checksum is not None and (piece := f.read(1 << 20)):
                found = crc32c(piece, found)
    except FileNotFoundError:
        return f"{name} is lost"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return f"{name} has other bytes than were written" if checksum is not None and found != checksum else ""


@contextlib.contextmanager
def own(out: str, job: Mapping[str, Any]) -> Iterator[str]:
    """Hold the output folder for this job until the block ends. Yields the folder of its state.

    Args:
        out: new, empty, or holding this job unfinished.
        job: what the job is, JSON values; its `fingerprint` decides whether it is the same one.

    Raises:
        OutputError: files of others, another job, a job at work, or a folder that cannot be written.
    """
    state = os.path.join(out, STATE)
    try:
        existing = os.listdir(out)
    except FileNotFoundError:
        existing = []
    except OSError as error:
        raise OutputError(f"{out}: {error.strerror}; choose a folder for the shards") from error
    if STATE not in existing and (foreign := sorted(set(existing) - _NOT_FOREIGN)):
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise OutputError(f"{out} is not empty ({shown}) and holds no packing job; choose a new folder")
    try:
        os.makedirs(state, exist_ok=True)
    except OSError as error:
        raise output_error(out, error) from error
    with exclusive(os.path.join(state, _LOCK), out):
        _claim(state, out, job)
        yield state


def _claim(state: str, out: str, job: Mapping[str, Any]) -> None:
    found = _read_job(os.path.join(state, _JOB))
    if found is None:
        # Whose the finished shards are is not known: they are of no use.
        for entry in os.scandir(state):
            if entry.name != _LOCK:
                os.unlink(entry.path)
        write_json(os.path.join(state, _JOB), dict(job))
    elif found.get("fingerprint") != job["fingerprint"]:
        raise OutputError(
            f"{out} holds an unfinished job that differs from this one ({_differences(found, job)}); "
            "run that command again to finish it, or delete the folder and start afresh"
        )


def _read_job(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _differences(was: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """`seed was 0, is 1; …`, nested values by their innermost name."""
    lines = []
    for name, value in job.items():
        before = was.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            lines += [line for line in [_differences(before, value)] if line]
        elif name != "fingerprint" and before != value:
            lines.append(f"{name} was {before!r}, is {value!r}")
    if not lines and "fingerprint" in job:
        return "the files in the source have changed"
    return "; ".join(lines)
