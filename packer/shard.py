"""Writing one shard: read each sample's files into place, look at them, note where they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer.engines import Report
from packer.errors import BadImageError, ProblemsError, SourceChangedError
from packer.formats import get_format
from packer.formats.base import Batch, Format, ShardWriter
from packer.imaging import ImageInfo, decode_check, probe
from packer.index import Rows, empty_rows
from packer.sample import is_image_field, printable
from packer.sources.base import Reader, Scan, Source
from packer.storage import PARTIAL, fsync_folder, write_json
from packer.strings import Int64s

#: Payload bytes laid out and written at a time. Larger gains nothing; peak memory grows with it.
BATCH_BYTES = 8 << 20
_LABEL_FIELD = "cls"


class Encoder(Protocol):
    """Changes payloads while packing. Picklable and deterministic."""

    def encode(self, field: str, data: memoryview) -> tuple[bytes | None, str]:
        """The new payload, or None to keep the old one; and what was done, in a few words, to be counted.

        Raises:
            BadImageError: the payload is not an image that can be changed.
        """
        ...

    def fingerprint(self) -> str:
        """Everything that decides the bytes: options and the versions of the libraries that write them."""
        ...

    def check_available(self) -> None:
        """Raise if a program or package is missing."""
        ...


@dataclass(frozen=True, eq=False)
class ShardTask:
    """Everything that one shard needs; picklable, so it can run on another machine.

    Attributes:
        out, state: folders of the shard and of the job's state.
        name: the shard's file name.
        format: the format's name.
        source: reads the samples.
        scan: this shard's samples, in order.
        skip: leave out files that are no whole images, instead of raising.
        check: 'header', 'decode' or 'none'.
        encoder: changes payloads, or None.
    """

    out: str
    state: str
    name: str
    format: str
    source: Source
    scan: Scan
    skip: bool
    check: str
    encoder: Encoder | None


@dataclass(frozen=True)
class Finished:
    """A shard that is in place.

    Attributes:
        name, samples, bytes, crc32c: as in the manifest.
        skipped: `(path, reason)` of samples left out.
        dropped: their positions in the shard's plan.
        encoded: what the encoder did, counted.
    """

    name: str
    samples: int
    bytes: int
    crc32c: int
    skipped: tuple[tuple[str, str], ...] = ()
    dropped: tuple[int, ...] = ()
    encoded: dict[str, int] = field(default_factory=dict)

    def save(self, state: str, rows: Rows) -> None:
        """Make rows and facts durable. Before the shard gets its final name."""
        np.save(os.path.join(state, f"{self.name}.rows.npy.tmp.npy"), rows)
        with open(os.path.join(state, f"{self.name}.rows.npy.tmp.npy"), "rb+") as f:
            os.fsync(f.fileno())
        os.rename(os.path.join(state, f"{self.name}.rows.npy.tmp.npy"), os.path.join(state, f"{self.name}.rows.npy"))
        write_json(os.path.join(state, f"{self.name}.json"), vars(self), indent=None)

    @staticmethod
    def load(out: str, state: str, name: str) -> Finished | None:
        """What an earlier run finished, or None where the shard must be written (again)."""
        try:
            with open(os.path.join(state, f"{name}.json"), encoding="ascii") as f:
                value: dict[str, Any] = json.load(f)
            if os.path.getsize(os.path.join(out, name)) != value["bytes"]:
                return None
            if not os.path.exists(os.path.join(state, f"{name}.rows.npy")):
                return None
        except (OSError, ValueError, KeyError):
            return None
        value["skipped"] = tuple((path, reason) for path, reason in value["skipped"])
        value["dropped"] = tuple(value["dropped"])
        return Finished(**value)

    def rows(self, state: str) -> Rows:
        """The shard's index rows."""
        rows: Rows = np.load(os.path.join(state, f"{self.name}.rows.npy"), allow_pickle=False)
        return rows

    def kept(self, planned: int) -> npt.NDArray[np.bool_]:
        """Bool (planned,): which of the planned samples are in the shard."""
        kept = np.ones(planned, bool)
        kept[list(self.dropped)] = False
        return kept


def write_shard(task: ShardTask, report: Report) -> Finished:
    """Write one shard under a temporary name, make its rows durable, then rename it into place.

    Raises:
        ProblemsError: a file is no whole image, and `task.skip` is off.
        SourceChangedError: a file is not what the scan saw.
        OutputError: the disk is full or the folder cannot be written.
    """
    final = os.path.join(task.out, task.name)
    run = _Run(task, get_format(task.format).writer(final + PARTIAL))
    try:
        for begin, end in _batches(task.scan, get_format(task.format)):
            report(end - begin, run.batch(begin, end))
        written = run.writer.close()
    except BaseException:
        run.writer.abort()
        if os.path.exists(final + PARTIAL):
            os.unlink(final + PARTIAL)
        raise
    finally:
        run.reader.close()
    finished = Finished(
        task.name, run.count, written.bytes, written.crc32c, tuple(run.skipped), tuple(run.dropped), run.encoded
    )
    finished.save(task.state, run.rows[: run.count])
    os.rename(final + PARTIAL, final)
    fsync_folder(task.out)
    return finished


