"""CT datasets back as files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from ct_helpers import hu_slice, series_name, slice_json, write_dataset, write_slices

from packer import npy
from packer.cli import cli
from packer.errors import UsageError
from packer.packed import Packed
from packer.unpack_ct import grid_of, unpack_series


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slices(tmp_path_factory.mktemp("ct") / "out")


def volume(series: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int16]]:
    return np.stack([hu_slice(series, index) for index in range(6)])


def test_nifti_has_the_values_where_they_were(slices: Path, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="the extra [nifti]")
    result = unpack_series(slices, tmp_path / "dst", "nifti", workers=1)
    assert (result.series, result.files, result.left_out) == (4, 8, ())
    for number in range(4):
        image = nibabel.load(tmp_path / "dst" / "train" / f"{series_name(number)}.nii.gz")
        values = np.asarray(image.dataobj)
        assert values.dtype == np.int16
        assert np.array_equal(values.transpose(2, 1, 0), volume(number))
        assert image.header.get_zooms() == pytest.approx((0.8, 0.7, 2.5))
        # Column 3, row 5, slice 2: LPS by the record, and NIfTI's axes point to the right and to the front.
        left, back, up = -150 + 3 * 0.8, -140 + 5 * 0.7, -120 + 2 * 2.5
        assert image.affine @ [3, 5, 2, 1] == pytest.approx([-left, -back, up, 1])
        assert nibabel.aff2axcodes(image.affine) == ("L", "P", "S")
        mask = nibabel.load(tmp_path / "dst" / "train" / f"{series_name(number)}_mask.nii.gz")
        assert np.array_equal(np.asarray(mask.dataobj).transpose(2, 1, 0), volume(number) > 300)


def test_simpleitk_sees_the_same_geometry(slices: Path, tmp_path: Path) -> None:
    sitk = pytest.importorskip("SimpleITK", reason="an independent reader")
    pytest.importorskip("nibabel", reason="the extra [nifti]")
    unpack_series(slices, tmp_path / "dst", "nifti", workers=1)
    image = sitk.ReadImage(str(tmp_path / "dst" / "train" / f"{series_name(2)}.nii.gz"))
    assert image.GetSpacing() == pytest.approx((0.8, 0.7, 2.5), abs=1e-6)
    assert image.GetOrigin() == pytest.approx((-150, -140, -120), abs=1e-4)
    assert image.GetDirection() == pytest.approx((1, 0, 0, 0, 1, 0, 0, 0, 1), abs=1e-6)
    assert np.array_equal(sitk.GetArrayFromImage(image), volume(2))


def test_npy_with_its_geometry(slices: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["unpack", str(slices), str(tmp_path / "dst"), "--as", "npy", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == 12
    folder = tmp_path / "dst" / "train"
    for number in range(4):
        assert np.array_equal(np.load(folder / f"{series_name(number)}.npy"), volume(number))
        facts = json.loads((folder / f"{series_name(number)}.json").read_text())
        assert facts["spacing_mm"] == [0.7, 0.8]
        assert facts["slices"]["position_mm"] == [-120 + 2.5 * i for i in range(6)]
        assert np.array(facts["affine"]) @ [0, 0, 5, 1] == pytest.approx([-150, -140, -107.5, 1])


def test_a_gap_is_left_out_of_nifti_and_told(tmp_path: Path) -> None:
    pytest.importorskip("nibabel", reason="the extra [nifti]")
    samples = [
        (f"{series_name(s)}_{i:05d}", {"ct.npy": npy.encode(hu_slice(s, i)), "json": slice_json(s, i, 6, (40, 32))})
        for s in range(2) for i in range(6) if (s, i) != (1, 2)
    ]  # fmt: skip
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    result = CliRunner().invoke(cli, ["unpack", str(packed), str(tmp_path / "dst"), "--as", "nifti"])
    assert result.exit_code == 1
    assert f"{series_name(1)} is left out: its slices are not equally far apart" in result.stderr
    assert len(list((tmp_path / "dst" / "train").iterdir())) == 1
    assert unpack_series(packed, tmp_path / "npy", "npy", workers=1).series == 2


def test_volumes_and_their_affine(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="the extra [nifti]")
    affine = [[0.8, 0, 0, -150], [0, 0.7, 0.1, -140], [0, 0, 2.5, -120], [0, 0, 0, 1]]
    record = json.dumps({"affine": affine, "positions": [0, 2.5, 5.0]}).encode()
    stack = volume(0)[:3]
    packed = write_dataset(
        tmp_path / "out", {"train-000000.tar": [(series_name(0), {"vol.npy": npy.encode(stack), "json": record})]}
    )
    unpack_series(packed, tmp_path / "dst", "nifti", workers=1)
    image = nibabel.load(tmp_path / "dst" / "train" / f"{series_name(0)}.nii.gz")
    assert np.array_equal(np.asarray(image.dataobj).transpose(2, 1, 0), stack)
    assert image.affine == pytest.approx(np.diag([-1, -1, 1, 1]) @ affine, abs=1e-5)


def test_an_oblique_grid() -> None:
    iop = [0.8, 0.6, 0, 0, 0, -1]
    facts = [{"ipp": [10 + 3 * i * -0.6, 20 + 3 * i * 0.8, 5], "iop": iop, "spacing_mm": [2, 0.5]} for i in range(3)]
    grid = grid_of(facts)
    assert grid.regular
    assert grid.affine @ [1, 0, 0, 1] == pytest.approx([10.4, 20.3, 5, 1])
    assert grid.affine @ [0, 1, 0, 1] == pytest.approx([10, 20, 3, 1])
    assert grid.affine @ [0, 0, 2, 1] == pytest.approx([6.4, 24.8, 5, 1])


def test_without_records_series_are_left_out(tmp_path: Path) -> None:
    samples = [("s_00000", {"ct.npy": npy.encode(hu_slice(0, 0))})]
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    ((name, reason),) = unpack_series(packed, tmp_path / "dst", "npy", workers=1).left_out
    assert name == "s"
    assert "does not say where" in reason


def test_other_datasets_are_refused(tmp_path: Path) -> None:
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": [("a", {"cls": b"1"})]})
    with pytest.raises(UsageError, match="no CT"):
        unpack_series(packed, tmp_path / "dst", "npy")
    result = CliRunner().invoke(cli, ["unpack", str(packed), str(tmp_path / "dst"), "--as", "npy", "--limit", "1"])
    assert result.exit_code == 2


def test_a_packed_dicom_series_comes_back_as_its_fields(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="the extra [dicom]")
    from ct_files import make_series

    make_series(tmp_path / "in" / "p1", 4)
    (tmp_path / "salt").write_bytes(b"a salt for tests, long enough")
    common = ["--quiet", "--workers", "1"]
    shard = ["shard", tmp_path / "in", tmp_path / "out", "--id-salt-file", tmp_path / "salt", *common]
    assert CliRunner().invoke(cli, [str(arg) for arg in shard]).exit_code == 0
    result = CliRunner().invoke(cli, ["unpack", str(tmp_path / "out"), str(tmp_path / "dst"), *common])
    assert result.exit_code == 0, result.output
    dataset = Packed(tmp_path / "out")["train"]
    files = sorted(path.name for path in (tmp_path / "dst").iterdir())
    assert files == sorted(f"{dataset.key(i)}.{field}" for i in range(4) for field in ("ct.npy", "json"))
    assert (tmp_path / "dst" / f"{dataset.key(2)}.ct.npy").read_bytes() == dataset.read(2, "ct.npy")
    series = unpack_series(tmp_path / "out", tmp_path / "series", "npy", workers=1)
    assert (series.series, series.left_out) == (1, ())
