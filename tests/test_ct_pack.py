"""Packing a folder of DICOM files: series, order, records, splits and every error, by the program as users run it."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from ct_files import (
    FIVE_SLICES,
    LOCALIZERS,
    TEST_FILES,
    WITH_GAP,
    copy_series,
    make_series,
    make_slice,
    read,
    write,
)

from packer.cli import cli
from packer.packed import Packed
from packer.sources.ct.options import CtOptions
from packer.sources.ct.privacy import Hasher
from packer.sources.ct.source import CtSource

SALT = b"a salt for tests, long enough"


def scan(folder: Path, **options: Any) -> Any:
    return CtSource(str(folder), CtOptions(Hasher(SALT), workers=1, **options)).scan()


def run(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def shard(src: Path, out: Path, *args: object, code: int = 0) -> Any:
    salt = out.parent / "salt"
    salt.write_bytes(SALT)
    return run("shard", src, out, "--workers", 1, "--id-salt-file", salt, *args, code=code)


def read_tar(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def samples(out: Path) -> dict[str, dict[str, bytes]]:
    """Fields by key, of all shards, read with Python's tarfile."""
    found: dict[str, dict[str, bytes]] = {}
    for tar in sorted(out.glob("*.tar")):
        for name, data in read_tar(tar):
            key, _, field = name.partition(".")
            found.setdefault(key, {})[field] = data
    return found


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(fields["json"]) for _, fields in sorted(samples(out).items())]


def array(data: bytes) -> np.ndarray:
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


def test_a_real_series_is_ordered_by_position_whatever_its_names_say(tmp_path: Path) -> None:
    copy_series(FIVE_SLICES, tmp_path / "in")
    shard(tmp_path / "in", tmp_path / "out")
    found = samples(tmp_path / "out")
    assert all(re.fullmatch(r"[0-9a-f]{16}_0000[0-4]", key) for key in found)
    by_position = sorted((read(file) for file in FIVE_SLICES), key=lambda one: float(one.ImagePositionPatient[2]))
    assert [int(one.InstanceNumber) for one in by_position] == [10, 9, 8, 7, 6]
    for (_, fields), dataset in zip(sorted(found.items()), by_position, strict=True):
        np.testing.assert_array_equal(
            array(fields["ct.npy"]), dataset.pixel_array.astype(int) + int(dataset.RescaleIntercept)
        )
        assert json.loads(fields["json"])["ipp"] == list(dataset.ImagePositionPatient)


def test_order_and_spacing_are_those_of_itk(tmp_path: Path) -> None:
    sitk = pytest.importorskip("SimpleITK", reason="ITK is the oracle")
    folder = tmp_path / "in"
    copy_series(FIVE_SLICES, folder)
    names = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder))
    image = sitk.ReadImage(names)
    shard(folder, tmp_path / "out", "--sample", "volume")
    ((_, fields),) = samples(tmp_path / "out").items()
    record = json.loads(fields["json"])
    np.testing.assert_array_equal(array(fields["vol.npy"]), sitk.GetArrayFromImage(image))
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    np.testing.assert_allclose(record["affine"], affine, atol=1e-6)
    assert record["slice_spacing_mm"] == pytest.approx(image.GetSpacing()[2])
    assert record["positions"] == sorted(record["positions"]) and len(record["positions"]) == 5


def test_a_record_holds_what_is_documented_and_nothing_else(tmp_path: Path) -> None:
    make_series(tmp_path / "in", 3, ConvolutionKernel="B30f")
    shard(tmp_path / "in", tmp_path / "out")
    first = records(tmp_path / "out")[0]
    hashed = Hasher(SALT)
    assert first == {
        "patient": hashed("P1"),
        "study": hashed("1.2.3"),
        "series": hashed("1.2.3.4"),
        "index": 0,
        "n_slices": 3,
        "position_mm": 0.0,
        "ipp": [-10.0, -20.0, 0.0],
        "iop": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        "spacing_mm": [0.5, 0.75],
        "slice_spacing_mm": 2.5,
        "thickness_mm": 3.0,
        "rows": 12,
        "cols": 16,
        "units": "HU",
        "kvp": 120.0,
        "kernel": "B30f",
        "lossy": False,
        "pad_pixels": 0,
        "floored_pixels": 0,
        "tilt_deg": 0.0,
        "schema": "packer-ct-1",
    }


