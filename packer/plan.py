"""The plan: which sample goes to which shard, in which order. Pure, and the same for any number of workers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packer.errors import UsageError
from packer.sample import printable
from packer.sources.base import Scan
from packer.strings import Int64s, Strings

_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class PlanOptions:
    """What decides order and shards.

    Attributes:
        shard_bytes: no shard is larger, headers counted (a larger sample gets a shard of its own).
        shard_samples: no shard has more samples, where given.
        shuffle: pack in random order, so that reading in order is nearly as good as random.
        seed: of the shuffle, the split and the subsets.
        split: `((name, fraction), …)` adding up to 1; None keeps the source's own splits.
        split_exact: cut each class exactly instead of hashing (for data that will not grow).
        group_regex: samples whose match in the original path is equal stay on one side of the split.
    """

    shard_bytes: int = 512_000_000
    shard_samples: int | None = None
    shuffle: bool = True
    seed: int = 0
    split: tuple[tuple[str, float], ...] | None = None
    split_exact: bool = False
    group_regex: str | None = None

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise UsageError(f"--shard-size must be positive, got {self.shard_bytes}")
        if self.shard_samples is not None and self.shard_samples < 1:
            raise UsageError(f"--shard-samples must be at least 1, got {self.shard_samples}")
        if self.split is None and (self.split_exact or self.group_regex):
            raise UsageError("--split-exact and --group-regex say how to split: give --split as well")
        if self.split_exact and self.group_regex:
            raise UsageError(
                "--split-exact cuts classes sample by sample; it cannot keep --group-regex groups together"
            )
        if self.split is not None:
            _check_split(self.split)
        if self.group_regex is not None:
            try:
                re.compile(self.group_regex)
            except re.error as error:
                raise UsageError(f"--group-regex {self.group_regex!r}: {error}") from error


def _check_split(split: Sequence[tuple[str, float]]) -> None:
    names = [name for name, _ in split]
    if len(set(names)) < len(names) or not all(_SPLIT_NAME.fullmatch(name) for name in names):
        raise UsageError(f"split names must be different words of letters, digits, '-' and '_', got {', '.join(names)}")
    if any(not 0 < fraction <= 1 for _, fraction in split) or abs(sum(f for _, f in split) - 1) > 1e-6:
        raise UsageError(
            f"the parts of --split must be positive and add up to 1, got "
            f"{', '.join(f'{fraction:g}' for _, fraction in split)}"
        )


@dataclass(frozen=True)
class PlannedShard:
    """One shard to be written: samples `order[start:stop]` of the plan."""

    split: str
    number: int
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The scan with its final splits, and the shards over it.

    Attributes:
        scan: with the splits that hold now.
        order: int64 (n,): sample numbers of the scan, split after split.
        shards: in order; together they cover `order`.
        warnings: what the user should know before packing.
    """

    scan: Scan
    order: Int64s
    shards: tuple[PlannedShard, ...]
    warnings: tuple[str, ...]


def plan(scan: Scan, sample_bytes: Int64s, overhead: int, options: PlanOptions) -> Plan:
    """Decide splits, order and shards.

    Args:
        scan: all samples.
        sample_bytes: int64 (n,): what each sample will take up in a shard, headers counted.
        overhead: bytes that a shard needs beside its samples.
        options: see `PlanOptions`.
    """
    scan = _resplit(scan, options)
    order_by_split = []
    shards: list[PlannedShard] = []
    warnings = _missing_classes(scan) if options.split else []
    too_large = 0
    start = 0
    for number, name in enumerate(scan.splits):
        members = np.flatnonzero(scan.split == number)
        members = members[_shuffled(scan, members, options.seed)] if options.shuffle else members
        sizes = sample_bytes[members]
        too_large += int(np.count_nonzero(sizes + overhead > options.shard_bytes))
        units = None if scan.unit is None else scan.unit[members]
        ends = cut(sizes, overhead, options.shard_bytes, options.shard_samples, units)
        begin = 0
        for i, end in enumerate(ends):
            shards.append(PlannedShard(name, i, start + begin, start + end, int(sizes[begin:end].sum()) + overhead))
            begin = end
        order_by_split.append(members)
        start += len(members)
    if too_large:
        warnings.append(f"{too_large} sample(s) are larger than --shard-size; each gets a shard of its own")
    order = np.concatenate(order_by_split) if order_by_split else np.zeros(0, np.int64)
    return Plan(scan, order, tuple(shards), tuple(warnings))


