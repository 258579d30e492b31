"""What holds a training loop up, and what each remedy would gain: pure functions of what was measured.

The loader makes samples while the step runs, so a loop gives 1 / max(step, 1/loader) samples a second; what
cannot overlap (a copy that waits) adds to the step. A remedy changes what a sample costs, or how many
workers there are; the model of `loaders.curve` says what then comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from loaders.curve import Load, predict
from loaders.options import EngineName
from loaders.stages import Stages

#: The limits, and what people call them.
LIMITS = {
    "step": "the step itself", "transfer": "the transfer to the device", "CPU": "the CPUs", "storage": "the storage",
    "memory": "memory bandwidth", "one core": "one core: the main process, or the GIL",
    "workers": "too few workers",
}
#: A loop that waits less than this share of its time is fed.
FED = 0.1
#: A remedy that gains less is not worth a line.
WORTH = 1.05
#: What decoding a crop costs of seekable pictures beside others; the mean over `TrainCrop`'s random crops.
_SEEKABLE = 0.45
#: Bytes that memory moves for each byte of a batch: written, read, copied into place.
_TRAFFIC = 4


@dataclass(frozen=True)
class Observed:
    """One run of a loop, and what was measured beside it.

    Attributes:
        samples_per_s: what the loop came to.
        wait_s: seconds per sample spent waiting for the loader.
        step_s: seconds per sample that the step took.
        transfer_s: seconds per sample spent in moving batches to the device, if the loop does that.
        workers: of the loader; 0: none.
        engine: "thread", "process", or None if unknown.
        cpus: CPUs that may be used.
        process_cpu: CPU seconds of this process per second, all its threads.
        stages: what each stage costs.
        cold: whether samples came from the disk itself rather than the page cache.
        batch_bytes: bytes of a batch per sample.
        bandwidth: bytes a second that memory copies; 0 where unknown.
        serial_s: seconds per sample in which a worker holds the GIL; 0 where unknown.
    """

    samples_per_s: float
    wait_s: float
    step_s: float
    transfer_s: float
    workers: int
    engine: EngineName | None
    cpus: float
    process_cpu: float
    stages: Stages
    cold: bool = False
    batch_bytes: float = 0.0
    bandwidth: float = 0.0
    serial_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """The share of the loop's time spent waiting for the loader."""
        whole = self.wait_s + self.step_s + self.transfer_s
        return self.wait_s / whole if whole else 0.0

    @property
    def load(self) -> Load:
        """What a sample costs the loader."""
        ceiling = self.bandwidth / (_TRAFFIC * self.batch_bytes) if self.bandwidth and self.batch_bytes else math.inf
        return replace(self.stages.load(cold=self.cold), serial_s=self.serial_s, ceiling_per_s=ceiling)

    def loop_rate(self, loader_rate: float) -> float:
        """Samples a second of a loop over a loader that gives so many."""
        busy = self.step_s + self.transfer_s
        if self.workers == 0:
            return 1 / (busy + 1 / loader_rate)
        return 1 / max(busy, 1 / loader_rate)


def capacities(seen: Observed) -> dict[str, float]:
    """Samples a second that each resource could give if the others were infinite."""
    load, busy = seen.load, seen.step_s + seen.transfer_s
    read = seen.stages["read"] or seen.stages["sample"]
    timing = None if read is None else read.cold if seen.cold and read.cold is not None else read.timing
    waits = 0.0 if timing is None else timing.idle_s
    workers = max(seen.workers, 1) / max(load.wall_s, 1e-9)
    # Workers that wait for the disk most of the time are not too few: the disk is slow.
    found = {
        "CPU": seen.cpus / max(load.cpu_s, 1e-9),
        "storage" if waits > 0.5 * load.wall_s else "workers": workers,
        "memory": load.ceiling_per_s,
    }
    if load.serial_s:
        found["one core"] = 1 / load.serial_s
    if busy:
        found["transfer" if seen.transfer_s > seen.step_s else "step"] = 1 / busy
    return found


def find_limit(seen: Observed) -> str:
    """Which of `LIMITS` holds the loop up: the one with the least capacity, unless the run shows another.

    A loop that hardly waits is held up by its own step or copy. One that waits while this process keeps
    just one core busy, far below what the stages allow, is held up by what runs in one thread at a time.
    """
    found = capacities(seen)
    busy = {name: found.pop(name) for name in ("step", "transfer") if name in found}
    if seen.wait_share < FED and busy:
        return next(iter(busy))
    if seen.transfer_s > seen.wait_s and busy:
        return next(iter(busy))
    name = min(found, key=lambda each: found[each])
    one_core = 0.8 <= seen.process_cpu <= 1.2 and seen.cpus >= 2 and seen.workers > 1
    if one_core and seen.samples_per_s < 0.7 * found[name]:
        return "one core"
    # With a worker for each CPU it is the CPUs that are used up, not the workers that are too few.
    if name == "workers" and found["CPU"] <= found["workers"] * 1.1:
        return "CPU"
    return name


