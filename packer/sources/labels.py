"""Labels from files: a CSV of (picture, label), and a list of class names."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from packer.errors import SourceError, UsageError
from packer.sample import printable, split_extension

# In order of preference: where a table has both an `id` and a `filename`, the latter names the picture.
_NAME_HEADERS = (
    *("path", "filepath", "file_path", "filename", "file_name", "file"),
    *("image_path", "image_name", "image", "img", "image_id", "name", "stem", "id"),
)
_LABEL_HEADERS = ("label", "class", "target", "category", "class_id", "class_name", "label_name", "y")

# A leading zero makes a name of it: 001 and 1 are two classes.
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_NUMERAL = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan", re.IGNORECASE)


def read_classes(path: str) -> tuple[str, ...]:
    """Class names, one a line, in label order.

    Raises:
        UsageError: the file is missing, names no class, or names one twice.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as f:
            names = tuple(line for line in (raw.rstrip("\r\n") for raw in f) if line.strip())
    except OSError as error:
        raise UsageError(f"--classes {path}: {error.strerror}") from error
    if not names:
        raise UsageError(f"--classes {path} names no class; write one a line")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"--classes {path} names a class twice: {', '.join(map(printable, repeated[:5]))}")
    return names


def class_numbers(classes: Sequence[str]) -> dict[str, int]:
    """Label of each class name."""
    return {name: number for number, name in enumerate(classes)}


@dataclass
class Labels:
    """The rows of a labels file. `match` all pictures first; then `of` gives the label of each.

    A row names a picture by its path, its path without extension, its base name or its stem, the first of
    these that is in the file; a row that so names several pictures labels none of them. A picture with a
    second row, which is no other picture's, and another label in it, is refused.

    Attributes:
        path: the file, for messages.
        fixed: class names that were given, or None.
        classes: class names by label; None where labels are bare integers.
    """

    path: str
    fixed: tuple[str, ...] | None
    classes: tuple[str, ...] | None = None
    _text: dict[bytes, str] = field(default_factory=dict)
    _stripped: dict[bytes, bytes] = field(default_factory=dict)
    _first: bytes | None = None
    _pictures: Counter[bytes] = field(default_factory=Counter)
    _numbers: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def read(
        path: str,
        fixed: tuple[str, ...] | None = None,
        *,
        names: Sequence[str] = _NAME_HEADERS,
        label_column: str | None = None,
    ) -> Labels:
        """Read a CSV or TSV: a name column and a label column, with or without a header line.

        Args:
            path: the file.
            fixed: class names by label, where they are given.
            names: what the name column may be called, the best first.
            label_column: what the label column is called, None to recognise it.

        Raises:
            UsageError: the file is missing, lacks a column, or gives a name two labels.
        """
        labels = Labels(path, fixed)
        rows = _rows(path)
        if label_column is not None and label_column not in [cell.strip() for cell in rows[0][1]]:
            raise UsageError(f"--labels {path} has no column {label_column!r}; it has {', '.join(rows[0][1])}")
        name_at, label_at, has_header = _columns(rows[0][1], names, label_column)
        conflicts: list[str] = []
        for line, row in rows[has_header:]:
            if len(row) <= max(name_at, label_at):
                raise UsageError(
                    f"--labels {path}, line {line}: {len(row)} column(s) {row!r}; a name and a label are needed"
                )
            name, label = row[name_at].removeprefix("./").encode("utf-8", "surrogateescape"), row[label_at].strip()
            if (known := labels._text.setdefault(name, label)) != label:
                conflicts.append(f"line {line}: {printable(name)!r} has two labels, {known!r} and {label!r}")
            if name != name.strip():
                labels._stripped.setdefault(name.strip(), name)
        if conflicts:
            raise UsageError(f"--labels {path}:" + _listed(conflicts))
        if not has_header:
            labels._first = next(iter(labels._text))
        return labels

    def match(self, paths: Iterable[bytes]) -> None:
        """Find the row of every picture, and number the classes.

        Raises:
            UsageError: labels that are neither integers nor names, or some of each; two rows give one
                picture two labels.
        """
        farther: dict[bytes, list[bytes]] = {}  # a row that is not the nearest of a picture → the nearest
        for path in paths:
            nearest = None
            for name in self._rows_of(path):
                if nearest is None:
                    nearest = name
                    self._pictures[name] += 1
                else:
                    farther.setdefault(name, []).append(nearest)
        self._refuse_contradictions(farther)
        first = self._first
        if first is not None and first not in self._pictures and len(self._text) > 1:
            # No picture has this name: a header in unknown words, unless its label is seen elsewhere too.
            label = self._text.pop(first)
            if label in self._text.values():
                self._text[first] = label
        self._number_classes()

    def _refuse_contradictions(self, farther: dict[bytes, list[bytes]]) -> None:
        text = self._text
        conflicts = [
            f"{printable(own[0])!r} has label {text[own[0]]!r}, {printable(name)!r} has {text[name]!r}"
            for name, own in farther.items()
            # A row that may mean several pictures is left to those that are named less closely.
            if len(own) == 1 and name not in self._pictures and text[name] != text[own[0]]
        ]
        if conflicts:
            raise UsageError(f"--labels {self.path}: rows of one picture contradict each other:" + _listed(conflicts))

    def _refuse_odd(self) -> None:
        """Refuse a few labels among integers: a typo in one of them must not renumber all classes."""
        odd = [(name, label) for name, label in self._text.items() if label and not _NUMERAL.fullmatch(label)]
        integers = sum(map(bool, map(_INTEGER.fullmatch, self._text.values())))
        if odd and integers > len(odd):
            raise UsageError(
                f"--labels {self.path}: most labels are integers, these are not; mend them, or where all labels "
                "are names, list them with --classes:" + _listed([f"{printable(n)!r} has {t!r}" for n, t in odd])
            )

    def _number_classes(self) -> None:
        distinct = {label for label in self._text.values() if label}
        if self.fixed is not None:
            self.classes = self.fixed
        elif not all(map(_INTEGER.fullmatch, distinct)):
            if all(_INTEGER.fullmatch(label) or _DECIMAL.fullmatch(label) for label in distinct):
                odd = next(label for label in sorted(distinct) if not _INTEGER.fullmatch(label))
                raise UsageError(f"--labels {self.path}: {odd!r} is neither an integer nor a name of a class")
            self._refuse_odd()
            self.classes = tuple(sorted(distinct))
        self._numbers = class_numbers(self.classes or ())

    def of(self, path: bytes) -> int:
        """The label of a picture by its relative path; −1 where its row says −1.

        Raises:
            SourceError: the file has no row for it, or one that is not its alone, or no such class.
        """
        name = self._row_of(path)
        if name is None:
            raise SourceError(f"no row in {os.path.basename(self.path)}")
        if self._pictures[name] > 1:
            raise SourceError(f"{self._pictures[name]} pictures share the row {printable(name)!r}; name them by path")
        label = self._text[name]
        number = self._numbers.get(label)
        if number is not None:
            return number
        if not label:
            raise SourceError(f"its row in {os.path.basename(self.path)} has no label")
        if not _INTEGER.fullmatch(label):
            raise SourceError(f"class {label!r} is not in the list of classes")
        number = int(label)
        if number < -1 or (self.fixed is not None and number >= len(self.fixed)):
            limit = "" if self.fixed is None else f" and below {len(self.fixed)}, the number of classes"
            raise SourceError(f"label {number} is not possible: labels are at least 0{limit}; −1 says there is none")
        return number

    def _row_of(self, path: bytes) -> bytes | None:
        return next(self._rows_of(path), None)

    def _rows_of(self, path: bytes) -> Iterator[bytes]:
        """The rows that name a picture, the nearest first."""
        base = path.rpartition(b"/")[2]
        stem = split_extension(base)[0]
        names = dict.fromkeys((path, path[: len(path) - len(base)] + stem, base, stem))
        for name in names:
            if name in self._text:
                yield name
            if name in self._stripped:
                yield self._stripped[name]

    def unused(self) -> list[tuple[bytes, str]]:
        """Rows that no picture asked for."""
        reason = f"row in {os.path.basename(self.path)} without a picture"
        return [(name, reason) for name in sorted(self._text.keys() - self._pictures.keys())]


