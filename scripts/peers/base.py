"""What every loader is asked for, and what the modules that know one share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

#: ImageNet's mean and standard deviation of the pixels / 255, per channel.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

CROP_SCALE = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Task:
    """The output that is asked for: `(images, labels)`, images (B, 3, side, side), contiguous.

    Attributes:
        side: height and width of a picture, pixels.
        crop: take a random part (`CROP_SCALE`, `CROP_RATIO`), resize it, mirror every second; else the pictures are of
            this size already, and are decoded as they are.
        dtype: uint8, or float32 normalised by `MEAN` and `STD`.
        batch_size: pictures per batch; the last one may be smaller.
        workers: threads or processes that decode.
        shards: files that a format is cut into where one file would leave workers idle.
    """

    side: int = 224
    crop: bool = True
    dtype: Literal["uint8", "float32"] = "float32"
    batch_size: int = 64
    workers: int = 2
    shards: int = 8

    @property
    def normalized(self) -> bool:
        """Whether pictures are normalised floats."""
        return self.dtype == "float32"


SUFFIXES = (".jpg", ".jpeg")


def list_tree(tree: str) -> list[tuple[str, int]]:
    """(path, label) of every JPEG of an ImageFolder tree; labels and order are torchvision's."""
    classes = sorted(entry.name for entry in os.scandir(tree) if entry.is_dir())
    found = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(tree, name))):
            found += [(os.path.join(folder, f), label) for f in sorted(files) if f.lower().endswith(SUFFIXES)]
    return found


def read_file(path: str) -> bytes:
    """A file's bytes."""
    with open(path, "rb") as f:
        return f.read()
