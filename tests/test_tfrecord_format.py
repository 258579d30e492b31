"""The TFRecord layout, byte by byte; bytes that lie; and what TensorFlow reads.

`PACKER_TF_PYTHON`, a Python with TensorFlow, lets it read our shards in a process of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import subprocess
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from contracts import FormatContract, Sample, batch_of, folder, payload, samples_of, seen_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tfrecord_helpers import delimited, example, features, record, records, varint

from packer.errors import DamagedShardError, ShardError
from packer.formats.base import About, Format
from packer.formats.example import NUMBER_BYTES
from packer.formats.tfrecord import FORMAT, masked_crc32c
from packer.formats.tfrecord_reader import iter_records, iter_samples
from packer.sample import is_image_field


class TestTFRecordFormat(FormatContract):
    format: ClassVar[Format] = FORMAT

    def test_a_cut_anywhere_is_found_by_the_shard_s_own_headers(self, tmp_path: Path) -> None:
        """Anywhere but between two records: TFRecord has no end of its own, only `dataset.json` knows the size."""
        samples = [Sample(b"k%d" % i, (("jpg", payload(300, i)), ("cls", b"1"))) for i in range(3)]
        self.write(tmp_path / "whole", [samples])
        whole = (tmp_path / "whole").read_bytes()
        between = {0, *np.cumsum([len(data) + 16 for data in records(whole)]).tolist()}
        for end in sorted(set(range(0, len(whole), 7)) - between):
            (tmp_path / "cut").write_bytes(whole[:end])
            with pytest.raises(ShardError, match="truncated"):
                self.walk(tmp_path / "cut")


write = TestTFRecordFormat().write


def jpeg(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (width, 0, 0)).save(out, "JPEG")
    return out.getvalue()


def expected_features(sample: Sample) -> dict[str, bytes | int]:
    """By the rule in words: the picture is the first with a plain name, else the first."""
    images = [field for field, _ in sample.files if is_image_field(field)]
    image = next((field for field in images if "." not in field), images[0] if images else None)
    found: dict[str, bytes | int] = {"__key__": sample.key}
    for field, data in sample.files:
        found["image/encoded" if field == image else field] = data
    if image is not None:
        found["image/format"] = {"jpg": b"JPEG", "seg.png": b"PNG"}[image]
        found |= {"image/field": image.encode()} if "." in image else {}
        found |= {"image/filename": sample.key + b"." + image.encode(), "image/height": -1, "image/width": -1}
    if sample.label >= 0:
        found["image/class/label"] = sample.label
    return found


@settings(max_examples=25)
@given(samples=samples_of())
def test_a_plain_reader_finds_every_feature(samples: list[Sample]) -> None:
    with folder() as tmp:
        write(tmp / "shard", [samples])
        found = [features(data) for data in records((tmp / "shard").read_bytes())]
    assert found == [expected_features(sample) for sample in samples]


def test_size_label_and_class_name_of_a_picture(tmp_path: Path) -> None:
    samples = [
        Sample(b"a/1", (("jpg", jpeg(30, 20)), ("cls", b"1"))),
        Sample(b"a/2", (("left.jpg", jpeg(7, 9)), ("jpg", jpeg(500, 4)), ("cls", b"0"))),
        Sample(b"a/3", (("npy", b"x"),)),
    ]
    writer = FORMAT.writer(str(tmp_path / "shard"), about=About(("cat", "vögel")))
    buffer, places = writer.layout(batch_of(samples))
    for place, (_, data) in zip(places, [file for s in samples for file in s.files], strict=True):
        buffer[place : place + len(data)] = data
    writer.commit(seen_of(samples))
    writer.close()
    first, second, third = (features(data) for data in records((tmp_path / "shard").read_bytes()))
    assert (first["image/height"], first["image/width"]) == (20, 30)
    assert (first["image/class/label"], first["image/class/text"]) == (1, "vögel".encode())
    assert (second["image/height"], second["image/width"], second["image/class/text"]) == (4, 500, b"cat")
    assert second["left.jpg"] == samples[1].files[0][1]
    assert third == {"__key__": b"a/3", "npy": b"x"}
    walked = list(FORMAT.walk(str(tmp_path / "shard")))
    assert [sample.label for sample in walked] == [1, 0, None]
    assert [list(sample.fields) for sample in walked] == [["jpg", "cls"], ["left.jpg", "jpg", "cls"], ["npy"]]


def test_the_bytes_never_change(tmp_path: Path) -> None:
    samples = [Sample(b"n%d" % i, (("jpg", bytes(i)), ("json", b"{}"), ("cls", b"%d" % i))) for i in range(200)]
    write(tmp_path / "shard", [samples])
    digest = hashlib.sha256((tmp_path / "shard").read_bytes()).hexdigest()
    assert digest == "e23a491d845d666894288c21cb9c228a0bfa43eea98e541baa90e9b00a60adab"


def test_checksums_are_masked_as_tensorflow_does() -> None:
    assert masked_crc32c(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32


def test_a_sample_of_more_than_two_gibibytes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    writer = FORMAT.writer(str(tmp_path / "shard"))
    batch = batch_of([Sample(b"big", (("a", b""), ("b", b"")))])
    batch.sizes[:] = 1 << 30
    with pytest.raises(ShardError, match=r"sample 'big' takes 2,147,483,7\d\d bytes.*2 GiB"):
        writer.layout(batch)
    writer.abort()


# ---------------------------------------------------------------- bytes that lie


def walk(path: Path) -> list[tuple[bytes, list[str]]]:
    return [(sample.key, list(sample.fields)) for sample in iter_samples(str(path))]


def refused(tmp_path: Path, shard: bytes) -> DamagedShardError:
    (tmp_path / "bad.tfrecord").write_bytes(shard)
    with pytest.raises(DamagedShardError) as caught:
        walk(tmp_path / "bad.tfrecord")
    return caught.value


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    write(tmp_path / "shard", [[Sample(b"k", (("jpg", payload(40, 1)), ("cls", b"3")))]])
    whole = bytearray((tmp_path / "shard").read_bytes())
    for at in range(len(whole)):
        whole[at] ^= 1 << at % 8
        refused(tmp_path, bytes(whole))
        whole[at] ^= 1 << at % 8


def claims(length: int) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc32c(head))


@pytest.mark.parametrize(
    ("shard", "offset", "message"),
    [
        (claims(1 << 40) + b"x", 0, "truncated: a record of 1099511627776 bytes begins here"),
        (claims(2**64 - 1) + b"x" * 40, 0, "truncated: a record of 18446744073709551615 bytes"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), 0, "an HDF5 file"),
        (b"\x1f\x8b\x08" + bytes(40), 0, "compressed with gzip"),
        (bytes(512), 0, "not a TFRecord file"),
        (b"short", 0, "truncated inside a record's head"),
        (record(b"")[:12] + b"\0\0\0\0", 12, "does not match its checksum"),
        (record(b""), 12, "without a feature of one byte string"),
        (record(b"\x0a\x7f"), 12, "a value of 127 bytes reaches beyond what holds it, by 127"),
        (record(delimited(1, b"\x0a\x05abc")), 14, "a value of 5 bytes reaches beyond what holds it, by 2"),
        (record(b"\x0a" + b"\x80" * 10 + b"\x01"), 13, "a varint of more than ten bytes"),
        (record(b"\x0a" + b"\xff" * 9 + b"\x7f"), 13, "a varint of more than 64 bits"),
        (record(b"\x0a\x80"), 13, "a varint that is cut off"),
        (record(b"\x0b\x0c"), 12, "wire type 3"),
        (record(b"\x02\x00"), 12, "field number 0"),
        (record(b"\x08\x00"), 13, "a message is of another type"),
        (record(delimited(1, example({"a": b"x"})[2:] * 2)), 28, "the feature 'a' is there twice"),
        (record(example({"a": 3, "b": [b"x", b"y"]})), 12, "without a feature of one byte string"),
        (record(example({str(i): b"" for i in range(4097)})), None, "more than 4096 features"),
    ],
)  # fmt: skip
def test_a_lie_is_told_with_its_place(tmp_path: Path, shard: bytes, offset: int | None, message: str) -> None:
    error = refused(tmp_path, shard)
    assert message in str(error)
    assert offset is None or error.offset == offset


def test_the_place_counts_from_the_begin_of_the_file(tmp_path: Path) -> None:
    good = record(example({"__key__": b"k", "npy": b"x"}))
    assert refused(tmp_path, good + record(b"\x0a\x7f")).offset == len(good) + 12


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_example_or_an_error(data: bytes) -> None:
    with folder() as tmp:
        (tmp / "shard").write_bytes(record(data))
        try:
            samples = list(iter_samples(str(tmp / "shard")))
        except DamagedShardError as error:
            assert 12 <= error.offset <= 12 + len(data)
        else:
            for found in samples[0].fields.values():
                assert 12 <= found.offset <= found.offset + found.length <= 12 + len(data)


@settings(max_examples=50)
@given(st.data())
def test_a_changed_example_is_another_example_or_an_error(data: st.DataObject) -> None:
    good = bytearray(
        example({"__key__": b"some/key", "image/encoded": b"x" * 200, "cls": b"7", "image/class/label": 7})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with folder() as tmp:
        (tmp / "shard").write_bytes(record(bytes(good)))
        try:
            samples = list(iter_samples(str(tmp / "shard")))
        except DamagedShardError:
            return
        for found in samples[0].fields.values():
            assert found.offset + found.length <= len(good) + 12


def test_a_record_too_long_for_memory_is_parsed_in_place(tmp_path: Path) -> None:
    large = payload(9 << 20, 1)
    write(tmp_path / "shard", [[Sample(b"k", (("npy", large), ("cls", b"5")))]])
    (sample,) = iter_samples(str(tmp_path / "shard"))
    place = sample.fields["npy"]
    assert (tmp_path / "shard").read_bytes()[place.offset : place.offset + place.length] == large
    assert sample.label == 5
    whole = bytearray((tmp_path / "shard").read_bytes())
    whole[5 << 20] ^= 1
    refused(tmp_path, bytes(whole))


# ---------------------------------------------------------------- records of others


def test_names_of_others_become_keys_and_fields(tmp_path: Path) -> None:
    shard = [
        example({
            "image/encoded": jpeg(8, 6), "image/filename": b"n01440764_10026.JPEG", "image/class/label": 5,
            "image/class/text": b"tench", "image/height": 6, "image/width": 8, "image/format": b"JPEG",
            "image/object/bbox/xmin": [0.25, 0.5], "image/colorspace": b"RGB",
        }),
        example({"image": b"\x89PNG...", "label": 3, "image_id": 17}),
        example({"image_raw": b"?", "image/filename": b"../../etc/passwd", "label": [1, 2], "__x__": b"y"}),
        example({"text": b"no picture", "score": 0.5}),
    ]  # fmt: skip
    (tmp_path / "train-0-of-1").write_bytes(b"".join(map(record, shard)))
    skipped: dict[str, int] = {}
    samples = list(iter_samples(str(tmp_path / "train-0-of-1"), skipped))
    assert [sample.key for sample in samples] == [
        b"n01440764_10026", b"17", b"train-0-of-1/00000002", b"train-0-of-1/00000003",
    ]  # fmt: skip
    assert [list(sample.fields) for sample in samples] == [
        ["jpg", "image.class.text", "image.colorspace"], ["png"], ["img"], ["text"],
    ]  # fmt: skip
    assert [sample.label for sample in samples] == [5, 3, None, None]
    assert samples[0].fields["jpg"].name == b"n01440764_10026.JPEG"
    assert skipped == {
        "feature 'image/object/bbox/xmin' (float)": 1, "feature 'image_id' (int64)": 1, "feature '__x__' (bytes)": 1,
        "feature 'score' (float)": 1,
    }  # fmt: skip


def test_unpacked_numbers_and_unknown_fields_are_read_as_protobuf_says(tmp_path: Path) -> None:
    number = delimited(3, b"\x08" + varint(-5))  # not packed
    entry = delimited(1, b"label") + delimited(2, number) + b"\x1d1234" + b"\x18\x01"
    other = delimited(1, b"__key__") + delimited(2, delimited(1, delimited(1, b"k")))
    field = delimited(1, b"npy") + delimited(2, delimited(1, delimited(1, b"xyz")))
    data = delimited(1, b"".join(delimited(1, one) for one in (entry, other, field))) + delimited(9, b"future")
    (tmp_path / "shard").write_bytes(record(data))
    (sample,) = iter_samples(str(tmp_path / "shard"))
    assert (sample.key, sample.label, list(sample.fields)) == (b"k", -1, ["npy"])


def test_recognised_by_how_it_begins(tmp_path: Path) -> None:
    write(tmp_path / "shard", [[Sample(b"k", (("jpg", b"x"),))]])
    assert FORMAT.recognises((tmp_path / "shard").read_bytes()[:4096])
    assert not FORMAT.recognises(bytes(4096))
    assert not FORMAT.recognises(b"")
    assert len(list(iter_records(str(tmp_path / "shard")))) == 1


# ---------------------------------------------------------------- TensorFlow

_TENSORFLOW = """
import hashlib, json, sys
import tensorflow as tf
one, number = tf.io.FixedLenFeature([], tf.string), tf.io.FixedLenFeature([], tf.int64)
spec = {"image/encoded": one, "image/class/label": number, "image/height": number, "image/width": number,
        "image/filename": one, "image/format": one, "__key__": one}
