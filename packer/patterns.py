"""Which shard files a user means, and which split each belongs to."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from packer.errors import ProblemsError, SourceError, UsageError
from packer.formats import all_formats, get_format
from packer.formats.base import HEAD_BYTES
from packer.manifest import is_plain_name
from packer.sample import printable
from packer.storage import open_regular

if TYPE_CHECKING:
    from packer.formats.base import Format

#: A word of a shard's name, or its folder's whole name, that says which split it belongs to.
SPLITS = ("train", "val", "valid", "validation", "dev", "test")
DEFAULT_SPLIT = "train"

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_MOST = 1_000_000


def expand_braces(pattern: str) -> Iterator[str]:
    """The names that a shell would make of `{000000..000012}` and `{a,b}`; the leftmost brace varies slowest.

    Raises:
        UsageError: a brace that is neither, or more than a million names.

    >>> list(expand_braces("{a,b}-{08..10}.tar"))[:4]
    ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar']
    """
    names = [""]
    end = 0
    for brace in _BRACES.finditer(pattern):
        choices = _choices(brace[1], pattern)
        if len(names) * len(choices) > _MOST:
            raise UsageError(f"{pattern!r} stands for more than {_MOST:,} shards")
        names = [name + pattern[end : brace.start()] + choice for name in names for choice in choices]
        end = brace.end()
    return (name + pattern[end:] for name in names)


def _choices(inside: str, pattern: str) -> Sequence[str]:
    if bounds := _RANGE.fullmatch(inside):
        first, last = int(bounds[1]), int(bounds[2])
        if abs(last - first) >= _MOST:
            raise UsageError(f"{pattern!r} stands for more than {_MOST:,} shards")
        padded = any(bound.startswith("0") and len(bound) > 1 for bound in bounds.groups())
        width = max(map(len, bounds.groups())) if padded else 0
        step = 1 if last >= first else -1
        return [f"{number:0{width}d}" for number in range(first, last + step, step)]
    if "," in inside:
        return inside.split(",")
    raise UsageError(
        f"{pattern!r}: {{{inside}}} is neither a range such as {{000000..000012}} nor a list such as {{a,b}}"
    )


def find_shards(where: str) -> tuple[str, list[str], Format]:
    """The shards that a folder, or a pattern, stands for, and their format.

    Args:
        where: a folder with shards, known by their names' endings (`.TAR` too; hidden files are no shards); or
            file names with `{000000..000012}`, `*` and `?`, joined by `::`, known by their endings or else by
            how the first of them begins.

    Returns:
        Their folder, their names in it (as listed for a pattern, in natural order for a folder), and the format.

    Raises:
        SourceError: no shard there, or only in folders below (each is a dataset of its own).
        UsageError: shards in several folders or of several formats, a URL, a name that cannot stand in a manifest.
        ProblemsError: named shards that do not exist, all listed.
    """
    paths = _in_folder(where) if os.path.isdir(where) else _by_pattern(where)
    folders = dict.fromkeys(os.path.dirname(path) for path in paths)
    if len({os.path.realpath(folder) for folder in folders}) > 1:
        raise UsageError(
            f"the shards lie in {len(folders)} folders ({', '.join(list(folders)[:4])}); an index stands "
            "beside its shards: index each folder by itself, or make one folder of links to them"
        )
    names = [os.path.basename(path) for path in paths]
    if odd := [name for name in names if not is_plain_name(name)]:
        listed = ", ".join(repr(printable(name)) for name in odd[:20])
        more = f", … and {len(odd) - 20:,} more" if len(odd) > 20 else ""
        raise UsageError(
            f"shards with these names cannot be indexed: {listed}{more}; rename them to begin with a letter or digit "
            "of ASCII, or leave them out by a pattern"
        )
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise UsageError(f"{where!r} names {printable(twice[0])!r} twice")
    return next(iter(folders)) or ".", names, _format_of(paths)


def _format_of(paths: Sequence[str]) -> Format:
    """The format of these files. Of no known ending, and no known beginning: the first format's errors say why."""
    formats: dict[str, str] = {}
    for path in paths:
        if (found := _by_name(path)) is not None:
            formats.setdefault(found.name, path)
    if not formats:
        head = _head(paths[0])
        return next((f for f in all_formats() if f.recognises(head)), all_formats()[0])
    if len(formats) > 1:
        listed = " and ".join(f"{printable(os.path.basename(path))} ({name})" for name, path in formats.items())
        raise UsageError(f"shards of different formats: {listed}; an index covers one: name one kind by a pattern")
    return get_format(next(iter(formats)))


