"""What the old manifest and names know of shards that are indexed again, and the shards themselves do not tell."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from crc32c import crc32c

from packer.errors import ManifestError
from packer.index import Names, Rows
from packer.manifest import Manifest, Split
from packer.strings import Strings

Part = tuple[Split, Rows, Names]

PATHS_LOST = "original paths: the names file is gone or damaged, so files are called by their samples' keys"
ALL_LOST = "class names, original paths and options: these are not the shards that were packed"


def keep_known(
    folder: str, before: Manifest, parts: Sequence[Part], manifest: Manifest, *, packed: bool
) -> tuple[list[Part], Manifest]:
    """Splits and manifest with what the old one knows, if it speaks of the very same shards.

    Args:
        folder: where the old names files are.
        before: the old manifest.
        parts: what the shards tell.
        manifest: the same, as a manifest.
        packed: the old manifest was made by packing; what is lost of it is then counted in `source`,
            under `lost`, and labels that packing seems to have made do not pass for files of the source.
    """
    same = before.splits == manifest.splits and before.fields == manifest.fields
    kept: list[Part] = []
    lost = 0
    for split, rows, names in parts:
        old = _old_names(folder, before, split, names) if same else None
        if old is None and packed:
            names = _without_made_labels(manifest.fields, rows, names)
            lost += split.samples
        kept.append((split, rows, old or names))
    known = before if same else manifest
    if lost:
        known = replace(known, source={**known.source, "lost": {PATHS_LOST if same else ALL_LOST: lost}})
    return kept, known


def _old_names(folder: str, before: Manifest, split: Split, names: Names) -> Names | None:
    """The names as they were written, if they are whole and fit the shards."""
    path = os.path.join(folder, split.names_file)
    with contextlib.suppress(ManifestError, OSError):
        old = Names.load(path, split.samples, before.fields)
        if _checksum(path) == before.sidecars.get(split.names_file, {}).get("crc32c") and _same(old.keys, names.keys):
            return old
    return None


def _without_made_labels(fields: Sequence[str], rows: Rows, names: Names) -> Names:
    """Names that give the field `cls` no path where each is the bare number that packing writes."""
    if "cls" not in fields:
        return names
    label, length = rows["label"], rows["cls:length"]
    digits = 1 + np.searchsorted(10 ** np.arange(1, 19), label, "right")
    if np.any((length >= 0) & ((label < 0) | (length != digits))):
        return names
    nothing = Strings(memoryview(b""), np.zeros(len(rows) + 1, np.int64))
    paths = (nothing if field == "cls" else column for field, column in zip(fields, names.paths, strict=True))
    return replace(names, paths=tuple(paths))


def _checksum(path: str) -> int:
    with open(path, "rb") as f:
        return int(crc32c(f.read()))


def _same(a: Strings, b: Strings) -> bool:
    return np.array_equal(a.ends, b.ends) and a.blob == b.blob
