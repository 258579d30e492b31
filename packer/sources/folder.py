"""A folder of files as a source: its layout recognised, its samples listed, its files read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from packer.errors import SourceChangedError, SourceError, UsageError
from packer.sample import (
    IMAGE_EXTENSIONS,
    bad_fields,
    escape_key,
    field_name,
    is_image_field,
    printable,
    split_extension,
    unique_keys,
)
from packer.sources.base import Scan, ScanBuilder, ScanProgress
from packer.sources.labels import Labels, class_numbers, read_classes
from packer.sources.listing import Filter, Folder, Listing, list_folder

LAYOUTS = ("imagefolder", "splits", "sidecars", "parallel", "flat")
SPLIT_FOLDERS = ("train", "val", "valid", "validation", "dev", "test")
IMAGE_FOLDERS = frozenset((b"images", b"image", b"imgs", b"img", b"JPEGImages"))
COMPANION_FOLDERS = {
    b"labels": "label",
    b"label": "label",
    b"masks": "mask",
    b"mask": "mask",
    b"annotations": "annotation",
    b"annotation": "annotation",
    b"Annotations": "annotation",
    b"segmentations": "segmentation",
    b"SegmentationClass": "segmentation",
    b"SegmentationObject": "object",
    b"captions": "caption",
    b"texts": "text",
    b"depth": "depth",
    b"boxes": "box",
    b"targets": "target",
}
DEFAULT_SPLIT = "train"
_NO_IMAGE = "not an image by its extension"
_ROOT_IMAGE = "a picture in no class folder"


@dataclass(frozen=True)
class FolderOptions:
    """How to read a folder.

    Attributes:
        layout: one of `LAYOUTS`, or None to recognise it.
        labels: CSV file of labels for a flat folder (see `packer.sources.labels`).
        classes: file with one class name a line, which fixes their order.
        filter: which files to take.
        follow_symlinks: take what links point to.
    """

    layout: str | None = None
    labels: str | None = None
    classes: str | None = None
    filter: Filter = field(default_factory=Filter)
    follow_symlinks: bool = False

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout not in LAYOUTS:
            raise UsageError(f"unknown layout {self.layout!r}; choose one of: {', '.join(LAYOUTS)}")
        if self.labels is not None and self.layout not in (None, "flat", "splits"):
            raise UsageError(f"--labels gives labels to a flat folder; it cannot be meant with --layout {self.layout}")


@dataclass(frozen=True)
class FolderSource:
    """A folder of image files, whatever its layout.

    >>> scan = FolderSource("/data/imagenet").scan()                        # doctest: +SKIP
    >>> scan.rule                                                           # doctest: +SKIP
    'splits: the top-level folders are train, val'
    """

    root: str
    options: FolderOptions = FolderOptions()

    def describe(self) -> str:
        """The folder's path."""
        return self.root

    def reader(self) -> FolderReader:
        """A reader of the folder's files."""
        return FolderReader(os.fsencode(self.root), self.options.follow_symlinks)

    def scan(self, progress: ScanProgress | None = None) -> Scan:
        """List all samples.

        Raises:
            SourceError: the folder is missing, holds no picture, or has no layout that is known.
        """
        options = self.options
        listing = list_folder(
            self.root, follow_symlinks=options.follow_symlinks, filter=options.filter, progress=progress
        )
        layout, rule = (
            (options.layout, "asked for by --layout")
            if options.layout
            else recognise(listing, labels=options.labels is not None)
        )
        scan = _Scanner(self, listing, layout, rule).scan()
        if len(scan) == 0 and not scan.problems:
            raise SourceError(_nothing_found(self.root, scan))
        return scan


def _nothing_found(root: str, scan: Scan) -> str:
    reasons = "; ".join(f"{count} × {reason}" for reason, count in scan.skipped_by_reason.most_common(4))
    return f"{root} holds no sample (layout {scan.layout}: {scan.rule}). " + (
        f"Left out: {reasons}" if reasons else "The folder is empty"
    )


