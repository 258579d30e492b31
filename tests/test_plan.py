"""The plan: every sample once, within the limits, in an order that depends on names and seed alone."""

from __future__ import annotations

import doctest
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packer.plan
from packer.errors import UsageError
from packer.plan import Plan, PlanOptions, cut, key_hash, lasting, mix, plan, select
from packer.sources.base import Scan
from packer.strings import Strings


def scan_of(
    keys: list[bytes],
    labels: list[int] | None = None,
    splits: list[str] | None = None,
    units: list[int] | None = None,
    classes: tuple[str, ...] | None = None,
) -> Scan:
    """Samples of one file each."""
    names = tuple(dict.fromkeys(splits)) if splits else ("train",)
    count = len(keys)
    return Scan(
        fields=("jpg",),
        paths=Strings.of([key.replace(b"%2E", b".") + b".jpg" for key in keys]),
        sizes=np.ones(count, np.int64),
        field=np.zeros(count, np.int16),
        first=np.arange(count + 1),
        keys=Strings.of(keys),
        label=np.array(labels if labels is not None else [-1] * count, np.int64),
        split=np.array([names.index(name) for name in splits] if splits else [0] * count, np.int16),
        splits=names,
        classes=classes,
        made_cls=labels is not None,
        layout="flat",
        rule="",
        unit=None if units is None else np.array(units, np.int64),
    )


def numbered(count: int, prefix: bytes = b"c/") -> list[bytes]:
    return [b"%s%05d" % (prefix, i) for i in range(count)]


def keys_by_split(planned: Plan) -> dict[str, list[bytes]]:
    scan = planned.scan
    return {
        name: [scan.keys[i] for i in planned.order.tolist() if scan.split[i] == number]
        for number, name in enumerate(scan.splits)
    }


def sides(scan: Scan, seed: int = 0, **options: object) -> dict[bytes, str]:
    split = (("train", 0.7), ("val", 0.2), ("test", 0.1))
    planned = plan(scan, scan.sizes, 0, PlanOptions(seed=seed, split=split, **options))  # type: ignore[arg-type]
    return {key: name for name, keys in keys_by_split(planned).items() for key in keys}


