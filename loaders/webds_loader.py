"""Batches from WebDataset shards.

    from loaders.webds_loader import make_loader
    for images, labels in make_loader("out/", batch_size=256, transform=TrainCrop(224)):
        ...

All options: `loaders.loader.make_loader`.
"""

from loaders.loader import Loader, make_loader

__all__ = ["Loader", "make_loader"]
