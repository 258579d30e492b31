"""TFRecord shards: one serialised `tf.train.Example` per sample, encoded by hand, a buffer at a time.

    uint64 length | masked crc32c of the length | Example | masked crc32c of the Example

All that frames some megabytes of samples is written at once, and the payloads are read straight into their place
inside the records. Features have the names of TensorFlow's ImageNet records; every other field keeps its own name.
What `__key__` and `image/field` add makes each record give back the very sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer.errors import ShardError
from packer.formats.base import NOTHING, About, Batch, FoundSample, Mask, ReadPiece, Seen, Written
from packer.formats.example import (
    FILE_NAME,
    HEIGHT,
    IMAGE,
    KEY,
    LABEL,
    LABEL_BYTES,
    LABEL_FIELD,
    NUMBER_BYTES,
    TEXT,
    WIDTH,
    Buffer,
    Pen,
    Shape,
    bytes_entry,
    entry_bytes,
    image_meta,
    message_bytes,
    number_entry,
    utf8,
)
from packer.formats.shard_file import ShardFile
from packer.imaging import probe_all
from packer.sample import printable
from packer.strings import Int64s, Strings

if TYPE_CHECKING:
    from packer.manifest import Manifest, Split
    from packer.sources.base import Scan

HEAD, FOOT = 12, 4  # bytes of a record before and after its Example
MAX_EXAMPLE = (1 << 31) - 1  # protobuf's limit for one message

_PIECE_BYTES = 4 << 20
_SAMPLES_AT_ONCE = 65536  # bounds the temporary columns of planning
_MASK_DELTA = 0xA282EAD8


class TFRecordFormat:
    """`tfrecord`: see `packer.formats.base.Format`."""

    name = "tfrecord"
    title = "TFRecord"
    suffix = ".tfrecord"
    suffixes = (".tfrecord", ".tfrecords", ".tfrec")
    packed_suffixes = (".tfrecord.gz", ".tfrecords.gz", ".tfrec.gz")
    beside = ()
    max_field_bytes = MAX_EXAMPLE - (1 << 20)

    def sample_bytes(self, scan: Scan) -> Int64s:
        """int64 (n,): each sample's whole record.

        Raises:
            ShardError: a sample does not fit into one Example.
        """
        total = np.zeros(len(scan), np.int64)
        texts = _texts(scan.classes)
        for begin in range(0, len(scan), _SAMPLES_AT_ONCE):
            end = min(begin + _SAMPLES_AT_ONCE, len(scan))
            files = slice(int(scan.first[begin]), int(scan.first[end]))
            first, key_bytes = scan.first[begin : end + 1] - files.start, np.diff(scan.keys.ends[begin : end + 1])
            field = scan.field[files].astype(np.int64)
            features = Shape(scan.fields, key_bytes, first, field, scan.sizes[files]).features
            if scan.made_cls:
                labels = scan.label[begin:end]
                digits = 1 + np.searchsorted(10 ** np.arange(1, 19), labels, "right")
                made = entry_bytes(len(LABEL_FIELD), digits) + LABEL_BYTES
                features = features + np.where(labels >= 0, made, 0) + texts.lengths[_text_numbers(labels, texts)]
            total[begin:end] = _record_bytes(features)
        _refuse_too_long(total, scan.keys.__getitem__)
        return total

    def overhead(self, scan: Scan) -> int:
        """None: TFRecord has neither a beginning nor an end of its own."""
        del scan
        return 0

    def writer(self, path: str, *, about: About = NOTHING, durable: bool = True) -> TFRecordWriter:
        """Start a shard at this path; see `Format.writer`."""
        return TFRecordWriter(path, about=about, durable=durable)

    def recognises(self, head: bytes) -> bool:
        """Whether the first bytes are a length and its checksum."""
        return len(head) >= HEAD and masked_crc32c(head[:8]) == int.from_bytes(head[8:HEAD], "little")

    def write_out(self, path: str, target: str) -> bool:
        """Fields are byte ranges, whoever wrote them; see `Format.write_out`."""
        del path, target
        return False

    def walk(self, path: str, skipped: MutableMapping[str, int] | None = None) -> Iterator[FoundSample]:
        """Every sample of a shard by its own records; see `Format.walk`. Both checksums of each are compared."""
        from packer.formats.tfrecord_reader import iter_samples

        return iter_samples(path, skipped)

    def sidecars(self, folder: str, split: Split, manifest: Manifest) -> Iterator[tuple[str, list[bytes]]]:
        """None."""
        del folder, split, manifest
        return iter(())


FORMAT = TFRecordFormat()


def _texts(classes: Sequence[str] | None) -> Strings:
    """By label the whole feature of its class name; the last one, which −1 leads to, is empty."""
    return Strings.of([*(bytes_entry(TEXT, utf8(name)) for name in classes or ()), b""])


def _text_numbers(labels: Int64s, texts: Strings) -> Int64s:
    return np.where((labels >= 0) & (labels < len(texts) - 1), labels, len(texts) - 1)


def _record_bytes(features: Int64s) -> Int64s:
    return HEAD + message_bytes(features) + FOOT


def _refuse_too_long(records: Int64s, key: Callable[[int], bytes]) -> None:
    for i in np.flatnonzero(records > MAX_EXAMPLE)[:1].tolist():
        raise ShardError(
            f"sample {printable(key(i))!r} takes {int(records[i]):,} bytes, and one tf.train.Example holds 2 GiB: "
            "leave it out with --drop-keys, or choose another --format"
        )


def masked_crc32c(data: bytes | memoryview) -> int:
    """A checksum as TFRecord stores it.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc7898b9d'
    """
    return int(masked(np.array([crc32c(data)], np.uint32))[0])


def frame(features: bytes) -> bytes:
    """The record of an Example of these features, each as `bytes_entry` or `int_entry` makes it."""
    buffer = np.zeros(int(_record_bytes(np.array([len(features)]))[0]), np.uint8)
    pen = Pen(buffer, np.zeros(1, np.int64))
    length = np.array([len(buffer) - HEAD - FOOT], "<u8")
    pen.words(length)
    pen.words(_checksums([memoryview(length.tobytes())]))
    pen.text(b"\x0a")
    pen.varint(np.array([len(features)]))
    pen.text(features)
    pen.words(_checksums([buffer.data[HEAD:-FOOT]]))
    return buffer.tobytes()


def masked(checksums: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Checksums as TFRecord stores them: rotated, and moved by a constant."""
    return ((checksums >> np.uint32(15)) | (checksums << np.uint32(17))) + np.uint32(_MASK_DELTA)


