"""A packed dataset as a map-style `torch.utils.data.Dataset`, for those who want torch's own DataLoader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.utils.data

from loaders.decode import Affine, affine
from loaders.options import Normalize, TargetKind, parse_normalize
from loaders.order import Numbers, resolve_subset
from loaders.samples import Samples
from loaders.source import PackedSource, Source
from packer.errors import UsageError


class PackedDataset(torch.utils.data.Dataset[Any]):
    """Samples of one split by number.

    Args:
        path: the packed folder.
        split: name of the split.
        transform: one of `loaders.transforms`, or any callable that takes a PIL image or a uint8 tensor.
        normalize: "imagenet" or (mean, std) for float32 images; None for uint8.
        fields: None for (image, label); else the fields of a dict, see `loaders.webds_loader.make_loader`.
        targets: how masks and boxes beside the picture are read, see there.
        subset: numbers, a mask, keys, or a fold such as "2/5"; None for all.
        seed: with epoch and sample, decides random crops.

    Raises:
        ManifestError: no complete dataset there, or no such split.
        UsageError: an option that cannot be meant.

    Example:
        >>> from torch.utils.data import DataLoader                                         # doctest: +SKIP
        >>> dataset = PackedDataset("out/", transform=TrainCrop(224))                       # doctest: +SKIP
        >>> image, label = dataset[0]                     # uint8 (3, 224, 224), int        # doctest: +SKIP
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)        # doctest: +SKIP
    """

    def __init__(
        self, path: str | os.PathLike[str], *, split: str = "train", transform: Callable[..., Any] | None = None,
        normalize: Normalize = None, fields: Sequence[str] | str | None = None,
        targets: Mapping[str, TargetKind] | None = None, subset: str | npt.ArrayLike | None = None, seed: int = 0,
    ) -> None:
        source = PackedSource(path, split)
        self.source = source
        self.numbers = numbers_of(subset, source)
        self.samples = Samples(
            source, fields=field_names(fields), transform=transform, normalize=to_affine(parse_normalize(normalize)),
            targets=targets, seed=seed,
        )
        self.epoch = 0

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, or None."""
        return self.source.classes

    @property
    def targets(self) -> list[int]:
        """The label of every sample, as torchvision's datasets have it."""
        labels: list[int] = self.source.column("label")[self._all()].tolist()
        return labels

    def set_epoch(self, epoch: int) -> None:
        """Random crops of this epoch from now on (worker processes see it when they start)."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.source) if self.numbers is None else len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples at once, as DataLoader asks for a batch.

        Raises:
            IndexError: a number out of range.
            SampleError: a sample cannot be read or decoded.
        """
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not (-len(self) <= int(wanted.min()) and int(wanted.max()) < len(self)):
            raise IndexError(f"sample numbers run from 0 to {len(self) - 1}, got {list(indices)}")
        wanted = wanted % max(len(self), 1)
        reads = self.samples.reads(wanted if self.numbers is None else self.numbers[wanted])
        return [self.samples.sample(reads, j, self.epoch) for j in range(len(wanted))]

    def _all(self) -> Numbers:
        return np.arange(len(self.source)) if self.numbers is None else self.numbers


def field_names(fields: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The option `fields`, where one name may stand alone."""
    if fields is None:
        return None
    names = (fields,) if isinstance(fields, str) else tuple(fields)
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"fields takes field names, got {fields!r}")
    if len(set(names)) < len(names):
        raise UsageError(f"fields names a field twice: {', '.join(names)}")
    return names


def to_affine(mean_std: tuple[Sequence[float], Sequence[float]] | None) -> Affine | None:
    """(scale, bias) of the pixels, or None where they stay uint8."""
    return None if mean_std is None else affine(*mean_std)


def numbers_of(subset: str | npt.ArrayLike | Sequence[str] | None, source: Source) -> Numbers | None:
    """The option `subset` as sample numbers: numbers, a mask, a fold "k/n", or keys.

    Raises:
        UsageError: a key that does not exist (the first ones are named), or what `resolve_subset` refuses.
    """
    if subset is None:
        return None
    if isinstance(subset, str):
        return resolve_subset(subset, len(source))
    given = np.asarray(subset)
    if given.dtype.kind != "U":
        return resolve_subset(given if given.size else given.astype(np.int64), len(source))
    keys: list[str] = given.tolist()
    number = {key: i for i, key in enumerate(source.all_keys())}
    if missing := [key for key in keys if key not in number]:
        shown = ", ".join(map(repr, missing[:5]))
        raise UsageError(f"{len(missing)} keys of the subset are not in the dataset: {shown}")
    return resolve_subset(np.array([number[key] for key in keys], np.int64), len(source))