def test_the_index_knows_series_and_slice(tmp_path: Path) -> None:
    for number in range(3):
        make_series(tmp_path / "in" / f"p{number}", 4, series=f"1.{number}", patient=f"p{number}")
    shard(tmp_path / "in", tmp_path / "out")
    split = Packed(str(tmp_path / "out"))["train"]
    by_series: dict[int, list[int]] = {}
    for series, number in zip(split.rows["series"].tolist(), split.rows["slice"].tolist(), strict=True):
        by_series.setdefault(series, []).append(number)
    assert by_series == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
    run("verify", tmp_path / "out")


def test_a_series_is_never_split_over_shards(tmp_path: Path) -> None:
    for number in range(6):
        make_series(tmp_path / "in" / f"p{number}", 5, series=f"1.{number}")
    shard(tmp_path / "in", tmp_path / "out", "--shard-samples", 7)
    homes: dict[str, set[str]] = {}
    for tar in (tmp_path / "out").glob("*.tar"):
        for name, _ in read_tar(tar):
            homes.setdefault(name[:16], set()).add(tar.name)
    assert len(homes) == 6 and all(len(home) == 1 for home in homes.values())
    assert len(list((tmp_path / "out").glob("*.tar"))) > 1


def test_a_series_larger_than_a_shard_gets_its_own_with_a_warning(tmp_path: Path) -> None:
    make_series(tmp_path / "in", 5)
    result = shard(tmp_path / "in", tmp_path / "out", "--shard-samples", 2)
    assert "1 series are larger than --shard-size or --shard-samples" in result.stderr


def test_patients_stay_on_one_side_of_a_split(tmp_path: Path) -> None:
    for patient in range(12):
        for number in range(2):
            make_series(
                tmp_path / "in" / f"{patient}/{number}", 3, patient=f"P{patient}", series=f"1.{patient}.{number}"
            )
    shard(tmp_path / "in", tmp_path / "out", "--split", "0.5,0.5")
    sides: dict[str, set[str]] = {}
    for tar in (tmp_path / "out").glob("*.tar"):
        for name, data in read_tar(tar):
            if name.endswith("json"):
                sides.setdefault(json.loads(data)["patient"], set()).add(tar.name.split("-")[0])
    assert len(sides) == 12 and all(len(side) == 1 for side in sides.values())
    assert set.union(*sides.values()) == {"train", "val"}


def test_a_split_needs_to_know_whose_slices_are(tmp_path: Path) -> None:
    for number in range(2):
        copy_series(make_series(tmp_path / f"s{number}", 3, patient="", series=f"1.{number}"), tmp_path / "in" / "x")
        for file in (tmp_path / "in" / "x").iterdir():
            file.rename(tmp_path / "in" / f"case{number}_{file.name}")
    (tmp_path / "in" / "x").rmdir()
    result = shard(tmp_path / "in", tmp_path / "out", "--split", "0.5,0.5", code=2)
    assert "--patient-regex" in result.stderr
    shard(tmp_path / "in", tmp_path / "out", "--split", "0.5,0.5", "--patient-regex", r"case(\d)")
    assert {record["patient"] for record in records(tmp_path / "out")} == {Hasher(SALT)("0"), Hasher(SALT)("1")}


def test_a_patient_on_both_sides_of_the_sources_own_splits_is_refused(tmp_path: Path) -> None:
    make_series(tmp_path / "in" / "train", 3, series="1.1")
    make_series(tmp_path / "in" / "test", 3, series="1.2")
    result = shard(tmp_path / "in", tmp_path / "out", code=2)
    assert "1 patient(s) have samples in more than one split" in result.stderr


