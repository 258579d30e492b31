"""HDF5 files that others wrote, with every layout that is known, and what is refused of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import Result
from PIL import Image

from packer.errors import ShardError
from packer.formats.hdf5 import FORMAT
from packer.formats.hdf5_foreign import write_out
from packer.packed import Packed

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 6, 7, 3), np.uint8)
LABELS = np.array([3, 1, 0, 2, 1])


def jpeg(number: int) -> np.ndarray:
    out = io.BytesIO()
    Image.fromarray(IMAGES[number]).save(out, "jpeg")
    return np.frombuffer(out.getvalue(), np.uint8)


def samples(path: Path) -> dict[str, dict[str, bytes]]:
    """What a stranger's file becomes: fields by key."""
    out = path.with_name("out.h5")
    count = write_out(str(path), str(out))
    whole = out.read_bytes()
    found = {
        sample.key.decode(): {name: whole[at : at + size] for name, (at, size, _) in sample.fields.items()}
        for sample in FORMAT.walk(str(out))
    }
    assert len(found) == count
    return found


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("how", [{}, {"chunks": (2, 6, 7, 3), "compression": "gzip"}])
def test_dense_pictures_with_labels(tmp_path: Path, how: dict[str, object]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=IMAGES, **how)
        file["labels"] = LABELS[:, None]
        file["age"] = np.arange(5, dtype="f4")
    found = samples(tmp_path / "a.h5")
    assert list(found) == [f"a/{i:08d}" for i in range(5)]
    for i, fields in enumerate(found.values()):
        assert np.array_equal(pixels(fields["png"]), IMAGES[i])
        assert fields["cls"] == b"%d" % LABELS[i]
        assert np.load(io.BytesIO(fields["npy"])) == np.float32(i)


def test_grey_pictures_and_slices_of_other_types(tmp_path: Path) -> None:
    volume = RNG.integers(-1000, 1000, (4, 3, 2), np.int16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["ct"], file["mask"] = volume, (volume > 0).astype("u1")
    for i, fields in enumerate(samples(tmp_path / "a.h5").values()):
        assert np.array_equal(np.load(io.BytesIO(fields["npy"])), volume[i])
        assert np.array_equal(pixels(fields["png"]), volume[i] > 0)


def test_encoded_pictures_of_varying_length_and_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        column = file.create_dataset("images", (5,), h5py.vlen_dtype(np.uint8))
        for i in range(5):
            column[i] = jpeg(i)
        file["filename"] = [f"c/p{i}.v.jpg" for i in range(5)]
        file["caption"] = [f"é {i}" for i in range(5)]
        file["y"] = LABELS.astype("u1")
    found = samples(tmp_path / "a.h5")
    assert list(found) == [f"c/p{i}%2Ev" for i in range(5)]
    for i, fields in enumerate(found.values()):
        assert fields == {"jpg": jpeg(i).tobytes(), "txt": f"é {i}".encode(), "cls": b"%d" % LABELS[i]}


def test_a_group_for_each_sample_and_a_dataset_for_each(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "groups.h5", "w") as file, h5py.File(tmp_path / "files.h5", "w") as files:
        for i in range(3):
            file[f"s{i}/left"], file[f"s{i}/right"], file[f"s{i}/label"] = IMAGES[i], IMAGES[i + 1], LABELS[i]
            file[f"s{i}/raw"] = np.void(b"\0\1\0")
            files[f"p{i}.jpg"] = jpeg(i)
    groups = samples(tmp_path / "groups.h5")
    assert list(groups) == [f"groups/s{i}" for i in range(3)]
    assert sorted(groups["groups/s0"]) == ["bin", "cls", "left.png", "right.png"]
    assert groups["groups/s1"]["bin"] == b"\0\1\0"
    assert np.array_equal(pixels(groups["groups/s1"]["right.png"]), IMAGES[2])
    assert samples(tmp_path / "files.h5") == {f"files/p{i}": {"jpg": jpeg(i).tobytes()} for i in range(3)}


def test_what_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = IMAGES
    layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
    layout[:] = h5py.VirtualSource("../secret.h5", "x", IMAGES.shape, np.uint8)
    gone = h5py.VirtualLayout(IMAGES.shape, np.uint8)
    gone[:] = h5py.VirtualSource("gone.h5", "x", IMAGES.shape, np.uint8)
    cases = {
        "not followed": lambda f: f.__setitem__("x", h5py.ExternalLink("../secret.h5", "/x")),
        "SoftLink": lambda f: f.__setitem__("x", h5py.SoftLink("/y")),
        "external storage": lambda f: f.create_dataset("x", (9,), "u1", external=[(str(tmp_path / "secret.h5"), 0, 9)]),
        "outside its folder": lambda f: f.create_virtual_dataset("x", layout),
        "no such file": lambda f: f.create_virtual_dataset("x", gone),
        "references": lambda f: f.create_dataset("x", data=[f.ref], dtype=h5py.ref_dtype),
        "claims": lambda f: f.create_dataset("x", (10**7, 10**3), "u1", chunks=(1, 10**3)),
    }
    for words, make in cases.items():
        with h5py.File(tmp_path / "in" / "a.h5", "w") as file:
            make(file)
        with pytest.raises(ShardError, match=words):
            samples(tmp_path / "in" / "a.h5")


def test_virtual_datasets_over_files_of_their_folder_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["x"] = IMAGES
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
        layout[:] = h5py.VirtualSource("part.h5", "x", IMAGES.shape, np.uint8)
        file.create_virtual_dataset("images", layout)
    assert [pixels(fields["png"]).tolist() for fields in samples(tmp_path / "a.h5").values()] == IMAGES.tolist()


def test_what_cannot_be_told_is_refused_with_shapes(tmp_path: Path) -> None:
    cases = {
        r"/images \(5, 6, 7, 3\) uint8 and /labels \(4,\)": {"images": IMAGES, "labels": LABELS[:4]},
        "datasets .* beside groups": {"images": IMAGES, "g/x": LABELS},
        "neither numbers, text nor bytes": {"x": np.zeros(3, [("a", "i4")])},
        "no field beside the label": {"labels": LABELS},
        "no sample in it": {},
        "does not hold a sample's datasets": {"a/b/c": IMAGES},
    }
    for words, content in cases.items():
        with h5py.File(tmp_path / "a.h5", "w") as file:
            for name, value in content.items():
                file[name] = value
        with pytest.raises(ShardError, match=words):
            samples(tmp_path / "a.h5")


def test_packer_shard_takes_it_as_a_source(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    (tmp_path / "src").mkdir()
    for split in ("train", "test"):
        with h5py.File(tmp_path / "src" / f"{split}.h5", "w") as file:
            file.create_dataset("images", data=IMAGES, compression="gzip")
            file["labels"] = LABELS
    run_packer("shard", tmp_path / "src", tmp_path / "out", "--no-shuffle")
    dataset = Packed(tmp_path / "out")
    assert sorted(dataset) == ["test", "train"]
    assert dataset["test"].rows["label"].tolist() == LABELS.tolist()
    assert np.array_equal(pixels(dataset["test"].read(2, "png") or b""), IMAGES[2])
    assert "convert it with 'packer shard'" in run_packer("index", tmp_path / "src", exit_code=1).stderr


def test_a_cut_or_foreign_file_is_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = IMAGES
    whole = (tmp_path / "a.h5").read_bytes()
    for end in (0, 7, 90, len(whole) // 2, len(whole) - 1):
        (tmp_path / "b.h5").write_bytes(whole[:end])
        with pytest.raises(ShardError):
            samples(tmp_path / "b.h5")
