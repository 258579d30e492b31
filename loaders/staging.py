"""Shards copied to a faster folder, shared by all processes of this machine that ask for them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
import weakref

from loaders.memory import gigabytes
from loaders.source import PackedSource
from packer.errors import BudgetError, UsageError
from packer.manifest import FILE

SHM = "/dev/shm"  # noqa: S108 - the machine's shared memory, not a temporary file
_COMPLETE = "complete"
#: Two that want to copy the same meet again after this.
RETRY_S = 0.05

log = logging.getLogger("loaders")


class StagedSource(PackedSource):
    """A packed split read from a copy in a faster folder.

    The ranks of one machine share a copy: the first makes it while the others wait, the last one removes it. A
    copy that a killed process left behind is used or removed by the next.

    Args:
        source: what to copy.
        folder: where to; `/dev/shm`, or a folder on a fast disk.

    Raises:
        BudgetError: it does not fit there; says what to change.
        UsageError: no such folder.
    """

    def __init__(self, source: PackedSource, folder: str = SHM) -> None:
        if not os.path.isdir(folder):
            raise UsageError(f"preload='shm:{folder}': there is no such folder")
        self._place = os.path.join(folder, _name(source))
        self._lock = _stage(source, self._place)
        self._pid = os.getpid()
        # A file's lock belongs to all forks of the process that took it: only that process may let go of it.
        self._end = weakref.finalize(self, _leave, self._lock, self._place, self._pid)
        try:
            super().__init__(self._place, source.split.split.name)
        except BaseException:
            self._end()
            raise

    def __reduce__(self) -> tuple[object, ...]:
        return (PackedSource, (self._place, self.split.split.name))  # workers end before their consumer does

    def close(self) -> None:
        """Close the copied shards and let go of the copy; so do this object's and the interpreter's end."""
        super().close()
        self._end()


def _name(source: PackedSource) -> str:
    """One name for one content: another folder, another packing or another split gets another copy."""
    with open(os.path.join(source.folder, FILE), "rb") as f:
        manifest = f.read()
    what = os.path.realpath(source.folder).encode() + b"\0" + source.split.split.name.encode() + b"\0" + manifest
    return f"packer-{os.getuid()}-{hashlib.sha256(what).hexdigest()[:20]}"


def _stage(source: PackedSource, place: str) -> int:
    """Make the copy, or wait until another process has; returns the shared lock that keeps it there."""
    while True:
        lock = os.open(place + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for whoever is copying
            if not _is_there(lock, place) and _take_alone(lock, place):
                _remove_stale(os.path.dirname(place), besides=place)
                _copy(source, place)
                fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            _leave(lock, place, os.getpid())
            raise
        # A lock changes its kind in two steps: the last user may have removed the copy in between.
        if _is_there(lock, place):
            return lock
        os.close(lock)
        time.sleep(RETRY_S)


def _is_there(lock: int, place: str) -> bool:
    """Whether the copy is complete, and this lock is the one that others look at."""
    return _is_current(lock, place) and os.path.exists(os.path.join(place, _COMPLETE))


def _is_current(lock: int, place: str) -> bool:
    try:
        return os.stat(place + ".lock").st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:  # removed with the copy; the next lock of this name is another file
        return False


def _take_alone(lock: int, place: str) -> bool:
    """Try to be the one that copies. Never waits: by now, another may hold a finished copy for hours."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_current(lock, place) and not _is_there(lock, place)


def _copy(source: PackedSource, place: str) -> None:
    split, manifest = source.split.split, source.manifest
    beside = [FILE, split.index_file, split.names_file]
    names = [*beside, *(shard.name for shard in split.shards)]
    needed = sum(os.path.getsize(os.path.join(source.folder, name)) for name in names)
    folder = os.path.dirname(place)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BudgetError(
            f"preload='shm': {split.name} of {source.folder} has {gigabytes(needed)}, {folder} has "
            f"{gigabytes(free)} free; choose a larger folder with preload='shm:FOLDER', or enlarge it "
            "(docker run --shm-size=…; mount -o remount,size=… /dev/shm)"
        )
    log.info("staging %s of %s (%s %s) into %s", gigabytes(needed), source.folder, manifest.format, split.name, place)
    shutil.rmtree(place, ignore_errors=True)
    os.mkdir(place, 0o700)
    for name in names:
        shutil.copyfile(os.path.join(source.folder, name), os.path.join(place, name))
    with open(os.path.join(place, _COMPLETE), "xb"):
        pass


def _leave(lock: int, place: str, pid: int) -> None:
    """Let go of a copy, and remove it if nobody else holds it."""
    if os.getpid() != pid:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # another process still reads it
    else:
        if _is_current(lock, place):
            shutil.rmtree(place, ignore_errors=True)
            os.unlink(place + ".lock")
    os.close(lock)


def _remove_stale(folder: str, besides: str) -> None:
    """Remove copies whose users were all killed."""
    for name in os.listdir(folder):
        place = os.path.join(folder, name.removesuffix(".lock"))
        if not name.startswith(f"packer-{os.getuid()}-") or not name.endswith(".lock") or place == besides:
            continue
        with contextlib.suppress(OSError):
            lock = os.open(place + ".lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            _leave(lock, place, os.getpid())