def test_a_missing_slice_is_a_warning_for_slices_and_an_error_for_volumes(tmp_path: Path) -> None:
    files = copy_series(FIVE_SLICES, tmp_path / "in")
    files[2].unlink()
    result = shard(tmp_path / "in", tmp_path / "out")
    assert "MissingSlice" in result.stderr
    assert {record["slice_spacing_mm"] for record in records(tmp_path / "out")} == {None}
    result = shard(tmp_path / "in", tmp_path / "vol", "--sample", "volume", code=1)
    assert "MissingSlice: a gap of 5.000 mm" in result.stderr and "median is 2.500" in result.stderr


def test_a_real_gap_is_found() -> None:
    found = scan(WITH_GAP[0].parent, sample="volume")
    assert "202.500 mm" in found.problems[0][1]


def test_uneven_spacing_is_no_missing_slice(tmp_path: Path) -> None:
    def shift(dataset: Any, number: int) -> None:
        dataset.ImagePositionPatient[2] += [0, 0, 0.6, 0, 0][number]

    copy_series(FIVE_SLICES, tmp_path / "in", shift)
    assert "Spacing: slices lie 1.900 to 3.100 mm apart" in scan(tmp_path / "in", sample="volume").problems[0][1]


def test_jitter_below_a_tenth_is_even_spacing(tmp_path: Path) -> None:
    def shift(dataset: Any, number: int) -> None:
        dataset.ImagePositionPatient[2] += [0, 0, 0.1, 0, -0.05][number]

    copy_series(FIVE_SLICES, tmp_path / "in", shift)
    assert not scan(tmp_path / "in", sample="volume").problems


def test_a_repeated_slice_is_left_out_and_counted(tmp_path: Path) -> None:
    files = copy_series(FIVE_SLICES, tmp_path / "in")
    (tmp_path / "in" / "zzz.dcm").write_bytes(files[1].read_bytes())
    result = shard(tmp_path / "in", tmp_path / "out")
    assert len(samples(tmp_path / "out")) == 5
    assert "1 × repeats the slice at its position" in result.stderr


def test_two_different_slices_at_one_position_are_an_error(tmp_path: Path) -> None:
    def move(dataset: Any, number: int) -> None:
        if number == 1:
            dataset.ImagePositionPatient[2] = read(FIVE_SLICES[2]).ImagePositionPatient[2]

    copy_series(FIVE_SLICES, tmp_path / "in", move)
    result = shard(tmp_path / "in", tmp_path / "out", code=1)
    assert "DuplicateSlice: two slices lie at" in result.stderr


def test_a_tilted_gantry_is_measured_and_refused_for_volumes(tmp_path: Path) -> None:
    def lean(dataset: Any, number: int) -> None:
        dataset.ImagePositionPatient[1] += float(np.tan(np.radians(15)) * dataset.ImagePositionPatient[2])

    copy_series(FIVE_SLICES, tmp_path / "in", lean)
    shard(tmp_path / "in", tmp_path / "out")
    assert {record["tilt_deg"] for record in records(tmp_path / "out")} == {15.0}
    assert "GantryTilt: the stack leans by 15.00 degrees" in scan(tmp_path / "in", sample="volume").problems[0][1]


def test_slices_along_an_oblique_normal_are_not_tilted(tmp_path: Path) -> None:
    turn = np.radians(20)
    row, col = np.array([1.0, 0, 0]), np.array([0, np.cos(turn), np.sin(turn)])
    normal = np.cross(row, col)
    for number in range(4):
        dataset = make_slice(np.full((4, 4), number, np.uint16))
        dataset.ImageOrientationPatient = [*row, *col]
        dataset.ImagePositionPatient = list(np.round(normal * 3 * number, 6))
        write(dataset, tmp_path / "in" / f"{number}.dcm")
    shard(tmp_path / "in", tmp_path / "out")
    assert [record["tilt_deg"] for record in records(tmp_path / "out")] == [0.0] * 4
    assert {record["slice_spacing_mm"] for record in records(tmp_path / "out")} == {3.0}


