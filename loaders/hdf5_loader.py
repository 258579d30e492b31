"""Batches from HDF5 shards.

    from loaders.hdf5_loader import make_loader
    for images, labels in make_loader("out/", batch_size=256, transform=TrainCrop(224)):
        ...

All options: `loaders.make.LoaderMaker`. Payloads are read by the index, one pread each: no HDF5 library is loaded, no
lock taken, and nothing minds a fork. Batches are those of the same samples in any other format.
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
