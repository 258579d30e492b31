"""An index or names file made to do harm, with checksums that fit, ends in an error in words, whoever reads it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import picture
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ManifestError, PackerError, ShardError
from packer.manifest import FILE, checksum
from packer.pack import PackOptions, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.sources.folder import FolderSource
from packer.sources.packed import PackedSource
from packer.stats import stats
from packer.unpack import unpack
from packer.verify import verify
from packer.view import view


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    for number, name in enumerate(["cat/a.jpg", "cat/b.png", "dog/a.jpg", "dog/c.jpg"]):
        (root / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number, (60 + number, 50)).save(root / "src" / name)
    pack(FolderSource(str(root / "src")), root / "out", PackOptions(plan=PlanOptions(shard_samples=2)))
    return root / "out"


def write_with_fitting_checksums(out: Path, name: str, data: bytes) -> None:
    (out / name).write_bytes(data)
    change_manifest(out, lambda value: value["sidecars"].update({name: {"bytes": len(data), "crc32c": crc32c(data)}}))


def change_manifest(out: Path, change: Callable[[Any], object]) -> None:
    value = json.loads((out / FILE).read_text())
    change(value)
    (out / FILE).write_text(json.dumps(value | {"crc32c": checksum(value)}))


def read_everything(out: Path) -> object:
    return [split.sample(i, check=True) for split in Packed(out).values() for i in range(len(split))]


def read_as_source(out: Path) -> None:
    source = PackedSource((str(out),))
    scan = source.scan()
    assert scan.locators is not None
    reader = source.reader()
    try:
        for place, size in zip(scan.locators, scan.sizes.tolist(), strict=True):
            if size <= 1 << 20:  # as much as packing takes memory for at once
                reader.read([place], [memoryview(bytearray(size))])
    finally:
        reader.close()


READERS: dict[str, Callable[[Path], object]] = {
    "read": read_everything,
    "stats": lambda out: stats(out, workers=1),
    "view": lambda out: view(out, out.parent / "page.html", workers=1),
    "unpack": lambda out: unpack(out, out.parent / "dst", workers=1),
    "source": read_as_source,
}
NUMBERS = [0, 1, -1, -2, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]
EDGES = st.sampled_from(
    [number.to_bytes(8, "little", signed=True) for number in NUMBERS]
    + [b"\xff\xff\xff\x7f", b"\xff" * 4, b"../", b"/", b"\0", b"<b>", b"\n", b""]
)


@settings(max_examples=250)
@given(name=st.sampled_from(["train.index.npy", "train.names"]), where=st.floats(0, 1), edge=EDGES, cut=st.booleans())
def test_readers_end_in_words(intact: Path, name: str, where: float, edge: bytes, cut: bool) -> None:
    before = {file: (intact / file).read_bytes() for file in (name, FILE)}
    data = before[name]
    # The columns begin behind a header that other tests attack; numbers lie at multiples of four.
    at = int(where * len(data)) & ~3
    changed = data[:at] + edge + (b"" if cut else data[at + len(edge) :])
    try:
        write_with_fitting_checksums(intact, name, changed)
        for read in READERS.values():
            try:
                read(intact)
            except PackerError as error:
                assert str(error)
        for problem in verify(intact, workers=1, deep=True).problems:
            assert str(problem).isprintable()
        assert set(os.listdir(intact.parent)) <= {"src", "out", "dst", "page.html"}
    finally:
        for file, content in before.items():
            (intact / file).write_bytes(content)
        shutil.rmtree(intact.parent / "dst", ignore_errors=True)


@pytest.mark.parametrize("samples", [-1, 5, 10**9, 10**15, 10**30])
@pytest.mark.parametrize("reader", READERS)
def test_counts_are_compared_before_memory_is_taken_for_them(
    intact: Path, tmp_path: Path, reader: str, samples: int
) -> None:
    out = shutil.copytree(intact, tmp_path / "out")

    def grow(manifest: Any) -> None:
        for split in manifest["splits"].values():
            others = sum(shard["samples"] for shard in split["shards"][1:])
            split["samples"], split["shards"][0]["samples"] = samples, samples - others

    change_manifest(out, grow)
    with pytest.raises(ManifestError, match=r"samples|negative|another dataset"):
        READERS[reader](out)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", [
    lambda manifest: manifest["splits"].clear(),
    lambda manifest: manifest.update(format="zip"),
    lambda manifest: manifest.update(format=["webdataset"]),
    lambda manifest: manifest.pop("format"),
    lambda manifest: manifest["splits"]["train"]["shards"][0].update(bytes=10**30),
])  # fmt: skip
def test_impossible_manifests_are_refused(
    intact: Path, tmp_path: Path, reader: str, change: Callable[[Any], object]
) -> None:
    out = shutil.copytree(intact, tmp_path / "out")
    change_manifest(out, change)
    with pytest.raises(ManifestError, match=FILE):
        READERS[reader](out)


@pytest.mark.parametrize("name", ["train.index.npy", "train.names"])
@pytest.mark.parametrize("reader", ["unpack", "source"])
def test_who_copies_names_and_labels_compares_their_checksums(
    intact: Path, tmp_path: Path, reader: str, name: str
) -> None:
    out = shutil.copytree(intact, tmp_path / "out")
    if name == "train.names":  # another name, as good as the first
        data = (out / name).read_bytes().replace(b"dog/c.jpg", b"dog/d.jpg")
        (out / name).write_bytes(data)
    else:
        rows = np.load(out / name, mmap_mode="r+")
        rows["label"] = 1 - rows["label"]
        rows.flush()
    with pytest.raises(ManifestError, match=rf"{name} is damaged: crc32c mismatch.*packer index"):
        READERS[reader](out)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("name", ["train.index.npy", "train.names"])
def test_a_file_longer_than_written_is_noticed_on_opening(intact: Path, tmp_path: Path, name: str) -> None:
    out = shutil.copytree(intact, tmp_path / "out")
    with open(out / name, "ab") as f:
        f.write(b"more")
    train = pickle.loads(pickle.dumps(Packed(out)["train"]))
    with pytest.raises(ManifestError, match=rf"{name} is damaged: \d+ bytes, not \d+"):
        _ = train.rows, train.names


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits_for_what_is_no_file(intact: Path, tmp_path: Path, kind: str, reader: str) -> None:
    out = shutil.copytree(intact, tmp_path / "out")
    shard = next(out.glob("*.tar"))
    shard.unlink()
    if kind == "endless":
        shard.symlink_to("/dev/zero")
    else:
        os.mkfifo(shard) if kind == "pipe" else shard.mkdir()
    with pytest.raises(ShardError, match=r"not a regular file"):
        READERS[reader](out)


def test_the_changes_are_undone(intact: Path) -> None:
    assert verify(intact, deep=True).problems == []
