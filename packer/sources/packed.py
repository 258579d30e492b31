"""A packed dataset as a source: converting, resharding, merging and withdrawing are one verb."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from crc32c import crc32c

from packer.errors import ShardError, SourceError
from packer.index import Names, Rows
from packer.packed import Packed, PackedSplit
from packer.sample import key_fault, printable
from packer.sources.base import Scan, ScanProgress
from packer.strings import Int64s, Strings, equal_strings

_PLACE = np.dtype([("dataset", "<i4"), ("split", "<i4"), ("shard", "<i4"), ("crc32c", "<u4"), ("offset", "<i8")])
_UNPACK = struct.Struct("<iiiIq").unpack


@dataclass(frozen=True)
class PackedSource:
    """One or several packed datasets, read as one source; payloads are copied byte for byte.

    Args:
        folders: packed datasets. Keys must differ; class lists are joined by name where packing
            made the labels, and must be equal otherwise.
        titles: what to call them, where they only stand for something else.

    >>> PackedSource(("part-a/", "part-b/")).scan()                          # doctest: +SKIP
    """

    folders: tuple[str, ...]
    titles: tuple[str, ...] = ()

    def describe(self) -> str:
        """The folders."""
        return ", ".join(self.titles or self.folders)

    def reader(self) -> PackedReader:
        """A reader of the datasets' shards."""
        return PackedReader(self.folders)

    def scan(self, progress: ScanProgress | None = None) -> Scan:
        """All samples, dataset after dataset, in the datasets' order.

        Raises:
            ManifestError: a folder is no packed dataset.
            SourceError: there is no sample, two samples have the same key, a key would do harm as a
                member's name, or class lists cannot be joined.
        """
        datasets = [Packed(folder) for folder in self.folders]
        if not any(len(packed) for dataset in datasets for packed in dataset.values()):
            raise SourceError(f"{' and '.join(self.folders)} hold no sample: nothing to pack")
        made_cls = all("cls" not in d.manifest.fields or _made(d) for d in datasets) and any(map(_labelled, datasets))
        if not made_cls:
            _refuse_losing_labels(datasets, self.titles or self.folders)
        classes, renumber = _join_classes(datasets, self.folders, made_cls=made_cls)
        names = sorted(
            {name for d in datasets for name in d.manifest.fields if not (made_cls and name == "cls")},
            key=lambda name: (name != "jpg", name),
        )
        splits = list(dict.fromkeys(name for d in datasets for name in d if len(d[name])))
        parts: list[Scan] = []
        for number, dataset in enumerate(datasets):
            for position, (split, packed) in enumerate(dataset.items()):
                if not len(packed):
                    continue
                packed.check_sidecars()  # what is copied now, nothing checks later
                _refuse_bad_keys(packed)
                part = _scan_split(packed, names, number, position)
                label = part.label if renumber[number] is None else _renumber(part.label, renumber[number])
                parts.append(replace(part, split=np.full(len(part), splits.index(split), np.int16), label=label))
                if progress is not None:
                    progress(sum(len(p.paths) for p in parts))
        scan = _concatenate(parts, tuple(names), tuple(splits), classes, made_cls, len(self.folders))
        if len(self.folders) > 1:
            _refuse_equal_keys(scan.keys)
        return scan


def _refuse_losing_labels(datasets: Sequence[Packed], titles: Sequence[str]) -> None:
    """Where labels are files, those that only an index knows would become nothing."""
    for dataset, title in zip(datasets, titles, strict=False):
        if "cls" not in dataset.manifest.fields and _labelled(dataset):
            raise SourceError(
                f"{title} has labels, but no field 'cls', and others have label files of their own: pack it by itself "
                "first, which makes the field, and merge the result"
            )


def _labelled(dataset: Packed) -> bool:
    """Whether any sample has a label: as a field, or (in shards of others) known to the index alone."""
    return "cls" in dataset.manifest.fields or any(bool((s.rows["label"] >= 0).any()) for s in dataset.values())


def _made(dataset: Packed) -> bool:
    """Whether packing made the labels (they have no original file)."""
    at = dataset.manifest.fields.index("cls")
    known = [[len(column.blob) > 0 for column in split.names.paths] for split in dataset.values() if len(split)]
    return all(any(columns) and not columns[at] for columns in known)


