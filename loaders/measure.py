"""The one stopwatch: calls, steps and whole loaders, timed alike.

Every figure comes with a warm-up that does not count, and with an interval: a median with its 95 %
confidence interval from order statistics, a rate with that of the mean over rounds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from packer.errors import MeasurementError, PackerError
from packer.limits import read_text

#: Standard normal quantile of a two-sided 95 % interval.
_Z = 1.96


def _queued_s() -> float:
    """From Linux' scheduler statistics; 0 where there are none."""
    words = (read_text("/proc/thread-self/schedstat") or "").split()
    return int(words[1]) / 1e9 if len(words) > 1 and words[1].isdigit() else 0.0


@dataclass(frozen=True)
class Clock:
    """Where seconds come from.

    Attributes:
        wall: seconds that have passed.
        cpu: CPU seconds of the calling thread.
        queued: seconds that the calling thread was ready and waited for a CPU that others had.
    """

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time
    queued: Callable[[], float] = _queued_s


CLOCK = Clock()


@dataclass(frozen=True)
class Timing:
    """Seconds that something takes, per sample or per call.

    Attributes:
        median_s: wall seconds, the median.
        low_s: lower end of the median's 95 % interval.
        high_s: its upper end.
        wall_s: wall seconds, the mean: what throughput follows from where a few samples take very long.
        cpu_s: CPU seconds, the mean.
        count: how many were timed.
    """

    median_s: float
    low_s: float
    high_s: float
    wall_s: float
    cpu_s: float
    count: int

    @property
    def idle_s(self) -> float:
        """Wall seconds, on average, in which the CPU had nothing to do."""
        return max(0.0, self.wall_s - self.cpu_s)


NOTHING = Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the 95 % confidence interval of a median, from order statistics.

    The k-th smallest value lies below the median with binomial probability; ranks n/2 ± 1.96·√n/2 bound
    it (normal approximation). Fewer than six values bound nothing better than their extremes.

    >>> median_interval([3.0, 1.0, 2.0])
    (2.0, 1.0, 3.0)
    """
    ranked = sorted(values)
    count = len(ranked)
    reach = _Z * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    return statistics.median(ranked), ranked[low], ranked[high]


def timing(walls: Sequence[float], cpus: Sequence[float]) -> Timing:
    """A `Timing` of single values in seconds, at least one."""
    # The clock of threads may tick more coarsely than the wall's; nothing takes longer on the CPU than in all.
    wall, cpu = statistics.fmean(walls), statistics.fmean(cpus)
    return Timing(*median_interval(walls), wall, min(wall, cpu), len(walls))


def time_each(
    function: Callable[[int], object], count: int, *, warm_up: int = 2, budget_s: float = 1.0, clock: Clock = CLOCK
) -> Timing:
    """Time `function(0)`, `function(1)` … one by one, in this thread.

    Args:
        function: does the work for one sample.
        count: at most so many calls, at least 1.
        warm_up: that many calls come before and do not count (of the last samples, so that the first are cold).
        budget_s: after this many seconds no further call begins.
        clock: for tests.
    """
    for i in range(min(warm_up, count - 1)):
        function(count - 1 - i)
    walls: list[float] = []
    cpus: list[float] = []
    begun = clock.wall()
    for i in range(count):
        queued, wall, cpu = clock.queued(), clock.wall(), clock.cpu()
        function(i)
        cpus.append(clock.cpu() - cpu)
        walls.append(clock.wall() - wall)
        # Waiting for a CPU that another program has is not the function's own.
        walls[-1] = max(walls[-1] - (clock.queued() - queued), cpus[-1])
        if clock.wall() - begun > budget_s:
            break
    return timing(walls, cpus)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch computes in this thread alone, as it does in a loader's worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copy_bandwidth(nbytes: int = 64 << 20) -> float:
    """Bytes a second that one thread copies from memory to memory; takes some 30 ms."""
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    return nbytes / max(time_each(lambda _: np.copyto(target, source), 3, warm_up=1).median_s, 1e-9)


# ---------------------------------------------------------------- steps


def time_step(step: Callable[[Any], object], batch: Any, *, runs: int = 10, clock: Clock = CLOCK) -> Timing:
    """Time a training step on one batch: three calls to warm up, then `runs`, the device waited for.

    Raises:
        MeasurementError: the step fails; its error is chained.
    """

    def once(_: int) -> None:
        step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    try:
        return time_each(once, runs, warm_up=3, budget_s=5.0, clock=clock)
    except Exception as error:
        raise MeasurementError(f"the step fails on the first batch ({type(error).__name__}: {error}); "
                               "try it by hand on next(iter(loader))") from error


def batch_samples(batch: Any) -> int:
    """How many samples a batch holds: the length of the first tensor, array or list in it.

    >>> batch_samples((torch.zeros(8, 3), torch.zeros(8))), batch_samples({"text": ["a", "b"]}), batch_samples(5)
    (8, 2, 1)
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        return batch_samples(next(iter(batch.values()), None))
    if isinstance(batch, tuple):
        return batch_samples(batch[0]) if batch else 1
    if isinstance(batch, list):
        return batch_samples(batch[0]) if batch and isinstance(batch[0], torch.Tensor | Mapping | tuple) else len(batch)
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 1


