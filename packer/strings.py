"""A column of byte strings in two flat buffers.

A Python list of a million paths costs some 150 bytes each before the path itself, and forked
workers copy it page by page as reference counts move. Two buffers cost 8 bytes each and are shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Strings:
    """Byte strings `s[0] … s[n-1]`, immutable.

    Attributes:
        blob: all strings, one after the other (any buffer: bytes, mmap, uint8 array).
        ends: int64 (n + 1,), ends[0] == 0; string i is blob[ends[i]:ends[i + 1]].

    >>> names = Strings.of([b"a", b"", b"bcd"])
    >>> len(names), names[2], list(names.take(np.array([2, 0])))
    (3, b'bcd', [b'bcd', b'a'])
    """

    blob: memoryview
    ends: Int64s

    @staticmethod
    def of(items: Iterable[bytes]) -> Strings:
        """Copy an iterable of byte strings into a column."""
        listed = items if isinstance(items, list) else list(items)
        ends = np.zeros(len(listed) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, listed), np.int64, len(listed)), out=ends[1:])
        return Strings(memoryview(b"".join(listed)), ends)

    @staticmethod
    def concatenate(columns: Iterable[Strings]) -> Strings:
        """The strings of all columns, one column after the other."""
        listed = list(columns)
        starts = np.cumsum([0, *(len(column.blob) for column in listed)])
        ends = [np.zeros(1, np.int64), *(c.ends[1:] + start for c, start in zip(listed, starts[:-1], strict=True))]
        return Strings(memoryview(b"".join(column.blob for column in listed)), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: int) -> bytes:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return bytes(self.blob[self.ends[i] : self.ends[i + 1]])

    def __iter__(self) -> Iterator[bytes]:
        for begin in range(0, len(self), 4096):  # a list of all would undo what the column is for
            yield from self.slice(begin, min(begin + 4096, len(self)))

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (bytes(self.blob), self.ends))

    @property
    def lengths(self) -> Int64s:
        """int64 (n,): the length of each string in bytes."""
        return np.diff(self.ends)

    def slice(self, begin: int, end: int) -> list[bytes]:
        """Strings begin…end−1 as a list."""
        ends = self.ends[begin : end + 1].tolist()
        blob = bytes(self.blob[ends[0] : ends[-1]]) if ends[1:] else b""
        start = ends[0]
        return [blob[a - start : b - start] for a, b in pairwise(ends)]

    def part(self, begin: int, end: int) -> Strings:
        """Strings begin…end−1 as a column, which shares the bytes."""
        ends = self.ends[begin : end + 1]
        return Strings(self.blob[ends[0] : ends[-1]], ends - ends[0])

    def take(self, order: Int64s) -> Strings:
        """The strings at these positions (0 ≤ position < len), in this order, as a new column."""
        order = np.asarray(order, np.int64)
        if len(order) and int(order.min()) < 0:  # numpy would count from the end, of `ends`, which is one longer
            raise IndexError(int(order.min()))
        starts = self.ends[order]
        lengths = self.ends[order + 1] - starts
        ends = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        old = np.frombuffer(self.blob, np.uint8)
        new = np.empty(int(ends[-1]), np.uint8)
        shift = starts - ends[:-1]
        for begin in range(0, len(order), _AT_ONCE):  # bounds the positions in memory to some 20 MB
            end = min(begin + _AT_ONCE, len(order))
            a, b = ends[[begin, end]].tolist()
            # Position j of the new blob comes from position j + (old start - new start) of the old one.
            np.take(old, np.repeat(shift[begin:end], lengths[begin:end]) + np.arange(a, b), out=new[a:b])
        return Strings(new.data, ends)

    def pieces(self) -> Iterator[memoryview]:
        """The blob, in one piece."""
        yield self.blob


@dataclass(frozen=True, eq=False)
class Taken:
    """Strings of a column in another order, copied only piece by piece, as they are asked for.

    Attributes:
        source: the column.
        order: int64 (n,), position in `source` of each string; −1 stands for an empty string.

    >>> [bytes(piece) for piece in Taken(Strings.of([b"a", b"bc"]), np.array([1, -1, 0])).pieces()]
    [b'bca']
    """

    source: Strings
    order: Int64s

    def __len__(self) -> int:
        return len(self.order)

    @property
    def ends(self) -> Int64s:
        """int64 (n + 1,): where each string ends, as in `Strings`."""
        ends = np.zeros(len(self.order) + 1, np.int64)
        for begin in range(0, len(self.order), _AT_ONCE):
            some = self.order[begin : begin + _AT_ONCE]
            lengths = self.source.ends[some + 1] - self.source.ends[some]
            ends[begin + 1 : begin + 1 + len(some)] = np.where(some >= 0, lengths, 0)
        return np.cumsum(ends, out=ends)

    def pieces(self) -> Iterator[memoryview]:
        """The blob, some strings at a time."""
        for begin in range(0, len(self.order), _AT_ONCE):
            some = self.order[begin : begin + _AT_ONCE]
            yield self.source.take(some[some >= 0]).blob


_AT_ONCE = 16384


def _restore(blob: bytes, ends: Int64s) -> Strings:
    return Strings(memoryview(blob), ends)


def repeated(strings: Strings) -> Int64s:
    """Positions of the strings that stand elsewhere in the column too (or, by rare chance, one of equal hash).

    Takes 16 bytes a string; a set of them would take some hundred.

    >>> repeated(Strings.of([b"a", b"b", b"a"]))
    array([0, 2])
    """
    hashes = np.fromiter(map(hash, strings), np.int64, len(strings))
    order = np.argsort(hashes, kind="stable")
    same = np.diff(hashes[order]) == 0
    several = np.zeros(len(strings), bool)
    several[order[1:][same]] = several[order[:-1][same]] = True
    return np.flatnonzero(several)


def equal_strings(strings: Strings) -> list[bytes]:
    """Those strings that stand more than once in the column, each once, in order.

    >>> equal_strings(Strings.of([b"a", b"b", b"a"]))
    [b'a']
    """
    counts = Counter(strings[i] for i in repeated(strings).tolist())
    return [one for one, count in counts.items() if count > 1]
