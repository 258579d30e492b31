"""A column of byte strings behaves as the list it stands for."""

from __future__ import annotations

import doctest
import mmap
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packer.strings
from packer.sources.base import StringsBuilder
from packer.strings import Strings, Taken, repeated

lists = st.lists(st.binary(max_size=6), max_size=30)


@given(lists)
def test_a_column_holds_what_it_was_made_of(items: list[bytes]) -> None:
    column = Strings.of(items)
    assert len(column) == len(items)
    assert list(column) == items
    assert [column[i] for i in range(len(items))] == items
    assert [column[i - len(items)] for i in range(len(items))] == items
    assert column.lengths.tolist() == [len(item) for item in items]
    assert list(Strings.of(iter(items))) == items


@given(lists, st.data())
def test_taking_strings(items: list[bytes], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(items) - 1)) if items else st.just([]))
    taken = Strings.of(items).take(np.array(order, np.int64))
    assert list(taken) == [items[i] for i in order]
    assert taken.ends[0] == 0


@given(lists, st.data())
def test_taking_piece_by_piece(items: list[bytes], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(-1, len(items) - 1)))
    taken = Taken(Strings.of(items), np.array(order, np.int64))
    expected = [b"" if i < 0 else items[i] for i in order]
    assert len(taken) == len(order)
    assert b"".join(taken.pieces()) == b"".join(expected)
    assert np.diff(taken.ends).tolist() == [len(item) for item in expected]


def test_more_strings_than_are_handled_at_once() -> None:
    items = [b"%d" % i * (i % 3) for i in range(50_000)]
    order = np.random.default_rng(0).permutation(len(items))
    expected = [items[i] for i in order.tolist()]
    assert list(Strings.of(items).take(order)) == expected
    assert b"".join(Taken(Strings.of(items), order).pieces()) == b"".join(expected)


@given(st.lists(lists, max_size=4))
def test_columns_one_after_the_other(columns: list[list[bytes]]) -> None:
    joined = Strings.concatenate(Strings.of(items) for items in columns)
    assert list(joined) == [item for items in columns for item in items]


@given(lists, st.data())
def test_slices(items: list[bytes], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(items)))
    end = data.draw(st.integers(begin, len(items)))
    assert Strings.of(items).slice(begin, end) == items[begin:end]


@given(st.lists(lists, max_size=4))
def test_growing_a_column(parts: list[list[bytes]]) -> None:
    builder = StringsBuilder()
    for part in parts:
        builder.extend(part)
    column = builder.build()
    assert list(column) == [item for part in parts for item in part]
    assert column.blob.readonly


@given(lists)
def test_repeated_strings(items: list[bytes]) -> None:
    assert repeated(Strings.of(items)).tolist() == [i for i, item in enumerate(items) if items.count(item) > 1]


@pytest.mark.parametrize("i", [2, -3, 10**9])
def test_positions_outside_are_errors(i: int) -> None:
    with pytest.raises(IndexError):
        Strings.of([b"a", b"b"])[i]
    with pytest.raises((IndexError, ValueError)):
        Strings.of([b"a", b"b"]).take(np.array([i]))


def test_a_mapped_file_is_a_column_and_travels_to_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"abc")
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        column = Strings(view, np.array([0, 1, 1, 3]))
        copy = pickle.loads(pickle.dumps(column))
        assert list(column) == list(copy) == [b"a", b"", b"bc"]
        view.release()


def test_the_examples_in_the_documentation() -> None:
    result = doctest.testmod(packer.strings)
    assert result.attempted >= 3
    assert result.failed == 0
