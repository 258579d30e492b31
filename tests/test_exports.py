"""Index files for other readers: as their own tools write them, and as the readers themselves take them.

`PACKER_DALI_PYTHON` and `PACKER_ENERGON_PYTHON` name Pythons with NVIDIA DALI and megatron-energon.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tfrecord_helpers import records

from packer.errors import UsageError
from packer.exports import export
from packer.packed import Packed

Run = Callable[..., Result]


@pytest.fixture
def packed(image_folder: Callable[..., Path], tmp_path: Path, run_packer: Run) -> Callable[[str], Path]:
    source = image_folder(splits=("train", "val"), per_class=4, suffixes=(".jpg",))

    def make(format_name: str) -> Path:
        out = tmp_path / format_name
        run_packer("shard", source, out, "--format", format_name, "--shard-samples", "3", "-q")
        return out

    return make


def members(shard: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(shard) as archive:
        return archive.getmembers()


def test_dali_s_index_of_tar_is_what_wds2idx_writes(packed: Callable[[str], Path], run_packer: Run) -> None:
    out = packed("webdataset")
    run_packer("index", out, "--export", "dali")
    run_packer("verify", out)
    lines = (out / "train-000000.idx").read_text().splitlines()
    assert lines[0] == "v1.2 3"
    parts = [(m.name.partition(".")[2], m.offset_data, m.size, m.name) for m in members(out / "train-000000.tar")]
    assert " ".join(lines[1:]) == " ".join(f"{e} {at} {size} {name}" for e, at, size, name in parts)
    assert len(lines) == 4


def test_names_with_spaces_take_the_version_without_names(tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "src").mkdir()
    with tarfile.open(tmp_path / "src" / "x.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a b.jpg"))
    run_packer("index", tmp_path / "src", "--export", "dali", "-q")
    assert (tmp_path / "src" / "x.idx").read_text() == "v1.1 1\njpg 512 0\n"


def test_dali_s_index_of_records_is_what_tfrecord2idx_writes(packed: Callable[[str], Path]) -> None:
    out = packed("tfrecord")
    assert export(out, "dali")[0] == "train-000000.idx"
    at, expected = 0, []
    for data in records((out / "train-000000.tfrecord").read_bytes()):
        expected.append(f"{at} {len(data) + 16}")
        at += len(data) + 16
    assert (out / "train-000000.idx").read_text().splitlines() == expected


def test_energon_s_files_say_where_every_sample_is(packed: Callable[[str], Path], run_packer: Run) -> None:
    out = packed("webdataset")
    run_packer("index", out, "--export", "energon")
    run_packer("verify", out)
    shard = members(out / "train-000000.tar")
    firsts = [m for m in shard if m.name.endswith(".jpg")]
    end = shard[-1].offset_data + -(-shard[-1].size // 512) * 512
    raw = (out / "train-000000.tar.idx").read_bytes()
    assert struct.unpack("<4Q", raw) == (*(m.offset for m in firsts), end)
    with sqlite3.connect(out / ".nv-meta" / "index.sqlite") as db:
        keys = [key for (key,) in db.execute("SELECT sample_key FROM samples ORDER BY tar_file_id, sample_index")]
        parts = db.execute("SELECT part_name, content_byte_offset, content_byte_size FROM sample_parts").fetchall()
    db.close()
    assert keys == [split.key(i) for split in Packed(out).values() for i in range(len(split))]
    assert parts[: len(shard)] == [(m.name.partition(".")[2], m.offset_data, m.size) for m in shard]
    info = json.loads((out / ".nv-meta" / ".info.json").read_text())
    assert info["shard_counts"] == {s.name: s.samples for split in Packed(out).values() for s in split.shards}
    before = {p.name: p.read_bytes() for p in (out / ".nv-meta").iterdir()}
    run_packer("index", out, "--export", "energon")
    assert {p.name: p.read_bytes() for p in (out / ".nv-meta").iterdir()} == before, "same shards, same files"


def test_what_a_reader_cannot_read_is_not_exported(packed: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"energon reads webdataset shards, .* holds tfrecord: convert it"):
        export(packed("tfrecord"), "energon")


def elsewhere(variable: str, script: str, *arguments: str | Path) -> Any:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    extra = {"PYTHONPATH": os.environ[f"{variable}PATH"]} if f"{variable}PATH" in os.environ else {}
    done = subprocess.run(
        [python, "-c", script, *map(str, arguments)], env=clean | extra, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_DALI = """
import hashlib, json, sys
import numpy as np
from nvidia.dali import fn, pipeline_def, tfrecord as tfrec
shard, index = sys.argv[1:]

@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def pipeline():
    if shard.endswith(".tar"):
        return tuple(fn.readers.webdataset(paths=[shard], index_paths=[index], ext=["jpg", "cls"], name="reader"))
    features = {"image/encoded": tfrec.FixedLenFeature((), tfrec.string, ""),
                "image/class/label": tfrec.FixedLenFeature([1], tfrec.int64, -1)}
    read = fn.readers.tfrecord(path=[shard], index_path=[index], features=features, name="reader")
    return read["image/encoded"], read["image/class/label"]

pipe = pipeline()
pipe.build()
found = []
for _ in range(pipe.epoch_size("reader")):
    image, label = (np.asarray(one.as_array()[0]) for one in pipe.run())
    label = bytes(label).decode() if label.dtype == np.uint8 else str(label[0])
    found.append([hashlib.sha256(image.tobytes()).hexdigest(), label])
print(json.dumps(found))
"""


@pytest.mark.parametrize("format_name", ["webdataset", "tfrecord"])
def test_dali_reads_by_its_index(packed: Callable[[str], Path], format_name: str) -> None:
    import hashlib

    out = packed(format_name)
    export(out, "dali")
    train = Packed(out)["train"]
    shard = train.shards[0]
    found = elsewhere("PACKER_DALI_PYTHON", _DALI, out / shard.name, out / "train-000000.idx")
    samples = [train.sample(i) for i in range(shard.samples)]
    assert found == [[hashlib.sha256(s["jpg"]).hexdigest(), s["cls"].decode()] for s in samples]


_ENERGON = """
import json, sys
from megatron.energon import (
    Cooker, DefaultTaskEncoder, TextSample, WorkerConfig, basic_sample_keys, get_loader, get_train_dataset, stateless,
)

@stateless
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=str(sample["cls"]))

class Encoder(DefaultTaskEncoder):
    cookers = [Cooker(cook)]

dataset = get_train_dataset(
    sys.argv[1], worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=None, repeat=False,
    shuffle_buffer_size=None, max_samples_per_sequence=None,
    task_encoder=Encoder(),
)
print(json.dumps(sorted(sample.__key__.rpartition("/")[2] + " " + sample.text for sample in get_loader(dataset))))
"""


def test_energon_reads_the_dataset(packed: Callable[[str], Path]) -> None:
    out = packed("webdataset")
    export(out, "energon")
    train = Packed(out)["train"]
    expected = [f"{train.key(i).rpartition('/')[2]} {train.rows['label'][i]}" for i in range(len(train))]
    assert elsewhere("PACKER_ENERGON_PYTHON", _ENERGON, out) == sorted(expected)
