"""How an epoch is dealt: every sample exactly once, for every rank, through every resume."""

from __future__ import annotations

import doctest
import json
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
    Numbers,
    Order,
    batch_count,
    batch_counts,
    batches,
    check_state,
    make_state,
    resolve_subset,
    sequence,
)
from packer.errors import PackerError, StateError, UsageError

unhurried = settings(deadline=None)  # a busy machine is no failure

# --- what the properties range over ----------------------------------------------------------------

DEALS = st.tuples(st.integers(1, 7), st.integers(1, 5))  # batch size, world size
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**40)


@st.composite
def columns(draw: st.DrawFn, samples: int) -> dict[str, Any]:
    """Options of an `Order` that change its arrangement, never what an epoch holds."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options: dict[str, Any] = {"shuffle": draw(st.sampled_from([True, False, "window"]))}
    if options["shuffle"] == "window":
        options["shards"] = rng.integers(0, draw(st.integers(1, 9)), samples)
        options["window_shards"] = draw(st.integers(1, 4))
    return options


def sizes(rng: np.random.Generator, samples: int, low: int = 8, high: int = 4000) -> dict[str, Any]:
    return {name: rng.integers(low, high, samples) for name in ("heights", "widths")}


@st.composite
def orders(draw: st.DrawFn, bucketed: bool = False) -> Order:
    """Orders whose epoch is every member of the subset exactly once."""
    samples = draw(st.integers(0, 90))
    rng = np.random.default_rng(samples)
    options = draw(columns(samples))
    if bucketed:
        options |= sizes(rng, samples) | {"pool_batches": draw(st.integers(1, 9))}
    if samples >= 2 and draw(st.booleans()):
        subset = draw(st.sampled_from(["1/2", "-2/2", [1, 0], np.arange(samples) % 3 > 0]))
        options["subset"] = resolve_subset(subset, samples)
    return Order(samples, draw(SEEDS), **options)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Mixtures whose epoch is the epochs of their parts."""
    parts = draw(st.lists(orders(), min_size=1, max_size=3))
    return Mixture(tuple(parts), seed=draw(SEEDS), shuffle=draw(st.booleans()))


def whole(order: AnyOrder) -> list[int]:
    """What an epoch must hold, sorted."""
    if isinstance(order, Mixture):
        starts = np.cumsum([0, *(part.samples for part in order.parts)])
        return sorted(
            int(start) + n for start, part in zip(starts, order.parts, strict=False) for n in whole(part)
        )
    return list(range(order.samples)) if order.subset is None else sorted(order.subset.tolist())


def every_rank(
    order: AnyOrder, size: int, world: int, tail: str, epoch: int, consumed: int = 0
) -> list[list[Numbers]]:
    deals = [Deal(size, rank, world, tail) for rank in range(world)]
    return [list(batches(order, deal, epoch, consumed)) for deal in deals]


def flat(ranks: list[list[Numbers]]) -> list[int]:
    return [int(n) for rank in ranks for batch in rank for n in batch]


# --- exactly once ----------------------------------------------------------------------------------


@unhurried
@given(st.one_of(orders(), orders(bucketed=True), mixtures()), DEALS, EPOCHS)
def test_evaluation_gives_every_sample_exactly_once_over_the_ranks(
    order: AnyOrder, deal: tuple[int, int], epoch: int
):
    size, world = deal
    ranks = every_rank(order, size, world, "exact", epoch)
    assert sorted(flat(ranks)) == whole(order)
    counts = [len(rank) for rank in ranks]
    assert max(counts) - min(counts) <= 1
    assert all(len(batch) for rank in ranks for batch in rank)
    assert batch_counts(order, Deal(size, 0, world, "exact")) == tuple(counts)


