"""Preloading: the same batches from memory, refused where they do not fit, gone afterwards."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_S
from loader_helpers import flat, pack_tree, write_tree

from loaders import folder_loader, memory
from loaders.source import PackedSource
from loaders.staging import StagedSource
from loaders.transforms import EvalCrop, TrainCrop
from loaders.webds_loader import make_loader
from packer.errors import BudgetError, UsageError
from packer.packed import Packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    return pack_tree(write_tree(root / "src"), root / "out")


@pytest.fixture
def gone(tmp_path: Path) -> Path:
    """A dataset of one's own, to be taken away while it is read."""
    return pack_tree(write_tree(tmp_path / "src", samples=20), tmp_path / "out")


FIELDS = ("jpg", "cls", "__key__")


@pytest.mark.parametrize(
    ("engine", "method", "fields"),
    [("thread", None, None), ("thread", None, FIELDS), ("process", "fork", None), ("process", "spawn", FIELDS)],
)
def test_memory_gives_the_same_without_the_files(gone: Path, engine: Any, method: str | None, fields: Any) -> None:
    options = {"transform": TrainCrop(24), "engine": engine, "num_workers": 1, "start_method": method, "fields": fields}
    with make_loader(gone, **options) as loader:
        want = flat(loader)
    with make_loader(gone, **options, preload="memory") as loader:
        for shard in gone.glob("*.tar"):
            os.truncate(shard, 0)
        assert flat(loader) == want


def test_decoded_pictures_give_the_same_pixels(gone: Path) -> None:
    """Without shrinking decoders in play, decoded pixels are cropped and resized to the same result."""
    for transform in (TrainCrop(40, scale=(0.5, 1)), None):
        with make_loader(gone, transform=transform) as loader:
            want = flat(loader)
        with make_loader(gone, transform=transform, preload="decoded") as loader:
            assert flat(loader) == want


def test_a_folder_can_be_loaded_too(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=9)
    with folder_loader.make_loader(tree, transform=EvalCrop(16)) as loader:
        want = flat(loader)
    with folder_loader.make_loader(tree, transform=EvalCrop(16), preload="memory") as loader:
        for path in tree.glob("*/*.jpg"):
            path.unlink()
        assert flat(loader) == want
    with pytest.raises(UsageError, match="pack the folder first"):
        folder_loader.make_loader(write_tree(tmp_path / "src", samples=9), preload="shm")


def test_only_the_subset_is_loaded(packed: Path) -> None:
    size = int(Packed(packed)["train"].rows["jpg:length"][[3, 5]].sum())
    with make_loader(packed, subset=[3, 5], preload="memory", memory_budget=size, transform=EvalCrop(16)) as loader:
        assert sum(len(labels) for _, labels in loader) == 2


@pytest.mark.parametrize("preload", ["memory", "decoded"])
def test_what_does_not_fit_is_refused_with_figures(packed: Path, preload: str) -> None:
    with pytest.raises(BudgetError, match=r"0\.00 GB would be needed.*memory_budget"):
        make_loader(packed, preload=preload, memory_budget=10_000)


def test_sizes_that_are_not_known_are_refused_while_loading(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=9)
    with pytest.raises(BudgetError, match="more than"):
        folder_loader.make_loader(tree, preload="decoded", memory_budget=20_000)


def test_the_default_budget_is_part_of_what_is_free() -> None:
    assert 0 < memory.budget_bytes(None) < memory.memory_headroom()


def test_too_many_shards_for_the_limit_of_open_files(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 60))
    with pytest.raises(UsageError, match=r"4 shards need as many open files.*ulimit -Hn 68"):
        make_loader(packed)


# ---------------------------------------------------------------- staged shards


def test_staged_shards_give_the_same_and_are_removed(packed: Path, tmp_path: Path) -> None:
    with make_loader(packed, transform=TrainCrop(24)) as loader:
        want = flat(loader)
    for engine in ("thread", "process"):
        options = {"transform": TrainCrop(24), "engine": engine, "num_workers": 1}
        with make_loader(packed, **options, preload=f"shm:{tmp_path}") as loader:
            [copy] = [path for path in tmp_path.iterdir() if path.is_dir()]
            assert sorted(path.name for path in copy.glob("*.tar")) == [f"train-00000{i}.tar" for i in range(4)]
            assert flat(loader) == want
        assert list(tmp_path.iterdir()) == []


def test_a_dropped_loader_removes_its_copy(packed: Path, tmp_path: Path) -> None:
    loader = make_loader(packed, preload=f"shm:{tmp_path}")
    assert list(tmp_path.iterdir())
    del loader
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_shared_and_the_last_user_removes_it(packed: Path, tmp_path: Path) -> None:
    source = PackedSource(packed, "train")
    first, second = StagedSource(source, str(tmp_path)), StagedSource(source, str(tmp_path))
    assert first.folder == second.folder
    first.close()
    assert second.split.read(3, "cls") == source.split.read(3, "cls")
    second.close()
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys
from loaders.webds_loader import make_loader
loader = make_loader(sys.argv[1], preload="shm:" + sys.argv[2], num_workers=1)
next(iter(loader))
print("running", flush=True)
if sys.argv[3] == "wait":
    sys.stdin.read()
"""


def test_copies_go_with_the_interpreter_and_those_of_the_killed_with_the_next(packed: Path, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(packed), str(staged)]
    killed = subprocess.Popen([*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None and killed.stdout.readline() == "running\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=PATIENCE_S)
    assert len(list(staged.iterdir())) == 2, "a copy and its lock are left behind"
    other = pack_tree(write_tree(tmp_path / "src", samples=5), tmp_path / "other")
    with make_loader(other, preload=f"shm:{staged}"):
        assert len(list(staged.iterdir())) == 2, "another dataset's copy has replaced the stale one"
    done = subprocess.run([*command, "end"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")
    assert list(staged.iterdir()) == []


def test_a_folder_that_is_too_small_is_refused(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(BudgetError, match=r"has 0\.00 GB free.*preload='shm:FOLDER'.*--shm-size"):
        make_loader(packed, preload=f"shm:{tmp_path}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="no such folder"):
        make_loader(packed, preload="shm:/nowhere")


def test_memory_does_not_grow_over_epochs(packed: Path) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with make_loader(packed, transform=TrainCrop(128), normalize="imagenet", batch_size=8, num_workers=2) as loader:
        for _ in range(20):
            for images, _ in loader:
                assert images.dtype == torch.float32
        gc.collect()
        before = resident()
        for _ in range(60):
            for _ in loader:
                pass
        gc.collect()
        assert resident() - before < 64 << 20, "300 batches of 1.6 MB"
