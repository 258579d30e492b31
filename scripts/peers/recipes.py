"""torchvision's two recipes, for the loaders that leave decoding to the user, and the DataLoader around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from peers.base import CROP_RATIO, CROP_SCALE, MEAN, STD, Task


def pillow_recipe(task: Task) -> Callable[[Any], torch.Tensor]:
    """From a PIL image."""
    crop = [transforms.RandomResizedCrop(task.side, CROP_SCALE, CROP_RATIO), transforms.RandomHorizontalFlip()]
    pixels = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)] if task.normalized else [transforms.PILToTensor()]
    return transforms.Compose([*(crop if task.crop else []), *pixels])


def v2_recipe(task: Task) -> Callable[[torch.Tensor], torch.Tensor]:
    """From the encoded bytes as a uint8 tensor: decode_jpeg, then v2 on tensors, as torchvision's guide advises."""
    crop = [v2.RandomResizedCrop(task.side, CROP_SCALE, CROP_RATIO, antialias=True), v2.RandomHorizontalFlip()]
    pixels = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    steps = v2.Compose([*(crop if task.crop else []), *(pixels if task.normalized else []), v2.Identity()])
    return lambda encoded: steps(decode_jpeg(encoded, mode=ImageReadMode.RGB)).contiguous()


def v2_bytes_recipe(task: Task) -> Callable[[bytes], torch.Tensor]:
    """From the encoded bytes. torch wants memory that it may write to, hence the copy (some µs)."""
    recipe = v2_recipe(task)
    return lambda data: recipe(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def data_loader(dataset: Any, task: Task, *, shuffle: bool | None = None) -> DataLoader[Any]:
    """A DataLoader as torch's documentation tunes it: workers that stay between epochs."""
    return DataLoader(
        dataset,
        batch_size=task.batch_size,
        shuffle=shuffle,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )
