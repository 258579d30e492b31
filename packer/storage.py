"""Writing so that nothing partial ever looks complete, and reading without surprises."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from crc32c import crc32c

from packer.errors import OutputError

PARTIAL = ".partial"


def fsync_folder(folder: str) -> None:
    """Make renames inside this folder durable, where the file system knows how."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def open_regular(path: str) -> int:
    """A file descriptor for pread. Neither a pipe nor a device is a shard, and neither is waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


class Facts(NamedTuple):
    """Size and checksum of a file as written."""

    bytes: int
    crc32c: int


def write_atomic(path: str, parts: Iterable[bytes | memoryview]) -> Facts:
    """Write the parts, one after the other, under a temporary name, fsync it, rename it into place.

    Raises:
        OutputError: the file cannot be written; nothing is left of it.
    """
    partial = path + PARTIAL
    size = checksum = 0
    try:
        with open(partial, "wb") as f:
            for part in parts:
                f.write(part)
                size += len(part)
                checksum = crc32c(part, checksum)
            f.flush()
            os.fsync(f.fileno())
        os.rename(partial, path)
        fsync_folder(os.path.dirname(path) or ".")
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError):
            raise output_error(path, error, resumes=False) from error
        raise
    return Facts(size, checksum)


def write_json(path: str, value: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically, keys in the order of the value."""
    write_atomic(path, [(json.dumps(value, indent=indent) + "\n").encode("ascii")])


def output_error(path: str, error: OSError, *, resumes: bool = True) -> OutputError:
    """What the operating system said about writing `path`, with what to do about it.

    Args:
        path: the file or folder.
        error: what was said.
        resumes: whether shards are being written, of which the finished ones are kept.
    """
    again = "run the same command again" + (": finished shards are kept" if resumes else "")
    smaller = "; lower --shard-size" if resumes else ""
    advice = {
        errno.ENOSPC: f"free some space and {again}",
        errno.EDQUOT: f"the quota is used up; free some space and {again}",
        errno.EACCES: "choose a folder that you may write to",
        errno.EPERM: "choose a folder that you may write to",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.EFBIG: f"no file may become so large here (ulimit -f, or the file system){smaller}",
    }.get(error.errno or 0, f"once this is mended, {again}")
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
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise output_error(path, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{folder} is being written by another packer process; wait for it to end, or choose another folder"
            ) from error
        except OSError:
            pass  # some network file systems have no locks: better unguarded than unusable
        yield
    finally:
        os.close(fd)
