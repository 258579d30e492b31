"""The files themselves, one after another."""

from __future__ import annotations

from collections.abc import Iterator

from peers.base import list_tree, read_file


def read(store: str, variant: str) -> Iterator[tuple[bytes, int]]:
    """Open, read and close each file, in the order of the tree."""
    del variant
    for path, label in list_tree(store):
        yield read_file(path), label
