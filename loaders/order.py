"""The order of an epoch: which sample goes into which batch of which rank.

Everything here is a pure function of numbers and arrays: no clock, no I/O, no global state, no
torch. An epoch is made in two steps, and each can be read alone:

1. `sequence(order, epoch, batch_size)` lays out the whole epoch as one array of sample numbers,
   the same on every rank: draw (all samples, or class-balanced, or weighted), arrange (globally
   shuffled, shuffled in windows of shards, or as stored), and, if the sizes are given, group
   images of like size into buckets.
2. `batches(order, deal, epoch, consumed)` deals that array to the ranks. Step s hands out the
   next `batch_size * world_size` numbers, rank r takes the r-th run of `batch_size` of them.

Because the ranks always consume a prefix of one common array, a single number, `consumed`, says
where an epoch stands. To resume, what lies behind `consumed` is dealt again, to any number of
ranks in batches of any size; worker counts never enter.

The shuffles are sorts by a counter-based hash (SplitMix64: Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), so an order is the same on every machine
and with every version of numpy, whose own generators may change their streams.

Example:
    >>> order = Order(samples=10, seed=7)
    >>> deal = Deal(batch_size=2, rank=0, world_size=2, tail="pad")
    >>> mine = batches(order, deal, epoch=0)
    >>> len(mine), mine.consumed_after(1)
    (3, 4)
    >>> state = make_state(order, deal, epoch=0, consumed=mine.consumed_after(1))
    >>> epoch, consumed = check_state(order, Deal(batch_size=3), state)
    >>> [len(batch) for batch in batches(order, Deal(batch_size=3, tail="exact"), epoch, consumed)]
    [3, 3]
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from packer.errors import StateError, UsageError

Numbers: TypeAlias = npt.NDArray[np.int64]
Shuffle: TypeAlias = bool | Literal["window"]
Tail: TypeAlias = Literal["drop", "pad", "exact"]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# One stream of hashes for each thing that is drawn at random, so that no two of them correlate.
_SHUFFLE, _SHARDS, _DRAW, _CLASSES, _BATCHES, _SLOTS, _FOLD = range(7)


# --- what describes an order ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Order:
    """The order of one dataset: what an epoch holds, and how it is arranged.

    All arrays have shape (samples,), one entry per sample of the dataset (of the whole dataset,
    also under a `subset`), and may be columns of the memory-mapped index: they are copied.

    Attributes:
        samples: number of samples in the dataset.
        seed: 0 ≤ seed < 2**64; with the epoch's number it decides all that is random.
        shuffle: True: a new global permutation each epoch. False: as stored (or as `subset` lists
            them). "window": for disks that hate random reads: the shards in random order, then
            `window_shards` of them at a time read and mixed. Needs `shards`.

            *Mixing quality of windows*: inside a window every order is equally likely; a batch
            therefore mixes `window_shards` shards, and samples of one shard never lie further apart
            than one window. Two given samples of different shards share a window with probability
            (w - 1) / (S - 1) for w of S shards, anew each epoch. That is as good as a
            global permutation for a dataset that was shuffled when packed, and with
            `window_shards` ≥ S it is one; for shards that hold one class each, w is the number of classes in a
            batch. A window's bytes, `window_shards` × the shard size, should fit the page cache.
        subset: the sample numbers that take part, each once, from `resolve_subset`; None for all.
        shards: the shard of each sample (index column `shard`).
        window_shards: the most shards mixed at a time.
        labels: the class of each sample (index column `label`); given, the epoch is *class-balanced*:
            each class that occurs is drawn equally often (± 1), each of its samples equally often (± 1).
        weights: given, the epoch is *weighted*: sample i is drawn `epoch_samples * weights[i] / sum` times,
            rounded up or down at random so that this is its exact mean (systematic sampling), so
            equal weights give every sample exactly once, and weight 0 never.
        epoch_samples: length of an epoch, counted over all ranks; None: as many as take part.
            With `labels` or `weights` it is the number of draws. Otherwise an epoch is that long a
            stretch of passes over the data: every sample once before any comes twice, across epochs.
        heights: with `widths`: the height of each image in pixels; the batches are then *bucketed*:
            images of like height and width share a batch. Needs real sizes (> 0) for all that take part.
        widths: the width of each image in pixels.
        pool_batches: buckets are made within runs of about this many batches; more means less
            padding and less mixing.

    Raises:
        UsageError: options that contradict each other, or arrays of a wrong length or content.

    Example:
        >>> order = Order(samples=6, shuffle=False, subset=resolve_subset([5, 1, 3], 6))
        >>> sequence(order, epoch=0, batch_size=2).tolist()
        [5, 1, 3]
    """

    samples: int
    seed: int = 0
    shuffle: Shuffle = True
    subset: npt.ArrayLike | None = None
    shards: npt.ArrayLike | None = None
    window_shards: int = 8
    labels: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None
    epoch_samples: int | None = None
    heights: npt.ArrayLike | None = None
    widths: npt.ArrayLike | None = None
    pool_batches: int = 256

    def __post_init__(self) -> None:
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Samples in an epoch, over all ranks, before any tail is dropped or padded."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several datasets as one: numbers are global, those of part d start at `offsets[d]`.

    An epoch takes a fixed quota from each part. A part's own order goes on from epoch to epoch, so
    each of its samples comes once before any comes twice, whatever the weights; parts keep their own
    order (shuffled, windowed, balanced …) while the mixture decides at random whose turn it is.
    Without weights and `epoch_samples`, an epoch is every part's epoch exactly once.

    Attributes:
        parts: the datasets. If all have `heights` and `widths`, the mixed epoch is bucketed.
        weights: share of each part in the epoch, > 0, any scale; None: by their lengths.
        epoch_samples: samples in an epoch, over all ranks; None: the sum of the parts' lengths.
        seed: decides the turns (the parts' own seeds decide the rest).
        shuffle: False: no random turns, one part after the other.

    Raises:
        UsageError: no parts, weights that are not positive numbers, a weighted part without samples or too
            light to occur, or sizes for some parts only.

    Example:
        >>> mixture = Mixture((Order(samples=100), Order(samples=50)), weights=(1, 3), epoch_samples=20)
        >>> part, local = mixture.locate(sequence(mixture, epoch=0, batch_size=4))
        >>> np.bincount(part).tolist()
        [5, 15]
    """

    parts: tuple[Order, ...]
    weights: tuple[float, ...] | None = None
    epoch_samples: int | None = None
    seed: int = 0
    shuffle: bool = True

    @property
    def length(self) -> int:
        """Samples in an epoch, over all ranks."""
        raise NotImplementedError

    @property
    def offsets(self) -> Numbers:
        """(parts + 1,) int64: part d has the global numbers offsets[d] … offsets[d + 1] - 1."""
        raise NotImplementedError

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Global numbers, any shape → (part, number within the part), int64 of that shape."""
        raise NotImplementedError


AnyOrder: TypeAlias = Order | Mixture


@dataclass(frozen=True)
class Deal:
    """How an epoch is dealt to ranks.

    Attributes:
        batch_size: samples per batch and rank.
        rank: this rank, 0 ≤ rank < world_size.
        world_size: number of ranks.
        tail: what becomes of the samples that fill no whole step of `batch_size * world_size`:

            - "drop" (training): left out; every batch is full, every rank has the same number.
            - "pad" (training, nothing left out): spread evenly over the ranks as one last, smaller batch,
              with up to `world_size - 1` numbers from the start of the epoch to make them even;
              every rank has the same number of batches, and the last is equally large on all.
            - "exact" (evaluation): spread evenly without any repeat; every sample comes exactly once
              over all ranks. The last batch may be smaller by one on some ranks, and if fewer samples than
              ranks are left, some ranks have one batch fewer: see `batch_counts`.

            With buckets whole batches are dealt, so as not to mix them: "exact" leaves some
            ranks one batch short, "pad" repeats whole batches from the start of the epoch.

    Raises:
        UsageError: a number out of range.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "drop"


