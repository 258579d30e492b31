"""The order of an epoch: which sample goes into which batch of which rank.

Everything here is a pure function of numbers and arrays: no clock, no I/O, no global state. An
epoch is made in two steps, and each can be read alone:

1. `sequence(order, epoch, batch_size)` lays out the whole epoch as one array of sample numbers,
   the same on every rank: draw (all samples, or class-balanced, or weighted), arrange (globally
   shuffled, shuffled in windows of shards, or as stored), and, if the sizes are given, group
   images of like size into buckets.
2. `batches(order, deal, epoch, consumed)` deals that array to the ranks. Step s hands out the
   next `batch_size * world_size` numbers, rank r takes the r-th run of `batch_size` of them.

Because the ranks always consume a prefix of one common array, a single number, `consumed`, says
where an epoch stands. To resume, what lies behind `consumed` is dealt again, to any number of
ranks in batches of any size; worker counts never enter.

An order is the same on every machine and with every version of numpy.

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

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np

from loaders.arrange import Numbers, padding_waste, resolve_subset
from loaders.epoch import AnyOrder, Mixture, Order, Shuffle, sequence
from packer.errors import StateError, UsageError

__all__ = [
    "AnyOrder", "Deal", "Mixture", "Numbers", "Order", "Position", "RankBatches", "Shuffle", "Tail",
    "batch_count", "batch_counts", "batches", "check_state", "make_state", "padding_waste", "resolve_subset",
    "sequence",
]

Tail: TypeAlias = Literal["drop", "pad", "exact"]

_STATE_VERSION = 1
_POSITION = ("batch_size", "epoch", "consumed")
_STATE_WORDS = {
    "version": "version", "samples": "number of samples", "seed": "seed", "kind": "kind of order",
    "length": "epoch length", "digest": "digest of arrays (labels, weights, sizes …) and parts",
}


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

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size}; ranks count from 0 to world_size - 1")
        if self.tail not in ("drop", "pad", "exact"):
            raise UsageError(f"tail is {self.tail!r}; it is 'drop', 'pad' or 'exact'")

    @property
    def step(self) -> int:
        """Samples that all ranks together consume with one batch each."""
        return self.batch_size * self.world_size


class RankBatches(Sequence[Numbers]):
    """The batches of one rank, made by `batches`.

    `len()` is exact; item i is an int64 array of shape (batch_size,), the last may be shorter unless
    the tail is dropped. Items are views of the epoch's sequence: not to be written to.
    """

    def __init__(self, numbers: Numbers, deal: Deal, consumed: int, whole_batches: bool) -> None:
        self._numbers = numbers
        self._deal = deal
        self._start = consumed
        self._full = (len(numbers) - consumed) // deal.step
        self._tail = _tail_span(len(numbers), consumed + self._full * deal.step, deal, whole_batches)

    def __len__(self) -> int:
        return self._full + (self._tail.stop > self._tail.start)

    @overload
    def __getitem__(self, item: int) -> Numbers: ...
    @overload
    def __getitem__(self, item: slice) -> list[Numbers]: ...
    def __getitem__(self, item: int | slice) -> Numbers | list[Numbers]:
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        place = range(len(self))[item]
        if place < self._full:
            begin = self._start + place * self._deal.step + self._deal.rank * self._deal.batch_size
            return self._numbers[begin : begin + self._deal.batch_size]
        if self._tail.stop <= len(self._numbers):
            return self._numbers[self._tail.start : self._tail.stop]
        return self._numbers[np.arange(self._tail.start, self._tail.stop) % len(self._numbers)]

    def consumed_after(self, count: int) -> int:
        """Samples of the epoch that all ranks have consumed when each has had `count` of its batches.

        It includes what was consumed before the first of them, and is the same on every rank. When a
        rank has had all its batches, the epoch is over for it, whatever this says: a dropped tail, or
        under "exact" a last batch of other ranks, may remain.
        """
        if count > self._full:
            return len(self._numbers)
        return self._start + count * self._deal.step


def batches(order: AnyOrder, deal: Deal, epoch: int, consumed: int = 0) -> RankBatches:
    """What `deal.rank` gets of the epoch behind its first `consumed` samples, batch by batch.

    Making the epoch takes about 30 ms for a million samples, so this is called once per epoch.

    Raises:
        UsageError: `consumed` is not within the epoch, or, with buckets, not between two batches.
    """
    _check_consumed(order, deal, consumed)
    return RankBatches(sequence(order, epoch, deal.batch_size), deal, consumed, order.sizes is not None)


def batch_count(order: AnyOrder, deal: Deal, consumed: int = 0) -> int:
    """`len(batches(order, deal, epoch, consumed))`, the same for every epoch, without making one.

    Raises:
        UsageError: as `batches`.
    """
    _check_consumed(order, deal, consumed)
    full = (order.length - consumed) // deal.step
    tail = _tail_span(order.length, consumed + full * deal.step, deal, order.sizes is not None)
    return full + (tail.stop > tail.start)


def batch_counts(order: AnyOrder, deal: Deal, consumed: int = 0) -> tuple[int, ...]:
    """The `batch_count` of every rank, by rank; all equal unless `deal.tail` is "exact".

    Raises:
        UsageError: as `batches`.
    """
    return tuple(batch_count(order, replace(deal, rank=rank), consumed) for rank in range(deal.world_size))


def _tail_span(length: int, begin: int, deal: Deal, whole_batches: bool) -> range:
    """Where in the epoch a rank's last, unfilled step lies; from `length` on it goes round to the start."""
    left, size, rank = length - begin, deal.batch_size, deal.rank
    if left == 0 or deal.tail == "drop":
        return range(begin, begin)
    if whole_batches:
        first = begin + rank * size
        if first >= length and deal.tail == "pad":  # this rank repeats one of the epoch's first batches
            first = (rank - -(-left // size)) % -(-length // size) * size
        return range(first, max(first, min(first + size, length)))
    if deal.tail == "pad":
        each = -(-left // deal.world_size)
        return range(begin + rank * each, begin + (rank + 1) * each)
    each, more = divmod(left, deal.world_size)
    first = begin + rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _check_consumed(order: AnyOrder, deal: Deal, consumed: int) -> None:
    """Raise UsageError unless an epoch can be taken up behind `consumed` samples."""
    if not 0 <= consumed <= order.length:
        raise UsageError(f"{consumed} samples consumed of an epoch of {order.length}")
    if order.sizes is not None and consumed % deal.batch_size and consumed != order.length:
        raise UsageError(f"{consumed} samples consumed is not between two buckets of {deal.batch_size}")


class Position(NamedTuple):
    """Where a run stands: the epoch, and how many of its samples all ranks have consumed."""

    epoch: int
    consumed: int


def make_state(order: AnyOrder, deal: Deal, epoch: int, consumed: int) -> dict[str, int | str]:
    """A position as a dict of plain numbers and strings, the same on every rank, fit for JSON.

    Args:
        order: what is being read.
        deal: how it is dealt; only its batch size is kept, for buckets.
        epoch: the epoch under way.
        consumed: what all ranks have had of it, from `RankBatches.consumed_after`. An epoch that is over
            (also one whose dropped tail remains) is best saved as the start of the next.
    """
    return {**_identity(order), "batch_size": deal.batch_size, "epoch": int(epoch), "consumed": int(consumed)}


def check_state(order: AnyOrder, deal: Deal, state: Mapping[str, Any]) -> Position:
    """The position in a state from `make_state`, if it fits this order.

    Rank, world size, tail and batch size may differ from those that saved it; with buckets the batch
    size may not, since it decides what a batch is (finish the epoch with the old one). That the
    samples are the same ones, not only as many, is for the caller to know.

    Raises:
        StateError: another seed, dataset size, kind or length of order, other labels, weights, sizes,
            shards or subset, another batch size with buckets, or not a state at all.
    """
    try:
        found = {name: state[name] for name in _identity(order)}
        batch_size, epoch, consumed = (operator.index(state[name]) for name in _POSITION)
    except (KeyError, TypeError) as error:
        raise StateError(f"this is no state of a loader ({error!r}); pass what state_dict() gave") from error
    for name, want in _identity(order).items():
        if found[name] != want:
            raise StateError(
                f"the state does not fit: its {_STATE_WORDS[name]} is {found[name]!r}, here it is {want!r}; "
                "build the loader with the options that saved it, or do not load the state"
            )
    if order.sizes is not None and batch_size != deal.batch_size:
        raise StateError(
            f"the state was saved with batch_size={batch_size}, this loader has {deal.batch_size}, and "
            f"buckets depend on it; finish epoch {epoch} with batch_size={batch_size}"
        )
    if epoch < 0:
        raise StateError(f"the state names epoch {epoch}; epochs count from 0")
    try:
        _check_consumed(order, deal, consumed)
    except UsageError as error:
        raise StateError(f"the state does not fit: {error}") from error
    return Position(epoch, consumed)


def _identity(order: AnyOrder) -> dict[str, int | str]:
    """What two orders must share for a position in one to mean the same in the other."""
    return {
        "version": _STATE_VERSION, "samples": int(order.samples), "seed": int(order.seed),
        "kind": order.kind, "length": int(order.length), "digest": order.digest,
    }
