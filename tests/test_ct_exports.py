"""Slices that others exported: arrays, and pictures of 8 and 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ct_helpers import SALT, samples, shard
from PIL import Image

from packer.sources.ct.arrays import natural
from packer.sources.ct.privacy import Hasher


def values(seed: int, low: int = 0, high: int = 3000) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (6, 8))


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def test_slices_of_npz_files_with_their_masks(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for case in ("case0001", "case0002"):
        for number in range(12):
            image = (values(number) / 3000).astype(np.float32)
            np.savez(
                tmp_path / "in" / f"{case}_slice{number}.npz",
                image=image,
                label=(values(number) % 9).astype(np.float32),
            )
    result = shard(tmp_path / "in", tmp_path / "out", "--split", "0.5,0.5")
    assert result.exit_code == 0, result.output
    assert "layout: arrays" in result.stderr
    found = samples(tmp_path / "out")
    assert len(found) == 24
    record = found[f"{Hasher(SALT)('folder /case0001')}_00011"]
    np.testing.assert_array_equal(record["ct.npy"], (values(11) / 3000).astype(np.float32))
    np.testing.assert_array_equal(record["mask.npy"], values(11) % 9)
    assert record["mask.npy"].dtype == np.uint8
    about = record["json"]
    assert (about["units"], about["index"], about["n_slices"]) == ("unknown", 11, 12)
    assert about["patient"] == Hasher(SALT)("case0001")
    for name in ("ipp", "iop", "spacing_mm", "slice_spacing_mm", "position_mm", "tilt_deg"):
        assert about[name] is None


def test_npy_slices_in_folders_of_patients_in_natural_order(tmp_path: Path) -> None:
    for number in range(11):
        path = tmp_path / "in" / "p1" / f"I{number + 1}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values(number, -1024, 3000).astype(">i2"))
    assert shard(tmp_path / "in", tmp_path / "out").exit_code == 0
    for number, (_, fields) in enumerate(sorted(samples(tmp_path / "out").items())):
        assert fields["ct.npy"].dtype == np.int16
        np.testing.assert_array_equal(fields["ct.npy"], values(number, -1024, 3000))
        assert fields["json"]["patient"] == Hasher(SALT)("p1")


def test_deeplesion_pictures_are_hounsfield_units_and_others_are_not_guessed(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "in" / "sick" / "p1" / f"{number}.png", (values(number, -1500, 3000) + 32768).astype(np.uint16))
        save(tmp_path / "in" / "well" / "p2" / f"{number}.png", values(number).astype(np.uint16))
        save(tmp_path / "in" / "well" / "p3" / f"{number}.png", (values(number) % 256).astype(np.uint8))
    result = shard(tmp_path / "in", tmp_path / "out", "--layout", "png16")
    assert result.exit_code == 0, result.output
    found = samples(tmp_path / "out")
    deep, plain, eight = (found[f"{Hasher(SALT)(name)}_00002"] for name in ("sick/p1", "well/p2", "well/p3"))
    np.testing.assert_array_equal(deep["ct.npy"], np.maximum(values(2, -1500, 3000), -1024))
    assert (deep["json"]["units"], plain["json"]["units"]) == ("HU", "unknown")
    np.testing.assert_array_equal(plain["ct.npy"], values(2))
    np.testing.assert_array_equal(eight["ct.npy"], values(2) % 256)
    assert (deep["cls"], plain["cls"]) == (0, 1)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["classes"] == ["sick", "well"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.npy", "NotGrayscale: an array of shape (2, 6, 8)"),
        ("b.npy", "PixelData"),
        ("c.npy", "NotGrayscale: an array of type"),
    ],
)
def test_arrays_that_are_no_slices_are_errors(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "in").mkdir()
    if name == "a.npy":
        np.save(tmp_path / "in" / name, np.zeros((2, 6, 8)))
    elif name == "b.npy":
        (tmp_path / "in" / name).write_bytes(b"\x93NUMPY nothing")
    else:
        np.save(tmp_path / "in" / name, np.zeros((6, 8), "U4"))
    result = shard(tmp_path / "in", tmp_path / "out")
    assert (result.exit_code, said in result.stderr) == (1, True), result.stderr


def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.array([[{}]], object), allow_pickle=True)
    assert shard(tmp_path / "in", tmp_path / "out").exit_code == 1


def test_colours_and_values_beyond_int16_are_errors(tmp_path: Path) -> None:
    save(tmp_path / "in" / "a" / "p" / "0.png", np.zeros((6, 8, 3), np.uint8))
    save(tmp_path / "in" / "a" / "p" / "1.png", np.array([[0, 60_000]], np.uint16))
    save(tmp_path / "in" / "a" / "p" / "2.png", values(0).astype(np.uint16))
    result = shard(tmp_path / "in", tmp_path / "out", "--layout", "png16", "--on-error", "skip")
    assert result.exit_code == 0, result.output
    assert "NotGrayscale" in result.stderr and "HURange: values from 0 to 60000" in result.stderr
    assert len(samples(tmp_path / "out")) == 1


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted([b"I10.png", b"I2.png", b"I1.png"], key=natural) == [b"I1.png", b"I2.png", b"I10.png"]
