"""The last step of making a dataset: everything that stands beside the shards, the manifest last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from packer.formats import get_format
from packer.index import Names, NamesToWrite, Rows, npy_header, npy_rows, row_dtype
from packer.manifest import Manifest, Split
from packer.storage import write_atomic


def finish(
    folder: str,
    *,
    format: str,  # noqa: A002
    splits: Sequence[tuple[Split, Rows | Iterable[Rows], Names | NamesToWrite]],
    fields: Sequence[str],
    classes: Sequence[str] | None = None,
    source: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    fingerprint: str = "",
) -> Manifest:
    """Write index, names and the format's own sidecars of every split, then `dataset.json`.

    Each file appears whole or not at all, and the manifest only after all others: a folder with a
    manifest is complete.

    Args:
        folder: the dataset's folder, which already holds the shards.
        format: name of the shard format.
        splits: per split its shards, its rows (n,) of `row_dtype(fields)`, all at once or piece by piece,
            and its names.
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
        if len(names.keys) != split.samples or len(names.paths) != len(fields):
            raise ValueError(
                f"split {split.name!r}: {split.samples} samples in shards, {len(names.keys)} keys; "
                f"{len(fields)} fields, {len(names.paths)} columns of paths"
            )
        for name, parts in ((split.index_file, _index_parts(split, rows, fields)), (split.names_file, names.parts())):
            sidecars[name] = write_atomic(os.path.join(folder, name), parts)._asdict()
    manifest = Manifest(
        format=format,
        fields=tuple(fields),
        splits={split.name: split for split, _, _ in splits},
        classes=None if classes is None else tuple(classes),
        source=source or {},
        options=options or {},
        fingerprint=fingerprint,
    )
    for split in manifest.splits.values():
        for name, content in get_format(format).sidecars(folder, split, manifest):
            sidecars[name] = write_atomic(os.path.join(folder, name), content)._asdict()
    manifest = replace(manifest, sidecars=sidecars)
    manifest.save(folder)
    return manifest


def _index_parts(split: Split, rows: Rows | Iterable[Rows], fields: Sequence[str]) -> Iterator[bytes | memoryview]:
    """The bytes of a split's index, piece by piece. Raises ValueError where rows and shards disagree."""
    pieces = iter([rows] if isinstance(rows, np.ndarray) else rows)
    first = next(pieces, None)
    yield npy_header(row_dtype(fields) if first is None else first.dtype, split.samples)
    count = 0
    while first is not None:
        yield npy_rows(first)
        count += len(first)
        first = next(pieces, None)
    if count != split.samples:
        raise ValueError(f"split {split.name!r}: {split.samples} samples in shards, {count} rows")