# ---------------------------------------------------------------- whole loaders


@dataclass(frozen=True)
class Rate:
    """How fast a loader gives samples to somebody who does nothing else.

    Attributes:
        per_s: samples a second, after the warm-up.
        low: lower end of the 95 % interval over rounds.
        high: its upper end.
        samples: how many samples were counted.
        first_batch_s: from `iter()` to the first batch.
        cost_s: seconds that the whole measurement took, with start and end of the workers.
        rough: the loader was at its end before two rounds were full: start-up is part of the rate.
    """

    per_s: float
    low: float
    high: float
    samples: int
    first_batch_s: float
    cost_s: float
    rough: bool = False


@dataclass
class _Arrivals:
    """When the batches of one pass arrived, and how many samples each had."""

    begun: float
    times: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def rounds(self, length: int, warm_up: int) -> list[tuple[int, float]]:
        """(samples, seconds) of each full round of `length` batches after the warm-up."""
        ends = range(warm_up - 1, len(self.times), length)
        return [
            (sum(self.samples[start + 1 : end + 1]), self.times[end] - self.times[start])
            for start, end in itertools.pairwise(ends)
        ]

    def whole(self) -> tuple[int, float]:
        """(samples, seconds) of the pass from `iter()` on: batches that arrive together tell nothing else."""
        return sum(self.samples), self.times[-1] - self.begun


def measure_rate(
    loader: Iterable[Any], *, round_batches: int = 1, warm_up: int = 1, seconds: float = 1.0, clock: Clock = CLOCK
) -> Rate:
    """Iterate a loader as fast as it goes, over several epochs where one is too short.

    Workers that make whole batches finish them about together, so the rate is taken over full rounds of one
    batch from each.

    Args:
        loader: gives batches each time it is iterated, or once.
        round_batches: workers that make whole batches; 1 where they share a batch.
        warm_up: batches that come first and do not count, at least 1.
        seconds: how long to count after the warm-up; slow loaders get three times as long to finish two rounds.
        clock: for tests.

    Raises:
        MeasurementError: the loader gives no batch, or fails; its error is chained.
    """
    began = clock.wall()
    passes: list[_Arrivals] = []
    done: list[tuple[int, float]] = []
    # An epoch too short for a round tells little, however often: then the time alone decides.
    while not (passes and not done and clock.wall() - began >= seconds) and not _enough(
        done, seconds, clock.wall() - began
    ):
        arrivals = _Arrivals(clock.wall())
        passes.append(arrivals)
        before = list(done)
        for _ in _passing(loader, arrivals, clock):
            done = before + arrivals.rounds(round_batches, warm_up)
            if _enough(done, seconds, clock.wall() - began):
                break
        if not arrivals.times:
            passes.pop()
            break
    if not passes:
        raise MeasurementError("the loader gives no batch: is the dataset empty, smaller than one batch with "
                               "drop_last=True, or the iterator used up already?")
    first = passes[0].times[0] - passes[0].begun
    rough = not done
    return _rate(done or [one.whole() for one in passes], first, clock.wall() - began, rough=rough)


def _enough(done: list[tuple[int, float]], seconds: float, elapsed: float) -> bool:
    """Whether to stop: two rounds and the time, or one round and three times the time."""
    counted = sum(took for _, took in done)
    return bool(done) and ((len(done) >= 2 and counted >= seconds) or elapsed >= 3 * seconds)


def _passing(loader: Iterable[Any], arrivals: _Arrivals, clock: Clock) -> Iterator[None]:
    """Note when each batch of one pass arrives; closes the iterator at the end, come what may."""
    iterator: Iterator[Any] | None = None
    try:
        iterator = iter(loader)
        for batch in iterator:
            arrivals.times.append(clock.wall())
            arrivals.samples.append(batch_samples(batch))
            del batch  # its memory is wanted for the next one
            yield
    except PackerError:
        raise
    except Exception as error:
        raise MeasurementError(
            f"the loader fails after {len(arrivals.times)} batches ({type(error).__name__}: {error})"
        ) from error
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()


def _rate(rounds: list[tuple[int, float]], first_s: float, cost_s: float, *, rough: bool) -> Rate:
    samples, seconds = sum(count for count, _ in rounds), sum(took for _, took in rounds)
    mean = samples / max(seconds, 1e-9)
    rates = [count / max(took, 1e-9) for count, took in rounds]
    half = _Z * statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else mean / 2
    return Rate(mean, max(0.0, mean - half), mean + half, samples, first_s, cost_s, rough)
