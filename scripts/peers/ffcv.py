"""ffcv: a beton file that holds the very JPEGs, and its compiled loader."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image

from peers.base import CROP_RATIO, CROP_SCALE, MEAN, STD, Task, list_tree, read_file


class _JpegField(RGBImageField):
    """Stores a JPEG's bytes as they are, where ffcv's own field decodes and encodes anew."""

    def encode(self, destination: Any, image: bytes, malloc: Callable[[int], tuple[int, Any]]) -> None:
        with Image.open(io.BytesIO(image)) as header:
            destination["width"], destination["height"] = header.size
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["data_ptr"], storage = malloc(len(image))
        storage[:] = np.frombuffer(image, np.uint8)


class _Samples:
    def __init__(self, records: list[tuple[str, int]]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        path, label = self.records[number]
        return read_file(path), label


def pack(tree: str, store: str, variant: str) -> None:
    """One beton file."""
    del variant
    records = list_tree(tree)
    random.Random(0).shuffle(records)
    fields = {"image": _JpegField(), "label": IntField()}
    writer = DatasetWriter(os.path.join(store, "train.beton"), fields, num_workers=2)
    writer.from_indexed_dataset(_Samples(records))


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Shuffled globally, the file in the page cache."""
    del variant
    image: list[Any] = [SimpleRGBImageDecoder()]
    if task.crop:
        size = (task.side, task.side)
        image = [RandomResizedCropRGBImageDecoder(size, CROP_SCALE, CROP_RATIO), RandomHorizontalFlip()]
    if task.normalized:
        image.append(NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32))
    image += [ToTensor(), ToTorchImage(channels_last=False)]
    loader = Loader(
        os.path.join(store, "train.beton"),
        batch_size=task.batch_size,
        num_workers=task.workers,
        order=OrderOption.RANDOM,
        seed=0,
        os_cache=True,
        drop_last=False,
        custom_fields={"image": RGBImageField},
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    return _Contiguous(loader)


class _Contiguous:
    """Batches in the layout that is asked for; ffcv's images are channels last in memory."""

    def __init__(self, batches: Iterable[tuple[Any, Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((images.contiguous(), labels) for images, labels in self.batches)
