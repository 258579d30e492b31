"""TFRecord datasets from end to end: packing, checking, converting, indexing those of others, loading."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from tfrecord_helpers import example, record

from packer.indexing import index_folder
from packer.packed import Packed

Run = Callable[..., Result]


def digests(folder: Path, ending: str) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*" + ending))}


@pytest.fixture
def source(image_folder: Callable[..., Path]) -> Path:
    return image_folder(splits=("train", "val"), per_class=4)


@pytest.fixture
def packed(source: Path, tmp_path: Path, run_packer: Run) -> Path:
    run_packer("shard", source, tmp_path / "tfr", "--format", "tfrecord", "--shard-samples", "3", "-q")
    return tmp_path / "tfr"


def test_pack_verify_info_and_unpack(source: Path, packed: Path, tmp_path: Path, run_packer: Run) -> None:
    assert len(digests(packed, ".tfrecord")) == 6
    assert "ok" in run_packer("verify", packed).output
    assert run_packer("verify", packed, "--deep").exit_code == 0
    assert "tfrecord" in run_packer("info", packed).output
    assert "8 samples" in run_packer("stats", packed).output
    run_packer("unpack", packed, tmp_path / "back")
    files = {path.relative_to(source): path.read_bytes() for path in source.rglob("*.*")}
    assert {p.relative_to(tmp_path / "back"): p.read_bytes() for p in (tmp_path / "back").rglob("*.*")} == files


def test_workers_change_nothing_and_a_second_run_does_nothing(
    source: Path, packed: Path, tmp_path: Path, run_packer: Run
) -> None:
    arguments = ("--format", "tfrecord", "--shard-samples", "3")
    run_packer("shard", source, tmp_path / "two", *arguments, "--workers", "2", "-q")
    assert digests(tmp_path / "two", ".tfrecord") == digests(packed, ".tfrecord")
    assert "already complete" in run_packer("shard", source, packed, *arguments).output


def test_around_the_circle_the_tar_s_very_bytes_come_back(source: Path, tmp_path: Path, run_packer: Run) -> None:
    """Label files that no number could give back, fields in an order of their own, odd keys."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, label in enumerate((b" 1 \n", b"007", b"2", b"none")):
        Image.new("RGB", (9 + i, 7), (i, 0, 0)).save(flat / f"ä 50%.{i}.jpg")
        Image.new("L", (9 + i, 7)).save(flat / f"ä 50%.{i}.mask.png")
        (flat / f"ä 50%.{i}.cls").write_bytes(label)
    for src in (source, flat):
        first, hdf5, records, last = (tmp_path / f"{src.name}-{n}" for n in ("first", "hdf5", "records", "last"))
        run_packer("shard", src, first, "--shard-samples", "3", "-q")
        run_packer("shard", first, hdf5, "--format", "hdf5", "--shard-samples", "3", "-q")
        run_packer("shard", hdf5, records, "--format", "tfrecord", "--shard-samples", "3", "-q")
        run_packer("shard", records, last, "--shard-samples", "3", "-q")
        assert digests(first, ".tar") == digests(last, ".tar") != {}
        direct = tmp_path / f"{src.name}-direct"
        run_packer("shard", src, direct, "--format", "tfrecord", "--shard-samples", "3", "-q")
        assert digests(direct, ".tfrecord") == digests(records, ".tfrecord")
        run_packer("verify", records)


def test_withdrawn_samples_are_gone(packed: Path, tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "drop").write_text("train/cat/cat-0\n")
    run_packer("shard", packed, tmp_path / "less", "--drop-keys", tmp_path / "drop", "--format", "tfrecord", "-q")
    assert b"cat-0.jpg" not in b"".join(p.read_bytes() for p in (tmp_path / "less").glob("train*"))
    assert len(Packed(tmp_path / "less")["train"]) == 7


def test_a_damaged_record_is_named(packed: Path, run_packer: Run) -> None:
    shard = packed / "train-000001.tfrecord"
    row = Packed(packed)["train"].rows[3]
    data = bytearray(shard.read_bytes())
    data[int(row["jpg:offset"]) - 3] ^= 1  # a length, which no field's own checksum covers
    shard.write_bytes(data)
    said = run_packer("verify", packed, exit_code=1).output
    assert "train-000001.tfrecord" in said
    assert "a record does not match its checksum" in said


