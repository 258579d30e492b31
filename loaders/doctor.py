"""Why is the GPU idle? One run of the loop, and an answer with figures.

    from loaders.doctor import doctor
    print(doctor(loader, step).text())

The stages of the loader are timed one by one; the loop is run and its waiting counted; the limit is named; what
each remedy would gain is predicted, and the best ones that can be tried here are tried.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from loaders.curve import GRID, curve
from loaders.loader import Loader
from loaders.measure import copy_bandwidth
from loaders.options import Settings
from loaders.remedies import LIMITS, Observed, Remedy, find_limit, remedies
from loaders.resources import Resources, resources
from loaders.run import Run, run_loop
from loaders.stages import Stages, measure_stages
from loaders.subject import Factory, FactorySubject, OwnSubject, Subject, TorchSubject, subject_of
from loaders.trials import Trials
from loaders.tune import most_workers, probe_load
from packer.errors import UsageError


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found.

    Attributes:
        subject: what was looked at, in words.
        resources: what this process may use.
        settings: workers and engine of the run.
        stages: what each stage costs.
        run: every step of the run, and how busy the machine was.
        observed: the run's averages, on which the rest builds.
        limit: a key of `LIMITS`.
        remedies: what would help, the best first.
        predicted: (workers, samples a second) by the model, without the step.
        measured: (workers, samples a second) of the loader alone, where it was measured.
        notes: what could not be looked at, and why.
    """

    subject: str
    resources: Resources
    settings: Settings
    stages: Stages
    run: Run
    observed: Observed
    limit: str
    remedies: tuple[Remedy, ...]
    predicted: tuple[tuple[int, float], ...]
    measured: tuple[tuple[int, float], ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        seen, limit = self.observed, LIMITS[self.limit]
        loop = f"{seen.samples_per_s:,.0f} samples/s, {seen.wait_share:.0%} of the time spent waiting for data"
        if self.limit in ("step", "transfer"):
            return f"{loop}: the loader keeps up; {limit} is the limit."
        return f"{loop}: {limit} {'are' if self.limit in ('CPU', 'workers') else 'is'} the limit."

    def text(self) -> str:
        """All of it for a terminal."""
        from loaders.report import as_text

        return as_text(self)

    def html(self) -> str:
        """All of it as one self-contained page with charts."""
        from loaders.report import as_html

        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the single steps of the run."""
        seen = self.observed
        return {
            "subject": self.subject,
            "settings": asdict(self.settings),
            "limit": self.limit,
            "verdict": self.verdict,
            "samples_per_s": seen.samples_per_s,
            "wait_share": seen.wait_share,
            "step_ms": 1000 * self.run.step_s,
            "cpus": seen.cpus,
            "process_cpu": seen.process_cpu,
            "stages": [
                {"name": stage.name, "where": stage.where, **asdict(stage.timing),
                 "cold_s": None if stage.cold is None else stage.cold.wall_s}
                for stage in self.stages.stages
            ],
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "predicted": [list(point) for point in self.predicted],
            "measured": [list(point) for point in self.measured],
            "notes": list(self.notes),
        }


def doctor(
    loader: Loader | Factory | Any,
    step: Callable[[Any], object] | None = None,
    *,
    step_ms: float | None = None,
    transfer: Callable[[Any], Any] | None = None,
    num_workers: int | None = None,
    seconds: float = 4.0,
    tries: int = 3,
) -> Diagnosis:
    """Run a training loop for some seconds and say what holds it up.

    Args:
        loader: a loader of `make_loader`, a torch `DataLoader`, or a function that takes `num_workers` and makes
            one. The loader itself keeps its place: another one with its options is run.
        step: a training step, called with each batch.
        step_ms: or how long it takes: the loop sleeps so long. Neither: the loop takes batches as fast as it can.
        transfer: moves a batch to the device, where the loop does that before the step.
        num_workers: run with so many; None: as the loader is set, or for a function one per CPU.
        seconds: length of the run.
        tries: at most so many remedies are tried.

    Raises:
        MeasurementError: the loader, the step or the transfer fails, or there is nothing to measure.
        UsageError: options that cannot be meant.

    Example:
        >>> found = doctor(loader, train_step)      # doctest: +SKIP
        >>> print(found.text())                     # doctest: +SKIP
        >>> open("doctor.html", "w").write(found.html())    # doctest: +SKIP
    """
    if step is not None and step_ms is not None:
        raise UsageError("step and step_ms are two answers to one question; give one of them")
    if seconds <= 0 or (step_ms is not None and step_ms <= 0):
        raise UsageError(f"seconds={seconds} and step_ms={step_ms} must be positive")
    subject = subject_of(loader)
    load_before = os.getloadavg()[0]
    means = resources(_folder(subject))
    settings = _settings(subject, num_workers, means)
    stages = _stages(subject, transfer, seconds)
    run = _run(subject, settings, step, step_ms, transfer, seconds)
    seen = _observe(run, settings, stages, subject, means)
    limit = find_limit(seen)
    if limit == "one core" and settings.engine != "process":
        seen = replace(seen, serial_s=1 / seen.samples_per_s)
    most = most_workers(probe_load(subject.for_trials(), settings.engine, seconds=0.1), seen.cpus, settings.engine,
                        own=isinstance(subject, OwnSubject))
    found = _remedies(seen, subject, most)
    trials = Trials(subject, settings, seen, seconds=min(1.5, seconds / 2))
    tried, measured = trials.of(found, tries)
    notes = (*_crowd(load_before), *run.notes, *trials.notes)
    return Diagnosis(
        _named(subject, settings), means, settings, stages, run, seen, limit, tuple(tried),
        tuple(curve(seen.load, seen.cpus, max(most, settings.num_workers), (*GRID, max(settings.num_workers, 1)))),
        tuple(sorted(measured.items())), notes,
    )


def _crowd(load: float) -> list[str]:
    """A warning where other programs were running already."""
    return [f"other programs are running (load {load:.1f}): the figures scatter"] if load > 1 else []


def _folder(subject: Subject) -> str | None:
    folder = getattr(subject.loader.source, "folder", None) if isinstance(subject, OwnSubject) else None
    return None if folder is None else os.fspath(folder)


def _settings(subject: Subject, workers: int | None, means: Resources) -> Settings:
    """The settings to run with: the loader's own unless another number is asked for."""
    current = subject.current()
    if current is None:
        engine = subject.engines[0]
        current = Settings(max(1, math.ceil(means.cpus.usable)), engine)
    return current if workers is None else replace(current, num_workers=workers)


def _stages(subject: Subject, transfer: Callable[[Any], Any] | None, seconds: float) -> Stages:
    if isinstance(subject, FactorySubject):
        with subject.open(Settings(0, subject.engines[0])) as made:
            return measure_stages(made, seconds=seconds / 4, transfer=transfer)
    loader = subject.loader if isinstance(subject, OwnSubject | TorchSubject) else subject
    return measure_stages(loader, seconds=seconds / 4, transfer=transfer)


def _run(
    subject: Subject, settings: Settings, step: Callable[[Any], object] | None, step_ms: float | None,
    transfer: Callable[[Any], Any] | None, seconds: float,
) -> Run:
    together, warm_up = subject.rounds(settings)
    work = step
    if step_ms is not None:
        pause = step_ms / 1000

        def work(_: Any) -> None:
            time.sleep(pause)

    with subject.open(settings) as loader:
        return run_loop(loader, work, transfer, seconds=seconds, warm_up=warm_up, together=together)


def _observe(run: Run, settings: Settings, stages: Stages, subject: Subject, means: Resources) -> Observed:
    source: Any = subject.loader.source if isinstance(subject, OwnSubject) else None
    nbytes = getattr(getattr(source, "manifest", None), "bytes", 0)
    samples = max(run.samples, 1)
    return Observed(
        samples_per_s=run.samples_per_s,
        wait_s=run.wait_s / samples,
        step_s=run.work_s / samples,
        transfer_s=run.transfer_s / samples,
        workers=settings.num_workers,
        engine=settings.engine,
        cpus=means.cpus.usable,
        process_cpu=run.process_cpu,
        stages=stages,
        cold=nbytes > means.memory_bytes,
        batch_bytes=run.batch_bytes / samples,
        bandwidth=copy_bandwidth(),
    )


def _remedies(seen: Observed, subject: Subject, most: int) -> list[Remedy]:
    ours = isinstance(subject, OwnSubject)
    if not isinstance(subject, OwnSubject):
        return remedies(seen, packed=seen.stages["read"] is None, ours=ours, most=most)
    options = subject.loader.options
    device = options.on_device
    return remedies(
        seen, packed=hasattr(subject.loader.source, "manifest"), most=most,
        normalized=_normalizing(subject.loader) if options.mean_and_std is not None and device is None else 0.0,
        cuda=device is not None and device.type == "cuda", pinned=options.pin_memory is not False,
        preloads=options.preload is None,
    )


def _normalizing(loader: Loader) -> float:
    """Seconds per sample that a worker spends on making floats: what the last stage costs with and without it."""
    plain = Loader(loader.source, replace(loader.options, normalize=False, device=None, preload=None, num_workers=0))
    times = [measure_stages(each, samples=16, seconds=0.3)["crop and resize"] for each in (loader, plain)]
    return max(0.0, times[0].timing.wall_s - times[1].timing.wall_s) if times[0] and times[1] else 0.0


def _named(subject: Subject, settings: Settings) -> str:
    if isinstance(subject, OwnSubject):
        return f"{_folder(subject) or 'a dataset in memory'}: {subject.code(settings)}"
    return subject.code(settings)