def _listed(lines: Sequence[str]) -> str:
    more = f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
    return "".join(f"\n  {line}" for line in lines[:20]) + more


def _rows(path: str) -> list[tuple[int, list[str]]]:
    """Rows that are not blank, with their line numbers."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
            head = f.readline()
            f.seek(0)
            reader = csv.reader(f, delimiter=max(",;\t", key=head.count))
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except OSError as error:
        raise UsageError(f"--labels {path}: {error.strerror}") from error
    except csv.Error as error:
        raise UsageError(f"--labels {path}: {error}") from error
    if not rows:
        raise UsageError(f"--labels {path} has no rows; write a name and a label in each")
    return rows


def _columns(
    header: Sequence[str], names: Sequence[str] = _NAME_HEADERS, label_column: str | None = None
) -> tuple[int, int, bool]:
    """Name column, label column, and whether this row is a header by the words in it."""
    words = [re.sub(r"[\s-]+", "_", cell.strip().lower()) for cell in header]
    name_at = next((words.index(word) for word in names if word in words), None)
    if label_column is not None:
        label_at: int | None = [cell.strip() for cell in header].index(label_column)
    else:
        label_at = next((words.index(word) for word in _LABEL_HEADERS if word in words), None)
    if name_at is None and label_at is None:
        return 0, 1, False
    if name_at is None:
        name_at = 0 if label_at != 0 else 1
    if label_at is None:
        label_at = 1 if name_at != 1 else 0
    return name_at, label_at, True
