"""The plan: which sample goes to which shard, in which order. Pure, and the same for any number of workers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from packer.errors import GroupUnknownError, UsageError
from packer.sample import IMAGE_EXTENSIONS, printable
from packer.sources.base import Scan, StringsBuilder
from packer.strings import Int64s, Strings

_ANY_SIZE = 1 << 60
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class PlanOptions:
    """What decides order and shards.

    Attributes:
        shard_bytes: no shard is larger, headers counted (a larger sample gets a shard of its own).
        shard_samples: no shard has more samples, where given.
        single_file: one shard for each split, however large, called after it without a number.
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
    single_file: bool = False

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise UsageError(f"--shard-size must be positive, got {self.shard_bytes}")
        if self.shard_samples is not None and self.shard_samples < 1:
            raise UsageError(f"--shard-samples must be at least 1, got {self.shard_samples}")
        if self.single_file and self.shard_samples is not None:
            raise UsageError("--single-file puts all samples of a split into one file: leave out --shard-samples")
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
    rank = key_hash(scan.keys, options.seed, b"shuffle") if options.shuffle else None
    orders = [np.zeros(0, np.int64)]
    shards: list[PlannedShard] = []
    start = 0
    for number, name in enumerate(scan.splits):
        members = np.flatnonzero(scan.split == number)
        if rank is not None:
            members = members[_shuffled(rank[members], None if scan.unit is None else scan.unit[members])]
        sizes = sample_bytes[members]
        units = None if scan.unit is None else scan.unit[members]
        limit = _ANY_SIZE if options.single_file else options.shard_bytes
        ends = cut(sizes, overhead, limit, options.shard_samples, units)
        for i, (begin, end) in enumerate(pairwise([0, *ends])):
            shards.append(PlannedShard(name, i, start + begin, start + end, int(sizes[begin:end].sum()) + overhead))
        orders.append(members)
        start += len(members)
    warnings = (
        list(scan.warnings)
        + _empty_classes(scan)
        + _missing_classes(scan)
        + _oversized(shards, options, what="sample(s)" if scan.unit is None else "series")
    )
    return Plan(scan, np.concatenate(orders), tuple(shards), tuple(warnings))


def _oversized(shards: Sequence[PlannedShard], options: PlanOptions, *, what: str) -> list[str]:
    if options.single_file:
        return []
    most = options.shard_samples
    over = sum(s.bytes > options.shard_bytes or (most is not None and s.stop - s.start > most) for s in shards)
    limits = "--shard-size" if most is None else "--shard-size or --shard-samples"
    return [f"{over} {what} are larger than {limits}; each gets a shard of its own"] if over else []


