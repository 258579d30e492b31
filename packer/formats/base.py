"""What a shard format is. Its payloads are byte ranges: whoever has the index needs no parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from packer.strings import Int64s

if TYPE_CHECKING:
    from packer.sources.base import Scan

Mask = npt.NDArray[np.bool_]

#: `read(file, offset, view)` fills the view with a file's bytes from `offset` on; in order, each byte once.
ReadPiece = Callable[[int, int, memoryview], None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some consecutive samples about to be laid out.

    Attributes:
        keys: m keys.
        first: int64 (m + 1,): files of sample i are first[i]:first[i + 1].
        fields: per file, its field name.
        sizes: int64 per file, bytes.
    """

    keys: Sequence[bytes]
    first: Int64s
    fields: Sequence[str]
    sizes: Int64s


class Written(NamedTuple):
    """A finished shard file: its size, and the crc32c of all its bytes."""

    bytes: int
    crc32c: int


class ShardWriter(Protocol):
    """Writes one shard, batch after batch: lay out, let the caller fill the payloads in place, commit."""

    def layout(self, batch: Batch) -> tuple[memoryview, list[int]]:
        """Prepare everything but the payloads.

        Returns:
            The buffer, and for each file the position in it where its payload belongs. Valid until `commit`.
        """
        ...

    def commit(self, keep: Mask | None = None) -> Int64s:
        """Write the batch out, without the samples that `keep` (m,) says no to.

        Returns:
            int64 per file: absolute offset of the payload in the shard (−1 for files not kept).
        """
        ...

    def stream(self, batch: Batch, read: ReadPiece) -> Int64s:
        """Write a batch too large for memory, its payloads piece by piece, instead of `layout` and `commit`.

        Returns:
            int64 per file: absolute offset of the payload in the shard.
        """
        ...

    def close(self) -> Written:
        """Finish the shard and make it durable."""
        ...

    def abort(self) -> None:
        """Let go of the file without finishing it."""
        ...


class Found(NamedTuple):
    """One field that a shard's own headers speak of."""

    key: bytes
    field: str
    offset: int
    length: int


class Format(Protocol):
    """One byte layout, both ways.

    Attributes:
        name: as `--format` takes it.
        suffix: of a shard's file name.
        overhead: bytes that a shard needs beside its samples.
        max_field_bytes: the longest payload that the layout can hold.
    """

    name: str
    suffix: str
    overhead: int
    max_field_bytes: int

    def sample_bytes(self, scan: Scan) -> Int64s:
        """int64 (n,): what each sample takes up in a shard, headers and padding counted."""
        ...

    def writer(self, path: str, *, durable: bool = True) -> ShardWriter:
        """Start a shard at this path; `durable` says whether `close` waits for the disk."""
        ...

    def walk(self, path: str) -> Iterator[Found]:
        """Every field of a shard by its own headers, in file order, payloads unread.

        Raises:
            ShardError: truncated or damaged, with the offset.
        """
        ...
