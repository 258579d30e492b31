"""Measures loaders in turn, and says whether they did the same work."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peers import LIMITS, PEERS, REFERENCE
from peers.base import Task, list_tree
from peers.harness import Bench, LoaderFailedError


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        runs: how often each loader is timed.
        seconds: a run lasts until the end of the epoch after this.
        warm_up: batches at the beginning of each epoch that do not count.
        ramps: pictures by which crops are checked; 0 for no such check.
    """

    runs: int = 5
    seconds: float = 5
    warm_up: int = 4
    ramps: int = 640


@dataclass
class Figures:
    """All that is known of one loader in one task.

    Attributes:
        title: its name in tables.
        runs: one result of `peers.child` a run.
        check: what was found when its output was looked at.
        failed: why there are no figures, or "".
        unequal: in what its output differs from what was asked for.
    """

    title: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    unequal: list[str] = field(default_factory=list)

    def spread(self, name: str) -> tuple[float, float, float]:
        """(median, lowest, highest) of one figure over the runs."""
        values = sorted(run[name] for run in self.runs)
        return statistics.median(values), values[0], values[-1]

    def summary(self) -> dict[str, Any]:
        """Everything, and the median of each figure, as JSON has it."""
        numbers = [name for name, value in self.runs[0].items() if isinstance(value, int | float)] if self.runs else []
        return {**asdict(self), "median": {name: self.spread(name)[0] for name in numbers}}


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def measure(bench: Bench, tree: str, task: Task, names: Sequence[str], settings: Settings) -> dict[str, Figures]:
    """Check all loaders, then time them in turn: by name, in the order given.

    Args:
        bench: what runs them.
        tree: the pictures, an ImageFolder.
        task: what they are asked for.
        names: keys of `PEERS`.
        settings: how often and how long.
    """
    figures = {name: Figures(PEERS[name].title) for name in names}
    ramps = bench.ramps(settings.ramps) if task.crop and settings.ramps else None
    for name, mine in figures.items():
        with _attempt(mine, "check"):
            mine.check = _check(bench, tree, ramps, {"peer": name, "task": asdict(task)})
    compare(figures, tree, random_crops=task.crop)
    how = {"do": "time", "task": asdict(task), "warm_up": settings.warm_up, "seconds": settings.seconds}
    labels = [label for _, label in list_tree(tree)]
    for turn in range(settings.runs):
        for name, mine in _not_failed(figures):
            with _attempt(mine, f"run {turn + 1} of {settings.runs}"):
                run = bench.run({**how, "peer": name, "store": bench.store(tree, name)})
                mine.runs.append(run)
                if set(run["samples"]) != {len(labels)} or run["label_sum"] != run["epochs"] * sum(labels):
                    mine.unequal.append("gave other samples in a timed epoch")
    return figures


def measure_reading(bench: Bench, tree: str, names: Sequence[str], settings: Settings) -> dict[str, Figures]:
    """Time those that only read, in turn; all must have read the same bytes and labels."""
    figures = {name: Figures(PEERS[name].title) for name in names}
    for turn in range(settings.runs):
        for name, mine in _not_failed(figures):
            with _attempt(mine, f"run {turn + 1} of {settings.runs}, reading"):
                request = {"do": "read", "peer": name, "store": bench.store(tree, name)}
                mine.runs.append(bench.run({**request, "seconds": settings.seconds / 5}))
    read = {(run["samples"], run["checksum"]) for mine in figures.values() for run in mine.runs}
    if len(read) > 1:
        for mine in figures.values():
            mine.unequal.append("not all read the same bytes")
    return figures


def _not_failed(figures: Mapping[str, Figures]) -> list[tuple[str, Figures]]:
    return [(name, mine) for name, mine in figures.items() if not mine.failed]


@contextlib.contextmanager
def _attempt(mine: Figures, what: str) -> Iterator[None]:
    """Note the reason where a loader fails, and go on without it."""
    say(f"{what}: {mine.title}")
    try:
        yield
    except LoaderFailedError as error:
        mine.failed, mine.runs = str(error), []
        say(f"  failed: {error}")


# ---------------------------------------------------------------- equal work


def _check(bench: Bench, tree: str, ramps: str | None, request: Mapping[str, Any]) -> dict[str, Any]:
    """What a loader gives, on the pictures and on the ramps."""
    name = request["peer"]
    found = bench.run({**request, "do": "check", "ramps": False, "store": bench.store(tree, name)}, memory=True)
    if name in LIMITS:  # the batches that they hand out mean nothing
        return {key: found[key] for key in ("peak_mb", "peak_rss_mb")}
    if ramps is not None:
        on_ramps = bench.run({**request, "do": "check", "ramps": True, "store": bench.store(ramps, name)})
        found["crops"] = {key: value for key, value in on_ramps.items() if key != "versions"}
    return found


def compare(figures: Mapping[str, Figures], tree: str, *, random_crops: bool) -> None:
    """Note in what a loader's output is not what was asked for, or not the reference's."""
    samples = list_tree(tree)
    per_label = [0] * (samples[-1][1] + 1)
    for _, label in samples:
        per_label[label] += 1
    reference = figures[REFERENCE].check if REFERENCE in figures else {}
    # Means over n random crops scatter by about 1/√n; decoders and resizing filters differ by far less than 0.03.
    tolerance = 0.03 + (2.5 / len(samples) ** 0.5 if random_crops else 0)
    for name, mine in _not_failed(figures):
        if name in LIMITS:
            continue
        found = mine.check
        if found["labels"] != per_label:
            mine.unequal.append(f"gave {found['samples']} of {len(samples)} samples, or other labels")
        for key in ("mean", "std") if reference else ():
            differs = max(abs(a - b) for a, b in zip(found[key], reference[key], strict=True))
            if differs > tolerance:
                mine.unequal.append(f"{key} of the pixels differs by {differs:.2f}")
        if "crops" in found:
            mine.unequal += _unequal_crops(found["crops"], reference.get("crops", {}))
        for what in mine.unequal:
            say(f"  {mine.title}: {what}")


#: Standard deviation of what goes into each figure about the crops, for one picture.
_SCATTER = {"area_mean": 0.23, "area_std": 0.18, "log_ratio_std": 0.12, "mirrored": 0.5}


def _unequal_crops(found: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    unequal = []
    if found["wrong_labels"]:
        unequal.append(f"{found['wrong_labels']} of {found['samples']} labels are another picture's")
    near = 5 * (2 / found["samples"]) ** 0.5  # five standard errors of the difference of two means
    for key, scatter in _SCATTER.items() if reference else ():
        if abs(found[key] - reference[key]) > scatter * near:
            unequal.append(f"crops differ: {key} {found[key]:.3f}, not {reference[key]:.3f}")
    return unequal