# ---------------------------------------------------------------- recognising a layout


def recognise(listing: Listing, *, labels: bool = False) -> tuple[str, str]:
    """Name the layout of a listed folder and the rule that fired."""
    tops = _tops(listing.folders)
    if tops and all(top.decode("utf-8", "replace") in SPLIT_FOLDERS for top in tops):
        return "splits", f"the top-level folders are {', '.join(sorted(printable(t) for t in tops))}"
    if labels:
        return "flat", "--labels was given"
    return _inner_layout([(folder.path, folder) for folder in listing.folders])


def _inner_layout(folders: Sequence[tuple[bytes, Folder]]) -> tuple[str, str]:
    tops = {path.split(b"/", 1)[0] for path, folder in folders if path and folder.sizes}
    images, companions = tops & IMAGE_FOLDERS, tops & COMPANION_FOLDERS.keys()
    if len(images) == 1 and companions:
        names = ", ".join(sorted(printable(t) for t in images | companions))
        return "parallel", f"parallel trees of the same names: {names}"
    with_picture, with_sidecar = _count_sidecars([folder for _, folder in folders])
    if with_sidecar and 2 * with_sidecar >= with_picture:
        return "sidecars", f"{with_sidecar} of {with_picture} pictures have a file of the same stem beside them"
    if any(_holds_picture(folder) for path, folder in folders if path):
        return "imagefolder", "pictures lie in one folder per class"
    return "flat", "pictures lie in one folder, without classes"


def _tops(folders: Sequence[Folder]) -> set[bytes]:
    return {folder.path.split(b"/", 1)[0] for folder in folders if folder.path and folder.sizes}


def _holds_picture(folder: Folder) -> bool:
    return any(split_extension(name)[1] in IMAGE_EXTENSIONS for name in folder.names)


def _count_sidecars(folders: Sequence[Folder]) -> tuple[int, int]:
    pictures = sidecars = 0
    for folder in folders:
        stems: set[bytes] = set()
        others: set[bytes] = set()
        for name in folder.names:
            stem, extension = split_extension(name)
            (stems if extension in IMAGE_EXTENSIONS else others).add(stem)
        pictures += len(stems)
        sidecars += len(stems & others)
    return pictures, sidecars


# ---------------------------------------------------------------- listing the samples


