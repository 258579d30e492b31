"""The encoding of `tf.train.Example`, as much of it as packing needs: sizes first, then bytes, column by column.

    Example ⊃ Features ⊃ entries of (name, Feature ⊃ BytesList or Int64List ⊃ values)

Every level is a protobuf message with its length before it, so a value's length decides the lengths around it. All
records of a batch are sized, and then written, at once with numpy.

Numbers that are known only when the payloads are there (label, height, width) take a varint of ten bytes whatever
their value: protobuf readers accept leading zeros, and so a record's size is known before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packer.sample import is_image_field
from packer.strings import Int64s

Buffer = npt.NDArray[np.uint8]

KEY, IMAGE, IMAGE_FORMAT, IMAGE_FIELD = b"__key__", b"image/encoded", b"image/format", b"image/field"
FILE_NAME, LABEL, TEXT = b"image/filename", b"image/class/label", b"image/class/text"
HEIGHT, WIDTH = b"image/height", b"image/width"
#: Features beside the fields.
META = frozenset((KEY, IMAGE_FORMAT, IMAGE_FIELD, FILE_NAME, LABEL, TEXT, HEIGHT, WIDTH))

LABEL_FIELD = "cls"
NUMBER_BYTES = 10  # of every varint whose value is not known in time
_VARINT_ENDS = 1 << np.arange(7, 63, 7, dtype=np.int64)


def image_format(field: str) -> str:
    """What `image/format` says of a field.

    >>> image_format("jpg"), image_format("left.png")
    ('JPEG', 'PNG')
    """
    extension = field.rpartition(".")[2]
    return "JPEG" if extension == "jpg" else extension.upper()


def format_field(name: str) -> str:
    """The field that `image/format` alone leads to.

    >>> format_field("JPEG"), format_field("png")
    ('jpg', 'png')
    """
    return "jpg" if name.lower() == "jpeg" else name.lower()


def utf8(field: str) -> bytes:
    """A field's name as bytes, whatever the locale."""
    return field.encode("utf-8", "surrogateescape")


# ---------------------------------------------------------------- sizes


def varint_bytes(values: Int64s) -> Int64s:
    """How many bytes each number takes as a varint."""
    return np.searchsorted(_VARINT_ENDS, values, "right") + 1


def message_bytes(sizes: Int64s) -> Int64s:
    """Bytes of a length-delimited value of such a size: tag, length, value."""
    return 1 + varint_bytes(sizes) + sizes


def entry_bytes(name_bytes: Int64s | int, sizes: Int64s) -> Int64s:
    """Bytes of a feature of one byte string."""
    return message_bytes(
        message_bytes(np.asarray(name_bytes, np.int64)) + message_bytes(message_bytes(message_bytes(sizes)))
    )


def number_entry(name: bytes) -> bytes:
    """A feature of one number, all but the number, whose ten bytes follow."""
    feature = bytes([0x1A, NUMBER_BYTES + 2, 0x0A, NUMBER_BYTES])
    entry = b"\x0a" + _varint(len(name)) + name + b"\x12" + bytes([len(feature) + NUMBER_BYTES]) + feature
    return b"\x0a" + bytes([len(entry) + NUMBER_BYTES]) + entry


def bytes_entry(name: bytes, value: bytes) -> bytes:
    r"""A whole feature of one byte string.

    >>> bytes_entry(b"a", b"xyz")
    b'\n\x0c\n\x01a\x12\x07\n\x05\n\x03xyz'
    """
    lists = _delimited(0x0A, _delimited(0x0A, value))
    return _delimited(0x0A, _delimited(0x0A, name) + _delimited(0x12, lists))


def int_entry(name: bytes, value: int) -> bytes:
    """A whole feature of one number."""
    buffer = np.zeros(NUMBER_BYTES, np.uint8)
    Pen(buffer, np.zeros(1, np.int64)).number(np.array([value], np.int64))
    return number_entry(name) + buffer.tobytes()


def image_meta(field: str) -> bytes:
    """The features that say of which kind `image/encoded` is; the same for all pictures of one field."""
    name = image_format(field)
    meta = bytes_entry(IMAGE_FORMAT, utf8(name))
    return meta if format_field(name) == field else meta + bytes_entry(IMAGE_FIELD, utf8(field))


