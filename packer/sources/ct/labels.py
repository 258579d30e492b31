"""Labels of slices: from a CSV whose rows name a file, a slice, a series or a patient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from packer.errors import SourceError, UsageError
from packer.sample import printable, split_extension
from packer.sources.labels import Labels, class_numbers, read_classes
from packer.strings import Int64s

if TYPE_CHECKING:
    from packer.sources.ct.options import CtOptions
    from packer.sources.ct.table import Table

#: Columns that name what `--key` says, in lower case, words joined by '_'.
_HEADERS = {
    "path": ("path", "filepath", "file_path", "file", "filename", "file_name", "image_path", "image"),
    "stem": ("stem", "name", "id", "image_id", "image", "filename", "file_name", "file", "case"),
    "sop_uid": ("sop_uid", "sopinstanceuid", "sop_instance_uid", "sop", "image_id", "image", "id"),
    "series_uid": ("series_uid", "seriesinstanceuid", "series_instance_uid", "seriesuid", "series", "id"),
    "patient": ("patient", "patientid", "patient_id", "subject", "subject_id", "case", "id"),
}


class SliceLabels:
    """The label of each slice; without `--labels`, none."""

    def __init__(
        self, labels: Labels | None, classes: tuple[str, ...] | None, texts: list[bytes], of: list[int]
    ) -> None:
        self._labels, self._texts, self._of = labels, texts, of
        self._numbers: dict[int, int] = {}
        self.given = labels is not None
        self.classes = labels.classes if labels is not None else classes

    @staticmethod
    def read(options: CtOptions, table: Table) -> SliceLabels:
        """Read the file that `--labels` names, and find the row of each slice.

        Raises:
            UsageError: it cannot be read, or contradicts itself.
        """
        fixed = read_classes(options.classes) if options.classes else None
        if options.labels is None:
            return SliceLabels._of_folders(table, fixed)
        labels = Labels.read(options.labels, fixed, names=_HEADERS[options.label_key], label_column=options.label_col)
        texts, of = _texts(options.label_key, table)
        labels.match(texts)
        return SliceLabels(labels, fixed, texts, of)

    @staticmethod
    def _of_folders(table: Table, fixed: tuple[str, ...] | None) -> SliceLabels:
        """Labels by the folders that are classes, where the layout has them."""
        labels = SliceLabels(None, fixed, [], table.file.tolist())
        if table.labels:
            labels.given = True
            labels.classes = fixed or tuple(sorted(set(table.labels.values())))
            numbers = class_numbers(labels.classes)
            if unknown := sorted(set(table.labels.values()) - numbers.keys()):
                raise UsageError(f"--classes lacks the folder(s) {', '.join(map(printable, unknown[:5]))}")
            labels._numbers = {file: numbers[name] for file, name in table.labels.items()}
        return labels

    def of(self, member: int, problem: Callable[[int, str], None]) -> int | None:
        """The label of a slice, −1 for none; None (and a problem) where the file of labels should say and does not."""
        if self._labels is None:
            return self._numbers.get(self._of[member], -1) if self._numbers else -1
        try:
            return self._labels.of(self._texts[self._of[member]])
        except SourceError as error:
            problem(member, str(error))
            return None

    def of_all(self, members: Int64s, problem: Callable[[int, str], None]) -> int | None:
        """The one label that all slices of a volume share."""
        found = {self.of(member, problem) for member in members.tolist()}
        if len(found) > 1 and None not in found:
            problem(int(members[0]), "the slices of this volume have different labels; use --key series_uid or patient")
            return None
        return None if None in found else found.pop()

    def unused(self) -> list[tuple[bytes, str]]:
        """Rows that no slice asked for."""
        return [] if self._labels is None else self._labels.unused()


def _texts(key: str, table: Table) -> tuple[list[bytes], list[int]]:
    """What rows are looked up by, each once, and for every slice which of them is its own."""
    if key in ("path", "stem"):
        texts = table.paths if key == "path" else [_stem(path) for path in table.paths]
        return texts, table.file.tolist()
    numbers = {"sop_uid": table.sop, "series_uid": table.series, "patient": table.patient}[key].tolist()
    used = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
    texts = [table.text[number].encode("utf-8", "surrogateescape") for number in used]
    return texts, [used[number] for number in numbers]


def _stem(path: bytes) -> bytes:
    name = path.rpartition(b"/")[2]
    return split_extension(name.removesuffix(b".gz"))[0]