class _Scanner:
    """One scan of one folder: the listing on one side, the columns on the other."""

    def __init__(self, source: FolderSource, listing: Listing, layout: str, rule: str) -> None:
        self.options = source.options
        self.listing = listing
        self.layout, self.rule = layout, rule
        self.out = ScanBuilder(skipped=listing.skipped, problems=listing.problems)
        self.labels = Labels.read(self.options.labels) if self.options.labels else None
        self._fields: dict[bytes, int] = {}

    def scan(self) -> Scan:
        made_cls = False
        groups = self._split_groups()
        fixed = read_classes(self.options.classes) if self.options.classes else None
        inner = self.layout
        if self.layout == "splits":
            inner, why = (
                ("flat", "--labels was given")
                if self.labels
                else _inner_layout([(path, f) for _, group in groups for path, f in group])
            )
            self.rule += f"; in them, {inner}: {why}"
        classes = self._classes(groups, inner, fixed)
        for split, group in groups:
            if inner == "imagefolder":
                made_cls |= self._imagefolder(split, group, class_numbers(classes or ()))
            elif inner == "flat":
                made_cls |= self._flat(split, group, classes)
            elif inner == "sidecars":
                made_cls |= self._sidecars(split, group, class_numbers(classes or ()))
            else:
                self._parallel(split, group)
        self.out.skipped.sort()
        self.out.problems.sort()
        self._check_fields()
        if self.labels is not None:
            classes = self.labels.classes(fixed)
            self.out.skipped += self.labels.unused()
        return self.out.build(classes=classes, made_cls=made_cls, layout=self.layout, rule=self.rule)

    def _split_groups(self) -> list[tuple[str, list[tuple[bytes, Folder]]]]:
        """Folders by split, each with its path below the split's folder."""
        if self.layout != "splits":
            return [(DEFAULT_SPLIT, [(folder.path, folder) for folder in self.listing.folders])]
        groups: dict[str, list[tuple[bytes, Folder]]] = {}
        for folder in self.listing.folders:
            top, _, below = folder.path.partition(b"/")
            name = top.decode("utf-8", "replace")
            if name in SPLIT_FOLDERS:
                groups.setdefault(name, []).append((below, folder))
            else:
                self._skip_folder(folder, "outside the split folders")
        return sorted(groups.items(), key=lambda item: SPLIT_FOLDERS.index(item[0]))

    def _skip_folder(self, folder: Folder, reason: str) -> None:
        prefix = folder.path + b"/" if folder.path else b""
        self.out.skipped += [(prefix + name, reason) for name in folder.names]

    def _classes(
        self, groups: Sequence[tuple[str, Sequence[tuple[bytes, Folder]]]], inner: str, fixed: tuple[str, ...] | None
    ) -> tuple[str, ...] | None:
        """Class names in torchvision's order: sorted as text, empty class folders included."""
        if inner == "sidecars":
            has_cls = any(
                split_extension(name)[1] == "cls" for _, group in groups for _, f in group for name in f.names
            )
            if has_cls or any(folder.sizes for _, group in groups for path, folder in group if not path):
                return fixed
        elif inner != "imagefolder":
            return fixed
        found = sorted({os.fsdecode(path.split(b"/", 1)[0]) for _, group in groups for path, _ in group if path})
        if fixed is None:
            return tuple(found)
        if unknown := [name for name in found if name not in set(fixed)]:
            raise SourceError(
                f"{self.options.classes} lacks {len(unknown)} of the class folders: "
                f"{', '.join(map(printable, unknown[:5]))}; add them or leave their folders out"
            )
        return fixed

    def _picture(self, extension: bytes) -> int:
        """The field number for a raw extension, −1 where it is no picture's."""
        number = self._fields.get(extension)
        if number is None:
            text = extension.decode("utf-8", "replace").lower()
            number = self.out.field_number(field_name(text)) if text in IMAGE_EXTENSIONS else -1
            self._fields[extension] = number
        return number

    def _pictures(self, folder: Folder) -> tuple[list[bytes], list[int], list[int]]:
        """Names, sizes and fields of the pictures in one folder; everything else is put aside."""
        prefix = folder.path + b"/" if folder.path else b""
        names: list[bytes] = []
        sizes: list[int] = []
        fields: list[int] = []
        for name, size in zip(folder.names, folder.sizes, strict=True):
            stem, dot, extension = name.rpartition(b".")
            field = self._picture(extension) if dot and stem else -1
            if field < 0:
                self.out.skipped.append((prefix + name, _NO_IMAGE))
            elif size == 0:
                self.out.problems.append((prefix + name, "empty file (0 bytes)"))
            else:
                names.append(name)
                sizes.append(size)
                fields.append(field)
        return names, sizes, fields

    def _add_pictures(self, split: str, folder: Folder, label: Callable[[bytes], int]) -> None:
        prefix = folder.path + b"/" if folder.path else b""
        names, sizes, fields = self._pictures(folder)
        if names:
            self.out.add_singles(
                unique_keys(folder.path, names),
                [prefix + name for name in names],
                sizes,
                fields,
                [label(prefix + name) for name in names],
                split,
            )

    def _imagefolder(self, split: str, group: Sequence[tuple[bytes, Folder]], numbers: dict[str, int]) -> bool:
        for path, folder in group:
            if path:
                label = numbers[os.fsdecode(path.split(b"/", 1)[0])]
                self._add_pictures(split, folder, lambda _, label=label: label)  # type: ignore[misc]
            else:
                self._skip_root(folder)
        return bool(numbers)

    def _skip_root(self, folder: Folder) -> None:
        prefix = folder.path + b"/" if folder.path else b""
        for name in folder.names:
            picture = split_extension(name)[1] in IMAGE_EXTENSIONS
            self.out.skipped.append((prefix + name, _ROOT_IMAGE if picture else _NO_IMAGE))

    def _flat(self, split: str, group: Sequence[tuple[bytes, Folder]], classes: tuple[str, ...] | None) -> bool:
        del classes
        for _, folder in group:
            if self.labels is None:
                self._add_pictures(split, folder, lambda _: -1)
            else:
                self._add_labelled(split, folder, self.labels)
        return self.labels is not None

    def _add_labelled(self, split: str, folder: Folder, labels: Labels) -> None:
        prefix = folder.path + b"/" if folder.path else b""
        names, sizes, fields = self._pictures(folder)
        keys = unique_keys(folder.path, names)
        fixed = read_classes(self.options.classes) if self.options.classes else None
        for name, key, size, number in zip(names, keys, sizes, fields, strict=True):
            path = prefix + name
            try:
                label = labels.of(path, fixed)
            except SourceError as error:
                self.out.problems.append((path, str(error)))
            else:
                self.out.add_singles([key], [path], [size], [number], [label], split)

    def _sidecars(self, split: str, group: Sequence[tuple[bytes, Folder]], numbers: dict[str, int]) -> bool:
        groups = [(path, folder, _group_by_stem(folder)) for path, folder in group]
        has_cls = any("cls" in files for _, _, stems in groups for files in stems.values())
        by_folder = bool(numbers) and not has_cls
        for path, folder, stems in groups:
            prefix = folder.path + b"/" if folder.path else b""
            label = numbers.get(os.fsdecode(path.split(b"/", 1)[0]), -1) if by_folder and path else -1
            for stem, files in stems.items():
                listed = [(prefix + name, size, name_of) for name_of, (name, size) in sorted(files.items())]
                if reason := _incomplete(listed, has_cls):
                    self.out.problems += [(file, reason) for file, _, _ in listed]
                else:
                    self.out.add(escape_key(prefix + stem), label, split, listed)
        return by_folder

    def _parallel(self, split: str, group: Sequence[tuple[bytes, Folder]]) -> None:
        """`images/…/a.jpg` with `labels/…/a.txt`, `masks/…/a.png` and so on; splits may lie below images/."""
        files = _ParallelFiles(group, self.out)
        for folder, inside in files.images:
            prefix = folder.path + b"/" if folder.path else b""
            names, sizes, fields = self._pictures(folder)
            field_names = list(self.out.fields)
            below = inside.split(b"/", 1)[0].decode("utf-8", "replace")
            here = below if self.layout != "splits" and below in SPLIT_FOLDERS else split
            for name, size, number, key in zip(names, sizes, fields, unique_keys(folder.path, names), strict=True):
                place = (inside + b"/" if inside else b"") + split_extension(name)[0]
                self.out.add(key, -1, here, [(prefix + name, size, field_names[number]), *files.claim(place)])
        files.report_unclaimed()

    def _check_fields(self) -> None:
        if bad := bad_fields(self.out.fields):
            raise SourceError(
                f"these extensions cannot become fields that every reader understands: "
                f"{', '.join(map(repr, bad[:5]))}; rename the files or leave them out with --exclude"
            )


