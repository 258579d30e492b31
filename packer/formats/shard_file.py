"""A shard file being written: one thread fills buffers, another checksums and writes them.

Both sides spend their time in system calls that let go of the interpreter, so reading the next
samples overlaps with writing the last ones, and making them durable overlaps with both.
"""

from __future__ import annotations

import os
import queue
import threading

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer.formats.base import Written
from packer.storage import output_error

Buffer = npt.NDArray[np.uint8]

_BUFFERS = 3
_BUFFER_BYTES = 6 << 20  # a batch and its headers
_FLUSH_BYTES = 32 << 20  # begin to make data durable this early: the last fsync then has little left to do


def crc32c_shift(crc: int, count: int) -> int:
    """What a difference between two crc32c becomes when `count` equal bytes follow.

    >>> a, b, rest = crc32c(b"a"), crc32c(b"b"), b"and so on"
    >>> crc32c(rest, a) ^ crc32c(rest, b) == crc32c_shift(a ^ b, len(rest))
    True
    """
    power = 1 << 23  # x⁸, the lowest power of x in the top bit
    while count:
        if count & 1:
            crc = _multiply(power, crc)
        power = _multiply(power, power)
        count >>= 1
    return crc


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo crc32c's own."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0x82F63B78 if b & 1 else 0)
    return product


class ShardFile:
    """An append-only file with its running size and crc32c.

    Use: `buffer = file.take(n)`, fill it, `file.write(buffer, used)`; in the end `close` or `abort`.

    Args:
        path: created or truncated.
        durable: `close` waits until the data are on the disk.

    Raises:
        OutputError: (from any call) the file cannot be written.
    """

    def __init__(self, path: str, *, durable: bool = True) -> None:
        self.path = path
        self._durable = durable
        self.size = 0  # as if everything handed over were written
        self._crc = 0
        self._error: OSError | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise output_error(path, error) from error
        self._free: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(None)  # made when first taken
        self._full: queue.SimpleQueue[tuple[Buffer, int] | None] = queue.SimpleQueue()
        self._dirty: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._flusher: threading.Thread | None = None

    def take(self, size: int) -> Buffer:
        """A buffer of at least so many bytes, to be given back with `write`. Waits for the disk if need be."""
        buffer = self._free.get()
        self._complain()
        if buffer is None or len(buffer) < size:
            buffer = np.empty(max(size, _BUFFER_BYTES), np.uint8)
        return buffer

    def write(self, buffer: Buffer, used: int) -> None:
        """Append the first `used` bytes of a taken buffer, soon."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="shard writer", daemon=True)
            self._writer.start()
        self.size += used
        self._full.put((buffer, used))

    def close(self, head: bytes | None = None) -> Written:
        """Wait until everything is written (and durable).

        Args:
            head: put over the file's first bytes, which so far must be as many zeros.
        """
        self._stop()
        self._complain()
        try:
            if head is not None:
                os.pwrite(self._fd, head, 0)
                # A crc is linear but for its ends: what zeros that became `head` change is told by those bytes alone.
                changed = crc32c(bytes(len(head))) ^ crc32c(head)
                self._crc ^= crc32c_shift(changed, self.size - len(head))
            if self._durable:
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)  # network file systems may say only now that the disk is full
        except OSError as error:
            raise output_error(self.path, error) from error
        return Written(self.size, self._crc)

    def abort(self) -> None:
        """Stop and let go of the file as it is. May be called twice."""
        self._stop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _stop(self) -> None:
        if self._writer is not None:
            self._full.put(None)
            self._writer.join()
            self._writer = None
        if self._flusher is not None:
            self._dirty.put(False)
            self._flusher.join()
            self._flusher = None

    def _complain(self) -> None:
        if self._error is not None:
            raise output_error(self.path, self._error) from self._error

    def _write_all(self) -> None:
        unflushed = 0
        while (item := self._full.get()) is not None:
            buffer, used = item
            if self._error is None:
                try:
                    self._append(buffer.data[:used])
                except OSError as error:
                    self._error = error  # raised to whoever hands over or closes next
            self._free.put(buffer if len(buffer) <= _BUFFER_BYTES else None)
            unflushed += used
            if self._durable and unflushed >= _FLUSH_BYTES:
                unflushed = 0
                self._flush_soon()

    def _append(self, data: memoryview) -> None:
        self._crc = crc32c(data, self._crc)
        while len(data):
            data = data[os.write(self._fd, data) :]

    def _flush_soon(self) -> None:
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_all, name="shard flusher", daemon=True)
            self._flusher.start()
        if self._dirty.empty():
            self._dirty.put(True)

    def _flush_all(self) -> None:
        while self._dirty.get():
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._error = self._error or error