def _checksums(parts: list[memoryview]) -> npt.NDArray[np.uint32]:
    return masked(np.fromiter(map(crc32c, parts), np.uint32, len(parts))).astype("<u4")


class _Batch:
    """Some records in a buffer, all but payloads, numbers and last checksums.

    Args:
        batch: what is to be laid out.
        take: gives a buffer of at least so many bytes.
        room: leave room for the payloads; otherwise their bytes are missing from the buffer, as if they were empty.

    Attributes:
        shape: see `packer.formats.example.Shape`.
        starts: int64 (m + 1,): where each record begins in the buffer.
        payload: int64 per file: where its payload belongs.
        height, width, label: int64 (m,): where the number's ten bytes belong; meaningless without picture or `cls`.
    """

    def __init__(self, batch: Batch, texts: Strings, take: Callable[[int], Buffer], *, room: bool) -> None:
        self.batch = batch
        names, field, key_bytes = batch.fields, batch.field, batch.keys.lengths
        self.shape = shape = Shape(names, key_bytes, batch.first, field, batch.sizes)
        text = _text_numbers(batch.made_labels, texts)
        self.features = shape.features + texts.lengths[text]
        records = _record_bytes(self.features)
        _refuse_too_long(records, batch.keys.__getitem__)
        entries = shape.entries if room else shape.entries - batch.sizes
        ends = np.concatenate([[0], np.cumsum(entries)])
        all_entries = ends[batch.first[1:]] - ends[batch.first[:-1]]
        missing = np.zeros(len(records), np.int64) if room else _sums(batch.sizes, batch.first)
        self.starts = np.concatenate([[0], np.cumsum(records - missing)])
        self.buffer = take(int(self.starts[-1]))
        pen = Pen(self.buffer, self.starts[:-1])
        self._put_heads(pen, records - HEAD - FOOT)
        pen.entry(KEY, key_bytes)
        pen.strings(batch.keys.slice(0, len(batch.keys)))
        at = (pen.at - ends[batch.first[:-1]])[shape.sample] + ends[:-1]
        self._put_files(at, names, field)
        tails = Pen(self.buffer, pen.at + all_entries)
        tails.strings(texts.take(text).slice(0, len(text)))
        self._put_numbers(tails.at, names, field)

    def _put_heads(self, pen: Pen, lengths: Int64s) -> None:
        words = lengths.astype("<u8")
        raw = memoryview(words.tobytes())
        pen.words(words)
        pen.words(_checksums([raw[i : i + 8] for i in range(0, len(raw), 8)]))
        pen.text(b"\x0a")
        pen.varint(self.features)

    def _put_files(self, at: Int64s, names: Sequence[str], field: Int64s) -> None:
        picture = np.zeros(len(field), bool)
        picture[self.shape.picture[self.shape.picture >= 0]] = True
        self.payload = np.zeros(len(field), np.int64)
        for number, name in enumerate(names):
            for is_picture in (False, True):
                rows = np.flatnonzero((field == number) & (picture == is_picture))
                if len(rows):
                    pen = Pen(self.buffer, at[rows])
                    pen.entry(IMAGE if is_picture else utf8(name), self.batch.sizes[rows])
                    self.payload[rows] = pen.at

    def _put_numbers(self, at: Int64s, names: Sequence[str], field: Int64s) -> None:
        shape, keys = self.shape, self.batch.keys
        self.height, self.width, self.label = (np.zeros(len(at), np.int64) for _ in range(3))
        kind = np.where(shape.picture >= 0, field[shape.picture], -1) if len(field) else shape.picture
        for number in np.unique(kind[kind >= 0]).tolist():
            rows = np.flatnonzero(kind == number)
            pen = Pen(self.buffer, at[rows])
            pen.text(image_meta(names[number]))
            file_names = [keys[i] + b"." + utf8(names[number]) for i in rows.tolist()]
            pen.entry(FILE_NAME, np.fromiter(map(len, file_names), np.int64, len(rows)))
            pen.strings(file_names)
            for name, places in ((HEIGHT, self.height), (WIDTH, self.width)):
                pen.text(number_entry(name))
                places[rows] = pen.at
                pen.at += NUMBER_BYTES
            at[rows] = pen.at
        rows = np.flatnonzero(shape.cls >= 0)
        pen = Pen(self.buffer, at[rows])
        pen.text(number_entry(LABEL))
        self.label[rows] = pen.at

    def fill(self, samples: Int64s, payload: Callable[[int], memoryview], labels: Int64s) -> None:
        """Write height, width and label (m,) of these samples; the picture itself tells its size."""
        shape = self.shape
        seen = samples[shape.picture[samples] >= 0]
        sizes, _ = probe_all([payload(i) for i in shape.picture[seen].tolist()])
        Pen(self.buffer, self.height[seen]).number(sizes[:, 0].astype(np.int64))
        Pen(self.buffer, self.width[seen]).number(sizes[:, 1].astype(np.int64))
        labelled = samples[shape.cls[samples] >= 0]
        Pen(self.buffer, self.label[labelled]).number(labels[labelled])


