"""All slices that a scan found, in columns: some 200 bytes each, where an object would take a thousand."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from packer.sources.ct.slices import Header
from packer.sources.ct.volumes import GEOMETRY_COLUMNS, Floats
from packer.sources.layouts import split_of
from packer.strings import Int64s


class Table:
    """Slices by number, in the order in which their files were added.

    Args:
        patient_regex: what in a path names the patient, where the file does not.
        splits: the top folders are splits, and no patients.

    Attributes:
        paths, sizes: per file, relative to the root; its bytes.
        file, frame: int64 (n,), where a slice is.
        text: identifiers by number; number 0 is the unknown one.
        masks: of files that have one: path and bytes of their mask.
        splits: of files that have their own split: its name.
        labels: of files whose folder is a class: its name.
    """

    def __init__(self, patient_regex: str | None, *, splits: bool = False) -> None:
        self.paths: list[bytes] = []
        self.sizes = array("q")
        self.text: list[str] = [""]
        self.masks: dict[int, tuple[bytes, int]] = {}
        self.splits: dict[int, str] = {}
        self.labels: dict[int, str] = {}
        self._number = {"": 0}
        self._pattern = re.compile(patient_regex.encode("utf-8", "surrogateescape")) if patient_regex else None
        self._in_splits = splits
        self._file, self._frame = array("q"), array("q")
        self._geometry = array("d")
        self._whole = array("b")
        self._patient, self._study, self._series, self._sop = array("q"), array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._file)

    def add(self, path: bytes, size: int, headers: Iterable[Header], *, patient: str | None = None) -> None:
        """Add the slices of one file.

        Args:
            path: relative.
            size: its bytes.
            headers: of its frames, in order.
            patient: who is meant where the file does not say, None to go by the path.
        """
        number = len(self.paths)
        self.paths.append(path)
        self.sizes.append(size)
        for frame, header in enumerate(headers):
            self._file.append(number)
            self._frame.append(frame)
            self._geometry.extend((*header.ipp, *header.iop, *header.spacing_mm, header.rows, header.cols))
            self._whole.append(header.whole)
            known = header.patient or self._patient_of(path, patient)
            self._patient.append(self._intern(known))
            self._study.append(self._intern(header.study))
            # UIDs may be empty: slices of one folder then belong together.
            folder = path.rpartition(b"/")[0].decode("utf-8", "surrogateescape")
            self._series.append(self._intern(header.series or f"folder {folder}"))
            self._sop.append(self._intern(header.sop) if header.sop else 0)

    def _intern(self, text: str) -> int:
        number = self._number.setdefault(text, len(self.text))
        if number == len(self.text):
            self.text.append(text)
        return number

    def _patient_of(self, path: bytes, known: str | None) -> str:
        if self._pattern is None and known is not None:
            return known
        if self._pattern is not None:
            match = self._pattern.search(path)
            if match is None:
                return ""
            found = b"/".join(match.groups(b"")) if match.groups() else match[0]
            return found.decode("utf-8", "surrogateescape")
        folders = path.split(b"/")[:-1]
        if self._in_splits and folders and split_of(folders[0]):
            folders = folders[1:]
        return folders[0].decode("utf-8", "surrogateescape") if folders else ""

    @property
    def file(self) -> Int64s:
        """int64 (n,): number of each slice's file."""
        return _column(self._file)

    @property
    def frame(self) -> Int64s:
        """int64 (n,): which slice of its file."""
        return _column(self._frame)

    @property
    def geometry(self) -> Floats:
        """float64 (n, 13): see `volumes.split_by_geometry`."""
        values = np.frombuffer(self._geometry, np.float64) if self._geometry else np.zeros(0)
        return values.reshape(-1, GEOMETRY_COLUMNS)

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Bool (n,): values are int16."""
        return (np.frombuffer(self._whole, np.int8) if self._whole else np.zeros(0, np.int8)).astype(bool)

    @property
    def patient(self) -> Int64s:
        """int64 (n,): number of each slice's patient in `text`."""
        return _column(self._patient)

    @property
    def study(self) -> Int64s:
        """int64 (n,): of its study."""
        return _column(self._study)

    @property
    def series(self) -> Int64s:
        """int64 (n,): of its series."""
        return _column(self._series)

    @property
    def sop(self) -> Int64s:
        """int64 (n,): of its own identifier."""
        return _column(self._sop)


def _column(values: array[int]) -> Int64s:
    return np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64)
