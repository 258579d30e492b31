"""Walking a folder of files: names and sizes, junk by rule, links by policy, loops ended."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from packer.errors import SourceError, UsageError
from packer.sample import IMAGE_EXTENSIONS, printable

#: Folders that tools leave behind; their files are no samples and they are no classes.
JUNK_FOLDERS = frozenset(
    (b"__MACOSX", b"@eaDir", b"$RECYCLE.BIN", b"System Volume Information", b"lost+found", b"__pycache__")
)
_JUNK_FILES = frozenset((b"Thumbs.db", b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"Desktop.ini"))
_JUNK_SUFFIXES = (b"~", b".part", b".tmp", b".partial", b".crdownload", b".swp", b".bak")

# Errors that say something about the file itself, and will say it again. All others (a disk, a network or
# a limit that fails) end the scan: leaving out what they hide would pack another dataset each time.
_DEFECTS = frozenset(
    (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EOVERFLOW)
)
# Folders with files of these extensions only, as they are usually written, need no look at each name.
_PICTURES = frozenset(e.encode() for name in IMAGE_EXTENSIONS for e in (name, name.upper()))

_ALL_MAY_READ = 0o444
_MOST_VISITS = 100  # of one folder, through links: k folders that link to each other make k! paths


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one folder, sorted by name.

    Attributes:
        path: relative to the root, b"" for the root itself.
        joined: the names joined by b"/" (a list would cost 60 bytes more for each file).
        sizes: bytes of each file.
        extensions: what follows the last dot of any name, as it is written; b"" where a name has no dot.
    """

    path: bytes
    joined: bytes
    sizes: array[int]
    extensions: frozenset[bytes]

    @property
    def names(self) -> list[bytes]:
        """Base names, sorted by byte value."""
        return self.joined.split(b"/") if self.sizes else []

    @property
    def prefix(self) -> bytes:
        """What stands before a base name in a relative path."""
        return _prefix(self.path)


@dataclass
class Listing:
    """All folders below a root, parents before children, siblings sorted; and what was left out.

    Attributes:
        folders: with at least their own (possibly empty) list of files.
        skipped: `(path, reason)` of what is no sample by rule.
        problems: `(path, reason)` of what should be looked at and cannot.
    """

    folders: list[Folder] = field(default_factory=list)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """Which files to take, by shell patterns on the relative path (`*` crosses `/`) or the base name.

    A file is taken if it matches `include` (where given) and not `exclude`. A folder that matches `exclude`
    is left out with all that is in it, and is no class.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.include, str) or isinstance(self.exclude, str):
            raise UsageError("include and exclude are sequences of patterns; write for example include=('*.jpg',)")

    def test(self) -> LeftOut:
        """A test of (relative path, base name): why a file is left out, or None; junk counts too."""
        included = _any_of(self.include) if self.include else None
        excluded = _any_of(self.exclude) if self.exclude else None

        def left_out(path: bytes, name: bytes) -> str | None:
            if name.startswith(b"."):
                return "hidden file"
            if name in _JUNK_FILES or name.endswith(_JUNK_SUFFIXES):
                return "left behind by another program"
            if (included and not included(path, name)) or (excluded and excluded(path, name)):
                return _FILTERED
            return None

        return left_out

    def test_folder(self) -> LeftOut:
        """The same for folders, which only junk and `exclude` leave out."""
        excluded = _any_of(self.exclude) if self.exclude else None

        def left_out(path: bytes, name: bytes) -> str | None:
            if name in JUNK_FOLDERS or name.startswith(b"."):
                return "hidden or system folder"
            return _FILTERED if excluded and excluded(path, name) else None

        return left_out


LeftOut = Callable[[bytes, bytes], "str | None"]
_LINK = "symbolic link (--follow-symlinks takes its content)"
_SPECIAL = "not a regular file (pipe, socket or device)"
_FILTERED = "left out by --include or --exclude"


def _any_of(patterns: Sequence[str]) -> Callable[[bytes, bytes], bool]:
    # Text, so that `?` is one character and not one byte of it. A slash at the end says "folder", as in a shell.
    match = re.compile("|".join(fnmatch.translate(pattern.rstrip("/")) for pattern in patterns)).match

    def matches(path: bytes, name: bytes) -> bool:
        return bool(match(path.decode("utf-8", "surrogateescape")) or match(name.decode("utf-8", "surrogateescape")))

    return matches


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
        follow_symlinks: take the content behind links (files and folders), wherever it lies. A folder
            reached by two paths is taken twice; one that contains itself ends there. Otherwise links are
            skipped and counted.
        filter: which files to take.
        progress: called with the number of files so far, once per folder.

    Raises:
        SourceError: the root is missing or unreadable, links multiply without end, or reading fails for
            a reason that lies outside the folder (a disk, the network).
    """
    listing = Listing()
    found = 0
    walk = _Walk(os.fsencode(root), listing, filter, follow=follow_symlinks)
    for path, sizes in walk:
        listing.folders.append(walk.wanted(path, sizes))
        found += len(listing.folders[-1].sizes)
        if progress is not None:
            progress(found)
    return listing