# ---------------------------------------------------------------- shards


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Scan, list[int], int, PlanOptions]:
    """Samples with sizes, the overhead of a shard, and what to plan."""
    count = draw(st.integers(1, 40))
    sizes = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    units = None
    if draw(st.booleans()):
        cuts = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        units = [number * 7 % 41 for number in np.cumsum(cuts).tolist()]
    number = {name: i for i, name in enumerate(("train", "val"))}
    of_unit = draw(st.lists(st.sampled_from(sorted(number)), min_size=42, max_size=42))
    splits = [of_unit[units[i] if units else 0 if i < count // 2 else 1] for i in range(count)]
    options = PlanOptions(
        shard_bytes=draw(st.integers(1, 200)),
        shard_samples=draw(st.none() | st.integers(1, 12)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        split=draw(st.none() | st.just((("a", 0.5), ("b", 0.25), ("c", 0.25)))),
    )
    keys = draw(st.permutations(numbered(count)))
    return scan_of(list(keys), splits=splits, units=units), sizes, draw(st.sampled_from([0, 2, 10])), options


@given(jobs())
@settings(max_examples=300)
def test_every_sample_is_in_one_shard_and_no_shard_is_over_its_limits(
    job: tuple[Scan, list[int], int, PlanOptions],
) -> None:
    scan, sizes, overhead, options = job
    planned = plan(scan, np.array(sizes, np.int64), overhead, options)
    assert sorted(planned.order.tolist()) == list(range(len(scan)))
    assert [0, *(shard.stop for shard in planned.shards)] == [*(shard.start for shard in planned.shards), len(scan)]
    for shard in planned.shards:
        members = planned.order[shard.start : shard.stop].tolist()
        assert members
        assert {planned.scan.splits[planned.scan.split[i]] for i in members} == {shard.split}
        assert shard.bytes == overhead + sum(sizes[i] for i in members)
        one_unit = len(members) == 1 or (scan.unit is not None and len(set(scan.unit[members].tolist())) == 1)
        assert one_unit or shard.bytes <= options.shard_bytes
        assert one_unit or options.shard_samples is None or len(members) <= options.shard_samples
    numbers = Counter(shard.split for shard in planned.shards)
    for name in numbers:
        assert [shard.number for shard in planned.shards if shard.split == name] == list(range(numbers[name]))


@given(jobs())
def test_units_stay_whole_and_in_their_order(job: tuple[Scan, list[int], int, PlanOptions]) -> None:
    scan, sizes, overhead, options = job
    planned = plan(scan, np.array(sizes, np.int64), overhead, options)
    if scan.unit is None:
        return
    shard_of = {
        i: number
        for number, shard in enumerate(planned.shards)
        for i in planned.order[shard.start : shard.stop].tolist()
    }
    place = {i: at for at, i in enumerate(planned.order.tolist())}
    for unit in set(scan.unit.tolist()):
        members = np.flatnonzero(scan.unit == unit).tolist()
        assert len({shard_of[i] for i in members}) == 1
        assert [place[i] for i in members] == list(range(place[members[0]], place[members[0]] + len(members)))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(30, 200),
    st.none() | st.integers(1, 20),
)
def test_shards_are_few_and_even(sizes: list[int], limit: int, most: int | None) -> None:
    ends = cut(np.array(sizes), 0, limit, most)
    assert ends == sorted(set(ends))
    assert ends[-1] == len(sizes)
    fewest = max(-(-sum(sizes) // limit), -(-len(sizes) // most) if most else 1)
    # Cutting greedily, two neighbours hold more than one shard may: so never twice as many as needed.
    assert len(ends) <= max(2 * fewest, fewest + 2) + (2 * fewest if most else 0)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 12_345])
def test_equal_samples_make_equal_shards(count: int) -> None:
    for most in (None, 100):
        ends = cut(np.full(count, 10), 24, 10_024, most)
        sizes = np.diff([0, *ends])
        assert sizes.max() - sizes.min() <= 1
        assert sizes.max() <= (most or 1000)
        assert len(ends) <= -(-count // (most or 1000)) + 1


def test_shards_limited_by_samples_are_even_in_samples() -> None:
    sizes = np.random.default_rng(0).integers(1, 10**6, 1000)
    counts = np.diff([0, *cut(sizes, 0, 10**12, 100)])
    assert set(counts.tolist()) == {100}


def test_samples_of_no_bytes_are_not_lost() -> None:
    assert cut(np.zeros(5, np.int64), 0, 100, None) == [5]
    assert cut(np.array([4, 4, 0, 0]), 0, 4, None)[-1] == 4
    assert cut(np.zeros(0, np.int64), 0, 100, None) == []


def test_sizes_beyond_what_any_disk_holds() -> None:
    ends = cut(np.full(4096, 2**50), 1024, 2**52 + 1024, None)
    assert [b - a for a, b in pairwise([0, *ends])] == [4] * 1024
    many = cut(np.full(300_000, 10**9), 1024, 512 * 10**6, None)
    assert many == list(range(1, 300_001))


def test_a_sample_larger_than_a_shard_is_alone_and_named_in_a_warning() -> None:
    scan = scan_of(numbered(4))
    planned = plan(scan, np.array([10, 500, 10, 10]), 5, PlanOptions(shard_bytes=100, shuffle=False))
    assert [shard.stop - shard.start for shard in planned.shards] == [1, 1, 2]
    assert planned.warnings == ("1 sample(s) are larger than --shard-size; each gets a shard of its own",)


def test_a_series_larger_than_a_shard_is_whole_and_named_in_a_warning() -> None:
    scan = scan_of(numbered(5), units=[3, 3, 3, 8, 8])
    planned = plan(scan, np.full(5, 10), 0, PlanOptions(shard_bytes=100, shard_samples=2, shuffle=False))
    assert [shard.stop - shard.start for shard in planned.shards] == [3, 2]
    assert planned.warnings == (
        "1 series are larger than --shard-size or --shard-samples; each gets a shard of its own",
    )


# ---------------------------------------------------------------- order


@given(st.permutations(numbered(12)), st.integers(0, 5))
def test_the_order_depends_on_keys_and_seed_alone(keys: list[bytes], seed: int) -> None:
    options = PlanOptions(seed=seed)
    expected = keys_by_split(plan(scan_of(numbered(12)), np.ones(12, np.int64), 0, options))
    assert keys_by_split(plan(scan_of(keys), np.ones(12, np.int64), 0, options)) == expected


def test_seeds_give_different_orders_and_no_shuffle_keeps_the_source() -> None:
    keys = numbered(50)
    orders = {
        tuple(plan(scan_of(keys), np.ones(50, np.int64), 0, PlanOptions(seed=seed)).order.tolist())
        for seed in range(20)
    }
    assert len(orders) == 20
    assert plan(scan_of(keys), np.ones(50, np.int64), 0, PlanOptions(shuffle=False)).order.tolist() == list(range(50))


def test_splits_are_packed_one_after_the_other() -> None:
    scan = scan_of(numbered(6), splits=["train", "val"] * 3)
    planned = plan(scan, scan.sizes, 0, PlanOptions(shuffle=False))
    assert planned.order.tolist() == [0, 2, 4, 1, 3, 5]
    assert [(shard.split, shard.number) for shard in planned.shards] == [("train", 0), ("val", 0)]


def test_hashes_that_must_never_change() -> None:
    """Splits, folds and orders of every dataset follow from them."""
    keys = Strings.of([b"", b"a", b"n01440764/n01440764_10026", b"\xff" * 300])
    found = {
        (seed, purpose): [int(value) for value in key_hash(keys, seed, purpose)]
        for seed, purpose in ((0, b"split"), (7, b"shuffle"))
    }
    assert found == GOLDEN


GOLDEN: dict[tuple[int, bytes], list[int]] = {
    (0, b"split"): [0x6767DE79E8729EBF, 0xBC8A62CA2D9A56B0, 0x579D44BCBCC07218, 0x7809925B22D9B649],
    (7, b"shuffle"): [0x2881B0E040C7317E, 0x29D062A061370B36, 0xE11ED621BF826394, 0x771551CE41AEFE15],
}


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(-5, 5), st.sampled_from([b"split", b"fold"]))
def test_a_hash_is_of_its_key_alone(keys: list[bytes], seed: int, purpose: bytes) -> None:
    together = key_hash(Strings.of(keys), seed, purpose).tolist()
    assert together == [int(key_hash(Strings.of([key]), seed, purpose)[0]) for key in keys]
    assert len(set(together)) == len(set(keys))


def test_many_and_long_keys_are_hashed_as_one_by_one() -> None:
    keys = [b"%d" % i * (1 + i % 50) for i in range(3000)] + [b"x" * 200_000, b"y"]
    together = key_hash(Strings.of(keys), 3, b"shuffle")
    for i in (0, 1, 1234, 2999, 3000, 3001):
        assert together[i] == key_hash(Strings.of([keys[i]]), 3, b"shuffle")[0]


def test_hashes_are_even() -> None:
    share = key_hash(Strings.of(numbered(20_000)), 0, b"split").astype(np.float64) / 2**64
    counts, _ = np.histogram(share, bins=16, range=(0, 1))
    assert abs(counts - 1250).max() < 5 * 1250**0.5
    assert mix(np.arange(3, dtype=np.uint64)).tolist()[0] == 0xE220A8397B1DCDAF  # splitmix64's first output of seed 0


# ---------------------------------------------------------------- splits


@given(
    st.integers(0, 3), st.sets(st.integers(0, 500), min_size=1, max_size=40), st.sets(st.integers(0, 500), max_size=40)
)
def test_a_sample_never_changes_sides_as_data_grows(seed: int, old: set[int], new: set[int]) -> None:
    before = sides(scan_of([b"c/%d" % i for i in sorted(old)]), seed)
    after = sides(scan_of([b"c/%d" % i for i in sorted(old | new)]), seed)
    assert {key: after[key] for key in before} == before


def test_a_file_of_the_same_stem_moves_nothing() -> None:
    """The key then carries the extension; the side must not depend on that."""
    for i in range(200):
        alone = sides(scan_of([b"c/%d" % i]))
        both = sides(scan_of([b"c/%d%%2Ejpg" % i, b"c/%d%%2EPNG" % i]))
        assert set(both.values()) == set(alone.values())


@pytest.mark.parametrize(
    ("key", "lasts"),
    [
        (b"c/a", b"c/a"),
        (b"c/a%2Ejpg", b"c/a"),
        (b"c/a%2EJPEG", b"c/a"),
        (b"c/a%2Ejpg%2Epng", b"c/a"),
        (b"c/v1%2E2", b"c/v1%2E2"),
        (b"c/a%2Ejpgs", b"c/a%2Ejpgs"),
        (b"c%2Ejpg/a", b"c%2Ejpg/a"),
        (b"c/a%252Ejpg", b"c/a%252Ejpg"),
    ],
)
def test_what_of_a_key_lasts(key: bytes, lasts: bytes) -> None:
    assert list(lasting(Strings.of([key]))) == [lasts]
    assert list(lasting(Strings.of([key] * 5000))) == [lasts] * 5000


def test_fractions_are_met() -> None:
    counts = Counter(sides(scan_of(numbered(20_000))).values())
    for name, fraction in (("train", 0.7), ("val", 0.2), ("test", 0.1)):
        assert abs(counts[name] / 20_000 - fraction) < 0.015


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 3))
def test_an_exact_split_is_exact_in_each_class(labels: list[int], seed: int) -> None:
    scan = scan_of(numbered(len(labels)), labels)
    side = sides(scan, seed, split_exact=True)
    for label in set(labels):
        of_class = [side[key] for key, found in zip(scan.keys, labels, strict=True) if found == label]
        counts, total = Counter(of_class), len(of_class)
        assert abs(counts["train"] - 0.7 * total) <= 0.5 + 1e-9
        assert abs(counts["train"] + counts["val"] - 0.9 * total) <= 0.5 + 1e-9


