"""The HDF5 layout, byte by byte, and as h5py, h5dump and PyTables read it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from contracts import FormatContract, Sample, batch_of, folder, payload, samples_of, seen_of
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from packer.errors import ShardError
from packer.formats.base import About
from packer.formats.hdf5 import FORMAT, HEAD
from packer.formats.hdf5_hash import lookup3
from packer.formats.shard_file import crc32c_shift


class TestHdf5Format(FormatContract):
    format = FORMAT
    exact = False


write = TestHdf5Format().write


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def read_all(file: h5py.File) -> list[tuple[bytes, dict[str, bytes]]]:
    """Every sample as the documented schema says, with nothing but h5py."""
    data = file["data"][()].tobytes()
    fields = {name: (group["offset"][()], group["length"][()]) for name, group in file["fields"].items()}
    return [
        (key, {name: data[at[i] : at[i] + size[i]] for name, (at, size) in fields.items() if size[i] >= 0})
        for i, key in enumerate(file["key"][()].tolist())
    ]


@settings(deadline=None, max_examples=40)
@given(samples=samples_of())
def test_h5py_reads_the_same_keys_contents_and_labels(samples: list[Sample]) -> None:
    with folder() as tmp:
        write(tmp / "shard.h5", [samples])
        with h5py.File(tmp / "shard.h5") as file:
            assert read_all(file) == [(sample.key, dict(sample.files)) for sample in samples]
            assert file["label"][()].tolist() == [sample.label for sample in samples]
            assert file["label"].dtype == np.int64
            assert file["data"].chunks is None and file["data"].id.get_offset() in (HEAD, None)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three labelled samples, with class names and arrays."""
    samples = [
        Sample(b"n01440764/cat %d" % i, (("ct.npy", npy(np.full((2, 3), i, "<i2"))), ("jpg", bytes(range(9 * i)))))
        for i in range(3)
    ]
    writer = FORMAT.writer(str(tmp_path / "shard.h5"), about=About(("cat", "dög")))
    batch = batch_of(samples)
    buffer, places = writer.layout(batch)
    for place, (_, data) in zip(places, (file for sample in samples for file in sample.files), strict=True):
        buffer[place : place + len(data)] = data
    seen = seen_of(samples)
    seen.labels[:], seen.image_sizes[:] = [1, -1, 0], [[4, 5], [-1, -1], [6, 7]]
    writer.commit(seen)
    writer.close()
    return tmp_path / "shard.h5"


def test_labels_sizes_class_names_and_arrays_are_typed_datasets(small: Path) -> None:
    with h5py.File(small) as file:
        assert file["label"][()].tolist() == [1, -1, 0]
        assert [name.decode() for name in file["label"].attrs["classes"]] == ["cat", "dög"]
        assert (file["height"][()].tolist(), file["width"][()].tolist()) == ([4, -1, 6], [5, -1, 7])
        assert file["height"].attrs["units"] == b"pixels"
        array = file["fields/ct.npy/array"]
        assert (array.shape, array.dtype, array.chunks) == ((3, 2, 3), np.int16, (1, 2, 3))
        assert array[()].tolist() == [[[i] * 3] * 2 for i in range(3)]
        assert file["fields/jpg/offset"].attrs["units"] == b"bytes"
        assert "array" not in file["fields/jpg"]
        assert (file.attrs["creator"], file.attrs["schema"]) == (b"packer-loaders", 1)


def test_h5dump_prints_it(small: Path) -> None:
    program = shutil.which("h5dump")
    if program is None:
        pytest.skip("needs the program h5dump (Debian package hdf5-tools)")
    text = subprocess.run([program, small], capture_output=True, text=True, check=True).stdout
    assert '"n01440764/cat 0", "n01440764/cat 1", "n01440764/cat 2"' in " ".join(text.split())
    label = text[text.index('DATASET "label"') :]
    assert "H5T_STD_I64LE" in label and "(0): 1, -1, 0" in label
    assert "(2,0,0): 2, 2, 2," in text
    assert "DATASPACE  SIMPLE { ( 3, 2, 3 ) / ( 3, 2, 3 ) }" in text


PYTABLES = """
import sys, tables
with tables.open_file(sys.argv[1]) as file:
    assert file.root.label[:].tolist() == [1, -1, 0]
    assert file.root.key[:].tolist() == [b"n01440764/cat %d" % i for i in range(3)]
    group = file.root.fields.jpg
    offset, length = int(group.offset[2]), int(group.length[2])
    assert bytes(file.root.data[offset : offset + length]) == bytes(range(18))
    assert file.get_node("/fields/ct.npy/array")[1].tolist() == [[1, 1, 1], [1, 1, 1]]
"""


