"""What a shard format is. Its payloads are byte ranges: whoever has the index needs no parser.

A format is one module with one `Format`, one row in `packer.formats.FORMATS`, and one subclass of the contract
tests. Nothing outside `packer.formats` knows a container. Who needs what of it:

- packing (`packer.shard`): `writer` and its `ShardWriter`; planning: `sample_bytes` and `overhead`;
- indexing strangers' shards (`packer.indexing`) and `packer verify`: `walk`;
- converting strangers' shards (`packer.foreign`): `write_out`, then `walk`;
- finding shards (`packer.patterns`): `suffix`, `suffixes`, `packed_suffixes` and `recognises`;
- finishing (`packer.finish`): `beside` and `sidecars`, the files that other readers want beside the shards. They are
  written after index and names, before `dataset.json`, which holds their checksums: `verify` and a repeated run
  compare those and know nothing of the content.

Everything else (loading, unpacking, statistics, viewing, converting, withdrawing) reads by the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from packer.strings import Int64s, Strings

if TYPE_CHECKING:
    from packer.manifest import Manifest, Split
    from packer.sources.base import Scan

Mask = npt.NDArray[np.bool_]

#: So many first bytes of a file are enough to recognise its format.
HEAD_BYTES = 4096

#: `read(file, offset, view)` fills the view with a file's bytes from `offset` on; in order, each byte once.
ReadPiece = Callable[[int, int, memoryview], None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some consecutive samples about to be laid out.

    Attributes:
        keys: m keys.
        first: int64 (m + 1,): files of sample i are first[i]:first[i + 1].
        fields: field names.
        field: int64 per file, its field's position in `fields`.
        sizes: int64 per file, bytes.
        made_labels: int64 (m,): the labels that packing makes the field `cls` of, −1 where it makes none.
    """

    keys: Strings
    first: Int64s
    fields: Sequence[str]
    field: Int64s
    sizes: Int64s
    made_labels: Int64s


@dataclass(frozen=True, eq=False)
class Seen:
    """What is known of a batch's samples once their payloads were read, for formats that store it.

    Attributes:
        labels: int64 (m,), −1 where a sample has none.
        image_sizes: int32 (m, 2), height and width of each sample's first image as stored, −1 where unknown.
    """

    labels: Int64s
    image_sizes: npt.NDArray[np.int32]


@dataclass(frozen=True)
class About:
    """What a shard may say of its dataset. Equal for all shards; decides bytes, so it knows no paths.

    Attributes:
        classes: class names by label, or None.
    """

    classes: tuple[str, ...] | None = None


NOTHING = About()


class Written(NamedTuple):
    """A finished shard file: its size, and the crc32c of all its bytes."""

    bytes: int
    crc32c: int


class ShardWriter(Protocol):
    """Writes one shard, batch after batch: lay out, let the caller fill the payloads in place, commit."""

    def layout(self, batch: Batch) -> tuple[memoryview, Int64s]:
        """Prepare everything but the payloads.

        Returns:
            The buffer, and int64 per file the position in it where its payload belongs. Valid until `commit`.
        """
        ...

    def commit(self, seen: Seen, keep: Mask | None = None) -> Int64s:
        """Write the batch out, without the samples that `keep` (m,) says no to.

        Args:
            seen: what the payloads, now in place, turned out to be.
            keep: bool (m,); None keeps all.

        Returns:
            int64 per file: absolute offset of the payload in the shard (−1 for files not kept).
        """
        ...

    def stream(self, batch: Batch, seen: Seen, read: ReadPiece) -> Int64s:
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
    """One field that a shard's own headers speak of: where its bytes lie, and what the shard calls it."""

    offset: int
    length: int
    name: bytes


class FoundSample(NamedTuple):
    """One sample by the shard's own headers.

    Attributes:
        key: its key.
        fields: in file order.
        label: as the container states it; None where it does not (then the field `cls` does).
    """

    key: bytes
    fields: dict[str, Found]
    label: int | None = None


class Format(Protocol):
    """One byte layout, both ways. See the module for who uses what.

    Attributes:
        name: as `--format` takes it.
        title: what people call such files, in messages.
        suffix: of the shards that packing writes.
        suffixes: of shards, whoever made them; lower case, `suffix` among them.
        packed_suffixes: of such shards compressed as a whole, which have no byte ranges.
        beside: endings, after a split's name, of the files that `sidecars` gives.
        max_field_bytes: the longest payload that the layout can hold.
    """

    name: str
    title: str
    suffix: str
    suffixes: tuple[str, ...]
    packed_suffixes: tuple[str, ...]
    beside: tuple[str, ...]
    max_field_bytes: int

    def sample_bytes(self, scan: Scan) -> Int64s:
        """int64 (n,): what each sample takes up in a shard at most, headers and padding counted."""
        ...

    def overhead(self, scan: Scan) -> int:
        """Bytes that a shard of samples like these needs beside them, at most."""
        ...

    def writer(self, path: str, *, about: About = NOTHING, durable: bool = True) -> ShardWriter:
        """Start a shard at this path; `durable` says whether `close` waits for the disk."""
        ...

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins with these bytes (up to `HEAD_BYTES`) is such a shard."""
        ...

    def write_out(self, path: str, target: str) -> bool:
        """Write a stranger's shard whose samples are no byte ranges to `target`, as one whose are.

        Returns:
            False, with nothing written, where `walk` reads the shard as it is.

        Raises:
            ShardError: damaged, or its samples cannot be told.
        """
        ...

    def walk(self, path: str, skipped: MutableMapping[str, int] | None = None) -> Iterator[FoundSample]:
        """Every sample of a shard, ours or a stranger's, by its own headers, in file order, payloads unread.

        Args:
            path: the shard.
            skipped: what is part of no sample is counted here by reason.

        Raises:
            ShardError: truncated, damaged, or without byte ranges; a `DamagedShardError` where the offset is known.
        """
        ...

    def sidecars(
        self, folder: str, split: Split, manifest: Manifest
    ) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
        """Files beside a split's shards for other readers: names (`split.name` + one of `beside`) and contents.

        Shards, index and names are in place; `manifest` is all that `dataset.json` will say but for checksums.
        """
        ...
