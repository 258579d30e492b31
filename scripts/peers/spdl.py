"""SPDL: its Pipeline of threads, with its own ffmpeg decoder or with torchvision's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import spdl.io
import torch
from spdl.pipeline import PipelineBuilder
from torchvision.io import read_file as read_tensor

from peers.base import CROP_RATIO, CROP_SCALE, MEAN, STD, Task, list_tree, read_file
from peers.recipes import v2_recipe


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Variants: ffmpeg, v2. A thread makes a whole batch."""
    return _Epochs(list_tree(store), task, _ffmpeg(task) if variant == "ffmpeg" else _v2(task))


class _Epochs:
    def __init__(self, samples: list[tuple[str, int]], task: Task, decode: Callable[[list[str]], torch.Tensor]) -> None:
        self.samples, self.task, self.decode = samples, task, decode

    def _batch(self, samples: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        paths, labels = zip(*samples, strict=True)
        return self.decode(list(paths)), torch.tensor(labels)

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.samples)
        workers, size = self.task.workers, self.task.batch_size
        pipeline = (
            PipelineBuilder()
            .add_source(iter(self.samples))
            .aggregate(size)
            .pipe(self._batch, concurrency=workers)
            .add_sink(2 * workers)
            .build(num_threads=workers)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


def _ffmpeg(task: Task) -> Callable[[list[str]], torch.Tensor]:
    scale, bias = _affine()

    def decode(paths: list[str]) -> torch.Tensor:
        frames = []
        for path in paths:
            packets = spdl.io.demux_image(read_file(path))
            steps = _crop_filter(packets.width, packets.height, task.side) if task.crop else ""
            frames.append(spdl.io.decode_packets(packets, filter_desc=f"{steps}format=pix_fmts=rgb24"))
        pixels = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
        return torch.addcmul(bias, pixels, scale).contiguous() if task.normalized else pixels.contiguous()

    return decode


def _affine() -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    return 1 / (255 * std), -mean / std


def _crop_filter(width: int, height: int, side: int) -> str:
    """What torchvision's RandomResizedCrop and RandomHorizontalFlip do, as ffmpeg filters."""
    for _ in range(10):
        area = width * height * random.uniform(*CROP_SCALE)
        ratio = math.exp(random.uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            break
    else:
        columns, rows = min(width, round(height * CROP_RATIO[1])), min(height, round(width / CROP_RATIO[0]))
    left, top = random.randint(0, width - columns), random.randint(0, height - rows)
    flip = "hflip," if random.random() < 0.5 else ""
    # exact=1: else ffmpeg rounds the crop to whole chroma samples
    return f"crop={columns}:{rows}:{left}:{top}:exact=1,scale={side}:{side}:flags=bilinear,{flip}"


def _v2(task: Task) -> Callable[[list[str]], torch.Tensor]:
    torch.set_num_threads(1)  # the pipeline's threads share the cores already
    recipe = v2_recipe(task)
    return lambda paths: torch.stack([recipe(read_tensor(path)) for path in paths])