@unhurried
@given(st.one_of(orders(), orders(bucketed=True), mixtures()), DEALS, EPOCHS)
def test_training_gives_all_ranks_equally_many_full_batches(
    order: AnyOrder, deal: tuple[int, int], epoch: int
):
    size, world = deal
    ranks = every_rank(order, size, world, "drop", epoch)
    assert {len(rank) for rank in ranks} == {order.length // (size * world)}
    assert {len(batch) for rank in ranks for batch in rank} <= {size}
    taken = flat(ranks)
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(whole(order))
    assert set(batch_counts(order, Deal(size, 0, world))) == {len(ranks[0])}


@unhurried
@given(st.one_of(orders(), mixtures()), DEALS, EPOCHS)
def test_padding_repeats_less_than_one_sample_a_rank(order: AnyOrder, deal: tuple[int, int], epoch: int):
    size, world = deal
    ranks = every_rank(order, size, world, "pad", epoch)
    shapes = {tuple(len(batch) for batch in rank) for rank in ranks}
    assert len(shapes) == 1
    times = Counter(flat(ranks))
    assert sorted(times) == whole(order)
    assert times.total() - order.length < world
    assert set(batch_counts(order, Deal(size, 0, world, "pad"))) == {len(ranks[0])}


@unhurried
@given(orders(bucketed=True), DEALS, EPOCHS)
def test_padding_of_buckets_repeats_whole_batches(order: Order, deal: tuple[int, int], epoch: int):
    size, world = deal
    ranks = every_rank(order, size, world, "pad", epoch)
    whole_batches = {tuple(batch) for batch in batches(order, Deal(size, tail="exact"), epoch)}
    assert {tuple(batch) for rank in ranks for batch in rank} == whole_batches
    assert len({len(rank) for rank in ranks}) == 1
    assert sum(map(len, ranks)) - len(whole_batches) < world


@unhurried
@given(
    st.one_of(orders(), mixtures()), st.lists(st.tuples(DEALS, st.integers(0, 6)), max_size=4), DEALS, EPOCHS
)
def test_resumes_onto_other_ranks_and_batch_sizes_lose_and_repeat_nothing(
    order: AnyOrder, stages: list[tuple[tuple[int, int], int]], last: tuple[int, int], epoch: int
):
    consumed, seen = 0, []
    for (size, world), steps in stages:
        deals = [Deal(size, rank, world) for rank in range(world)]
        ranks = [batches(order, deal, epoch, consumed) for deal in deals]
        steps = min(steps, len(ranks[0]))
        seen += [int(n) for rank in ranks for batch in rank[:steps] for n in batch]
        states = [
            make_state(order, deal, epoch, rank.consumed_after(steps))
            for deal, rank in zip(deals, ranks, strict=True)
        ]
        assert all(state == states[0] for state in states)
        position = check_state(order, Deal(*last[:1]), json.loads(json.dumps(states[0])))
        assert position.epoch == epoch
        consumed = position.consumed
        assert consumed == len(seen)
    rest = every_rank(order, *last, "exact", epoch, consumed)
    assert batch_counts(order, Deal(last[0], 0, last[1], "exact"), consumed) == tuple(map(len, rest))
    assert sorted(seen + flat(rest)) == whole(order)


@unhurried
@given(
    orders(bucketed=True),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=4),
    st.sampled_from(["drop", "pad", "exact"]),
    EPOCHS,
)
def test_buckets_resume_onto_other_ranks_with_the_same_batches(
    order: Order, size: int, stages: list[tuple[int, int]], tail: str, epoch: int
):
    expected = [tuple(batch) for batch in batches(order, Deal(size, tail="exact"), epoch)]
    consumed, seen = 0, []
    for world, steps in stages:
        ranks = [batches(order, Deal(size, rank, world, tail), epoch, consumed) for rank in range(world)]
        full = (order.length - consumed) // (size * world)
        steps = min(steps, full)
        seen += [tuple(rank[step]) for step in range(steps) for rank in ranks]
        consumed = check_state(
            order, Deal(size), make_state(order, Deal(size), epoch, ranks[0].consumed_after(steps))
        ).consumed
    seen += [tuple(batch) for batch in batches(order, Deal(size, tail="exact"), epoch, consumed)]
    assert seen == expected


@unhurried
@given(
    st.one_of(orders(), orders(bucketed=True), mixtures()),
    DEALS,
    st.sampled_from(["drop", "pad", "exact"]),
    st.integers(0, 90),
)
def test_len_needs_no_epoch_and_is_exact(order: AnyOrder, deal: tuple[int, int], tail: str, consumed: int):
    size, world = deal
    consumed = min(consumed // size * size if order.sizes else consumed, order.length)
    for rank in range(world):
        mine = Deal(size, rank, world, tail)
        made = batches(order, mine, 3, consumed)
        assert batch_count(order, mine, consumed) == len(made) == len(list(made))
        assert made.consumed_after(0) == consumed
        assert all(consumed < made.consumed_after(n + 1) <= order.length for n in range(len(made)))


def test_a_rank_batch_behaves_like_a_sequence():
    made = batches(Order(10, shuffle=False), Deal(2, 1, 2, "pad"), 0)
    assert [batch.tolist() for batch in made] == [[2, 3], [6, 7], [9]]
    assert made[-1].tolist() == [9]
    assert [batch.tolist() for batch in made[1:]] == [[6, 7], [9]]
    assert made[0].dtype == np.int64
    with pytest.raises(IndexError):
        made[3]


def test_the_tail_by_hand():
    def dealt(tail: str, **options: Any) -> list[list[list[int]]]:
        order = Order(11, shuffle=False, **options)
        return [[batch.tolist() for batch in rank] for rank in every_rank(order, 3, 2, tail, 0)]

    assert dealt("drop") == [[[0, 1, 2]], [[3, 4, 5]]]
    assert dealt("pad") == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 0]]]
    assert dealt("exact") == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]]
    alike = {"heights": [8] * 11, "widths": [8] * 11}
    assert dealt("exact", **alike) == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]]
    assert every_rank(Order(1), 3, 3, "pad", 0) == [[0], [0], [0]]
    few = Order(5, shuffle=False, heights=[8] * 5, widths=[8] * 5)
    padded = [[batch.tolist() for batch in rank] for rank in every_rank(few, 3, 4, "pad", 0)]
    assert padded == [[[0, 1, 2]], [[3, 4]], [[0, 1, 2]], [[3, 4]]]
    padded = [[batch.tolist() for batch in rank] for rank in every_rank(few, 1, 3, "pad", 0)]
    assert padded == [[[0], [3]], [[1], [4]], [[2], [0]]]
    assert batch_counts(Order(1), Deal(3, 0, 3, "exact")) == (1, 0, 0)


