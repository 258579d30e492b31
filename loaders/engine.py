"""Engines: where batches are made. All give the same batches in the same order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from loaders.batches import Batches, Made
from loaders.collate import Empty, fresh
from loaders.options import LoaderOptions, workers_for
from loaders.order import Numbers
from packer.errors import UsageError

log = logging.getLogger("loaders")

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


def choose_engine(options: LoaderOptions, recipe: Batches, pin: bool) -> Engine:
    """The engine for these options.

    "auto" takes threads for what releases the GIL and draws from generators of its own (our
    transforms), and processes for callables from elsewhere: they draw from the global generators,
    which threads would share, and may hold the GIL.

    Raises:
        UsageError: a foreign transform in threads.
    """
    from loaders.engine_buffers import BufferPool, pinned_empty

    workers = workers_for(options.num_workers)
    theirs = {"transform": not recipe.samples.ours, "collate_fn": options.collate_fn is not None}
    foreign = [name for name, is_theirs in theirs.items() if is_theirs]
    name = options.engine
    if name == "auto":
        name = "process" if foreign else "thread"
        why = f"a {' and a '.join(foreign)} from elsewhere" if foreign else "all steps release the GIL"
        log.info("engine 'auto': %s, %d workers (%s)", name, workers, why)
    if name == "thread" and not recipe.samples.ours:
        raise UsageError(
            "a transform from elsewhere draws from the global random generators, which threads share: its results "
            "would not repeat; use engine='process' (or 'auto'), or a transform of loaders.transforms"
        )
    if workers == 0:
        return SerialEngine(recipe, pinned_empty if pin else BufferPool(keep=2).empty)
    if name == "thread":
        from loaders.engine_thread import ThreadEngine

        return ThreadEngine(recipe, workers, prefetch=options.prefetch, pin=pin)
    from loaders.engine_process import ProcessEngine

    return ProcessEngine(
        recipe, workers, prefetch=options.prefetch, threads=options.threads_per_worker,
        start_method=options.start_method,
    )
