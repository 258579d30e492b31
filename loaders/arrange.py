"""Arrays in, arrays out: the shuffles, draws and buckets that epochs are made of.

All randomness is a counter-based hash (SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) of a key made from seed, epoch and purpose. numpy's own generators
may change their streams between versions; this hash and stable sorts do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from packer.errors import UsageError

Numbers: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class Purpose(IntEnum):
    """What hashes are drawn for: a stream of its own for each, so that no two correlate."""

    SHUFFLE = 0
    SHARDS = 1
    DRAW = 2
    CLASSES = 3
    BATCHES = 4
    TURNS = 5
    FOLD = 6


def mix(word: int) -> int:
    """One step of SplitMix64: 64 bits in, 64 well mixed bits out."""
    word = (word + _GOLDEN) & _WORD
    for shift, factor in _STEPS:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> 31)


def stream(seed: int, epoch: int, purpose: Purpose) -> int:
    """Where one stream of hashes starts, 64 bits."""
    return mix(mix(mix(seed) ^ epoch) ^ purpose)


def permutation(count: int, start: int) -> Numbers:
    """A random permutation of 0 … count - 1, (count,) int64, the same on every machine for a `stream`.

    Each number is hashed, and written into the low bits of its own hash: no two keys are equal, so
    any sorting algorithm gives the one right answer, and the sorted keys hold it. For a million
    samples that leaves 44 random bits, and takes 16 MB in all.
    """
    numbers = np.arange(count, dtype=np.uint64)
    keys = numbers * np.uint64(_GOLDEN) + np.uint64(start)
    for shift, factor in _STEPS:
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    bits = np.uint64(max(count - 1, 0).bit_length())
    keys >>= bits
    keys <<= bits
    keys |= numbers
    keys.sort()
    keys &= np.uint64((1 << int(bits)) - 1)
    return keys.view(np.int64)


def argsort(values: Column) -> Numbers:
    """Stable argsort; small non-negative integers go through numpy's radix sort, which needs 16 bits."""
    if values.size and values.min() >= 0 and values.max() < 1 << 16:
        values = values.astype(np.uint16)
    return np.argsort(values, kind="stable")


