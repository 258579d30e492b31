"""`packer unpack`: the very tree comes back, and nothing is ever written anywhere else."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from conftest import PATIENCE_S, Midway, picture
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packer import safe_tree
from packer import unpack as module
from packer.errors import ManifestError, OutputError, ShardError, UnsafeNameError, UsageError
from packer.finish import finish
from packer.index import Names, empty_rows
from packer.indexing import index_folder
from packer.manifest import Shard, Split
from packer.pack import PackOptions, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.safe_tree import WORK_NAME, Tree, remove_tree, unsafe
from packer.sources.folder import FolderSource
from packer.strings import Strings
from packer.unpack import unpack


def tree(folder: Path) -> dict[bytes, bytes]:
    """Every file below a folder: relative raw path → bytes."""
    root = os.fsencode(folder)
    return {
        os.path.relpath(os.path.join(where, name), root): Path(os.fsdecode(os.path.join(where, name))).read_bytes()
        for where, _, names in os.walk(root)
        for name in names
    }


def file_in(folder: Path, path: bytes) -> bytes:
    """The content of a file, however deep it lies (Python's own walks end at its stack's depth)."""
    with open(os.path.join(os.fsencode(folder), path), "rb") as f:
        return f.read()


ODD = [
    b"cat/plain.jpg", b"cat/UPPER.JPEG", b"cat/two.dots.v2.jpg", b"cat/space and 'quote'.png", b"cat/new\nline.jpg",
    b"cat/\xff\xfe not utf-8.jpg", b"cat/%2E.jpg", b"cat/same.jpg", b"cat/same.png", b"cat/" + b"l" * 251 + b".jpg",
    b"__dog/__init__.jpg", b"__dog/-rf.jpg", "__dog/é.jpg".encode(), "__dog/e\u0301.jpg".encode(),
    b"__dog/deep/er/x.jpg",
]  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    for number, name in enumerate(ODD):
        path = os.path.join(os.fsencode(root / "src"), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            picture(number, (7 + number, 5)).save(f, "PNG" if name.endswith(b"png") else "JPEG")
    pack(FolderSource(str(root / "src")), root / "out", PackOptions(plan=PlanOptions(shard_samples=4)))
    return root


def tar_dataset(folder: Path, names: Sequence[bytes], paths: Sequence[bytes] | None = None) -> Path:
    """A dataset whose names file says `paths` (by default the members' own names), whatever they are."""
    folder.mkdir()
    with tarfile.open(folder / "train-000000.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for i, _ in enumerate(names):
            member = tarfile.TarInfo(f"{i:04}.bin")
            member.size = 3
            path = folder.parent / "three"
            path.write_bytes(b"abc")
            with path.open("rb") as f:
                tar.addfile(member, f)
    index_folder(folder)
    dataset = Packed(folder)
    split = dataset["train"]
    named = Names(split.names.keys, (Strings.of(list(paths or names)),))
    finish(str(folder), format="webdataset", splits=[(split.split, split.rows.copy(), named)], fields=["bin"])
    return folder


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("exists", [False, True])
def test_every_name_and_byte_comes_back(odd: Path, tmp_path: Path, workers: int, exists: bool) -> None:
    dst = tmp_path / "deep" / "dst"
    if exists:
        dst.mkdir(parents=True)
    done = [0, 0]

    def progress(files: int, size: int) -> None:
        done[0] += files
        done[1] += size

    result = unpack(odd / "out", dst, workers=workers, progress=progress)
    before = tree(odd / "src")
    assert tree(dst) == before
    assert (result.samples, result.files, result.made) == (len(ODD), len(ODD), len(ODD))
    assert result.bytes == sum(map(len, before.values()))
    assert done == [result.files, result.bytes]
    assert os.listdir(dst.parent) == ["dst"]


def test_sidecars_and_their_own_labels_come_back(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for i in range(3):
        picture(i, (5, 5)).save(source / f"{i}.jpg")
        (source / f"{i}.cls").write_text(f"{i}\n")
        (source / f"{i}.json").write_text('{"a": 1}' if i else "")
    pack(FolderSource(str(source)), tmp_path / "out")
    result = unpack(tmp_path / "out", tmp_path / "dst")
    assert tree(tmp_path / "dst") == tree(source)
    assert (result.samples, result.files, result.made) == (3, 9, 0)


def test_shards_of_strangers_by_their_members_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "B.JPEG").write_bytes(b"first")
    (tmp_path / "in" / "c.txt").write_bytes(b"")
    os.link(tmp_path / "in" / "B.JPEG", tmp_path / "in" / "linked.jpg")
    shards = tmp_path / "shards"
    shards.mkdir()
    subprocess.run(["tar", "-cf", shards / "a.tar", "--sort=name", "in"], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    index_folder(shards)
    unpack(shards, tmp_path / "dst")
    assert tree(tmp_path / "dst") == {b"in/" + name: data for name, data in tree(tmp_path / "in").items()}


def test_large_files_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "c"
    source.mkdir(parents=True)
    for i in range(4):
        picture(i, (40, 30)).save(source / f"{i}.bmp")
        picture(i, (3, 3)).save(source / f"{i}-small.png")
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    for number, window in enumerate((1, 100, 4000, 5000)):
        monkeypatch.setattr(module, "_WINDOW", window)
        unpack(tmp_path / "out", tmp_path / f"dst{number}", workers=1)
        assert tree(tmp_path / f"dst{number}") == tree(tmp_path / "src")


def test_more_folders_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src"
    for i in range(40):
        path = source / f"class{i % 20}" / "sub" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(i, (2, 2)).save(path)
    pack(FolderSource(str(source)), tmp_path / "out")
    monkeypatch.setattr(safe_tree, "_OPEN_FOLDERS", 3)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    unpack(tmp_path / "out", tmp_path / "dst", workers=1)
    assert tree(tmp_path / "dst") == tree(source)
    assert set(os.listdir("/proc/self/fd")) <= before


# ---------------------------------------------------------------- parts


def test_split_keys_and_limit(
    image_folder: Callable[..., Path], tmp_path: Path, run_packer: Callable[..., Result]
) -> None:
    source = image_folder(splits=("train", "val"))
    out = tmp_path / "out"
    pack(FolderSource(str(source)), out)
    run_packer("unpack", out, tmp_path / "val", "--split", "val")
    assert tree(tmp_path / "val") == {n: d for n, d in tree(source).items() if n.startswith(b"val/")}

    (tmp_path / "keys").write_text("train/cat/cat-0\nval/dog/dog-1.png\n")
    result = run_packer("unpack", out, tmp_path / "two", "--keys", tmp_path / "keys", "--json")
    assert sorted(tree(tmp_path / "two")) == [b"train/cat/cat-0.jpg", b"val/dog/dog-1.png"]
    assert {k: json.loads(result.stdout)[k] for k in ("samples", "files", "made")} == {
        "samples": 2,
        "files": 2,
        "made": 2,
    }

    run_packer("unpack", out, tmp_path / "limited", "--limit", "8")
    keys = [*Packed(out)["train"].names.keys, *Packed(out)["val"].names.keys][:8]
    assert {name.rpartition(b".")[0] for name in tree(tmp_path / "limited")} == set(keys)

    (tmp_path / "keys").write_text("train/cat/cat-0\nnobody\n")
    result = run_packer("unpack", out, tmp_path / "none", "--keys", tmp_path / "keys", exit_code=2)
    assert "1 of the 2 listed keys are in no sample: 'nobody'" in result.output
    assert "no split 'test'" in run_packer("unpack", out, tmp_path / "none", "--split", "test", exit_code=2).output
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------- names that nobody should trust

EVIL = [
    (b"/etc/passwd", "is an absolute path"),
    (b"//x", "is an absolute path"),
    (b"../x", "climbs out of its folder"),
    (b"a/../../x", "climbs out of its folder"),
    (b"a/..", "climbs out of its folder"),
    (b"..", "climbs out of its folder"),
    (b"a//x", "has an empty component or '.'"),
    (b"a/", "has an empty component or '.'"),
    (b"./x", "has an empty component or '.'"),
    (b".", "has an empty component or '.'"),
    (b"a/.", "has an empty component or '.'"),
    (b"a\0b", "contains a zero byte"),
    (b"n" * 256, "is longer than file systems take"),
    (b"/".join([b"d" * 200] * 30), "is longer than file systems take"),
]


@pytest.mark.parametrize("fails", [False, True])
def test_trees_as_deep_as_paths_may_be(tmp_path: Path, fails: bool) -> None:
    deepest = (4000 - len(os.fsencode(tmp_path))) // 2
    paths = [b"d/" * 300 + b"x", b"d/" * deepest + b"x", b"moved/y"]
    out, dst = tar_dataset(tmp_path / "out", [b"1", b"2", b"3"], paths), tmp_path / "dst"
    if fails:
        shard = out / "train-000000.tar"
        before, _, after = shard.read_bytes().rpartition(b"abc")  # so the deep ones are written first
        shard.write_bytes(before + b"xyz" + after)
        with pytest.raises(ShardError, match="train-000000"):
            unpack(out, dst, workers=1)
        assert sorted(os.listdir(tmp_path)) == ["out", "three"]
    else:
        assert unpack(out, dst, workers=1).files == 3
        assert [file_in(dst, path) for path in paths] == [b"abc"] * 3
        remove_tree(str(dst))
        assert not dst.exists()


def test_a_tree_is_removed_and_nothing_behind_its_links(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for name in ("moved0/moved0/moved1", "moved/a", "moved-0"):
        (inside / name).mkdir(parents=True)
        (inside / name / "file").touch()
    outside.mkdir()
    (outside / "kept").touch()
    (inside / "moved" / "link").symlink_to(outside)
    remove_tree(str(inside))
    assert tree(tmp_path) == {b"outside/kept": b""}


@pytest.mark.parametrize(("path", "reason"), EVIL, ids=lambda value: None)
def test_unsafe_names_are_refused_before_anything_is_written(tmp_path: Path, path: bytes, reason: str) -> None:
    folder = tar_dataset(tmp_path / "evil", [b"good/1", b"2", b"3"], [b"good/1", path, b"3"])
    with pytest.raises(UnsafeNameError, match=r"1 name.* cannot be restored; nothing was written") as caught:
        unpack(folder, tmp_path / "dst")
    assert reason in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["evil", "three"]


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([b"a", b"a"], "'a' is the name of 2 files"),
        ([b"a", b"a/b"], "'a' is the name of a file and of a folder"),
        ([b"a/b/c/d", b"a/b"], "'a/b' is the name of a file and of a folder"),
        ([WORK_NAME.encode(), b"x"], "is the name of a file and of a folder"),
    ],
)
def test_names_that_collide_are_refused(tmp_path: Path, paths: list[bytes], says: str) -> None:
    folder = tar_dataset(tmp_path / "evil", paths)
    with pytest.raises(UnsafeNameError) as caught:
        unpack(folder, tmp_path / "dst")
    assert says in str(caught.value)
    assert not (tmp_path / "dst").exists()


def test_names_that_look_bad_and_are_not(tmp_path: Path) -> None:
    fine = [b"...", b"..a/b", b"a../.b", b"~", b"-", b"\\..\\x", b"C:", b" ", b"a b/\n", b"\xff", b"$HOME/`id`", b"*"]
    unpack(tar_dataset(tmp_path / "odd", fine), tmp_path / "dst")
    assert sorted(tree(tmp_path / "dst")) == sorted(fine)


def test_many_offenders_are_counted_and_some_are_named(tmp_path: Path) -> None:
    folder = tar_dataset(tmp_path / "evil", [b"../%d" % i for i in range(50)])
    with pytest.raises(UnsafeNameError) as caught:
        unpack(folder, tmp_path / "dst")
    assert "50 name(s)" in str(caught.value)
    assert "… and 30 more" in str(caught.value)


@settings(max_examples=500)
@example(b"a\n/..\n")
@example(b"..\n")
@given(st.lists(st.sampled_from([b".", b"..", b"/", b"a", b"\0", b"\n", b"b/", b"/.."]), max_size=7).map(b"".join))
def test_what_is_safe_stays_below_its_folder(path: bytes) -> None:
    if unsafe(path) is None:
        assert b"\0" not in path
        assert os.path.normpath(path) == path
        assert os.path.join(b"/top", path) == os.path.normpath(b"/top/" + path)
        assert os.path.commonpath([b"/top", os.path.join(b"/top", path)]) == b"/top"
    else:
        bad = path in (b"", b".", b"..") or path.startswith((b"/", b"../"))
        assert bad or b"\0" in path or os.path.normpath(path) != path


def test_links_put_in_the_way_are_not_followed(tmp_path: Path) -> None:
    """Somebody else writes into the folder while it is filled."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (inside / "folder").symlink_to(outside)
    (inside / "file").symlink_to(outside / "file")
    (inside / "real").mkdir()
    (inside / "real" / "deep").symlink_to(outside)
    with Tree(str(inside)) as made:
        for path in (b"folder/x", b"file", b"real/deep/x"):
            with pytest.raises(OutputError, match="cannot write"):
                made.create(path)
        with made.create(b"real/x") as file:
            file.write(memoryview(b"ok"))
    assert list(outside.iterdir()) == []
    assert (inside / "real" / "x").read_bytes() == b"ok"


# ---------------------------------------------------------------- places that are taken


def test_a_folder_with_something_in_it_is_left_alone(
    odd: Path, tmp_path: Path, run_packer: Callable[..., Result]
) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "mine").write_text("x")
    assert "is not empty (it holds 'mine')" in run_packer("unpack", odd / "out", tmp_path / "dst", exit_code=1).output
    assert os.listdir(tmp_path / "dst") == ["mine"]
    (tmp_path / "file").write_text("x")
    run_packer("unpack", odd / "out", tmp_path / "file", exit_code=2)
    (tmp_path / "new.partial").mkdir()
    output = run_packer("unpack", odd / "out", tmp_path / "new", exit_code=1).output
    assert "another unpacking is running, or one was killed" in output
    assert (tmp_path / "new.partial").is_dir()
    assert not (tmp_path / "new").exists()


def test_a_working_directory_stays_the_same_folder(odd: Path, tmp_path: Path) -> None:
    run = (
        "import os, sys; from packer.unpack import unpack; os.chdir(sys.argv[2]); unpack(sys.argv[1], '.')\n"
        "print(len(os.listdir('.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, odd / "out", tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == "2\n"
    assert tree(tmp_path) == tree(odd / "src")


def test_a_link_to_an_empty_folder_fills_that_folder(odd: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "dst").symlink_to(tmp_path / "real")
    unpack(odd / "out", tmp_path / "dst")
    assert tree(tmp_path / "real") == tree(odd / "src")


# ---------------------------------------------------------------- faults


def damaged(odd: Path, tmp_path: Path, change: Callable[[bytearray, int], bytes | bytearray]) -> tuple[Path, str]:
    """A copy whose last shard is changed; the change is told where a payload begins."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (odd / "out").iterdir():
        os.link(path, copy / path.name)
    split = Packed(copy)["train"]
    sample = len(split) - 1
    row = split.rows[sample]
    shard = copy / split.shards[-1].name
    data = bytearray(shard.read_bytes())
    shard.unlink()
    shard.write_bytes(change(data, int(row["jpg:offset" if row["jpg:length"] >= 0 else "png:offset"])))
    return copy, shard.name


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_damage_stops_and_leaves_nothing(odd: Path, tmp_path: Path, workers: int, exists: bool) -> None:
    def change(data: bytearray, at: int) -> bytearray:
        data[at] ^= 4
        return data

    copy, shard = damaged(odd, tmp_path, change)
    dst = tmp_path / "dst"
    if exists:
        dst.mkdir()
    with pytest.raises(
        ShardError, match=rf"{shard}, sample {len(ODD) - 1} .*damaged: crc32c mismatch; nothing was kept"
    ):
        unpack(copy, dst, workers=workers)
    assert sorted(os.listdir(tmp_path)) == (["copy", "dst"] if exists else ["copy"])
    assert not exists or os.listdir(dst) == []


def test_truncation_is_named(odd: Path, tmp_path: Path) -> None:
    copy, shard = damaged(odd, tmp_path, lambda data, at: data[: at + 10])
    with pytest.raises(ShardError, match=rf"{shard}, .*truncated: the shard ends at offset"):
        unpack(copy, tmp_path / "dst", workers=1)
    (copy / shard).unlink()
    with pytest.raises(ShardError, match="No such file"):
        unpack(copy, tmp_path / "dst", workers=1)
    assert os.listdir(tmp_path) == ["copy"]


def test_an_index_that_lies_about_places(odd: Path, tmp_path: Path) -> None:
    for column, value in (("shard", 99), ("shard", -1), ("*:length", 2**62), ("*:offset", -5), ("*:offset", 2**62)):
        copy, _ = damaged(odd, tmp_path, lambda data, at: data)
        split = Packed(copy)["train"]
        rows = split.rows.copy()
        rows[column.replace("*", "jpg" if rows["jpg:length"][0] >= 0 else "png")][0] = value
        path = copy / "train.index.npy"
        path.unlink()
        with path.open("wb") as f:
            np.save(f, rows)
        manifest = json.loads((copy / "dataset.json").read_text())
        manifest["sidecars"]["train.index.npy"]["crc32c"] = crc32c(path.read_bytes())  # a lie that is vouched for
        (copy / "dataset.json").unlink()  # a hard link, as the index is
        (copy / "dataset.json").write_text(json.dumps(manifest))
        with pytest.raises((ShardError, ManifestError), match="run: packer verify"):
            unpack(copy, tmp_path / "dst", workers=1)
        assert os.listdir(tmp_path) == ["copy"]
        for name in os.listdir(copy):
            (copy / name).unlink()
        copy.rmdir()


def test_no_space(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(28, "No space left on device")
        return real(fd, data[:100])

    monkeypatch.setattr(safe_tree.os, "write", write)
    with pytest.raises(OutputError, match=r"No space left on device; free some space"):
        unpack(odd / "out", tmp_path / "dst", workers=1)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 200 files in four shards."""
    root = tmp_path_factory.mktemp("many")
    (root / "src" / "c").mkdir(parents=True)
    for i in range(200):
        picture(i, (20, 20)).save(root / "src" / "c" / f"{i}.png")
    pack(FolderSource(str(root / "src")), root / "out", PackOptions(plan=PlanOptions(shard_samples=50)))
    return root / "out"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_killed_or_interrupted_nothing_looks_complete(
    many: Path, tmp_path: Path, midway: Midway, how: signal.Signals, workers: int
) -> None:
    dst, work = tmp_path / "dst", tmp_path / "dst.partial"
    run = subprocess.Popen(
        [*midway.program(60, "packer.safe_tree:Tree.create"), "unpack", many, dst, "-j", str(workers)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    midway.wait(run, workers)
    assert len(os.listdir(work / "c")) == 60 * workers
    run.send_signal(how)
    _, error = run.communicate(timeout=PATIENCE_S)
    assert not dst.exists()
    assert work.exists() == (how == signal.SIGKILL)
    assert b"Traceback" not in error
    assert run.returncode == (-how if how == signal.SIGKILL else 128 + how)


def test_nothing_to_restore(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-000000.tar").write_bytes(bytes(1024))
    rows = empty_rows(1, ["cls"])
    rows["cls:offset"], rows["cls:length"], rows["shard"] = 512, 1, 0
    split = Split("train", (Shard("train-000000.tar", 1, 1024, 0),))
    finish(str(out), format="webdataset", splits=[(split, rows, Names(Strings.of([b"k"]), (Strings.of([b""]),)))],
           fields=["cls"])  # fmt: skip
    with pytest.raises(UsageError, match="no original files"):
        unpack(out, tmp_path / "dst")


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    """A file of 200 MiB (a hole, so it takes no room) through a process that gets little more than numpy needs."""
    big = tmp_path / "in" / "big.bin"
    big.parent.mkdir()
    with big.open("wb") as f:
        f.truncate(200 << 20)
    (tmp_path / "shards").mkdir()
    subprocess.run(["tar", "-cf", tmp_path / "shards" / "a.tar", "in"], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    index_folder(tmp_path / "shards", workers=1)
    run = (
        "import re, sys; from packer.unpack import unpack; unpack(sys.argv[1], sys.argv[2], workers=1)\n"
        # Not ru_maxrss: that starts from what the parent had when it forked.
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, tmp_path / "shards", tmp_path / "dst"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert int(done.stdout) < 190 << 10  # kilobytes
    assert (tmp_path / "dst" / "in" / "big.bin").stat().st_size == 200 << 20