@dataclass(frozen=True)
class Remedy:
    """Something that may help.

    Attributes:
        name: of the table: "more workers", "pack", "seekable JPEG", "pre-resize", "thread engine", "uint8",
            "pin_memory", "preload", "faster disk".
        how: what to do, in words or code.
        predicted_per_s: samples a second of the loop afterwards.
        gain: that beside what the loop gives now; 1.0 is nothing.
        workers: for "more workers", how many.
        measured_per_s: samples a second when it was tried; None: it was not.
        measured_gain: that beside the same trial without the remedy.
    """

    name: str
    how: str
    predicted_per_s: float
    gain: float
    workers: int = 0
    measured_per_s: float | None = None
    measured_gain: float | None = None


def remedies(
    seen: Observed, *, packed: bool, ours: bool = True, normalized: float = 0.0, most: int = 32,
    cuda: bool = False, pinned: bool = False, preloads: bool = True,
) -> list[Remedy]:
    """What would help, the best first, with the gain that the model predicts.

    Args:
        seen: the run.
        packed: the samples lie in shards already.
        ours: it is a loader of ours: packing, preloading and the thread engine are an option or a line away.
        normalized: seconds per sample that workers spend on making floats of bytes.
        most: the largest number of workers to think of.
        cuda: there is a GPU that batches are copied to.
        pinned: batches are made in page-locked memory.
        preloads: the dataset fits into memory.
    """
    now = _rate(seen, seen.load, seen.workers)
    found = []
    for name, how, load, workers in _changes(seen, packed, ours, normalized, most, preloads):
        then = _rate(seen, load, workers)
        if then >= WORTH * now:
            gain = then / now
            found.append(Remedy(name, how, seen.samples_per_s * gain, gain, workers if name == "more workers" else 0))
    if cuda and not pinned and seen.transfer_s:
        halved = replace(seen, transfer_s=seen.transfer_s / 2)  # pageable memory is copied twice
        gain = _rate(halved, seen.load, seen.workers) / now
        if gain >= WORTH:
            found.append(Remedy("pin_memory", "pin_memory=True, and .to(device, non_blocking=True)",
                                seen.samples_per_s * gain, gain))
    return sorted(found, key=lambda remedy: -remedy.gain)


def _rate(seen: Observed, load: Load, workers: int) -> float:
    """Samples a second of the loop, by the model."""
    return seen.loop_rate(predict(load, workers, seen.cpus))


def _changes(
    seen: Observed, packed: bool, ours: bool, normalized: float, most: int, preloads: bool
) -> Iterator[tuple[str, str, Load, int]]:
    """(name, what to do, what a sample then costs, workers) of each remedy that applies."""
    load, stages, workers = seen.load, seen.stages, seen.workers
    knee = _knee(load, seen.cpus, most)
    if knee > workers:
        yield "more workers", f"num_workers={knee}", load, knee
    read, decode, resize = stages["read"], stages["decode"], stages["crop and resize"]
    if load.serial_s and seen.engine == "thread":
        yield "process engine", "engine='process': each worker has a GIL of its own", replace(load, serial_s=0), workers
    if read is not None:
        timing = read.cold if seen.cold and read.cold is not None else read.timing
        no_wait = replace(load, wall_s=load.wall_s - timing.idle_s)
        if not packed:
            saved = 0.5 * timing.wall_s  # opening and closing a small file costs about as much as reading it
            yield "pack", "packer shard SRC OUT: one read a sample instead of open, read, close", _less(
                load, saved + timing.idle_s / 2, 0.5 * timing.cpu_s), workers
        yield "faster disk", "a local SSD, or preload='shm:FOLDER' there", no_wait, workers
        if preloads and ours:
            yield "preload", "preload='memory'", _less(load, timing.wall_s, timing.cpu_s), workers
    if decode is not None:
        cost = decode.timing
        if ours and resize is not None and stages.restart_markers < 0.5:
            yield "seekable JPEG", "packer shard --seekable-jpeg: lossless, only the crop is decoded", _less(
                load, (1 - _SEEKABLE) * cost.wall_s, (1 - _SEEKABLE) * cost.cpu_s), workers
        if stages.pixels is not None and min(stages.pixels) > 1.2 * 256:
            share = (256 / min(stages.pixels)) ** 2
            yield "pre-resize", "packer shard --resize 256: smaller pictures, if 256 pixels are enough", _less(
                load, (1 - share) * cost.wall_s, (1 - share) * cost.cpu_s), workers
    if normalized:
        yield "uint8", "normalize=None and device='cuda': bytes travel, the device makes floats of them", _less(
            load, normalized, normalized), workers


def _less(load: Load, wall_s: float, cpu_s: float) -> Load:
    return replace(load, wall_s=max(load.wall_s - wall_s, 1e-6), cpu_s=max(load.cpu_s - cpu_s, 1e-7))


def _knee(load: Load, cpus: float, most: int) -> int:
    """The smallest number of workers that gives 97 % of what the most give."""
    target = 0.97 * predict(load, most, cpus)
    return next(count for count in range(1, most + 1) if predict(load, count, cpus) >= target)