def _head(path: str) -> bytes:
    try:
        fd = open_regular(path)
    except OSError:
        return b""  # said when it is read
    try:
        return os.pread(fd, HEAD_BYTES, 0)
    finally:
        os.close(fd)


def _by_name(path: str) -> Format | None:
    """The format whose shards end like this. A hidden file is none (macOS leaves '._x.tar' beside 'x.tar')."""
    name = os.path.basename(path).lower()
    if name.startswith("."):
        return None
    return next((f for f in all_formats() if name.endswith(f.suffixes)), None)


def _in_folder(folder: str) -> list[str]:
    try:
        entries = sorted(os.listdir(folder), key=_natural)
    except OSError as error:
        raise SourceError(f"{printable(folder)}: {error.strerror}") from error
    shards = [os.path.join(folder, name) for name in entries if _by_name(name)]
    if shards:
        return shards
    endings = " ".join(ending for f in all_formats() for ending in f.suffixes)
    below = [name for name in entries if any(map(_by_name, _listed(os.path.join(folder, name))))]
    if below:
        commands = "\n".join(f"  packer index {os.path.join(folder, name)}" for name in below[:20])
        raise SourceError(
            f"{printable(folder)} holds no shards ({endings}) itself, its folders do; an index stands beside "
            f"its shards, so each folder is a dataset of its own. Run:\n{commands}"
        )
    packed = [name for name in entries if name.endswith(tuple(e for f in all_formats() for e in f.packed_suffixes))]
    if packed:
        raise SourceError(
            f"{printable(folder)} holds compressed shards only ({packed[0]}, …); byte ranges need plain "
            "files: uncompress them first"
        )
    raise SourceError(f"{printable(folder)} holds no shards ({endings})")


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _by_pattern(pattern: str) -> list[str]:
    paths: list[str] = []
    missing: list[tuple[str, str]] = []
    for part in pattern.split("::"):
        if _URL.match(part) and not os.path.exists(part):
            raise UsageError(
                f"{printable(part)}: an index stands beside its shards, so they must be local files; "
                "copy them here first"
            )
        for name in expand_braces(part):
            if os.path.exists(name):
                paths.append(name)
            elif found := glob.glob(name):
                paths += sorted(found, key=_natural)
            else:
                missing.append((printable(name), "matches no file" if glob.has_magic(name) else "no such file"))
    if missing:
        raise ProblemsError(
            f"{len(missing)} shard(s) of {pattern!r} are missing:", missing, "fetch them, or narrow the pattern"
        )
    return paths


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts `x-2` before `x-10`; names of equal value by their text."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), part) if i % 2 else (0, part) for i, part in enumerate(parts)]


def group_by_split(folder: str, names: Sequence[str], splits: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Shards by split.

    Args:
        folder: where they lie; its name decides where theirs say nothing.
        names: file names.
        splits: split → glob over file names, instead of guessing.

    Raises:
        UsageError: with `splits`, a name that files cannot have, or a shard that matches none or several of them.

    >>> group_by_split(".", ["in-train-0.tar", "in-val-0.tar", "0.tar"])
    {'train': ['in-train-0.tar', '0.tar'], 'val': ['in-val-0.tar']}
    """
    for split in splits or ():  # files are called after it
        if not is_plain_name(split):
            raise UsageError(
                f"a split cannot be called {printable(split)!r}: its files would be; begin with a letter or digit, "
                "without '/'"
            )
    own_name = os.path.basename(os.path.realpath(folder)).lower()
    fallback = own_name if own_name in SPLITS else DEFAULT_SPLIT
    grouped: dict[str, list[str]] = {name: [] for name in splits or ()}
    for name in names:
        if splits:
            matching = [split for split, pattern in splits.items() if fnmatchcase(name, pattern)]
            if len(matching) != 1:
                found = " and ".join(matching) or "none"
                raise UsageError(f"shard {printable(name)!r} matches {found} of the --split patterns")
            split = matching[0]
        else:
            split = _split_word(name) or fallback
        grouped.setdefault(split, []).append(name)
    return grouped


def _split_word(name: str) -> str | None:
    """The last word of a name that names a split."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS]
    return words[-1] if words else None