def _delimited(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


class Shape:
    """The sizes of some samples' Examples.

    Args:
        fields: field names.
        key_bytes: int64 (m,): length of each sample's key.
        first: int64 (m + 1,): files of sample i are first[i]:first[i + 1].
        field: int64 per file, position in `fields`.
        sizes: int64 per file, bytes of its payload.

    Attributes:
        sample: int64 per file, whose it is.
        picture: int64 (m,): the file that becomes `image/encoded`, −1 for none: the sample's first picture with a
            plain name (`jpg`), or else its first picture (`left.jpg`).
        cls: int64 (m,): the sample's `cls`, −1 for none.
        entries: int64 per file, bytes of its feature.
        features: int64 (m,): bytes of all of a sample's features.
    """

    def __init__(self, fields: Sequence[str], key_bytes: Int64s, first: Int64s, field: Int64s, sizes: Int64s) -> None:
        names = fields or [""]
        count = len(key_bytes)
        self.sample = np.repeat(np.arange(count), np.diff(first))
        rank = np.array([is_image_field(name) + (is_image_field(name) and "." not in name) for name in names])[field]
        self.picture = np.full(count, -1, np.int64)
        for wanted in (1, 2):
            at = np.flatnonzero(rank == wanted)[::-1]  # the first is put last, and stays
            self.picture[self.sample[at]] = at
        labels = np.flatnonzero(np.array([name == LABEL_FIELD for name in names])[field])
        self.cls = np.full(count, -1, np.int64)
        self.cls[self.sample[labels]] = labels
        with_picture = np.flatnonzero(self.picture >= 0)
        pictures = self.picture[with_picture]
        own_bytes = np.array([len(utf8(name)) for name in names], np.int64)[field]
        name_bytes = own_bytes.copy()
        name_bytes[pictures] = len(IMAGE)
        self.entries = entry_bytes(name_bytes, sizes)
        sums = np.concatenate([[0], np.cumsum(self.entries)])
        self.features = sums[first[1:]] - sums[first[:-1]] + entry_bytes(len(KEY), key_bytes)
        meta = np.array([len(image_meta(name)) if is_image_field(name) else 0 for name in names])[field[pictures]]
        names_bytes = entry_bytes(len(FILE_NAME), key_bytes[with_picture] + 1 + own_bytes[pictures])
        self.features[with_picture] += meta + names_bytes + IMAGE_NUMBERS_BYTES
        self.features[self.cls >= 0] += LABEL_BYTES


LABEL_BYTES = len(number_entry(LABEL)) + NUMBER_BYTES
IMAGE_NUMBERS_BYTES = len(number_entry(HEIGHT)) + len(number_entry(WIDTH)) + 2 * NUMBER_BYTES


# ---------------------------------------------------------------- bytes


class Pen:
    """Writes columns one after the other, each row of them at a place of its own.

    Attributes:
        buffer: what is written into.
        at: int64 (rows,): where each row goes on.
    """

    def __init__(self, buffer: Buffer, at: Int64s) -> None:
        self.buffer = buffer
        self.at = at.copy()

    def text(self, text: bytes) -> None:
        """The same bytes in every row."""
        self.buffer[self.at[:, None] + np.arange(len(text))] = np.frombuffer(text, np.uint8)
        self.at += len(text)

    def varint(self, values: Int64s) -> None:
        """Numbers (rows,) ≥ 0, each in as few bytes as it needs."""
        sizes = varint_bytes(values)
        for i in range(int(sizes.max(initial=0))):
            rows = np.flatnonzero(sizes > i)
            self.buffer[self.at[rows] + i] = (values[rows] >> 7 * i & 127) | (sizes[rows] > i + 1) << 7
        self.at += sizes

    def number(self, values: Int64s) -> None:
        """Numbers (rows,), each in ten bytes."""
        groups = values[:, None] >> np.minimum(7 * np.arange(NUMBER_BYTES), 63) & 127
        groups[:, :-1] |= 128
        groups[:, -1] &= 1
        self.buffer[self.at[:, None] + np.arange(NUMBER_BYTES)] = groups
        self.at += NUMBER_BYTES

    def words(self, values: npt.NDArray[np.generic]) -> None:
        """Fixed-width numbers (rows,) of a little-endian type."""
        size = values.dtype.itemsize
        self.buffer[self.at[:, None] + np.arange(size)] = values.view(np.uint8).reshape(-1, size)
        self.at += size

    def strings(self, items: Sequence[bytes]) -> None:
        """Each row its own bytes."""
        lengths = np.fromiter(map(len, items), np.int64, len(items))
        shift = self.at - (np.cumsum(lengths) - lengths)
        self.buffer[np.repeat(shift, lengths) + np.arange(lengths.sum())] = np.frombuffer(b"".join(items), np.uint8)
        self.at += lengths

    def entry(self, name: bytes, sizes: Int64s) -> None:
        """A feature of one byte string, up to where its value of such a size begins."""
        values = message_bytes(sizes)
        lists = message_bytes(values)
        named = _delimited(0x0A, name)
        self.text(b"\x0a")
        self.varint(len(named) + message_bytes(lists))
        self.text(named + b"\x12")
        self.varint(lists)
        self.text(b"\x0a")
        self.varint(values)
        self.text(b"\x0a")
        self.varint(sizes)