def _join_classes(
    datasets: Sequence[Packed], folders: Sequence[str], *, made_cls: bool
) -> tuple[tuple[str, ...] | None, list[Int64s | None]]:
    lists = [d.manifest.classes for d in datasets]
    if all(one == lists[0] for one in lists):
        return lists[0], [None] * len(lists)
    if not made_cls or any(one is None for one in lists):
        raise SourceError(
            f"{' and '.join(folders)} have different class lists, and their labels are files of their "
            "own that cannot be renumbered: pack from the original folders with --classes FILE"
        )
    joined = tuple(sorted({name for one in lists for name in one or ()}))
    return joined, [np.array([joined.index(name) for name in one or ()], np.int64) for one in lists]


def _renumber(label: Int64s, numbers: Int64s | None) -> Int64s:
    return label if numbers is None else np.where(label >= 0, numbers[np.maximum(label, 0)], label)


def _scan_split(packed: PackedSplit, fields: Sequence[str], dataset: int, split: int) -> Scan:
    rows, stored = packed.rows, packed.names
    columns = [(number, name) for number, name in enumerate(fields) if name in packed.fields]
    # One entry per present field, sorted by sample and then by place in the shard, so that members keep their order.
    pieces = [_field_entries(rows, stored, packed.fields, name, number, dataset, split) for number, name in columns]
    sample, offset, size, field, place = (
        np.concatenate(column) for column in zip(*[p[:5] for p in pieces], strict=True)
    )
    paths = Strings.concatenate([p[5] for p in pieces])
    order = np.lexsort((offset, sample))
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.bincount(sample, minlength=len(rows)), out=first[1:])
    locators = Strings(memoryview(place[order].tobytes()), np.arange(len(order) + 1, dtype=np.int64) * _PLACE.itemsize)
    return Scan(
        fields=tuple(fields),
        paths=paths.take(order),
        sizes=size[order],
        field=field[order].astype(np.int16),
        first=first,
        keys=stored.keys,
        label=np.array(rows["label"]),
        split=np.zeros(len(rows), np.int16),
        splits=(packed.split.name,),
        classes=None,
        made_cls=False,
        layout="packed",
        rule="",
        locators=locators,
        **_series_columns(packed),
    )


def _series_columns(packed: PackedSplit) -> dict[str, Any]:
    """Of CT data: which samples belong together, in which order, and whose they are; {} for all other data."""
    rows = packed.rows
    if not {"series", "slice"} <= set(rows.dtype.names or ()):
        return {}
    unit = rows["series"].astype(np.int64)
    _, heads, member = np.unique(unit, return_index=True, return_inverse=True)
    patients = Strings.of([_patient(packed, head) for head in heads.tolist()])
    return {"unit": unit, "number": rows["slice"].astype(np.int64), "group": patients.take(member.ravel())}


def _patient(packed: PackedSplit, sample: int) -> bytes:
    """The hash of a sample's patient, b"" where it is not known."""
    if "json" not in packed.fields or packed.rows["json:length"][sample] < 0:
        return b""
    row = packed.rows[sample]
    data = bytearray(int(row["json:length"]))
    packed.read_into(int(row["shard"]), int(row["json:offset"]), memoryview(data))
    try:
        value = json.loads(data)
    except ValueError:
        return b""
    patient = value.get("patient") if isinstance(value, dict) else None
    return patient.encode("utf-8", "surrogateescape") if isinstance(patient, str) else b""


def _field_entries(
    rows: Rows, names: Names, stored: Sequence[str], name: str, number: int, dataset: int, split: int
) -> tuple[Int64s, Int64s, Int64s, Int64s, Rows, Strings]:
    present = np.flatnonzero(rows[f"{name}:length"] >= 0)
    place = np.zeros(len(present), _PLACE)
    place["dataset"], place["split"], place["shard"] = dataset, split, rows["shard"][present]
    place["offset"], place["crc32c"] = rows[f"{name}:offset"][present], rows[f"{name}:crc32c"][present]
    paths = names.paths[list(stored).index(name)].take(present)
    return (
        present,
        place["offset"],
        rows[f"{name}:length"][present],
        np.full(len(present), number, np.int64),
        place,
        paths,
    )


