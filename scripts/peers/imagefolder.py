"""torchvision's ImageFolder in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable

from torchvision.datasets import ImageFolder
from torchvision.io import read_file

from peers.base import Task
from peers.recipes import data_loader, pillow_recipe, v2_recipe


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Variants: pillow, v2."""
    if variant == "pillow":
        return data_loader(ImageFolder(store, transform=pillow_recipe(task)), task, shuffle=True)
    return data_loader(ImageFolder(store, transform=v2_recipe(task), loader=read_file), task, shuffle=True)
