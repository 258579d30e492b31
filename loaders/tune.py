"""Choose workers, engine and prefetch by a model and a few measurements, and say why.

    from loaders.tune import tune
    print(tune(make_loader("out/", batch_size=256, transform=TrainCrop(224)), step_ms=180).code)

What happens: some batches are made in this process, which tells what a sample costs in wall and CPU time; the
model (`loaders.curve`) says where more workers stop paying; that count and a few others are measured, workers and
all; the smallest count that is good enough is chosen. A grid search takes five times as long or more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from loaders.curve import HEADROOM, NEAR, Choice, Load, Search, choose, curve, field_rule, predict
from loaders.loader import Loader
from loaders.measure import CLOCK, Clock, batch_samples, measure_rate, one_torch_thread, time_step
from loaders.options import EngineName, Settings
from loaders.remember import key_of, remember
from loaders.resources import memory_headroom, shm_free, usable_cpus
from loaders.subject import Factory, OwnSubject, Subject, batch_bytes, subject_of
from packer.errors import MeasurementError, PackerError, UsageError

#: The largest counts that are tried without being asked for: per CPU, and where samples mostly wait.
_PER_CPU, _MOST_WAITING, _MOST = 4, 32, 64
#: Batch times that vary by more than this (standard deviation / mean) need more batches ahead.
_UNEVEN = 0.5
#: The share of what is free that batches under way may take.
_SHARE = 0.5


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        engine: "thread" or "process"; None: the loader's own.
        num_workers: how many.
        per_s: samples a second.
        low: lower end of the 95 % interval.
        high: its upper end.
        cost_s: seconds that it took.
    """

    engine: EngineName | None
    num_workers: int
    per_s: float
    low: float
    high: float
    cost_s: float


@dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
        num_workers: the choice.
        engine: "thread" or "process"; None: the loader has but one.
        prefetch: batches ahead; None: the loader's default is right.
        per_s: samples a second that the choice gave.
        demand_per_s: samples a second that the step takes; None: no step was given.
        feasible: whether the demand is met; True without a step.
        reason: why, in a sentence.
        code: the settings as Python.
        remedies: what would help where the demand is not met.
        rule_of_thumb: what min(cores, load time / step time) says.
        cpus: CPUs that may be used.
        load: what one sample costs.
        predicted: (workers, samples a second) before anything was measured.
        measured: what was measured, in turn.
        cost_s: seconds that all of it took.
        remembered: the file that `num_workers="auto"` will read, or None.
    """

    num_workers: int
    engine: EngineName | None
    prefetch: int | None
    per_s: float
    demand_per_s: float | None
    feasible: bool
    reason: str
    code: str
    remedies: tuple[str, ...]
    rule_of_thumb: int
    cpus: float
    load: Load
    predicted: tuple[tuple[int, float], ...]
    measured: tuple[Point, ...]
    cost_s: float
    remembered: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is infinite is None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


@dataclass(frozen=True)
class Probe:
    """Some batches made in this process.

    Attributes:
        load: what one sample cost.
        samples: samples in a batch.
        nbytes: bytes of a batch.
        variation: standard deviation / mean of the batches' times.
    """

    load: Load
    samples: int
    nbytes: int
    variation: float

    def for_batches_of(self, samples: int) -> Probe:
        """The same for another batch size; unevenness evens out in larger batches."""
        times = samples / max(self.samples, 1)
        return replace(self, samples=samples, nbytes=int(self.nbytes * times), variation=self.variation / times**0.5)


def tune(
    loader: Loader | Factory | Any,
    *,
    step: Callable[[Any], object] | None = None,
    step_ms: float | None = None,
    max_workers: int | None = None,
    engine: EngineName = "auto",
    seconds: float = 1.0,
    budget_s: float = 60.0,
    ranks: int = 1,
    keep: bool = True,
) -> Tuned:
    """Find the smallest number of workers that keeps the step fed, or that gives 97 % of all there is.

    Args:
        loader: a loader of `make_loader`, a torch `DataLoader`, or a function that takes `num_workers` (and, if it
            can, `engine` and `prefetch`) and makes one.
        step: a training step, called with a batch; it is timed.
        step_ms: or how long it takes, in milliseconds.
        max_workers: never more than this; None: 4 per CPU, and up to 32 where samples mostly wait.
        engine: try this one only.
        seconds: how long each count is measured, after its warm-up.
        budget_s: after this time no further count is measured.
        ranks: training processes that will share this machine, if this is not one of them already.
        keep: remember the answer for `num_workers="auto"` (loaders of ours only).

    Raises:
        MeasurementError: the loader or the step fails, or gives nothing to measure.
        UsageError: options that cannot be meant.
    """
    if step is not None and step_ms is not None:
        raise UsageError("step and step_ms are two answers to one question; give one of them")
    if ranks < 1 or (max_workers is not None and max_workers < 1) or (step_ms is not None and step_ms <= 0):
        raise UsageError(f"ranks={ranks}, max_workers={max_workers} and step_ms={step_ms} must be positive")
    subject = subject_of(loader)
    begun = time.perf_counter()
    cpus = usable_cpus() / ranks
    engines = _engines(subject, engine)
    trial = subject.for_trials()
    probe = probe_load(trial, engines[0], seconds=min(0.5, seconds))
    if subject.batch_size is not None:
        probe = probe.for_batches_of(subject.batch_size)
    step_s = _time_step(step, subject, engines[0]) if step is not None else step_ms and step_ms / 1000
    demand = probe.samples / step_s if step_s else math.inf
    points: list[Point] = []
    deadline = begun + budget_s
    for number, name in enumerate(engines):
        if number and not _worth_trying(points, probe.load, cpus, demand):
            break
        most = max_workers or most_workers(probe, cpus, name, own=isinstance(subject, OwnSubject), ranks=ranks)
        points += _search(trial, name, Search(probe.load, cpus, most, demand), seconds, deadline)
    found = conclude(subject, probe, points, cpus, step_s)
    found = replace(found, cost_s=time.perf_counter() - begun)
    return _remembered(found, subject) if keep else found


def _engines(subject: Subject, wanted: EngineName) -> tuple[EngineName | None, ...]:
    if wanted == "auto":
        return subject.engines
    if wanted not in subject.engines:
        raise UsageError(f"engine {wanted!r} cannot be tried with this loader; it has {subject.engines}")
    return (wanted,)


def _time_step(step: Callable[[Any], object], subject: Subject, engine: EngineName | None) -> float:
    """Median seconds of the step on a batch of full size."""
    with subject.open(Settings(0, engine)) as loader:
        for batch in loader:
            return time_step(step, batch).median_s
    raise MeasurementError("the loader gives no batch")


def probe_load(
    subject: Subject, engine: EngineName | None, *, seconds: float = 0.5, clock: Clock = CLOCK
) -> Probe:
    """Make some batches in this process, after one to warm up (which counts if it is slow, or the only one).

    Raises:
        MeasurementError: the loader gives no batch, or fails.
    """
    walls: list[float] = []
    cpus: list[float] = []
    batch, samples = None, 0
    with one_torch_thread(), subject.open(Settings(0, engine)) as loader:
        begun = wall = clock.wall()
        cpu, queued = clock.cpu(), clock.queued()
        try:
            for batch in loader:
                # Waiting for a CPU that another program has is not the loader's.
                took, busy = clock.wall() - wall - (clock.queued() - queued), clock.cpu() - cpu
                count = max(1, batch_samples(batch))
                walls.append(max(took, busy, 1e-9) / count)
                cpus.append(busy / count)
                samples = max(samples, count)
                if clock.wall() - begun > seconds * (1 if len(walls) > 1 else 2):
                    break
                wall, cpu, queued = clock.wall(), clock.cpu(), clock.queued()
        except Exception as error:
            raise _failed(error, len(walls)) from error
    if not walls:
        raise MeasurementError("the loader gives no batch: is the dataset empty, smaller than one batch with "
                               "drop_last=True, or the iterator used up already?")
    counted = slice(1, None) if len(walls) > 1 else slice(None)
    mean = sum(walls[counted]) / len(walls[counted])
    spread = math.sqrt(sum((wall - mean) ** 2 for wall in walls[counted]) / len(walls[counted]))
    load = Load(mean, min(mean, sum(cpus[counted]) / len(cpus[counted])))
    return Probe(load, samples, batch_bytes(batch), spread / mean)


def _failed(error: Exception, batches: int) -> Exception:
    if isinstance(error, PackerError):
        return error
    return MeasurementError(f"the loader fails after {batches} batches ({type(error).__name__}: {error})")


def most_workers(probe: Probe, cpus: float, engine: EngineName | None, *, own: bool, ranks: int = 1) -> int:
    """The largest count worth trying: by the CPUs, by how much a sample waits, and by what memory holds."""
    waits = probe.load.cpu_s < 0.5 * probe.load.wall_s
    most = max(math.ceil(_PER_CPU * cpus), 4, _MOST_WAITING if waits else 0)
    if engine != "thread":
        held = 3 * max(probe.nbytes, 1)  # two batches under way and one in the making, for each process
        room = memory_headroom() if own else min(memory_headroom(), shm_free() or memory_headroom())
        most = min(most, max(1, int(_SHARE * room / ranks // held)))
    return min(most, _MOST)


def _search(
    subject: Subject, engine: EngineName | None, search: Search, seconds: float, deadline: float
) -> list[Point]:
    """Measure what the search asks for, as long as there is time."""
    points: list[Point] = []
    while (workers := search.next()) is not None and (not points or time.perf_counter() < deadline):
        settings = Settings(workers, engine)
        together, warm_up = subject.rounds(settings)
        with subject.open(settings) as loader:
            rate = measure_rate(loader, round_batches=together, warm_up=warm_up, seconds=seconds)
        search.add(workers, rate.per_s)
        points.append(Point(engine, workers, rate.per_s, rate.low, rate.high, rate.cost_s))
    return points


def _worth_trying(points: list[Point], load: Load, cpus: float, demand: float) -> bool:
    """Whether another engine may give more: the first falls short of the demand, and of what the CPUs could do."""
    best = max(point.per_s for point in points)
    possible = predict(load, max(point.num_workers for point in points), cpus)
    return best < min(HEADROOM * demand, 0.85 * possible)


# ---------------------------------------------------------------- conclusions


def conclude(
    subject: Subject, probe: Probe, points: list[Point], cpus: float, step_s: float | None
) -> Tuned:
    """The choice and its reason, from what was measured."""
    demand = probe.samples / step_s if step_s else math.inf
    engine, choice = _best(points, demand)
    prefetch = _prefetch(probe, engine, choice.workers, own=isinstance(subject, OwnSubject))
    settings = Settings(choice.workers, engine, prefetch)
    most = max([*(point.num_workers for point in points), math.ceil(_PER_CPU * cpus)])
    return Tuned(
        choice.workers, engine, prefetch, choice.per_s,
        demand_per_s=probe.samples / step_s if step_s else None,
        feasible=choice.feasible,
        reason=reason(choice, engine, probe.load, cpus, demand),
        code=subject.code(settings),
        remedies=() if choice.feasible else advice(choice, probe.load, cpus, demand),
        rule_of_thumb=field_rule(cpus, probe.load.wall_s * probe.samples, step_s),
        cpus=cpus,
        load=probe.load,
        predicted=tuple(curve(probe.load, cpus, most)),
        measured=tuple(points),
        cost_s=0.0,
    )


def _best(points: list[Point], demand: float) -> tuple[EngineName | None, Choice]:
    """The engine and count: the earlier engine unless another gives more than 3 % more and more is wanted."""
    by_engine: dict[EngineName | None, dict[int, float]] = {}
    for point in points:
        by_engine.setdefault(point.engine, {})[point.num_workers] = point.per_s
    best = max(point.per_s for point in points)
    chosen = [(engine, choose(rates, demand)) for engine, rates in by_engine.items()]
    return next(one for one in chosen if one[1].best_per_s >= min(NEAR * best, HEADROOM * demand))


def _prefetch(probe: Probe, engine: EngineName | None, workers: int, *, own: bool) -> int | None:
    """Twice the default where batches take unequally long and memory allows; else the default is right."""
    default = (3 if engine == "thread" else 2 * workers) if own else 2
    held = 2 * default * probe.nbytes * (1 if own else workers)
    return 2 * default if probe.variation > _UNEVEN and held < _SHARE * memory_headroom() else None


def reason(choice: Choice, engine: EngineName | None, load: Load, cpus: float, demand: float) -> str:
    """Why this count, in a sentence."""
    noun = {"thread": "thread", "process": "process"}.get(engine or "", "worker")
    plural = "es" if noun == "process" else "s"
    who = f"{choice.workers} {noun}{plural if choice.workers != 1 else ''}"
    if math.isfinite(demand):
        step = f"the step takes {demand:,.0f} samples/s"
        if not choice.feasible:
            return f"{step}, and no count gives more than {choice.best_per_s:,.0f}: {limit_in_words(load, cpus)}"
        margin = "" if choice.per_s >= HEADROOM * demand else ", with little to spare"
        fewer = "" if choice.workers == 1 else "; fewer would not do"
        return f"{step}, and {who} give{'s' if choice.workers == 1 else ''} {choice.per_s:,.0f}{margin}{fewer}"
    gives = f"{who} give{'s' if choice.workers == 1 else ''} {choice.per_s:,.0f} samples/s"
    best = "all there is" if choice.per_s >= 0.995 * choice.best_per_s else f"{choice.per_s / choice.best_per_s:.0%}"
    return f"{gives}, {best if best == 'all there is' else best + ' of all there is'}: {limit_in_words(load, cpus)}"


def limit_in_words(load: Load, cpus: float) -> str:
    """What a sample's time goes into."""
    share = load.cpu_s / load.wall_s if load.wall_s else 1.0
    costs = f"a sample takes {1000 * load.wall_s:.2g} ms, {share:.0%} of it on a CPU"
    if share > 0.8:
        return f"{costs}, and there {'are' if cpus != 1 else 'is'} {cpus:g} CPU{'s' if cpus != 1 else ''}"
    return f"{costs}: workers beyond the {cpus:g} CPU{'s' if cpus != 1 else ''} wait for storage side by side"


def advice(choice: Choice, load: Load, cpus: float, demand: float) -> tuple[str, ...]:
    """What helps where no count of workers does."""
    factor = demand / choice.best_per_s
    found = []
    if load.cpu_s > 0.5 * load.wall_s:
        found += [
            f"{math.ceil(demand * load.cpu_s * 1.1)} CPUs for this process (it has {cpus:g})",
            f"{factor:.1f} times less work per sample: pack with --seekable-jpeg, or with --resize to what is needed",
            "augment on the device (batch_transform=…) instead of in the transform",
        ]
    else:
        found += ["pack the folder, so that a sample is one read", "preload='memory', or a faster disk"]
    return (*found, "run 'packer doctor' to see what each would gain")


def _remembered(found: Tuned, subject: Subject) -> Tuned:
    if not isinstance(subject, OwnSubject):
        return found
    key = key_of(subject.loader.source, subject.loader.options)
    if key is None:
        return found
    facts: Mapping[str, Any] = {"reason": found.reason, "per_s": round(found.per_s, 1), "tuned": time.strftime("%F")}
    settings = Settings(found.num_workers, found.engine, found.prefetch)
    return replace(found, remembered=remember(key, settings, facts))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
