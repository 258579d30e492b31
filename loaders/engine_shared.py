"""Batches in memory that two processes see: written once by a worker, read in place by the consumer.

The worker owns the blocks. A finished batch is pickled with its tensors and arrays left out: what was
made in a block is named by its place there, what was not is copied into one. The pickle itself
goes into a block too, so a message is a few dozen bytes, however large the batch, and neither
side can ever block the other by a full pipe. The consumer's tensors are leases (see
`loaders.engine_buffers`); when one dies, the worker may use the block again.

Blocks are anonymous: no name under /dev/shm, no limit but memory itself, and nothing left behind
however a process dies.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import socket
import tempfile
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from loaders.engine_buffers import Block, lease, nbytes_of, rounded

#: What a processor fetches at once; tensors start on it.
ALIGN = 64
#: What a batch's small parts get when they do not fit behind its first tensor.
SMALLEST_BLOCK = 1 << 16
#: Beyond so many blocks of one worker in the consumer's hands a batch is copied out instead: blocks cost descriptors.
MOST_BLOCKS = 32
#: Arrays up to this size travel inside the pickle.
INLINE_BYTES = 512


class Message(NamedTuple):
    """A batch on its way: where its pickle lies, the blocks it lies in, and blocks that come and go.

    Attributes:
        place: the batch's place in the run.
        ok: the pickle holds a batch; otherwise an exception.
        pickled: (block, offset, length).
        blocks: numbers of all blocks that the batch lies in.
        new: (number, bytes) of blocks whose descriptors follow the message.
        gone: numbers of blocks that the worker has freed.
    """

    place: int
    ok: bool
    pickled: tuple[int, int, int]
    blocks: tuple[int, ...]
    new: tuple[tuple[int, int], ...]
    gone: tuple[int, ...]


def anonymous_file(nbytes: int = 0) -> int:
    """A descriptor of memory without a name: it is gone when nobody holds it any more."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("loader-batch", os.MFD_CLOEXEC)
    else:  # macOS: a file that is unlinked at once
        with tempfile.TemporaryFile() as f:
            fd = os.dup(f.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_file(fd: int, nbytes: int) -> Block:
    """The file's first bytes as a shared, writable array."""
    block: Block = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    return block


def _as_socket(connection: Connection) -> socket.socket:
    """A socket of its own on the same pipe, to send descriptors through."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


class _Block:
    """A worker's block, filled from the start."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd: int | None = anonymous_file(nbytes)  # until the consumer is known to have it
        self.memory = map_file(self.fd, nbytes)
        self.is_new = True
        self.start = self.memory.ctypes.data
        self.used = 0

    def close(self) -> None:
        """Close the descriptor, once the consumer has mapped it: some systems lose one that is closed under way."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class SharedWriter:
    """The worker's side: makes tensors in shared blocks, and sends batches.

    Args:
        connection: where messages go.
        keep: at most so many blocks lie unused; more are freed.
    """

    def __init__(self, connection: Connection, keep: int) -> None:
        self._connection = connection
        self._keep = keep
        self._count = 0
        self._free: list[_Block] = []
        self._lent: dict[int, _Block] = {}
        self._current: list[_Block] = []
        self._gone: list[int] = []

    def give_back(self, numbers: Sequence[int]) -> None:
        """The consumer is done with these blocks."""
        blocks = [self._lent.pop(number) for number in numbers]
        for block in blocks:
            block.close()
        self._free += blocks

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor, part of the batch that is sent next."""
        nbytes = nbytes_of(shape, dtype)
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        block, offset = self._reserve(nbytes)
        return torch.from_numpy(block.memory[offset : offset + nbytes]).view(dtype).view(tuple(shape))

    def _reserve(self, nbytes: int) -> tuple[_Block, int]:
        for block in self._current:
            if block.used + nbytes <= block.nbytes:
                break
        else:
            block = self._take(nbytes)
            self._current.append(block)
        offset = block.used
        block.used = -(-(offset + nbytes) // ALIGN) * ALIGN
        return block, offset

    def _take(self, nbytes: int) -> _Block:
        # Room for the labels and the pickle behind the images, so that most batches need one block.
        wanted = rounded(nbytes + SMALLEST_BLOCK)
        fits = [block for block in reversed(self._free) if nbytes <= block.nbytes <= 2 * wanted]  # the last is cached
        block = min(fits, key=lambda block: block.nbytes, default=None)
        if block is None:
            self._count += 1
            return _Block(self._count, wanted)
        self._free.remove(block)
        block.used = 0
        while len(self._free) > self._keep:
            dropped = self._free.pop(0)
            dropped.close()
            self._gone.append(dropped.number)
        return block

    def send(self, place: int, value: Any, *, ok: bool = True) -> None:
        """Send a value made with `empty`, and begin the next one.

        Raises:
            BrokenPipeError: the consumer is gone.
        """
        out = io.BytesIO()
        _Pickler(out, self).dump(value)
        pickled = out.getbuffer()
        block, offset = self._reserve(len(pickled))
        block.memory[offset : offset + len(pickled)] = pickled
        blocks, self._current = self._current, []
        new = [block for block in blocks if block.is_new]
        message = Message(
            place, ok, (block.number, offset, len(pickled)), tuple(block.number for block in blocks),
            tuple((block.number, block.nbytes) for block in new), tuple(self._gone),
        )
        self._gone = []
        self._lent.update((block.number, block) for block in blocks)
        # Not Connection.send, whose pickler is made anew for each message.
        self._connection.send_bytes(pickle.dumps(tuple(message)))
        for block in new:
            block.is_new = False
            with _as_socket(self._connection) as stream:
                socket.send_fds(stream, [b"f"], [cast(int, block.fd)])

    def discard(self) -> None:
        """Forget the batch in the making."""
        self._free += self._current
        self._current = []

    def where(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(block, offset) of a tensor that lies in the batch's blocks."""
        address = tensor.data_ptr()
        for block in self._current:
            if block.start <= address < block.start + block.nbytes:
                return block.number, address - block.start
        return None


class _Pickler(pickle.Pickler):
    """Leaves tensors and arrays out of the pickle, where they can be named instead."""

    def __init__(self, out: io.BytesIO, writer: SharedWriter) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._writer = writer

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject or value.dtype.names or value.nbytes <= INLINE_BYTES:
                return None
            try:
                tensor = torch.from_numpy(np.require(value, requirements=("C", "W")))
            except TypeError:  # a dtype that torch does not have
                return None
            return ("array", *self._place(tensor))
        if type(value) is torch.Tensor and _is_plain(value):
            return ("tensor", *self._place(value))
        return None

    def _place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.numel() == 0:
            return (tensor.dtype, tuple(tensor.shape), (), None, 0)
        found, stride = self._writer.where(tensor), tensor.stride()
        if found is None:
            own = _unexpanded(tensor)  # an expanded view stays one: only its own elements are copied
            copy = self._writer.empty(own.shape, own.dtype).copy_(own)
            found = self._writer.where(copy)
            stride = tuple(0 if old == 0 else new for old, new in zip(stride, copy.stride(), strict=True))
        return (tensor.dtype, tuple(tensor.shape), tuple(stride), *cast("tuple[int, int]", found))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized \
        and not tensor.is_conj() and not tensor.is_neg()


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, memory: dict[int, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._memory = memory

    def persistent_load(self, name: Any) -> Any:
        kind, dtype, shape, stride, number, offset = name
        if number is None:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            end = offset + dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
            tensor = self._memory[number][offset:end].view(dtype).as_strided(shape, stride)
        return tensor.numpy() if kind == "array" else tensor


class SharedReader:
    """The consumer's side: gives batches as leases of the worker's blocks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blocks: dict[int, Block] = {}
        self._returned: deque[int] = deque()
        self._out = 0

    def returned(self) -> tuple[int, ...]:
        """Numbers of the blocks that nobody looks at any more, since the last call."""
        numbers = []
        with contextlib.suppress(IndexError):
            while True:
                numbers.append(self._returned.popleft())
        self._out -= len(numbers)
        return tuple(numbers)

    def receive(self) -> tuple[int, bool, Any]:
        """(place, ok, value) of the next message; waits for it.

        Raises:
            EOFError, OSError: the worker is gone.
        """
        message = Message(*pickle.loads(self._connection.recv_bytes()))  # noqa: S301 - our own worker's bytes
        for number, nbytes in message.new:
            with _as_socket(self._connection) as stream:
                _, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
            if not descriptors:
                raise EOFError
            [fd] = descriptors
            try:
                self._blocks[number] = map_file(fd, nbytes)
            finally:
                os.close(fd)
        for number in message.gone:
            self._blocks.pop(number, None)  # one of a batch that failed never came here
        return message.place, message.ok, self._unpack(message)

    def _unpack(self, message: Message) -> Any:
        number, offset, length = message.pickled
        pickled = self._blocks[number][offset : offset + length].tobytes()
        self._out += len(message.blocks)
        if self._out > MOST_BLOCKS:
            memory = {number: torch.from_numpy(self._blocks[number].copy()) for number in message.blocks}
            self._returned.extend(message.blocks)
        else:
            memory = {
                number: lease(self._blocks[number], len(self._blocks[number]), self._returned.append, number)
                for number in message.blocks
            }
        return _Unpickler(pickled, memory).load()
