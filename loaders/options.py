"""What a loader is asked for: one frozen record, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.order import Shuffle
from packer.errors import UsageError

Normalize: TypeAlias = Literal["imagenet", False] | tuple[Sequence[float], Sequence[float]] | None
EngineName: TypeAlias = Literal["auto", "thread", "process"]
TargetKind: TypeAlias = Literal["mask", "yolo", "xyxy", "image", "stored"]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ENGINES = ("auto", "thread", "process")
PRELOADS = ("memory", "decoded", "shm")
TARGETS = ("mask", "yolo", "xyxy", "image", "stored")
FOLLOWERS = ("mask", "yolo", "xyxy")  # the targets that a crop of the picture moves
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Sampling:
    """Which samples make an epoch, where it is not simply all of them once. See `loaders.order.Order`.

    Attributes:
        balance: draw every class equally often, by the index's labels.
        weights: (samples,) draw each sample in proportion; with several datasets, one weight for each of them.
        epoch_samples: samples in an epoch over all ranks; None: as many as there are.
        bucket: batches of images of like size, by the index's heights and widths: less padding.
        window_shards: for `shuffle="window"`, how many shards are mixed at a time.

    Raises:
        UsageError: balance and weights together, or a value that cannot be meant.
    """

    balance: bool = False
    weights: npt.ArrayLike | None = None
    epoch_samples: int | None = None
    bucket: bool = False
    window_shards: int = 8

    def __post_init__(self) -> None:
        if self.balance and self.weights is not None:
            raise UsageError("balance and weights are two answers to one question; give one of them")
        if self.epoch_samples is not None:
            _at_least("epoch_samples", self.epoch_samples, 1)
        _at_least("window_shards", self.window_shards, 1)
        if self.weights is not None:
            try:
                np.asarray(self.weights, np.float64)
            except (TypeError, ValueError) as error:
                raise UsageError(f"weights must be numbers, got {self.weights!r:.80}") from error


@dataclass(frozen=True, eq=False)
class LoaderOptions:
    """All options of `make_loader`, which documents them.

    Raises:
        UsageError: a value that cannot be meant; the message names the option and what it takes.
    """

    batch_size: int = 64
    transform: Callable[..., Any] | None = None
    normalize: Normalize = None
    device: str | torch.device | None = None
    shuffle: Shuffle = True
    seed: int = 0
    drop_last: bool = False
    num_workers: int | Literal["auto"] = "auto"
    engine: EngineName = "auto"
    prefetch: int | None = None
    pin_memory: bool | Literal["auto"] = "auto"
    preload: str | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    fields: tuple[str, ...] | None = None
    on_error: Literal["raise", "skip"] = "raise"
    rank: int | None = None
    world_size: int | None = None
    subset: str | npt.ArrayLike | Sequence[str] | None = None
    targets: Mapping[str, TargetKind] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    batch_transform: Callable[[Any], Any] | None = None
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    max_skipped: int = 100
    start_method: str | None = None
    threads_per_worker: int = 1
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "seed", "num_workers", "prefetch", "rank", "world_size", "memory_budget"):
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        _at_least("batch_size", self.batch_size, 1)
        _at_least("seed", self.seed, 0)
        _at_least("threads_per_worker", self.threads_per_worker, 1)
        _at_least("max_skipped", self.max_skipped, 0)
        if self.prefetch is not None:
            _at_least("prefetch", self.prefetch, 1)
        if self.memory_budget is not None:
            _at_least("memory_budget", self.memory_budget, 0, "(bytes)")
        if self.num_workers != "auto":
            _at_least("num_workers", self.num_workers, 0, "or 'auto'")
        _one_of("engine", self.engine, ENGINES)
        _one_of("on_error", self.on_error, ("raise", "skip"))
        _one_of("shuffle", self.shuffle, (True, False, "window"))
        _one_of("drop_last", self.drop_last, (True, False))
        _one_of("channels_last", self.channels_last, (True, False))
        _one_of("pin_memory", self.pin_memory, (True, False, "auto"))
        _one_of("dtype", self.dtype, DTYPES)
        _check_preload(self.preload)
        _check_device(self.device)
        if not isinstance(self.targets, Mapping):
            raise UsageError(f"targets must be like {{'mask.png': 'mask'}}, got {self.targets!r}")
        for name, kind in self.targets.items():
            _one_of(f"targets[{name!r}]", kind, TARGETS)
        if not isinstance(self.sampling, Sampling):
            raise UsageError(f"sampling must be a loaders.options.Sampling, got {self.sampling!r}")
        for name in ("transform", "collate_fn", "batch_transform"):
            _check_callable(name, getattr(self, name))
        if (self.rank is None) != (self.world_size is None):
            raise UsageError("rank and world_size go together: give both, or neither to ask torch.distributed")
        if self.rank is not None:
            _at_least("rank", self.rank, 0)
            _at_least("world_size", self.world_size, 1)
        parse_normalize(self.normalize)

    @property
    def on_device(self) -> torch.device | None:
        """The device that batches are moved to, or None where they stay on the CPU."""
        device = None if self.device is None else torch.device(self.device)
        return None if device is None or device.type == "cpu" else device

    @property
    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation of the pixels / 255 per channel; None: batches stay uint8.

        A device asks for what a network eats, so it implies ImageNet's unless `normalize` says otherwise.
        """
        return parse_normalize("imagenet" if self.normalize is None and self.device is not None else self.normalize)

    @property
    def image_dtype(self) -> torch.dtype:
        """The dtype that image batches have in the end."""
        return torch.uint8 if self.mean_and_std is None else self.dtype


def parse_normalize(normalize: Normalize) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """(mean, std), three numbers each, from what the option `normalize` takes.

    Raises:
        UsageError: neither "imagenet", False, None nor two triples, or a std that is not positive.
    """
    if normalize is None or normalize is False:
        return None
    wrong = UsageError(f"normalize must be 'imagenet', False or (mean, std) of three numbers each, got {normalize!r}")
    if normalize == "imagenet":
        return IMAGENET
    try:
        mean, std = (tuple(float(value) for value in part) for part in normalize)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0 or not all(map(math.isfinite, (*mean, *std))):
        raise wrong
    return mean, std


@dataclass(frozen=True)
class Settings:
    """What tuning decides.

    Attributes:
        num_workers: threads or processes; 0: the consumer does the work.
        engine: "thread" or "process"; None: whatever the loader has.
        prefetch: batches made ahead, in all with our loaders, per worker with torch's; None: the loader's default.
    """

    num_workers: int
    engine: EngineName | None = None
    prefetch: int | None = None


def _at_least(name: str, value: Any, least: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be an integer of at least {least}{' ' + also if also else ''}, got {value!r}")


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    # By identity of type too: 1 is not True here.
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise UsageError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _check_preload(preload: Any) -> None:
    kind, colon, _ = preload.partition(":") if isinstance(preload, str) else (preload, "", "")
    if preload is not None and (kind not in PRELOADS or (colon and kind != "shm")):
        raise UsageError(f"preload must be one of {', '.join(PRELOADS)}, or 'shm:FOLDER', got {preload!r}")


def _check_device(device: Any) -> None:
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device must be 'cpu', 'cuda', 'cuda:1' and the like, got {device!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {device!r}, and this torch finds no GPU; use device='cpu', or see nvidia-smi")


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise UsageError(f"{name} must be callable, got {type(value).__name__}")
    if isinstance(value, type) and any("__call__" in vars(cls) for cls in value.__mro__):
        raise UsageError(f"{name} is the class {value.__name__}; give an instance, {value.__name__}(…)")
