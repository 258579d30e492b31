"""What an epoch holds and how it is arranged: shuffles, windows, draws, buckets, mixtures, subsets."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loaders.arrange
import loaders.epoch
import loaders.order
from loaders.order import (
    AnyOrder,
    Deal,
    Mixture,
    Order,
    batch_count,
    batches,
    padding_waste,
    resolve_subset,
    sequence,
)
from packer.errors import UsageError

unhurried = settings(deadline=None)  # a busy machine is no failure
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**40)

GOLDEN = {
    "global": [6, 2, 8, 5, 9, 3, 0, 11, 1, 4, 10, 7],
    "weighted": [10, 2, 11, 8, 5, 2, 1, 7, 4, 8, 5, 11],
    "balanced": [3, 10, 4, 8, 9, 11, 1, 9, 0, 2, 4, 7],
    "window": [6, 8, 5, 3, 4, 7, 2, 9, 0, 11, 1, 10],
    "buckets": [0, 11, 1, 5, 9, 7, 3, 8, 10, 6, 2, 4],
    "mixture": [11, 5, 10, 9, 3, 12, 9, 12, 1, 11, 6, 10],
}


def sizes(rng: np.random.Generator, samples: int, low: int = 8, high: int = 4000) -> dict[str, Any]:
    return {name: rng.integers(low, high, samples) for name in ("heights", "widths")}


# --- seeds and epochs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "window", "shards": np.arange(400) // 40, "window_shards": 2},
        {"labels": np.arange(400) % 7},
        {"weights": np.arange(400.0)},
        {"heights": np.arange(1, 401), "widths": np.arange(1, 401)},
        {"epoch_samples": 400, "subset": np.arange(50, 400)},
    ],
    ids=["global", "window", "balanced", "weighted", "buckets", "stretch"],
)
def test_other_seeds_and_other_epochs_give_other_orders(options: dict[str, Any]):
    made = [sequence(Order(400, seed, **options), epoch, 8) for seed in (0, 1, 2**63) for epoch in (0, 1, 2)]
    for i, one in enumerate(made):
        for other in made[:i]:
            assert np.mean(one == other) < 0.1


def test_the_order_never_changes_between_machines_and_numpy_versions():
    # Reference values of SplitMix64 (seed 1234567), as every implementation of it gives them.
    words = [loaders.arrange.mix((1234567 + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(2)]
    assert words == [6457827717110365317, 3203168211198807973]
    squares, cubes = (np.arange(12) ** power % 11 + 1 for power in (2, 3))
    orders: dict[str, AnyOrder] = {
        "global": Order(12, 3),
        "weighted": Order(12, 3, weights=np.arange(12) % 3),
        "balanced": Order(12, 3, labels=np.arange(12) % 5 // 2),
        "window": Order(12, 3, "window", shards=np.arange(12) // 3, window_shards=2),
        "buckets": Order(12, 3, heights=squares, widths=cubes),
        "mixture": Mixture((Order(9, 1), Order(4, 2)), (1, 2), 12, seed=3),
    }
    assert {name: sequence(order, 1, 4).tolist() for name, order in orders.items()} == GOLDEN
    assert resolve_subset("2/3", 12).tolist() == [2, 5, 8, 9]


def test_a_million_samples_take_three_words_each():
    tracemalloc.start()
    try:
        sequence(Order(10**6), 0, 64)
        assert tracemalloc.get_traced_memory()[1] < 38e6  # 8 MB of it are the result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_all_permutations_are_equally_likely(samples: int):
    times = Counter(tuple(sequence(Order(samples, seed=11), epoch, 1)) for epoch in range(6000))
    kinds = {2: 2, 3: 6, 4: 24}[samples]
    assert len(times) == kinds
    mean = 6000 / kinds
    chi_square = sum((count - mean) ** 2 / mean for count in times.values())
    assert chi_square < kinds - 1 + 4 * np.sqrt(2 * (kinds - 1))  # 4 standard deviations


@pytest.mark.parametrize("subset", [None, [2, 0, 1]])
def test_a_sequence_is_the_callers_own(subset: list[int] | None):
    order = Order(3, shuffle=False, subset=subset)
    first = sequence(order, 0, 1)
    first[:] = 9
    assert sequence(order, 0, 1).tolist() == (subset or [0, 1, 2])


def test_a_big_permutation_has_no_trend():
    made = sequence(Order(100_000, seed=5), 0, 1)
    places = np.arange(100_000)
    assert np.array_equal(np.sort(made), places)
    assert abs(np.corrcoef(places, made)[0, 1]) < 4 / np.sqrt(100_000)
    assert abs(np.corrcoef(made[:-1], made[1:])[0, 1]) < 4 / np.sqrt(100_000)
    assert abs(np.corrcoef(made, sequence(Order(100_000, seed=5), 1, 1))[0, 1]) < 4 / np.sqrt(100_000)


# --- windows ---------------------------------------------------------------------------------------


@unhurried
@given(st.integers(1, 40), st.integers(1, 12), SEEDS)
def test_a_window_opens_no_more_shards_than_asked(shards: int, window: int, seed: int):
    of_sample = np.repeat(np.arange(shards), 5)
    order = Order(len(of_sample), seed, "window", shards=of_sample, window_shards=window)
    visited = of_sample[sequence(order, 0, 1)]
    first, last = (
        {int(s): i for i, s in steps} for steps in (list(enumerate(visited))[::-1], list(enumerate(visited)))
    )
    open_at = [sum(first[s] <= i <= last[s] for s in range(shards)) for i in range(len(visited))]
    assert max(open_at) <= window
    longest = max(last[s] - first[s] for s in range(shards))
    assert longest < 5 * window


def test_a_window_over_all_shards_is_a_global_permutation():
    order = Order(3, 1, "window", shards=[0, 1, 2], window_shards=3)
    times = Counter(tuple(sequence(order, epoch, 1)) for epoch in range(6000))
    assert len(times) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in times.values()) < 5 + 4 * np.sqrt(10)


def test_shards_meet_as_often_as_documented():
    shards, window, epochs = 8, 2, 3000
    order = Order(shards, 2, "window", shards=np.arange(shards), window_shards=window)
    together = sum(
        {int(n) for n in made[2 * i : 2 * i + 2]} == {0, 5}
        for made in (sequence(order, epoch, 1) for epoch in range(epochs))
        for i in range(shards // 2)
    )
    chance = (window - 1) / (shards - 1)
    assert abs(together / epochs - chance) < 4 * np.sqrt(chance * (1 - chance) / epochs)


# --- balanced and weighted ---------------------------------------------------------------------------


@unhurried
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 200), SEEDS, EPOCHS)
def test_balanced_draws_every_class_and_every_sample_of_a_class_equally_often(
    labels: list[int], length: int, seed: int, epoch: int
):
    order = Order(len(labels), seed, labels=labels, epoch_samples=length)
    made = sequence(order, epoch, 4)
    assert len(made) == length == order.length
    of_class = Counter(labels[n] for n in made)
    per_class = [of_class[c] for c in set(labels)]
    assert max(per_class) - min(per_class) <= 1
    of_sample = Counter(made.tolist())
    for c in set(labels):
        times = [of_sample[n] for n, label in enumerate(labels) if label == c]
        assert max(times) - min(times) <= 1


@unhurried
@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 1e6]), min_size=1, max_size=40).filter(any),
    st.integers(1, 200),
    SEEDS,
)
def test_weighted_draws_round_the_expected_count(weights: list[float], length: int, seed: int):
    made = sequence(Order(len(weights), seed, weights=weights, epoch_samples=length), 0, 4)
    assert len(made) == length
    expected = length * np.array(weights) / sum(weights)
    times = np.bincount(made, minlength=len(weights))
    assert np.all(np.abs(times - expected) < 1 + 1e-6)
    assert not times[np.array(weights) == 0].any()


def test_weighted_draws_have_the_right_mean_and_no_place():
    weights = np.array([1, 2, 3, 4, 0.5, 0])
    epochs, length = 4000, 4
    made = np.array(
        [sequence(Order(6, 9, weights=weights, epoch_samples=length), epoch, 1) for epoch in range(epochs)]
    )
    share = weights / weights.sum()
    deviation = np.sqrt(share * (1 - share) / epochs)
    for place in range(length):  # every place of the epoch by itself has the distribution
        found = np.bincount(made[:, place], minlength=6) / epochs
        assert np.all(np.abs(found - share) <= 4 * deviation)


def test_the_odd_places_of_a_balanced_epoch_go_to_any_class():
    labels = np.arange(9) % 3
    order = Order(9, 8, labels=labels, epoch_samples=4)
    epochs = 3000
    favoured = Counter(np.bincount(labels[sequence(order, epoch, 1)]).argmax() for epoch in range(epochs))
    assert all(abs(favoured[c] / epochs - 1 / 3) < 4 * np.sqrt(2 / 9 / epochs) for c in range(3))


def test_balanced_places_are_random_and_rare_classes_spread():
    labels = np.array([0] * 990 + [1] * 10)
    made = sequence(Order(1000, 4, labels=labels), 0, 10)
    in_batches = labels[made].reshape(-1, 10).sum(1)
    assert in_batches.sum() == 500
    # 100 batches, each a hypergeometric draw of 10 from 500 and 500: variance 10/4 · 990/999
    assert abs(in_batches.var() / (2.5 * 990 / 999) - 1) < 4 * np.sqrt(2 / 99)


@pytest.mark.parametrize("kind", [{"labels": [0, 0, 0, 1]}, {"weights": [1, 1, 1, 1]}])
def test_unshuffled_draws_ascend(kind: dict[str, Any]):
    made = sequence(Order(4, shuffle=False, epoch_samples=12, **kind), 0, 1)
    assert np.all(np.diff(made) >= 0)
    assert len(made) == 12


@unhurried
@given(st.integers(1, 40), st.integers(1, 100), SEEDS, st.sampled_from([True, False]))
def test_short_and_long_epochs_walk_through_whole_passes(samples: int, length: int, seed: int, shuffle: bool):
    order = Order(samples, seed, shuffle, epoch_samples=length)
    walked = np.concatenate([sequence(order, epoch, 1) for epoch in range(-(-3 * samples // length))])
    for turn in range(3):
        assert sorted(walked[turn * samples : (turn + 1) * samples]) == list(range(samples))


def test_draws_come_from_the_subset_only():
    for kind in ({"labels": np.arange(20) % 3}, {"weights": np.ones(20)}, {}):
        made = sequence(Order(20, subset=resolve_subset([3, 4, 5, 9], 20), epoch_samples=50, **kind), 0, 4)
        assert set(made.tolist()) == {3, 4, 5, 9}


# --- buckets ---------------------------------------------------------------------------------------


def waste(order: Order, size: int, epoch: int = 0) -> float:
    heights, widths = order.sizes or (None, None)
    return padding_waste(heights, widths, batches(order, Deal(size, tail="exact"), epoch))


@pytest.mark.parametrize("samples", [2000, 40_000])
@pytest.mark.parametrize("shape", ["photos", "two orientations", "one width", "one height", "square"])
def test_buckets_at_least_halve_the_padding_of_random_batches(samples: int, shape: str):
    rng = np.random.default_rng(1)
    side = np.exp(rng.normal(np.log(430), 0.4, samples)).astype(int) + 1
    aspect = rng.choice([3 / 4, 1.0, 4 / 3, 16 / 9], samples)
    flat_side = np.full(samples, 300)
    heights, widths = {
        "photos": ((side / aspect).astype(int) + 1, side),
        "two orientations": tuple(np.where(rng.random(samples) < 0.5, [[375], [500]], [[500], [375]])),
        "one width": (side, flat_side),
        "one height": (flat_side, side),
        "square": (side, side),
    }[shape]
    order = Order(samples, heights=heights, widths=widths)
    plain = sequence(Order(samples), 0, 32)
    random_waste = padding_waste(heights, widths, np.array_split(plain, range(32, samples, 32)))
    assert waste(order, 32) < random_waste / 2


def test_padding_waste_by_hand():
    assert padding_waste([10, 20, 7], [10, 10, 7], [np.array([0, 1]), np.array([2])]) == pytest.approx(
        100 / 449
    )
    assert padding_waste([5], [5], []) == 0


def test_buckets_differ_in_membership_between_epochs():
    rng = np.random.default_rng(0)
    order = Order(2000, **sizes(rng, 2000), pool_batches=16)
    first, second = ({frozenset(b.tolist()) for b in batches(order, Deal(8), epoch)} for epoch in (0, 1))
    assert len(first & second) < 5


def test_buckets_stay_within_their_window():
    shards = np.arange(1600) // 100
    alike = Order(1600, shuffle="window", shards=shards, window_shards=2)
    sized = sizes(np.random.default_rng(2), 1600)
    made = sequence(replace(alike, **sized, pool_batches=25), 0, 8)  # a pool of 200 samples is a window
    for pool, window in zip(made.reshape(8, 200), sequence(alike, 0, 8).reshape(8, 200), strict=True):
        assert set(pool.tolist()) == set(window.tolist())


def test_buckets_visit_sizes_in_random_order():
    side = np.arange(1, 4097)
    areas = [
        float(side[batch].mean()) for batch in batches(Order(4096, heights=side, widths=side), Deal(16), 0)
    ]
    places = np.arange(len(areas))
    assert abs(np.corrcoef(places, areas)[0, 1]) < 4 / np.sqrt(len(areas))


# --- mixtures --------------------------------------------------------------------------------------


@unhurried
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(20, 80), st.data())
def test_a_mixture_keeps_its_shares_and_each_part_its_passes(
    lengths: list[int], length: int, data: st.DataObject
):
    weights = tuple(data.draw(st.lists(st.floats(1, 5), min_size=len(lengths), max_size=len(lengths))))
    parts = tuple(Order(n, seed) for seed, n in enumerate(lengths))
    mixture = Mixture(parts, weights, length, seed=data.draw(SEEDS))
    walked: list[list[int]] = [[] for _ in parts]
    for epoch in range(6):
        made = sequence(mixture, epoch, 4)
        part, local = mixture.locate(made)
        assert np.array_equal(mixture.offsets[part] + local, made)
        times = np.bincount(part, minlength=len(parts))
        assert times.sum() == length
        assert np.all(np.abs(times - length * np.array(weights) / sum(weights)) < 1)
        for d, numbers in enumerate(walked):
            numbers += local[part == d].tolist()
    for numbers, n in zip(walked, lengths, strict=True):
        for turn in range(len(numbers) // n):
            assert sorted(numbers[turn * n : (turn + 1) * n]) == list(range(n))


def test_the_turns_of_a_mixture_are_spread_over_the_epoch():
    mixture = Mixture((Order(900, 0), Order(100, 1)))
    part, _ = mixture.locate(sequence(mixture, 0, 10))
    in_batches = part.reshape(-1, 10).sum(1)
    variance = 10 * 0.1 * 0.9 * 990 / 999
    assert abs(in_batches.var() / variance - 1) < 4 * np.sqrt(2 / 99)


def test_an_unshuffled_mixture_is_one_part_after_the_other():
    mixture = Mixture((Order(3, shuffle=False), Order(2, shuffle=False)), shuffle=False)
    assert sequence(mixture, 0, 1).tolist() == [0, 1, 2, 3, 4]


def test_a_mixture_of_sized_parts_is_bucketed_across_them():
    rng = np.random.default_rng(3)
    parts = tuple(Order(n, seed, **sizes(rng, n, 100, 800)) for seed, n in enumerate((800, 300)))
    mixture = Mixture(parts, (1, 1), 1000)
    assert mixture.sizes is not None
    bucketed = padding_waste(*mixture.sizes, batches(mixture, Deal(10), 0))
    plain = Mixture(tuple(Order(part.samples, part.seed) for part in parts), (1, 1), 1000)
    assert bucketed < padding_waste(*mixture.sizes, batches(plain, Deal(10), 0)) / 2
    both = [set(mixture.locate(batch)[0].tolist()) == {0, 1} for batch in batches(mixture, Deal(10), 0)]
    assert np.mean(both) > 0.9


def test_parts_may_be_balanced_or_windowed():
    balanced = Order(10, labels=[0] * 9 + [1], epoch_samples=20)
    windowed = Order(20, shuffle="window", shards=np.arange(20) // 5, window_shards=1)
    mixture = Mixture((balanced, windowed))
    part, local = mixture.locate(sequence(mixture, 0, 1))
    assert Counter(local[part == 0] == 9) == {True: 10, False: 10}
    assert np.array_equal(local[part == 1], sequence(windowed, 0, 1))


# --- subsets ---------------------------------------------------------------------------------------


@unhurried
@given(st.integers(2, 200), st.data())
def test_folds_are_a_partition_of_equal_parts(samples: int, data: st.DataObject):
    folds = data.draw(st.integers(2, min(samples, 12)))
    made = [resolve_subset(f"{k}/{folds}", samples) for k in range(1, folds + 1)]
    assert sorted(np.concatenate(made)) == list(range(samples))
    assert max(map(len, made)) - min(map(len, made)) <= 1
    for k, fold in enumerate(made, 1):
        assert np.array_equal(fold, np.sort(fold))
        rest = resolve_subset(f"-{k}/{folds}", samples)
        assert sorted([*fold, *rest]) == list(range(samples))


def test_a_fold_is_random_and_always_the_same():
    fold = resolve_subset("1/4", 10_000)
    assert np.array_equal(fold, resolve_subset("1/4", 10_000))
    assert abs(fold.mean() - 5000) < 4 * 10_000 / np.sqrt(12 * 2500)
    assert len(set(np.diff(fold).tolist())) > 5


def test_a_subset_keeps_its_order_and_takes_masks():
    assert sequence(Order(5, shuffle=False, subset=resolve_subset([4, 0, 2], 5)), 7, 1).tolist() == [4, 0, 2]
    assert resolve_subset([True, False, True], 3).tolist() == [0, 2]
    assert resolve_subset([], 3).tolist() == []
    assert batch_count(Order(3, subset=resolve_subset([], 3)), Deal(2, tail="exact")) == 0


@pytest.mark.parametrize(
    ("subset", "words"),
    [
        ([0, 0], "sample 0 more than once"),
        ([3], "samples are 0 to 2"),
        ([-1], "samples are 0 to 2"),
        ([0.5], "float64"),
        ([[0]], "shape"),
        ([True], "mask"),
        ("0/2", "fold"),
        ("3/2", "fold"),
        ("1/4", "fold"),
        ("1/1", "fold"),
        ("x", "fold"),
    ],
)
def test_a_subset_that_cannot_be_meant_raises(subset: Any, words: str):
    with pytest.raises(UsageError, match=words):
        resolve_subset(subset, 3)


# --- what cannot be meant ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"samples": -1}, "-1 samples"),
        ({"shuffle": "yes"}, "shuffle"),
        ({"shuffle": "window"}, "needs shards"),
        ({"labels": [0, 1, 2], "weights": [1, 1, 1]}, "exclude"),
        ({"heights": [1, 1, 1]}, "widths"),
        ({"window_shards": 0}, "window_shards"),
        ({"pool_batches": 0}, "pool_batches"),
        ({"labels": [0, 1]}, "shape"),
        ({"labels": [0, -1, -1]}, "2 of 3 samples have no known label, the first is sample 1"),
        ({"labels": [0.5, 1, 2]}, "float64"),
        ({"heights": [1, 1, -1], "widths": [1, 1, 1]}, "image height"),
        ({"weights": [0, 0, 0]}, "not all 0"),
        ({"weights": [1, -1, 0]}, "weights"),
        ({"weights": [1, np.nan, 0]}, "weights"),
        ({"epoch_samples": 0}, "epoch_samples"),
        ({"samples": 0, "epoch_samples": 4}, "epoch_samples"),
        ({"subset": [3]}, "subset"),
    ],
)
def test_an_order_that_cannot_be_meant_raises(options: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        Order(**{"samples": 3, **options})


def test_columns_of_samples_left_out_may_be_unknown():
    assert sorted(sequence(Order(3, labels=[0, -1, 1], subset=[0, 2]), 0, 1)) == [0, 2]


def test_a_mixture_that_cannot_be_meant_raises():
    one, sized, empty = Order(3), Order(3, heights=[1] * 3, widths=[1] * 3), Order(0)
    for parts, options in (
        ((), {}),
        ((one, sized), {}),
        ((one,), {"weights": (1, 1)}),
        ((one,), {"weights": (0,)}),
        ((one,), {"seed": -1}),
        ((one, empty), {"weights": (1, 1)}),
        ((one, one), {"weights": (1, 1e-9)}),
        ((empty,), {"epoch_samples": 2}),
        ((one,), {"epoch_samples": 0}),
        ((one, Order(1)), {"epoch_samples": 1}),
    ):
        with pytest.raises(UsageError):
            Mixture(parts, **options)
    assert Mixture((one, empty)).length == 3