def cut(sizes: Int64s, overhead: int, limit: int, max_samples: int | None, units: Int64s | None = None) -> list[int]:
    """Ends of shards over samples in order: about as few shards as the limits allow, all about the same size.

    Even shards pack in parallel and stream in parallel; a last shard of a few samples does neither.

    Args:
        sizes: int64 (n,), bytes of each sample.
        overhead: bytes of a shard beside its samples.
        limit: bytes of a shard; a larger sample gets a shard of its own.
        max_samples: samples of a shard, None for any number.
        units: int64 (n,): neighbours of equal number stay together, as if they were one sample.

    >>> cut(np.array([4, 4, 4, 4, 4]), 0, 10, None)
    [2, 4, 5]
    """
    if len(sizes) == 0:
        return []
    count = np.arange(len(sizes) + 1)
    allowed = count[1:] if units is None else np.append(np.flatnonzero(units[1:] != units[:-1]) + 1, len(sizes))
    total = np.concatenate([[0], np.cumsum(sizes)])
    room = max(limit - overhead, 1)
    fewest = max(-(-int(total[-1]) // room), -(-len(sizes) // max_samples) if max_samples else 1, 1)
    for shards in range(fewest, fewest + 3):
        for weight in (total, count) if max_samples else (total,):
            ends = _even_ends(weight, allowed, shards)
            spans, counts = np.diff(total[ends], prepend=0), np.diff(ends, prepend=0)
            if spans.max() <= room and (max_samples is None or counts.max() <= max_samples):
                return [int(end) for end in ends]
    return _cut_greedily(total, allowed, room, max_samples)


def _even_ends(weight: Int64s, allowed: Int64s, shards: int) -> Int64s:
    goals = float(weight[-1]) * np.arange(1, shards + 1) / shards
    at = np.searchsorted(weight[allowed], goals - 0.5)
    at[-1] = len(allowed) - 1  # whatever follows the last goal weighs nothing, but is there
    return np.unique(allowed[np.minimum(at, len(allowed) - 1)])


def _cut_greedily(total: Int64s, allowed: Int64s, room: int, max_samples: int | None) -> list[int]:
    weights = total[allowed]
    ends: list[int] = []
    begin = first = 0  # the sample, and the position in `allowed`, where the next shard begins
    while first < len(allowed):
        fits = int(np.searchsorted(weights, total[begin] + room, "right"))
        if max_samples is not None:
            fits = min(fits, int(np.searchsorted(allowed, begin + max_samples, "right")))
        first = max(fits, first + 1)  # at least one unit, however large
        begin = int(allowed[first - 1])
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
    bytes times random numbers by position, mixed. All keys at once; some 0.15 µs a key.
    """
    salt = int.from_bytes(hashlib.blake2b(purpose + b" %d" % seed, digest_size=8).digest(), "little")
    longest = int(keys.lengths.max()) if len(keys) else 0
    weights = mix(np.uint64(salt) + np.arange(longest + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    blob = np.frombuffer(keys.blob, np.uint8)
    hashes = np.empty(len(keys), np.uint64)
    begin = 0
    while begin < len(keys):
        # Some 64 KiB of keys at once: the arrays below stay in the processor's cache.
        end = max(int(np.searchsorted(keys.ends, keys.ends[begin] + 65536, "right")) - 1, begin + 1)
        text, ends = blob[keys.ends[begin] : keys.ends[end]], keys.ends[begin : end + 1] - keys.ends[begin]
        position = np.arange(1, len(text) + 1) - np.repeat(ends[:-1], np.diff(ends))
        sums = np.zeros(len(text) + 1, np.uint64)
        np.cumsum((text.astype(np.uint64) + np.uint64(1)) * weights[position], out=sums[1:])
        hashes[begin:end] = sums[ends[1:]] - sums[ends[:-1]]
        begin = end
    return mix(hashes + weights[0])


def _shuffled(rank: npt.NDArray[np.uint64], units: Int64s | None) -> Int64s:
    """The order of samples (or of whole units) by rank, which depends on keys and seed alone.

    So the same samples come out in the same order from whatever source: packing a folder, repacking
    the result, and merging its parts all give the same bytes.
    """
    if units is None:
        return np.argsort(rank, kind="stable")
    _, heads, member = np.unique(units, return_index=True, return_inverse=True)
    return np.lexsort((np.arange(len(units)), heads[member], rank[heads][member]))


# A key that carries its extension lost it, or will get it, when a file of the same stem goes or comes.
_CARRIED = re.compile(
    rb"(?:%%2E(?:%s))+\Z" % b"|".join(sorted(name.encode() for name in IMAGE_EXTENSIONS)), re.IGNORECASE
)


def lasting(keys: Strings) -> Strings:
    """Keys without the image extensions that some carry, so that they stay the same as a folder grows.

    >>> list(lasting(Strings.of([b"c/a%2Ejpg", b"c/a", b"c/v1%2E2"])))
    [b'c/a', b'c/a', b'c/v1%2E2']
    """
    if re.search(b"%2E", keys.blob) is None:
        return keys
    out = StringsBuilder()
    for begin in range(0, len(keys), 4096):
        out.extend([_CARRIED.sub(b"", key) for key in keys.slice(begin, min(begin + 4096, len(keys)))])
    return out.build()


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
            keep &= _listed(scan.keys, wanted) == inside
    heads, member = _units(scan)
    keys_of_units = scan.keys if scan.unit is None else scan.keys.take(heads)
    if fold is not None:
        share = key_hash(lasting(keys_of_units), seed, b"fold") % np.uint64(fold[1])
        keep &= (share == np.uint64(fold[0] - 1))[member]
    if limit is not None and limit < np.count_nonzero(keep):
        counts = np.bincount(member[keep], minlength=len(heads)).astype(np.int64)
        keep &= _limited(counts, key_hash(keys_of_units, seed, b"limit"), limit)[member]
    chosen = np.flatnonzero(keep)
    if len(chosen) == 0:
        raise UsageError("the chosen subset is empty")
    return scan if len(chosen) == len(scan) else scan.take(chosen)


def _listed(keys: Strings, wanted: frozenset[bytes]) -> npt.NDArray[np.bool_]:
    listed = np.fromiter((key in wanted for key in keys), bool, len(keys))
    if missing := wanted - {keys[i] for i in np.flatnonzero(listed).tolist()}:
        names = ", ".join(printable(name) for name in sorted(missing)[:5])
        raise UsageError(f"{len(missing)} of the {len(wanted)} listed keys are in no sample: {names}")
    return listed


def _units(scan: Scan) -> tuple[Int64s, Int64s]:
    """Of what must not be parted: the first sample of each unit, and for every sample the number of its unit."""
    if scan.unit is None:
        return np.arange(len(scan)), np.arange(len(scan))
    _, heads, member = np.unique(scan.unit, return_index=True, return_inverse=True)
    return heads, member


def _limited(counts: Int64s, rank: npt.NDArray[np.uint64], limit: int) -> npt.NDArray[np.bool_]:
    """Bool (units,): those that fit into the limit, by rank; one that is too large is passed over."""
    taken = np.zeros(len(counts), bool)
    left = limit
    for unit in np.argsort(rank, kind="stable").tolist():
        if 0 < counts[unit] <= left:
            taken[unit] = True
            left -= int(counts[unit])
        if left == 0:
            break
    return taken


def _resplit(scan: Scan, options: PlanOptions) -> Scan:
    if options.split is None:
        _refuse_parted_groups(scan)
        return scan
    if scan.group is not None and options.group_regex is None:
        _require_groups(scan)
    edges = np.cumsum([fraction for _, fraction in options.split])[:-1]
    heads, member = _units(scan)
    split = _sides(scan if scan.unit is None else scan.take(heads), edges, options)[member]
    scan = replace(scan, split=split.astype(np.int16), splits=tuple(name for name, _ in options.split))
    _refuse_parted_groups(scan)
    return scan


def _require_groups(scan: Scan) -> None:
    unknown = np.flatnonzero((scan.group or Strings.of([])).lengths == 0)
    if len(unknown):
        files = scan.first[unknown]
        shown = ", ".join(repr(printable(scan.paths[file])) for file in files[:3].tolist())
        raise GroupUnknownError(
            f"--split keeps each patient on one side, and whose {len(unknown)} of {len(scan)} samples are is not known "
            f"(for example {shown}): say which part of a path names the patient with --patient-regex"
        )


def _refuse_parted_groups(scan: Scan) -> None:
    """Proves that no group is on two sides."""
    if scan.group is None or len(scan.splits) < 2:
        return
    known = np.flatnonzero(scan.group.lengths > 0)
    hashes = key_hash(scan.group.take(known), 0, b"group")
    order = np.lexsort((scan.split[known], hashes))
    parted = (np.diff(hashes[order]) == 0) & (np.diff(scan.split[known][order]) != 0)
    if parted.any():
        raise UsageError(
            f"{int(parted.sum())} patient(s) have samples in more than one split: what is learnt of them in one would "
            "be tested in the other; divide anew with --split 0.8,0.1,0.1, which keeps patients apart"
        )


def _sides(scan: Scan, edges: npt.NDArray[np.float64], options: PlanOptions) -> npt.NDArray[np.integer]:
    """Which split each sample goes to."""
    if options.split_exact:
        return _exact_split(scan, edges, options.seed)
    if options.group_regex:
        keys = Strings.of(_groups(scan, options.group_regex))
    else:
        keys = lasting(scan.keys) if scan.group is None else scan.group
    share = key_hash(keys, options.seed, b"split").astype(np.float64) / 2.0**64
    return np.searchsorted(edges, share, "right")


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


def empty_classes(scan: Scan) -> tuple[str, ...]:
    """Names of classes without a sample; none where no sample is known to have a label."""
    labels = scan.label[scan.label >= 0]
    if scan.classes is None or not len(labels):
        return ()
    counts = np.bincount(labels[labels < len(scan.classes)], minlength=len(scan.classes))
    return tuple(name for name, count in zip(scan.classes, counts.tolist(), strict=True) if not count)


def _empty_classes(scan: Scan) -> list[str]:
    names = empty_classes(scan)
    if len(names) > 1:
        shown = ", ".join(map(printable, names[:5])) + (", …" if len(names) > 5 else "")
        return [f"{len(names)} of {len(scan.classes or ())} classes have no sample: {shown}"]
    return [f"class {printable(name)!r} has no sample" for name in names]


def _missing_classes(scan: Scan) -> list[str]:
    """A warning for each split without samples, or with labels but not of every class that another one has."""
    warnings = []
    present = np.unique(scan.label[scan.label >= 0])
    for number, name in enumerate(scan.splits):
        labels = scan.label[scan.split == number]
        missing = np.setdiff1d(present, labels)
        if len(labels) == 0:
            warnings.append(f"split {name!r} has no sample")
        if len(missing) and (labels >= 0).any():
            classes = scan.classes or ()
            shown = [printable(classes[i]) if i < len(classes) else str(i) for i in missing[:5].tolist()]
            more = ", …" if len(missing) > 5 else ""
            warnings.append(f"split {name!r} has no sample of {len(missing)} class(es): {', '.join(shown)}{more}")
    return warnings
