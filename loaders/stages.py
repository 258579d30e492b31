"""What each stage of a loader costs by itself: read, decode, transform, collate, hand over. One sample at a time, in
one thread, with nothing else going on, so that the stages add up to a worker's time for a sample.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from loaders.collate import fresh
from loaders.curve import Load
from loaders.decode import decode_image
from loaders.device import map_tensors
from loaders.loader import Loader
from loaders.measure import Timing, batch_samples, one_torch_thread, time_each
from loaders.order import Numbers
from loaders.samples import Reads, Samples
from packer.errors import MeasurementError, PackerError
from packer.sample import is_image_field

#: Stages of a worker, then of the process that trains.
WORKER, MAIN = "worker", "main"


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: "read", "decode", "crop and resize", "transform", "sample" (where these cannot be told apart),
            "collate", "pin", "to device".
        timing: seconds per sample.
        where: `WORKER` or `MAIN`.
        cold: for reading, the same with the page cache empty; None where that cannot be had.
    """

    name: str
    timing: Timing
    where: str = WORKER
    cold: Timing | None = None


@dataclass(frozen=True)
class Stages:
    """All stages of a loader, in order.

    Attributes:
        stages: each of them.
        sample_bytes: encoded bytes of a sample, on average; 0 where unknown.
        pixels: (height, width) of the pictures, on average; None where unknown.
        restart_markers: the share of the pictures that a seekable decoder can enter in the middle.
    """

    stages: tuple[Stage, ...]
    sample_bytes: float = 0.0
    pixels: tuple[float, float] | None = None
    restart_markers: float = 0.0

    def __getitem__(self, name: str) -> Stage | None:
        """The stage of that name, or None."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def load(self, *, without: Sequence[str] = (), cold: bool = False) -> Load:
        """What a worker spends on a sample, some stages left out; `cold`: with reads from the disk itself."""
        timings = [
            stage.cold if cold and stage.cold is not None else stage.timing
            for stage in self.stages
            if stage.where == WORKER and stage.name not in without
        ]
        return Load(sum(timing.wall_s for timing in timings), sum(timing.cpu_s for timing in timings))

    def main_s(self) -> float:
        """Seconds per sample that the training process itself spends."""
        return sum(stage.timing.wall_s for stage in self.stages if stage.where == MAIN)


def measure_stages(
    loader: Any, *, samples: int = 64, seconds: float = 1.0, transfer: Callable[[Any], Any] | None = None
) -> Stages:
    """Measure the stages of a loader of ours or a torch `DataLoader`; of anything else only whole batches.

    Args:
        loader: as it will be used.
        samples: how many samples are looked at.
        seconds: at most so long for each stage.
        transfer: moves a batch to the device, where the loop and not the loader does that.

    Raises:
        MeasurementError: a stage fails, or there are no samples.
    """
    try:
        with one_torch_thread():
            if isinstance(loader, Loader):
                found, batch = _own(loader, samples, seconds)
            elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
                found, batch = _torch(loader, samples, seconds)
            else:
                found, batch = _unknown(loader, seconds)
            return _with_device(found, batch, loader, transfer, seconds)
    except PackerError:
        raise
    except Exception as error:
        raise MeasurementError(f"the loader fails on its first samples ({type(error).__name__}: {error})") from error


def _minus(whole: Timing, part: Timing) -> Timing:
    """A stage that can only be timed together with another one, by itself."""
    return Timing(
        max(0.0, whole.median_s - part.median_s), max(0.0, whole.low_s - part.high_s),
        max(0.0, whole.high_s - part.low_s), max(0.0, whole.wall_s - part.wall_s),
        max(0.0, whole.cpu_s - part.cpu_s), whole.count,
    )


def _per(timing: Timing, samples: int) -> Timing:
    """Of a batch, per sample."""
    return Timing(timing.median_s / samples, timing.low_s / samples, timing.high_s / samples,
                  timing.wall_s / samples, timing.cpu_s / samples, timing.count)


# ---------------------------------------------------------------- our loader


def _own(loader: Loader, count: int, seconds: float) -> tuple[Stages, Any]:
    recipe = loader._recipe
    samples = recipe.samples
    total = len(samples.source)
    if total == 0 or len(loader) == 0:
        raise MeasurementError("the loader gives no batch: the dataset is empty, or smaller than one batch "
                               "with drop_last=True")
    numbers = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64))
    reads = samples.reads(numbers)
    if reads.around is not None:  # slabs share slices: reading is not by sample
        return _slabs(loader, numbers, seconds)
    names = list(reads.fetch)

    def read(j: int) -> list[Any]:
        return [reads.read(name, j) for name in names]

    cold = None
    if _evict(samples, numbers):
        cold = time_each(read, len(numbers), warm_up=0, budget_s=seconds)
    warm = time_each(read, len(numbers), budget_s=seconds)
    numbers = numbers[: warm.count]
    stored = [read(j) for j in range(len(numbers))]
    stages = [Stage("read", warm, cold=cold), *_decoding(loader, numbers, names, stored, seconds)]

    draft = recipe.draft(numbers, 0, fresh)
    recipe.fill(draft, 0, len(numbers))
    made = recipe.finish(draft)
    stages.append(Stage("collate", _per(time_each(lambda _: recipe.finish(draft), 5, budget_s=seconds), len(numbers))))
    return _facts(tuple(stages), names, stored, samples), made.batch


def _slabs(loader: Loader, numbers: Numbers, seconds: float) -> tuple[Stages, Any]:
    """Samples that are made of several slices, as a whole."""
    recipe = loader._recipe
    draft = recipe.draft(numbers, 0, fresh)
    whole = time_each(lambda j: recipe.fill(draft, j, j + 1), len(numbers), budget_s=seconds)
    recipe.fill(draft, 0, len(numbers))
    collate = time_each(lambda _: recipe.finish(draft), 5, budget_s=seconds)
    return Stages((Stage("sample", whole), Stage("collate", _per(collate, len(numbers))))), recipe.finish(draft).batch


def _is_image(samples: Samples) -> bool:
    """Whether the picture is an encoded image, not an array."""
    return samples.picture is not None and is_image_field(samples.picture.split(";")[0])


def _decoding(
    loader: Loader, numbers: Numbers, names: list[str], stored: list[list[Any]], seconds: float
) -> list[Stage]:
    """Decoding and what follows, told apart by doing it again on pixels that are decoded already."""
    recipe = loader._recipe
    samples = recipe.samples
    whole = _filling(loader, numbers, names, stored, seconds)
    if samples.picture is None or not _is_image(samples):
        return [Stage("decode", whole)]
    at = names.index(samples.picture)
    orient = bool(getattr(samples.transform, "orient", False))
    decoded = [list(values) for values in stored]
    for values in decoded:
        values[at] = _ppm(decode_image(values[at], orient=orient))
    rest = _filling(loader, numbers, names, decoded, seconds)
    name = "crop and resize" if samples.ours else "transform"
    return [Stage("decode", _minus(whole, rest)), Stage(name, rest)]


def _filling(loader: Loader, numbers: Numbers, names: list[str], stored: list[list[Any]], seconds: float) -> Timing:
    """Everything between the bytes in memory and the batch."""
    recipe = loader._recipe
    draft = recipe.draft(numbers, 0, fresh)

    def stored_under(i: int) -> Callable[[int], Any]:
        return lambda j: stored[j][i]

    draft.reads = Reads(numbers.tolist(), {name: [stored_under(i)] for i, name in enumerate(names)})
    return time_each(lambda j: recipe.fill(draft, j, j + 1), len(numbers), budget_s=seconds)


def _ppm(pixels: Any) -> bytes:
    """Pixels (H, W, 3) as the simplest image file there is: decoding it costs nothing."""
    header: bytes = b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0])
    return header + bytes(pixels.tobytes())


def _facts(stages: tuple[Stage, ...], names: list[str], stored: list[list[Any]], samples: Samples) -> Stages:
    sizes = [sum(len(data) for data in values if data is not None) for values in stored]
    if samples.picture is None or not _is_image(samples):
        return Stages(stages, float(np.mean(sizes)))
    at = names.index(samples.picture)
    pictures = [decode_image(values[at]).shape[:2] for values in stored[:16] if values[at] is not None]
    height, width = (float(side) for side in np.mean(pictures, axis=0))
    marked = [bytes(values[at]).find(b"\xff\xdd") >= 0 for values in stored if values[at] is not None]
    return Stages(stages, float(np.mean(sizes)), (height, width), float(np.mean(marked)))


def _evict(samples: Samples, numbers: Numbers) -> bool:
    """Ask the kernel to forget these samples' bytes; False where they do not lie in files that we know."""
    source: Any = samples.source
    if not hasattr(os, "posix_fadvise") or not hasattr(source, "folder"):
        return False
    split = getattr(source, "split", None)
    with contextlib.suppress(OSError, AttributeError, KeyError):
        for number in numbers.tolist():
            for field in samples.read_fields:
                if split is not None:
                    row = split.rows[number]
                    offset, length = int(row[f"{field}:offset"]), int(row[f"{field}:length"])
                    if length > 0:
                        os.posix_fadvise(split.descriptor(int(row["shard"])), offset, length, os.POSIX_FADV_DONTNEED)
                elif path := source.path(number, field):
                    _forget(os.path.join(source.folder, path))
        return True
    return False


