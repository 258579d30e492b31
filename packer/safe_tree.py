"""Writing files under names that nobody vouches for: below one folder, through no link, in place only when whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
from collections import OrderedDict
from collections.abc import Iterator
from types import FrameType, TracebackType

from packer.errors import OutputError
from packer.sample import printable
from packer.storage import PARTIAL

#: The folder that is written to, inside an existing one; beside a new one it is `DST.partial`.
WORK_NAME = ".unpack" + PARTIAL

# Components of 1 to 255 bytes, none of them '.' or '..', no zero byte.
_COMPONENT = rb"(?!\.{1,2}(?:/|\Z))[^/\0]{1,255}"
_SAFE_PATH = re.compile(_COMPONENT + rb"(?:/" + _COMPONENT + rb")*")
_MAX_PATH_BYTES = 4095  # PATH_MAX

_OPEN_FOLDERS = 2048  # ImageNet's thousand classes come in random order


def unsafe(path: bytes) -> str | None:
    """Why this name cannot be restored below a folder, or None if it can.

    >>> unsafe(b"cat/1.jpg"), unsafe(b"../1.jpg"), unsafe(b"/etc/passwd")
    (None, 'climbs out of its folder', 'is an absolute path')
    """
    if _SAFE_PATH.fullmatch(path) and len(path) <= _MAX_PATH_BYTES:
        return None
    parts = path.split(b"/")
    if path.startswith(b"/"):
        return "is an absolute path"
    if b".." in parts:
        return "climbs out of its folder"
    if b"\0" in path:
        return "contains a zero byte"
    if b"" in parts or b"." in parts:
        return "has an empty component or '.'"
    return "is longer than file systems take"


class Place:
    """A folder to fill: written under another name, put in place by `finish`. A context manager.

    Args:
        dst: new, or empty. Whatever was written is removed if the block ends without `finish`.

    Attributes:
        work: where to write.

    Raises:
        OutputError: (on entry) the folder is not empty, cannot be made, or is being filled.
    """

    def __init__(self, dst: str) -> None:
        self.dst = os.path.realpath(dst)
        self._exists = os.path.lexists(self.dst)
        self._made = False
        # An existing folder may be a mount point or somebody's working directory: it stays, and is filled.
        self.work = os.path.join(self.dst, WORK_NAME) if self._exists else self.dst + PARTIAL

    def __enter__(self) -> Place:
        try:
            if self._exists and (taken := sorted(os.listdir(self.dst))):
                raise OutputError(f"{self.dst} is not empty (it holds {printable(taken[0])!r}); choose a new folder")
            os.makedirs(os.path.dirname(self.work), exist_ok=True)
            os.mkdir(self.work)
            self._made = True
        except FileExistsError as error:
            raise OutputError(
                f"{self.work} is there already: another unpacking is running, or one was killed; delete it if none is"
            ) from error
        except OSError as error:
            raise OutputError(f"cannot make {self.work}: {error.strerror}; choose another folder") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made:
            with contextlib.suppress(OSError):
                remove_tree(self.work)

    def finish(self) -> None:
        """Everything is written: give it its name."""
        self._made = False
        try:
            if not self._exists:
                os.rename(self.work, self.dst)
                return
            for name in sorted(os.listdir(self.work)):
                os.rename(os.path.join(self.work, name), os.path.join(self.dst, name))
            os.rmdir(self.work)
        except OSError as error:
            raise OutputError(
                f"cannot move {self.work} into place: {error.strerror}; all files are there, move them yourself"
            ) from error


@contextlib.contextmanager
def tidy_when_ended() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the program as an exception does, so that what was begun is removed.

    For programs only: handlers belong to the process. A signal that is ignored (`nohup`) stays so.
    """
    main = os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != main:  # a forked worker: it has nothing to tidy
            os._exit(128 + number)
        for each in before:  # a second one would break off the tidying up
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    ends = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in ends if signal.getsignal(each) is signal.SIG_DFL}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def remove_tree(root: str) -> None:
    """Delete a folder with all that is in it, however deep, following no link.

    What lies in a subfolder is moved up before the subfolder goes, so no path grows long, and neither Python's
    stack nor the number of open files sets a limit.

    Raises:
        OSError: something cannot be deleted; the rest may be gone.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        left = [entry.name for entry in _scan(top) if not _unlinked(top, entry)]
        prefix = "moved"
        while any(name.startswith(prefix) for name in left):
            prefix += "-"
        moved = 0
        while left:
            name = left.pop()
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for entry in _scan(fd):
                    if not _unlinked(fd, entry):
                        up = f"{prefix}{moved}"
                        os.rename(entry.name, up, src_dir_fd=fd, dst_dir_fd=top)
                        left.append(up)
                        moved += 1
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(root)


def _scan(fd: int) -> list[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        return list(entries)


def _unlinked(folder: int, entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return False
    os.unlink(entry.name, dir_fd=folder)
    return True


class Tree:
    """Makes files below one folder, component by component, following no link on the way. A context manager.

    Folders stay open, as many as half of the files that this process may open, so that files of many
    classes may come in any order.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._fds: OrderedDict[bytes, int] = OrderedDict()  # the least recently used goes first
        self._most = min(_OPEN_FOLDERS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16))
        self._made: set[bytes] = set()
        self._top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exception: object) -> None:
        for fd in (*self._fds.values(), self._top):
            os.close(fd)

    def create(self, path: bytes) -> NewFile:
        """A new file, open for writing; folders are made as needed.

        Raises:
            OutputError: it is there already, or cannot be made.
        """
        folder, _, name = path.rpartition(b"/")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return NewFile(os.open(name, flags, 0o666, dir_fd=self._folder(folder)), self._root, path)
        except OSError as error:
            raise _output_error(self._root, path, error) from error

    def _folder(self, path: bytes) -> int:
        below: list[bytes] = []
        while path and path not in self._fds:
            below.append(path)
            path = path.rpartition(b"/")[0]
        if path:
            self._fds.move_to_end(path)
        fd = self._fds[path] if path else self._top
        for folder in reversed(below):
            fd = self._enter(fd, folder)
        return fd

    def _enter(self, parent: int, path: bytes) -> int:
        name = path.rpartition(b"/")[2]
        if path not in self._made:
            with contextlib.suppress(FileExistsError):  # another worker was first
                os.mkdir(name, dir_fd=parent)
            self._made.add(path)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        self._fds[path] = fd
        if len(self._fds) > self._most:
            os.close(self._fds.popitem(last=False)[1])
        return fd


class NewFile:
    """A file being written. A context manager; cheaper than Python's file objects by half."""

    def __init__(self, fd: int, root: str, path: bytes) -> None:
        self._fd, self._root, self._path = fd, root, path

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def write(self, data: memoryview) -> None:
        """Append all of the bytes."""
        try:
            while len(data):
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise _output_error(self._root, self._path, error) from error


def _output_error(root: str, path: bytes, error: OSError) -> OutputError:
    advice = {
        errno.ENOSPC: "free some space and run it again",
        errno.EDQUOT: "the quota is used up; free some space and run it again",
        errno.EEXIST: "does this file system take upper and lower case for the same? unpack onto another",
        errno.EILSEQ: "this file system does not take such names; unpack onto another",
        errno.ENAMETOOLONG: "unpack into a folder with a shorter path",
    }.get(error.errno or 0, "nothing was kept")
    return OutputError(f"cannot write {os.path.join(root, printable(path))}: {error.strerror}; {advice}")
