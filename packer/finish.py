"""The last step of making a dataset: everything that stands beside the shards, the manifest last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from crc32c import crc32c

from packer.index import Names, Rows, npy_parts
from packer.manifest import Manifest, Split
from packer.storage import write_atomic, write_json

WEBDATASET = "webdataset"


def finish(
    folder: str,
    *,
    format: str,  # noqa: A002
    splits: Sequence[tuple[Split, Rows, Names]],
    fields: Sequence[str],
    classes: Sequence[str] | None = None,
    source: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    fingerprint: str = "",
) -> Manifest:
    """Write index, names and (tar only) wids index of every split, then `dataset.json`.

    Each file appears whole or not at all, and the manifest only after all others: a folder with a
    manifest is complete.

    Args:
        folder: the dataset's folder, which already holds the shards.
        format: name of the shard format.
        splits: per split its shards, its rows (n,) of `row_dtype(fields)` and its names.
        fields: field names in the index's order.
        classes: class names by label, or None.
        source: counts of where the samples came from.
        options: what was asked for.
        fingerprint: of the plan.

    Returns:
        The manifest as written.

    Raises:
        OutputError: the folder cannot be written.
        ValueError: rows, names and shards disagree on the number of samples.

    >>> finish("out/", format="webdataset", splits=[(split, rows, names)], fields=["jpg"])  # doctest: +SKIP
    """
    sidecars: dict[str, dict[str, int]] = {}
    for split, rows, names in splits:
        if not len(rows) == len(names.keys) == split.samples or len(names.paths) != len(fields):
            raise ValueError(
                f"split {split.name!r}: {split.samples} samples in shards, {len(rows)} rows, "
                f"{len(names.keys)} keys; {len(fields)} fields, {len(names.paths)} columns of paths"
            )
        sidecars[split.index_file] = _write(folder, split.index_file, *npy_parts(rows))
        sidecars[split.names_file] = _write(folder, split.names_file, *names.parts())
        if format == WEBDATASET:
            write_json(os.path.join(folder, split.wids_file), wids_index(split))
    manifest = Manifest(
        format=format,
        fields=tuple(fields),
        splits={split.name: split for split, _, _ in splits},
        classes=None if classes is None else tuple(classes),
        source=source or {},
        options=options or {},
        fingerprint=fingerprint,
        sidecars=sidecars,
    )
    manifest.save(folder)
    return manifest


def wids_index(split: Split) -> dict[str, Any]:
    """The index that the `wids` package reads; its URLs are relative to the file's own folder."""
    return {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": split.name,
        "shardlist": [
            {"url": shard.name, "nsamples": shard.samples, "filesize": shard.bytes} for shard in split.shards
        ],
    }


def _write(folder: str, name: str, *parts: bytes | memoryview) -> dict[str, int]:
    write_atomic(os.path.join(folder, name), *parts)
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return {"bytes": sum(len(part) for part in parts), "crc32c": checksum}
