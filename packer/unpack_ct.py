"""CT series as files that medical tools open: NIfTI, or `.npy` with the geometry beside it.

Slices of a series are put together in ascending position; volumes are written as they are. The original DICOM files
are not in a packed dataset: their headers were dropped on purpose, so they cannot be made again.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packer import npy
from packer.ct_samples import record_of, series_of
from packer.engines import Report, local_engine, no_report
from packer.errors import BadArrayError, MissingExtraError, UsageError
from packer.packed import Packed, PackedSplit
from packer.safe_tree import Place
from packer.sample import is_picture_array, printable
from packer.strings import Int64s

Kind = Literal["nifti", "npy"]

_SAFE = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")
_TOLERANCE = 0.1  # of the median distance: more is no regular grid, which NIfTI alone can tell of


@dataclass(frozen=True)
class UnpackedSeries:
    """What was written.

    Attributes:
        series, files, bytes: how much.
        left_out: (series, reason) of those that could not be written.
    """

    series: int
    files: int
    bytes: int
    left_out: tuple[tuple[str, str], ...]


class Grid(NamedTuple):
    """Where the voxels of a series lie.

    Attributes:
        affine: 4×4; (column, row, slice, 1) to millimetres, LPS: left, posterior and superior are positive.
        regular: whether all slices are equally far apart, within 10 %.
    """

    affine: npt.NDArray[np.float64]
    regular: bool


def unpack_series(
    folder: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    kind: Kind,
    *,
    split: str | None = None,
    workers: int | None = None,
    progress: Report | None = None,
) -> UnpackedSeries:
    """Write every series of a CT dataset: `DST/SPLIT/SERIES.nii.gz`, masks as `SERIES_mask.nii.gz`.

    With kind "npy": `SERIES.npy` (D, H, W), `SERIES_mask.npy`, and `SERIES.json`, which holds the geometry.

    Args:
        folder: a packed CT dataset.
        dst: a folder that is new or empty. It stays so until all is written.
        kind: "nifti" (int16 or float32 HU, RAS affine in mm) or "npy".
        split: only this split.
        workers: processes; None takes one per CPU that may be used.
        progress: called with (files, bytes) done since the last call.

    Raises:
        UsageError: no CT dataset, or no such split.
        MissingExtraError: NIfTI, and nibabel is not installed.
        ShardError: a shard is truncated, or a checksum differs; what was written is removed.
        OutputError: `dst` is not empty, or cannot be written.

    >>> unpack_series("out/", "series/", "nifti").series                     # doctest: +SKIP
    888
    """
    if kind == "nifti":
        _nibabel()
    splits = Packed(folder).only(split)
    tasks: list[_Series] = []
    for name, packed in splits.items():
        if not any(map(is_picture_array, packed.fields)):
            raise UsageError(f"{os.fspath(folder)} holds no CT slices or volumes (its fields: "
                             f"{', '.join(packed.fields)}); leave --as out to restore its files")  # fmt: skip
        tasks += _series(name, packed)
    files = size = done = 0
    left_out = []
    with Place(os.fspath(dst)) as place:
        for name in splits:
            os.makedirs(os.path.join(place.work, name), exist_ok=True)
        work = [(task, kind, place.work) for task in tasks]
        for wrote in local_engine(workers, len(work)).run(_write, work, progress or no_report):
            if wrote.reason:
                left_out.append((wrote.series, wrote.reason))
            else:
                done, files, size = done + 1, files + wrote.files, size + wrote.bytes
        place.finish()
    return UnpackedSeries(done, files, size, tuple(sorted(left_out)))


def grid_of(facts: list[Mapping[str, Any]]) -> Grid:
    """The grid of slices, by the records of each in order.

    Raises:
        BadArrayError: the records do not say where the slices lie.
    """
    first = facts[0]
    try:
        if "affine" in first and first["affine"] is not None:
            positions = np.array(first.get("positions") or [], np.float64)
            return Grid(np.array(first["affine"], np.float64).reshape(4, 4), _regular(positions))
        corners = np.array([one["ipp"] for one in facts], np.float64).reshape(len(facts), 3)
        across, down = np.array(first["iop"], np.float64).reshape(2, 3)
        rows_mm, columns_mm = (float(value) for value in first["spacing_mm"])
        if len(facts) > 1:
            step = (corners[-1] - corners[0]) / (len(facts) - 1)
        else:
            step = np.cross(across, down) * float(first.get("thickness_mm") or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise BadArrayError(f"its record does not say where its slices lie ({error!r})") from error
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1], affine[:3, 2] = across * columns_mm, down * rows_mm, step
    affine[:3, 3] = corners[0]
    return Grid(affine, _regular((corners - corners[0]) @ np.cross(across, down)))


def _regular(positions: npt.NDArray[np.float64]) -> bool:
    steps = np.diff(positions)
    return not len(steps) or bool(np.all(np.abs(steps - np.median(steps)) <= _TOLERANCE * abs(np.median(steps))))


# ---------------------------------------------------------------- one series


@dataclass(frozen=True, eq=False)
class _Series:
    """The samples of one series, in order of position."""

    name: str
    split: str
    packed: PackedSplit
    samples: Int64s


class _Wrote(NamedTuple):
    series: str
    files: int = 0
    bytes: int = 0
    reason: str = ""


def _series(split: str, packed: PackedSplit) -> Iterator[_Series]:
    """Series by the samples' keys: slices `{series}_{index}`, volumes `{series}`."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for number in range(len(packed)):
        key = packed.key(number)
        groups.setdefault(series_of(key, packed.fields), []).append((key, number))
    for name, members in sorted(groups.items()):
        ordered = sorted(members, key=lambda member: (len(member[0]), member[0]))
        yield _Series(name, split, packed, np.array([number for _, number in ordered], np.int64))


