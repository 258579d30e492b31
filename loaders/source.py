"""Where a loader's bytes come from: the samples of one split, by number."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loaders.order import Numbers
from packer.errors import UsageError
from packer.packed import Packed

#: Gives the bytes of the j-th of some samples, or None where it lacks the field. Safe in threads.
Fetch = Callable[[int], bytes | memoryview | None]


class Source(Protocol):
    """Samples with named fields, read at random. Picklable, cheap to open, safe in threads and forks."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names; a sample may lack some."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, or None."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """`label` (−1: none), `shard`, `height` or `width` (−1: unknown) of every sample."""
        ...

    def fetcher(self, numbers: Numbers, field: str) -> Fetch:
        """A function that reads the field of the j-th of these samples."""
        ...

    def sizes(self, numbers: Numbers, field: str) -> Numbers:
        """(n,) int64, the field's length in bytes, −1 where absent or unknown."""
        ...

    def key(self, number: int) -> str:
        """A sample's key."""
        ...

    def all_keys(self) -> list[str]:
        """All keys, by number."""
        ...

    def path(self, number: int, field: str) -> str:
        """Where the field came from: the original path relative to the source, empty if unknown."""
        ...

    def complain(self, number: int, field: str, what: str, *, damaged: bool = True) -> str:
        """A message that leads back to the sample's file; `damaged`: its bytes are to blame."""
        ...

    def close(self) -> None:
        """Let go of open files; they open again when read."""
        ...


class PackedSource:
    """One split of a packed dataset, read through its index.

    Args:
        folder: what `packer shard` or `packer index` made.
        split: name of the split.

    Raises:
        ManifestError: no complete dataset there, or no such split.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str) -> None:
        packed = Packed(os.path.abspath(folder))  # files are opened late, perhaps in another working directory
        self.folder = packed.folder
        self.split = packed[split]
        self.manifest = packed.manifest

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names, in the index's order."""
        return self.split.fields

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, or None."""
        return self.manifest.classes

    def __len__(self) -> int:
        return len(self.split)

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """A column of the memory-mapped index."""
        column: npt.NDArray[np.generic] = self.split.rows[name]
        return column

    def fetcher(self, numbers: Numbers, field: str) -> Fetch:
        """Read by pread. The rows are looked up here, once for all: one by one costs more than a small read."""
        split = self.split
        rows = split.rows[numbers]
        shards, offsets = rows["shard"].tolist(), rows[f"{field}:offset"].tolist()
        lengths, descriptor, pread = rows[f"{field}:length"].tolist(), split.descriptor, os.pread

        def fetch(j: int) -> bytes | None:
            length = lengths[j]
            if length < 0:
                return None
            data = pread(descriptor(shards[j]), length, offsets[j])
            if len(data) == length:
                return data
            return split.read(int(numbers[j]), field)  # completes a huge read, or says what is wrong

        return fetch

    def sizes(self, numbers: Numbers, field: str) -> Numbers:
        """(n,) int64, the field's length in bytes, −1 where absent."""
        lengths: Numbers = self.split.rows[f"{field}:length"][numbers]
        return lengths

    def key(self, number: int) -> str:
        """A sample's key."""
        return self.split.key(number)

    def all_keys(self) -> list[str]:
        """All keys, by number."""
        return [key.decode("utf-8", "surrogateescape") for key in self.split.names.keys]

    @cached_property
    def _path_columns(self) -> dict[str, int]:
        return {field: i for i, field in enumerate(self.fields)}

    def path(self, number: int, field: str) -> str:
        """The original path relative to the packed source, empty where packing made the field."""
        return os.fsdecode(self.split.names.paths[self._path_columns[field]][number])

    def complain(self, number: int, field: str, what: str, *, damaged: bool = True) -> str:
        """Shard, sample, key and field, and what to run."""
        return self.split.complain(number, field, what, damaged=damaged)

    def close(self) -> None:
        """Close the shards."""
        self.split.close()


class ConcatSource:
    """Several sources as one: the samples of the first, then those of the second, and so on.

    Args:
        parts: at least one; if several have classes, the same ones.

    Raises:
        UsageError: the classes differ, so that a label would mean two things.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = tuple(parts)
        classes = {part.classes for part in self.parts if part.classes is not None}
        if len(classes) > 1:
            raise UsageError(
                f"the {len(self.parts)} datasets have different classes, so a label would mean two things; "
                "pack them with the same --classes file"
            )
        self._classes = next(iter(classes), None)
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self.starts: Numbers = np.cumsum([0, *map(len, self.parts)])

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of any part."""
        return tuple(dict.fromkeys(field for part in self.parts for field in part.fields))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, or None."""
        return self._classes

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """The parts' columns, one after the other; shards are numbered through."""
        if name not in self._columns:
            columns = [part.column(name) for part in self.parts]
            if name == "shard":
                counts = [int(column.max(initial=-1)) + 1 for column in columns]
                before = np.cumsum([0, *counts])
                columns = [column + start for column, start in zip(columns, before[:-1], strict=True)]
            self._columns[name] = np.concatenate(columns)
        return self._columns[name]

    def fetcher(self, numbers: Numbers, field: str) -> Fetch:
        """Each sample from its part; None where the part lacks the field."""
        which = np.searchsorted(self.starts, numbers, side="right") - 1
        fetches: list[tuple[Fetch, int] | None] = [None] * len(numbers)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(which == number)
            if len(mine) and field in part.fields:
                fetch = part.fetcher(numbers[mine] - self.starts[number], field)
                for local, j in enumerate(mine.tolist()):
                    fetches[j] = fetch, local

        def fetch_any(j: int) -> bytes | memoryview | None:
            found = fetches[j]
            return None if found is None else found[0](found[1])

        return fetch_any

    def sizes(self, numbers: Numbers, field: str) -> Numbers:
        """(n,) int64, the field's length in bytes, −1 where absent or unknown."""
        which = np.searchsorted(self.starts, numbers, side="right") - 1
        sizes = np.full(len(numbers), -1, np.int64)
        for number, part in enumerate(self.parts):
            mine = which == number
            if field in part.fields and mine.any():
                sizes[mine] = part.sizes(numbers[mine] - self.starts[number], field)
        return sizes

    def _part(self, number: int) -> tuple[Source, int]:
        which = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.parts[which], int(number - self.starts[which])

    def key(self, number: int) -> str:
        """A sample's key in its part."""
        part, local = self._part(number)
        return part.key(local)

    def all_keys(self) -> list[str]:
        """All keys, by number."""
        return [key for part in self.parts for key in part.all_keys()]

    def path(self, number: int, field: str) -> str:
        """Where the field came from."""
        part, local = self._part(number)
        return part.path(local, field) if field in part.fields else ""

    def complain(self, number: int, field: str, what: str, *, damaged: bool = True) -> str:
        """A message that leads back to the sample's file."""
        part, local = self._part(number)
        return part.complain(local, field, what, damaged=damaged)

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.close()
