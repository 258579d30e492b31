"""litdata: `optimize`, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import litdata

from peers.base import Task, list_tree, read_file
from peers.recipes import v2_bytes_recipe


def _sample(record: tuple[str, int]) -> dict[str, Any]:
    return {"image": read_file(record[0]), "label": record[1]}


def pack(tree: str, store: str, variant: str) -> None:
    """Chunks of 64 MB, the size its documentation uses."""
    del variant
    samples = list_tree(tree)
    random.Random(0).shuffle(samples)
    litdata.optimize(fn=_sample, inputs=samples, output_dir=store, chunk_bytes="64MB", num_workers=2, verbose=False)


def _transform(recipe: Any, sample: dict[str, Any]) -> tuple[Any, int]:
    return recipe(sample["image"]), sample["label"]


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Shuffled."""
    del variant
    transform = functools.partial(_transform, v2_bytes_recipe(task))
    dataset = litdata.StreamingDataset(store, shuffle=True, drop_last=False, transform=transform)
    return litdata.StreamingDataLoader(
        dataset, batch_size=task.batch_size, num_workers=task.workers, drop_last=False, persistent_workers=True
    )
