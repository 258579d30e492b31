"""Writing one shard: read each sample's files into place, look at them, note where they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer import npy
from packer.engines import Report
from packer.errors import BadImageError, ProblemsError
from packer.filling import Filler
from packer.formats import get_format
from packer.formats.base import About, Format, Seen, ShardWriter
from packer.imaging import decode_check, probe, probe_all
from packer.index import Rows, empty_rows, npy_rows, row_dtype
from packer.sample import is_image_field, is_picture_array, label_of, printable
from packer.shard_members import LABEL_FIELD, MadeLabels, Members
from packer.sources.base import Maker, Reader, Scan, Source
from packer.storage import PARTIAL, fsync_folder, output_error, write_atomic, write_json
from packer.strings import Int64s

#: A sample of more payload bytes is written piece by piece: memory must not grow with it.
LARGE_BYTES = 64 << 20
#: Payload bytes laid out and written at a time: fewer leave numpy's overhead per batch, more leave the cache.
BATCH_BYTES = 4 << 20
#: Index columns of samples that belong together (CT): which series, which slice of it.
UNIT_COLUMNS = ("series", "slice")


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
        durable: wait for the disk before the shard gets its name.
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
    durable: bool = True


@dataclass(frozen=True)
class Finished:
    """A shard that is in place. A shard of no samples (all were left out) has no file.

    Attributes:
        name, samples, bytes, crc32c: as in the manifest.
        rows_crc32c: of the saved index rows.
        broken: `(path, reason)` of files that were left out.
        dropped: positions in the shard's plan of the samples that were left out.
        encoded: what the encoder did, counted.
        unread_labels: how many `cls` files hold no class number.
    """

    name: str
    samples: int
    bytes: int
    crc32c: int
    rows_crc32c: int
    broken: tuple[tuple[str, str], ...] = ()
    dropped: tuple[int, ...] = ()
    encoded: dict[str, int] = field(default_factory=dict)
    unread_labels: int = 0

    @staticmethod
    def load(out: str, state: str, name: str, *, planned: int, skip: bool) -> Finished | None:
        """What an earlier run finished, or None where the shard must be written (again).

        Args:
            out: the shard's folder.
            state: the job's folder.
            name: the shard's file name.
            planned: how many samples it was to have.
            skip: whether it may lack some of them.
        """
        try:
            with open(os.path.join(state, name + ".json"), encoding="ascii") as f:
                value: dict[str, Any] = json.load(f)
            found = Finished(**value)
            found = replace(found, broken=tuple((p, r) for p, r in found.broken), dropped=tuple(found.dropped))
            with open(os.path.join(state, name + ".rows"), "rb") as f:
                rows = f.read()
            size = os.path.getsize(os.path.join(out, name)) if found.samples else 0
        except (OSError, ValueError, TypeError):
            return None
        whole = (
            (found.name, size, crc32c(rows)) == (name, found.bytes, found.rows_crc32c)
            and found.samples + len(found.dropped) == planned
            and (skip or not found.dropped)
        )
        return found if whole else None

    def rows(self, state: str, fields: Sequence[str], extra: Sequence[str] = ()) -> Rows:
        """The shard's index rows."""
        return np.fromfile(os.path.join(state, self.name + ".rows"), row_dtype(fields, extra))

    def kept(self, planned: int) -> npt.NDArray[np.bool_]:
        """Bool (planned,): which of the planned samples are in the shard."""
        kept = np.ones(planned, bool)
        kept[list(self.dropped)] = False
        return kept


def label_warnings(shards: Iterable[Finished]) -> list[str]:
    """What the user should know of `cls` files that hold no class number (−1, which says there is none, aside)."""
    count = sum(shard.unread_labels for shard in shards)
    what = "1 cls file holds" if count == 1 else f"{count:,} cls files hold"
    return [f"{what} no class number: no label (−1) in the index"] if count else []