def _concatenate(
    parts: Sequence[Scan],
    fields: tuple[str, ...],
    splits: tuple[str, ...],
    classes: tuple[str, ...] | None,
    made_cls: bool,
    count: int,
) -> Scan:
    first = [np.zeros(1, np.int64)]
    for part in parts:
        first.append(part.first[1:] + first[-1][-1])
    together: dict[str, Any] = {}
    if any(part.unit is not None for part in parts):
        together = {
            "unit": np.concatenate(_distinct_units(parts)),
            "number": np.concatenate([np.zeros(len(p), np.int64) if p.number is None else p.number for p in parts]),
            "group": Strings.concatenate([p.keys if p.group is None else p.group for p in parts]),
        }
    return Scan(
        fields=fields,
        paths=Strings.concatenate([p.paths for p in parts]),
        sizes=np.concatenate([p.sizes for p in parts]),
        field=np.concatenate([p.field for p in parts]),
        first=np.concatenate(first),
        keys=Strings.concatenate([p.keys for p in parts]),
        label=np.concatenate([p.label for p in parts]),
        split=np.concatenate([p.split for p in parts]),
        splits=splits,
        classes=classes,
        made_cls=made_cls,
        layout="packed",
        rule="the source has a dataset.json" if count == 1 else f"each of the {count} sources has a dataset.json",
        locators=Strings.concatenate([p.locators for p in parts if p.locators is not None]),
        **together,
    )


def _distinct_units(parts: Sequence[Scan]) -> list[Int64s]:
    """Numbers of units, no two datasets sharing one; a sample without is one of its own."""
    units, free = [], 0
    for part in parts:
        numbers = np.arange(len(part)) if part.unit is None else np.unique(part.unit, return_inverse=True)[1].ravel()
        units.append(numbers + free)
        free += int(numbers.max()) + 1 if len(numbers) else 0
    return units


def _refuse_bad_keys(packed: PackedSplit) -> None:
    """A key becomes the name of a member again: it must be safe, and its sample's own in the split."""
    path, advice = os.path.join(packed.folder, packed.split.names_file), f"run: packer verify {packed.folder}"
    keys = packed.names.keys
    for key in keys:
        if fault := key_fault(key):
            raise SourceError(f"{path}: the key {printable(key)!r} cannot be packed: {fault}; {advice}")
    if equal := equal_strings(keys):
        raise SourceError(f"{path}: the key {printable(equal[0])!r} stands for more than one sample; {advice}")


def _refuse_equal_keys(keys: Strings) -> None:
    if equal := equal_strings(keys):
        raise SourceError(
            f"{len(equal)} key(s) are in more than one of the datasets, for example "
            f"{', '.join(printable(key) for key in equal[:5])}: leave them out of one with --drop-keys first"
        )


class PackedReader:
    """Reads fields of packed datasets by place, each against its stored checksum."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._splits = [list(Packed(folder).values()) for folder in folders]
        self._so_far = 0

    def read(self, places: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Read fields; see `packer.sources.base.Reader`. Raises ShardError for a damaged shard."""
        for place, view in zip(places, views, strict=True):
            dataset, split, shard, checksum, offset = _UNPACK(place)
            packed = self._splits[dataset][split]
            packed.read_into(shard, offset, view)
            if crc32c(view) != checksum:
                raise _damaged(packed, shard, offset)

    def read_piece(self, place: bytes, size: int, offset: int, view: memoryview) -> None:
        """Read a part of a field; see `packer.sources.base.Reader`. The last part ends the comparison."""
        dataset, split, shard, checksum, begin = _UNPACK(place)
        packed = self._splits[dataset][split]
        packed.read_into(shard, begin + offset, view)
        self._so_far = crc32c(view, self._so_far if offset else 0)
        if offset + len(view) == size and self._so_far != checksum:
            raise _damaged(packed, shard, begin)

    def close(self) -> None:
        """Close the shards."""
        for splits in self._splits:
            for split in splits:
                split.close()


def _damaged(packed: PackedSplit, shard: int, offset: int) -> ShardError:
    return ShardError(
        f"{packed.shard_path(shard)} is damaged: crc32c mismatch at offset {offset}; run: packer verify {packed.folder}"
    )