def _incomplete(files: Sequence[tuple[bytes, int, str]], has_cls: bool) -> str | None:
    pictures = [size for _, size, name in files if is_image_field(name)]
    if not pictures:
        return "sidecar without a picture of the same stem"
    if 0 in pictures:
        return "empty file (0 bytes)"
    if has_cls and all(name != "cls" for _, _, name in files):
        return "no .cls file beside it, though other samples have one"
    return None


def _group_by_stem(folder: Folder) -> dict[bytes, dict[str, tuple[bytes, int]]]:
    """Files of one folder by sample: `a.jpg a.json a.seg.png` → a: {jpg, json, seg.png}.

    A file belongs to the shortest dotted prefix of its name that is another file's whole stem, so
    a name like `1.2.840.1.jpg` stays one sample of its own.
    """
    split = [(name, size, *split_extension(name)) for name, size in zip(folder.names, folder.sizes, strict=True)]
    stems = {stem for _, _, stem, extension in split if extension}
    groups: dict[bytes, dict[str, tuple[bytes, int]]] = {}
    for name, size, stem, extension in split:
        if not extension:
            continue
        parts = stem.split(b".")
        own = next((p for p in (b".".join(parts[:n]) for n in range(1, len(parts))) if p in stems), stem)
        suffix = stem[len(own) + 1 :].decode("utf-8", "surrogateescape").lower()
        field = field_name(f"{suffix}.{extension}" if suffix else extension)
        files = groups.setdefault(own, {})
        if field in files:  # a.jpg beside a.jpeg: two pictures, two samples
            groups[name] = {field: (name, size)}
        else:
            files[field] = (name, size)
    return groups


