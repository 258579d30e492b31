"""webdataset: its ShardWriter, its WebDataset pipeline, its WebLoader."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator

import webdataset as wds

from peers.base import Task, list_tree, read_file
from peers.recipes import pillow_recipe, v2_bytes_recipe


def pack(tree: str, store: str, variant: str) -> None:
    """Eight shards in random order, as its documentation advises: one shard would leave the second worker idle."""
    del variant
    samples = list_tree(tree)
    random.Random(0).shuffle(samples)
    per_shard = -(-len(samples) // Task.shards)
    with wds.ShardWriter(os.path.join(store, "%06d.tar"), maxcount=per_shard, verbose=0) as sink:
        for number, (path, label) in enumerate(samples):
            sink.write({"__key__": f"{number:08d}", "jpg": read_file(path), "cls": label})


def _shards(store: str) -> list[str]:
    return sorted(os.path.join(store, name) for name in os.listdir(store) if name.endswith(".tar"))


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Variants: pillow, v2. Shuffles shards, and a buffer of a thousand samples; batches are made in the workers."""
    dataset = wds.WebDataset(_shards(store), shardshuffle=Task.shards, seed=0).shuffle(1000)
    if variant == "pillow":
        dataset = dataset.decode("pil").to_tuple("jpg", "cls").map_tuple(pillow_recipe(task))
    else:
        dataset = dataset.to_tuple("jpg", "cls").map_tuple(v2_bytes_recipe(task), int)
    batched = dataset.batched(task.batch_size)
    return wds.WebLoader(batched, batch_size=None, num_workers=task.workers, persistent_workers=task.workers > 0)


def read(store: str, variant: str) -> Iterator[tuple[bytes, int]]:
    """The stream of samples, in order, not decoded."""
    del variant
    for sample in wds.WebDataset(_shards(store), shardshuffle=False):
        yield sample["jpg"], int(sample["cls"])