def test_a_series_of_two_geometries_becomes_two(tmp_path: Path) -> None:
    make_series(tmp_path / "in" / "a", 4)
    for number in range(3):
        dataset = make_slice(np.full((8, 8), number, np.uint16), z=100 + number)
        write(dataset, tmp_path / "in" / "b" / f"{number}.dcm")
    result = shard(tmp_path / "in", tmp_path / "out")
    assert "1 series with several geometries were taken apart" in result.stderr
    counts = {record["series"]: record["n_slices"] for record in records(tmp_path / "out")}
    assert sorted(counts.values()) == [3, 4]
    assert "MixedGeometry" in shard(tmp_path / "in", tmp_path / "no", "--strict-series", code=1).stderr


def test_localizers_are_dropped_and_counted(tmp_path: Path) -> None:
    copy_series([*FIVE_SLICES, *LOCALIZERS], tmp_path / "in")
    found = scan(tmp_path / "in")
    assert len(found) == 5
    assert found.skipped_by_reason == {"a localizer, no slice of the series": len(LOCALIZERS)}


def test_slices_without_uids_belong_to_their_folder(tmp_path: Path) -> None:
    def forget(dataset: Any, number: int) -> None:
        dataset.SeriesInstanceUID = dataset.StudyInstanceUID = dataset.SOPInstanceUID = ""

    copy_series(FIVE_SLICES, tmp_path / "in" / "a", forget)
    copy_series(FIVE_SLICES, tmp_path / "in" / "b", forget)
    shard(tmp_path / "in", tmp_path / "out")
    found = records(tmp_path / "out")
    assert len({record["series"] for record in found}) == 2
    assert {record["n_slices"] for record in found} == {5}
    assert {record["study"] for record in found} == {None}


def test_one_uid_under_two_patients_is_two_series(tmp_path: Path) -> None:
    make_series(tmp_path / "in" / "a", 3, patient="A")
    make_series(tmp_path / "in" / "b", 3, patient="B")
    shard(tmp_path / "in", tmp_path / "out")
    assert len({(record["patient"], record["series"]) for record in records(tmp_path / "out")}) == 2
    assert len(samples(tmp_path / "out")) == 6


def test_few_slices_are_kept_as_slices_alone(tmp_path: Path) -> None:
    make_series(tmp_path / "in", 2)
    assert "fewer than 3 slices" in shard(tmp_path / "in", tmp_path / "out").stderr
    assert len(samples(tmp_path / "out")) == 2
    result = shard(tmp_path / "in", tmp_path / "vol", "--sample", "volume", code=1)
    assert "NoSlices" in result.stderr


def test_a_broken_file_stops_packing_or_is_left_out_and_told(tmp_path: Path) -> None:
    files = make_series(tmp_path / "in", 5)
    short = read(files[3])
    short.PixelData = bytes(10)
    write(short, files[3])
    (tmp_path / "in" / "text.dcm").write_bytes(b"x" * 200)
    result = shard(tmp_path / "in", tmp_path / "out", code=1)
    assert "text.dcm: NotDicom" in result.stderr
    (tmp_path / "in" / "text.dcm").unlink()
    result = shard(tmp_path / "in", tmp_path / "out", code=1)
    assert "003.dcm: PixelData: 10 bytes of pixels where 384 are needed" in result.stderr
    result = shard(tmp_path / "in", tmp_path / "skip", "--on-error", "skip")
    assert "003.dcm: PixelData: 10 bytes" in result.stderr
    assert [record["index"] for record in records(tmp_path / "skip")] == [0, 1, 2, 4]
    split = Packed(str(tmp_path / "skip"))["train"]
    assert split.rows["slice"].tolist() == [0, 1, 2, 4]
    listed = json.loads((tmp_path / "skip" / "report.json").read_text())["skipped"]
    assert [(one["path"], one["kind"]) for one in listed] == [(None, "broken")]


