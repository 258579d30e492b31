"""The loader: an iterable of batches that knows where it stands."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from loaders.assemble import make_engine, make_order, make_recipe, preloaded, settings_for
from loaders.batches import Made, call
from loaders.device import DeviceRun, Normalizer, map_tensors
from loaders.engine import Run
from loaders.options import LoaderOptions
from loaders.order import (
    Deal,
    Position,
    RankBatches,
    batch_count,
    batch_counts,
    batches,
    check_state,
    make_state,
)
from loaders.source import Source
from packer.errors import SampleError, UsageError

log = logging.getLogger("loaders")


class Loader:
    """Batches of one split, epoch after epoch. Made by `make_loader` (see `loaders.make.LoaderMaker`).

    A plain iterable: each `iter()` ends the iteration before it (which says so if it is asked for more), and begins the
    next epoch when its first batch is asked for (trainers make iterators that they throw away, and set the epoch
    late). What is random follows from seed and epoch alone. `len(loader)` is the number of batches of a whole epoch
    on this rank.

    Attributes:
        source: where the samples are.
        options: what was asked for.
        settings: workers, engine and prefetch, "auto" settled.
        skipped: the samples left out of this epoch under `on_error="skip"`, as errors that say why.

    Example:
        >>> with make_loader("out/", batch_size=256) as loader:             # doctest: +SKIP
        ...     for images, labels in loader:
        ...         train_step(images, labels)
        ...     torch.save(loader.state_dict(), "loader.pt")
    """

    def __init__(self, source: Source, options: LoaderOptions) -> None:
        self.source = preloaded(source, options)
        self.options = options
        self.skipped: list[SampleError] = []
        self._recipe = make_recipe(self.source, options)
        self._order = make_order(source, options)
        self._opened = source
        self._pin = _pin(options)
        self.settings = settings_for(options, self._recipe)
        self._engine = make_engine(options, self.settings, self._recipe, self._pin)
        self._next = Position(0, 0)
        self._progress: _Progress | None = None
        self._iteration: weakref.ref[Iteration] | None = None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, or None."""
        return self.source.classes

    @property
    def batch_size(self) -> int:
        """Samples per batch on each rank."""
        return self.options.batch_size

    @property
    def sampler(self) -> Loader:
        """The loader itself: Lightning and many training scripts call `loader.sampler.set_epoch(epoch)`."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None: Lightning looks for it where there is a `sampler`."""
        return

    @property
    def epoch(self) -> int:
        """The epoch under way, or between two epochs the one that comes next."""
        return self._next.epoch if self._progress is None else self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` begin this epoch; a position loaded within this very epoch is kept.

        Raises:
            UsageError: not an integer of at least 0.
        """
        if not isinstance(epoch, int | np.integer) or epoch < 0:
            raise UsageError(f"epoch must be an integer of at least 0, got {epoch!r}")
        epoch = int(epoch)
        if epoch != self._next.epoch:
            self._next = Position(epoch, 0)
            if self._running() is None:
                self._progress = None

    def __len__(self) -> int:
        return batch_count(self._order, self._deal())

    def __iter__(self) -> Iteration:
        self._end("another iter() of it")
        self._progress = None
        iteration = Iteration(self)
        self._iteration = weakref.ref(iteration)
        return iteration

    def _begin(self) -> tuple[Run, _Progress]:
        """Begin the next epoch."""
        epoch, consumed = self._next
        mine = batches(self._order, self._deal(), epoch, consumed)
        run = self._run(epoch, mine)
        self.skipped = []
        self._progress = _Progress(epoch, mine)
        self._next = Position(epoch + 1, 0)
        return run, self._progress

    def _running(self) -> Iteration | None:
        return None if self._iteration is None else self._iteration()

    def _end(self, by: str) -> None:
        running = self._running()
        if running is not None:
            running.close(by)

    def _run(self, epoch: int, mine: RankBatches) -> Run:
        run: Run = self._engine.run(epoch, mine)
        device = self.options.on_device
        if device is None:
            return run
        normalize, mean_std = None, self.options.mean_and_std
        if mean_std is not None and self._recipe.samples.normalize is None and not self._recipe.samples.arrays:
            normalize = Normalizer(*mean_std, device, self.options.dtype, self.options.channels_last)
        return DeviceRun(run, device, normalize, self._recipe.samples.picture)

    def _deal(self) -> Deal:
        """This rank's part, asked for anew each time: the process group may be made after the loader."""
        options = self.options
        rank, world_size = options.rank, options.world_size
        if rank is None or world_size is None:
            rank, world_size = 0, 1
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        tail: Literal["drop", "exact", "pad"] = "drop" if options.drop_last else "pad" if options.shuffle else "exact"
        return Deal(options.batch_size, rank, world_size, tail)

    def state_dict(self) -> dict[str, int | str]:
        """Where the loader stands, the same on every rank: what was handed out counts, not what was prefetched.

        Plain numbers and text. It fits any number of workers, ranks and, except with buckets, any batch size.
        """
        deal, progress = self._deal(), self._progress
        epoch, consumed = self._next if progress is None else (progress.epoch, progress.consumed)
        if max(batch_counts(self._order, deal, consumed), default=0) == 0:
            epoch, consumed = epoch + 1, 0
        return make_state(self._order, deal, epoch, consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on where a loader stood.

        Raises:
            StateError: the state is of another dataset, seed or order.
        """
        position = check_state(self._order, self._deal(), state)
        self._end("load_state_dict")
        self._next, self._progress = position, None

    def close(self) -> None:
        """Stop all workers and close all files. A later `iter()` starts anew, except where `preload` staged shards."""
        self._end("close")
        self._engine.close()
        self.source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (self._opened, self.options, self.state_dict()))

    def __repr__(self) -> str:
        return f"Loader({len(self.source)} samples, {len(self)} batches of {self.batch_size}, epoch {self.epoch})"


def _restore(source: Source, options: LoaderOptions, state: Mapping[str, Any]) -> Loader:
    loader = Loader(source, options)
    loader.load_state_dict(state)
    return loader


class _Progress:
    """How much of an epoch was handed out."""

    def __init__(self, epoch: int, mine: RankBatches) -> None:
        self.epoch = epoch
        self.mine = mine
        self.given = 0

    @property
    def consumed(self) -> int:
        """Samples that all ranks have had."""
        return self.mine.consumed_after(self.given)


class Iteration:
    """One epoch: an iterator of batches. Workers start with the first; dropping the iterator stops them."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader  # keeps the engine while only the iterator is held
        self._under_way: tuple[Run, _Progress] | None = None
        self._closed = False
        self._ended_by = ""

    def __iter__(self) -> Iteration:
        return self

    def __length_hint__(self) -> int:
        if self._under_way is None:
            return len(self._loader)
        progress = self._under_way[1]
        return len(progress.mine) - progress.given

    def __next__(self) -> Any:
        if self._closed:
            if self._ended_by:  # else the rest of an epoch would be missed in silence
                raise UsageError(
                    f"this iteration of the loader was ended by {self._ended_by} before its epoch was over; "
                    "begin a new one, or make a loader for each of two that run at the same time"
                )
            raise StopIteration
        # Under inference_mode, as evaluation loops have it, workers could not write into the buffers made here,
        # and training could not use the batches.
        with torch.inference_mode(False):
            if self._under_way is None:
                self._under_way = self._loader._begin()
            run, progress = self._under_way
            try:
                made = next(run)
            except StopIteration:
                self._closed = True
                if self._loader._progress is progress:
                    self._loader._progress = None
                raise
        if made.skipped:
            self._count(made)
        progress.given += 1
        batch = made.batch
        if self._loader._pin and self._loader.options.on_device is None:
            batch = map_tensors(_pinned, batch)
        transform = self._loader.options.batch_transform
        return batch if transform is None else call("batch_transform", transform, batch)

    def _count(self, made: Made) -> None:
        """Keep account of skipped samples.

        Raises:
            SampleError: they are too many, or nothing is left of the batch.
        """
        loader, limit = self._loader, self._loader.options.max_skipped
        for error in made.skipped:
            log.warning("skipped: %s", error)
        loader.skipped += made.skipped
        last = made.skipped[-1]
        if len(loader.skipped) > limit or made.batch is None:
            self.close()
            why = "no sample of a batch is left" if made.batch is None else f"max_skipped={limit}"
            raise SampleError(f"{len(loader.skipped)} samples skipped ({why}); the last: {last}", last.key, last.number)

    def close(self, by: str = "") -> None:
        """Stop at once; `by`: what else than the iteration's own user did it."""
        if not self._closed:
            self._closed, self._ended_by = True, by
        if self._under_way is not None:
            self._under_way[0].close()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def _pin(options: LoaderOptions) -> bool:
    """Whether batches are made in page-locked memory."""
    if options.pin_memory != "auto":
        return options.pin_memory
    device = options.on_device
    return torch.cuda.is_available() and (options.device is None or (device is not None and device.type == "cuda"))