def _forget(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- torch's loader, and any other


def _torch(loader: DataLoader[Any], count: int, seconds: float) -> tuple[Stages, Any]:
    dataset: Any = loader.dataset
    total = len(dataset)
    if total == 0 or len(loader) == 0:
        raise MeasurementError("the loader gives no batch: the dataset is empty, or smaller than one batch "
                               "with drop_last=True")
    indices = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)).tolist()
    whole = time_each(lambda j: dataset[indices[j]], len(indices), budget_s=seconds)
    indices = indices[: whole.count]
    values = [dataset[index] for index in indices[: loader.batch_size or 1]]
    size = 0.0
    stages = [Stage("sample", whole)]
    if all(hasattr(dataset, name) for name in ("samples", "loader", "transform")):  # as torchvision's ImageFolder
        stages, size = _image_folder(dataset, indices, whole, seconds)
    collate = time_each(lambda _: loader.collate_fn(values), 5, budget_s=seconds)
    if loader.batch_size is not None:
        stages.append(Stage("collate", _per(collate, len(values))))
    return Stages(tuple(stages), size), loader.collate_fn(values if loader.batch_size is not None else values[0])


def _image_folder(
    dataset: Any, indices: list[int], whole: Timing, seconds: float
) -> tuple[list[Stage], float]:
    paths = [os.fspath(dataset.samples[index][0]) for index in indices]

    def read(j: int) -> None:
        with open(paths[j], "rb") as f:
            f.read()

    for path in paths:
        _forget(path)
    cold = time_each(read, len(paths), warm_up=0, budget_s=seconds)
    warm = time_each(read, len(paths), budget_s=seconds)
    loaded = time_each(lambda j: dataset.loader(paths[j]), len(paths), budget_s=seconds)
    stages = [Stage("read", warm, cold=cold), Stage("decode", _minus(loaded, warm)),
              Stage("transform", _minus(whole, loaded))]
    return stages, float(np.mean([os.path.getsize(path) for path in paths]))


