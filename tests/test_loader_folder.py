"""The folder loader: the same engine on the files themselves."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from loader_helpers import flat, pack_tree, write_tree

from loaders import Padded, folder_loader, webds_loader
from loaders.transforms import EvalCrop, TrainCrop
from packer.errors import ManifestError, ProblemsError, SampleError, SourceError


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("folder") / "src")


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_folder_gives_what_its_packed_self_gives(tree: Path, tmp_path: Path, engine: str) -> None:
    """Packed without a shuffle, samples have the same numbers and so the same order and crops."""
    out = pack_tree(tree, tmp_path / "out", shuffle=False)
    options = {"batch_size": 7, "transform": TrainCrop(24), "engine": engine, "num_workers": 2}
    fields = ("jpg", "cls", "__key__", "__path__", "__index__", "__label__")
    for chosen in (None, fields):
        with folder_loader.make_loader(tree, **options, fields=chosen) as loader:
            files, classes = flat(loader), loader.classes
        with webds_loader.make_loader(out, **options, fields=chosen) as loader:
            assert (flat(loader), loader.classes) == (files, classes)


def test_classes_and_samples_are_torchvisions(tree: Path) -> None:
    """Classes by sorted folder name, samples by sorted path."""
    with folder_loader.make_loader(tree, shuffle=False, fields=("__path__", "__label__"), num_workers=1) as loader:
        batches = list(loader)
    paths = [path for batch in batches for path in batch["__path__"]]
    labels = torch.cat([batch["__label__"] for batch in batches]).tolist()
    want = sorted(path.relative_to(tree).as_posix() for path in tree.glob("*/*.jpg"))
    assert paths == want
    assert labels == [int(path[1]) for path in want]


def test_splits(tree: Path, tmp_path: Path) -> None:
    for split, count in (("train", 6), ("val", 4)):
        write_tree(tmp_path / "src" / split, samples=count)
    with folder_loader.make_loader(tmp_path / "src", split="val") as loader:
        assert len(loader.source) == 4
    with folder_loader.make_loader(tmp_path / "src" / "val", split="val") as loader:
        assert len(loader.source) == 4, "a folder without splits is one"
    with pytest.raises(ManifestError, match="no split 'test'; it has: train, val"):
        folder_loader.make_loader(tmp_path / "src", split="test")


def test_sidecars_are_fields(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=6, sidecars=True)
    with folder_loader.make_loader(tree, fields=("jpg", "json", "npy"), shuffle=False, batch_size=6) as loader:
        [batch] = loader
    assert isinstance(batch["jpg"], Padded)
    assert sorted(batch["json"]["number"].tolist()) == list(range(6))


def test_files_that_cannot_be_samples(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=6)
    (tree / "c0" / "empty.jpg").touch()
    with pytest.raises(ProblemsError, match=r"c0/empty\.jpg: empty file"):
        folder_loader.make_loader(tree)
    with folder_loader.make_loader(tree, on_error="skip", transform=EvalCrop(8)) as loader:
        assert len(next(iter(loader))[1]) == 6
    with pytest.raises(SourceError):
        folder_loader.make_loader(tmp_path / "nowhere")


def test_a_file_that_vanishes_is_an_error_that_names_it(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=6)
    with folder_loader.make_loader(tree, transform=EvalCrop(8), shuffle=False) as loader:
        (tree / "c0" / "p003.jpg").unlink()
        with pytest.raises(SampleError, match=r"src/c0/p003\.jpg, sample 1: the file is gone"):
            next(iter(loader))


def test_it_pickles(tree: Path) -> None:
    source = folder_loader.FolderSplit(tree)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.all_keys() == source.all_keys() and len(copy) == 40
