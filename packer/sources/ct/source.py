"""A folder of CT data as a source: headers read, series grouped and ordered, samples planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.engines import Report, local_engine
from packer.errors import SourceError
from packer.sample import printable
from packer.sources.base import Scan, ScanProgress
from packer.sources.ct.arrays import ArrayFile, Export, PictureFile, find_exports, header_of
from packer.sources.ct.cases import Case, find_cases
from packer.sources.ct.dicom import DicomFile, check_installed, read_headers
from packer.sources.ct.errors import CtError, NotDicomError
from packer.sources.ct.layouts import is_metaimage, is_volume, recognise
from packer.sources.ct.metaimage import read_metaimage
from packer.sources.ct.nifti import read_nifti
from packer.sources.ct.nrrd import read_nrrd
from packer.sources.ct.options import CtOptions
from packer.sources.ct.reader import CtReader, OpenFile
from packer.sources.ct.samples import SampleBuilder
from packer.sources.ct.slices import Header, NotASliceError
from packer.sources.ct.table import Table
from packer.sources.ct.volume_file import Oriented, Stored, VolumeFile, check_length, check_mask, headers_of
from packer.sources.layouts import split_of
from packer.sources.listing import Listing, list_folder

_FILES_AT_ONCE = 256


@dataclass(frozen=True)
class CtSource:
    """A folder of CT slices or volumes, whatever its layout.

    >>> source = CtSource("/data/ct", CtOptions(load_salt("/secret/salt")))   # doctest: +SKIP
    >>> source.scan().rule                                                    # doctest: +SKIP
    'there are files named .dcm, or with the letters DICM at byte 128'
    """

    root: str
    options: CtOptions

    def describe(self) -> str:
        """The folder's path."""
        return self.root

    def reader(self) -> CtReader:
        """A reader that makes the payloads."""
        return CtReader(os.fsencode(self.root), self.options, self._open)

    def _open(self, path: bytes) -> OpenFile:
        if self.options.layout == "png16":
            return PictureFile(path)
        if path.lower().endswith((b".npz", b".npy")):
            return ArrayFile(path)
        if is_volume(path) or is_metaimage(path):
            return VolumeFile(read_stored(path))
        return DicomFile(path, self.options.dicom)

    def scan(self, progress: ScanProgress | None = None) -> Scan:
        """Read all headers, no pixels (but those of slices at one and the same position, to tell repeats).

        Raises:
            SourceError: the folder is missing, fits no layout or several, or holds no slice.
            UsageError: the file of labels cannot be meant.
            MissingExtraError: a package for this layout is not installed.
        """
        options = self.options
        listing = list_folder(self.root, follow_symlinks=options.follow_symlinks, filter=options.filter)
        layout, rule = recognise(listing, self.root, options.layout)
        splits = _are_splits(listing)
        table = Table(options.patient_regex, splits=splits)
        if layout == "dicom":
            self._read_dicom(listing, table, progress)
        elif layout in ("arrays", "png16"):
            self._read_exports(find_exports(layout, _files(listing)), listing, table, progress)
        else:
            self._read_volumes(find_cases(layout, listing, self.root), listing, table, progress)
        same_pixels = _Comparison(os.fsencode(self.root), table, self._open)
        builder = SampleBuilder(options, table, same_pixels, listing.skipped, listing.problems, splits)
        scan = builder.build(layout=layout, rule=rule)
        if len(scan) == 0 and not scan.problems:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in scan.skipped_by_reason.most_common(4))
            raise SourceError(
                f"NoSlices: {printable(self.root)} holds no slice (layout {layout}: {rule})."
                + (f" Left out: {reasons}" if reasons else "")
            )
        return scan

    def _read_volumes(self, cases: list[Case], listing: Listing, table: Table, progress: ScanProgress | None) -> None:
        root = os.fsencode(self.root)
        for number, case in enumerate(cases, 1):
            path = case.image[0]
            try:
                stored = read_stored(os.path.join(root, path))
                oriented = Oriented.of(stored)
                if case.mask is not None:
                    path = case.mask[0]
                    check_mask(oriented, Oriented.of(read_stored(os.path.join(root, path))))
            except CtError as error:
                listing.problems.append((path, str(error)))
                continue
            except OSError as error:
                listing.problems.append((path, f"cannot be read: {error.strerror or type(error).__name__}"))
                continue
            if case.mask is not None:
                table.masks[len(table.paths)] = case.mask
            if case.split is not None:
                table.splits[len(table.paths)] = case.split
            headers = headers_of(stored, oriented, series=case.name)
            table.add(*case.image, headers, patient=case.patient)
            if progress is not None:
                progress(number)

    def _read_exports(
        self, exports: list[Export], listing: Listing, table: Table, progress: ScanProgress | None
    ) -> None:
        used = {export.path for export in exports}
        listing.skipped += [(path, "no exported slice by its name") for path, _ in _files(listing) if path not in used]
        for number, export in enumerate(exports):
            try:
                header, masked = header_of(os.path.join(os.fsencode(self.root), export.path), export, number)
            except CtError as error:
                listing.problems.append((export.path, str(error)))
                continue
            except OSError as error:
                listing.problems.append((export.path, f"cannot be read: {error.strerror or type(error).__name__}"))
                continue
            if masked:
                table.masks[len(table.paths)] = (export.path, export.size)
            if export.label:
                table.labels[len(table.paths)] = export.label
            table.add(export.path, export.size, [header])
            if progress is not None:
                progress(number + 1)

    def _read_dicom(self, listing: Listing, table: Table, progress: ScanProgress | None) -> None:
        check_installed()
        files = list(_files(listing))
        batches = [files[i : i + _FILES_AT_ONCE] for i in range(0, len(files), _FILES_AT_ONCE)]
        tasks = (_HeaderTask(number, self.root, batch, self.options) for number, batch in enumerate(batches))
        done: dict[int, list[list[Header] | str]] = {}
        count = 0
        following = 0
        for number, found in local_engine(self.options.workers, len(batches)).run(_read_batch, tasks, _ignore):
            done[number] = found
            count += len(found)
            if progress is not None:
                progress(count)
            while following in done:  # in the order of names, whichever process was first
                _take(batches[following], done.pop(following), table, listing)
                following += 1


