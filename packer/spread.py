"""How whole numbers are spread: minimum, median, maximum, and a histogram of round limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.strings import Int64s

_BINS = 16


@dataclass(frozen=True)
class Bin:
    """So many values lie in low ≤ value < high."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Spread:
    """How values are spread.

    Attributes:
        min, median, max: the median is the lower of the two middle values.
        bins: consecutive, of round limits.
    """

    min: int
    median: int
    max: int
    bins: tuple[Bin, ...]


def spread(values: npt.NDArray[np.signedinteger]) -> Spread:
    """Minimum, median, maximum, and a histogram of at most 18 bins; values (n,) ≥ 0, n ≥ 1.

    >>> spread(np.array([3, 3, 4])).bins
    (Bin(low=3, high=4, count=2), Bin(low=4, high=5, count=1))
    """
    values = np.sort(values.astype(np.int64))
    low, median, high = int(values[0]), int(values[(len(values) - 1) // 2]), int(values[-1])
    edges = _edges(values)
    counts = np.diff(np.searchsorted(values, edges)).tolist()
    bins = tuple(Bin(a, b, n) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True))
    return Spread(low, median, high, bins)


def _edges(values: Int64s) -> list[int]:
    """Round limits that show the bulk well: steps of 1, 2 or 5 × 10ᵏ between the 1st and the 99th hundredth.

    What lies beyond goes into one wide bin on each side.
    """
    low, high = int(values[len(values) // 100]), int(values[-1 - len(values) // 100])
    step = next(s for s in _round_steps() if (high // s - low // s) < _BINS)
    edges = list(range(low // step * step, high + step + 1, step))
    edges = [edge for edge in edges if edge - step <= high]
    if values[0] < edges[0]:
        edges.insert(0, int(values[0]))
    if values[-1] >= edges[-1]:
        edges.append(int(values[-1]) + 1)
    return edges


def _round_steps() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10