def test_groups_stay_together() -> None:
    keys = [b"c%d/patient%d_%d" % (i % 2, i % 37, i) for i in range(500)]
    side = sides(scan_of(keys), group_regex=r"patient(\d+)_")
    by_patient: dict[int, set[str]] = {}
    for i, key in enumerate(keys):
        by_patient.setdefault(i % 37, set()).add(side[key])
    assert all(len(found) == 1 for found in by_patient.values())
    assert set(side.values()) == {"train", "val", "test"}


def test_a_group_without_parentheses_is_all_that_matches() -> None:
    scan = scan_of([b"a1/x", b"a1/y", b"b2/x"])
    assert sides(scan, group_regex="^[^/]+")[b"a1/x"] == sides(scan, group_regex="^[^/]+")[b"a1/y"]


def test_a_path_outside_all_groups_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"matches nothing in 1 path\(s\), for example 'a/other.jpg'"):
        sides(scan_of([b"a/p1", b"a/other"]), group_regex="p[0-9]")


@pytest.mark.parametrize("options", [{}, {"split_exact": True}, {"group_regex": "s[0-9]+"}])
def test_a_series_is_on_one_side(options: dict[str, object]) -> None:
    keys = [b"s%d/%d" % (series, i) for series in range(60) for i in range(3)]
    side = sides(scan_of(keys, [0] * 180, units=[series for series in range(60) for _ in range(3)]), **options)
    assert all(len({side[b"s%d/%d" % (series, i)] for i in range(3)}) == 1 for series in range(60))
    assert set(side.values()) == {"train", "val", "test"}


