"""Packing from Python: the same bytes whatever happens, errors that say what to do, and nothing half done."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S, wait_until
from crc32c import crc32c
from PIL import Image

import packer.engines
import packer.shard
from packer.encoders import Resize
from packer.engines import LocalProcesses, no_report
from packer.errors import OutputError, ProblemsError, SourceChangedError, UsageError, WorkerDiedError
from packer.job import STATE
from packer.manifest import FILE
from packer.pack import REPORT, PackOptions, PackResult, Silent, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.sources.folder import FolderOptions, FolderSource
from packer.storage import exclusive

Tree = dict[str, bytes]
Folders = Callable[..., Path]


def options(**changes: object) -> PackOptions:
    """Three samples a shard, in one process."""
    return PackOptions(**({"plan": PlanOptions(shard_samples=3), "workers": 1} | changes))  # type: ignore[arg-type]


def tree(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class InterruptedPackError(Exception):
    pass


class StopAfter(Silent):
    """Lets so many batches be packed, then fails."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def packed(self, samples: int, bytes: int) -> None:  # noqa: A002
        if self.left == 0:
            raise InterruptedPackError
        self.left -= 1


def interrupt(source: FolderSource, out: Path, after: int, chosen: PackOptions | None = None) -> set[str]:
    """Pack so many shards, then stop. Returns the shards that are there."""
    with pytest.raises(InterruptedPackError):
        pack(source, out, chosen or options(), progress=StopAfter(after))
    assert not (out / FILE).exists()
    assert not list(out.glob("*.partial"))
    return {path.name for path in out.glob("*.tar")}


def breaks(path: Path) -> None:
    """Cut a picture short."""
    path.write_bytes(path.read_bytes()[:-20])


@pytest.fixture
def source(image_folder: Folders) -> FolderSource:
    return FolderSource(str(image_folder("src", splits=("train", "val"), per_class=5)))


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_do_not_show(
    source: FolderSource, tmp_path: Path, workers: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer.engines, "_start_method", lambda: start)
    pack(source, tmp_path / "one", options())
    pack(source, tmp_path / "many", options(workers=workers))
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_with_other_threads_at_work_nothing_is_forked(source: FolderSource, tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert packer.engines._start_method() == "spawn"
        pack(source, tmp_path / "out", options(workers=2))
    finally:
        stop.set()
        thread.join()


def test_neither_time_nor_umask_nor_the_way_to_the_source_shows(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(source, tmp_path / "one", options())
    for path in Path(source.root).rglob("*.*"):
        os.utime(path, (1, 1))
    monkeypatch.chdir(source.root + "/train")
    umask = os.umask(0o007)
    try:
        pack(FolderSource(".."), tmp_path / "two", options())
    finally:
        os.umask(umask)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "two").iterdir()} == {0o660}


