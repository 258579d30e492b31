"""The checksum of HDF5's own structures: Bob Jenkins' lookup3 (`hashlittle`, initial value 0)."""

from __future__ import annotations

import struct

_MASK = 0xFFFFFFFF


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & _MASK


def lookup3(data: bytes) -> int:
    """The 32-bit checksum of these bytes.

    >>> hex(lookup3(b"Four score and seven years ago"))
    '0x17770551'
    """
    a = b = c = 0xDEADBEEF + len(data) & _MASK
    if not data:
        return c
    padded = data + bytes(-len(data) % 12)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)
    for i in range(0, len(words) - 3, 3):
        a, b, c = a + words[i] & _MASK, b + words[i + 1] & _MASK, c + words[i + 2] & _MASK
        a, b, c = _mix(a, b, c)
    a, b, c = a + words[-3] & _MASK, b + words[-2] & _MASK, c + words[-1] & _MASK
    return _final(a, b, c)


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = a - c & _MASK ^ _rotate(c, 4)
    c = c + b & _MASK
    b = b - a & _MASK ^ _rotate(a, 6)
    a = a + c & _MASK
    c = c - b & _MASK ^ _rotate(b, 8)
    b = b + a & _MASK
    a = a - c & _MASK ^ _rotate(c, 16)
    c = c + b & _MASK
    b = b - a & _MASK ^ _rotate(a, 19)
    a = a + c & _MASK
    c = c - b & _MASK ^ _rotate(b, 4)
    b = b + a & _MASK
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    c = (c ^ b) - _rotate(b, 14) & _MASK
    a = (a ^ c) - _rotate(c, 11) & _MASK
    b = (b ^ a) - _rotate(a, 25) & _MASK
    c = (c ^ b) - _rotate(b, 16) & _MASK
    a = (a ^ c) - _rotate(c, 4) & _MASK
    b = (b ^ a) - _rotate(a, 14) & _MASK
    return (c ^ b) - _rotate(b, 24) & _MASK
