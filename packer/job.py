"""The output folder of a packing job: no stranger's files in it, nobody else at work in it.

The state of an unfinished job lies in `OUT/.packer/`: the lock, `job.json` (the plan's fingerprint)
and what each finished shard holds. Once `dataset.json` stands, the state is worth nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from packer.errors import OutputError
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
        OutputError: it holds another dataset, or this one with a shard lost or cut.
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
    for split in manifest.splits.values():
        for shard in split.shards:
            _check_size(out, shard.name, shard.bytes)
    shutil.rmtree(os.path.join(out, STATE), ignore_errors=True)  # killed between the manifest and this
    return manifest


def _check_size(out: str, name: str, size: int) -> None:
    path = os.path.join(out, name)
    try:
        found = os.path.getsize(path)
    except OSError as error:
        raise OutputError(
            f"{out} was complete, but {name} is lost: {error.strerror}; delete the folder and pack again"
        ) from error
    if found != size:
        raise OutputError(
            f"{out} was complete, but {name} now has {found} bytes instead of {size}; delete the folder and pack again"
        )


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