def test_the_manifest_says_what_decides_the_bytes_and_nothing_else(source: FolderSource, tmp_path: Path) -> None:
    result = pack(source, tmp_path / "out", options(workers=2))
    assert result.manifest.options == {
        "shard_bytes": 512_000_000,
        "shard_samples": 3,
        "shuffle": True,
        "seed": 0,
        "split": None,
        "split_exact": False,
        "group_regex": None,
        "single_file": False,
        "format": "webdataset",
        "check": "header",
        "encoder": None,
    }
    assert str(tmp_path) not in (tmp_path / "out" / FILE).read_text()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_resumed_run_keeps_finished_shards_and_ends_with_the_same_bytes(
    source: FolderSource, tmp_path: Path, after: int
) -> None:
    pack(source, tmp_path / "undisturbed", options())
    done = interrupt(source, tmp_path / "out", after)
    assert len(done) == after
    before = {name: (tmp_path / "out" / name).stat() for name in done}
    result = pack(source, tmp_path / "out", options(workers=2))
    assert result.resumed_shards == after
    assert result.written_bytes == result.manifest.bytes - sum(stat.st_size for stat in before.values())
    for name, stat in before.items():
        now = (tmp_path / "out" / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_progress_adds_up_to_the_payload(source: FolderSource, tmp_path: Path) -> None:
    class Sums(Silent):
        started = (0, 0)
        done = (0, 0)
        files = 0

        def scanning(self, files: int) -> None:
            self.files = files

        def start_packing(self, samples: int, bytes: int) -> None:  # noqa: A002
            self.started = (samples, bytes)

        def packed(self, samples: int, bytes: int) -> None:  # noqa: A002
            self.done = (self.done[0] + samples, self.done[1] + bytes)

    for workers in (1, 2):
        sums = Sums()
        pack(source, tmp_path / f"out-{workers}", options(workers=workers), progress=sums)
        files = [path for path in Path(source.root).rglob("*") if path.is_file()]
        assert sums.files == len(files)
        assert sums.done == sums.started == (len(files), sum(path.stat().st_size for path in files))


# ---------------------------------------------------------------- broken pictures


def test_a_broken_picture_stops_the_run_and_is_named_even_by_a_worker(source: FolderSource, tmp_path: Path) -> None:
    breaks(Path(source.root) / "train/cat/cat-2.jpg")
    for workers in (1, 2):
        with pytest.raises(ProblemsError) as caught:
            pack(source, tmp_path / "out", options(workers=workers))
        assert caught.value.problems == [("train/cat/cat-2.jpg", "truncated JPEG: no end-of-image marker")]
        assert "--on-error skip" in str(caught.value)
        assert not (tmp_path / "out" / FILE).exists()
        assert not list((tmp_path / "out").glob("*.partial"))


def test_skip_leaves_broken_pictures_out_and_counts_them(source: FolderSource, tmp_path: Path) -> None:
    root = Path(source.root)
    breaks(root / "train/cat/cat-2.jpg")
    (root / "val/dog/dog-1.png").write_bytes(b"not a picture")
    (root / "val/dog/dog-3.png").write_bytes(b"")
    (root / "notes.txt").write_text("by rule")
    result = pack(source, tmp_path / "out", options(on_error="skip"))
    # The first was known before packing; the rest come in the order of the shards.
    assert result.broken[0] == ("val/dog/dog-3.png", "empty file (0 bytes)")
    assert dict(result.broken[1:]) == {
        "train/cat/cat-2.jpg": "truncated JPEG: no end-of-image marker",
        "val/dog/dog-1.png": "not an image that is known here: begins with b'not a pictur'",
    }
    assert [path for path, _ in result.skipped] == ["notes.txt"]
    report = json.loads((tmp_path / "out" / REPORT).read_text())["skipped"]
    listed = {kind: [(e["path"], e["reason"]) for e in report if e["kind"] == kind] for kind in ("rule", "broken")}
    assert listed == {"rule": result.skipped, "broken": result.broken}
    assert result.manifest.source["broken"] == 3
    assert sum(result.manifest.source["skipped"].values()) == 1
    assert result.manifest.samples == 20 - 3
    check_payloads(tmp_path / "out", root)


def check_payloads(out: Path, root: Path) -> None:
    """Every sample of the index is its file, and its row says the truth."""
    seen = 0
    for split in Packed(out).values():
        for i in range(len(split)):
            for number, field in enumerate(split.fields):
                data, path = split.read(i, field, check=True), split.names.paths[number][i]
                if field == "cls":
                    assert data == b"%d" % split.rows[i]["label"]
                elif data is not None:
                    assert data == (root / os.fsdecode(path)).read_bytes()
                    with Image.open(root / os.fsdecode(path)) as image:
                        assert image.size == (split.rows[i]["width"], split.rows[i]["height"])
                    seen += 1
    assert seen == Packed(out).manifest.samples


def test_after_raise_the_same_command_with_skip_keeps_finished_shards(source: FolderSource, tmp_path: Path) -> None:
    breaks(Path(source.root) / "val/cat/cat-2.jpg")  # val comes after train
    with pytest.raises(ProblemsError):
        pack(source, tmp_path / "out", options())
    done = len(list((tmp_path / "out").glob("train-*.tar")))
    assert done == 4
    result = pack(source, tmp_path / "out", options(on_error="skip"))
    assert result.resumed_shards >= done
    assert [path for path, _ in result.broken] == ["val/cat/cat-2.jpg"]
    pack(source, tmp_path / "direct", options(on_error="skip"))
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_raise_does_not_take_over_shards_that_lack_samples(source: FolderSource, tmp_path: Path) -> None:
    for path in Path(source.root).glob("train/*/*.jpg"):
        breaks(path)
    assert interrupt(source, tmp_path / "out", 3, options(on_error="skip"))
    with pytest.raises(ProblemsError):
        pack(source, tmp_path / "out", options(on_error="raise"))


def test_a_shard_whose_samples_are_all_broken_is_no_file(source: FolderSource, tmp_path: Path) -> None:
    undisturbed = pack(source, tmp_path / "before", options())
    second = Packed(tmp_path / "before")["train"]
    gone = {second.names.paths[f][i] for i in range(3, 6) for f in range(2)} - {b""}
    for path in gone:
        breaks(Path(source.root) / os.fsdecode(path))
    result = pack(source, tmp_path / "out", options(on_error="skip", workers=2))
    names = [[shard.name for shard in r.manifest.splits["train"].shards] for r in (undisturbed, result)]
    assert names[1] == [name for name in names[0] if name != "train-000001.tar"]
    assert not (tmp_path / "out" / "train-000001.tar").exists()
    assert {path.encode() for path, _ in result.broken} == gone
    check_payloads(tmp_path / "out", Path(source.root))
    shutil.rmtree(tmp_path / "out")
    interrupt(source, tmp_path / "out", 3, options(on_error="skip"))
    assert pack(source, tmp_path / "out", options(on_error="skip")).resumed_shards == 3


def test_a_split_without_a_whole_picture_is_left_out_with_a_warning(source: FolderSource, tmp_path: Path) -> None:
    for path in Path(source.root).glob("val/*/*"):
        breaks(path)
    result = pack(source, tmp_path / "out", options(on_error="skip"))
    assert list(result.manifest.splits) == ["train"]
    assert result.warnings == ["split 'val': every sample was left out"]


def test_a_source_without_a_whole_picture_is_an_error(source: FolderSource, tmp_path: Path) -> None:
    for path in Path(source.root).rglob("*.*"):
        breaks(path)
    with pytest.raises(ProblemsError, match="every sample was left out"):
        pack(source, tmp_path / "out", options(on_error="skip"))
    assert not (tmp_path / "out" / FILE).exists()


def test_check_decides_how_closely_pictures_are_looked_at(source: FolderSource, tmp_path: Path) -> None:
    victim = Path(source.root) / "train/cat/cat-1.png"
    data = bytearray(victim.read_bytes())
    middle = data.index(b"IDAT") + 20
    data[middle : middle + 8] = bytes(8)  # structure whole, pixels damaged
    victim.write_bytes(data)
    assert pack(source, tmp_path / "header", options()).manifest.samples == 20
    with pytest.raises(ProblemsError, match="does not decode"):
        pack(source, tmp_path / "decode", options(check="decode"))
    breaks(victim)
    assert pack(source, tmp_path / "none", options(check="none")).manifest.samples == 20


# ---------------------------------------------------------------- sources that change meanwhile


def _unlink(path: Path) -> None:
    path.unlink()


def _shrink(path: Path) -> None:
    breaks(path)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _grow(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


def _to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_link(path: Path) -> None:
    path.rename(path.with_suffix(".hidden"))
    path.symlink_to(path.with_suffix(".hidden"))


CHANGES = [_unlink, _shrink, _empty, _grow, _to_pipe, _to_folder, _to_link]


class ChangedSource(FolderSource):
    """Something happens to a file after the scan. `skip` must not take that for a broken picture."""

    def scan(self, progress=None):  # type: ignore[no-untyped-def]
        scan = super().scan(progress)
        self.change(Path(self.root) / "train/cat/cat-2.jpg")
        return scan


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("large", [False, True])
def test_a_file_that_changes_meanwhile_is_an_error_and_never_a_skip(
    source: FolderSource, tmp_path: Path, change: Callable[[Path], None], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1)
        monkeypatch.setattr(packer.shard, "BATCH_BYTES", 1)
        # Not probed as a picture: it goes to the shard piece by piece.
        monkeypatch.setattr(packer.shard, "is_image_field", lambda field: False)
    changed = ChangedSource(source.root)
    object.__setattr__(changed, "change", change)
    with pytest.raises(SourceChangedError, match=r"train/cat/cat-2\.jpg"):
        pack(changed, tmp_path / "out", options(on_error="skip"))
    assert not (tmp_path / "out" / FILE).exists()
    assert not list((tmp_path / "out").glob("*.partial"))


# ---------------------------------------------------------------- large samples


@pytest.fixture
def sidecars(tmp_path: Path) -> Path:
    """Pictures with a label file, an array, and a mask."""
    root = tmp_path / "sidecars"
    root.mkdir()
    generator = np.random.default_rng(0)
    for i in range(6):
        pixels = generator.integers(0, 256, (40 + i, 60, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"s{i}.png")
        (root / f"s{i}.cls").write_text(f"{i}\n")
        (root / f"s{i}.npy").write_bytes(generator.bytes(5_000_000 + i))
    return root


def test_large_samples_give_the_same_shards_piece_by_piece(
    sidecars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(FolderSource(str(sidecars)), tmp_path / "whole", options())
    monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1000)
    pack(FolderSource(str(sidecars)), tmp_path / "pieces", options())
    assert tree(tmp_path / "whole") == tree(tmp_path / "pieces")


def test_large_broken_samples_are_left_out_too(sidecars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(sidecars / "s3.png")
    monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1000)
    result = pack(FolderSource(str(sidecars)), tmp_path / "out", options(on_error="skip"))
    assert [path for path, _ in result.broken] == ["s3.png"]
    assert result.manifest.samples == 5


@pytest.mark.parametrize("large", [False, True])
def test_labels_that_are_files_reach_the_index(
    sidecars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    (sidecars / "s2.cls").write_bytes(b"cat")
    if large:
        monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1000)
    result = pack(FolderSource(str(sidecars)), tmp_path / "out", options())
    assert result.warnings == ["1 cls file holds no class number: no label (−1) in the index"]
    split = Packed(tmp_path / "out")["train"]
    labels = {split.key(i): int(split.rows[i]["label"]) for i in range(len(split))}
    assert labels == {"s0": 0, "s1": 1, "s2": -1, "s3": 3, "s4": 4, "s5": 5}
    assert {split.key(i): split.read(i, "cls") for i in range(len(split))}["s5"] == b"5\n"


def test_label_files_that_hold_no_number_are_counted(sidecars: Path, tmp_path: Path) -> None:
    for i, text in enumerate((b"cat", b"1.5\n", b"\xff", b"-1\n", b" 7 ")):
        (sidecars / f"s{i}.cls").write_bytes(text)
    result = pack(FolderSource(str(sidecars)), tmp_path / "out", options(plan=PlanOptions(shard_samples=2)))
    assert result.warnings == ["3 cls files hold no class number: no label (−1) in the index"]


def test_the_report_lists_classes_without_a_sample(source: FolderSource, tmp_path: Path) -> None:
    for split in ("train", "val"):
        os.makedirs(os.path.join(source.root, split, "unseen"))
    result = pack(source, tmp_path / "out", options())
    assert result.warnings == ["class 'unseen' has no sample"]
    assert json.loads((tmp_path / "out" / REPORT).read_text())["empty_classes"] == ["unseen"]


def test_large_labelled_and_resized_samples(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized = options(encoder=Resize(20))
    pack(source, tmp_path / "whole", resized)
    monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1)
    result = pack(source, tmp_path / "pieces", resized)
    assert tree(tmp_path / "whole") == tree(tmp_path / "pieces")
    assert sum(result.encoded.values()) == 20


def test_a_sample_above_the_shard_size_gets_a_shard_of_its_own_and_a_warning(sidecars: Path, tmp_path: Path) -> None:
    (sidecars / "s2.npy").write_bytes(bytes(12_000_000))
    plan = PlanOptions(shard_bytes=11_000_000)
    result = pack(FolderSource(str(sidecars)), tmp_path / "out", options(plan=plan))
    shards = result.manifest.splits["train"].shards
    assert [shard.samples for shard in shards if shard.bytes > 11_000_000] == [1]
    assert result.warnings == ["1 sample(s) are larger than --shard-size; each gets a shard of its own"]


def test_files_beyond_the_format_are_refused_before_a_byte_is_written(sidecars: Path, tmp_path: Path) -> None:
    for name in ("s1.npy", "s4.npy"):
        os.truncate(sidecars / name, 2**33)  # sparse: takes no room
    with pytest.raises(ProblemsError) as caught:
        pack(FolderSource(str(sidecars)), tmp_path / "out", options(on_error="skip"))
    assert [path for path, _ in caught.value.problems] == ["s1.npy", "s4.npy"]
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- encoders


def test_the_index_and_the_counts_speak_of_the_new_pictures(source: FolderSource, tmp_path: Path) -> None:
    result = pack(source, tmp_path / "out", options(encoder=Resize(32)))
    # The pictures are 48×32 and 33×57 by turns; JPEG by turns with PNG.
    assert result.encoded == {
        "kept as they were: short side at most 32": 12,
        "scaled down to a short side of 32 (PNG)": 8,
    }
    for split in Packed(tmp_path / "out").values():
        for i in range(len(split)):
            data = split.read(i, "png") or split.read(i, "jpg") or b""
            row = split.rows[i]
            assert (row["width"], row["height"]) in {(48, 32), (32, 55)}
            assert data[:4] in (b"\x89PNG", b"\xff\xd8\xff\xe0")


def test_a_picture_that_cannot_be_scaled_is_broken_not_packed_unscaled(source: FolderSource, tmp_path: Path) -> None:
    victim = Path(source.root) / "train/cat/cat-1.png"
    data = bytearray(victim.read_bytes())
    middle = data.index(b"IDAT") + 20
    data[middle : middle + 8] = bytes(8)
    victim.write_bytes(data)
    with pytest.raises(ProblemsError, match=r"train/cat/cat-1\.png: does not decode"):
        pack(source, tmp_path / "raise", options(encoder=Resize(20)))
    result = pack(source, tmp_path / "skip", options(encoder=Resize(20), on_error="skip"))
    assert [path for path, _ in result.broken] == ["train/cat/cat-1.png"]
    unchecked = pack(source, tmp_path / "none", options(encoder=Resize(20), check="none"))
    assert unchecked.encoded["kept as they were: do not decode"] == 1


# ---------------------------------------------------------------- the job's state


def state_of(out: Path) -> list[Path]:
    return sorted((out / STATE).glob("train-000000.tar.*"))


def _cut_json(out: Path) -> None:
    path = out / STATE / "train-000000.tar.json"
    path.write_bytes(path.read_bytes()[:20])


def _other_json(out: Path) -> None:
    (out / STATE / "train-000000.tar.json").write_text("[1, 2]")


def _unknown_entry(out: Path) -> None:
    path = out / STATE / "train-000000.tar.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "blue"}))


def _wrong_types(out: Path) -> None:
    path = out / STATE / "train-000000.tar.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"broken": 3}))


def _no_json(out: Path) -> None:
    (out / STATE / "train-000000.tar.json").unlink()


def _no_rows(out: Path) -> None:
    (out / STATE / "train-000000.tar.rows").unlink()


def _cut_rows(out: Path) -> None:
    os.truncate(out / STATE / "train-000000.tar.rows", 100)


def _changed_rows(out: Path) -> None:
    path = out / STATE / "train-000000.tar.rows"
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)


def _no_shard(out: Path) -> None:
    (out / "train-000000.tar").unlink()


def _cut_shard(out: Path) -> None:
    os.truncate(out / "train-000000.tar", 1024)


def _no_job(out: Path) -> None:
    (out / STATE / "job.json").unlink()


def _cut_job(out: Path) -> None:
    os.truncate(out / STATE / "job.json", 5)


def _list_job(out: Path) -> None:
    (out / STATE / "job.json").write_text("[]")


DAMAGES = [_cut_json, _other_json, _unknown_entry, _wrong_types, _no_json, _no_rows, _cut_rows, _changed_rows]
DAMAGES += [_no_shard, _cut_shard, _no_job, _cut_job, _list_job]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_is_written_again_unless_all_that_is_known_of_it_is_whole(
    source: FolderSource, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    pack(source, tmp_path / "undisturbed", options())
    out = tmp_path / "out"
    interrupt(source, out, 2)
    damage(out)
    result = pack(source, out, options())
    assert result.resumed_shards == (0 if damage in (_no_job, _cut_job, _list_job) else 1)
    assert tree(out) == tree(tmp_path / "undisturbed")


def test_without_its_job_file_nobody_else_s_shards_are_taken_over(source: FolderSource, tmp_path: Path) -> None:
    """The shards of the first job have the right names, counts and sizes for the second; only their order differs."""
    interrupt(source, tmp_path / "out", 2)
    _cut_job(tmp_path / "out")
    other = options(plan=PlanOptions(shard_samples=3, seed=1))
    pack(source, tmp_path / "out", other)
    pack(source, tmp_path / "direct", other)
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_leftovers_of_killed_writers_go_away(source: FolderSource, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out", 1)
    (tmp_path / "out" / "train-000001.tar.4711.partial").write_bytes(b"half")
    (tmp_path / "out" / "train.index.npy.partial").write_bytes(b"half")
    pack(source, tmp_path / "out", options())
    pack(source, tmp_path / "direct", options())
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


# ---------------------------------------------------------------- the output folder


def test_a_finished_folder_is_left_alone(source: FolderSource, tmp_path: Path) -> None:
    first = pack(source, tmp_path / "out", options())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    second = pack(source, tmp_path / "out", options(workers=2))
    assert (first.already_complete, second.already_complete) == (False, True)
    assert second.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_killed_between_the_manifest_and_the_end_it_is_complete(source: FolderSource, tmp_path: Path) -> None:
    pack(source, tmp_path / "out", options())
    (tmp_path / "out" / STATE).mkdir()
    (tmp_path / "out" / STATE / "lock").touch()
    assert pack(source, tmp_path / "out", options()).already_complete
    assert not (tmp_path / "out" / STATE).exists()


@pytest.mark.parametrize(("damage", "words"), [(_no_shard, "is lost"), (_cut_shard, "1024 bytes instead of")])
def test_a_finished_folder_that_lost_a_shard_is_not_complete(
    source: FolderSource, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    pack(source, tmp_path / "out", options())
    damage(tmp_path / "out")
    with pytest.raises(OutputError, match=words):
        pack(source, tmp_path / "out", options())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in ("train-000000.tar", "train.names", "train.index.npy", "train.wids.json")
        for how in ("lost", "cut", "changed", "a pipe", "unreadable")
        if (name, how) != ("train-000000.tar", "changed")  # to find that, `packer verify` reads all shards
    ],
)
def test_a_finished_folder_with_any_file_damaged_is_not_complete(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    pack(source, tmp_path / "out", options())
    path = tmp_path / "out" / name
    data = path.read_bytes()
    if how in ("lost", "a pipe"):
        path.unlink()
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "cut":
        os.truncate(path, len(data) // 2)
    elif how == "changed":
        path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    elif how == "unreadable":
        really = os.open

        def refuse(file: str, flags: int, *rest: int) -> int:
            if file == str(path):
                raise PermissionError(errno.EACCES, "Permission denied", file)
            return really(file, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)  # not chmod: root may read everything
    with pytest.raises(OutputError, match=f"was complete, but {name} .*delete the folder and pack again"):
        pack(source, tmp_path / "out", options())


def test_another_job_is_refused_in_a_finished_folder(source: FolderSource, tmp_path: Path) -> None:
    pack(source, tmp_path / "out", options())
    with pytest.raises(OutputError, match=r"dataset of 20 samples that differs .* \(shard_samples was 3, is 4\)"):
        pack(source, tmp_path / "out", options(plan=PlanOptions(shard_samples=4)))
    _grow(Path(source.root) / "train/cat/cat-0.jpg")
    with pytest.raises(OutputError, match="it has other files"):
        pack(source, tmp_path / "out", options())


def test_another_job_is_refused_in_an_unfinished_folder_with_what_differs(source: FolderSource, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out", 1)
    with pytest.raises(OutputError, match=r"\(shard_samples was 3, is 4; seed was 0, is 9\)"):
        pack(source, tmp_path / "out", options(plan=PlanOptions(shard_samples=4, seed=9)))
    (Path(source.root) / "train/cat/new.jpg").write_bytes((Path(source.root) / "train/cat/cat-0.jpg").read_bytes())
    with pytest.raises(OutputError, match="samples was 20, is 21"):
        pack(source, tmp_path / "out", options())
    (Path(source.root) / "train/cat/new.jpg").unlink()
    _grow(Path(source.root) / "train/cat/cat-0.jpg")
    with pytest.raises(OutputError, match="the files in the source have changed"):
        pack(source, tmp_path / "out", options())


def test_the_same_job_from_another_path_goes_on(source: FolderSource, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out", 2)
    Path(source.root).rename(tmp_path / "moved")
    assert pack(FolderSource(str(tmp_path / "moved")), tmp_path / "out", options()).resumed_shards == 2


def test_two_at_once_are_refused(source: FolderSource, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out", 1)
    with (
        exclusive(str(tmp_path / "out" / STATE / "lock"), "out"),
        pytest.raises(OutputError, match="is being written by another packer process"),
    ):
        pack(source, tmp_path / "out", options())
    assert pack(source, tmp_path / "out", options()).resumed_shards == 1


def test_files_of_others_are_not_touched(source: FolderSource, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"is not empty \(thesis\.tex\)"):
        pack(source, out, options())
    assert os.listdir(out) == ["thesis.tex"]


def test_a_fresh_file_system_s_own_folder_does_not_count(source: FolderSource, tmp_path: Path) -> None:
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    assert pack(source, tmp_path / "out", options()).manifest.samples == 20


def test_out_may_be_a_link_to_a_folder(source: FolderSource, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    pack(source, tmp_path / "out", options())
    assert (tmp_path / "real" / FILE).exists()


@pytest.mark.parametrize("what", ["file", "broken link", "file above"])
def test_out_must_be_a_folder(source: FolderSource, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "broken link":
        out.symlink_to("nowhere")
    else:
        out.write_text("a file")
    with pytest.raises(OutputError, match="out"):
        pack(source, out / "below" if what == "file above" else out, options())


# ---------------------------------------------------------------- options, workers, memory of the past


@pytest.mark.parametrize("wrong", [{"on_error": "ignore"}, {"check": "maybe"}, {"workers": 0}])
def test_impossible_options_are_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        PackOptions(**wrong)  # type: ignore[arg-type]


def test_a_label_file_s_path_does_not_reach_the_output(tmp_path: Path, image_folder: Folders) -> None:
    flat = image_folder("flat", classes=("",), per_class=4)
    trees = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        labels = tmp_path / place / "labels.csv"
        names = sorted(path.name for path in flat.iterdir())
        labels.write_text("".join(f"{name},{i % 2}\n" for i, name in enumerate(names[1:])) + "gone.jpg,1\n")
        source = FolderSource(str(flat), FolderOptions(labels=str(labels)))
        pack(source, tmp_path / f"out-{place}", options(on_error="skip"))
        trees.append(tree(tmp_path / f"out-{place}"))
    assert trees[0] == trees[1]


def test_a_worker_that_dies_is_an_error_not_a_wait(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer.engines, "_start_method", lambda: "fork")
    monkeypatch.setattr("packer.pack.write_shard", _die)
    with pytest.raises(WorkerDiedError, match="finished shards are kept"):
        pack(source, tmp_path / "out", options(workers=2))


def test_workers_that_cannot_be_started_are_an_error_that_says_what_to_do(
    source: FolderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(packer.engines.ProcessPoolExecutor, "submit", no_more)
    with pytest.raises(WorkerDiedError, match="cannot start worker processes: Resource temporarily unavailable"):
        pack(source, tmp_path / "out", options(workers=2))


def _die(task: object, report: object) -> None:
    os._exit(9)


def test_at_most_one_task_more_than_workers_is_in_memory() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for i in range(40):
            taken += 1
            yield i

    done = 0
    for _ in packer.engines.LocalProcesses(2).run(_slowly, tasks(), lambda samples, size: None):
        done += 1
        assert taken - done <= 3
    assert (taken, done) == (40, 40)


def test_workers_stopped_halfway_through_a_message_leave_no_thread_waiting() -> None:
    before = set(threading.enumerate())
    for _ in range(6):
        results = LocalProcesses(2).run(_large_result, range(8), no_report)
        next(iter(results))
        results.close()  # type: ignore[attr-defined]
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def _large_result(task: int, report: Callable[[int, int], None]) -> bytes:
    return bytes(30_000_000)


def _slowly(task: int, report: Callable[[int, int], None]) -> int:
    threading.Event().wait(0.15 if task < 4 else 0)  # longer than the engine waits for news
    return task


def test_nothing_stays_open_or_alive(source: FolderSource, tmp_path: Path) -> None:
    def ended() -> bool:  # a pool's own threads end a moment after it was told to
        gc.collect()
        return set(threading.enumerate()) <= threads

    threads = set(threading.enumerate())
    pack(source, tmp_path / "warm-up", options(workers=2))
    wait_until(ended)
    files = set(os.listdir("/proc/self/fd"))
    for i, workers in enumerate((1, 2, 2)):
        pack(source, tmp_path / f"out-{i}", options(workers=workers))
        with contextlib.suppress(InterruptedPackError):
            pack(source, tmp_path / f"half-{i}", options(workers=workers), progress=StopAfter(1))
    wait_until(lambda: ended() and set(os.listdir("/proc/self/fd")) <= files)


def test_the_checksums_in_the_manifest_are_those_of_the_files(source: FolderSource, tmp_path: Path) -> None:
    result: PackResult = pack(source, tmp_path / "out", options())
    for split in result.manifest.splits.values():
        for shard in split.shards:
            data = (tmp_path / "out" / shard.name).read_bytes()
            assert (shard.bytes, shard.crc32c) == (len(data), crc32c(data))
    for name, facts in result.manifest.sidecars.items():
        data = (tmp_path / "out" / name).read_bytes()
        assert facts == {"bytes": len(data), "crc32c": crc32c(data)}
