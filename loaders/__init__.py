"""Stream packed datasets into PyTorch.

    from loaders.transforms import TrainCrop
    from loaders.webds_loader import make_loader

    for images, labels in make_loader("out/", split="train", batch_size=256, transform=TrainCrop(224)):
        ...

Every loader module has the same `make_loader`; `pad_collate` batches what differs in size.
"""

from loaders.collate import Padded, pad_collate

__all__ = ["Padded", "pad_collate"]
