"""Choosing samples by key, and proving that withdrawn ones are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from packer.errors import OutputError, UsageError
from packer.packed import Packed
from packer.plan import select
from packer.sample import printable
from packer.sources.base import Scan, Source
from packer.sources.packed import PackedSource


def read_keys(path: str) -> frozenset[bytes]:
    """Keys or original paths, one a line, with or without the './' that `find .` writes before them.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    try:
        with open(path, "rb") as f:
            lines = (raw.rstrip(b"\r\n") for raw in f)
            keys = frozenset(line.removeprefix(b"./") for line in lines if line.strip())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not keys:
        raise UsageError(f"{path} lists no key")
    return keys


def selection(
    *,
    seed: int,
    fold: tuple[int, int] | None = None,
    limit: int | None = None,
    keys: frozenset[bytes] | None = None,
    drop: frozenset[bytes] | None = None,
) -> Callable[[Scan], Scan] | None:
    """A function that picks these samples out of a scan, or None where all are meant. See `packer.plan.select`."""
    if fold is None and limit is None and keys is None and drop is None:
        return None

    def choose(scan: Scan) -> Scan:
        return select(
            scan,
            seed=seed,
            fold=fold,
            limit=limit,
            keys=None if keys is None else _as_keys(scan, keys),
            drop_keys=None if drop is None else _as_keys(scan, drop),
        )

    return choose


def _as_keys(scan: Scan, listed: frozenset[bytes]) -> frozenset[bytes]:
    """Original paths replaced by the keys of their samples."""
    sample = np.repeat(np.arange(len(scan)), np.diff(scan.first))
    by_path = {path: int(sample[i]) for i, path in enumerate(scan.paths) if path in listed}
    return frozenset(scan.keys[by_path[name]] if name in by_path else name for name in listed)


class Withdrawn(NamedTuple):
    """What a check for withdrawn samples found.

    Attributes:
        listed: how many names were to go, and are gone.
        twins: keys of kept samples with the very content of a withdrawn one.
    """

    listed: int
    twins: tuple[str, ...]

    @property
    def warnings(self) -> list[str]:
        """What the user must look at."""
        if not self.twins:
            return []
        shown = ", ".join(self.twins[:5]) + (", …" if len(self.twins) > 5 else "")
        kept = "1 kept sample has" if len(self.twins) == 1 else f"{len(self.twins):,} kept samples have"
        return [f"warning: {kept} the same bytes as a withdrawn one: {shown}"]

    def lines(self, out: str) -> list[str]:
        """What was checked, and the warnings."""
        return [f"none of the {self.listed:,} withdrawn samples is in {out}", *self.warnings]


def check_withdrawn(source: Source, out: str, dropped: frozenset[bytes]) -> Withdrawn:
    """Check a finished dataset for withdrawn samples, by key, by path, and (from packed sources) by content.

    Raises:
        OutputError: a withdrawn key or path is in the dataset.
    """
    left: list[bytes] = []
    for split in Packed(out).values():
        left += [name for column in (split.names.keys, *split.names.paths) for name in column if name in dropped]
    if left:
        raise OutputError(
            f"{out} still holds {len(left)} of the withdrawn samples, for example {printable(left[0])!r}; do not use it"
        )
    twins = _same_content(source, out, dropped) if isinstance(source, PackedSource) else []
    return Withdrawn(len(dropped), tuple(printable(key) for key in twins))


def _same_content(source: PackedSource, out: str, dropped: frozenset[bytes]) -> list[bytes]:
    gone: set[tuple[str, int, int]] = set()
    for folder in source.folders:
        for split in Packed(folder).values():
            for i, names in enumerate(zip(split.names.keys, *split.names.paths, strict=True)):
                if any(name in dropped for name in names):
                    gone |= {
                        (f, int(split.rows[i][f"{f}:length"]), int(split.rows[i][f"{f}:crc32c"]))
                        for f in split.fields
                        if f != "cls"
                    }
    twins = []
    for split in Packed(out).values():
        for field in split.fields:
            wanted = {(length, crc) for name, length, crc in gone if name == field and length > 0}
            lengths, crcs = split.rows[f"{field}:length"], split.rows[f"{field}:crc32c"]
            near = np.flatnonzero(np.isin(crcs, [crc for _, crc in wanted])).tolist() if wanted else []
            twins += [split.names.keys[i] for i in near if (int(lengths[i]), int(crcs[i])) in wanted]
    return twins