found = []
for batch in tf.data.TFRecordDataset(sys.argv[1]).batch(3):
    values = tf.io.parse_example(batch, spec)
    for i in range(len(batch)):
        row = {name: value[i].numpy() for name, value in values.items()}
        shape = tf.io.decode_jpeg(row["image/encoded"]).shape
        row["image/encoded"] = hashlib.sha256(row["image/encoded"]).hexdigest()
        row = {name: v.decode() if isinstance(v, bytes) else v for name, v in row.items()}
        row = {name: v if isinstance(v, str) else int(v) for name, v in row.items()}
        found.append(row | {"shape": list(shape)})
print(json.dumps(found))
"""


def test_tensorflow_reads_it(tmp_path: Path) -> None:
    python = os.environ.get("PACKER_TF_PYTHON")
    if not python:
        pytest.skip("PACKER_TF_PYTHON names no Python with TensorFlow")
    samples = [Sample(b"k/%d" % i, (("jpg", jpeg(10 + i, 8)), ("cls", b"%d" % (i * 300)))) for i in range(5)]
    write(tmp_path / "shard", [samples])
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    done = subprocess.run(
        [python, "-c", _TENSORFLOW, str(tmp_path / "shard")], env=clean, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        {
            "image/encoded": hashlib.sha256(sample.files[0][1]).hexdigest(),
            "image/class/label": i * 300, "image/height": 8, "image/width": 10 + i, "image/format": "JPEG",
            "image/filename": f"k/{i}.jpg", "__key__": f"k/{i}", "shape": [8, 10 + i, 3],
        }
        for i, sample in enumerate(samples)
    ]  # fmt: skip


def test_ten_bytes_hold_any_number() -> None:
    assert len(varint(-1)) == NUMBER_BYTES
