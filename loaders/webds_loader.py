"""Batches from WebDataset shards.

    from loaders.webds_loader import make_loader
    for images, labels in make_loader("out/", batch_size=256, transform=TrainCrop(224)):
        ...

All options: `loaders.make.LoaderMaker`. For shards without an index there is `pipeline`, and for webdataset's own
stages `IndexedSamples`.
"""

from loaders.loader import Loader
from loaders.make import LoaderMaker
from loaders.options import LoaderOptions
from loaders.source import PackedSource
from loaders.streams import IndexedSamples, pipeline

__all__ = ["IndexedSamples", "Loader", "make_loader", "pipeline"]


def _open(folder: str, split: str, options: LoaderOptions) -> PackedSource:
    del options
    return PackedSource(folder, split)


make_loader = LoaderMaker(_open)
