"""Batches from TFRecord shards.

    from loaders.tfrecord_loader import make_loader
    for images, labels in make_loader("out/", batch_size=256, transform=TrainCrop(224)):
        ...

All options: `loaders.make.LoaderMaker`. Samples are read through the index, at random: no record is parsed, and for
the same seed the batches are those of every other format. `packer index` makes the index of TFRecords that others
wrote.
"""

from loaders.loader import Loader
from loaders.make import LoaderMaker
from loaders.options import LoaderOptions
from loaders.source import PackedSource

__all__ = ["Loader", "make_loader"]


def _open(folder: str, split: str, options: LoaderOptions) -> PackedSource:
    del options
    return PackedSource(folder, split)


make_loader = LoaderMaker(_open)
