"""Files that belong to a picture: sidecars of the same stem, and files of the same name in parallel trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from packer.sample import IMAGE_EXTENSIONS, bad_fields, field_name, is_image_field, split_extension
from packer.sources.layouts import COMPANION_FOLDERS, IMAGE_FOLDERS, Placed
from packer.sources.listing import Folder

#: A file that becomes a field: (relative path, bytes, field name).
File = tuple[bytes, int, str]
EMPTY = "empty file (0 bytes)"


# ---------------------------------------------------------------- sidecars


def group_by_stem(folder: Folder) -> Iterator[tuple[bytes, list[File]]]:
    """Files of one folder by the stem of their sample: `a.jpg a.json a.seg.png` → a: [jpg, json, seg.png].

    A file belongs to the shortest dotted prefix of its name that is another file's whole stem, so a name
    like `1.2.840.1.jpg` stays one sample of its own; and so does `a.v2.jpg a.v2.json` beside
    `a.jpg a.json`, a second sample of the same make. Of two files for one field (`a.jpg`, `a.JPEG`) the
    second becomes a sample of its own, by its full name. Files without an extension are in no group.
    """
    prefix, simple = folder.prefix, _one_dot_each(folder)
    # Names are sorted, so those that begin with the same word and a dot stand together; others never share a sample.
    for word, run in groupby(zip(folder.names, folder.sizes, strict=True), key=_first_word):
        files = list(run)
        made_of = {} if simple else _made_of(files)
        groups: dict[bytes, dict[str, File]] = {}
        for name, size in files:
            own = word if simple else _own_stem(name, made_of)
            if own is None:
                continue
            field_ = _field_after(name[len(own) + 1 :])
            group = groups.setdefault(own, {})
            if field_ in group:
                group = groups.setdefault(name, {})
            group[field_] = (prefix + name, size, field_)
        for stem, group in groups.items():
            yield stem, [group[name] for name in sorted(group)]


def _one_dot_each(folder: Folder) -> bool:
    return b"" not in folder.extensions and folder.joined.count(b".") == len(folder.sizes)


def _first_word(file: tuple[bytes, int]) -> bytes:
    return file[0].partition(b".")[0]


@lru_cache(4096)
def _field_after(rest: bytes) -> str:
    """The field of a file by what follows its stem and a dot."""
    return field_name(rest.lstrip(b".").decode("utf-8", "surrogateescape"))


def _made_of(files: Iterable[tuple[bytes, int]]) -> dict[bytes, set[str]]:
    """Fields by stem, each file taken as its last extension says."""
    made_of: dict[bytes, set[str]] = {}
    for name, _ in files:
        stem, extension = split_extension(name)
        if extension:
            made_of.setdefault(stem, set()).add(field_name(extension))
    return made_of


def _own_stem(name: bytes, made_of: dict[bytes, set[str]]) -> bytes | None:
    """The stem of the sample that a file belongs to, None for a file without an extension."""
    stem, extension = split_extension(name)
    if not extension:
        return None
    at = stem.find(b".")
    while at >= 0:
        prefix = stem[:at]
        if prefix in made_of:
            second_sample = len(made_of[stem]) > 1 and made_of[stem] == made_of[prefix]
            return stem if second_sample else prefix
        at = stem.find(b".", at + 1)
    return stem


@dataclass(frozen=True)
class SidecarRules:
    """What the samples of a sidecar layout consist of, seen over all of them.

    Attributes:
        fields: those that stand beside any picture.
    """

    fields: frozenset[str]

    @staticmethod
    def of(folders: Iterable[Folder]) -> SidecarRules:
        """The rules for these folders."""
        fields: set[str] = set()
        for folder in folders:
            if _one_dot_each(folder):
                fields |= _beside_pictures(folder)
                continue
            for _, files in group_by_stem(folder):
                if has_picture(files):
                    fields |= {name for _, _, name in files}
        return SidecarRules(frozenset(fields))

    @property
    def has_labels(self) -> bool:
        """Samples bring their label as a `.cls` file."""
        return "cls" in self.fields

    def problem(self, files: Sequence[File]) -> str | None:
        """Why these files of one stem should be a sample and cannot, or None.

        A file without a picture is a problem only if its like stands beside pictures: a README is not missed.
        """
        if not has_picture(files):
            orphan = any(name in self.fields for _, _, name in files)
            return "sidecar without a picture of the same stem" if orphan else None
        if self.has_labels and all(name != "cls" for _, _, name in files):
            return "no .cls file beside it, though other samples have one"
        return problem_of(files)


def _beside_pictures(folder: Folder) -> set[str]:
    """What the grouping of a folder with one dot in each name would find, in a tenth of the time."""
    stems: dict[str, set[bytes]] = {}
    for name in folder.names:
        stem, _, rest = name.partition(b".")
        stems.setdefault(_field_after(rest), set()).add(stem)
    pictures = set[bytes]().union(*(found for name, found in stems.items() if is_image_field(name)))
    return {name for name, found in stems.items() if not found.isdisjoint(pictures)}


def has_picture(files: Iterable[File]) -> bool:
    """Whether any of the files is a picture by its field."""
    return any(is_image_field(name) for _, _, name in files)


def problem_of(files: Sequence[File]) -> str | None:
    """Why files cannot be the fields of one sample, or None."""
    if any(size == 0 and is_image_field(name) for _, size, name in files):
        return EMPTY
    return _problem_of_fields(tuple(name for _, _, name in files))


@lru_cache(4096)
def _problem_of_fields(names: tuple[str, ...]) -> str | None:
    if bad := bad_fields(names):
        return f"{bad[0]!r} is no field name that every reader understands; rename the file"
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"two of its files would be the field {twice!r}"
    return None


# ---------------------------------------------------------------- parallel trees


@dataclass
class ParallelTrees:
    """`images/…/a.jpg` with `labels/…/a.txt`, `masks/…/a.png` and so on.

    Attributes:
        unmatched: companions that no picture asked for.
        outside: folders in none of the trees.
    """

    unmatched: list[bytes] = field(default_factory=list)
    outside: list[Folder] = field(default_factory=list)
    _with_extension: dict[str, set[bytes]] = field(default_factory=dict)
    _tree_of: dict[bytes, bytes] = field(default_factory=dict)
    _files: Counter[bytes] = field(default_factory=Counter)
    _left: Counter[bytes] = field(default_factory=Counter)

    @staticmethod
    def of(folders: Iterable[Placed]) -> ParallelTrees:
        """The trees in these folders, of all splits: a field has one name in all of them."""
        trees = ParallelTrees()
        for path, folder in folders:
            top = path.partition(b"/")[0]
            if top in COMPANION_FOLDERS:
                trees._tree_of[folder.path] = top
                trees._files[top] += len(folder.sizes)
                for name in folder.names:
                    trees._with_extension.setdefault(split_extension(name)[1], set()).add(top)
            elif top not in IMAGE_FOLDERS:
                trees.outside.append(folder)
        return trees

    def pair(self, folders: Sequence[Placed]) -> Iterator[tuple[Folder, dict[bytes, list[File]]]]:
        """Per folder of pictures: the companions by stem, out of which the caller takes what it uses."""
        images: dict[bytes, list[Folder]] = {}
        companions: dict[bytes, list[tuple[bytes, Folder]]] = {}
        for path, folder in folders:
            top, _, inside = path.partition(b"/")
            if top in IMAGE_FOLDERS:
                images.setdefault(inside, []).append(folder)
            elif top in COMPANION_FOLDERS:
                companions.setdefault(inside, []).append((top, folder))
        for inside, pictures in images.items():
            files = self._by_stem(companions.pop(inside, []))
            for folder in pictures:
                yield folder, files
            self._leave(files.values())
        for alone in companions.values():
            self._leave(self._by_stem(alone).values())

    @property
    def strangers(self) -> list[bytes]:
        """Trees out of which no picture got a file: their names follow another rule."""
        return sorted(top for top, count in self._left.items() if count == self._files[top])

    def _by_stem(self, companions: Sequence[tuple[bytes, Folder]]) -> dict[bytes, list[File]]:
        files: dict[bytes, list[File]] = {}
        for top, folder in companions:
            for name, size in zip(folder.names, folder.sizes, strict=True):
                stem, extension = split_extension(name)
                # A mask is not the picture; and two trees of .txt files need two fields.
                plain = extension not in IMAGE_EXTENSIONS and len(self._with_extension[extension]) == 1
                name_of = field_name(extension if plain else f"{COMPANION_FOLDERS[top]}.{extension}")
                if extension:
                    files.setdefault(stem, []).append((folder.prefix + name, size, name_of))
                else:
                    self._leave([[(folder.prefix + name, size, "")]])
        return files

    def _leave(self, files: Iterable[Sequence[File]]) -> None:
        for path, _, _ in (file for group in files for file in group):
            self.unmatched.append(path)
            self._left[self._tree_of[path.rpartition(b"/")[0]]] += 1
