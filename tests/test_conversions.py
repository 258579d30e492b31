"""Any to any: shards that others wrote, compressed ones and parquet files as the source of `packer shard`."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image
from tfrecord_helpers import example, record

from packer import foreign
from packer.errors import DamagedShardError
from packer.foreign import gunzip
from packer.packed import Packed

Run = Callable[..., Result]


def image(number: int, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20 + number, 30), (number * 9 % 256, 0, 0)).save(out, kind)
    return out.getvalue()


def tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def labelled(first: int, count: int) -> dict[str, bytes]:
    numbers = range(first, first + count)
    return {n: d for i in numbers for n, d in ((f"{i:03d}.jpg", image(i)), (f"{i:03d}.cls", b"%d" % (i % 3)))}


def record_of(number: int) -> bytes:
    features = {"image/encoded": image(number), "image/class/label": number % 3, "image/filename": b"%03d.jpg" % number}
    return record(example(features))


def content(folder: Path, split: str = "train") -> dict[str, dict[str, bytes]]:
    part = Packed(folder)[split]
    return {part.key(i): part.sample(i, check=True) for i in range(len(part))}


def expected(first: int, count: int) -> dict[str, dict[str, bytes]]:
    return {f"{i:03d}": {"jpg": image(i), "cls": b"%d" % (i % 3)} for i in range(first, first + count)}


@pytest.mark.parametrize("target", ["webdataset", "tfrecord"])
def test_tar_and_records_plain_and_compressed_meet_in_one_dataset(tmp_path: Path, run_packer: Run, target: str) -> None:
    theirs = tmp_path / "theirs"
    tar(theirs / "a" / "0.tar", {name: data for name, data in labelled(0, 3).items() if name.endswith("jpg")})
    tar(theirs / "b" / "1.tgz", {name: data for name, data in labelled(3, 3).items() if name.endswith("jpg")})
    (theirs / "c").mkdir()
    (theirs / "c" / "2.tfrecord").write_bytes(b"".join(map(record_of, range(6, 9))))
    (theirs / "d").mkdir()
    (theirs / "d" / "3.tfrecord.gz").write_bytes(gzip.compress(b"".join(map(record_of, range(9, 12)))))
    before = sorted(theirs.rglob("*"))
    sources = [theirs / "a", theirs / "b" / "1.tgz", theirs / "c" / "2.tfrecord", theirs / "d"]
    run_packer("shard", *sources, tmp_path / "out", "--format", target, "-q", env={"TMPDIR": str(tmp_path)})
    run_packer("verify", tmp_path / "out")
    unlabelled = {key: {"jpg": fields["jpg"]} for key, fields in expected(0, 6).items()}
    assert content(tmp_path / "out") == unlabelled | expected(6, 6)
    assert sorted(theirs.rglob("*")) == before, "nothing is written beside others' shards"
    assert list(tmp_path.glob("packer-*")) == [], "nothing stays in TMPDIR"


def test_labels_are_never_lost_in_a_merge(tmp_path: Path, run_packer: Run) -> None:
    tar(tmp_path / "a.tar", labelled(0, 3))
    (tmp_path / "b.tfrecord").write_bytes(record_of(4))
    sources = (tmp_path / "a.tar", tmp_path / "b.tfrecord")
    said = run_packer("shard", *sources, tmp_path / "out", exit_code=1).output
    assert "pack it by itself first" in said
    run_packer("shard", tmp_path / "b.tfrecord", tmp_path / "b", "-q")
    run_packer("shard", tmp_path / "a.tar", tmp_path / "b", tmp_path / "out", "-q")
    assert content(tmp_path / "out") == expected(0, 3) | expected(4, 1)


def test_labels_that_only_the_container_states_become_cls(tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "x.tfrecord").write_bytes(b"".join(map(record_of, range(4))))
    run_packer("shard", tmp_path / "x.tfrecord", tmp_path / "out", "-q")
    assert content(tmp_path / "out") == expected(0, 4)


def test_the_folder_s_name_says_which_split(tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "x.tfrecord").write_bytes(record_of(1))
    run_packer("shard", tmp_path / "val", tmp_path / "out", "-q")
    assert content(tmp_path / "out", "val") == expected(1, 1)


def test_a_truncated_stream_is_refused(tmp_path: Path, run_packer: Run) -> None:
    whole = gzip.compress(b"".join(map(record_of, range(4))))
    for end in (len(whole) - 3, len(whole) // 2, 5):
        (tmp_path / "x.tfrecord.gz").write_bytes(whole[:end])
        said = run_packer("shard", tmp_path / "x.tfrecord.gz", tmp_path / "out", exit_code=1).output
        assert "truncated: the gzip data end too early" in said
    damaged = bytearray(whole)
    damaged[-6] ^= 1
    (tmp_path / "x.tfrecord.gz").write_bytes(damaged)
    assert "damaged gzip data" in run_packer("shard", tmp_path / "x.tfrecord.gz", tmp_path / "out", exit_code=1).output
    assert not (tmp_path / "out").exists()


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "GROWTH_ALLOWED", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(DamagedShardError, match="grows more than 100 times"):
        gunzip(str(tmp_path / "bomb.gz"), str(tmp_path / "out"))
    assert (tmp_path / "out").stat().st_size < 16 << 20


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(b"two"))
    gunzip(str(tmp_path / "x.gz"), str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == b"onetwo"


def test_what_cannot_be_read_is_told(tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "x.tar.xz").write_bytes(b"?")
    assert "only gzip" in run_packer("shard", tmp_path / "x.tar.xz", tmp_path / "out", exit_code=2).output
    (tmp_path / "y.tfrecord").write_bytes(record_of(1)[:-1])
    assert "truncated" in run_packer("shard", tmp_path / "y.tfrecord", tmp_path / "out", exit_code=1).output
    (tmp_path / "z.tfrecord").write_bytes(b"")
    assert "no sample" in run_packer("shard", tmp_path / "z.tfrecord", tmp_path / "out", exit_code=1).output


def test_a_folder_of_pictures_beside_a_tar_is_still_a_folder_of_pictures(tmp_path: Path, run_packer: Run) -> None:
    tar(tmp_path / "src" / "backup.tar", labelled(0, 1))
    (tmp_path / "src" / "x.jpg").write_bytes(image(3))
    run_packer("shard", tmp_path / "src", tmp_path / "out", "--layout", "flat", "-q")
    assert list(content(tmp_path / "out")) == ["x"]


# ---------------------------------------------------------------- parquet


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """As `datasets.Dataset.push_to_hub` writes it: two shards of a split, one of another, class names in the schema."""
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": label, "caption": {"dtype": "string", "_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    for name, first in (("train-00000-of-00002", 0), ("train-00001-of-00002", 100), ("validation-00000-of-00001", 200)):
        numbers = range(first, first + 70)
        columns = {
            "image": [{"bytes": image(i % 90, "PNG" if i % 2 else "JPEG"), "path": f"{i}.jpg"} for i in numbers],
            "label": pa.array([i % 2 for i in numbers], pa.int64()),
            "caption": [f"number {i}" for i in numbers],
        }
        table = pa.table(columns).replace_schema_metadata(metadata)
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=40)
    return tmp_path / "hub"


def test_parquet_files_of_the_hub_are_packed(parquet: Path, tmp_path: Path, run_packer: Run) -> None:
    run_packer("shard", parquet, tmp_path / "out", "-q")
    run_packer("verify", tmp_path / "out")
    packed = Packed(tmp_path / "out")
    assert {name: len(split) for name, split in packed.items()} == {"train": 140, "validation": 70}
    assert packed.manifest.classes == ("cat", "dog")
    found = content(tmp_path / "out")
    assert found["data-train-00000-of-00002/00000007"] == {
        "png": image(7, "PNG"), "cls": b"1", "json": b'{"caption": "number 7", "path": "7.jpg"}',
    }  # fmt: skip


def test_parquet_without_pictures_is_refused(tmp_path: Path, run_packer: Run) -> None:
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    (tmp_path / "src").mkdir()
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "src" / "x.parquet")
    said = run_packer("shard", tmp_path / "src", tmp_path / "out", exit_code=1).output
    assert "has no column of pictures; its columns: a, b" in said
    (tmp_path / "src" / "x.parquet").write_bytes(b"PAR1 nonsense")
    assert "cannot be read as parquet" in run_packer("shard", tmp_path / "src", tmp_path / "out", exit_code=1).output


def test_an_unfinished_conversion_goes_on(tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "x.tfrecord").write_bytes(b"".join(map(record_of, range(9))))
    arguments = ("shard", tmp_path / "x.tfrecord", tmp_path / "out", "--shard-samples", "3")
    run_packer(*arguments, "-q")
    os.unlink(tmp_path / "out" / "dataset.json")
    run_packer("index", tmp_path / "out", "-q")
    assert content(tmp_path / "out") == expected(0, 9)
