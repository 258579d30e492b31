"""A folder of files as a source: its layout recognised, its samples listed."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from packer.errors import SourceError, UsageError
from packer.sample import IMAGE_EXTENSIONS, escape_key, field_name, printable, split_extension, unique_keys
from packer.sources.base import Scan, ScanBuilder, ScanProgress
from packer.sources.companions import EMPTY, File, ParallelTrees, SidecarRules, group_by_stem, has_picture, problem_of
from packer.sources.folder_reader import FolderReader
from packer.sources.labels import Labels, class_numbers, read_classes
from packer.sources.layouts import (
    DEFAULT_SPLIT,
    LAYOUTS,
    SPLITS,
    Placed,
    by_split,
    holds_picture,
    inner_layout,
    is_picture_extension,
    recognise,
    split_of,
)
from packer.sources.listing import Filter, Folder, Listing, list_folder

_NO_IMAGE = "not an image by its extension"
_ROOT_IMAGE = "a picture in no class folder"
_MAX_FIELDS = 64  # each is three columns of the index; more are a name taken apart wrongly


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
    'the top-level folders are train, val; in them, imagefolder: pictures lie in one folder per class'
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
            SourceError: the folder is missing, holds no picture, or has no layout that is known; a class
                folder is not among `classes`.
            UsageError: the files of labels or classes cannot be meant.
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
        scan = _Scanner(options, listing, layout, rule).scan()
        if len(scan) == 0 and not scan.problems:
            raise SourceError(_nothing_found(self.root, scan))
        return scan


def _nothing_found(root: str, scan: Scan) -> str:
    reasons = "; ".join(f"{count} × {reason}" for reason, count in scan.skipped_by_reason.most_common(4))
    return f"{printable(root)} holds no sample (layout {scan.layout}: {scan.rule}). " + (
        f"Left out: {reasons}" if reasons else "The folder is empty"
    )


class _Pictures(NamedTuple):
    """The pictures of one folder: base names, bytes, numbers of their fields."""

    names: list[bytes]
    sizes: array[int]
    fields: array[int]


class _Scanner:
    """One scan of one folder: the listing on one side, the columns on the other."""

    def __init__(self, options: FolderOptions, listing: Listing, layout: str, rule: str) -> None:
        self.options = options
        self.layout, self.rule = layout, rule
        self.out = ScanBuilder(skipped=listing.skipped, problems=listing.problems)
        self._fields: dict[bytes, int] = {}
        self.groups: dict[str, list[Placed]] = {DEFAULT_SPLIT: [(folder.path, folder) for folder in listing.folders]}
        if layout == "splits":
            self.groups, outside = by_split(listing.folders)
            for folder in outside:
                self._skip(folder, "outside the split folders")
        self.placed = [placed for group in self.groups.values() for placed in group]

    def scan(self) -> Scan:
        fixed = read_classes(self.options.classes) if self.options.classes else None
        inner = self.layout
        if self.layout == "splits":
            inner, why = ("flat", "--labels was given") if self.options.labels else inner_layout(self.placed)
            self.rule += f"; in them, {inner}: {why}"
        if inner == "imagefolder":
            classes, made_cls = self._imagefolder(fixed)
        elif inner == "sidecars":
            classes, made_cls = self._sidecars(fixed)
        elif inner == "parallel":
            classes, made_cls = self._parallel(fixed)
        else:
            classes, made_cls = self._flat(fixed)
        self.out.skipped.sort()
        self.out.problems.sort()
        if len(self.out.fields) > _MAX_FIELDS:
            raise SourceError(
                f"the files would make {len(self.out.fields)} fields ({', '.join(sorted(self.out.fields)[:5])}, …), "
                f"more than {_MAX_FIELDS}: what follows a stem in the name of a sidecar is taken for its field. "
                "Rename the files, leave them out with --exclude, or choose another --layout"
            )
        return self.out.build(classes=classes, made_cls=made_cls, layout=self.layout, rule=self.rule)

    # ------------------------------------------------------------ the layouts: each gives (classes, made_cls)

    def _imagefolder(self, fixed: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, bool]:
        classes = self._class_folders(fixed)
        numbers = class_numbers(classes)
        for split, group in self.groups.items():
            # A test split often has no class folders, for its labels are secret.
            unlabelled = self.layout == "splits" and not any(path and holds_picture(folder) for path, folder in group)
            for path, folder in group:
                if path or unlabelled:
                    self._add_pictures(split, folder, numbers[_class_of(path)] if path else -1)
                else:
                    self._skip_root(folder)
            if unlabelled and any(holds_picture(folder) for _, folder in group):
                self.rule += f"; {split} has no class folders, so no labels"
        return classes, bool(numbers)

    def _flat(self, fixed: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, bool]:
        folders = [(split, folder) for split, group in self.groups.items() for _, folder in group]
        if self.options.labels is None:
            for split, folder in folders:
                self._add_pictures(split, folder, -1)
            return fixed, False
        labels = Labels.read(self.options.labels, fixed)
        pictures = [self._pictures(folder) for _, folder in folders]
        pairs = list(zip(folders, pictures, strict=True))
        labels.match(folder.prefix + name for (_, folder), found in pairs for name in found.names)
        for (split, folder), found in pairs:
            self._add_labelled(split, folder, found, labels)
        self.out.skipped += labels.unused()
        return labels.classes, True

    def _add_labelled(self, split: str, folder: Folder, pictures: _Pictures, labels: Labels) -> None:
        keys = unique_keys(folder.path, pictures.names)  # of all: a missing row must not change the others' keys
        rows = []
        for key, name, size, number in zip(keys, *pictures, strict=True):
            path = folder.prefix + name
            try:
                rows.append((key, path, size, number, labels.of(path)))
            except SourceError as error:
                self.out.problems.append((path, str(error)))
        if rows:
            keys, paths, sizes, fields, found = map(list, zip(*rows, strict=True))
            self.out.add_singles(keys, paths, sizes, fields, found, split)

    def _sidecars(self, fixed: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, bool]:
        rules = SidecarRules.of(folder for _, folder in self.placed)
        classes, numbers = fixed, {}
        if not rules.has_labels and not any(not path and holds_picture(folder) for path, folder in self.placed):
            classes = self._class_folders(fixed)
            numbers = class_numbers(classes)
        for split, group in self.groups.items():
            for path, folder in group:
                self._add_sidecars(split, folder, rules, numbers.get(_class_of(path), -1) if path else -1)
        return classes, bool(numbers)

    def _add_sidecars(self, split: str, folder: Folder, rules: SidecarRules, label: int) -> None:
        if b"" in folder.extensions:
            self.out.skipped += [(folder.prefix + n, _NO_IMAGE) for n in folder.names if not split_extension(n)[1]]
        for stem, files in group_by_stem(folder):
            if reason := rules.problem(files):
                self.out.problems += [(path, reason) for path, _, _ in files]
            elif has_picture(files):
                self.out.add(escape_key(folder.prefix + stem), label, split, files)
            else:
                self.out.skipped += [(path, _NO_IMAGE) for path, _, _ in files]

    def _parallel(self, fixed: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, bool]:
        trees = ParallelTrees.of(self.placed)
        for folder in trees.outside:
            self._skip(folder, "outside the parallel trees")
        if self.layout == "splits":
            within = {folder.path: split for split, group in self.groups.items() for _, folder in group}
        else:
            within = {folder.path: _split_below(path) for path, folder in self.placed}
        for split in sorted(set(within.values()), key=SPLITS.index):
            for folder, files in trees.pair([p for p in self.placed if within[p[1].path] == split]):
                self._add_parallel(split, folder, files)
        self.out.skipped += [(path, "no picture of the same name in the image tree") for path in trees.unmatched]
        for name in trees.strangers:
            self.rule += f"; no file in {printable(name)}/ has the name of a picture"
        return fixed, False

    def _add_parallel(self, split: str, folder: Folder, companions: dict[bytes, list[File]]) -> None:
        pictures = self._pictures(folder)
        known = list(self.out.fields)
        stems = [split_extension(name)[0] for name in pictures.names]
        several = Counter(stems)
        shared: dict[bytes, str] = {}
        for key, stem, name, size, number in zip(
            unique_keys(folder.path, pictures.names), stems, *pictures, strict=True
        ):
            files = [(folder.prefix + name, size, known[number]), *sorted(companions.get(stem, ()), key=_field_of)]
            if several[stem] > 1 and len(files) > 1:
                whose = f"several pictures have the stem of {printable(files[1][0])}"
                self.out.problems.append((files[0][0], whose))
                shared.update((path, whose) for path, _, _ in files[1:])
            elif reason := problem_of(files):
                self.out.problems += [(path, reason) for path, _, _ in files]
            else:
                self.out.add(key, -1, split, files)
        self.out.problems += shared.items()
        for stem in stems:
            companions.pop(stem, None)

    # ------------------------------------------------------------ what they share

    def _class_folders(self, fixed: tuple[str, ...] | None) -> tuple[str, ...]:
        """Class names in torchvision's order: sorted as text, empty class folders included."""
        found = sorted({_class_of(path) for path, _ in self.placed if path})
        if fixed is None:
            return tuple(found)
        if unknown := [name for name in found if name not in set(fixed)]:
            raise SourceError(
                f"{self.options.classes} lacks {len(unknown)} of the class folders: "
                f"{', '.join(map(printable, unknown[:5]))}; add them, or leave the folders out with --exclude"
            )
        return fixed

    def _field(self, extension: bytes) -> int:
        """The field number for an extension as written, −1 where it is no picture's."""
        number = self._fields.get(extension)
        if number is None:
            name = field_name(extension.decode("utf-8", "replace"))
            number = self.out.field_number(name) if is_picture_extension(extension) else -1
            self._fields[extension] = number
        return number

    def _pictures(self, folder: Folder) -> _Pictures:
        """The pictures in one folder; everything else is put aside."""
        numbers = {extension: self._field(extension) for extension in sorted(folder.extensions)}
        if len(numbers) == 1 and min(numbers.values()) >= 0 and min(folder.sizes) > 0:  # the usual folder
            return _Pictures(folder.names, folder.sizes, array("h", numbers.values()) * len(folder.sizes))
        prefix, pictures = folder.prefix, _Pictures([], array("q"), array("h"))
        for name, size in zip(folder.names, folder.sizes, strict=True):
            _, dot, extension = name.rpartition(b".")
            number = numbers[extension] if dot else -1
            if number < 0:
                self.out.skipped.append((prefix + name, _NO_IMAGE))
            elif size == 0:
                self.out.problems.append((prefix + name, EMPTY))
            else:
                pictures.names.append(name)
                pictures.sizes.append(size)
                pictures.fields.append(number)
        return pictures

    def _add_pictures(self, split: str, folder: Folder, label: int) -> None:
        names, sizes, fields = self._pictures(folder)
        if names:
            prefix, keys = folder.prefix, unique_keys(folder.path, names)
            self.out.add_singles(
                keys, [prefix + n for n in names], sizes, fields, array("q", [label]) * len(names), split
            )

    def _skip(self, folder: Folder, reason: str) -> None:
        self.out.skipped += [(folder.prefix + name, reason) for name in folder.names]

    def _skip_root(self, folder: Folder) -> None:
        for name in folder.names:
            picture = split_extension(name)[1] in IMAGE_EXTENSIONS
            self.out.skipped.append((folder.prefix + name, _ROOT_IMAGE if picture else _NO_IMAGE))


def _class_of(path: bytes) -> str:
    # By UTF-8 in every locale: the order of classes must not depend on the machine.
    return path.split(b"/", 1)[0].decode("utf-8", "surrogateescape")


def _field_of(file: File) -> str:
    return file[2]


def _split_below(path: bytes) -> str:
    """The split of `images/train/…` and `labels/train/…`."""
    return split_of(path.split(b"/", 2)[1]) or DEFAULT_SPLIT if b"/" in path else DEFAULT_SPLIT


__all__ = ["LAYOUTS", "FolderOptions", "FolderReader", "FolderSource"]