class _Comparison:
    """Whether two slices of the table have equal pixels."""

    def __init__(self, root: bytes, table: Table, open_file: Callable[[bytes], OpenFile]) -> None:
        self._root, self._table, self._open_file = root, table, open_file

    def __call__(self, one: int, other: int) -> bool:
        return bool(np.array_equal(self._values(one), self._values(other)))

    def _values(self, number: int) -> npt.NDArray[Any]:
        path = self._table.paths[int(self._table.file[number])]
        return self._open_file(os.path.join(self._root, path)).plane(int(self._table.frame[number])).values


@dataclass(frozen=True)
class _HeaderTask:
    number: int
    root: str
    files: list[tuple[bytes, int]]
    options: CtOptions


class _Skipped(str):
    """Why a file is no slice by rule."""


class _Problem(str):
    """Why a slice cannot be packed."""


def _read_batch(task: _HeaderTask, report: Report) -> tuple[int, list[list[Header] | str]]:
    root = os.fsencode(task.root)
    found: list[list[Header] | str] = []
    for path, _ in task.files:
        try:
            found.append(read_headers(os.path.join(root, path), task.options.dicom))
        except NotASliceError as error:
            found.append(_Skipped(error))
        except NotDicomError as error:
            # Of a file that is not named like DICOM, the letters inside decide.
            named = path.lower().endswith((b".dcm", b".dicom", b".ima"))
            found.append(_Problem(error) if named else _Skipped("not DICOM: no letters DICM at byte 128"))
        except CtError as error:
            found.append(_Problem(error))
        except OSError as error:
            found.append(_Problem(f"cannot be read: {error.strerror or type(error).__name__}"))
    report(len(found), 0)
    return task.number, found


def read_stored(path: bytes) -> Stored:
    """How a volume is stored, by the kind of its file; see `packer.sources.ct.volume_file`."""
    if is_metaimage(path):
        stored = read_metaimage(path)
    elif path.lower().endswith((b".nrrd", b".nhdr")):
        stored = read_nrrd(path)
    else:
        stored = read_nifti(path)
    check_length(stored)
    return stored


def _ignore(samples: int, size: int) -> None:
    """Headers are counted as they arrive."""


def _take(files: list[tuple[bytes, int]], found: list[list[Header] | str], table: Table, listing: Listing) -> None:
    for (path, size), one in zip(files, found, strict=True):
        if isinstance(one, _Problem):
            listing.problems.append((path, str(one)))
        elif isinstance(one, str):
            listing.skipped.append((path, str(one)))
        else:
            table.add(path, size, one)


def _are_splits(listing: Listing) -> bool:
    """Whether all files lie in two or more folders that are named like splits."""
    tops = {folder.path.split(b"/", 1)[0] for folder in listing.folders if folder.sizes}
    names = {split_of(top) for top in tops}
    return len(names) > 1 and None not in names


def _files(listing: Listing) -> Iterator[tuple[bytes, int]]:
    """Every file with its size, in order."""
    for folder in listing.folders:
        for name, size in zip(folder.names, folder.sizes, strict=True):
            yield folder.prefix + name, size
