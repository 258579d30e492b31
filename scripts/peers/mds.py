"""mosaicml-streaming: MDSWriter and StreamingDataset."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import streaming

from peers.base import Task, list_tree, read_file
from peers.recipes import data_loader, v2_bytes_recipe


def pack(tree: str, store: str, variant: str) -> None:
    """The encoded bytes and an integer, in shards of the default size."""
    del variant
    samples = list_tree(tree)
    random.Random(0).shuffle(samples)
    with streaming.MDSWriter(out=store, columns={"image": "bytes", "label": "int"}) as sink:
        for path, label in samples:
            sink.write({"image": read_file(path), "label": label})


class _Pictures(streaming.StreamingDataset):
    def __init__(self, store: str, task: Task) -> None:
        super().__init__(local=store, shuffle=True, batch_size=task.batch_size)
        self.recipe = v2_bytes_recipe(task)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        sample = super().__getitem__(at)
        return self.recipe(sample["image"]), sample["label"]


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Shuffled."""
    del variant
    streaming.base.util.clean_stale_shared_memory()  # its names are global: another run's would collide
    return data_loader(_Pictures(store, task), task)
