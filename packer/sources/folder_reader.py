"""Reading the files of a folder, each held to the size that the scan saw."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from packer.errors import SourceChangedError
from packer.sample import printable


class FolderReader:
    """Reads files below one folder: three system calls each, no Python buffering."""

    def __init__(self, root: bytes, follow_symlinks: bool) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # O_NONBLOCK: a pipe put in a file's place must not block for ever.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
        self._spare = memoryview(bytearray(1))  # one byte more than expected shows that a file grew

    def read(self, places: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Read whole files; see `packer.sources.base.Reader`."""
        # Bound to locals: with small files the loop around the system calls is what costs.
        root, flags, spare = self._root, self._flags, self._spare
        open_, readv, close = os.open, os.readv, os.close
        for place, view in zip(places, views, strict=True):
            try:
                fd = open_(place, flags, dir_fd=root)
            except OSError as error:
                raise _cannot_open(place, error) from error
            try:
                got = readv(fd, (view, spare))
                if got != len(view):
                    got = self._read_rest(fd, view, got)
            except OSError as error:
                raise SourceChangedError(f"{printable(place)}: {error.strerror} while reading") from error
            finally:
                close(fd)
            if got != len(view):
                raise _changed(place, len(view), got)

    def _read_rest(self, fd: int, view: memoryview, got: int) -> int:
        """Go on where one call did not read it all (files over 2 GiB, network file systems)."""
        while 0 < got < len(view):
            more = os.readv(fd, (view[got:], self._spare))
            if more == 0:
                break
            got += more
        return got

    def read_piece(self, place: bytes, size: int, offset: int, view: memoryview) -> None:
        """Read a part of a file; see `packer.sources.base.Reader`."""
        try:
            fd = os.open(place, self._flags, dir_fd=self._root)
        except OSError as error:
            raise _cannot_open(place, error) from error
        try:
            found = os.fstat(fd).st_size
            got = 0
            while found == size and got < len(view):
                more = os.preadv(fd, (view[got:],), offset + got)
                if more == 0:
                    found = offset + got
                got += more
        except OSError as error:
            raise SourceChangedError(f"{printable(place)}: {error.strerror} while reading") from error
        finally:
            os.close(fd)
        if found != size:
            raise _changed(place, size, found)

    def close(self) -> None:
        """Let go of the folder."""
        if self._root >= 0:
            with contextlib.suppress(OSError):
                os.close(self._root)
            self._root = -1


def _cannot_open(place: bytes, error: OSError) -> SourceChangedError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
        advice = " (it was a file when the folder was scanned); put it back, or pack into a new folder"
    elif error.errno in (errno.EACCES, errno.EPERM):
        advice = "; make it readable, or leave it out with --exclude, and run again"
    else:
        advice = " while opening; run the same command again when the disk is well"
    return SourceChangedError(f"{printable(place)}: {error.strerror}{advice}")


def _changed(path: bytes, size: int, got: int) -> SourceChangedError:
    what = f"grew beyond {size} bytes" if got > size else f"has {got} bytes, had {size}"
    return SourceChangedError(
        f"{printable(path)} {what} since the folder was scanned; let it come to rest, then run the same command again"
    )
