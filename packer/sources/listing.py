"""Walking a folder of files: names and sizes, junk by rule, links by policy, loops ended."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from packer.errors import SourceError
from packer.sample import printable

#: Folders that tools leave behind; their files are no samples and they are no classes.
JUNK_FOLDERS = frozenset(
    (b"__MACOSX", b"@eaDir", b"$RECYCLE.BIN", b"System Volume Information", b"lost+found", b"__pycache__")
)
_JUNK_FILES = frozenset((b"Thumbs.db", b"desktop.ini", b"Desktop.ini", b"ehthumbs.db"))
_JUNK_SUFFIXES = (b"~", b".part", b".tmp", b".partial", b".crdownload", b".swp", b".bak")


@dataclass(frozen=True)
class Folder:
    """The files of one folder, sorted by name.

    Attributes:
        path: relative to the root, b"" for the root itself.
        joined: the names joined by b"/" (a list would cost 60 bytes more for each file).
        sizes: bytes of each file.
    """

    path: bytes
    joined: bytes
    sizes: array[int]

    @property
    def names(self) -> list[bytes]:
        """Base names, sorted by byte value."""
        return self.joined.split(b"/") if self.sizes else []


@dataclass
class Listing:
    """All folders below a root, parents before children, siblings sorted; and what was left out.

    Attributes:
        folders: with at least their own (possibly empty) list of files.
        skipped: `(path, reason)` of what is no sample by rule.
        problems: `(path, reason)` of what could not be looked at, or holds nothing.
    """

    folders: list[Folder] = field(default_factory=list)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """Which files to take, by shell patterns on the relative path (`*` crosses `/`) or the base name."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def compile(self) -> Callable[[bytes, bytes], bool] | None:
        """A test of (relative path, base name), or None where everything is taken."""
        if not self.include and not self.exclude:
            return None
        include, exclude = _any_of(self.include), _any_of(self.exclude)

        def wanted(path: bytes, name: bytes) -> bool:
            if include and not (include.match(path) or include.match(name)):
                return False
            return not (exclude and (exclude.match(path) or exclude.match(name)))

        return wanted


def _any_of(patterns: Sequence[str]) -> re.Pattern[bytes] | None:
    if not patterns:
        return None
    return re.compile(
        b"|".join(re.compile(fnmatch.translate(p)).pattern.encode("utf-8", "surrogateescape") for p in patterns),
        re.DOTALL,
    )


def list_folder(
    root: str,
    *,
    follow_symlinks: bool = False,
    filter: Filter = Filter(),  # noqa: A002 - a frozen default named as the option is
    progress: Callable[[int], None] | None = None,
) -> Listing:
    """List a tree: every regular file with its size.

    Args:
        root: the folder.
        follow_symlinks: take the content behind links (files and folders), each folder once on its
            own path, so loops end. Otherwise links are skipped and counted.
        filter: which files to take.
        progress: called with the number of files so far, once per folder.

    Raises:
        SourceError: the root is missing or unreadable.
    """
    listing = Listing()
    wanted = filter.compile()
    found = 0
    for folder, entries in _walk(os.fsencode(root), listing, follow_symlinks):
        prefix = folder + b"/" if folder else b""
        names: list[bytes] = []
        sizes = array("q")
        for name, size in entries:
            if (reason := _junk(name)) is not None:
                listing.skipped.append((prefix + name, reason))
            elif wanted is not None and not wanted(prefix + name, name):
                listing.skipped.append((prefix + name, "left out by --include or --exclude"))
            else:
                names.append(name)
                sizes.append(size)
        listing.folders.append(Folder(folder, b"/".join(names), sizes))
        found += len(names)
        if progress is not None:
            progress(found)
    return listing


def _junk(name: bytes) -> str | None:
    if name.startswith(b"."):
        return "hidden file"
    if name in _JUNK_FILES or name.endswith(_JUNK_SUFFIXES):
        return "left behind by another program"
    return None


def _walk(root: bytes, listing: Listing, follow: bool) -> Iterator[tuple[bytes, list[tuple[bytes, int]]]]:
    """Folders depth first, names sorted; yields (relative folder, [(name, size)] sorted)."""
    # Each entry carries the identities of the folders above it: a folder that is its own ancestor is a loop.
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while pending:
        folder, above = pending.pop()
        prefix = folder + b"/" if folder else b""
        here = above
        try:
            if follow:
                status = os.stat(os.path.join(root, folder))
                identity = (status.st_dev, status.st_ino)
                if identity in above:
                    listing.skipped.append((folder, "link to a folder above it (a loop)"))
                    continue
                here = above | {identity}
            with os.scandir(os.path.join(root, folder) if folder else root) as entries:
                files, folders = _sort_entries(entries, prefix, listing, follow)
        except OSError as error:
            if not folder:
                raise SourceError(f"{printable(root)}: {error.strerror}") from error
            listing.problems.append((folder, f"folder cannot be read: {error.strerror}"))
            continue
        yield folder, files
        pending += [(prefix + name, here) for name in reversed(folders)]


def _sort_entries(
    entries: Iterator[os.DirEntry[bytes]], prefix: bytes, listing: Listing, follow: bool
) -> tuple[list[tuple[bytes, int]], list[bytes]]:
    files: list[tuple[bytes, int]] = []
    folders: list[bytes] = []
    for entry in entries:
        name = entry.name
        try:
            if entry.is_symlink() and not follow:
                listing.skipped.append((prefix + name, "symbolic link (--follow-symlinks takes its content)"))
            elif entry.is_dir():
                if name in JUNK_FOLDERS or name.startswith(b"."):
                    listing.skipped.append((prefix + name + b"/", "hidden or system folder"))
                else:
                    folders.append(name)
            else:
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((name, status.st_size))
                else:
                    listing.skipped.append((prefix + name, "not a regular file (pipe, socket or device)"))
        except OSError as error:
            broken = entry.is_symlink()
            listing.problems.append(
                (prefix + name, f"{'broken link' if broken else 'cannot be read'}: {error.strerror}")
            )
    files.sort()
    folders.sort()
    return files, folders
