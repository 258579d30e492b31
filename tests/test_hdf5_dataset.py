"""Datasets of HDF5 shards: packed, verified, unpacked, converted and loaded like any other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import Result
from loader_helpers import flat, pack_tree, write_tree

from loaders import hdf5_loader, webds_loader
from loaders.transforms import TrainCrop
from packer.errors import OutputError, SampleError
from packer.manifest import FILE, Manifest
from packer.pack import PackOptions, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.sources.base import Source
from packer.sources.folder import FolderSource
from packer.sources.packed import PackedSource
from packer.unpack import unpack
from packer.verify import verify

Run = Callable[..., Result]
PLAN = PlanOptions(shard_samples=5)


def packed(source: Source, out: Path, format: str = "hdf5") -> Path:  # noqa: A002
    pack(source, out, PackOptions(format=format, plan=PLAN, workers=1))
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with sidecars, among them label files that are not as packing would write them, and empty ones."""
    root = tmp_path_factory.mktemp("tree")
    write_tree(root, samples=14, classes=1, sidecars=True)
    for i in range(14):
        (root / "c0" / f"p{i:03d}.cls").write_bytes(b" %d \n" % (i % 3))
    for name in ("a", "b"):
        (root / "c0" / f"p003.{name}.txt").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def dataset(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(FolderSource(str(tree)), tmp_path_factory.mktemp("out") / "h5")


def test_it_verifies_and_unpacks_to_the_very_files(dataset: Path, tree: Path, tmp_path: Path) -> None:
    assert verify(dataset, deep=True, workers=1).problems == []
    assert Manifest.load(str(dataset)).format == "hdf5"
    unpack(dataset, tmp_path / "files")
    assert files(tmp_path / "files") == files(tree)


def test_around_the_circle_come_the_very_bytes(dataset: Path, tree: Path, tmp_path: Path) -> None:
    first = packed(FolderSource(str(tree)), tmp_path / "tar", "webdataset")
    second = packed(PackedSource((str(first),)), tmp_path / "h5")
    third = packed(PackedSource((str(second),)), tmp_path / "again", "webdataset")
    shards = [name for name in files(first) if name.endswith((".tar", ".npy", ".names"))]
    assert len(shards) > 4
    assert {name: files(first)[name] for name in shards} == {name: files(third)[name] for name in shards}
    assert {n: b for n, b in files(second).items() if n.startswith("train-")} == {
        n: b for n, b in files(dataset).items() if n.startswith("train-")
    }


def test_any_number_of_workers_writes_the_same_bytes(dataset: Path, tree: Path, tmp_path: Path) -> None:
    pack(FolderSource(str(tree)), tmp_path / "out", PackOptions(format="hdf5", plan=PLAN, workers=2))
    assert files(tmp_path / "out") == files(dataset)


def test_a_lost_or_changed_file_is_found_and_a_repeated_run_refuses(dataset: Path, tree: Path, tmp_path: Path) -> None:
    for name in ("train.h5", "train-000001.h5"):
        copy = tmp_path / name.partition(".")[0]
        shutil.copytree(dataset, copy)
        (copy / name).unlink()
        assert [(p.file, p.what) for p in verify(copy, workers=1).problems] == [(name, "missing")]
        with pytest.raises(OutputError, match=f"{name} is lost"):
            packed(FolderSource(str(tree)), copy)
        shutil.copy(dataset / name, copy / name)
        size = (copy / name).stat().st_size
        for at in (20, size // 2, size - 1):
            changed = bytearray((dataset / name).read_bytes())
            changed[at] ^= 4
            (copy / name).write_bytes(changed)
            assert {problem.file for problem in verify(copy, workers=1).problems} == {name}
        os.truncate(copy / name, size - 1)
        assert {problem.file for problem in verify(copy, workers=1).problems} == {name}


def test_one_file_of_virtual_datasets_shows_all_shards(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # the shards are found beside the file, not in the working directory
    split = Packed(dataset)["train"]
    assert len(split.shards) == 3
    with h5py.File(dataset / "train.h5") as file:
        keys = file["key"][()].tolist()
        assert keys == list(split.names.keys)
        assert file["label"][()].tolist() == split.rows["label"].tolist()
        for field in split.fields:
            at, size = file[f"fields/{field}/offset"][()], file[f"fields/{field}/length"][()]
            for i in range(len(split)):
                found = None if size[i] < 0 else bytes(file["data"][at[i] : at[i] + size[i]])
                assert found == split.read(i, field)
        assert (
            b"jpg" in file.attrs["source"] or file.attrs["fingerprint"].decode() == Packed(dataset).manifest.fingerprint
        )


def test_a_missing_shard_is_no_data_in_hdf5_and_an_error_here(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    (tmp_path / "out" / "train-000001.h5").unlink()
    with h5py.File(tmp_path / "out" / "train.h5") as file:
        assert file["label"][5:10].tolist() == [-1] * 5
        assert file["fields/jpg/length"][5:10].tolist() == [-1] * 5
    with pytest.raises(SampleError, match=r"train-000001\.h5"):
        list(hdf5_loader.make_loader(tmp_path / "out", batch_size=4, transform=TrainCrop(32), num_workers=1))


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_batches_are_those_of_the_tar(tmp_path: Path, engine: str) -> None:
    tar = pack_tree(write_tree(tmp_path / "src", samples=40), tmp_path / "tar")
    h5 = packed(PackedSource((str(tar),)), tmp_path / "h5")
    options = {"batch_size": 8, "transform": TrainCrop(32), "seed": 3, "num_workers": 2, "engine": engine}
    of_tar, of_h5 = webds_loader.make_loader(tar, **options), hdf5_loader.make_loader(h5, **options)
    assert flat(of_tar) == flat(of_h5)
    assert flat(of_tar) == flat(of_h5), "the second epoch"


def test_the_index_can_be_made_again_from_the_shards(dataset: Path, tmp_path: Path, run_packer: Run) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    run_packer("index", tmp_path / "out", "--force")
    assert verify(tmp_path / "out", workers=1).problems == []
    assert files(tmp_path / "out") == files(dataset)
    for name in (FILE, "train.index.npy", "train.names", "train.h5"):
        (tmp_path / "out" / name).unlink()
    manifest = run_packer("index", tmp_path / "out", "--json")
    assert '"format": "hdf5"' in manifest.stdout
    assert verify(tmp_path / "out", workers=1).problems == []
    rows, again = Packed(dataset)["train"].rows, Packed(tmp_path / "out")["train"].rows
    for name in rows.dtype.names or ():
        assert np.array_equal(rows[name], again[name])


def test_every_command_works(dataset: Path, tmp_path: Path, run_packer: Run) -> None:
    assert "hdf5" in run_packer("info", dataset).stdout
    run_packer("verify", dataset)
    run_packer("stats", dataset)
    run_packer("view", dataset, "--output", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000
    (tmp_path / "drop").write_text(Packed(dataset)["train"].key(0) + "\n")
    run_packer("shard", dataset, tmp_path / "fewer", "--format", "hdf5", "--drop-keys", tmp_path / "drop")
    assert Manifest.load(str(tmp_path / "fewer")).samples == 13
    run_packer("shard", dataset, tmp_path / "split", "--format", "hdf5", "--split", "0.5,0.5")
    assert verify(tmp_path / "split", workers=1).problems == []
    assert sorted(Manifest.load(str(tmp_path / "split")).splits) == ["train", "val"]


def test_what_is_left_out_leaves_no_trace(tmp_path: Path, run_packer: Run) -> None:
    good, bad = write_tree(tmp_path / "good", samples=9), write_tree(tmp_path / "bad", samples=9)
    (bad / "c0" / "broken.jpg").write_bytes(b"no picture")
    run_packer("shard", good, tmp_path / "a", "--format", "hdf5")
    run_packer("shard", bad, tmp_path / "b", "--format", "hdf5", "--on-error", "skip")
    assert (tmp_path / "a" / "train-000000.h5").read_bytes() == (tmp_path / "b" / "train-000000.h5").read_bytes()
    assert verify(tmp_path / "b", workers=1).problems == []


def test_a_shard_is_no_larger_than_asked(tmp_path: Path) -> None:
    source = FolderSource(str(write_tree(tmp_path / "src", samples=60)))
    options = PackOptions(format="hdf5", plan=PlanOptions(shard_bytes=40_000), workers=1)
    manifest = pack(source, tmp_path / "out", options).manifest
    sizes = [shard.bytes for shard in manifest.splits["train"].shards]
    assert len(sizes) > 1
    assert max(sizes) <= 40_000


def test_a_single_file_for_each_split(dataset: Path, tmp_path: Path, run_packer: Run) -> None:
    run_packer("shard", dataset, tmp_path / "one", "--format", "hdf5", "--single-file", "--split", "0.5,0.5")
    assert sorted(path.name for path in (tmp_path / "one").glob("*.h5")) == ["train.h5", "val.h5"]
    assert verify(tmp_path / "one", workers=1).problems == []
    with h5py.File(tmp_path / "one" / "train.h5") as file:
        assert not file["data"].is_virtual
        assert file["key"][()].tolist() == list(Packed(tmp_path / "one")["train"].names.keys)
    run_packer("index", tmp_path / "one", "--force")
    assert verify(tmp_path / "one", workers=1).problems == []
    for option in ("--shard-size", "--shard-samples"):
        said = run_packer("shard", dataset, tmp_path / "x", "--single-file", option, "5", exit_code=2).stderr
        assert f"leave out {option}" in said