def _batches(scan: Scan, format_: Format) -> list[tuple[int, int]]:
    ends = np.cumsum(format_.sample_bytes(scan))
    cuts = []
    begin = 0
    while begin < len(scan):
        done = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, done + BATCH_BYTES, "right")), begin + 1)
        cuts.append((begin, end))
        begin = end
    return cuts


class _Run:
    """The state of one shard being written."""

    def __init__(self, task: ShardTask, writer: ShardWriter) -> None:
        self.task = task
        self.writer = writer
        self.reader: Reader = task.source.reader()
        scan = task.scan
        self.fields = (*scan.fields, _LABEL_FIELD) if scan.made_cls else scan.fields
        self.rows = empty_rows(len(scan), self.fields)
        self.count = 0
        self.skipped: list[tuple[str, str]] = []
        self.dropped: list[int] = []
        self.encoded: dict[str, int] = {}
        self._images = [is_image_field(name) for name in scan.fields]
        self._cls = {label: (text := b"%d" % label, crc32c(text)) for label in np.unique(scan.label).tolist()}

    def batch(self, begin: int, end: int) -> int:
        """Write samples begin…end−1 of the plan; returns how many payload bytes were read."""
        scan = self.task.scan
        files = slice(int(scan.first[begin]), int(scan.first[end]))
        numbers = np.arange(files.start, files.stop)
        places_at = list(scan.places.take(numbers))
        paths = places_at if scan.locators is None else list(scan.paths.take(numbers))
        payloads = None if self.task.encoder is None else self._encode(paths, places_at, files)
        sizes = scan.sizes[files] if payloads is None else np.array([len(p) for p in payloads], np.int64)
        layout = _Layout(scan, begin, end, files, sizes)
        buffer, places = self.writer.layout(layout.batch)
        if payloads is not None:
            for place, payload in zip(layout.of_files(places), payloads, strict=True):
                buffer[place : place + len(payload)] = payload
        crcs, infos, bad = self._fill(buffer, layout, paths, places_at if payloads is None else None, places)
        self._put_labels(buffer, layout, places, crcs, begin)
        keep = np.ones(end - begin, bool)
        keep[list(bad)] = False
        for i, (path, reason) in sorted(bad.items()):
            self._leave_out(begin + i, path, reason)
        offsets = self.writer.commit(None if not bad else keep)
        self._note(layout, keep, offsets, crcs, infos, begin)
        return int(scan.sizes[files].sum())

    def _fill(
        self,
        buffer: memoryview,
        layout: _Layout,
        paths: Sequence[bytes],
        source: Sequence[bytes] | None,
        places: Sequence[int],
    ) -> tuple[list[int], dict[int, ImageInfo], dict[int, tuple[str, str]]]:
        """Read (from `source`, unless encoded before), checksum and probe every file of the batch in its place."""
        crcs = [0] * len(places)
        infos: dict[int, ImageInfo] = {}
        bad: dict[int, tuple[str, str]] = {}
        read_into, images = self.reader.read_into, self._images
        look = {"header": probe, "decode": decode_check, "none": _no_check}[self.task.check]
        files = zip(
            source or paths, layout.file_sizes, layout.file_fields, layout.file_samples, layout.file_places, strict=True
        )
        for i, (where, size, field_, sample, at) in enumerate(files):
            place = places[at]
            view = buffer[place : place + size]
            if source is not None and (got := read_into(where, view)) != size:
                raise _changed(paths[i], size, got)
            crcs[at] = crc32c(view)
            if images[field_]:
                try:
                    info = look(view)
                    if sample not in infos:
                        infos[sample] = info
                except BadImageError as error:
                    bad.setdefault(sample, (printable(paths[i]), str(error)))
        return crcs, infos, bad

    def _encode(self, paths: Sequence[bytes], source: Sequence[bytes], files: slice) -> list[bytes | memoryview]:
        encoder = self.task.encoder
        sizes, fields = self.task.scan.sizes[files], self.task.scan.field[files]
        payloads: list[bytes | memoryview] = []
        for path, place, size, number in zip(paths, source, sizes.tolist(), fields.tolist(), strict=True):
            data = memoryview(bytearray(size))
            if (got := self.reader.read_into(place, data)) != size:
                raise _changed(path, size, got)
            new = None
            if encoder is not None:
                try:
                    probe(data) if self._images[number] and self.task.check != "none" else None
                    new, what = encoder.encode(self.task.scan.fields[number], data)
                    if what:
                        self.encoded[what] = self.encoded.get(what, 0) + 1
                except BadImageError:
                    new = None  # the original bytes go to `_fill`, which reports them in the usual way
            payloads.append(data if new is None else new)
        return payloads

    def _put_labels(
        self, buffer: memoryview, layout: _Layout, places: Sequence[int], crcs: list[int], begin: int
    ) -> None:
        for sample, at in layout.label_places:
            text, crc = self._cls[int(self.task.scan.label[begin + sample])]
            buffer[places[at] : places[at] + len(text)] = text
            crcs[at] = crc

    def _leave_out(self, sample: int, path: str, reason: str) -> None:
        if not self.task.skip:
            raise ProblemsError(
                f"{self.task.name}, sample {printable(self.task.scan.keys[sample])!r}: not packed:",
                [(path, reason)],
                "mend or remove the file, or run again with --on-error skip to leave such files out and count them; "
                "finished shards are kept",
            )
        self.skipped.append((path, reason))
        self.dropped.append(sample)

    def _note(
        self,
        layout: _Layout,
        keep: npt.NDArray[np.bool_],
        offsets: Int64s,
        crcs: list[int],
        infos: dict[int, ImageInfo],
        begin: int,
    ) -> None:
        """Index rows for the samples that were kept."""
        count = int(keep.sum())
        rows = self.rows[self.count : self.count + count]
        target = np.cumsum(keep) - 1
        for number, name in enumerate(self.fields):
            at = np.flatnonzero((layout.numbers == number) & keep[layout.samples])
            to = target[layout.samples[at]]
            rows[f"{name}:offset"][to] = offsets[at]
            rows[f"{name}:length"][to] = layout.batch.sizes[at]
            rows[f"{name}:crc32c"][to] = np.array(crcs, np.uint32)[at]
        rows["label"] = self.task.scan.label[begin : begin + len(keep)][keep]
        rows["shard"] = 0
        if infos:
            samples = np.fromiter((i for i in infos if keep[i]), np.int64)
            rows["height"][target[samples]] = [infos[i].height for i in samples.tolist()]
            rows["width"][target[samples]] = [infos[i].width for i in samples.tolist()]
        self.count += count