class _Walk:
    """Folders depth first, siblings sorted; yields (relative folder, size by name)."""

    def __init__(self, root: bytes, listing: Listing, filter_: Filter, *, follow: bool) -> None:
        self._root = root
        self._listing = listing
        self._follow = follow
        self._left_out, self._folder_left_out = filter_.test(), filter_.test_folder()
        self._filters = bool(filter_.include or filter_.exclude)
        self._visits: Counter[tuple[int, int]] = Counter()
        self._extensions: dict[frozenset[bytes], frozenset[bytes]] = {}  # one object for a thousand equal folders

    def __iter__(self) -> Iterator[tuple[bytes, dict[bytes, int]]]:
        # Each entry carries the identities of the folders above it: a folder that is its own ancestor is a loop.
        pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
        while pending:
            folder, above = pending.pop()
            files: dict[bytes, int] = {}
            folders: list[bytes] = []
            here = os.path.join(self._root, folder) if folder else self._root
            try:
                if self._follow:
                    identity = self._identify(folder, here)
                    if identity in above:
                        self._listing.skipped.append((folder, "link to a folder above it (a loop)"))
                        continue
                    above |= {identity}
                with os.scandir(here) as entries:
                    self._sort_entries(entries, _prefix(folder), files, folders)
            except OSError as error:
                if not folder or error.errno not in _DEFECTS:
                    raise SourceError(f"{printable(here)}: {error.strerror}") from error
                self._listing.problems.append((folder, f"folder cannot be read: {error.strerror}"))
            yield folder, files
            pending += [(os.path.join(folder, name), above) for name in sorted(folders, reverse=True)]

    def wanted(self, path: bytes, sizes: dict[bytes, int]) -> Folder:
        """The folder without files that are junk or do not pass the filter; these are listed with the reason."""
        names = sorted(sizes)
        extensions = _extensions(names)
        at = bisect_left(names, b".")
        if self._filters or not extensions <= _PICTURES or (at < len(names) and names[at][0] == 0x2E):
            prefix = _prefix(path)
            reasons = {name: reason for name in names if (reason := self._left_out(prefix + name, name))}
            self._listing.skipped += [(prefix + name, reason) for name, reason in reasons.items()]
            names = [name for name in names if name not in reasons]
            extensions = _extensions(names)
        same = self._extensions.setdefault(extensions, extensions)
        return Folder(path, b"/".join(names), array("q", map(sizes.__getitem__, names)), same)

    def _identify(self, folder: bytes, here: bytes) -> tuple[int, int]:
        status = os.stat(here)
        identity = (status.st_dev, status.st_ino)
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:
            raise SourceError(
                f"{printable(folder)}: links lead to this folder by more than {_MOST_VISITS} paths; "
                "remove links between folders, or leave them out with --exclude"
            )
        return identity

    def _sort_entries(
        self, entries: Iterator[os.DirEntry[bytes]], prefix: bytes, files: dict[bytes, int], folders: list[bytes]
    ) -> None:
        for entry in entries:
            name = entry.name
            try:
                if entry.is_file(follow_symlinks=False):  # by far the most: two calls for them, no more
                    status = entry.stat(follow_symlinks=False)
                elif entry.is_symlink() and not self._follow:
                    self._listing.skipped.append((prefix + name, _LINK))
                    continue
                elif entry.is_dir():
                    self._sort_folder(name, prefix, folders)
                    continue
                else:
                    status = entry.stat()
                    if not stat.S_ISREG(status.st_mode):
                        self._listing.skipped.append((prefix + name, _SPECIAL))
                        continue
                if status.st_mode & _ALL_MAY_READ != _ALL_MAY_READ and not os.access(
                    entry.path, os.R_OK, effective_ids=True
                ):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                files[name] = status.st_size
            except OSError as error:
                if error.errno not in _DEFECTS:
                    raise
                if reason := self._left_out(prefix + name, name):
                    self._listing.skipped.append((prefix + name, reason))
                    continue
                what = "broken link" if entry.is_symlink() and error.errno != errno.EACCES else "cannot be read"
                self._listing.problems.append((prefix + name, f"{what}: {error.strerror}"))

    def _sort_folder(self, name: bytes, prefix: bytes, folders: list[bytes]) -> None:
        if reason := self._folder_left_out(prefix + name, name):
            self._listing.skipped.append((prefix + name + b"/", reason))
        else:
            folders.append(name)


def _extensions(names: list[bytes]) -> frozenset[bytes]:
    extensions = frozenset([name.rpartition(b".")[2] for name in names])
    if not extensions.isdisjoint(names):  # a name without a dot, `jpg` say
        return frozenset([name.rpartition(b".")[2] if b"." in name else b"" for name in names])
    return extensions


def _prefix(folder: bytes) -> bytes:
    return folder + b"/" if folder else b""
