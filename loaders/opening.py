"""A loader from what a command line can say: a folder, a split, a size or the name of a transform."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loaders.loader import Loader
from loaders.make import LoaderMaker
from loaders.options import EngineName
from loaders.subject import Subject, load_factory, subject_of
from loaders.transforms import EvalCrop, TrainCrop, Window
from packer import manifest
from packer.errors import UsageError
from packer.sample import is_image_field

#: The loader module of each format but tar.
_LOADERS = {"hdf5": "hdf5", "tfrecord": "tfrecord"}


@dataclass(frozen=True)
class Reading:
    """How a dataset is read.

    Attributes:
        split: name of the split.
        batch_size: samples in a batch.
        size: pictures are cropped to this many pixels: at random in the split `train`, else in the centre.
        transform: instead of the crop (or, for CT, a window of soft tissue): "module:name" of a transform, or of a
            class or function that makes one without arguments; or "none".
        normalize: float32 made by the workers, instead of uint8.
        engine: as in `make_loader`.
    """

    split: str = "train"
    batch_size: int = 64
    size: int = 224
    transform: str | None = None
    normalize: bool = False
    engine: EngineName = "auto"


def open_loader(path: str, how: Reading) -> Loader:
    """A loader of a packed dataset, or of a folder that is not packed yet.

    Raises:
        ManifestError: no such split.
        UsageError: no such transform.
    """
    transform: Callable[..., Any] | None = TrainCrop(how.size) if how.split == "train" else EvalCrop(how.size)
    name = "folder"
    if os.path.exists(os.path.join(path, manifest.FILE)):
        packed = manifest.Manifest.load(path)
        name = _LOADERS.get(packed.format, "webds")
        if not any(is_image_field(field) for field in packed.fields):  # CT: a window of soft tissue
            transform = Window(40, 400)
    if how.transform is not None:
        transform = None if how.transform == "none" else _named(how.transform)
    make_loader: LoaderMaker = importlib.import_module(f"loaders.{name}_loader").make_loader
    return make_loader(path, split=how.split, batch_size=how.batch_size, transform=transform, engine=how.engine,
                       normalize="imagenet" if how.normalize else None)


def open_subject(path: str | None, factory: str | None, how: Reading) -> Subject:
    """What a command is pointed at.

    Args:
        path: a packed dataset or a folder, or None.
        factory: "module:function" of a function that makes a loader, or None.
        how: how `path` is read.

    Raises:
        UsageError: both or neither.
    """
    if factory is not None and path is None:
        return subject_of(load_factory(factory))
    if path is None or factory is not None:
        raise UsageError("give either OUT, a packed dataset or a folder, or --loader module:function")
    return subject_of(open_loader(path, how))


def _named(name: str) -> Callable[..., Any]:
    """A transform by name; a class, or a function without parameters, is called to make it."""
    found: Any = load_factory(name)
    try:
        makes = inspect.isclass(found) or not inspect.signature(found).parameters
    except (TypeError, ValueError):
        makes = False
    transform: Callable[..., Any] = found() if makes else found
    return transform
