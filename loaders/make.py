"""`make_loader`: one verb, with the same words, for every kind of data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch

from loaders.dataset import field_names
from loaders.loader import Loader
from loaders.options import EngineName, LoaderOptions, Normalize, Sampling, TargetKind
from loaders.order import Shuffle
from loaders.source import ConcatSource, Source
from packer.errors import UsageError


class LoaderMaker:
    """A `make_loader`. Loader modules differ only in how they open their data.

    Args:
        open_source: gives the samples of a split: called with the path, the split's name and the options.
    """

    def __init__(self, open_source: Callable[[str, str, LoaderOptions], Source]) -> None:
        self._open_source = open_source

    def __call__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        split: str = "train",
        batch_size: int = 64,
        transform: Callable[..., Any] | None = None,
        normalize: Normalize = None,
        device: str | torch.device | None = None,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        num_workers: int | Literal["auto"] = "auto",
        engine: EngineName = "auto",
        prefetch: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        preload: str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        fields: Sequence[str] | str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        rank: int | None = None,
        world_size: int | None = None,
        subset: str | npt.ArrayLike | Sequence[str] | None = None,
        targets: Mapping[str, TargetKind] | None = None,
        sampling: Sampling | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        max_skipped: int = 100,
        start_method: str | None = None,
        threads_per_worker: int = 1,
        memory_budget: int | None = None,
    ) -> Loader:
        """A loader of one split.

        Args:
            path: the packed folder (or, in `loaders.folder_loader`, the folder of files). Several are mixed, in
                the shares that `sampling=Sampling(weights=…)` gives, or else each once per epoch.
            split: name of the split.
            batch_size: samples per batch, on each rank.
            transform: `TrainCrop`, `EvalCrop`, … of `loaders.transforms` (decode no more than they need), for CT
                `Window` and `Slab`, or any callable that takes a PIL image or a uint8 tensor. None: pictures keep
                their size.
            normalize: "imagenet" or (mean, std) gives float images; None or False uint8.
            device: None leaves batches on the CPU. "cuda": they arrive there, copied while the step before runs.
                With a device ("cpu" too) images are normalised, ImageNet's way unless `normalize` says otherwise.
            shuffle: True, False, or "window" (see `loaders.order.Order`); None: in the split `train` only.
            seed: decides, with the epoch, order and crops.
            drop_last: leave out the last, smaller batch. Otherwise, over several ranks, training repeats up to
                `world_size - 1` samples so that all ranks have the same number of batches, and
                evaluation (`shuffle=False`) gives every sample exactly once.
            num_workers: threads or processes; "auto": what `packer tune` found for this dataset, transform and machine,
                else one for each CPU that this rank may use (see `loaders.auto`). 0: none.
            engine: "thread", "process", or "auto": threads unless `transform` or `collate_fn` come from elsewhere.
            prefetch: batches made ahead; None: 3 with threads, 2 per process.
            pin_memory: page-locked batches; "auto": where there is a GPU.
            preload: "memory" reads all shards into memory first, "decoded" decodes all pictures into memory,
                "shm" (or "shm:FOLDER") stages the shards there and removes them at exit.
            collate_fn: makes a batch of a list of samples; None: `loaders.pad_collate`.
            fields: None for `(images, labels)`. Otherwise what the dict of a batch holds: field names,
                alternatives ("jpg;png"), "__key__", "__path__", "__index__", "__label__".
            on_error: "skip" leaves out samples whose bytes are bad, and keeps account in `loader.skipped`.
            rank: this process among `world_size`; None: as torch.distributed says when the epoch begins.
            world_size: see `rank`.
            subset: sample numbers, a mask, keys, or a fold: "2/5", or "-2/5" for all but it.
            targets: how fields beside the picture are read: "mask", "yolo", "xyxy" (these follow the picture's
                crop), "image" (RGB, whole), "stored" (whole, channels and bits as in the file: 16-bit grey is uint16).
            sampling: class-balanced, weighted, bucketed or longer epochs.
            batch_transform: called with each batch on its device, for MixUp and the like.
            dtype: of normalised images: float32, float16 or bfloat16.
            channels_last: memory format of image batches.
            max_skipped: more skipped samples in an epoch than this are an error.
            start_method: of worker processes: "fork", "forkserver", "spawn"; None: multiprocessing's own.
            threads_per_worker: threads in each worker process.
            memory_budget: bytes that `preload` may take; None: four fifths of what is free.

        Returns:
            An iterable of `(images, labels)`: uint8 (B, 3, H, W), or normalised `dtype`, and int64 (B,), −1 where a
            sample has no label. Pictures that keep their different sizes come as `Padded`. With `fields`, a dict.
            CT: int16 Hounsfield units, or with a `Window` float32 in [0, 1]; slices (B, C, H, W), volumes
            (B, C, D, H, W).

        Raises:
            ManifestError: no complete dataset there, or no such split.
            UsageError: an option that cannot be meant.
            SampleError: while iterating, a sample that cannot be read, decoded or transformed: shard, key and cause.
            WorkerDiedError: while iterating, a worker process that was killed.

        Example:
            >>> from loaders.transforms import TrainCrop
            >>> from loaders.webds_loader import make_loader
            >>> loader = make_loader("out/", batch_size=256, transform=TrainCrop(224))      # doctest: +SKIP
            >>> images, labels = next(iter(loader))                                         # doctest: +SKIP
            >>> images.shape, images.dtype                                                  # doctest: +SKIP
            (torch.Size([256, 3, 224, 224]), torch.uint8)
        """
        options = LoaderOptions(
            batch_size=batch_size, transform=transform, normalize=normalize, device=device,
            shuffle=split == "train" if shuffle is None else shuffle, seed=seed,
            drop_last=False if drop_last is None else drop_last, num_workers=num_workers, engine=engine,
            prefetch=prefetch, pin_memory=pin_memory, preload=preload, collate_fn=collate_fn,
            fields=field_names(fields), on_error=on_error, rank=rank, world_size=world_size, subset=subset,
            targets={} if targets is None else targets, sampling=Sampling() if sampling is None else sampling,
            batch_transform=batch_transform, dtype=dtype, channels_last=channels_last, max_skipped=max_skipped,
            start_method=start_method, threads_per_worker=threads_per_worker, memory_budget=memory_budget,
        )
        if isinstance(path, str | os.PathLike):
            return Loader(self._open_source(os.fspath(path), split, options), options)
        if not isinstance(path, Sequence) or not path:
            raise UsageError(f"path must be a folder, or several in a list, got {path!r}")
        return Loader(ConcatSource([self._open_source(os.fspath(part), split, options) for part in path]), options)
