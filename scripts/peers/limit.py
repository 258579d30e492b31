"""The most that a loader of ours could reach: bare threads that run nothing but its decode function, in a loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch

from loaders.decode import affine, decode_many_into
from loaders.source import PackedSource
from loaders.transforms import TrainCrop, sample_rng
from peers.base import CROP_RATIO, CROP_SCALE, MEAN, STD, Task
from peers.ours import pack

__all__ = ["load", "pack"]


class DecodeLimit:
    """Threads that decode pictures, already in memory, each into a block of its own again and again.

    An epoch gives each block when it is full, though its thread goes on to overwrite it: only the rate means something.
    """

    def __init__(self, store: str, task: Task) -> None:
        source = PackedSource(store, "train")
        fetch = source.fetcher(np.arange(len(source)), "jpg")
        self.pictures = [fetch(j) or b"" for j in range(len(source))]
        self.labels = torch.from_numpy(np.array(source.column("label"), np.int64))
        self.task = task
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size, count = self.task.batch_size, len(self.pictures)
        starts = iter(range(0, count, size))
        done: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor]] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._decode, args=(starts, done), daemon=True) for _ in range(self.task.workers)
        ]
        self.epoch += 1
        for thread in threads:
            thread.start()
        for _ in range(-(-count // size)):
            yield done.get(timeout=60)
        for thread in threads:
            thread.join()

    def _decode(self, starts: Iterator[int], done: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor]]) -> None:
        task, pictures = self.task, self.pictures
        transform = TrainCrop(task.side, CROP_SCALE, CROP_RATIO)
        normalize = affine(MEAN, STD) if task.normalized else None
        block = torch.empty((task.batch_size, 3, task.side, task.side), dtype=getattr(torch, task.dtype))
        for start in starts:
            batch = pictures[start : start + task.batch_size]
            if task.crop:
                for j, data in enumerate(batch):
                    transform.into(data, block[j], sample_rng(0, self.epoch, start + j), normalize=normalize)
            else:
                decode_many_into(batch, block[: len(batch)], normalize=normalize)
            done.put((block[: len(batch)], self.labels[start : start + task.batch_size]))


def load(store: str, task: Task, variant: str) -> DecodeLimit:
    """The decode function alone."""
    del variant
    return DecodeLimit(store, task)