class _Layout:
    """The members of a batch: the source's files, and after each sample's files its made label."""

    def __init__(self, scan: Scan, begin: int, end: int, files: slice, sizes: Int64s) -> None:
        counts = np.diff(scan.first[begin : end + 1])
        labels = scan.label[begin:end]
        labelled = labels >= 0 if scan.made_cls else np.zeros(len(labels), bool)
        first = np.concatenate([[0], np.cumsum(counts + labelled)])
        self.samples = np.repeat(np.arange(end - begin), counts + labelled)
        is_label = np.zeros(len(self.samples), bool)
        is_label[first[1:][labelled] - 1] = True
        self.numbers = np.full(len(self.samples), len(scan.fields), np.int64)
        self.numbers[~is_label] = scan.field[files]
        member_sizes = np.zeros(len(self.samples), np.int64)
        member_sizes[~is_label] = sizes
        member_sizes[is_label] = _digits(labels[labelled])
        names = (*scan.fields, _LABEL_FIELD)
        keys = list(scan.keys.take(np.arange(begin, end)))
        self.batch = Batch(keys, first, [names[i] for i in self.numbers.tolist()], member_sizes)
        self.file_places = np.flatnonzero(~is_label).tolist()
        self.file_sizes = sizes.tolist()
        self.file_fields = scan.field[files].tolist()
        self.file_samples = self.samples[~is_label].tolist()
        self.label_places = list(zip(np.flatnonzero(labelled).tolist(), np.flatnonzero(is_label).tolist(), strict=True))

    def of_files(self, places: Sequence[int]) -> list[int]:
        return [places[at] for at in self.file_places]


def _digits(labels: Int64s) -> Int64s:
    """How many decimal digits each label has."""
    digits = np.ones(len(labels), np.int64)
    power = 10
    while len(labels) and power <= labels.max():
        digits += labels >= power
        power *= 10
    return digits


def _changed(path: bytes, size: int, got: int) -> SourceChangedError:
    what = f"grew beyond {size} bytes" if got > size else f"has {got} bytes, had {size}"
    return SourceChangedError(
        f"{printable(path)} {what} since the folder was scanned; let it come to rest, then run the same command again"
    )


def _no_check(data: memoryview) -> ImageInfo:
    try:
        return probe(data)
    except BadImageError:
        return ImageInfo("unknown", -1, -1)
