"""Datasets in memory: whether they fit, and how they get there."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.decode import decode_image
from loaders.engine_shared import anonymous_file, map_file
from loaders.order import Numbers
from loaders.resources import memory_headroom
from loaders.source import Fetch, Source
from packer.errors import BudgetError, UsageError

#: The share of free memory that a preload may take if no budget is given: training needs some too.
FREE_SHARE = 0.8
#: Descriptors that a program needs beside the shards.
SPARE_FILES = 64
_READERS = 8  # enough to keep a network disk busy; more would only seek
_CHUNK = 256  # samples per turn of a reader


def budget_bytes(given: int | None) -> int:
    """The option `memory_budget` in bytes."""
    return int(memory_headroom() * FREE_SHARE) if given is None else given


def check_open_files(shards: int) -> None:
    """Refuse beforehand what would fail in mid-epoch.

    Raises:
        UsageError: the hard limit of open files is below the number of shards; says what to change.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and shards + SPARE_FILES > hard:
        raise UsageError(
            f"{shards} shards need as many open files, and this process may have {hard}; raise the limit "
            f"('ulimit -Hn {shards + SPARE_FILES}', or docker run --ulimit nofile=…), or pack into larger shards"
        )


def gigabytes(count: int) -> str:
    """A size for messages."""
    return f"{count / 1e9:.2f} GB"


class MemorySource:
    """A source whose samples lie in this machine's memory, shared with forked and spawned workers.

    Args:
        source: what to load.
        fields: the fields to load; others are read from the source.
        numbers: the samples to load; None for all. Others are read from the source.
        budget: bytes that may be taken.
        decode: fields to decode to RGB pixels (stored as PPM, the simplest format there is).
        orient: turn decoded pictures as their EXIF orientation says.

    Raises:
        BudgetError: they do not fit; says how much is needed if it is known beforehand.
        PackerError: a sample cannot be read or decoded.
    """

    def __init__(
        self, source: Source, fields: Sequence[str], numbers: Numbers | None = None, *, budget: int,
        decode: Sequence[str] = (), orient: bool = False,
    ) -> None:
        self._source = source
        chosen = np.arange(len(source)) if numbers is None else np.sort(numbers)
        self._refuse_beforehand(chosen, fields, decode, budget)
        self._fd = anonymous_file()
        try:
            loading = _Loading(source, self._fd, budget, frozenset(decode), orient)
            self._places = {field: loading.load(chosen, field) for field in fields}
            self._memory = map_file(self._fd, loading.used) if loading.used else np.empty(0, np.uint8)
        except BaseException:
            self.close()
            raise

    def _refuse_beforehand(self, numbers: Numbers, fields: Sequence[str], decode: Sequence[str], budget: int) -> None:
        """Refuse what cannot fit before reading it. Unknown sizes count as nothing."""
        needed = 0
        for field in fields:
            lengths = self._source.sizes(numbers, field)
            if field in decode:
                heights, widths = (self._source.column(name)[numbers].astype(np.int64) for name in ("height", "width"))
                needed += 3 * int((heights * widths)[(lengths >= 0) & (heights > 0)].sum())
            else:
                needed += int(lengths[lengths > 0].sum())
        if needed > budget:
            raise BudgetError(_too_large(f"{gigabytes(needed)} would be needed", budget))

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names."""
        return self._source.fields

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, or None."""
        return self._source.classes

    def __len__(self) -> int:
        return len(self._source)

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """A column of the source."""
        return self._source.column(name)

    def fetcher(self, numbers: Numbers, field: str) -> Fetch:
        """Views of memory, without a copy; what was not loaded is read from the source."""
        places = self._places.get(field)
        if places is None:
            return self._source.fetcher(numbers, field)
        offsets, lengths = places[0][numbers].tolist(), places[1][numbers].tolist()
        memory, source = self._memory.data, self._source

        def fetch(j: int) -> bytes | memoryview | None:
            offset, length = offsets[j], lengths[j]
            if offset < 0:
                return source.fetcher(numbers[j : j + 1], field)(0)
            return memory[offset : offset + length] if length >= 0 else None

        return fetch

    def sizes(self, numbers: Numbers, field: str) -> Numbers:
        """(n,) int64, the field's length in bytes, −1 where absent or unknown."""
        return self._source.sizes(numbers, field)

    def key(self, number: int) -> str:
        """A sample's key."""
        return self._source.key(number)

    def all_keys(self) -> list[str]:
        """All keys, by number."""
        return self._source.all_keys()

    def path(self, number: int, field: str) -> str:
        """Where the field came from."""
        return self._source.path(number, field)

    def complain(self, number: int, field: str, what: str, *, damaged: bool = True) -> str:
        """A message that leads back to the sample's file."""
        return self._source.complain(number, field, what, damaged=damaged)

    def close(self) -> None:
        """Close the source's files; the memory itself goes with this object."""
        self._source.close()

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def __reduce__(self) -> tuple[object, ...]:
        state = {name: value for name, value in vars(self).items() if name not in ("_fd", "_memory")}
        return (_attach, (reduction.DupFd(self._fd), len(self._memory), state))


def _attach(duplicate: Any, nbytes: int, state: dict[str, Any]) -> MemorySource:
    """The same memory in another process."""
    source = MemorySource.__new__(MemorySource)
    vars(source).update(state)
    source._fd = duplicate.detach()
    source._memory = map_file(source._fd, nbytes) if nbytes else np.empty(0, np.uint8)
    return source


def _too_large(what: str, budget: int) -> str:
    return (
        f"preload: {what}, and {gigabytes(budget)} may be taken (memory_budget; by default four fifths of what is "
        "free); give a larger budget, load a subset, use preload='shm:FOLDER' with a fast disk, or none: the page "
        "cache helps too"
    )


class _Loading:
    """Appends samples to a file in memory, several readers at a time."""

    def __init__(self, source: Source, fd: int, budget: int, decode: frozenset[str], orient: bool) -> None:
        self._source = source
        self._fd = fd
        self._budget = budget
        self._decode = decode
        self._orient = orient
        self._lock = threading.Lock()
        self.used = 0

    def load(self, numbers: Numbers, field: str) -> tuple[Numbers, Numbers]:
        """Load a field; returns (offset, length) of each of the source's samples, offset −1 where not loaded."""
        offsets = np.full(len(self._source), -1, np.int64)
        lengths = np.full(len(self._source), -1, np.int64)

        def load_some(some: Numbers) -> None:
            fetch = self._source.fetcher(some, field)
            for j, number in enumerate(some.tolist()):
                data = self._read(fetch, j, field)
                offsets[number], lengths[number] = (0, -1) if data is None else (self._append(data), len(data))

        with ThreadPoolExecutor(_READERS) as pool:
            chunks = [numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK)]
            for _ in pool.map(load_some, chunks):
                pass
        return offsets, lengths

    def _read(self, fetch: Fetch, j: int, field: str) -> bytes | memoryview | None:
        data = fetch(j)
        if data is None or field not in self._decode:
            return data
        try:
            pixels = decode_image(data, orient=self._orient)
        except Exception as error:  # noqa: BLE001 - the loader meets it again, if the sample is ever wanted
            del error
            return data
        return b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()

    def _append(self, data: bytes | memoryview) -> int:
        with self._lock:
            offset = self.used
            self.used += len(data)
        if self.used > self._budget:
            raise BudgetError(_too_large(f"more than {gigabytes(offset)} would be needed", self._budget))
        written = 0
        view = memoryview(data)
        while written < len(data):
            written += os.pwrite(self._fd, view[written:], offset + written)
        return offset