class _ParallelFiles:
    """The companion files of a parallel layout, by their place below their tree's top folder."""

    def __init__(self, group: Sequence[tuple[bytes, Folder]], out: ScanBuilder) -> None:
        self.images: list[tuple[Folder, bytes]] = []
        self._files: dict[bytes, list[tuple[bytes, int, str]]] = {}
        self._out = out
        trees: dict[str, set[bytes]] = {}
        companions: list[tuple[bytes, bytes, Folder]] = []
        for path, folder in group:
            top, _, inside = path.partition(b"/")
            if top in IMAGE_FOLDERS:
                self.images.append((folder, inside))
            elif top in COMPANION_FOLDERS:
                companions.append((top, inside, folder))
                for name in folder.names:
                    trees.setdefault(split_extension(name)[1], set()).add(top)
            else:
                out.skipped += [
                    ((folder.path + b"/" if folder.path else b"") + name, "outside the parallel trees")
                    for name in folder.names
                ]
        for top, inside, folder in companions:
            for name, size in zip(folder.names, folder.sizes, strict=True):
                stem, extension = split_extension(name)
                place = (inside + b"/" if inside else b"") + stem
                # A mask is not the picture; and two trees of .txt files need two fields.
                plain = extension not in IMAGE_EXTENSIONS and len(trees[extension]) == 1
                field = field_name(extension if plain else f"{COMPANION_FOLDERS[top]}.{extension}")
                self._files.setdefault(place, []).append((folder.path + b"/" + name, size, field))

    def claim(self, place: bytes) -> list[tuple[bytes, int, str]]:
        return sorted(self._files.pop(place, []), key=lambda file: file[2])

    def report_unclaimed(self) -> None:
        self._out.skipped += [
            (path, "no picture of the same name in the image tree")
            for files in self._files.values()
            for path, _, _ in files
        ]


# ---------------------------------------------------------------- reading


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
                raise SourceChangedError(
                    f"{printable(place)}: {error.strerror} (it was there when the folder was scanned); "
                    "put it back, or pack into a new folder"
                ) from error
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

    def close(self) -> None:
        """Let go of the folder."""
        if self._root >= 0:
            with contextlib.suppress(OSError):
                os.close(self._root)
            self._root = -1


def _changed(path: bytes, size: int, got: int) -> SourceChangedError:
    what = f"grew beyond {size} bytes" if got > size else f"has {got} bytes, had {size}"
    return SourceChangedError(
        f"{printable(path)} {what} since the folder was scanned; let it come to rest, then run the same command again"
    )
