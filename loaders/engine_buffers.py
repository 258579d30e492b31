"""Batch memory that is used again once nobody looks at it any more.

Fresh memory costs a page fault every 4 KiB, which for float32 batches is ten times the cost of writing them.
A block goes out as a *lease*: an array object of its own that the batch's tensors keep alive. When
the last of them is gone (every view, every numpy array made from one) the lease dies, and
a weak reference gives the block back. Nothing is ever overwritten that someone can still see.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Block: TypeAlias = npt.NDArray[np.uint8]

#: Smaller tensors come from the allocator, which has them at hand.
SMALLEST_BLOCK = 1 << 16


def lease(block: Block, nbytes: int, give_back: Callable[..., object], *args: Any) -> torch.Tensor:
    """The first `nbytes` of a block as a uint8 tensor; when its memory is unreachable, `give_back(*args)` is called.

    `give_back` runs wherever the last reference went, inside the garbage collector too: it must not
    block. `deque.append` is made for it.
    """
    array = block[:nbytes]
    # from_numpy holds this very array object as long as the storage lives. A slice taken in numpy
    # would hold `block` instead, so all further views are made of the tensor.
    weakref.finalize(array, give_back, *args).atexit = False
    return torch.from_numpy(array)


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Size of a contiguous tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


def rounded(nbytes: int) -> int:
    """A size a little larger (at most a quarter), so that batches of nearly equal size share blocks.

    >>> rounded(1_000_000), rounded(1 << 20)
    (1048576, 1048576)
    """
    step = max(4096, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class BufferPool:
    """Tensors whose memory is used again. Safe in threads.

    Args:
        keep: at most so many blocks lie unused; more are freed.

    >>> pool = BufferPool(keep=2)
    >>> a = pool.empty((256, 256), torch.float32)
    >>> address = a.data_ptr()
    >>> del a
    >>> pool.empty((256, 250), torch.float32).data_ptr() == address
    True
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: list[Block] = []
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        nbytes = nbytes_of(shape, dtype)
        if nbytes < SMALLEST_BLOCK:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(nbytes)
        return lease(block, nbytes, self._returned.append, block).view(dtype).view(tuple(shape))

    def _take(self, nbytes: int) -> Block:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            # The block that came back last is the likeliest to be in a cache still.
            fits = [block for block in reversed(self._free) if nbytes <= len(block) <= 2 * nbytes + 4096]
            found = min(fits, key=len, default=None)
            self._free = [block for block in self._free if block is not found][-self._keep :]
        return np.empty(rounded(nbytes), np.uint8) if found is None else found


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in page-locked memory.

    torch's own host allocator knows which copies to a device are still under way and reuses a block only after
    them; a weak reference does not.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