def write_shard(task: ShardTask, report: Report) -> Finished:
    """Write one shard under a temporary name, make its rows durable, then rename it into place.

    Raises:
        ProblemsError: a file is no whole image, and `task.skip` is off.
        SourceChangedError: a file is not what the scan saw.
        OutputError: the disk is full or the folder cannot be written.
    """
    final = os.path.join(task.out, task.name)
    partial = f"{final}.{os.getpid()}{PARTIAL}"  # a dying worker of a killed run must not share it
    format_ = get_format(task.format)
    run = _Run(task, format_.writer(partial, about=About(task.scan.classes), durable=task.durable))
    try:
        for begin, end in _batches(task.scan, format_):
            report(end - begin, run.batch(begin, end))
        written = run.writer.close()
        rows = npy_rows(run.rows[: run.count])
        facts = write_atomic(os.path.join(task.state, task.name + ".rows"), [rows])
        size, checksum = written if run.count else (0, 0)
        done = Finished(
            task.name,
            run.count,
            size,
            checksum,
            facts.crc32c,
            tuple(run.broken),
            tuple(run.dropped),
            run.encoded,
            run.unread_labels,
        )
        write_json(os.path.join(task.state, task.name + ".json"), vars(done), indent=None)
        if run.count:
            _put_in_place(partial, final)
    finally:
        run.filler.close()
        run.writer.abort()
        run.reader.close()
        if os.path.exists(partial):
            os.unlink(partial)
    return done