def by_window(numbers: Numbers, shards: Column, window_shards: int, start: int) -> Numbers:
    """Numbers in random order, gathered by windows of shards; the last windows are not left thinner."""
    of_sample = shards[numbers]
    present = np.flatnonzero(np.bincount(of_sample))
    windows = -(-len(present) // window_shards)
    window = np.zeros(present[-1] + 1 if len(present) else 0, np.int64)
    window[present] = permutation(len(present), start) * windows // max(len(present), 1)
    gathered: Numbers = numbers[argsort(window[of_sample])]
    return gathered


def class_places(labels: Numbers, count: int, start: int) -> Numbers:
    """`count` places in ascending labels, every class as often (± 1), round and round within a class."""
    starts = np.flatnonzero(np.diff(labels, prepend=-1))
    members = np.diff(starts, append=len(labels))
    quotas = np.full(len(starts), count // max(len(starts), 1))
    quotas[permutation(len(starts), start)[: count - int(quotas.sum())]] += 1
    turns = np.arange(count) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    places: Numbers = np.repeat(starts, quotas) + turns % np.repeat(members, quotas)
    return places


def weighted_places(weights: npt.NDArray[np.float64], count: int, start: int) -> Numbers:
    """Systematic sampling: `count` evenly spaced points, shifted at random, on the weights laid end to end.

    Place i gets floor or ceil of count·w_i/Σw points, that many on average (Madow, "On the theory of
    systematic sampling II", Annals of Mathematical Statistics 1949). np.cumsum adds in order, so the result
    is the same everywhere.
    """
    ends = np.cumsum(weights / weights.max() if count else weights)
    shift = (1 + mix(start) % (2**20 - 1)) / 2**20  # strictly within (0, 1): no point meets an outer end
    points = (np.arange(count) + shift) * (ends[-1] / max(count, 1))
    places: Numbers = np.searchsorted(ends, points, side="right")
    return places


def _split(counts: Numbers, parts: int) -> Numbers:
    """Each count divided into `parts` as evenly as can be, larger ones first."""
    each, more = np.divmod(counts, parts)
    return (each[:, None] + (np.arange(parts) < more[:, None])).ravel()


def bucketed(
    numbers: Numbers, sizes: tuple[Column, Column], batch_size: int, pool_batches: int, start: int | None
) -> Numbers:
    """Rearrange runs of `pool_batches` batches so that each batch holds images of like size.

    A run is halved again and again, at a whole batch, by whichever of height and width spreads more
    there (a k-d tree built breadth first). Its batches are then shuffled. A short last batch stays.
    """
    total = len(numbers) // batch_size
    pools = max(1, round(total / pool_batches))
    tree = _split(np.array([total]), pools)
    pool_of_batch = np.repeat(np.arange(pools), tree)
    body, tail = np.split(numbers, [total * batch_size])
    while tree.size and tree.max() > 1:
        lengths = tree * batch_size
        starts = np.cumsum(lengths) - lengths
        height, width = (size[body] for size in sizes)
        tall, low = (np.maximum.reduceat(height, starts), np.minimum.reduceat(height, starts))
        wide, slim = (np.maximum.reduceat(width, starts), np.minimum.reduceat(width, starts))
        by_height = tall.astype(np.int64) * slim >= wide.astype(np.int64) * low
        place = argsort(np.where(np.repeat(by_height, lengths), height, width))
        node = np.repeat(np.arange(len(tree)), lengths)
        body = body[place[argsort(node[place])]]
        tree = _split(tree, 2)
        tree = tree[tree > 0]
    if start is not None:
        shuffled = permutation(total, start)
        shuffled = shuffled[argsort(pool_of_batch[shuffled])]
        body = body.reshape(total, batch_size)[shuffled].ravel()
    return np.concatenate([body, tail])


def padding_waste(heights: npt.ArrayLike, widths: npt.ArrayLike, batches: Iterable[Numbers]) -> float:
    """The share of padding, 0 ≤ share < 1, in batches padded to their largest height and width.

    Args:
        heights: (samples,) heights in pixels.
        widths: (samples,) widths in pixels.
        batches: sample numbers, as from the function `batches`.

    Example:
        >>> padding_waste([10, 20], [10, 10], [np.array([0, 1])])
        0.25
    """
    height, width = (np.asarray(size).astype(np.int64) for size in (heights, widths))
    used = padded = 0
    for batch in batches:
        if len(batch):
            used += int((height[batch] * width[batch]).sum())
            padded += len(batch) * int(height[batch].max() * width[batch].max())
    return 1 - used / padded if padded else 0.0


def resolve_subset(subset: str | npt.ArrayLike, samples: int) -> Numbers:
    """A subset as sample numbers, int64, checked.

    Args:
        subset: numbers (kept in their order), a boolean mask of shape (samples,), or a fold: "2/5" is
            the second of five folds, "-2/5" all but it. Folds are random, disjoint, equal in size
            (± 1), ascending, and depend on `samples` alone, so that runs with different seeds share them.
        samples: number of samples in the dataset.

    Raises:
        UsageError: a number out of range or twice, a mask of another length, or no fold.

    Example:
        >>> train, test = resolve_subset("-1/5", 10), resolve_subset("1/5", 10)
        >>> len(train), len(test), sorted([*train, *test]) == list(range(10))
        (8, 2, True)
    """
    if isinstance(subset, str):
        return _fold(subset, samples)
    numbers = np.asarray(subset)
    if numbers.dtype == np.bool_:
        if numbers.shape != (samples,):
            raise UsageError(f"subset is a mask of shape {numbers.shape}, the dataset has {samples} samples")
        return np.flatnonzero(numbers)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise UsageError(f"subset is {numbers.dtype} of shape {numbers.shape}; give a row of sample numbers")
    numbers = numbers.astype(np.int64)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < samples:
        raise UsageError(f"subset has {numbers.min()} to {numbers.max()}; samples are 0 to {samples - 1}")
    if numbers.size and np.bincount(numbers).max() > 1:
        twice = np.bincount(numbers).argmax()
        raise UsageError(f"subset names sample {twice} more than once; use weights to repeat samples")
    return numbers


def _fold(text: str, samples: int) -> Numbers:
    """The sample numbers of the fold 'k/n', or with '-k/n' of all others, ascending."""
    match = re.fullmatch(r"(-?)(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) or not 2 <= int(match[3]) <= samples:
        raise UsageError(
            f"subset is {text!r}; a fold is 'k/n' with 1 ≤ k ≤ n and 2 ≤ n ≤ {samples}, or '-k/n', all but it"
        )
    mask = np.zeros(samples, np.bool_)
    mask[permutation(samples, stream(0, 0, Purpose.FOLD))[int(match[2]) - 1 :: int(match[3])]] = True
    return np.flatnonzero(mask != (match[1] == "-"))
