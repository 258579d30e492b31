"""Reading TFRecord shards, ours and others': their records, the features of each, and the samples they make.

Nothing is trusted: both checksums of every record, every length against what holds it, every varint. Memory stays
bounded whatever a file claims: a long record is checksummed and parsed piece by piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from functools import lru_cache
from typing import NamedTuple

from crc32c import crc32c

from packer.errors import DamagedShardError, ShardError
from packer.formats.base import Found, FoundSample
from packer.formats.example import (
    FILE_NAME,
    HEIGHT,
    IMAGE,
    IMAGE_FIELD,
    IMAGE_FORMAT,
    KEY,
    LABEL,
    TEXT,
    WIDTH,
    format_field,
    utf8,
)
from packer.formats.tfrecord import FOOT, HEAD, MAX_EXAMPLE, masked_crc32c
from packer.sample import IMAGE_EXTENSIONS, bad_fields, escape_key, key_fault, printable, split_extension
from packer.storage import open_regular

#: Gives the bytes from one offset in the file on, so many at most.
Peek = Callable[[int, int], bytes]

_IN_MEMORY = 8 << 20  # longer records are parsed by pread
_PIECE = 4 << 20
_MAX_FEATURES = 4096
_MAX_NAME = 1 << 16  # bytes of a feature's name, a key, a file name
_MAX_REASONS = 200
_VARINT = 10
_NOT_TFRECORD = {
    b"\x1f\x8b": "compressed with gzip: 'packer shard FILE OUT' converts it",
    b"\x78\x9c": "compressed with zlib: uncompress it first",
    b"\x89HDF": "an HDF5 file",
}
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
# What is no field: in our records, and in those of others.
_OURS = frozenset((KEY, IMAGE_FIELD, IMAGE_FORMAT, FILE_NAME, TEXT, HEIGHT, WIDTH))
_STRANGERS = frozenset((FILE_NAME, IMAGE_FORMAT, HEIGHT, WIDTH))
# What others call these, the first that is there.
_FILE_NAMES = (FILE_NAME, b"filename", b"file_name", b"image/source_id", b"image_id", b"id")
_LABELS = (LABEL, b"label", b"image/label", b"class", b"class_id")
_IMAGES = (IMAGE, b"image_raw", b"image", b"jpeg", b"jpg", b"png")


class Record(NamedTuple):
    """One record: where its Example begins and ends in the file, and how to read there."""

    begin: int
    end: int
    peek: Peek


class Feature(NamedTuple):
    """One feature of an Example.

    Attributes:
        kind: `bytes`, `float`, `int64`, or '' for a feature without values.
        values: how many it has; of packed numbers, 2 where there are more than one.
        offset, length: of its first byte string in the file.
        number: its first int64, None for other kinds.
    """

    kind: str
    values: int
    offset: int = 0
    length: int = 0
    number: int | None = None


def iter_samples(path: str, skipped: MutableMapping[str, int] | None = None) -> Iterator[FoundSample]:
    """The samples of a TFRecord file, in order.

    Args:
        path: the file.
        skipped: features that become no field are counted here.

    Raises:
        DamagedShardError: truncated or damaged, or no Examples; with the offset.

    >>> for sample in iter_samples("train-000000.tfrecord"):               # doctest: +SKIP
    ...     print(sample.key, sample.label, sample.fields)
    """
    skipped = {} if skipped is None else skipped
    stem = os.path.basename(path).rpartition(".")[0] or os.path.basename(path)
    for number, record in enumerate(iter_records(path)):
        features = parse_example(record, path)
        yield _sample(features, record, f"{stem}/{number:08d}", path, skipped)


# ---------------------------------------------------------------- records


def iter_records(path: str) -> Iterator[Record]:
    """The records of a TFRecord file, each against both of its checksums.

    Raises:
        DamagedShardError: truncated, damaged, or another kind of file.
        ShardError: it cannot be opened.
    """
    try:
        fd = open_regular(path)
    except OSError as error:
        raise ShardError(f"{printable(path)}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        at = 0
        while at < size:
            end = at + HEAD + _length(fd, at, size, path)
            yield _record(fd, at + HEAD, end, path)
            at = end + FOOT
    finally:
        os.close(fd)


def _length(fd: int, at: int, size: int, path: str) -> int:
    head = os.pread(fd, HEAD, at)
    if len(head) < HEAD:
        raise DamagedShardError(path, at, f"truncated inside a record's head; the file ends at {size}")
    if masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little"):
        why = "damaged: the length of a record does not match its checksum"
        if at == 0:
            known = (what for magic, what in _NOT_TFRECORD.items() if head.startswith(magic))
            why = next(known, "not a TFRecord file (or its first record's length is damaged)")
        raise DamagedShardError(path, at, why)
    length = int.from_bytes(head[:8], "little")
    if length > size - at - HEAD - FOOT:
        raise DamagedShardError(path, at, f"truncated: a record of {length} bytes begins here, the file ends at {size}")
    if length > MAX_EXAMPLE:
        raise DamagedShardError(path, at, f"a record of {length} bytes; no Example is longer than 2 GiB")
    return length


def _record(fd: int, begin: int, end: int, path: str) -> Record:
    if end - begin <= _IN_MEMORY:
        data = os.pread(fd, end - begin + FOOT, begin)
        checksum, stored = crc32c(memoryview(data)[: end - begin]), data[end - begin :]

        def peek(at: int, count: int) -> bytes:
            return data[at - begin : min(at - begin + count, end - begin)]
    else:
        checksum = 0
        for at in range(begin, end, _PIECE):
            checksum = crc32c(os.pread(fd, min(_PIECE, end - at), at), checksum)
        stored = os.pread(fd, FOOT, end)

        def peek(at: int, count: int) -> bytes:
            return os.pread(fd, min(count, end - at), at)

    if _mask(checksum) != int.from_bytes(stored, "little") or len(stored) < FOOT:
        raise DamagedShardError(path, begin, "damaged: a record does not match its checksum")
    return Record(begin, end, peek)


def _mask(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


# ---------------------------------------------------------------- protobuf


def parse_example(record: Record, path: str) -> dict[bytes, Feature]:
    """The features of a serialised `tf.train.Example`, in file order, values unread.

    Raises:
        DamagedShardError: not an Example, a length that lies, or a feature that is there twice.
    """
    return _Parser(record.peek, path).example(record.begin, record.end)


class _Parser:
    """Reads protobuf's wire format by offsets."""

    def __init__(self, peek: Peek, path: str) -> None:
        self._peek = peek
        self._path = path

    def example(self, begin: int, end: int) -> dict[bytes, Feature]:
        features: dict[bytes, Feature] = {}
        for at, until in self._messages(begin, end, 1):
            for entry, entry_end in self._messages(at, until, 1):
                name, feature = self._entry(entry, entry_end)
                if name in features:
                    raise self._error(entry, f"the feature {printable(name)!r} is there twice")
                if len(features) == _MAX_FEATURES:
                    raise self._error(entry, f"more than {_MAX_FEATURES} features in one Example")
                features[name] = feature
        return features

    def _entry(self, begin: int, end: int) -> tuple[bytes, Feature]:
        name, feature = b"", Feature("", 0)
        for number, wire, at, until in self._fields(begin, end):
            if wire != 2 or number > 2:
                continue
            if number == 2:
                feature = self._feature(at, until)
            elif until - at > _MAX_NAME:
                raise self._error(at, f"a feature's name of {until - at} bytes")
            else:
                name = self._peek(at, until - at)
        return name, feature

    def _feature(self, begin: int, end: int) -> Feature:
        feature = Feature("", 0)
        for number, wire, at, until in self._fields(begin, end):
            if wire != 2 or not 1 <= number <= 3:
                continue
            if feature.kind:
                raise self._error(at, "a feature with two lists of values, which readers take differently")
            feature = (self._bytes, self._floats, self._numbers)[number - 1](at, until)
        return feature

    def _bytes(self, begin: int, end: int) -> Feature:
        count = offset = length = 0
        for at, until in self._messages(begin, end, 1):
            if count == 0:
                offset, length = at, until - at
            count += 1
        return Feature("bytes", count, offset, length)

    def _floats(self, begin: int, end: int) -> Feature:
        return Feature("float", int(end > begin))  # of no use as bytes: whether they are packed is not known

    def _numbers(self, begin: int, end: int) -> Feature:
        count, first = 0, None
        for number, wire, at, until in self._fields(begin, end):
            if number == 1 and wire in (0, 2) and until > at:
                value, after = self._varint(at, until)
                first = value if first is None else first
                count += 1 + (after < until)
        return Feature("int64", count, number=None if first is None else first - (first >> 63 << 64))

    def _messages(self, begin: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
        for number, wire, at, until in self._fields(begin, end):
            if number == wanted:
                if wire != 2:
                    raise self._error(at, "not a tf.train.Example: a message is of another type")
                yield at, until

    def _fields(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(field number, wire type, begin of the value, its end)"""
        at = begin
        while at < end:
            tag, value = self._varint(at, end)
            number, wire = tag >> 3, tag & 7
            if wire == 2:
                length, value = self._varint(value, end)
                until = value + length
            elif wire == 0:
                _, until = self._varint(value, end)
            elif wire in (1, 5):
                until = value + (8 if wire == 1 else 4)
            else:
                raise self._error(at, f"not a tf.train.Example: wire type {wire}")
            if number == 0:
                raise self._error(at, "not a tf.train.Example: field number 0")
            if until > end:
                raise self._error(
                    at, f"a value of {until - value} bytes reaches beyond what holds it, by {until - end}"
                )
            yield number, wire, value, until
            at = until

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """A number, and where it ends."""
        data = self._peek(at, min(_VARINT, end - at))
        if data and data[0] < 128:
            return data[0], at + 1
        value = 0
        for i, byte in enumerate(data):
            value |= (byte & 127) << 7 * i
            if byte < 128:
                if value >> 64:
                    raise self._error(at, "a varint of more than 64 bits")
                return value, at + i + 1
        raise self._error(at, "a varint of more than ten bytes" if len(data) == _VARINT else "a varint that is cut off")

    def _error(self, at: int, what: str) -> DamagedShardError:
        return DamagedShardError(self._path, at, what)


# ---------------------------------------------------------------- samples


def _sample(
    features: dict[bytes, Feature], record: Record, fallback: str, path: str, skipped: MutableMapping[str, int]
) -> FoundSample:
    """Our records say what everything is called. Of others, names are made as packing makes them of files."""
    ours = KEY in features
    texts = {name: _text(features, name, record) for name in (*_FILE_NAMES, KEY, IMAGE_FIELD, IMAGE_FORMAT)}
    key = texts[KEY] if ours else _strangers_key(texts, features, fallback)
    image = IMAGE if ours else next((n for n in _IMAGES if n in features and features[n].kind == "bytes"), None)
    label = next((n for n in _LABELS if n in features and features[n].kind == "int64"), None)
    fields: dict[str, Found] = {}
    for name, feature in features.items():
        if name in (_OURS if ours else _STRANGERS) or name == label:
            continue
        field = _image_field(texts, feature, record, ours=ours) if name == image else _field(name)
        if feature.kind == "bytes" and feature.values == 1 and field and field not in fields:
            original = texts[FILE_NAME] if name == image and not ours else b""
            fields[field] = Found(feature.offset, feature.length, original or b"%s.%s" % (key, utf8(field)))
        else:
            _skip(skipped, name, feature)
    if not fields:
        raise DamagedShardError(path, record.begin, "an Example without a feature of one byte string: no sample")
    number = None if label is None or features[label].values != 1 else features[label].number
    return FoundSample(key, fields, None if number is None else max(number, -1))


def _skip(skipped: MutableMapping[str, int], name: bytes, feature: Feature) -> None:
    why = f"{feature.values} values" if feature.kind == "bytes" and feature.values != 1 else feature.kind or "empty"
    reason = f"feature {printable(name)!r} ({why})"
    if reason not in skipped and len(skipped) >= _MAX_REASONS:
        reason = "features of other names"
    skipped[reason] = skipped.get(reason, 0) + 1


def _text(features: dict[bytes, Feature], name: bytes, record: Record) -> bytes:
    """The value of a feature of one short byte string, empty for any other."""
    feature = features.get(name)
    if feature is None or feature.kind != "bytes" or feature.values != 1 or feature.length > _MAX_NAME:
        return b""
    return record.peek(feature.offset, feature.length)


def _strangers_key(texts: dict[bytes, bytes], features: dict[bytes, Feature], fallback: str) -> bytes:
    for name in _FILE_NAMES:
        number = features[name].number if name in features else None
        text = b"%d" % number if number is not None else texts[name]
        folder, slash, base = text.rpartition(b"/")
        stem, extension = split_extension(base)
        key = escape_key(folder + slash + (stem if extension in IMAGE_EXTENSIONS else base))
        if text and not key_fault(key):
            return key
    return escape_key(os.fsencode(fallback))


def _image_field(texts: dict[bytes, bytes], feature: Feature, record: Record, *, ours: bool) -> str:
    said = texts[IMAGE_FORMAT].decode("utf-8", "surrogateescape")
    if ours:
        return texts[IMAGE_FIELD].decode("utf-8", "surrogateescape") or format_field(said)
    head = record.peek(feature.offset, min(feature.length, 4))
    by_content = next((field for magic, field in _MAGIC.items() if head.startswith(magic)), None)
    return by_content or (format_field(said) if said.lower() in IMAGE_EXTENSIONS else "img")


@lru_cache(4096)
def _field(name: bytes) -> str:
    """The field that a feature becomes, '' where its name cannot be one."""
    field = name.decode("utf-8", "surrogateescape").replace("/", ".")
    return "" if bad_fields([field]) else field
