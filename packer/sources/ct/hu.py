"""Stored values to Hounsfield units, exactly: widened first, padding told apart, nothing wrapped."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer.sources.ct.errors import HURangeError

#: Air, and the least that is kept: what lies below is padding that no tag speaks of.
FLOOR_HU = -1024

Array = npt.NDArray[Any]


class Converted(NamedTuple):
    """Values in Hounsfield units, int16 or float32, and how many were padding by tag and below the floor."""

    hu: Array
    pad_pixels: int
    floored_pixels: int


def is_whole(slope: float, intercept: float) -> bool:
    """Whether integers stay integers.

    >>> is_whole(1.0, -1024.0), is_whole(0.5, -1024.0)
    (True, False)
    """
    return float(slope).is_integer() and float(intercept).is_integer()


def to_hu(stored: Array, slope: float, intercept: float, padding: tuple[int, int] | None = None) -> Converted:
    """`slope · stored + intercept`, padding and all below −1024 HU set to −1024.

    Args:
        stored: integers or floats of any byte order.
        slope: of this file.
        intercept: of this file.
        padding: stored values from the first to the second, both included, are no measurement.

    Returns:
        int16 where stored values, slope and intercept are whole, else float32; of the same shape.

    Raises:
        HURangeError: a value is no number or does not fit.

    >>> to_hu(np.array([0, 24, 1064], np.uint16), 1, -1024).hu
    array([-1024, -1000,    40], dtype=int16)
    """
    whole = stored.dtype.kind in "iub" and is_whole(slope, intercept)
    if whole:
        values = _rescaled_integers(stored, int(slope), int(intercept))
    else:
        # In double precision, then rounded once: float32 arithmetic would round twice.
        values = (stored.astype(np.float64) * slope + intercept).astype(np.float32)
        if not np.isfinite(values).all():
            raise HURangeError("a value is not a finite number; mend the file")
    pad_pixels = 0
    if padding is not None:
        is_padding = (stored >= padding[0]) & (stored <= padding[1])
        pad_pixels = int(np.count_nonzero(is_padding))
        if pad_pixels:
            values[is_padding] = FLOOR_HU
    floored = int(np.count_nonzero(values < FLOOR_HU))
    if floored:
        np.maximum(values, FLOOR_HU, out=values)
    if not whole:
        return Converted(values, pad_pixels, floored)
    if values.size and int(values.max()) > np.iinfo(np.int16).max:
        raise HURangeError(
            f"{int(values.max())} HU does not fit int16 (slope {slope:g}, intercept {intercept:g}); "
            "check the rescale of the file"
        )
    return Converted(values.astype(np.int16), pad_pixels, floored)


def _rescaled_integers(stored: Array, slope: int, intercept: int) -> Array:
    if stored.dtype.itemsize > 4:
        least, most = (int(stored.min()), int(stored.max())) if stored.size else (0, 0)
        reach = max(abs(least), abs(most))
    else:
        reach = 2 ** (8 * stored.dtype.itemsize)
    if reach * abs(slope) + abs(intercept) >= 2**62:
        raise HURangeError(f"stored values up to {reach} times slope {slope} fit no integer; check the file")
    # A new array, in this machine's byte order.
    wide = stored.astype(np.int32 if reach * abs(slope) + abs(intercept) < 2**31 else np.int64)
    if slope != 1:
        np.multiply(wide, slope, out=wide)
    if intercept:
        np.add(wide, intercept, out=wide)
    return wide


def without_ich_quirk(stored: Array, bits_stored: int, signed: bool, intercept: float) -> tuple[Array, float]:
    """Stored values and intercept of a file as some sites of the RSNA 2019 haemorrhage data wrote it, put right.

    Values of 12 bits without a sign, of an intercept above −100, were shifted by 1000 and wrapped around at 4096.
    Only on request: nothing tells such a file from a sound one for certain.
    """
    if bits_stored != 12 or signed or intercept <= -100:
        return stored, intercept
    shifted = stored.astype(np.int32) + 1000
    shifted[shifted >= 4096] -= 4096
    return shifted, -1000.0