# --- one order, one answer ---


@unhurried
@given(st.one_of(orders(), orders(bucketed=True), mixtures()), EPOCHS)
def test_the_same_seed_and_epoch_give_the_same_order(order: AnyOrder, epoch: int):
    again = replace(order)  # nothing may hang on state kept in the object
    assert np.array_equal(sequence(order, epoch, 4), sequence(again, epoch, 4))


# --- what does not fit -----------------------------------------------------------------------------


OTHERS: list[tuple[AnyOrder, str]] = [
    (Order(21, 1), "number of samples is 20"),
    (Order(20, 2), "seed is 1"),
    (Order(20, 1, False), "kind of order"),
    (Order(20, 1, labels=[0] * 20), "kind of order"),
    (Order(20, 1, epoch_samples=10), "epoch length"),
    (Order(20, 1, "window", shards=[0] * 20), "kind of order"),
    (Mixture((Order(20, 1),), seed=1), "kind of order"),
    (Order(20, 1, heights=[1] * 20, widths=[1] * 20), "kind of order"),
    (Order(20, 1, subset=[1, 2]), "kind of order"),
]


@pytest.mark.parametrize(("other", "words"), OTHERS)
def test_the_state_of_another_order_raises(other: AnyOrder, words: str):
    state = make_state(Order(20, 1), Deal(4), 0, 8)
    with pytest.raises(StateError, match=words):
        check_state(other, Deal(4), state)


@pytest.mark.parametrize("name", ["labels", "weights", "subset"])
def test_the_state_of_other_columns_raises(name: str):
    state = make_state(Order(4, **{name: np.array([0, 1, 2, 3])}), Deal(4), 0, 0)
    with pytest.raises(StateError, match="digest"):
        check_state(Order(4, **{name: np.array([0, 1, 3, 2])}), Deal(4), state)


def test_the_state_of_another_mixture_raises():
    parts = (Order(8, 0), Order(8, 1))
    state = make_state(Mixture(parts), Deal(4), 0, 4)
    assert check_state(Mixture(parts), Deal(3), state).consumed == 4
    for other in (Mixture((Order(8, 0), Order(8, 2))), Mixture(parts, (1, 3))):
        with pytest.raises(StateError, match="digest"):
            check_state(other, Deal(4), state)


@pytest.mark.parametrize(
    "change",
    [
        {"consumed": 21},
        {"consumed": -1},
        {"epoch": -1},
        {"epoch": "one"},
        {"consumed": 1.5},
        {"version": 99},
    ],
)
def test_a_damaged_state_raises(change: dict[str, Any]):
    state = make_state(Order(20, 1), Deal(4), 0, 8)
    with pytest.raises(StateError):
        check_state(Order(20, 1), Deal(4), {**state, **change})
    for name in state:
        with pytest.raises(StateError, match=name):
            check_state(Order(20, 1), Deal(4), {key: value for key, value in state.items() if key != name})
    assert issubclass(StateError, PackerError)


def test_positions_outside_the_epoch_raise():
    for consumed in (-1, 4):
        with pytest.raises(UsageError, match="consumed"):
            batches(Order(3), Deal(1), 0, consumed)
    with pytest.raises(UsageError, match="count from 0"):
        sequence(Order(3), -1, 1)


def test_buckets_refuse_another_batch_size():
    order = Order(40, heights=np.arange(1, 41), widths=np.arange(1, 41))
    state = make_state(order, Deal(4, 0, 2), 5, 16)
    assert check_state(order, Deal(4, 2, 3), state) == (5, 16)
    with pytest.raises(StateError, match="finish epoch 5 with batch_size=4"):
        check_state(order, Deal(5), state)
    with pytest.raises(StateError, match="not between two buckets"):
        check_state(order, Deal(4), {**state, "consumed": 15})
    with pytest.raises(UsageError, match="not between two buckets"):
        batches(order, Deal(5), 0, 16)


def test_a_deal_that_cannot_be_meant_raises():
    for bad in (
        {"batch_size": 0},
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"world_size": 0},
        {"tail": "cut"},
    ):
        with pytest.raises(UsageError):
            Deal(**{"batch_size": 1, **bad})


@pytest.mark.parametrize("module", [loaders.order, loaders.epoch, loaders.arrange])
def test_the_examples_in_the_docstrings_run(module: Any):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
