"""This project's loaders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

import numpy as np

from loaders import folder_loader, webds_loader
from loaders.source import PackedSource
from loaders.transforms import TrainCrop
from peers.base import CROP_RATIO, CROP_SCALE, Task


def pack(tree: str, store: str, variant: str) -> None:
    """`packer shard`, as it is by default or with --seekable-jpeg."""
    del variant
    seekable = ["--seekable-jpeg"] if os.path.basename(store).startswith("packer-seekable") else []
    subprocess.run([sys.executable, "-m", "packer", "shard", tree, store, "--quiet", *seekable], check=True)


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Variants: thread, process: the engines; folder: `folder_loader` on the tree."""
    make_loader = folder_loader.make_loader if variant == "folder" else webds_loader.make_loader
    return make_loader(
        store,
        batch_size=task.batch_size,
        num_workers=task.workers,
        engine="process" if variant == "process" else "thread",
        transform=TrainCrop(task.side, CROP_SCALE, CROP_RATIO) if task.crop else None,
        normalize="imagenet" if task.normalized else None,
    )


def read(store: str, variant: str) -> Iterator[tuple[bytes | memoryview | None, int]]:
    """What a worker does to get at its samples' bytes, 64 at a time; variants: random, in-order."""
    source = PackedSource(store, "train")
    numbers = np.arange(len(source))
    if variant == "random":
        numbers = np.random.default_rng(0).permutation(numbers)
    for start in range(0, len(numbers), 64):
        chosen = numbers[start : start + 64]
        fetch = source.fetcher(chosen, "jpg")
        for j, label in enumerate(source.column("label")[chosen].tolist()):
            yield fetch(j), label