def test_classes_missing_from_a_split_are_named() -> None:
    keys = [b"a/1", b"b/1", b"a/2", b"t/1"]
    labels, splits = [0, 1, 0, -1], ["train", "train", "val", "test"]
    planned = plan(scan_of(keys, labels, splits, classes=("a", "b\n")), np.ones(4, np.int64), 0, PlanOptions())
    assert planned.warnings == (r"split 'val' has no sample of 1 class(es): b\n",)
    one = plan(scan_of(keys, [0, 1, 2, 3]), np.ones(4, np.int64), 0, PlanOptions(split=(("x", 0.999), ("y", 0.001))))
    assert one.warnings == ("split 'y' has no sample",)


@pytest.mark.parametrize(
    ("labels", "classes", "says"),
    [
        ([0, 0, 2], ("a", "b", "c"), ("class 'b' has no sample",)),
        ([1, 1, 1], ("a", "b", "c", "d", "e", "f", "g\n", "h"), ("7 of 8 classes have no sample: a, c, d, e, f, …",)),
        ([0, 1, 2], ("a", "b", "c"), ()),
        ([0, 7, -1], ("a",), ()),  # 7 is a number beyond the names
        ([-1, -1, -1], ("a", "b"), ()),  # labels are files, and not read yet
        ([0, 2, 2], None, ()),
    ],
)
def test_classes_without_a_sample_are_named(
    labels: list[int], classes: tuple[str, ...] | None, says: tuple[str, ...]
) -> None:
    scan = scan_of(numbered(3), labels, classes=classes)
    assert plan(scan, np.ones(3, np.int64), 0, PlanOptions()).warnings == says


