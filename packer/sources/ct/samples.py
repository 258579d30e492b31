"""From the table of slices to a scan: series grouped, stacked, keyed and labelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packer.sample import printable
from packer.sources.base import Scan, ScanBuilder, StringsBuilder
from packer.sources.ct.errors import CtError
from packer.sources.ct.labels import SliceLabels
from packer.sources.ct.place import Place
from packer.sources.ct.record import RECORD_BYTES, slice_key
from packer.sources.ct.volumes import (
    FEWEST_SLICES,
    Stack,
    affine_lps,
    mixed_geometry,
    split_by_geometry,
    stack,
    without_duplicates,
)
from packer.sources.layouts import DEFAULT_SPLIT, split_of
from packer.strings import Int64s

if TYPE_CHECKING:
    from packer.sources.ct.options import CtOptions
    from packer.sources.ct.table import Table

_NPY_HEADER_BYTES = 128
_FEW = f"fewer than {FEWEST_SLICES} slices are no volume"
_REPEATED = "repeats the slice at its position, pixel for pixel"

#: Whether two slices of the table have equal pixels.
SamePixels = Callable[[int, int], bool]


@dataclass(frozen=True)
class _Series:
    """Slices of one patient, study and series, of one geometry; `name` is hashed for its key."""

    name: str
    members: Int64s


@dataclass
class SampleBuilder:
    """Builds the scan of one table.

    Args:
        options: see `CtOptions`.
        table: the slices; those of one file follow each other.
        same_pixels: compares two slices.
        skipped, problems: what was put aside so far.
        splits: top folders are splits.
    """

    options: CtOptions
    table: Table
    same_pixels: SamePixels
    skipped: list[tuple[bytes, str]]
    problems: list[tuple[bytes, str]]
    splits: bool = False
    _warnings: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._out = ScanBuilder(skipped=self.skipped, problems=self.problems)
        self._locators, self._groups = StringsBuilder(), StringsBuilder()
        self._units: list[int] = []
        self._numbers: list[int] = []
        self._file, self._frame = self.table.file, self.table.frame
        self._geometry = self.table.geometry

    def build(self, *, layout: str, rule: str) -> Scan:
        """The scan; problems and skips sorted by path."""
        labels = SliceLabels.read(self.options, self.table)
        for unit, series in enumerate(self._series()):
            try:
                found = self._stack(series)
                if found is not None:
                    self._add(unit, series, found, labels)
            except CtError as error:
                count = len(series.members)
                self._problem(series.members[0], f"{error} ({count} slice{'s' if count > 1 else ''} of this series)")
        self.skipped += labels.unused()
        self.skipped.sort()
        self.problems.sort()
        scan = self._out.build(classes=labels.classes, made_cls=labels.given, layout=layout, rule=rule)
        return replace(
            scan,
            locators=self._locators.build(),
            unit=np.array(self._units, np.int64),
            number=np.array(self._numbers, np.int64),
            group=self._groups.build(),
            made=self.options.settings(),
            warnings=tuple(self._said()),
        )

    # ------------------------------------------------------------ series

    def _series(self) -> Iterator[_Series]:
        """Series in the order of their first files."""
        table = self.table
        if not len(table):
            return
        ids = np.stack([table.patient, table.study, table.series], axis=1)
        _, first, member, counts = np.unique(ids, axis=0, return_index=True, return_inverse=True, return_counts=True)
        by_series = np.split(np.argsort(member.ravel(), kind="stable"), np.cumsum(counts)[:-1])
        used = Counter(int(table.series[one]) for one in first.tolist())
        for number in np.argsort(first, kind="stable").tolist():
            slices = by_series[number]
            name = table.text[int(table.series[slices[0]])]
            if used[int(table.series[slices[0]])] > 1:  # one UID under several patients or studies
                name += f"\0{table.text[int(table.patient[slices[0]])]}\0{table.text[int(table.study[slices[0]])]}"
            yield from self._split(name, slices)

    def _split(self, name: str, slices: Int64s) -> Iterator[_Series]:
        groups = [slices[group] for group in split_by_geometry(self._geometry[slices])]
        if len(groups) > 1:
            if self.options.strict_series:
                self._problem(slices[0], str(mixed_geometry(groups)))
                return
            self._warn("series with several geometries were taken apart", slices[0])
        for group in groups:
            geometry = ",".join(f"{value:.3f}" for value in self._geometry[group[0], 3:]) if len(groups) > 1 else ""
            yield _Series(f"{name}\0{geometry}" if geometry else name, group)

    def _stack(self, series: _Series) -> Stack | None:
        """The ordered stack, None where it is left out."""
        found = stack(self._geometry, series.members)
        kept, repeats = without_duplicates(found, self.same_pixels)
        if len(repeats):
            self.skipped += [(self._path(one), _REPEATED) for one in repeats.tolist()]
            self._warn("slices repeat another one and are left out", repeats[0], len(repeats))
            found = stack(self._geometry, kept)
        if len(found.members) < FEWEST_SLICES:
            self._warn(f"series have fewer than {FEWEST_SLICES} slices", found.members[0])
            if self.options.sample == "volume":
                self.skipped += [(self._path(one), _FEW) for one in found.members.tolist()]
                return None
        for problem in found.problems:
            if self.options.sample == "volume":
                raise problem
            kind = type(problem).__name__
            self._warn(
                f"series with {kind.removesuffix('Error')}: {_SAID[kind]}", found.members[0], example=str(problem)
            )
        return found

    # ------------------------------------------------------------ samples

    def _add(self, unit: int, series: _Series, found: Stack, labels: SliceLabels) -> None:
        table, hasher = self.table, self.options.hasher
        head = int(found.members[0])
        patient, study = table.text[int(table.patient[head])], table.text[int(table.study[head])]
        facts: dict[str, Any] = {
            "patient": hasher(patient) if patient else None,
            "study": hasher(study) if study else None,
            "series": hasher(series.name),
            "n_slices": len(found.members),
            "slice_spacing_mm": None if found.spacing_mm is None else round(found.spacing_mm, 6),
            "tilt_deg": None if found.tilt_deg is None else round(found.tilt_deg, 4),
        }
        positions = [round(position, 6) for position in found.position_mm.tolist()]
        if self.options.sample == "volume":
            label = labels.of_all(found.members, self._problem)
            facts |= {"positions": positions, "affine": self._affine(found)}
            if label is not None:
                self._append(unit, 0, facts["series"], found.members.tolist(), facts, label)
            return
        for index, (member, position) in enumerate(zip(found.members.tolist(), positions, strict=True)):
            label = labels.of(member, self._problem)
            if label is not None:
                key = slice_key(facts["series"], index)
                one = facts | {"index": index, "position_mm": position, "windows": self.options.windows}
                self._append(unit, index, key, [member], one, label)

    def _append(self, unit: int, number: int, key: str, members: list[int], facts: dict[str, Any], label: int) -> None:
        table, options = self.table, self.options
        head = members[0]
        slices = [(self._path(one), int(self._frame[one]), table.sizes[int(self._file[one])]) for one in members]
        path = slices[0][0]
        rows, cols = self._geometry[head, 11:13].astype(int).tolist()
        pixels = rows * cols * len(members)
        item = max(len(options.windows), 1) if options.windows else 2 if table.whole[members].all() else 4
        files = [
            (path, _NPY_HEADER_BYTES + pixels * item, options.image_field),
            (path, RECORD_BYTES + (24 * len(members) if len(members) > 1 else 0), "json"),
        ]
        places = [Place("image", key, slices), Place("record", key, slices, facts)]
        if (mask := table.masks.get(int(self._file[head]))) is not None:
            files.append((mask[0], _NPY_HEADER_BYTES + pixels, options.mask_field))
            places.append(Place("mask", key, [(mask[0], frame, mask[1]) for _, frame, _ in slices]))
        split = table.splits.get(int(self._file[head])) or self._split_of(path)
        self._out.add(key.encode("ascii"), label, split, files)
        self._locators.extend([place.encode() for place in places])
        self._groups.extend([(facts["patient"] or "").encode("ascii")])
        self._units.append(unit)
        self._numbers.append(number)

    def _affine(self, found: Stack) -> list[list[float]]:
        first, last = self._geometry[found.members[0]], self._geometry[found.members[-1]]
        step = (last[:3] - first[:3]) / (len(found.members) - 1)
        affine = affine_lps(first[:3].tolist(), first[3:9].tolist(), first[9:11].tolist(), step)
        return [[round(value, 9) for value in row] for row in affine.tolist()]

    def _split_of(self, path: bytes) -> str:
        return (split_of(path.split(b"/", 1)[0]) if self.splits else None) or DEFAULT_SPLIT

    # ------------------------------------------------------------ what is said

    def _path(self, member: int) -> bytes:
        return self.table.paths[int(self._file[member])]

    def _problem(self, member: int, reason: str) -> None:
        self.problems.append((self._path(int(member)), reason))

    def _warn(self, what: str, member: int, count: int = 1, *, example: str = "") -> None:
        said = printable(self._path(int(member))) + (f": {example}" if example else "")
        self._warnings.setdefault(what, []).extend([said] * count)

    def _said(self) -> Iterator[str]:
        for what, examples in self._warnings.items():
            yield f"{len(examples):,} {what}, for example {examples[0]}"


_SAID = {
    "MissingSliceError": "slice_spacing_mm is null",
    "SpacingError": "slice_spacing_mm is null",
    "GantryTiltError": "tilt_deg says how much",
}
