"""grain, reading array_record files."""

from __future__ import annotations

import itertools
import os
import random
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from peers.base import Task, list_tree, read_file
from peers.recipes import v2_bytes_recipe

_LABEL = struct.Struct("<q")


def pack(tree: str, store: str, variant: str) -> None:
    """One file, a record a group (the setting for random access): the label, then the encoded bytes."""
    del variant
    records = list_tree(tree)
    random.Random(0).shuffle(records)
    writer = ArrayRecordWriter(os.path.join(store, "train.array_record"), "group_size:1")
    for path, label in records:
        writer.write(_LABEL.pack(label) + read_file(path))
    writer.close()


class _Decode(grain.transforms.RandomMap):
    def __init__(self, task: Task) -> None:
        self.recipe = v2_bytes_recipe(task)

    def random_map(self, element: bytes, rng: np.random.Generator) -> tuple[Any, np.int64]:
        # torchvision draws from this generator; torch.manual_seed would also queue a seed for each GPU, slowly.
        torch.default_generator.manual_seed(int(rng.integers(1 << 62)))
        return self.recipe(element[_LABEL.size :]).numpy(), np.int64(_LABEL.unpack_from(element)[0])


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Shuffled globally; batches are made in the worker processes."""
    del variant
    return _Epochs(os.path.join(store, "train.array_record"), task)


class _Epochs:
    """One iterator over all epochs: each new one would start new worker processes."""

    def __init__(self, path: str, task: Task) -> None:
        torch.set_num_threads(1)
        batches = (
            grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path))
            .seed(0)
            .shuffle()
            .random_map(_Decode(task))
            .batch(task.batch_size)
        )
        self.count = len(batches)
        self.batches = iter(
            batches.repeat()
            .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
            .mp_prefetch(grain.MultiprocessingOptions(num_workers=task.workers, per_worker_buffer_size=2))
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in itertools.islice(self.batches, self.count):
            yield torch.from_numpy(images), torch.from_numpy(labels)
