"""What a source is: it scans cheaply, reads on demand, and is picklable and deterministic."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from packer.strings import Int64s, Strings

Number = TypeVar("Number", bound=np.generic)

#: Called with the number of files found so far.
ScanProgress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Scan:
    """All samples of a source by name and size, in columns; some 150 bytes a sample.

    Files lie in sample order: those of sample i are `first[i]:first[i + 1]`.

    Attributes:
        fields: names of the fields that files become.
        paths: per file, where the source finds it (relative, raw bytes).
        sizes: int64 per file, bytes.
        field: int16 per file, position in `fields`.
        first: int64 (samples + 1,), see above.
        keys: per sample, unique.
        label: int64 per sample, −1 without a label.
        split: int16 per sample, position in `splits`.
        splits: names, in order.
        classes: class names by label, or None.
        made_cls: the label becomes a field `cls` of its own (the source has no label files).
        layout, rule: what was recognised, and why, for the reader.
        skipped: `(path, reason)` of what is no sample by rule.
        problems: `(path, reason)` of what should be a sample and cannot.
        locators: per file, what the reader is given in place of the path, where that is not the place.
        unit: int64 per sample: equal numbers stay in one shard, in this order; None where each sample is free.
        number: int64 per sample: its number in its unit, from 0; None where each sample is free.
        group: per sample, what `--split` goes by in place of the key (a patient; b"" where unknown); all samples of a
            group are on one side. None where there are no groups.
        made: None where payloads are the files' own bytes. Else the reader is a `Maker`: sizes are reckoned, paths
            are for messages and never stored, and this says how payloads are made (JSON values, for the manifest
            and the fingerprint).
        warnings: what the user should know before packing.
    """

    fields: tuple[str, ...]
    paths: Strings
    sizes: Int64s
    field: npt.NDArray[np.int16]
    first: Int64s
    keys: Strings
    label: Int64s
    split: npt.NDArray[np.int16]
    splits: tuple[str, ...]
    classes: tuple[str, ...] | None
    made_cls: bool
    layout: str
    rule: str
    skipped: Sequence[tuple[bytes, str]] = ()
    problems: Sequence[tuple[bytes, str]] = ()
    locators: Strings | None = None
    unit: Int64s | None = None
    number: Int64s | None = None
    group: Strings | None = None
    made: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def skipped_by_reason(self) -> Counter[str]:
        """How many files were skipped for each reason."""
        return Counter(reason for _, reason in self.skipped)

    def take(self, order: Int64s) -> Scan:
        """The scan of these samples only, in this order."""
        order = np.asarray(order, np.int64)
        counts = self.first[order + 1] - self.first[order]
        first = np.zeros(len(order) + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        files = np.repeat(self.first[order] - first[:-1], counts) + np.arange(first[-1])
        return replace(
            self,
            paths=self.paths.take(files),
            sizes=self.sizes[files],
            field=self.field[files],
            first=first,
            keys=self.keys.take(order),
            label=self.label[order],
            split=self.split[order],
            locators=None if self.locators is None else self.locators.take(files),
            unit=None if self.unit is None else self.unit[order],
            number=None if self.number is None else self.number[order],
            group=None if self.group is None else self.group.take(order),
        )

    @property
    def places(self) -> Strings:
        """Per file, what to give to the source's reader."""
        return self.paths if self.locators is None else self.locators