# ---------------------------------------------------------------- subsets


@given(st.integers(1, 7), st.integers(0, 3), st.integers(1, 60))
def test_folds_part_the_data(parts: int, seed: int, count: int) -> None:
    scan = scan_of(numbered(count))
    found: list[bytes] = []
    for part in range(1, parts + 1):
        try:
            found += list(select(scan, seed=seed, fold=(part, parts)).keys)
        except UsageError as error:  # a part may have none of few samples
            assert "empty" in str(error)
    assert sorted(found) == numbered(count)


@given(st.integers(1, 60), st.integers(1, 70))
def test_a_limit_takes_so_many(count: int, limit: int) -> None:
    scan = scan_of(numbered(count))
    chosen = list(select(scan, seed=0, limit=limit).keys)
    assert len(chosen) == min(count, limit)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(select(scan, seed=0, limit=limit + 1).keys)


def test_a_limit_keeps_the_shares_of_classes() -> None:
    labels = [i % 4 for i in range(8000)]
    counts = np.bincount(select(scan_of(numbered(8000), labels), seed=0, limit=2000).label)
    assert abs(counts - 500).max() < 100


def test_folds_and_limits_keep_series_whole() -> None:
    keys = [b"s%d/%d" % (series, i) for series in range(40) for i in range(3)]
    scan = scan_of(keys, units=[series for series in range(40) for _ in range(3)])
    parts = [select(scan, seed=0, fold=(k, 4)) for k in (1, 2, 3, 4)]
    assert sum(map(len, parts)) == 120
    limited = select(scan, seed=0, limit=10)
    for chosen in (*parts, limited):
        assert chosen.unit is not None
        assert set(Counter(chosen.unit.tolist()).values()) == {3}
    assert len(limited) == 9
    with pytest.raises(UsageError, match="empty"):
        select(scan, seed=0, limit=2)


def test_chosen_and_dropped_keys() -> None:
    scan = scan_of(numbered(5))
    chosen = frozenset((b"c/00001", b"c/00003"))
    assert set(select(scan, seed=0, keys=chosen).keys) == chosen
    assert set(select(scan, seed=0, drop_keys=chosen).keys) == set(numbered(5)) - chosen
    assert select(scan, seed=0) is scan
    assert list(select(scan, seed=0, keys=chosen, drop_keys=frozenset((b"c/00001",))).keys) == [b"c/00003"]


@pytest.mark.parametrize("option", ["keys", "drop_keys"])
def test_a_key_that_is_in_no_sample_is_an_error(option: str) -> None:
    listed = frozenset((b"c/00001", b"typo\n", b"other"))
    with pytest.raises(UsageError, match=r"2 of the 3 listed keys are in no sample: other, typo\\n"):
        select(scan_of(numbered(5)), seed=0, **{option: listed})  # type: ignore[arg-type]


def test_dropping_everything_is_an_error() -> None:
    with pytest.raises(UsageError, match="empty"):
        select(scan_of(numbered(5)), seed=0, drop_keys=frozenset(numbered(5)))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shard_bytes": 0}, "--shard-size must be positive"),
        ({"shard_samples": 0}, "--shard-samples must be at least 1"),
        ({"split_exact": True}, "give --split as well"),
        ({"group_regex": "x"}, "give --split as well"),
        ({"split": (("a", 0.5), ("b", 0.5)), "split_exact": True, "group_regex": "x"}, "cannot keep --group-regex"),
        ({"split": (("a", 0.5), ("a", 0.5))}, "different words"),
        ({"split": (("../a", 1.0),)}, "different words"),
        ({"split": (("a", 0.5), ("b", 0.4))}, "add up to 1"),
        ({"split": (("a", 1.5), ("b", -0.5))}, "positive"),
        ({"split": (("a", float("nan")),)}, "positive"),
        ({"split": (("a", 1.0),), "group_regex": "("}, "--group-regex"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        PlanOptions(**options)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_the_examples_in_the_documentation() -> None:
    result = doctest.testmod(packer.plan)
    assert result.attempted >= 2
    assert result.failed == 0
