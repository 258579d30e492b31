"""What "auto" stands for: the remembered answer of `packer tune`, or else an estimate that costs milliseconds."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np

from loaders.options import EngineName, LoaderOptions, Settings
from loaders.remember import key_of, recall
from loaders.resources import Disk, disk_of, memory_headroom, usable_cpus
from loaders.source import Source

log = logging.getLogger("loaders")

#: So many workers per CPU, and at most so many, hide the time that a network takes to answer.
_PER_CPU, _MOST = 4, 32
#: The share of free memory that workers may hold in batches under way.
_SHARE = 0.25
_LOOKED_AT = 64


def settle(source: Source, options: LoaderOptions, foreign: Sequence[str]) -> Settings:
    """Workers, engine and prefetch for these options.

    A number of workers is taken as it is. "auto" is what tuning found for this dataset, transform and machine; if
    it never ran, `estimate`. Engine "auto" is threads for what releases the GIL and draws from generators of its own
    (our transforms), and processes for callables from elsewhere: they draw from the global
    generators, which threads would share, and may hold the GIL.

    Args:
        source: where the samples are.
        options: what was asked for.
        foreign: which of "transform" and "collate_fn" come from elsewhere.
    """
    engine: EngineName = options.engine
    if options.num_workers == "auto":
        found = recall(key_of(source, options))
        if found is not None and engine in ("auto", found.engine):
            log.info("as tuned: %s, %d workers", found.engine, found.num_workers)
            return Settings(found.num_workers, found.engine, options.prefetch or found.prefetch)
    if engine == "auto":
        engine = "process" if foreign else "thread"
    workers = estimate(source, options, engine) if options.num_workers == "auto" else options.num_workers
    if options.engine == "auto":
        why = f"a {' and a '.join(foreign)} from elsewhere" if foreign else "all steps release the GIL"
        log.info("engine 'auto': %s, %d workers (%s)", engine, workers, why)
    return Settings(workers, engine, options.prefetch)


def estimate(source: Source, options: LoaderOptions, engine: EngineName) -> int:
    """How many workers are likely to be right, from the budgets and the index; nothing is started or timed.

    One for each CPU that this rank may use; more where the data lie behind a network;
    fewer where the batches of so many processes would not fit a quarter of the free memory.
    """
    folder = getattr(source, "folder", None)
    disk = None if folder is None or not os.path.isdir(folder) else disk_of(folder)
    most = None if engine == "thread" else int(memory_headroom() * _SHARE // max(1, _process_bytes(source, options)))
    return workers_for(usable_cpus(), disk, most)


def workers_for(cpus: float, disk: Disk | None = None, most: int | None = None) -> int:
    """Workers for so many CPUs and this disk, at most `most`, at least 1.

    >>> workers_for(1.5), workers_for(0.25), workers_for(8.0, most=3)
    (2, 1, 3)
    """
    workers = max(1, int(cpus + 0.5))
    if disk is not None and disk.kind == "network":
        workers = max(workers, min(_MOST, workers * _PER_CPU))
    return workers if most is None else max(1, min(workers, most))


def _process_bytes(source: Source, options: LoaderOptions) -> int:
    """Bytes of batches that one worker process holds: two under way and one being made."""
    shape = getattr(options.transform, "output_shape", None)
    if shape is None:
        looked_at = slice(0, _LOOKED_AT)
        heights, widths = (np.asarray(source.column(name)[looked_at], np.int64) for name in ("height", "width"))
        pixels = int(np.max(heights * widths, initial=0))
        shape = (3, max(pixels, 224 * 224))
    return 3 * options.batch_size * options.image_dtype.itemsize * int(np.prod(shape))
