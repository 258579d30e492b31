"""Hugging Face datasets: an Arrow table on disk, map-style, in torch's DataLoader."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import datasets

from peers.base import Task, list_tree, read_file
from peers.recipes import data_loader, v2_bytes_recipe


def _samples(records: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for path, label in records:
        yield {"image": read_file(path), "label": label}  # the bytes themselves: an Image feature may keep the path


def pack(tree: str, store: str, variant: str) -> None:
    """One Arrow dataset, the pictures' encoded bytes in a binary column."""
    del variant
    records = list_tree(tree)
    random.Random(0).shuffle(records)
    features = datasets.Features({"image": datasets.Value("binary"), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_generator(_samples, features=features, gen_kwargs={"records": records})
    made.save_to_disk(store)


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Shuffled by the DataLoader's sampler; a batch is fetched from the table at once."""
    del variant
    recipe = v2_bytes_recipe(task)
    dataset = datasets.load_from_disk(store).with_transform(
        lambda columns: {"image": [recipe(data) for data in columns["image"]], "label": columns["label"]}
    )
    return _Tuples(data_loader(dataset, task, shuffle=True))


class _Tuples:
    """Batches as (images, labels) instead of a dict."""

    def __init__(self, batches: Iterable[dict[str, Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch["image"], batch["label"]) for batch in self.batches)