# --- the epoch -----------------------------------------------------------------------------------


def sequence(order: AnyOrder, epoch: int, batch_size: int) -> Numbers:
    """The whole epoch, all ranks together: (order.length,) int64, freshly made.

    `batch_size` matters only to buckets: each run of `batch_size` numbers is then a batch.
    """
    raise NotImplementedError


class RankBatches(Sequence[Numbers]):
    """The batches of one rank, from `batches`. `len()` is exact; item i is an (≤ batch_size,) int64 array."""

    def consumed_after(self, count: int) -> int:
        """Samples of the epoch that all ranks have consumed when each has had `count` of these batches."""
        raise NotImplementedError


def batches(order: AnyOrder, deal: Deal, epoch: int, consumed: int = 0) -> RankBatches:
    """What `deal.rank` gets of the epoch after the first `consumed` samples, batch by batch."""
    raise NotImplementedError


def batch_count(order: AnyOrder, deal: Deal, consumed: int = 0) -> int:
    """`len(batches(order, deal, …, consumed))` for `deal.rank`, without making the epoch."""
    raise NotImplementedError


def batch_counts(order: AnyOrder, deal: Deal, consumed: int = 0) -> tuple[int, ...]:
    """`batch_count` of every rank, in the order of the ranks."""
    raise NotImplementedError


# --- state ---------------------------------------------------------------------------------------


class Position(NamedTuple):
    """Where a run stands: the epoch, and how many of its samples all ranks have consumed."""

    epoch: int
    consumed: int


def make_state(order: AnyOrder, deal: Deal, epoch: int, consumed: int) -> dict[str, int | str]:
    """A position as a dict of plain numbers and strings, the same on every rank, fit for JSON."""
    raise NotImplementedError


def check_state(order: AnyOrder, deal: Deal, state: Mapping[str, Any]) -> Position:
    """The position in a state from `make_state`, if it fits this order.

    Rank, world size and batch size may differ from those that saved it; with buckets the batch size
    may not, since it decides what a batch is.

    Raises:
        StateError: another seed, dataset size, subset, kind or length of order, other labels, weights, sizes or
            shards, another batch size with buckets, or not a state at all.
    """
    raise NotImplementedError


# --- helpers -------------------------------------------------------------------------------------


def padding_waste(heights: npt.ArrayLike, widths: npt.ArrayLike, batches: Iterable[Numbers]) -> float:
    """The share of padding, 0 ≤ share < 1, in batches padded to their largest height and width."""
    raise NotImplementedError


def resolve_subset(subset: str | npt.ArrayLike, samples: int) -> Numbers:
    """A subset as sample numbers, int64, checked.

    Args:
        subset: numbers (kept in their order), a boolean mask of shape (samples,), or a fold: "2/5" is
            the second of five folds, "-2/5" all but it. Folds are random, disjoint, equal in size (± 1), ascending,
            and depend on `samples` alone, so that runs with different seeds share them.
        samples: number of samples in the dataset.

    Raises:
        UsageError: a number out of range or twice, or no fold.
    """
    raise NotImplementedError