class Reader(Protocol):
    """Reads the files of one source. One per worker, whose threads may call `read` at the same time.

    The other methods are called by one thread, and so is all of a `Maker`.
    """

    def read(self, places: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Fill each view with the file at its place (`Scan.places`).

        Raises:
            SourceChangedError: a file is gone, or not exactly as long as its view.
        """
        ...

    def read_piece(self, place: bytes, size: int, offset: int, view: memoryview) -> None:
        """Fill the view with a part of a file of `size` bytes; parts are asked for in order, each once.

        Raises:
            SourceChangedError: as `read`.
        """
        ...

    def close(self) -> None:
        """Let go of descriptors."""
        ...


@runtime_checkable
class Maker(Reader, Protocol):
    """A reader whose payloads are made from files (decoded, written anew), so that only making one tells its size."""

    def make(self, place: bytes) -> bytes:
        """The payload of one place (`Scan.places`). Those of one sample are asked for one after the other.

        Raises:
            BadImageError: the files cannot become a sample.
            SourceChangedError: a file is gone, or is not what the scan saw.
        """
        ...


class Source(Protocol):
    """Where samples come from. Picklable: workers get a copy."""

    def scan(self, progress: ScanProgress | None = None) -> Scan:
        """List all samples, in an order that depends on names alone."""
        ...

    def reader(self) -> Reader:
        """A reader of this source's files."""
        ...

    def describe(self) -> str:
        """The source in a few words, for messages (a path)."""
        ...


class StringsBuilder:
    """Grows a `Strings` column without keeping one object per string."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._lengths = array("q")

    def extend(self, items: list[bytes]) -> None:
        """Append many strings."""
        self._blob += b"".join(items)
        self._lengths.extend(map(len, items))

    def build(self) -> Strings:
        """The finished column."""
        ends = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(np.frombuffer(self._lengths, np.int64) if self._lengths else [], out=ends[1:])
        return Strings(memoryview(self._blob).toreadonly(), ends)


@dataclass
class ScanBuilder:
    """Collects samples into the columns of a `Scan`."""

    fields: dict[str, int] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    _paths: StringsBuilder = field(default_factory=StringsBuilder)
    _keys: StringsBuilder = field(default_factory=StringsBuilder)
    _sizes: array[int] = field(default_factory=lambda: array("q"))
    _field: array[int] = field(default_factory=lambda: array("h"))
    _counts: array[int] = field(default_factory=lambda: array("q"))
    _label: array[int] = field(default_factory=lambda: array("q"))
    _split: array[int] = field(default_factory=lambda: array("h"))

    def field_number(self, name: str) -> int:
        """The position of a field, new if need be."""
        return self.fields.setdefault(name, len(self.fields))

    def add_singles(
        self,
        keys: list[bytes],
        paths: list[bytes],
        sizes: Iterable[int],
        fields: Iterable[int],
        labels: Iterable[int],
        split: str,
    ) -> None:
        """Append samples of one file each, all of one split."""
        number = self.splits.setdefault(split, len(self.splits))
        self._keys.extend(keys)
        self._paths.extend(paths)
        self._sizes.extend(sizes)
        self._field.extend(fields)
        self._label.extend(labels)
        self._counts.extend(array("q", [1]) * len(keys))
        self._split.extend(array("h", [number]) * len(keys))

    def add(self, key: bytes, label: int, split: str, files: Sequence[tuple[bytes, int, str]]) -> None:
        """Append one sample of several files `(path, size, field)`."""
        self._keys.extend([key])
        self._paths.extend([path for path, _, _ in files])
        self._sizes.extend(size for _, size, _ in files)
        self._field.extend(self.field_number(name) for _, _, name in files)
        self._label.append(label)
        self._counts.append(len(files))
        self._split.append(self.splits.setdefault(split, len(self.splits)))

    def build(self, *, classes: tuple[str, ...] | None, made_cls: bool, layout: str, rule: str) -> Scan:
        """The finished scan, fields in alphabetical order (so that file order never shows)."""
        field = _column(self._field, np.int16)
        used = set(np.flatnonzero(np.bincount(field, minlength=len(self.fields))).tolist())
        names = tuple(sorted((n for n, number in self.fields.items() if number in used), key=lambda n: (n != "jpg", n)))
        rank = np.zeros(max(len(self.fields), 1), np.int16)
        for position, name in enumerate(names):
            rank[self.fields[name]] = position
        first = np.zeros(len(self._counts) + 1, np.int64)
        np.cumsum(_column(self._counts, np.int64), out=first[1:])
        return Scan(
            fields=names,
            paths=self._paths.build(),
            sizes=_column(self._sizes, np.int64),
            field=rank[field],
            first=first,
            keys=self._keys.build(),
            label=_column(self._label, np.int64),
            split=_column(self._split, np.int16),
            splits=tuple(self.splits),
            classes=classes,
            made_cls=made_cls,
            layout=layout,
            rule=rule,
            skipped=self.skipped,
            problems=self.problems,
        )


def _column(values: array[int], dtype: type[Number]) -> npt.NDArray[Number]:
    return np.frombuffer(values, dtype) if values else np.zeros(0, dtype)  # an empty buffer is refused
