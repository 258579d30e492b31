"""Writing so that nothing partial ever looks complete, and reading without surprises."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from packer.errors import OutputError

PARTIAL = ".partial"


def fsync_folder(folder: str) -> None:
    """Make renames inside this folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: str, *parts: bytes | memoryview) -> None:
    """Write the parts, one after the other, under a temporary name, fsync it, rename it into place."""
    partial = path + PARTIAL
    try:
        with open(partial, "wb") as f:
            for part in parts:
                f.write(part)
            f.flush()
            os.fsync(f.fileno())
        os.rename(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise output_error(path, error) from error
    fsync_folder(os.path.dirname(path) or ".")


def write_json(path: str, value: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically: sorted nowhere, so that the writer's order is the reader's."""
    write_atomic(path, (json.dumps(value, indent=indent) + "\n").encode("ascii"))


def output_error(path: str, error: OSError) -> OutputError:
    """What the operating system said about writing `path`, with what to do about it."""
    advice = {
        28: "free some space and run the same command again: finished shards are kept",
        122: "the quota is used up; free some space and run the same command again: finished shards are kept",
        13: "choose a folder that you may write to",
        30: "the file system is read-only; choose another folder",
        27: "the file system cannot hold a file of this size; lower --shard-size",
    }.get(error.errno or 0, "run the same command again once this is mended: finished shards are kept")
    return OutputError(f"cannot write {path}: {error.strerror or error}; {advice}")


@contextlib.contextmanager
def exclusive(path: str, folder: str) -> Iterator[None]:
    """Hold the lock on `path` until the block ends; the kernel lets go of it if the process dies.

    Args:
        path: a lock file, made if need be, or a folder.
        folder: what is guarded, for the message.

    Raises:
        OutputError: another process holds it.
    """
    flags = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise output_error(path, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(
                f"{folder} is being written by another packer process; wait for it to end, or choose another folder"
            ) from error
        yield
    finally:
        os.close(fd)
