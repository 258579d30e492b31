"""What every shard format must do. The tests of a format subclass `FormatContract` and name the format."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from conftest import wait_until
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import OutputError, ShardError
from packer.formats.base import Batch, Format, Seen, Written
from packer.sample import escape_key
from packer.sources.base import Scan, ScanBuilder
from packer.strings import Strings

MADE_LABEL = "cls"


class Sample(NamedTuple):
    """A key, and its files in order."""

    key: bytes
    files: tuple[tuple[str, bytes], ...]

    @property
    def label(self) -> int:
        return next((int(data) for field, data in self.files if field == MADE_LABEL), -1)


class Wrote(NamedTuple):
    """What the writer said: the finished file, and per file of each sample its offset (−1: left out)."""

    shard: Written
    offsets: list[list[int]]


def payload(size: int, seed: int) -> bytes:
    """Bytes without pattern, so that a byte at the wrong place shows."""
    return np.random.default_rng(seed).bytes(size)


_components = st.text(
    st.characters(min_codepoint=0x20, exclude_characters="./%\x7f", exclude_categories=("C", "Zl", "Zp")), min_size=1
)
_keys = st.lists(
    st.one_of(_components, st.text("ab", min_size=90, max_size=110), st.text("é", min_size=120, max_size=300)),
    min_size=1,
    max_size=3,
).map(lambda parts: escape_key("/".join(parts).encode()))
_sizes = st.one_of(st.integers(0, 3000), st.sampled_from([0, 1, 511, 512, 513, 1024, 4096]))


@st.composite
def samples_of(draw: st.DrawFn, max_size: int = 8) -> list[Sample]:
    """Samples with unique keys, of one to four files each; `cls` holds a label and comes last."""
    samples = []
    for key in draw(st.lists(_keys, unique=True, max_size=max_size)):
        fields = draw(
            st.lists(st.sampled_from(["jpg", "json", "seg.png", "x" * 120]), min_size=1, max_size=3, unique=True)
        )
        files = [(field, payload(draw(_sizes), len(samples))) for field in fields]
        label = draw(st.one_of(st.none(), st.integers(0, 20_000)))
        samples.append(Sample(key, tuple(files if label is None else [*files, (MADE_LABEL, b"%d" % label)])))
    return samples


def batch_of(samples: Sequence[Sample]) -> Batch:
    first = np.cumsum([0, *(len(sample.files) for sample in samples)])
    files = [file for sample in samples for file in sample.files]
    sizes = np.array([len(data) for _, data in files], np.int64)
    fields = sorted({field for field, _ in files})
    numbers = np.array([fields.index(field) for field, _ in files], np.int64)
    keys = Strings.of([sample.key for sample in samples])
    return Batch(keys, first, fields, numbers, sizes, labels_of(samples))


def labels_of(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    return np.array([sample.label for sample in samples], np.int64)


def seen_of(samples: Sequence[Sample]) -> Seen:
    return Seen(labels_of(samples), np.full((len(samples), 2), -1, np.int32))


def scan_of(samples: Sequence[Sample]) -> Scan:
    """The scan that would have led to these samples: labels are made, not files."""
    builder = ScanBuilder()
    for sample in samples:
        files = [(sample.key + field.encode(), len(data), field) for field, data in sample.files if field != MADE_LABEL]
        builder.add(sample.key, sample.label, "train", files)
    return builder.build(classes=None, made_cls=True, layout="", rule="")


class FormatContract:
    """Subclass it as `Test…`, and set `format`."""

    format: ClassVar[Format]
    exact: ClassVar[bool] = True  # sample_bytes and overhead add up to the file's size, not just to a bound of it

    def uncuttable(self, whole: bytes) -> int:
        """So many last bytes can be missing without notice (what ends an archive, say)."""
        return 0

    def write(self, path: str | os.PathLike[str], batches: Iterable[Sequence[Sample]]) -> Wrote:
        return self.write_some(path, ((samples, [True] * len(samples)) for samples in batches))

    def write_some(
        self, path: str | os.PathLike[str], batches: Iterable[tuple[Sequence[Sample], Sequence[bool]]]
    ) -> Wrote:
        writer = self.format.writer(os.fspath(path))
        offsets: list[list[int]] = []
        try:
            for samples, keep in batches:
                batch = batch_of(samples)
                buffer, places = writer.layout(batch)
                files = [data for sample in samples for _, data in sample.files]
                for place, data in zip(places.tolist(), files, strict=True):
                    buffer[place : place + len(data)] = data
                at = writer.commit(seen_of(samples), None if all(keep) else np.array(keep, bool)).tolist()
                offsets += [at[a:b] for a, b in zip(batch.first, batch.first[1:], strict=False)]
            return Wrote(writer.close(), offsets)
        finally:
            writer.abort()

    def stream(self, path: str | os.PathLike[str], samples: Sequence[Sample]) -> Wrote:
        writer = self.format.writer(os.fspath(path))
        offsets: list[list[int]] = []
        try:
            for sample in samples:
                expected = [0] * len(sample.files)

                def read(file: int, offset: int, view: memoryview) -> None:
                    assert offset == expected[file], "each byte once, in order"  # noqa: B023
                    expected[file] += len(view)  # noqa: B023
                    view[:] = sample.files[file][1][offset : offset + len(view)]  # noqa: B023

                offsets.append(writer.stream(batch_of([sample]), seen_of([sample]), read).tolist())
                assert expected == [len(data) for _, data in sample.files]
            return Wrote(writer.close(), offsets)
        finally:
            writer.abort()

    def walk(self, path: str | os.PathLike[str]) -> list[tuple[bytes, str, int, int]]:
        return [
            (sample.key, field, place.offset, place.length)
            for sample in self.format.walk(os.fspath(path))
            for field, place in sample.fields.items()
        ]

    def check(self, path: Path, samples: Sequence[Sample], wrote: Wrote, keep: Sequence[bool] | None = None) -> None:
        """By offset, and by the shard's own headers, there is what was written, in order, and nothing else."""
        shard = path.read_bytes()
        assert wrote.shard == Written(len(shard), crc32c(shard))
        expected = []
        for sample, at, kept in zip(samples, wrote.offsets, keep or [True] * len(samples), strict=True):
            for (field, data), offset in zip(sample.files, at, strict=True):
                if kept:
                    assert shard[offset : offset + len(data)] == data
                    expected.append((sample.key, field, offset, len(data)))
                else:
                    assert offset == -1
        assert self.walk(path) == expected

    # ------------------------------------------------------------ what holds for every format

    @settings(max_examples=60)
    @given(batches=st.lists(samples_of(), max_size=4), data=st.data())
    def test_what_is_kept_comes_back_and_what_is_left_out_leaves_no_trace(
        self, batches: list[list[Sample]], data: st.DataObject
    ) -> None:
        samples = unique(sample for batch in batches for sample in batch)
        cut = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=3), label="batch ends"))
        keep = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)), label="keep")
        bounds = list(zip([0, *cut], [*cut, len(samples)], strict=True))
        with folder() as tmp:
            wrote = self.write_some(tmp / "some", ((samples[a:b], keep[a:b]) for a, b in bounds))
            self.check(tmp / "some", samples, wrote, keep)
            kept = [sample for sample, good in zip(samples, keep, strict=True) if good]
            self.write(tmp / "kept", [kept])
            assert (tmp / "some").read_bytes() == (tmp / "kept").read_bytes()

    @settings(max_examples=40)
    @given(samples=samples_of())
    def test_the_size_is_known_before(self, samples: list[Sample]) -> None:
        with folder() as tmp:
            wrote = self.write(tmp / "shard", [samples])
            scan = scan_of(samples)
            sizes, overhead = self.format.sample_bytes(scan), self.format.overhead(scan)
            assert len(sizes) == len(samples)
            each = [self.write(tmp / "one", [[sample]]).shard.bytes for sample in samples]
            if self.exact:
                assert sizes.sum() + overhead == wrote.shard.bytes
                assert (sizes + overhead).tolist() == each
            else:
                assert sizes.sum() + overhead >= wrote.shard.bytes
                assert (sizes + overhead >= each).all()

    @settings(max_examples=30)
    @given(samples=samples_of())
    def test_streaming_writes_the_same_bytes(self, samples: list[Sample]) -> None:
        with folder() as tmp:
            wrote = self.stream(tmp / "streamed", samples)
            self.check(tmp / "streamed", samples, wrote)
            self.write(tmp / "laid-out", [samples])
            assert (tmp / "streamed").read_bytes() == (tmp / "laid-out").read_bytes()

    @pytest.mark.parametrize("size", [6 << 20, (6 << 20) + 1, 20_000_001])
    def test_a_payload_larger_than_any_buffer(self, tmp_path: Path, size: int) -> None:
        samples = [
            Sample(b"small", (("jpg", payload(700, 0)),)),
            Sample(b"large", (("npy", payload(size, 1)), ("json", b"{}"), ("cls", b"7"))),
            Sample(b"last", (("jpg", payload(1, 2)),)),
        ]
        self.check(tmp_path / "laid-out", samples, self.write(tmp_path / "laid-out", [samples]))
        self.check(tmp_path / "streamed", samples, self.stream(tmp_path / "streamed", samples))
        assert (tmp_path / "laid-out").read_bytes() == (tmp_path / "streamed").read_bytes()

    def test_many_batches_one_after_the_other_keep_their_order(self, tmp_path: Path) -> None:
        samples = [Sample(b"n%05d" % i, (("jpg", payload(i % 977, i)),)) for i in range(3000)]
        wrote = self.write(tmp_path / "shard", (samples[i : i + 50] for i in range(0, 3000, 50)))
        self.check(tmp_path / "shard", samples, wrote)

    def test_a_shard_without_samples_is_whole(self, tmp_path: Path) -> None:
        self.check(tmp_path / "shard", [], self.write(tmp_path / "shard", []))

    def test_the_bytes_depend_on_the_samples_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        samples = [Sample(b"a/%d" % i, (("jpg", payload(1000 * i, i)), ("cls", b"%d" % i))) for i in range(5)]
        self.write(tmp_path / "first", [samples])
        monkeypatch.setattr(time, "time", lambda: 4e9)
        monkeypatch.chdir("/")
        umask = os.umask(0o077)
        try:
            self.write(tmp_path / "second", [samples[:2], samples[2:]])
        finally:
            os.umask(umask)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
        assert (tmp_path / "second").stat().st_mode & 0o777 == 0o600

    def test_a_cut_anywhere_is_found_by_the_shard_s_own_headers(self, tmp_path: Path) -> None:
        samples = [Sample(b"k%d" % i, (("jpg", payload(300, i)), ("cls", b"1"))) for i in range(3)]
        self.write(tmp_path / "whole", [samples])
        whole = (tmp_path / "whole").read_bytes()
        last = len(whole) - self.uncuttable(whole)
        for end in sorted({*range(0, last, 97), *range(0, last, 512), last - 1}):
            (tmp_path / "cut").write_bytes(whole[:end])
            with pytest.raises(ShardError):
                self.walk(tmp_path / "cut")

    def test_a_folder_that_is_not_there_is_an_output_error(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="nowhere"):
            self.format.writer(str(tmp_path / "nowhere" / "shard"))

    def test_a_full_disk_is_an_output_error_soon(self) -> None:
        samples = [Sample(b"a%d" % i, (("jpg", payload(1 << 20, i)),)) for i in range(40)]
        with pytest.raises(OutputError, match="No space left on device; free some space"):
            self.write("/dev/full", [[sample] for sample in samples])

    def test_nothing_stays_open(self, tmp_path: Path) -> None:
        threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
        for end in ("close", "abort", "abort"):
            writer = self.format.writer(str(tmp_path / "shard"))
            buffer, _ = writer.layout(batch_of([Sample(b"a", (("jpg", bytes(1000)),))]))
            writer.commit(seen_of([Sample(b"a", ())]))
            getattr(writer, end)()
            writer.abort()
            del buffer
        wait_until(lambda: set(threading.enumerate()) <= threads and set(os.listdir("/proc/self/fd")) <= files)


def unique(samples: Iterable[Sample]) -> list[Sample]:
    return list({sample.key: sample for sample in samples}.values())


class folder:  # noqa: N801 - used like tempfile's
    """A temporary folder as a Path: hypothesis runs many examples in one test, so `tmp_path` does not do."""

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.name)

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


def members(samples: Iterable[Sample]) -> Iterator[tuple[bytes, bytes]]:
    """`(name, content)` of every file, named as WebDataset does."""
    for sample in samples:
        for field, data in sample.files:
            yield sample.key + b"." + field.encode(), data
