"""From options to what a loader works with: the source in place, how batches are made, in which order,
and by which engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loaders.auto import settle
from loaders.batches import Batches
from loaders.dataset import numbers_of, to_affine
from loaders.engine import Engine, SerialEngine
from loaders.engine_buffers import BufferPool, pinned_empty
from loaders.engine_process import ProcessEngine
from loaders.engine_thread import ThreadEngine
from loaders.memory import MemorySource, budget_bytes, check_open_files
from loaders.options import FOLLOWERS, LoaderOptions, Settings
from loaders.order import Mixture, Numbers, Order
from loaders.samples import Samples
from loaders.source import ConcatSource, PackedSource, Source
from loaders.staging import SHM, StagedSource
from packer.errors import UsageError

log = logging.getLogger("loaders")


def preloaded(source: Source, options: LoaderOptions) -> Source:
    """The source, or what `preload` makes of it."""
    parts = source.parts if isinstance(source, ConcatSource) else (source,)
    packed = [part for part in parts if isinstance(part, PackedSource)]
    check_open_files(sum(len(part.split.shards) for part in packed))
    kind, _, folder = (options.preload or "").partition(":")
    if kind == "shm":
        if len(packed) < len(parts):
            raise UsageError("preload='shm' copies shards; pack the folder first, or use preload='memory'")
        staged = [StagedSource(part, folder or SHM) for part in packed]
        return ConcatSource(staged) if isinstance(source, ConcatSource) else staged[0]
    if not kind:
        return source
    samples = Samples(source, fields=options.fields, transform=options.transform, targets=options.targets)
    pictures = () if kind == "memory" or samples.picture is None else tuple(samples.picture.split(";"))
    return MemorySource(
        source, samples.read_fields, numbers_of(options.subset, source), budget=budget_bytes(options.memory_budget),
        decode=pictures, orient=bool(getattr(options.transform, "orient", False)),
    )


def make_recipe(source: Source, options: LoaderOptions) -> Batches:
    """How samples and batches are made; what the device will do is left to it."""

    def with_normalize(mean_std: tuple[Sequence[float], Sequence[float]] | None) -> Batches:
        samples = Samples(
            source, fields=options.fields, transform=options.transform, normalize=to_affine(mean_std),
            targets=options.targets, seed=options.seed,
        )
        return Batches(
            samples, collate_fn=options.collate_fn, on_error=options.on_error, dtype=options.dtype,
            channels_last=options.channels_last,
        )

    if options.device is not None:
        recipe = with_normalize(None)
        windowed = recipe.samples.arrays and options.normalize is None  # a device implies nothing for arrays
        if windowed or (options.on_device is not None and recipe.direct and not recipe.samples.arrays):
            return recipe
    return with_normalize(options.mean_and_std)


def make_order(source: Source, options: LoaderOptions) -> Order | Mixture:
    """The order of the samples; several datasets are mixed."""
    sampling, subset = options.sampling, numbers_of(options.subset, source)
    weights = None if sampling.weights is None else np.asarray(sampling.weights, np.float64)
    if not isinstance(source, ConcatSource):
        return _order_of_one(source, options, subset, weights, sampling.epoch_samples)
    if weights is not None and weights.shape != (len(source.parts),):
        raise UsageError(f"weights must be one for each of the {len(source.parts)} datasets, got shape {weights.shape}")
    orders = []
    for number, part in enumerate(source.parts):
        start = int(source.starts[number])
        mine = None if subset is None else subset[(subset >= start) & (subset < start + len(part))] - start
        orders.append(_order_of_one(part, options, mine, None, None))
    return Mixture(
        tuple(orders), weights=None if weights is None else tuple(weights.tolist()),
        epoch_samples=sampling.epoch_samples, seed=options.seed, shuffle=bool(options.shuffle),
    )


def _order_of_one(
    source: Source, options: LoaderOptions, subset: Numbers | None, weights: npt.NDArray[np.float64] | None,
    epoch_samples: int | None,
) -> Order:
    sampling = options.sampling
    return Order(
        samples=len(source),
        seed=options.seed,
        shuffle=options.shuffle,
        subset=subset,
        shards=source.column("shard") if options.shuffle == "window" else None,
        window_shards=sampling.window_shards,
        labels=source.column("label") if sampling.balance else None,
        weights=weights,
        epoch_samples=epoch_samples,
        heights=source.column("height") if sampling.bucket else None,
        widths=source.column("width") if sampling.bucket else None,
    )


def settings_for(options: LoaderOptions, recipe: Batches) -> Settings:
    """Workers, engine and prefetch for these options; what is "auto" is settled in `loaders.auto`."""
    theirs = {"transform": not recipe.samples.ours, "collate_fn": options.collate_fn is not None}
    foreign = [name for name, is_theirs in theirs.items() if is_theirs]
    followers = [name for name, kind in recipe.samples.targets.items() if kind in FOLLOWERS]
    if followers and theirs["transform"]:
        log.warning(
            "a transform from elsewhere moves the picture alone, and these fields stay as stored: %s; where they must "
            "match, take a transform of loaders.transforms", ", ".join(followers)
        )
    return settle(recipe.samples.source, options, foreign)


def make_engine(options: LoaderOptions, settings: Settings, recipe: Batches, pin: bool) -> Engine:
    """The engine for these settings.

    Raises:
        UsageError: a foreign transform in threads.
    """
    workers, name, prefetch = settings.num_workers, settings.engine, settings.prefetch
    if name == "thread" and not recipe.samples.ours:
        raise UsageError(
            "a transform from elsewhere draws from the global random generators, which threads share: its results "
            "would not repeat; use engine='process' (or 'auto'), or a transform of loaders.transforms"
        )
    if workers == 0:
        return SerialEngine(recipe, pinned_empty if pin else BufferPool(keep=2).empty)
    if name == "thread":
        return ThreadEngine(recipe, workers, prefetch=prefetch, pin=pin)
    return ProcessEngine(
        recipe, workers, prefetch=prefetch, threads=options.threads_per_worker,
        start_method=options.start_method,
    )