def cut(sizes: Int64s, overhead: int, limit: int, max_samples: int | None, units: Int64s | None = None) -> list[int]:
    """Ends of shards over samples in order: as few shards as the limits allow, all about the same size.

    Even shards pack in parallel and stream in parallel; a last shard of a few samples does neither.

    >>> cut(np.array([4, 4, 4, 4, 4]), 0, 10, None)
    [2, 4, 5]
    """
    if len(sizes) == 0:
        return []
    # A unit (a series) is never cut: only the positions after which one ends may end a shard.
    allowed = (
        np.arange(1, len(sizes) + 1)
        if units is None
        else np.append(np.flatnonzero(units[1:] != units[:-1]) + 1, len(sizes))
    )
    total = np.concatenate([[0], np.cumsum(sizes)])
    room = max(limit - overhead, 1)
    fewest = max(-(-int(total[-1]) // room), -(-len(sizes) // max_samples) if max_samples else 1, 1)
    for shards in range(fewest, fewest + 3):
        goals = total[-1] * np.arange(1, shards + 1) / shards
        ends = np.unique(allowed[np.searchsorted(total[allowed], goals - 0.5)])
        spans = np.diff(total[np.concatenate([[0], ends])])
        counts = np.diff(np.concatenate([[0], ends]))
        if spans.max() <= room and (max_samples is None or counts.max() <= max_samples):
            return [int(end) for end in ends]
    return _cut_greedily(total, allowed, room, max_samples)


def _cut_greedily(total: Int64s, allowed: Int64s, room: int, max_samples: int | None) -> list[int]:
    ends: list[int] = []
    begin = 0
    while begin < allowed[-1]:
        fits = int(np.searchsorted(total[allowed], total[begin] + room, "right"))
        if max_samples is not None:
            fits = min(fits, int(np.searchsorted(allowed, begin + max_samples, "right")))
        first = int(np.searchsorted(allowed, begin, "right"))
        begin = int(allowed[max(fits - 1, first)])  # at least one unit, however large
        ends.append(begin)
    return ends


# ---------------------------------------------------------------- randomness that depends on nothing but its inputs


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: well-mixed uint64 from uint64 counters.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    Unlike numpy's generators, its output is ours to keep the same for ever.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key_hash(keys: Strings, seed: int, purpose: bytes) -> npt.NDArray[np.uint64]:
    """uint64 (n,): a hash of each key that depends on the seed and on what it is for, and on nothing else.

    Multilinear hashing (Lemire, Kaser, "Strongly universal string hashing is fast", 2014): the sum of
    bytes times random numbers by position, mixed. All keys at once; some 0.5 µs a key.
    """
    salt = int.from_bytes(hashlib.blake2b(purpose + b" %d" % seed, digest_size=8).digest(), "little")
    longest = int(keys.lengths.max()) if len(keys) else 0
    with np.errstate(over="ignore"):
        weights = mix(np.uint64(salt) + np.arange(longest + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
        blob = np.frombuffer(keys.blob, np.uint8)
        parts = [_hash_some(blob, keys.ends[i : i + _AT_ONCE + 1], weights) for i in range(0, len(keys), _AT_ONCE)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


_AT_ONCE = 16384  # keys hashed together: bounds the temporary arrays to some 20 MB


def _hash_some(blob: npt.NDArray[np.uint8], ends: Int64s, weights: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    lengths = np.diff(ends)
    position = np.arange(ends[-1] - ends[0]) - np.repeat(ends[:-1] - ends[0], lengths)
    products = (blob[ends[0] : ends[-1]].astype(np.uint64) + np.uint64(1)) * weights[position + 1]
    sums = np.concatenate([[np.uint64(0)], np.cumsum(products, dtype=np.uint64)])
    at = ends - ends[0]
    return mix(sums[at[1:]] - sums[at[:-1]] + weights[0])


def _shuffled(scan: Scan, members: Int64s, seed: int) -> Int64s:
    """Positions in `members`, in an order that depends on keys and seed alone.

    So the same samples come out in the same order from whatever source: packing a folder, repacking
    the result, and merging its parts all give the same bytes.
    """
    rank = key_hash(scan.keys.take(members), seed, b"shuffle")
    if scan.unit is None:
        return np.argsort(rank, kind="stable")
    _, begins, position = np.unique(scan.unit[members], return_index=True, return_inverse=True)
    return np.lexsort((np.arange(len(members)), rank[begins][position]))


# ---------------------------------------------------------------- subsets and splits


def select(
    scan: Scan,
    *,
    seed: int,
    fold: tuple[int, int] | None = None,
    limit: int | None = None,
    keys: frozenset[bytes] | None = None,
    drop_keys: frozenset[bytes] | None = None,
) -> Scan:
    """A subset of the samples.

    Args:
        scan: all samples.
        seed: decides which samples a fold or a limit takes.
        fold: (k, n): the k-th of n parts by hash of the key, k from 1.
        limit: at most so many samples, chosen by hash, so that every class keeps its share.
        keys: only these.
        drop_keys: all but these.

    Raises:
        UsageError: a wanted or dropped key is in no sample, or nothing is left.
    """
    keep = np.ones(len(scan), bool)
    for wanted, inside in ((keys, True), (drop_keys, False)):
        if wanted is not None:
            listed = [bytes(key) in wanted for key in scan.keys]
            if missing := wanted - set(scan.keys):
                names = ", ".join(printable(name) for name in sorted(missing)[:5])
                raise UsageError(f"{len(missing)} of the {len(wanted)} listed keys are in no sample: {names}")
            keep &= np.array(listed, bool) == inside
    if fold is not None:
        keep &= key_hash(scan.keys, seed, b"fold") % np.uint64(fold[1]) == np.uint64(fold[0] - 1)
    chosen = np.flatnonzero(keep)
    if limit is not None and len(chosen) > limit:
        rank = np.argsort(key_hash(scan.keys.take(chosen), seed, b"limit"), kind="stable")
        chosen = np.sort(chosen[rank[:limit]])
    if len(chosen) == 0:
        raise UsageError("the chosen subset is empty")
    return scan if len(chosen) == len(scan) else scan.take(chosen)


def _resplit(scan: Scan, options: PlanOptions) -> Scan:
    if options.split is None:
        return scan
    names = tuple(name for name, _ in options.split)
    edges = np.cumsum([fraction for _, fraction in options.split])[:-1]
    if options.split_exact:
        split: npt.NDArray[np.integer] = _exact_split(scan, edges, options.seed)
    else:
        keys = Strings.of(_groups(scan, options.group_regex)) if options.group_regex else scan.keys
        share = key_hash(keys, options.seed, b"split").astype(np.float64) / 2.0**64
        split = np.searchsorted(edges, share, "right")
    return replace(scan, split=split.astype(np.int16), splits=names)


def _groups(scan: Scan, pattern: str) -> list[bytes]:
    compiled = re.compile(pattern.encode("utf-8", "surrogateescape"))
    groups, unmatched = [], []
    for file in scan.first[:-1].tolist():
        path = scan.paths[file]
        match = compiled.search(path)
        if match is None:
            unmatched.append(path)
        groups.append(b"/".join(match.groups(b"")) if match and match.groups() else match[0] if match else b"")
    if unmatched:
        raise UsageError(
            f"--group-regex {pattern!r} matches nothing in {len(unmatched)} path(s), "
            f"for example {printable(unmatched[0])!r}"
        )
    return groups


def _exact_split(scan: Scan, edges: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.int16]:
    """Each class cut at the same fractions of its samples in hash order."""
    by_class = np.lexsort((key_hash(scan.keys, seed, b"split"), scan.label))
    _, counts = np.unique(scan.label, return_counts=True)
    split = np.zeros(len(scan), np.int16)
    begin = 0
    for count in counts.tolist():
        ends = np.rint(edges * count).astype(np.int64)
        split[by_class[begin : begin + count]] = np.searchsorted(ends, np.arange(count), "right")
        begin += count
    return split


def _missing_classes(scan: Scan) -> list[str]:
    warnings = []
    present = np.unique(scan.label[scan.label >= 0])
    for number, name in enumerate(scan.splits):
        missing = np.setdiff1d(present, scan.label[scan.split == number])
        if len(missing):
            shown = ", ".join(
                printable(scan.classes[i]) if scan.classes and i < len(scan.classes) else str(i)
                for i in missing[:5].tolist()
            )
            warnings.append(
                f"split {name!r} has no sample of {len(missing)} class(es): {shown}{', …' if len(missing) > 5 else ''}"
            )
    return warnings
