"""The arithmetic of CT windows, in blocks that stay in the cache.

A slice is 512 KiB as int16 and twice that as float32. Step by step over whole slices, each step would go to memory;
here every block is clipped, shifted and scaled before the next is begun, and written once. numpy does all of it
without the GIL.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer.errors import UsageError

_BLOCK = 1 << 16
"""Elements at a time: 128 KiB as int16 and 256 as float32."""


class Bounds(NamedTuple):
    """A window of Hounsfield units.

    Attributes:
        center: what becomes 0.5.
        width: from what becomes 0 to what becomes 1.
    """

    center: float
    width: float

    @property
    def low(self) -> float:
        """What becomes 0, and everything below it."""
        return self.center - self.width / 2


def bounds(given: Sequence[float | tuple[float, float]]) -> tuple[Bounds, ...]:
    """Windows from `40, 400` or `(40, 400), (100, 700), …`.

    Raises:
        UsageError: neither, a width that is not positive, or a number that is not finite.
    """
    wrong = UsageError(f"Window takes a centre and a width in HU, or pairs of them, not {tuple(given)}")
    if len(given) == 2 and all(isinstance(value, int | float) for value in given):
        given = [(given[0], given[1])]  # type: ignore[list-item]
    windows = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise wrong
        try:
            window = Bounds(float(pair[0]), float(pair[1]))
        except (TypeError, ValueError):
            raise wrong from None
        if not (math.isfinite(window.center) and math.isfinite(window.width) and window.width > 0):
            raise wrong
        windows.append(window)
    return tuple(windows)


def write_windows(hu: npt.NDArray[Any], out: npt.NDArray[np.float32], windows: Sequence[Bounds]) -> None:
    """Window an array.

    Args:
        hu: (…, H, W) of any real type and strides.
        out: (len(windows), …, H, W) float32 of any strides; `clip((hu − low) / width, 0, 1)` of each window.
        windows: one for each channel.
    """
    if hu.ndim > 2:
        for depth in range(hu.shape[0]):
            write_windows(hu[depth], out[:, depth], windows)
        return
    rows = max(1, _BLOCK // max(1, hu.shape[-1]))
    steps = [(_Whole if _is_whole(window) and hu.dtype == np.int16 else _Real)(window) for window in windows]
    for start in range(0, hu.shape[0], rows):
        block = hu[start : start + rows]
        for step, channel in zip(steps, out, strict=True):
            step(block, channel[start : start + rows])


def _is_whole(window: Bounds) -> bool:
    """Whether int16 holds the window's limits, its width, and hence all that lies in it less its low limit."""
    low, width = window.low, window.width
    return low.is_integer() and width.is_integer() and low >= -32768 and low + width <= 32767 and width <= 32767


class _Scratch(threading.local):
    """Each thread's block of int16."""

    def __init__(self) -> None:
        self.block = np.empty(_BLOCK, np.int16)

    def like(self, block: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
        if block.size > len(self.block):  # one row of a very wide picture
            self.block = np.empty(block.size, np.int16)
        return self.block[: block.size].reshape(block.shape)


_scratch = _Scratch()


class _Whole:
    """int16 within limits that int16 holds: clipped and shifted exactly, at half the bytes, then scaled once."""

    def __init__(self, window: Bounds) -> None:
        self._low, self._high = np.int16(window.low), np.int16(window.low + window.width)
        self._scale = np.float32(1 / window.width)

    def __call__(self, hu: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
        shifted = _scratch.like(hu)
        np.clip(hu, self._low, self._high, out=shifted)  # 16 µs a slice, where maximum takes 108
        np.subtract(shifted, self._low, out=shifted)
        np.copyto(out, shifted)  # 27 µs, and 19 to scale; 63 in one step that converts as it goes
        np.multiply(out, self._scale, out=out)


class _Real:
    """Any numbers, in float32."""

    def __init__(self, window: Bounds) -> None:
        self._low, self._scale = np.float32(window.low), np.float32(1 / window.width)

    def __call__(self, hu: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
        np.copyto(out, hu, casting="same_kind")
        np.subtract(out, self._low, out=out)
        np.multiply(out, self._scale, out=out)
        np.clip(out, np.float32(0), np.float32(1), out=out)