def _unknown(loader: Any, seconds: float) -> tuple[Stages, Any]:
    """A loader that only gives batches: how long they take, if it makes them here (num_workers=0)."""
    iterator = iter(loader)
    batch = next(iterator, None)
    if batch is None:
        raise MeasurementError("the loader gives no batch: is the dataset empty, smaller than one batch with "
                               "drop_last=True, or the iterator used up already?")
    samples = batch_samples(batch)
    try:
        timing = time_each(lambda _: next(iterator), 16, warm_up=0, budget_s=seconds)
    except StopIteration:  # a short one: another pass, timed as a whole
        passes = time_each(lambda _: sum(1 for _ in loader), 1, warm_up=0)
        batches = max(1, sum(1 for _ in loader))
        timing = _per(passes, batches)
    return Stages((Stage("sample", _per(timing, max(1, samples))),)), batch


def _with_device(
    found: Stages, batch: Any, loader: Any, transfer: Callable[[Any], Any] | None, seconds: float
) -> Stages:
    """The stages, and those that take a batch to its device, if it goes to one."""
    device = loader.options.on_device if isinstance(loader, Loader) else None
    samples = max(1, batch_samples(batch))
    stages = list(found.stages)
    if transfer is None and device is None:
        return found
    move = transfer or (lambda value: map_tensors(lambda tensor: tensor.to(device), value))
    if device is not None and device.type == "cuda":
        pin = time_each(lambda _: map_tensors(torch.Tensor.pin_memory, batch), 5, budget_s=seconds)
        stages.append(Stage("pin", _per(pin, samples)))

    def there(_: int) -> None:
        move(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    stages.append(Stage("to device", _per(time_each(there, 8, budget_s=seconds), samples), MAIN))
    return Stages(tuple(stages), found.sample_bytes, found.pixels, found.restart_markers)
