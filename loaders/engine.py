"""Engines: where batches are made. All give the same batches in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from loaders.batches import Batches, Made
from loaders.collate import Empty, fresh
from loaders.order import Numbers

#: Seconds between looks at whether workers that should answer are still there.
HEARTBEAT_S = 1.0


class Run(Iterator[Made], Protocol):
    """One pass over some batches, in order."""

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting."""
        ...

    def close(self) -> None:
        """Stop at once. Further calls do nothing."""
        ...


class Engine(Protocol):
    """Makes batches."""

    def run(self, epoch: int, batches: Sequence[Numbers]) -> Run:
        """Start making these batches."""
        ...

    def close(self) -> None:
        """Stop all workers and wait for their end."""
        ...


class SerialEngine:
    """`num_workers=0`: each batch is made in the calling thread when it is asked for."""

    def __init__(self, recipe: Batches, empty: Empty = fresh) -> None:
        self._recipe = recipe
        self._empty = empty

    def run(self, epoch: int, batches: Sequence[Numbers]) -> SerialRun:
        """Start making these batches."""
        return SerialRun(self._recipe, self._empty, epoch, batches)

    def close(self) -> None:
        """Nothing to stop."""


class SerialRun:
    """See `SerialEngine`."""

    def __init__(self, recipe: Batches, empty: Empty, epoch: int, batches: Sequence[Numbers]) -> None:
        self._recipe = recipe
        self._empty = empty
        self._epoch = epoch
        self._todo = iter(batches)

    def __iter__(self) -> SerialRun:
        return self

    def __next__(self) -> Made:
        try:
            draft = self._recipe.draft(next(self._todo), self._epoch, self._empty)
            self._recipe.fill(draft, 0, len(draft.numbers))
            return self._recipe.finish(draft)
        except BaseException:
            self.close()
            raise

    def ready(self) -> bool:
        """Never ahead of the caller."""
        return False

    def close(self) -> None:
        """Make no further batch."""
        self._todo = iter(())
