"""`tf.train.Example` and TFRecord written and read in the plainest way, to compare with."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from crc32c import crc32c

Value = bytes | int | float | Sequence[bytes] | Sequence[int] | Sequence[float]


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def delimited(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(value: Value) -> bytes:
    values = [value] if isinstance(value, bytes | int | float) else list(value)
    if values and isinstance(values[0], bytes):
        return delimited(1, b"".join(delimited(1, one) for one in values if isinstance(one, bytes)))
    if values and isinstance(values[0], float):
        return delimited(2, delimited(1, struct.pack(f"<{len(values)}f", *values)))
    return delimited(3, delimited(1, b"".join(varint(one) for one in values if isinstance(one, int))))


def example(features: Mapping[str, Value]) -> bytes:
    entries = (delimited(1, name.encode()) + delimited(2, feature(value)) for name, value in features.items())
    return delimited(1, b"".join(delimited(1, entry) for entry in entries))


def mask(data: bytes) -> bytes:
    checksum = crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + mask(length) + data + mask(data)


def records(shard: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(shard):
        (size,) = struct.unpack_from("<Q", shard, at)
        data = shard[at + 12 : at + 12 + size]
        assert shard[at : at + size + 16] == record(data)
        yield data
        at += size + 16


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        assert tag & 7 == 2
        size, at = read_varint(data, at)
        yield tag >> 3, data[at : at + size]
        assert at + size <= len(data)
        at += size


def features(data: bytes) -> dict[str, bytes | int]:
    """The features of an Example, each of one byte string or one number."""
    found: dict[str, bytes | int] = {}
    ((number, body),) = messages(data)
    assert number == 1
    for _, entry in messages(body):
        (_, name), (_, value) = messages(entry)
        ((kind, values),) = messages(value)
        ((_, one),) = messages(values)
        if kind == 1:
            found[name.decode()] = one
        else:
            assert kind == 3
            bits, end = read_varint(one, 0)
            assert end == len(one)
            found[name.decode()] = bits - (bits >> 63 << 64)
    return found