def test_a_dry_run_lists_every_problem_and_writes_nothing(tmp_path: Path) -> None:
    files = make_series(tmp_path / "in", 6)
    for number, edit in enumerate(["RescaleSlope", "PixelSpacing"]):
        dataset = read(files[number])
        delattr(dataset, edit)
        write(dataset, files[number])
    short = read(files[5])
    short.PixelData = bytes(10)
    write(short, files[5])
    result = shard(tmp_path / "in", tmp_path / "out", "--dry-run", "--check", "header", "--on-error", "skip")
    for expected in ("000.dcm: MissingRescale", "001.dcm: MissingGeometry", "005.dcm: PixelData"):
        assert expected in result.stdout
    assert "3 problems found" in result.stdout
    assert not (tmp_path / "out").exists()


def test_labels_of_series_and_patients(tmp_path: Path) -> None:
    for number in range(3):
        make_series(tmp_path / "in" / f"p{number}", 3, patient=f"P{number}", series=f"1.2.{number}")
    (tmp_path / "labels.csv").write_text("seriesuid,age,finding\n1.2.0,61,yes\n1.2.1,62,no\n1.2.2,63,yes\n")
    options = ("--labels", tmp_path / "labels.csv", "--key", "series_uid", "--label-col", "finding")
    shard(tmp_path / "in", tmp_path / "out", *options)
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert manifest["classes"] == ["no", "yes"]
    found = samples(tmp_path / "out")
    by_series = {json.loads(fields["json"])["series"]: fields["cls"] for fields in found.values()}
    assert by_series == {Hasher(SALT)(f"1.2.{n}"): label for n, label in enumerate([b"1", b"0", b"1"])}
    (tmp_path / "labels.csv").write_text("PatientID,label\nP0,1\nP1,0\n")
    result = shard(tmp_path / "in", tmp_path / "no", "--labels", tmp_path / "labels.csv", "--key", "patient", code=1)
    assert "no row in labels.csv" in result.stderr
    result = shard(tmp_path / "in", tmp_path / "no", "--labels", tmp_path / "labels.csv", "--label-col", "x", code=2)
    assert "no column 'x'" in result.stderr


def test_windows_become_the_channels_of_a_picture(tmp_path: Path) -> None:
    from PIL import Image

    files = make_series(tmp_path / "in", 3)
    hu = read(files[0]).pixel_array.astype(np.float64) - 1024
    windows = [(-600.0, 1500.0), (100.0, 700.0), (40.0, 400.0)]
    shard(tmp_path / "in", tmp_path / "out", *[a for c, w in windows for a in ("--window", f"{c},{w}")])
    fields = samples(tmp_path / "out")
    first = fields[min(fields)]
    picture = np.asarray(Image.open(io.BytesIO(first["png"])))
    want = np.stack([np.clip((hu - (c - w / 2)) / w, 0, 1) * 255 for c, w in windows], axis=-1)
    assert picture.shape == (12, 16, 3)
    np.testing.assert_allclose(picture, want, atol=0.51)
    record = json.loads(first["json"])
    assert (record["units"], record["windows"]) == ("window", [list(window) for window in windows])
    shard(tmp_path / "in", tmp_path / "one", "--window", "40,400")
    assert Image.open(io.BytesIO(samples(tmp_path / "one")[min(fields)]["png"])).mode == "L"


