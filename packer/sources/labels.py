"""Labels from files: a CSV of (picture, label), and a list of class names."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from packer.errors import SourceError, UsageError
from packer.sample import printable, split_extension

_NAME_HEADERS = frozenset(
    ["path", "file", "filename", "file_name", "filepath", "image", "image_id", "id", "name", "stem", "img"]
)
_LABEL_HEADERS = frozenset(["label", "class", "target", "category", "y", "class_name", "label_name", "class_id"])


def read_classes(path: str) -> tuple[str, ...]:
    """Class names, one a line, in label order. Raises UsageError for a missing file or a repeated name."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as f:
            names = tuple(line for line in (raw.rstrip("\r\n") for raw in f) if line.strip())
    except OSError as error:
        raise UsageError(f"--classes {path}: {error.strerror}") from error
    if repeated := {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else None:
        raise UsageError(f"--classes {path} names a class twice: {', '.join(map(printable, sorted(repeated)[:5]))}")
    return names


def class_numbers(classes: Sequence[str]) -> dict[str, int]:
    """Label of each class name."""
    return {name: number for number, name in enumerate(classes)}


@dataclass
class Labels:
    """The rows of a labels file, looked up by path, path without extension, base name or stem.

    Attributes:
        path: the file, for messages.
        text: label text by name.
        integers: every label is an integer, taken as it is.
    """

    path: str
    text: dict[bytes, str]
    integers: bool
    _seen: set[bytes] = field(default_factory=set)
    _numbers: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def read(path: str) -> Labels:
        """Read a CSV or TSV: a name column and a label column, with or without a header line.

        Raises:
            UsageError: the file is missing, has fewer than two columns, or gives a name two labels.
        """
        try:
            with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
                head = f.readline()
                f.seek(0)
                delimiter = max(",;\t", key=head.count)
                rows = [row for row in csv.reader(f, delimiter=delimiter) if row]
        except (OSError, csv.Error) as error:
            raise UsageError(f"--labels {path}: {error}") from error
        name_at, label_at, start = _columns(rows[0]) if rows else (0, 1, 0)
        text: dict[bytes, str] = {}
        for line, row in enumerate(rows[start:], start + 1):
            if len(row) <= max(name_at, label_at):
                raise UsageError(
                    f"--labels {path}, row {line}: {len(row)} column(s) {row!r}; a name and a label are needed"
                )
            name, label = os.fsencode(row[name_at].strip()), row[label_at].strip()
            if text.setdefault(name, label) != label:
                raise UsageError(
                    f"--labels {path}, row {line}: {printable(name)!r} has two labels, {text[name]!r} and {label!r}"
                )
        integers = bool(text) and all(_is_integer(label) for label in text.values())
        labels = Labels(path, text, integers)
        if not integers:
            labels._numbers = class_numbers(sorted(set(text.values())))
        return labels

    def of(self, path: bytes, fixed: Sequence[str] | None) -> int:
        """The label of a picture by its relative path.

        Raises:
            SourceError: the file has no row for it, or its class is not among `fixed`.
        """
        base = path.rpartition(b"/")[2]
        folder = path[: len(path) - len(base)]
        for name in (path, folder + split_extension(base)[0], base, split_extension(base)[0]):
            if name in self.text:
                self._seen.add(name)
                return self._number(self.text[name], fixed)
        raise SourceError(f"no row in {self.path}")

    def _number(self, label: str, fixed: Sequence[str] | None) -> int:
        if self.integers and (fixed is None or label not in fixed):
            number = int(label)
            if fixed is not None and not 0 <= number < len(fixed):
                raise SourceError(f"label {number} is not among the {len(fixed)} classes")
            return number
        if fixed is None:
            return self._numbers[label]
        if label not in fixed:
            raise SourceError(f"class {label!r} is not in the list of classes")
        return list(fixed).index(label)

    def classes(self, fixed: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Class names by label; None where labels are bare integers."""
        if fixed is not None:
            return fixed
        return None if self.integers else tuple(self._numbers)

    def unused(self) -> list[tuple[bytes, str]]:
        """Rows that no picture asked for."""
        return [
            (name, f"row in {os.path.basename(self.path)} without a picture")
            for name in sorted(self.text.keys() - self._seen)
        ]


def _columns(header: Sequence[str]) -> tuple[int, int, int]:
    """Name column, label column, first data row."""
    lower = [cell.strip().lower() for cell in header]
    name_at = next((i for i, cell in enumerate(lower) if cell in _NAME_HEADERS), None)
    label_at = next((i for i, cell in enumerate(lower) if cell in _LABEL_HEADERS), None)
    if name_at is None and label_at is None:
        return 0, 1, 0
    if name_at is None:
        name_at = 0 if label_at != 0 else 1
    if label_at is None:
        label_at = 1 if name_at != 1 else 0
    return name_at, label_at, 1


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdigit() and text.isascii()
