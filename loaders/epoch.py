"""What an epoch holds, and in which order: all ranks together, before it is dealt to them.

An epoch is drawn (all samples, or class-balanced, or weighted), arranged (shuffled, shuffled in
windows of shards, or as stored), and, where image sizes are given, grouped into buckets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from loaders.arrange import (
    Column,
    Numbers,
    Purpose,
    argsort,
    bucketed,
    by_window,
    class_places,
    permutation,
    resolve_subset,
    stream,
    weighted_places,
)
from packer.errors import UsageError

Shuffle: TypeAlias = bool | Literal["window"]

_COLUMNS: dict[str, type[np.generic]] = {
    "subset": np.int64, "shards": np.int32, "labels": np.int64,
    "weights": np.float64, "heights": np.int32, "widths": np.int32,
}
# The least value that is an answer, and what a message calls it.
_LEAST = {
    "shards": (0, "shard"), "labels": (0, "label"),
    "heights": (1, "image height"), "widths": (1, "image width"),
}
_SHUFFLES = {False: "sequential", True: "shuffled"}


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
            (w - 1) / (S - 1), w shards of S (a little less where w does not divide S and the windows are
            made thinner alike), anew each epoch. That is as good as a global permutation for a dataset
            that was shuffled when packed, and with `window_shards` ≥ S it is one; for shards that hold
            one class each, w is the number of classes in a batch. A window's bytes, `window_shards` ×
            the shard size, should fit the page cache.
        subset: the sample numbers that take part, each once, from `resolve_subset`; None for all.
        shards: the shard of each sample (index column `shard`).
        window_shards: the most shards mixed at a time.
        labels: the class of each sample (index column `label`); given, the epoch is *class-balanced*:
            each class that occurs is drawn equally often (± 1), each of its samples equally often (± 1).
        weights: given, the epoch is *weighted*: sample i is drawn `epoch_samples * weights[i] / sum` times,
            rounded up or down at random so that this is its exact mean (systematic sampling), so
            equal weights give every sample exactly once in an epoch of full length, and weight 0 never.
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
    subset: Column | None = None
    shards: Column | None = None
    window_shards: int = 8
    labels: Column | None = None
    weights: Column | None = None
    epoch_samples: int | None = None
    heights: Column | None = None
    widths: Column | None = None
    pool_batches: int = 256

    def __post_init__(self) -> None:
        _check_options(self)
        if self.subset is not None:
            object.__setattr__(self, "subset", resolve_subset(self.subset, self.samples))
        for name, dtype in _COLUMNS.items():
            column = getattr(self, name)
            if column is not None:
                object.__setattr__(self, name, _as_column(name, column, dtype))
        _check_columns(self)

    @property
    def length(self) -> int:
        """Samples in an epoch, over all ranks, before any tail is dropped or padded."""
        if self.epoch_samples is not None:
            return self.epoch_samples
        return self.samples if self.subset is None else len(self.subset)

    @property
    def sizes(self) -> tuple[Column, Column] | None:
        """Heights and widths by sample number if the order is bucketed."""
        return None if self.heights is None or self.widths is None else (self.heights, self.widths)

    @property
    def kind(self) -> str:
        """What sort of order this is, in words that a message can show."""
        words = [f"window:{self.window_shards}" if self.shuffle == "window" else _SHUFFLES[self.shuffle]]
        words += [word for word, column in (
            ("subset", self.subset), ("balanced", self.labels), ("weighted", self.weights)
        ) if column is not None]
        return "+".join(words + ([f"buckets:{self.pool_batches}"] if self.sizes else []))

    @cached_property
    def digest(self) -> str:
        """A hash of all arrays: orders that agree in it and in the plain options are the same order."""
        summary = hashlib.blake2b(digest_size=8)
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None:
                summary.update(name.encode())
                summary.update(column.tobytes())
        return summary.hexdigest()


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several datasets as one: numbers are global, those of part d start at `offsets[d]`.

    An epoch takes a fixed quota from each part. A part's own order goes on from epoch to epoch, so
    each of its samples comes once before any comes twice, whatever the weights; parts keep their own
    order (shuffled, windowed, balanced …) while the mixture decides at random whose turn it is.
    Without weights and `epoch_samples`, an epoch is every part's epoch exactly once.

    Attributes:
        parts: the datasets. If all have `heights` and `widths`, the mixed epoch is bucketed. Parts of
            equal size and seed are shuffled alike, so better give each a seed of its own.
        weights: share of each part in the epoch, > 0, any scale; None: by their lengths.
        epoch_samples: samples in an epoch, over all ranks; None: the sum of the parts' lengths.
        seed: decides the turns (the parts' own seeds decide the rest).
        shuffle: False: no random turns, one part after the other.

    Raises:
        UsageError: no parts, weights that are not positive numbers, a weighted part without samples,
            a part too light to occur, or sizes for some parts only.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        _check_seed(self.seed)
        if not self.parts:
            raise UsageError("a mixture of no datasets; give at least one order")
        if len({part.sizes is None for part in self.parts}) > 1:
            raise UsageError("some parts of the mixture have image sizes, some have none; give all or none")
        available = sum(part.length for part in self.parts)
        if self.epoch_samples is not None and (self.epoch_samples < 1 or available == 0):
            raise UsageError(f"epoch_samples is {self.epoch_samples}, with {available} samples to draw from")
        weights = self.weights or (1,) * len(self.parts)
        if len(weights) != len(self.parts) or not all(0 < weight < float("inf") for weight in weights):
            raise UsageError(f"weights {weights} of {len(self.parts)} datasets; give one > 0 for each")
        for number, (part, quota) in enumerate(zip(self.parts, self.quotas, strict=True)):
            if (part.length or self.weights) and not (part.length and quota):
                raise UsageError(
                    f"dataset {number} of a mixture has {part.length} samples and would take {quota} places "
                    f"of an epoch of {self.length}; leave it out, weight it more or lengthen the epoch"
                )

    @property
    def samples(self) -> int:
        """How many global numbers there are."""
        return sum(part.samples for part in self.parts)

    @property
    def length(self) -> int:
        """Samples in an epoch, over all ranks, before any tail is dropped or padded."""
        if self.epoch_samples is not None:
            return self.epoch_samples
        return sum(part.length for part in self.parts)

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Samples of each part in an epoch: the shares rounded by largest remainder, the same every epoch."""
        lengths = [part.length for part in self.parts]
        if self.weights is None and self.length == sum(lengths):
            return tuple(lengths)
        weights = np.array(lengths if self.weights is None else self.weights, np.float64)
        shares = self.length * (weights / weights.sum())
        quotas = np.floor(shares).astype(np.int64)
        largest = np.argsort(quotas - shares, kind="stable")[: self.length - int(quotas.sum())]
        quotas[largest] += 1
        return tuple(quotas.tolist())

    @cached_property
    def offsets(self) -> Numbers:
        """(parts + 1,) int64: part d has the global numbers offsets[d] … offsets[d + 1] - 1."""
        return np.cumsum([0, *(part.samples for part in self.parts)], dtype=np.int64)

    @cached_property
    def sizes(self) -> tuple[Column, Column] | None:
        """Heights and widths by global number if the mixture is bucketed."""
        sizes = [part.sizes for part in self.parts if part.sizes is not None]
        if not sizes:
            return None
        return np.concatenate([height for height, _ in sizes]), np.concatenate([width for _, width in sizes])

    @property
    def pool_batches(self) -> int:
        """The first part's, for all."""
        return self.parts[0].pool_batches

    @property
    def kind(self) -> str:
        """What sort of order this is, in words that a message can show."""
        return f"{_SHUFFLES[self.shuffle]} mixture({', '.join(part.kind for part in self.parts)})"

    @cached_property
    def digest(self) -> str:
        """A hash of the parts and their quotas."""
        parts = [(part.samples, part.length, part.seed, part.kind, part.digest) for part in self.parts]
        return hashlib.blake2b(repr((self.quotas, parts)).encode(), digest_size=8).hexdigest()

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Global numbers, any shape → (part, number within the part), int64 of that shape."""
        part = np.searchsorted(self.offsets, numbers, side="right") - 1
        return part, numbers - self.offsets[part]


AnyOrder: TypeAlias = Order | Mixture


def sequence(order: AnyOrder, epoch: int, batch_size: int) -> Numbers:
    """The whole epoch, all ranks together: (order.length,) int64, freshly made.

    `batch_size` matters only to buckets: each run of `batch_size` numbers is then a batch.

    Raises:
        UsageError: a negative epoch.
    """
    if epoch < 0:
        raise UsageError(f"epoch is {epoch}; epochs count from 0")
    numbers = _mixed(order, epoch) if isinstance(order, Mixture) else _numbers(order, epoch)
    if order.sizes is None:
        return numbers
    start = stream(order.seed, epoch, Purpose.BATCHES) if order.shuffle else None
    return bucketed(numbers, order.sizes, batch_size, order.pool_batches, start)


def _numbers(order: Order, epoch: int) -> Numbers:
    """The epoch of one dataset before buckets."""
    if order.epoch_samples is None or order.labels is not None or order.weights is not None:
        return _pass(order, epoch)
    return _stream(order, epoch * order.epoch_samples, order.epoch_samples, _pass, _members(order))


def _mixed(mixture: Mixture, epoch: int) -> Numbers:
    """The epoch of a mixture: turns drawn at random, each part's turns filled in the part's own order."""
    quotas = np.array(mixture.quotas)
    turns = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)
    if mixture.shuffle:
        turns = turns[permutation(len(turns), stream(mixture.seed, epoch, Purpose.TURNS))]
    numbers = np.empty(len(turns), np.int64)
    for place, (part, quota) in enumerate(zip(mixture.parts, mixture.quotas, strict=True)):
        if quota:
            own = _stream(part, epoch * quota, quota, _numbers, part.length)
            numbers[turns == place] = own + mixture.offsets[place]
    return numbers


def _stream(
    order: Order, start: int, count: int, make: Callable[[Order, int], Numbers], period: int
) -> Numbers:
    """`count` numbers from position `start` of the endless row make(order, 0), make(order, 1), …"""
    pieces = []
    for turn in range(start // period, -(-(start + count) // period)):
        begin = turn * period
        pieces.append(make(order, turn)[max(start - begin, 0) : start + count - begin])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _members(order: Order) -> int:
    """How many samples take part."""
    return order.samples if order.subset is None else len(order.subset)


def _pass(order: Order, turn: int) -> Numbers:
    """One pass over what takes part, or one epoch of draws, arranged."""
    count = _members(order)
    start = stream(order.seed, turn, Purpose.SHUFFLE)
    if order.labels is not None or order.weights is not None:
        numbers = _draw(order, turn)
    elif order.subset is not None:
        numbers = order.subset
    elif order.shuffle and order.shuffle != "window":
        return permutation(count, start)
    else:
        numbers = np.arange(count, dtype=np.int64)
    if not order.shuffle:
        return numbers.copy()
    numbers = numbers[permutation(len(numbers), start)]
    if order.shuffle == "window" and order.shards is not None:
        start = stream(order.seed, turn, Purpose.SHARDS)
        return by_window(numbers, order.shards, order.window_shards, start)
    return numbers


def _draw(order: Order, turn: int) -> Numbers:
    """(length,) numbers drawn by class or by weight, in no useful order; ascending if not to be shuffled."""
    start = stream(order.seed, turn, Purpose.DRAW)
    members = permutation(_members(order), start)
    if order.subset is not None:
        members = order.subset[members]
    if order.labels is not None:
        members = members[argsort(order.labels[members])]
        places = class_places(order.labels[members], order.length, stream(order.seed, turn, Purpose.CLASSES))
    elif order.weights is not None:
        places = weighted_places(order.weights[members], order.length, start)
    drawn = members[places]
    return drawn if order.shuffle else np.sort(drawn)


def _as_column(name: str, values: Column, dtype: type[np.generic]) -> Column:
    """A copy of the values in our type; a view of a memory-mapped index is read once, here."""
    found = np.asarray(values).dtype
    if len(values) and not np.can_cast(found, dtype, "same_kind"):
        raise UsageError(f"{name} has type {found}; it must hold {np.dtype(dtype)}")
    return np.array(values, dtype)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"seed is {seed}; it must be at least 0 and below 2**64")


def _check_options(order: Order) -> None:
    """Raise UsageError for options that cannot be meant together."""
    _check_seed(order.seed)
    if order.samples < 0:
        raise UsageError(f"a dataset of {order.samples} samples")
    if order.shuffle not in (True, False, "window"):
        raise UsageError(f"shuffle is {order.shuffle!r}; it is True, False or 'window'")
    if order.shuffle == "window" and order.shards is None:
        raise UsageError("shuffle='window' needs shards, the shard of each sample")
    if order.labels is not None and order.weights is not None:
        raise UsageError("labels (class-balanced) and weights exclude each other; weight the classes instead")
    if (order.heights is None) != (order.widths is None):
        raise UsageError("buckets need heights and widths; one of them is missing")
    for name in ("window_shards", "pool_batches"):
        if getattr(order, name) < 1:
            raise UsageError(f"{name} is {getattr(order, name)}; it must be at least 1")


def _check_columns(order: Order) -> None:
    """Raise UsageError for arrays that do not describe this dataset."""
    count = _members(order)
    if order.epoch_samples is not None and (order.epoch_samples < 1 or count == 0):
        raise UsageError(f"epoch_samples is {order.epoch_samples}, with {count} samples to take them from")
    for name in _COLUMNS:
        column = getattr(order, name)
        if column is None or name == "subset":
            continue
        if column.shape != (order.samples,):
            raise UsageError(f"{name} has shape {column.shape}, the dataset has {order.samples} samples")
        taken = column if order.subset is None else column[order.subset]
        if name == "weights":
            _check_weights(taken)
        else:
            _check_known(order, taken, *_LEAST[name])


def _check_known(order: Order, taken: Column, least: int, what: str) -> None:
    lacking = np.flatnonzero(taken < least)
    if len(lacking):
        first = lacking[0] if order.subset is None else order.subset[lacking[0]]
        raise UsageError(
            f"{len(lacking)} of {len(taken)} samples have no known {what}, the first is sample {first}; "
            "leave them out with subset="
        )


def _check_weights(weights: Column) -> None:
    if len(weights) and not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
        raise UsageError("weights must be finite numbers ≥ 0, and not all 0")