def test_pytables_reads_it(small: Path) -> None:
    """In a process of its own: it brings its own HDF5 library."""
    if importlib.util.find_spec("tables") is None:
        pytest.skip("needs PyTables")
    done = subprocess.run([sys.executable, "-c", PYTABLES, small], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_bytes_of_a_small_shard_stay_the_same_for_ever(small: Path) -> None:
    shard = small.read_bytes()
    assert shard[:8] == b"\x89HDF\r\n\x1a\n"
    assert hashlib.sha256(shard).hexdigest() == "cd7844ff824e924dfc41988750f275645249c48f1cbbb9d46be64e2de6ff02f0"


@settings(deadline=None, max_examples=30)
@given(
    dtype=st.sampled_from(["<i2", ">i2", "u1", "<u4", "<i8", "<f2", ">f4", "<f8"]),
    shape=arrays.array_shapes(min_dims=0, max_dims=3, max_side=4),
    count=st.sampled_from([1, 2, 63, 64, 65, 130]),
    version=st.sampled_from([(1, 0), (2, 0)]),
)
def test_arrays_of_one_shape_and_type_are_a_dataset(
    dtype: str, shape: tuple[int, ...], count: int, version: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 255, (count, *shape), np.uint8).astype(dtype)
    samples = []
    for i in range(count):
        out = io.BytesIO()
        np.lib.format.write_array(out, np.array(values[i], dtype), version=version)
        samples.append(Sample(b"k%d" % i, (("x", payload(i % 5, i)), ("npy", out.getvalue()))))
    with folder() as tmp:
        wrote = write(tmp / "shard.h5", [samples[:7], samples[7:]])
        TestHdf5Format().check(tmp / "shard.h5", samples, wrote)
        with h5py.File(tmp / "shard.h5") as file:
            array = file["fields/npy/array"]
            assert array.dtype == np.dtype(dtype)
            assert np.array_equal(array[()], values)


def test_a_tree_of_several_levels(tmp_path: Path) -> None:
    samples = [Sample(b"%d" % i, (("npy", npy(np.array([i], "<i4"))),)) for i in range(64 * 64 + 1)]
    wrote = write(tmp_path / "shard.h5", [samples])
    with h5py.File(tmp_path / "shard.h5") as file:
        assert np.array_equal(file["fields/npy/array"][:, 0], np.arange(64 * 64 + 1))
    assert wrote.shard.bytes == (tmp_path / "shard.h5").stat().st_size


OTHERS = {
    "another shape": npy(np.zeros((3, 2), "<i2")),
    "another type": npy(np.zeros((2, 3), "<u2")),
    "Fortran order": npy(np.asfortranarray(np.zeros((2, 3), "<i2"))),
    "cut short": npy(np.zeros((2, 3), "<i2"))[:-1],
    "no array": b"not an array",
    "nothing": b"",
}


@pytest.mark.parametrize("which", [*OTHERS, "absent"])
def test_arrays_that_differ_stay_bytes_alone(tmp_path: Path, which: str) -> None:
    good = Sample(b"a", (("npy", npy(np.zeros((2, 3), "<i2"))), ("txt", b"")))
    other = Sample(b"b", (*((("npy", OTHERS[which]),) if which in OTHERS else ()), ("txt", b"x")))
    for samples in ([good, other], [other, good]):
        wrote = write(tmp_path / "shard.h5", [samples])
        TestHdf5Format().check(tmp_path / "shard.h5", samples, wrote)
        with h5py.File(tmp_path / "shard.h5") as file:
            assert "array" not in file["fields/npy"]
            assert read_all(file) == [(sample.key, dict(sample.files)) for sample in samples]


def test_objects_and_texts_in_arrays_are_never_unpickled(tmp_path: Path) -> None:
    for array in (np.array([{}], object), np.array(["a"]), np.zeros(2, [("a", "i4")]), np.zeros((0, 3), "i4")):
        out = io.BytesIO()
        np.lib.format.write_array(out, array, allow_pickle=True)
        samples = [Sample(b"a", (("npy", out.getvalue()),))]
        TestHdf5Format().check(tmp_path / "shard.h5", samples, write(tmp_path / "shard.h5", [samples]))
        with h5py.File(tmp_path / "shard.h5") as file:
            assert "array" not in file["fields/npy"]


def test_many_class_names_are_a_dataset(tmp_path: Path) -> None:
    names = tuple(f"class number {i:05d}" for i in range(20_000))
    writer = FORMAT.writer(str(tmp_path / "shard.h5"), about=About(names))
    writer.close()
    with h5py.File(tmp_path / "shard.h5") as file:
        assert [name.decode() for name in file["classes"][()]] == list(names)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_never_gives_another_sample_silently(data: st.DataObject) -> None:
    """Headers carry checksums; a flip in the columns shows in keys, labels and places, or is damage."""
    samples = [Sample(b"k%d" % i, (("jpg", payload(40, i)), ("cls", b"%d" % i))) for i in range(3)]
    with folder() as tmp:
        write(tmp / "shard.h5", [samples])
        whole = (tmp / "shard.h5").read_bytes()
        true = list(FORMAT.walk(str(tmp / "shard.h5")))
        at = data.draw(st.integers(HEAD + 126, len(whole) - 1))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        (tmp / "flipped.h5").write_bytes(flipped)
        try:
            found = list(FORMAT.walk(str(tmp / "flipped.h5")))
        except ShardError:
            return
        assert len(found) == len(true)


def test_what_is_no_shard_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.h5").touch()
    (tmp_path / "text.h5").write_text("no")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros((2, 3, 4), np.uint8)
    for name, words in [("empty.h5", "HDF5"), ("text.h5", "HDF5"), ("other.h5", "another schema"), ("gone", "no such")]:
        with pytest.raises(ShardError, match=words):
            list(FORMAT.walk(str(tmp_path / name)))


def test_data_elsewhere_is_not_followed(tmp_path: Path, small: Path) -> None:
    """A shard whose datasets are links, external files or virtual is none, whatever it says of itself."""
    (tmp_path / "secret").write_bytes(b"x" * 64)
    for how in ("external link", "external storage", "virtual"):
        copy = tmp_path / "copy.h5"
        with h5py.File(small) as source, h5py.File(copy, "w") as file:
            for name, value in source.attrs.items():
                file.attrs[name] = value
            for name in source:
                if name != "data":
                    source.copy(name, file)
            if how == "external link":
                file["data"] = h5py.ExternalLink(str(small), "/data")
            elif how == "external storage":
                file.create_dataset("data", (64,), "u1", external=[(str(tmp_path / "secret"), 0, 64)])
            else:
                layout = h5py.VirtualLayout((64,), "u1")
                layout[:] = h5py.VirtualSource(str(small), "data", (64,), "u1")
                file.create_virtual_dataset("data", layout)
        with pytest.raises(ShardError, match="not the dataset that it should be"):
            list(FORMAT.walk(str(copy)))


def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    """The same columns, for a payload that lies behind 5 GB of a sparse file."""
    from packer.formats.hdf5_objects import superblock
    from packer.formats.hdf5_table import Table

    table = Table()
    far = 5 << 30
    samples = [Sample(b"far", (("jpg", b"payload"),))]
    table.add(batch_of(samples), seen_of(samples), None, np.array([far]))
    tail, root = table.tail(About(), HEAD, far + 7)
    with (tmp_path / "big.h5").open("wb") as out:
        out.write(superblock(root, HEAD + far + 7 + len(tail)))
        out.seek(HEAD + far)
        out.write(b"payload" + tail)
    [found] = FORMAT.walk(str(tmp_path / "big.h5"))
    assert found.fields["jpg"][:2] == (HEAD + far, 7)
    with h5py.File(tmp_path / "big.h5") as file:
        assert read_far(file) == b"payload"


def read_far(file: h5py.File) -> bytes:
    at, size = int(file["fields/jpg/offset"][0]), int(file["fields/jpg/length"][0])
    return bytes(file["data"][at : at + size])


def test_the_checksum_of_structures_is_lookup3() -> None:
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551


@given(head=st.binary(max_size=80), rest=st.binary(max_size=300))
def test_a_checksum_of_zeros_can_become_that_of_a_head(head: bytes, rest: bytes) -> None:
    zeros = bytes(len(head))
    changed = crc32c_shift(crc32c(zeros) ^ crc32c(head), len(rest))
    assert crc32c(zeros + rest) ^ changed == crc32c(head + rest)