def _write(task: tuple[_Series, Kind, str], report: Report) -> _Wrote:
    series, kind, root = task
    try:
        if not _SAFE.fullmatch(series.name):
            raise BadArrayError("its key is no plain name")
        arrays, facts = _read(series)
        grid = grid_of(facts)
        if kind == "nifti" and not grid.regular:
            raise BadArrayError("its slices are not equally far apart, which NIfTI cannot tell; --as npy can")
    except BadArrayError as error:
        return _Wrote(printable(series.name), reason=str(error))
    finally:
        series.packed.close()
    path = os.path.join(root, series.split, series.name)
    written = [_write_array(path + ("" if name is None else f"_{name}"), array, grid, kind)
               for name, array in arrays.items()]  # fmt: skip
    if kind == "npy":
        written.append(_write_facts(path, grid, facts))
    size = sum(map(os.path.getsize, written))
    report(len(written), size)
    return _Wrote(series.name, len(written), size)


def _read(series: _Series) -> tuple[dict[str | None, npt.NDArray[Any]], list[Mapping[str, Any]]]:
    """(D, H, W) HU under None, and masks by name; and the records."""
    packed, samples = series.packed, series.samples.tolist()
    picture = next(field for field in packed.fields if is_picture_array(field))
    fields: dict[str | None, str] = {None: picture}
    for field in packed.fields:
        if npy.is_array_field(field) and field != picture:
            fields[field.split(".")[0]] = field
    arrays: dict[str | None, npt.NDArray[Any]] = {}
    for name, field in fields.items():
        read = [packed.read(number, field, check=True) for number in samples]
        if name is not None and None in read:
            continue  # a mask of some slices only
        parts = [npy.decode(data or b"") for data in read]
        if len({part.shape for part in parts}) > 1:
            raise BadArrayError(f"its slices differ in size: {sorted({part.shape for part in parts})}")
        arrays[name] = parts[0] if len(parts) == 1 and parts[0].ndim == 3 else np.stack(parts)
    if arrays[None].ndim != 3:
        raise BadArrayError(f"arrays of shape {arrays[None].shape[1:]} are no slices")
    return arrays, [record_of(packed, number) for number in samples]


def _write_array(path: str, array: npt.NDArray[Any], grid: Grid, kind: Kind) -> str:
    if kind == "npy":
        path += ".npy"
        with open(path, "xb") as file:
            file.write(npy.encode(array))
        return path
    nibabel = _nibabel()
    path += ".nii.gz"
    ras = np.diag([-1.0, -1.0, 1.0, 1.0]) @ grid.affine
    image = nibabel.Nifti1Image(array.transpose(2, 1, 0), ras)
    image.header.set_xyzt_units("mm")
    image.set_qform(ras, code="scanner")
    image.set_sform(ras, code="scanner")
    nibabel.save(image, path)
    return path


def _write_facts(path: str, grid: Grid, facts: list[Mapping[str, Any]]) -> str:
    shared = {name: value for name, value in facts[0].items() if all(one.get(name) == value for one in facts)}
    each = sorted({name for one in facts for name in one if name not in shared})
    said = {
        "affine": grid.affine.tolist(),
        "axes": "(column, row, slice, 1) to mm, LPS; the array is (slice, row, column)",
        "equally_spaced": grid.regular,
        **{name: value for name, value in shared.items() if name != "affine"},
        "slices": {name: [one.get(name) for one in facts] for name in each},
    }
    with open(path + ".json", "x", encoding="utf-8") as file:
        json.dump(said, file, indent=1)
    return path + ".json"


def _nibabel() -> Any:
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        raise MissingExtraError("nibabel", "nifti", "writing NIfTI files") from error