def _sums(values: Int64s, first: Int64s) -> Int64s:
    ends: Int64s = np.concatenate([[0], np.cumsum(values)])
    sums: Int64s = ends[first[1:]] - ends[first[:-1]]
    return sums


class TFRecordWriter:
    """Writes one TFRecord file; see `packer.formats.base.ShardWriter`."""

    def __init__(self, path: str, *, about: About = NOTHING, durable: bool = True) -> None:
        self._file = ShardFile(path, durable=durable)
        self._texts = _texts(about.classes)
        self._laid_out: _Batch | None = None

    def layout(self, batch: Batch) -> tuple[memoryview, Int64s]:
        """Write everything into a buffer that is known before the payloads; see `ShardWriter.layout`."""
        self._laid_out = _Batch(batch, self._texts, self._file.take, room=True)
        return self._laid_out.buffer.data, self._laid_out.payload

    def commit(self, seen: Seen, keep: Mask | None = None) -> Int64s:
        """Write the batch out; see `ShardWriter.commit`."""
        laid_out, self._laid_out = self._laid_out, None
        if laid_out is None:
            raise RuntimeError("commit without layout")
        batch, view, starts = laid_out.batch, laid_out.buffer.data, laid_out.starts
        kept = np.arange(len(batch.keys)) if keep is None else np.flatnonzero(keep)
        begins, sizes = laid_out.payload.tolist(), batch.sizes.tolist()
        laid_out.fill(kept, lambda i: view[begins[i] : begins[i] + sizes[i]], seen.labels)
        bounds = zip((starts[kept] + HEAD).tolist(), (starts[kept + 1] - FOOT).tolist(), strict=True)
        checksums = _checksums([view[begin:end] for begin, end in bounds])
        Pen(laid_out.buffer, starts[kept + 1] - FOOT).words(checksums)
        offsets = laid_out.payload + self._file.size
        used = int(starts[-1])
        if len(kept) < len(batch.keys):
            offsets, used = self._close_gaps(laid_out, kept, offsets)
        self._file.write(laid_out.buffer, used)
        return offsets

    @staticmethod
    def _close_gaps(laid_out: _Batch, kept: Int64s, offsets: Int64s) -> tuple[Int64s, int]:
        """Move the records that stay over those that go; returns where the payloads are then, and the bytes in use."""
        buffer, starts = laid_out.buffer, laid_out.starts
        moved = np.full(len(starts) - 1, -1, np.int64)
        used = 0
        for i in kept.tolist():
            begin, end = starts[i : i + 2].tolist()
            buffer[used : used + end - begin] = buffer[begin:end]
            moved[i] = begin - used
            used += end - begin
        by = moved[laid_out.shape.sample]
        return np.where(by >= 0, offsets - by, -1), used

    def stream(self, batch: Batch, seen: Seen, read: ReadPiece) -> Int64s:
        """Write a batch piece by piece; see `ShardWriter.stream`. A picture is held whole, to see its size."""
        offsets: list[int] = []
        for i in range(len(batch.keys)):
            files = slice(*batch.first[i : i + 2].tolist())
            one = Batch(
                batch.keys.part(i, i + 1), np.array([0, files.stop - files.start]), batch.fields, batch.field[files],
                batch.sizes[files], batch.made_labels[i : i + 1],
            )  # fmt: skip
            offsets += self._stream_one(one, files.start, seen.labels[i : i + 1], read)
        return np.array(offsets, np.int64)

    def _stream_one(self, batch: Batch, number: int, labels: Int64s, read: ReadPiece) -> list[int]:
        laid_out = _Batch(batch, self._texts, lambda size: np.empty(size, np.uint8), room=False)
        offsets = []
        pictures: dict[int, memoryview] = {}
        at, checksum = 0, 0
        for i, (until, size) in enumerate(zip(laid_out.payload.tolist(), batch.sizes.tolist(), strict=True)):
            self._append(laid_out.buffer[at:until])
            checksum = crc32c(laid_out.buffer.data[max(at, HEAD) : until], checksum)
            at = until
            offsets.append(self._file.size)
            if i == laid_out.shape.picture[0]:
                whole = pictures[i] = memoryview(bytearray(size))
                read(number + i, 0, whole)
                self._append(np.frombuffer(whole, np.uint8))
                checksum = crc32c(whole, checksum)
            else:
                checksum = self._copy(number + i, size, read, checksum)
        laid_out.fill(np.zeros(1, np.int64), pictures.__getitem__, labels)
        checksum = crc32c(laid_out.buffer.data[max(at, HEAD) : -FOOT], checksum)
        laid_out.buffer[-FOOT:] = masked(np.array([checksum], np.uint32)).astype("<u4").view(np.uint8)
        self._append(laid_out.buffer[at:])
        return offsets

    def _copy(self, file: int, size: int, read: ReadPiece, checksum: int) -> int:
        for begin in range(0, size, _PIECE_BYTES):
            used = min(_PIECE_BYTES, size - begin)
            buffer = self._file.take(_PIECE_BYTES)
            read(file, begin, buffer.data[:used])
            checksum = crc32c(buffer.data[:used], checksum)
            self._file.write(buffer, used)
        return checksum

    def _append(self, data: Buffer) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            buffer = self._file.take(len(piece))
            buffer[: len(piece)] = piece
            self._file.write(buffer, len(piece))

    def close(self) -> Written:
        """Make the file durable. TFRecord has no end of its own."""
        return self._file.close()

    def abort(self) -> None:
        """Let go of the file as it is."""
        self._file.abort()