def _put_in_place(partial: str, final: str) -> None:
    try:
        os.rename(partial, final)
        fsync_folder(os.path.dirname(final))
    except OSError as error:
        raise output_error(final, error) from error


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
        self.filler = Filler(self.reader)
        scan = task.scan
        self.fields = (*scan.fields, LABEL_FIELD) if scan.made_cls else scan.fields
        self.rows = empty_rows(len(scan), self.fields, UNIT_COLUMNS if scan.number is not None else ())
        self.count = 0
        self.broken: list[tuple[str, str]] = []
        self.dropped: list[int] = []
        self.encoded: dict[str, int] = {}
        self.unread_labels = 0
        self._unfit: dict[int, BadImageError] = {}  # by file: what could not be made or changed
        self._maker = self.reader if isinstance(self.reader, Maker) else None
        self._images = np.array([is_image_field(name) for name in scan.fields] or [False])
        self._arrays = np.array([is_picture_array(name) for name in scan.fields] or [False])
        self._made = MadeLabels(scan.label)

    def batch(self, begin: int, end: int) -> int:
        """Write samples begin…end−1 of the plan; returns how many payload bytes were read."""
        scan = self.task.scan
        files = slice(int(scan.first[begin]), int(scan.first[end]))
        size = int(scan.sizes[files].sum())
        if end - begin == 1 and size > LARGE_BYTES:
            self._large(begin, files)
        else:
            self._batch(begin, end, files)
        return size

    def _batch(self, begin: int, end: int, files: slice) -> None:
        scan = self.task.scan
        places = scan.places.slice(files.start, files.stop)
        direct = self.task.encoder is None and self._maker is None
        payloads = None if direct else self._load(places, files)
        sizes = scan.sizes[files] if payloads is None else np.array([len(p) for p in payloads], np.int64)
        layout = Members(scan, begin, end, files, sizes)
        buffer, at = self.writer.layout(layout.batch)
        starts = at[layout.file_members]
        views = [buffer[a:b] for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
        crcs = np.zeros(len(at), np.uint32)
        if payloads is None:
            crcs[layout.file_members] = self.filler.fill(places, views)
        else:
            for view, payload in zip(views, payloads, strict=True):
                view[:] = payload
            crcs[layout.file_members] = list(map(crc32c, views))
        self._put_labels(buffer, layout, at, crcs, begin)
        image_sizes, keep = self._look(views, layout, begin, files)
        labels = self._labels(views, layout, begin, files)
        offsets = self.writer.commit(Seen(labels, image_sizes), None if keep.all() else keep)
        self._note(layout, begin, keep, offsets, crcs, image_sizes, labels)

    def _large(self, begin: int, files: slice) -> None:
        """Write one sample piece by piece; only what is small, and pictures to be looked at, are held whole."""
        scan = self.task.scan
        places = scan.places.slice(files.start, files.stop)
        sizes = scan.sizes[files].copy()
        whole: dict[int, bytes | memoryview] = {}
        held = self._images[scan.field[files]] | (sizes <= BATCH_BYTES) | (self._maker is not None)
        for i in np.flatnonzero(held).tolist():
            (whole[i],) = self._load(places[i : i + 1], slice(files.start + i, files.start + i + 1))
            sizes[i] = len(whole[i])
        layout = Members(scan, begin, begin + 1, files, sizes)
        views = [memoryview(whole.get(i, b"")) for i in range(len(places))]
        image_sizes, keep = self._look(views, layout, begin, files)
        if not keep.all():
            return
        labels = self._labels(views, layout, begin, files)
        crcs = np.zeros(len(layout.samples), np.uint32)
        file_of = {int(member): i for i, member in enumerate(layout.file_members)}

        def read(member: int, offset: int, view: memoryview) -> None:
            i = file_of.get(member)
            if i is None:
                view[:] = self._made.text(int(scan.label[begin]))
            elif i in whole:
                view[:] = whole[i][offset : offset + len(view)]
            else:
                self.reader.read_piece(places[i], int(sizes[i]), offset, view)
            crcs[member] = crc32c(view, int(crcs[member]))

        offsets = self.writer.stream(layout.batch, Seen(labels, image_sizes), read)
        self._note(layout, begin, keep, offsets, crcs, image_sizes, labels)

    def _look(
        self, views: list[memoryview], layout: Members, begin: int, files: slice
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Height and width of each sample's first image, (m, 2), and which samples are fit to be kept, (m,)."""
        scan = self.task.scan
        images = np.flatnonzero(self._images[scan.field[files]])
        sizes, found = self._probe([views[i] for i in images.tolist()])
        bad = {int(images[i]): error for i, error in found.items()}
        if self._unfit and (self.task.check != "none" or self._maker is not None):
            unfit = {n - files.start: error for n, error in self._unfit.items() if files.start <= n < files.stop}
            bad = unfit | bad if self._maker is None else bad | unfit
        keep = np.ones(layout.samples_count, bool)
        for file, error in sorted(bad.items()):
            sample = int(layout.file_samples[file])
            if keep[sample]:
                self._leave_out(begin + sample, printable(scan.paths[files.start + file]), str(error))
            keep[sample] = False
        by_sample = np.full((layout.samples_count, 2), -1, np.int32)
        samples, first = np.unique(layout.file_samples[images], return_index=True)
        by_sample[samples] = sizes[first]
        for i in np.flatnonzero(self._arrays[scan.field[files]]).tolist():
            if by_sample[layout.file_samples[i], 0] < 0:
                by_sample[layout.file_samples[i]] = npy.size(views[i])
        return by_sample, keep

    def _labels(self, views: list[memoryview], layout: Members, begin: int, files: slice) -> Int64s:
        """The label of each sample, (m,): as the source says, or as its `cls` file does."""
        scan = self.task.scan
        labels = scan.label[begin : begin + layout.samples_count]
        if LABEL_FIELD not in scan.fields:
            return labels
        labels = labels.copy()
        for i in np.flatnonzero(scan.field[files] == scan.fields.index(LABEL_FIELD)).tolist():
            sample = int(layout.file_samples[i])
            if labels[sample] < 0:
                labels[sample] = label_of(views[i])
                self.unread_labels += bool(labels[sample] < 0 and views[i].tobytes().strip() != b"-1")
        return labels

    def _probe(self, views: list[memoryview]) -> tuple[npt.NDArray[np.int32], dict[int, BadImageError]]:
        sizes, bad = probe_all(views, decode_check if self.task.check == "decode" else probe)
        return sizes, {} if self.task.check == "none" else bad

    def _load(self, places: list[bytes], files: slice) -> list[bytes | memoryview]:
        """Payloads in memory, changed by the encoder if there is one."""
        encoder, scan = self.task.encoder, self.task.scan
        sizes, fields = scan.sizes[files].tolist(), scan.field[files].tolist()
        payloads: list[bytes | memoryview]
        if self._maker is None:
            payloads = [memoryview(bytearray(size)) for size in sizes]
            self.reader.read(places, [memoryview(payload) for payload in payloads])
        else:
            payloads = [self._make(place, files.start + i) for i, place in enumerate(places)]
        for i, (payload, number) in enumerate(zip(payloads, fields, strict=True)):
            if encoder is None or files.start + i in self._unfit:
                continue
            if self._images[number] and self._probe([memoryview(payload)])[1]:
                continue  # broken: its own bytes go on to `_look`, which reports them in the usual way
            try:
                new, what = encoder.encode(scan.fields[number], memoryview(payload))
            except BadImageError as error:
                self._unfit[files.start + i] = BadImageError(str(error))
                new, what = None, "kept as they were: do not decode" if self.task.check == "none" else ""
            if new is not None:
                payloads[i] = new
            if what:
                self.encoded[what] = self.encoded.get(what, 0) + 1
        return payloads

    def _make(self, place: bytes, file: int) -> bytes:
        if self._maker is None:
            raise TypeError("nothing is made of this source's files")
        try:
            return self._maker.make(place)
        except BadImageError as error:
            self._unfit[file] = error
            return b""

    def _put_labels(
        self, buffer: memoryview, layout: Members, at: Int64s, crcs: npt.NDArray[np.uint32], begin: int
    ) -> None:
        if len(layout.label_members):
            labels = self.task.scan.label[begin : begin + layout.samples_count][layout.labelled]
            crcs[layout.label_members] = self._made.put(labels, buffer, at[layout.label_members])

    def _leave_out(self, sample: int, path: str, reason: str) -> None:
        if not self.task.skip:
            raise ProblemsError(
                f"{self.task.name}, sample {printable(self.task.scan.keys[sample])!r}: not packed:",
                [(path, reason)],
                "mend or remove the file, or run again with --on-error skip to leave such files out and count them; "
                "finished shards are kept",
            )
        self.broken.append((path, reason))
        self.dropped.append(sample)

    def _note(
        self,
        layout: Members,
        begin: int,
        keep: npt.NDArray[np.bool_],
        offsets: Int64s,
        crcs: npt.NDArray[np.uint32],
        image_sizes: npt.NDArray[np.int32],
        labels: Int64s,
    ) -> None:
        """Index rows for the samples that were kept."""
        count = int(keep.sum())
        rows = self.rows[self.count : self.count + count]
        target = np.cumsum(keep) - 1
        kept = keep[layout.samples]
        for number, name in enumerate(self.fields):
            members = np.flatnonzero((layout.numbers == number) & kept)
            to = target[layout.samples[members]]
            rows[f"{name}:offset"][to] = offsets[members]
            rows[f"{name}:length"][to] = layout.batch.sizes[members]
            rows[f"{name}:crc32c"][to] = crcs[members]
        rows["label"] = labels[keep]
        scan = self.task.scan
        if scan.unit is not None and scan.number is not None:
            taken = slice(begin, begin + len(keep))
            rows["series"], rows["slice"] = scan.unit[taken][keep], scan.number[taken][keep]
        rows["shard"] = 0  # numbered in the end, when all shards of the split are known
        rows["height"], rows["width"] = image_sizes[keep].T
        self.count += count