def test_npy_zst_holds_the_same_bytes(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the codec")
    make_series(tmp_path / "in", 3, slope="0.5")
    shard(tmp_path / "in", tmp_path / "plain")
    shard(tmp_path / "in", tmp_path / "small", "--codec", "npy.zst")
    plain, small = samples(tmp_path / "plain"), samples(tmp_path / "small")
    for key, fields in plain.items():
        assert zstandard.ZstdDecompressor().decompress(small[key]["ct.npy.zst"]) == fields["ct.npy"]
        assert array(fields["ct.npy"]).dtype == np.float32
    run("verify", tmp_path / "small")


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    for number in range(4):
        make_series(tmp_path / "in" / f"p{number}", 4, series=f"1.{number}", seed=number)
    shard(tmp_path / "in", tmp_path / "a", "--shard-samples", 5)
    shard(tmp_path / "in", tmp_path / "b", "--shard-samples", 5, "--workers", 2)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_a_file_that_changed_since_the_scan_is_never_packed(tmp_path: Path) -> None:
    from packer.errors import SourceChangedError

    files = make_series(tmp_path / "in", 3)
    source = CtSource(str(tmp_path / "in"), CtOptions(Hasher(SALT), workers=1))
    places = list(source.scan().places)
    files[0].write_bytes(files[0].read_bytes() + b"\0\0")
    with pytest.raises(SourceChangedError, match=r"000\.dcm has"):
        source.reader().make(places[0])
    files[1].unlink()
    with pytest.raises(SourceChangedError, match=r"001\.dcm: No such file"):
        source.reader().make(places[2])


def test_ct_is_recognised_and_named_and_pictures_are_not(tmp_path: Path) -> None:
    make_series(tmp_path / "in" / "deep" / "er", 3)
    for file in (tmp_path / "in" / "deep" / "er").iterdir():
        file.rename(file.with_suffix(""))
    result = shard(tmp_path / "in", tmp_path / "out", "--dry-run")
    assert "layout   dicom (there are files named .dcm, or with the letters DICM at byte 128)" in result.stdout
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / "a.png")
    result = run("shard", tmp_path / "pictures", tmp_path / "p", "--assume-hu", code=2)
    assert "--assume-hu is about CT data" in result.stderr
    assert "flat" in run("shard", tmp_path / "pictures", tmp_path / "p", "--dry-run").stdout


def test_an_empty_archive_says_what_it_holds(tmp_path: Path) -> None:
    write(read(TEST_FILES / "MR_small.dcm"), tmp_path / "in" / "a.dcm")
    result = shard(tmp_path / "in", tmp_path / "out", code=1)
    assert "NoSlices" in result.stderr and "not a CT image" in result.stderr


def test_a_packed_dataset_keeps_series_whole_and_patients_apart_when_packed_again(tmp_path: Path) -> None:
    for patient in range(8):
        for number in range(2):
            make_series(
                tmp_path / "in" / f"{patient}/{number}", 3, patient=f"P{patient}", series=f"1.{patient}.{number}"
            )
    shard(tmp_path / "in", tmp_path / "out")
    run("shard", tmp_path / "out", tmp_path / "again", "--split", "0.5,0.5", "--shard-samples", 4, "--workers", 1)
    sides: dict[str, set[str]] = {}
    homes: dict[str, set[str]] = {}
    for tar in (tmp_path / "again").glob("*.tar"):
        for name, data in read_tar(tar):
            homes.setdefault(name[:16], set()).add(tar.name)
            if name.endswith("json"):
                sides.setdefault(json.loads(data)["patient"], set()).add(tar.name.split("-")[0])
    assert len(sides) == 8 and all(len(side) == 1 for side in sides.values())
    assert len(homes) == 16 and all(len(home) == 1 for home in homes.values())
    for split in Packed(str(tmp_path / "again")).values():
        keys = [key.decode() for key in split.names.keys]
        assert [int(key[-5:]) for key in keys] == split.rows["slice"].tolist()
        series = {(key[:16], number) for key, number in zip(keys, split.rows["series"].tolist(), strict=True)}
        assert len(series) == len({key[:16] for key in keys})
    run("verify", tmp_path / "again")
