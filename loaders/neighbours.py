"""Which slices lie beside a slice: the samples of a series, in order."""

from __future__ import annotations

import re

import numpy as np

from loaders.order import Numbers
from loaders.source import ConcatSource, Source
from packer.errors import UsageError

_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)


class Neighbours:
    """The order of the slices within each series, by their keys: `{series}_{index}`, or any key that ends in a number.

    Read once for a source; takes 24 bytes a sample.

    Args:
        source: the samples. Series of different datasets are different, whatever their keys.

    Raises:
        UsageError: no key ends in a number.
    """

    def __init__(self, source: Source) -> None:
        parts = source.parts if isinstance(source, ConcatSource) else (source,)
        group, index = np.empty(len(source), np.int64), np.empty(len(source), np.int64)
        series: dict[tuple[int, str], int] = {}
        number = 0
        for which, part in enumerate(parts):
            for key in part.all_keys():
                match = _NUMBERED.fullmatch(key)
                name, index[number] = (key, 0) if match is None else (match[1], int(match[2]))
                group[number] = series.setdefault((which, name), len(series))
                number += 1
        if len(series) == number > 1:
            raise UsageError(
                f"Slab needs series: keys such as 'series_00017', but no two of the {number} keys differ in the "
                f"number at their end alone; the first is {source.key(0)!r}"
            )
        self._order = np.lexsort((index, group))
        self._place = np.empty(number, np.int64)
        self._place[self._order] = np.arange(number)
        ends = np.cumsum(np.bincount(group, minlength=len(series)))
        self._last = (ends - 1)[group]

    def around(self, numbers: Numbers, slices: int, *, repeat: bool) -> Numbers:
        """The samples of each slab.

        Args:
            numbers: (n,) the slices in the middle.
            slices: how many each, an odd number.
            repeat: beyond a series' ends, its first or last slice; else −1.

        Returns:
            (n, slices) sample numbers.
        """
        half = slices // 2
        wanted = self._place[numbers][:, None] + np.arange(-half, half + 1)
        last = self._last[numbers][:, None]
        first = self._first(numbers)[:, None]
        found: Numbers = self._order[np.clip(wanted, first, last)]
        return found if repeat else np.where((wanted >= first) & (wanted <= last), found, -1)

    def _first(self, numbers: Numbers) -> Numbers:
        """Places of the first slices: one after the last place of the series before."""
        lasts = np.unique(self._last)
        first: Numbers = np.concatenate([[0], lasts[:-1] + 1])[np.searchsorted(lasts, self._last[numbers])]
        return first
