"""How throughput grows with workers: the model, the search for the best count, the choice. No I/O, no clock.

A worker needs `wall_s` for a sample, `cpu_s` of it on a CPU. So `n` workers give n/wall_s samples a second until
something is used up: the CPUs at cpus/cpu_s, what is done one after the other at 1/serial_s, or a device at its own
rate. Beyond that knee more workers only cost memory, or get in each other's way, which the model does not
know and measuring shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: A worker count is as good as the best if it gives this share of its throughput.
NEAR = 0.97
#: A larger count that gives less than this share of a smaller one's throughput is beyond a peak.
_FALLS = 0.9
#: A loader should be this much faster than the step, or each hiccup is felt.
HEADROOM = 1.1
#: The counts that a grid search would try, and that curves are drawn at.
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Load:
    """What one sample costs.

    Attributes:
        wall_s: seconds of a worker's time, alone on the machine.
        cpu_s: CPU seconds among them.
        serial_s: seconds that only one worker at a time can spend: under the GIL, in the main process.
        ceiling_per_s: samples a second that storage, memory or a bus give at most.
    """

    wall_s: float
    cpu_s: float
    serial_s: float = 0.0
    ceiling_per_s: float = math.inf


def predict(load: Load, workers: int, cpus: float) -> float:
    """Samples a second that `workers` give, 0 meaning the consumer does the work itself.

    >>> waits = Load(wall_s=0.010, cpu_s=0.001)
    >>> predict(waits, 8, cpus=2), round(predict(waits, 64, cpus=2))
    (800.0, 2000)
    """
    limits = [max(workers, 1) / max(load.wall_s, 1e-9), cpus / max(load.cpu_s, 1e-9), load.ceiling_per_s]
    return min([*limits, 1 / load.serial_s] if load.serial_s > 0 else limits)


def field_rule(cpus: float, load_s: float, step_s: float | None) -> int:
    """What the rule of thumb says: min(cores, load time / GPU time) for one batch; without a step the cores.

    >>> field_rule(8, load_s=0.4, step_s=0.1), field_rule(8, 0.4, None)
    (4, 8)
    """
    cores = max(1, int(cpus))
    return cores if not step_s else max(1, min(cores, math.ceil(load_s / step_s)))


@dataclass(frozen=True)
class Choice:
    """The worker count to take.

    Attributes:
        workers: the smallest count that is good enough.
        per_s: the samples a second that it gives.
        best_per_s: the most that any count gives.
        feasible: whether the demand is met.
    """

    workers: int
    per_s: float
    best_per_s: float
    feasible: bool


def choose(points: Mapping[int, float], demand_per_s: float = math.inf) -> Choice:
    """The smallest count that gives the demand with headroom, or 97 % of the best where that is less.

    Args:
        points: samples a second by worker count, at least one.
        demand_per_s: samples a second that the step takes; infinite: as many as can be had.

    >>> choose({1: 100, 2: 198, 4: 200}).workers, choose({1: 100, 2: 198, 4: 200}, demand_per_s=80).workers
    (2, 1)
    """
    best = max(points.values())
    target = min(NEAR * best, HEADROOM * demand_per_s)
    workers = min(count for count, rate in points.items() if rate >= target)
    return Choice(workers, points[workers], best, math.isinf(demand_per_s) or best >= demand_per_s)


@dataclass
class Search:
    """Which counts to measure, one after the other.

    It begins where the model has its knee. While more workers than were measured would pay, and the demand is not
    met, it doubles. Where too many hurt, it looks between. Then it looks for the smallest count that is as good, as
    far as single workers can reach it.

    Attributes:
        load: what a sample costs.
        cpus: CPUs that may be used.
        most: the largest count allowed.
        demand_per_s: see `choose`.
        points: samples a second by count, as measured so far.

    >>> search = Search(Load(wall_s=0.010, cpu_s=0.010), cpus=4, most=32)
    >>> search.next()
    4
    >>> search.add(4, 395.0)
    >>> search.next() is None
    True
    """

    load: Load
    cpus: float
    most: int
    demand_per_s: float = math.inf
    points: dict[int, float] = field(default_factory=dict)

    def add(self, workers: int, per_s: float) -> None:
        """Note a measurement."""
        self.points[workers] = per_s

    def next(self) -> int | None:
        """The count to measure next; None: nothing more is to be learnt."""
        if not self.points:
            return self._knee()
        for look in (self._above, self._between, self._below):
            count = look()
            if count is not None:
                return count
        return None

    def _knee(self) -> int:
        """The smallest count that the model thinks good enough."""
        predicted = {count: predict(self.load, count, self.cpus) for count in range(1, self.most + 1)}
        return choose(predicted, self.demand_per_s).workers

    def _above(self) -> int | None:
        """A larger count, where it may give more and more is wanted."""
        top, best = max(self.points), max(self.points.values())
        if top == self.most or best >= HEADROOM * self.demand_per_s:
            return None
        lower = [count for count in self.points if count < top]
        if lower:  # growth that was seen decides
            grows = self.points[top] >= self.points[max(lower)] * (2 - NEAR)
        else:  # as fast as the machine can, says the model; a model that is well exceeded knows little
            ceiling = predict(self.load, self.most, self.cpus)
            grows = self.points[top] < NEAR * ceiling or self.points[top] > HEADROOM * ceiling
        return min(self.most, 2 * top) if grows else None

    def _between(self) -> int | None:
        """A count between the best and a larger one that gives far less, where the best is not held up yet."""
        best = max(self.points, key=lambda count: self.points[count])
        higher = min((count for count in self.points if count > best), default=best)
        falls = self.points[higher] < _FALLS * self.points[best]
        if not falls or higher - best < 2 or self.points[best] < _FALLS * best * self._alone:
            return None
        return min(max(round(math.sqrt(best * higher)), best + 1), higher - 1)

    @property
    def _alone(self) -> float:
        """Samples a second that one worker gives where nothing holds it up."""
        return max([1 / max(self.load.wall_s, 1e-9), *(rate / count for count, rate in self.points.items())])

    def _below(self) -> int | None:
        """A smaller count that single workers' speed allows to be as good."""
        best = max(self.points.values())
        target = min(NEAR * best, HEADROOM * self.demand_per_s)
        good = choose(self.points, self.demand_per_s).workers
        bad = max((count for count in self.points if count < good), default=0)
        least = max(bad + 1, math.ceil(target / self._alone - 1e-9))
        if least >= good:
            return None
        # The model's own answer comes first; where the lower end has failed already, halve what is left.
        return least if bad == 0 else max(least, (bad + good) // 2)


def curve(load: Load, cpus: float, most: int, counts: Iterable[int] = GRID) -> list[tuple[int, float]]:
    """(workers, predicted samples a second) at the counts of a grid up to `most`."""
    shown = sorted({*(count for count in counts if count <= most), most})
    return [(count, predict(load, count, cpus)) for count in shown]