def test_an_index_older_than_its_shard_is_found(packed: Path, run_packer: Run) -> None:
    first, second = packed / "train-000000.tfrecord", packed / "train-000001.tfrecord"
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert "problem" in run_packer("verify", packed, exit_code=1).output


def test_the_index_is_made_again_from_the_records(packed: Path, tmp_path: Path) -> None:
    """Label, size and every place, all but class names and original paths."""
    shutil.copytree(packed, tmp_path / "copy")
    os.unlink(tmp_path / "copy" / "dataset.json")
    again = index_folder(tmp_path / "copy")
    assert again.fields == Packed(packed).manifest.fields
    for split in ("train", "val"):
        assert np.array_equal(Packed(tmp_path / "copy")[split].rows, Packed(packed)[split].rows)
        assert list(Packed(tmp_path / "copy")[split].names.keys) == list(Packed(packed)[split].names.keys)


def strangers(folder: Path, count: int = 5) -> dict[str, bytes]:
    """Records as TensorFlow's ImageNet scripts write them; returns the picture of each key."""
    folder.mkdir()
    pictures = {}
    for shard in range(2):
        written = []
        for i in range(count):
            path = folder / "x.jpg"
            Image.new("RGB", (20 + i, 10 + shard), (i * 9, 0, 0)).save(path)
            pictures[f"n{shard}_{i}"] = path.read_bytes()
            path.unlink()
            written.append(
                example({
                    "image/encoded": pictures[f"n{shard}_{i}"], "image/class/label": i + 1, "image/format": b"JPEG",
                    "image/filename": b"n%d_%d.JPEG" % (shard, i), "image/class/text": b"thing",
                })
            )  # fmt: skip
        (folder / f"train-{shard:05d}-of-00002").write_bytes(b"".join(map(record, written)))
    return pictures


def test_records_of_others_are_indexed_and_read_at_random(tmp_path: Path, run_packer: Run) -> None:
    pictures = strangers(tmp_path / "theirs")
    run_packer("index", str(tmp_path / "theirs" / "train-*"))
    run_packer("verify", tmp_path / "theirs")
    train = Packed(tmp_path / "theirs")["train"]
    assert {train.key(i): train.read(i, "jpg", check=True) for i in range(len(train))} == pictures
    assert train.rows["label"].tolist() == [1, 2, 3, 4, 5] * 2
    assert train.rows["width"].tolist() == [20, 21, 22, 23, 24] * 2


def test_truncated_records_of_others_are_refused_with_the_offset(tmp_path: Path, run_packer: Run) -> None:
    strangers(tmp_path / "theirs")
    shard = tmp_path / "theirs" / "train-00001-of-00002"
    shard.write_bytes(shard.read_bytes()[:-10])
    said = run_packer("index", str(tmp_path / "theirs" / "train-*"), exit_code=1).output
    assert "train-00001-of-00002" in said
    assert "at offset" in said
    assert not (tmp_path / "theirs" / "dataset.json").exists()


def test_batches_are_those_of_tar_bit_for_bit(source: Path, packed: Path, tmp_path: Path, run_packer: Run) -> None:
    torch = pytest.importorskip("torch", reason="loaders need torch")
    from loaders import tfrecord_loader, webds_loader
    from loaders.transforms import TrainCrop

    run_packer("shard", source, tmp_path / "tar", "--shard-samples", "3", "-q")
    for epoch in range(2):
        pairs = [
            module.make_loader(folder, batch_size=3, transform=TrainCrop(16), seed=5, num_workers=1)
            for module, folder in ((webds_loader, tmp_path / "tar"), (tfrecord_loader, packed))
        ]
        for loader in pairs:
            loader.set_epoch(epoch)
        count = 0
        for (images, labels), (other_images, other_labels) in zip(*pairs, strict=True):
            assert torch.equal(images, other_images)
            assert torch.equal(labels, other_labels)
            count += len(labels)
        assert count == 8
