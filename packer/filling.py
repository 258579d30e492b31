"""Reading the payloads of a batch into place, several files at a time.

Copying a file out of the page cache waits for main memory, and reading it from a disk or a network
waits for longer still: with several reads under way these waits overlap. Small files are read by one
thread, since there the interpreter's lock would cost more than the waits do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from crc32c import crc32c

from packer.sources.base import Reader

_THREADS = 3
_LARGE_FILE_BYTES = 16 << 10  # on average; below, one thread is faster
_PART_BYTES = 512 << 10  # what a thread takes at a time: still in its core's cache when it is checksummed


class Filler:
    """Fills buffers through a source's reader, whose `read` may be called by several threads at once.

    Use: `crcs = filler.fill(places, views)`; in the end `close`.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, places: Sequence[bytes], views: Sequence[memoryview]) -> list[int]:
        """Read whole files into their views; returns the crc32c of each.

        Raises:
            SourceChangedError: see `Reader.read`; the first in the batch's order, once no read is under way any more.
        """
        sizes = [len(view) for view in views]
        if sum(sizes) < max(_LARGE_FILE_BYTES * len(sizes), 2 * _PART_BYTES):
            return self._fill(places, views)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "shard reader")
        parts: list[Future[list[int]]] = []
        begin = taken = 0
        for i, size in enumerate(sizes, 1):
            taken += size
            if taken >= _PART_BYTES or i == len(sizes):
                parts.append(self._pool.submit(self._fill, places[begin:i], views[begin:i]))
                begin, taken = i, 0
        wait(parts)
        return [crc for part in parts for crc in part.result()]

    def _fill(self, places: Sequence[bytes], views: Sequence[memoryview]) -> list[int]:
        self._reader.read(places, views)
        return list(map(crc32c, views))

    def close(self) -> None:
        """Wait for reads under way, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
