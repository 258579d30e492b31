"""Where a loader's bytes come from: the samples of one split, by number."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loaders.order import Numbers
from packer.packed import Packed
from packer.sample import is_image_field, printable

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

    def keys(self) -> list[str]:
        """All keys, by number."""
        ...

    def path(self, number: int, field: str) -> str:
        """Where the field came from: the original path relative to the source, empty if unknown."""
        ...

    def complain(self, number: int, field: str, what: str) -> str:
        """A message that leads back to the sample's file."""
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
        packed = Packed(folder)
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

    def keys(self) -> list[str]:
        """All keys, by number."""
        return [key.decode("utf-8", "surrogateescape") for key in self.split.names.keys]

    @cached_property
    def _path_columns(self) -> dict[str, int]:
        return {field: i for i, field in enumerate(self.fields)}

    def path(self, number: int, field: str) -> str:
        """The original path relative to the packed source, empty where packing made the field."""
        return os.fsdecode(self.split.names.paths[self._path_columns[field]][number])

    def complain(self, number: int, field: str, what: str) -> str:
        """Shard, sample, key and field, and what to run."""
        return self.split.complain(number, field, what)

    def close(self) -> None:
        """Close the shards."""
        self.split.close()


def picture_fields(source: Source) -> tuple[str, ...]:
    """The fields that hold the picture itself: image fields without a prefix (`jpg`, not `mask.png`)."""
    return tuple(field for field in source.fields if is_image_field(field) and "." not in field)


def describe_sample(source: Source, number: int) -> str:
    """A sample as one line of safe text."""
    return f"sample {number} {printable(source.key(number))!r}"
