"""Volumes in one file: NIfTI against nibabel, MetaImage and NRRD against ITK; axes, masks, layouts and errors."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ct_helpers import SALT, samples, shard

from packer.errors import SourceError
from packer.sources.ct.errors import CtError, MissingGeometryError, NotGrayscaleError, PixelDataError
from packer.sources.ct.metaimage import read_metaimage
from packer.sources.ct.nrrd import read_nrrd
from packer.sources.ct.options import CtOptions
from packer.sources.ct.privacy import Hasher
from packer.sources.ct.source import CtSource, read_stored
from packer.sources.ct.volume_file import VolumeFile

nibabel = pytest.importorskip("nibabel", reason="NIfTI files are written and read with nibabel")

SHAPE = (6, 5, 4)  # x, y, z of a patient
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def volume(dtype: str = "<i2", seed: int = 0) -> np.ndarray:
    """HU (x, y, z), every value its own."""
    return np.random.default_rng(seed).permutation(np.prod(SHAPE)).reshape(SHAPE).astype(dtype)


def save_nifti(
    path: Path, values: np.ndarray, affine: np.ndarray | None = None, scale: tuple[float, float] | None = None
) -> Path:
    image = nibabel.Nifti1Image(values, np.diag([0.8, 0.7, 2.5, 1.0]) if affine is None else affine)
    if scale is not None:
        image.header.set_slope_inter(*scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


def planes(path: Path) -> tuple[np.ndarray, VolumeFile]:
    file = VolumeFile(read_stored(os.fsencode(path)))
    return np.stack([file.plane(k).values for k in range(file.oriented.shape[0])]), file


def canonical(path: Path) -> np.ndarray:
    """(z, y, x) towards head, back and left, by nibabel alone."""
    image = nibabel.as_closest_canonical(nibabel.load(path))
    return np.asarray(image.dataobj)[::-1, ::-1, :].transpose(2, 1, 0)


AXES = [(order, signs) for order in itertools.permutations(range(3)) for signs in itertools.product((1, -1), repeat=3)]


@pytest.mark.parametrize(("order", "signs"), AXES)
def test_however_axes_lie_in_a_file_the_patient_comes_out_the_same(
    tmp_path: Path, order: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    straight = save_nifti(tmp_path / "straight.nii", volume())
    ornt = np.array([[axis, sign] for axis, sign in zip(order, signs, strict=True)])
    image = nibabel.load(straight).as_reoriented(ornt)
    nibabel.save(image, tmp_path / "turned.nii")
    got, turned = planes(tmp_path / "turned.nii")
    want, plain = planes(straight)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(turned.oriented.affine, plain.oriented.affine, atol=1e-5)


def test_rows_run_to_the_back_columns_to_the_left_slices_to_the_head(tmp_path: Path) -> None:
    values = volume()
    path = save_nifti(tmp_path / "a.nii.gz", values)  # x to the right, y to the front, z to the head
    got, file = planes(path)
    assert got.shape == (4, 5, 6)
    np.testing.assert_array_equal(got, values[::-1, ::-1, :].transpose(2, 1, 0))
    header = file.plane(1).header
    assert header.iop == (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    assert header.spacing_mm == (0.7, 0.8)
    # The first pixel of slice 1 is voxel (5, 4, 1), and LPS has x and y the other way.
    np.testing.assert_allclose(header.ipp, (-5 * 0.8, -4 * 0.7, 2.5), atol=1e-5)
    voxel = np.linalg.inv(LPS @ nibabel.load(path).affine) @ [*header.ipp, 1]
    np.testing.assert_allclose(voxel[:3], [5, 4, 1], atol=1e-4)


@pytest.mark.parametrize("dtype", ["<i2", ">i2", "<u2", ">u2", "u1", "<i4", "<f4", ">f8"])
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_values_of_any_type_are_those_of_nibabel(tmp_path: Path, dtype: str, name: str) -> None:
    values = volume(dtype)
    image = nibabel.Nifti1Image(
        values, np.eye(4), nibabel.Nifti1Header(endianness=dtype[0] if dtype[0] in "<>" else "<")
    )
    image.set_data_dtype(np.dtype(dtype))
    nibabel.save(image, tmp_path / name)
    got, _ = planes(tmp_path / name)
    assert got.dtype == (np.float32 if "f" in dtype else np.int16)
    np.testing.assert_array_equal(got, canonical(tmp_path / name))


@pytest.mark.parametrize(
    ("scale", "dtype"), [((1.0, -1024.0), np.int16), ((2.0, -24.0), np.int16), ((0.5, 3.0), np.float32)]
)
def test_slope_and_intercept_are_applied(tmp_path: Path, scale: tuple[float, float], dtype: type) -> None:
    path = save_nifti(tmp_path / "a.nii", volume(), scale=scale)
    got, _ = planes(path)
    assert got.dtype == dtype
    want = volume().astype(np.float64)[::-1, ::-1, :].transpose(2, 1, 0) * scale[0] + scale[1]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["anatomical.nii", "functional.nii", "example_nifti2.nii.gz", "standard.nii.gz"])
def test_real_files_of_nibabel(name: str) -> None:
    path = Path(nibabel.__file__).parent / "tests" / "data" / name
    if not path.exists():
        pytest.skip(f"this nibabel has no {name}")
    image = nibabel.load(path)
    if len([size for size in image.shape if size > 1]) > 3:
        with pytest.raises(PixelDataError, match="three dimensions"):
            planes(path)
        return
    got, file = planes(path)
    np.testing.assert_array_equal(got, np.maximum(canonical(path).astype(np.float64), -1024).astype(got.dtype))
    sheared = nibabel.as_closest_canonical(image).affine
    columns = (LPS @ sheared)[:3, :3] * [-1, -1, 1]
    np.testing.assert_allclose(file.oriented.affine[:3, :3], columns, atol=1e-4)


def test_a_file_that_does_not_say_where_left_is_is_refused(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(volume(), None)
    image.header["sform_code"] = image.header["qform_code"] = 0
    nibabel.save(image, tmp_path / "a.nii")
    with pytest.raises(MissingGeometryError, match="left and right are not known"):
        planes(tmp_path / "a.nii")


def test_damaged_nifti_files_are_errors(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii", volume())
    (tmp_path / "b.nii").write_bytes(path.read_bytes()[:-10])
    with pytest.raises(PixelDataError, match="truncated"):
        planes(tmp_path / "b.nii")
    packed = gzip.compress(path.read_bytes())
    (tmp_path / "c.nii.gz").write_bytes(packed[:-40])
    with pytest.raises(PixelDataError):
        planes(tmp_path / "c.nii.gz")
    (tmp_path / "d.nii").write_bytes(b"not a volume" * 40)
    with pytest.raises(PixelDataError):
        planes(tmp_path / "d.nii")
    rgb = np.zeros(SHAPE, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]))
    nibabel.save(nibabel.Nifti1Image(rgb, np.eye(4)), tmp_path / "e.nii")
    with pytest.raises(NotGrayscaleError):
        planes(tmp_path / "e.nii")


# ---------------------------------------------------------------- MetaImage and NRRD


def itk_image(seed: int = 0, direction: Any = None, dtype: str = "<i2") -> Any:
    sitk = pytest.importorskip("SimpleITK", reason="ITK is the oracle")
    image = sitk.GetImageFromArray(np.ascontiguousarray(volume(dtype, seed).transpose(2, 1, 0)))
    image.SetSpacing((0.8, 0.7, 2.5))
    image.SetOrigin((-10.0, -20.0, -30.0))
    if direction is not None:
        image.SetDirection(np.asarray(direction, float).ravel().tolist())
    return image


def lps_of_itk(image: Any) -> tuple[np.ndarray, np.ndarray]:
    import SimpleITK as sitk  # noqa: N813

    turned = sitk.DICOMOrient(image, "LPS")
    affine = np.eye(4)
    affine[:3, :3] = np.array(turned.GetDirection()).reshape(3, 3) * turned.GetSpacing()
    affine[:3, 3] = turned.GetOrigin()
    return sitk.GetArrayFromImage(turned), affine


DIRECTIONS = [
    None,
    [[-1, 0, 0], [0, -1, 0], [0, 0, 1]],
    [[0, 0, 1], [1, 0, 0], [0, -1, 0]],
    [[0, 1, 0], [0, 0, -1], [-1, 0, 0]],
    [[0.9800665778, -0.1986693308, 0], [0.1986693308, 0.9800665778, 0], [0, 0, 1]],
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["a.mhd", "z.mhd", "a.mha", "z.mha", "a.nrrd", "z.nrrd", "z.nii.gz"])
def test_values_and_geometry_are_those_of_itk(tmp_path: Path, name: str, direction: Any) -> None:
    sitk = pytest.importorskip("SimpleITK", reason="ITK is the oracle")
    image = itk_image(direction=direction)
    sitk.WriteImage(image, str(tmp_path / name), useCompression=name.startswith("z"))
    got, file = planes(tmp_path / name)
    want, affine = lps_of_itk(image)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(file.oriented.affine, affine, atol=1e-5)


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "<f4", "<f8"])
@pytest.mark.parametrize("name", ["a.mhd", "a.nrrd"])
def test_value_types_of_itk(tmp_path: Path, name: str, dtype: str) -> None:
    sitk = pytest.importorskip("SimpleITK", reason="ITK is the oracle")
    sitk.WriteImage(itk_image(dtype=dtype), str(tmp_path / name))
    np.testing.assert_array_equal(planes(tmp_path / name)[0], volume(dtype).transpose(2, 1, 0))


MHD = (
    "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = True\nCompressedData = False\n"
    "TransformMatrix = 1 0 0 0 1 0 0 0 1\nOffset = 0 0 0\nElementSpacing = 1 1 2\nDimSize = 6 5 4\n"
    "ElementType = MET_SHORT\nElementDataFile = a.raw\n"
)


def mhd(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = MHD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "a.mhd").write_text(text)
    (tmp_path / "a.raw").write_bytes(volume(">i2").tobytes(order="F"))
    return tmp_path / "a.mhd"


def test_a_big_endian_metaimage(tmp_path: Path) -> None:
    np.testing.assert_array_equal(planes(mhd(tmp_path))[0], volume().transpose(2, 1, 0))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("DimSize = 6 5 4", "DimSize = 6 5 4 2"), PixelDataError),
        (("DimSize = 6 5 4", "DimSize = 6 5 9"), PixelDataError),
        (("DimSize = 6 5 4", "DimSize = six"), PixelDataError),
        (("MET_SHORT", "MET_RGB"), NotGrayscaleError),
        (("Offset = 0 0 0\n", ""), MissingGeometryError),
        (("ElementSpacing = 1 1 2", "ElementSpacing = 1 1 0"), MissingGeometryError),
        (("TransformMatrix = 1 0 0 0 1 0 0 0 1", "TransformMatrix = 1 0 0 1 1 0 0 0 1"), MissingGeometryError),
        (("a.raw", "b.raw"), PixelDataError),
        (("a.raw", "../../etc/passwd"), PixelDataError),
        (("a.raw", "LIST"), PixelDataError),
        (("ElementDataFile", "Element"), PixelDataError),
        (("CompressedData = False", "CompressedData = True"), PixelDataError),
    ],
)
def test_faulty_metaimages_are_errors(tmp_path: Path, change: tuple[str, str], error: type[CtError]) -> None:
    with pytest.raises(error):
        planes(mhd(tmp_path, change))


def test_a_compressed_metaimage_that_is_cut_is_an_error(tmp_path: Path) -> None:
    path = mhd(tmp_path, ("CompressedData = False", "CompressedData = True"))
    packed = zlib.compress(volume(">i2").tobytes(order="F"))
    (tmp_path / "a.raw").write_bytes(packed)
    np.testing.assert_array_equal(planes(path)[0], volume().transpose(2, 1, 0))
    (tmp_path / "a.raw").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(PixelDataError, match="truncated"):
        planes(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no header", PixelDataError),
        ("NRRD0004\ntype: short\nsizes: 2 2\n\n", PixelDataError),
        ("NRRD0004\ntype: short\nsizes: 2 2 x\n\n", PixelDataError),
        ("NRRD0004\ntype: block\nsizes: 2 2 2\n\n", NotGrayscaleError),
        ("NRRD0004\ntype: short\nsizes: 2 2 2\n\n0123456789abcdef", MissingGeometryError),
        ("NRRD0004\ntype: short\nsizes: 2 2 2\ndata file: ../a.raw\n\n", PixelDataError),
    ],
)
def test_faulty_nrrds_are_errors(tmp_path: Path, text: str, error: type[CtError]) -> None:
    (tmp_path / "a.nrrd").write_text(text)
    with pytest.raises(error):
        read_nrrd(os.fsencode(tmp_path / "a.nrrd"))


def test_a_header_without_end_is_no_metaimage(tmp_path: Path) -> None:
    (tmp_path / "a.mhd").write_bytes(b"x" * 100_000)
    with pytest.raises(PixelDataError):
        read_metaimage(os.fsencode(tmp_path / "a.mhd"))


# ---------------------------------------------------------------- masks and layouts


def mask_of(values: np.ndarray) -> np.ndarray:
    return (values % 3).astype(np.uint8)


def nnunet(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, "labels": {"background": 0}}))
    for number in range(3):
        values = volume(seed=number)
        save_nifti(folder / "imagesTr" / f"case_{number:02d}_0000.nii.gz", values)
        save_nifti(folder / "labelsTr" / f"case_{number:02d}.nii.gz", mask_of(values))
    save_nifti(folder / "imagesTs" / "case_90_0000.nii.gz", volume(seed=9))


def test_nnunet(tmp_path: Path) -> None:
    nnunet(tmp_path / "in")
    result = shard(tmp_path / "in", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "layout: nnunet (dataset.json and imagesTr/ are there)" in result.stderr
    found = samples(tmp_path / "out")
    assert len(found) == 16
    by_patient: dict[str, list[str]] = {}
    for key, fields in sorted(found.items()):
        by_patient.setdefault(fields["json"]["patient"], []).append(key)
    for number in range(3):
        keys = by_patient[Hasher(SALT)(f"case_{number:02d}")]
        values = volume(seed=number)[::-1, ::-1, :].transpose(2, 1, 0)
        np.testing.assert_array_equal(np.stack([found[key]["ct.npy"] for key in keys]), values)
        masks = np.stack([found[key]["mask.npy"] for key in keys])
        assert masks.dtype == np.uint8
        np.testing.assert_array_equal(masks, mask_of(values))
    assert "mask.npy" not in found[by_patient[Hasher(SALT)("case_90")][0]]
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert {name: split["samples"] for name, split in manifest["splits"].items()} == {"train": 12, "test": 4}


def test_volumes_with_masks(tmp_path: Path) -> None:
    nnunet(tmp_path / "in")
    assert shard(tmp_path / "in", tmp_path / "out", "--sample", "volume", "--split", "0.5,0.5").exit_code == 0
    found = samples(tmp_path / "out")
    assert len(found) == 4
    first = found[Hasher(SALT)("case_00")]
    assert first["vol.npy"].shape == first["mask.npy"].shape == (4, 5, 6)
    np.testing.assert_allclose(
        first["json"]["affine"], planes(tmp_path / "in/imagesTr/case_00_0000.nii.gz")[1].oriented.affine
    )
    assert first["json"]["positions"] == [0.0, 2.5, 5.0, 7.5]
    assert first["json"]["slice_spacing_mm"] == 2.5


def test_a_description_without_ct_is_refused(tmp_path: Path) -> None:
    nnunet(tmp_path / "in")
    (tmp_path / "in" / "dataset.json").write_text(json.dumps({"modality": {"0": "MRI", "1": "T2"}}))
    result = shard(tmp_path / "in", tmp_path / "out")
    assert (result.exit_code, "the channels are MRI, T2; none is CT" in result.stderr) == (1, True)


def test_kits(tmp_path: Path) -> None:
    turn = np.array([[0, 0, -0.8, 0], [0, -0.8, 0, 0], [-2.5, 0, 0, 0], [0, 0, 0, 1.0]])  # slices along axis 0
    for number in range(2):
        values = volume(seed=number)
        save_nifti(tmp_path / "in" / f"case_{number:05d}" / "imaging.nii.gz", values, turn)
        save_nifti(tmp_path / "in" / f"case_{number:05d}" / "segmentation.nii.gz", mask_of(values), turn)
    result = shard(tmp_path / "in", tmp_path / "out", "--sample", "volume")
    assert "layout: kits" in result.stderr
    found = samples(tmp_path / "out")
    want = canonical(tmp_path / "in" / "case_00000" / "imaging.nii.gz")
    first = next(f for f in found.values() if f["json"]["patient"] == Hasher(SALT)("case_00000"))
    np.testing.assert_array_equal(first["vol.npy"], want)
    np.testing.assert_array_equal(first["mask.npy"], mask_of(want))
    assert first["vol.npy"].shape == (6, 5, 4)


@pytest.mark.parametrize(
    "mask",
    ["masks/a.nii.gz", "labelsTr/a.nii.gz", "Segmentations/a_seg.nii.gz", "images/a_mask.nii.gz", "images/a-label.nii"],
)
def test_masks_are_found_by_stem(tmp_path: Path, mask: str) -> None:
    save_nifti(tmp_path / "in" / "images" / "a.nii.gz", volume())
    save_nifti(tmp_path / "in" / mask, mask_of(volume()))
    assert shard(tmp_path / "in", tmp_path / "out", "--sample", "volume").exit_code == 0
    (fields,) = samples(tmp_path / "out").values()
    np.testing.assert_array_equal(fields["mask.npy"], mask_of(fields["vol.npy"]))
    assert fields["json"]["patient"] is None


@pytest.mark.parametrize(
    ("affine", "said"),
    [
        (np.diag([0.8, 0.7, 2.51, 1.0]), "axes of mask and image differ"),
        (np.array([[0.8, 0, 0, 0.5], [0, 0.7, 0, 0], [0, 0, 2.5, 0], [0, 0, 0, 1.0]]), "0.5 mm apart"),
    ],
)
def test_a_mask_that_does_not_lie_on_its_image_is_an_error(tmp_path: Path, affine: np.ndarray, said: str) -> None:
    save_nifti(tmp_path / "in" / "images" / "a.nii", volume())
    save_nifti(tmp_path / "in" / "masks" / "a.nii", mask_of(volume()), affine)
    result = shard(tmp_path / "in", tmp_path / "out")
    assert result.exit_code == 1
    assert "masks/a.nii: MaskGeometry" in result.stderr and said in result.stderr


def test_a_mask_of_another_shape_is_an_error(tmp_path: Path) -> None:
    save_nifti(tmp_path / "in" / "images" / "a.nii", volume())
    save_nifti(tmp_path / "in" / "masks" / "a.nii", mask_of(volume())[:, :, :3])
    assert "the mask has shape (3, 5, 6), its image (4, 5, 6)" in shard(tmp_path / "in", tmp_path / "out").stderr


@pytest.mark.parametrize(("top", "dtype"), [(255, np.uint8), (300, np.uint16)])
def test_labels_keep_their_numbers(tmp_path: Path, top: int, dtype: type) -> None:
    labels = (volume() % 2 * top).astype(np.float64)
    file = VolumeFile(read_stored(os.fsencode(save_nifti(tmp_path / "a.nii", labels))))
    assert file.labels(0).dtype == dtype
    np.testing.assert_array_equal(file.labels(0), canonical(tmp_path / "a.nii")[0])


@pytest.mark.parametrize("value", [-1, 70_000, 0.5])
def test_masks_of_other_values_are_errors(tmp_path: Path, value: float) -> None:
    labels = np.full(SHAPE, float(value))
    file = VolumeFile(read_stored(os.fsencode(save_nifti(tmp_path / "a.nii", labels))))
    with pytest.raises(PixelDataError, match="labels are"):
        file.labels(0)


def test_luna_like_metaimages(tmp_path: Path) -> None:
    sitk = pytest.importorskip("SimpleITK", reason="ITK writes the files")
    uids = [f"1.3.6.1.4.1.14519.{number}" for number in range(3)]
    for number, uid in enumerate(uids):
        for folder, divisor in ((f"subset{number}", 1000), ("seg-lungs-LUNA16", 3)):
            (tmp_path / "in" / folder).mkdir(parents=True, exist_ok=True)
            image = sitk.Modulus(itk_image(number), divisor)
            sitk.WriteImage(sitk.Cast(image, sitk.sitkInt16), str(tmp_path / "in" / folder / f"{uid}.mhd"))
    (tmp_path / "labels.csv").write_text(
        "seriesuid,class\n" + "".join(f"{uid},{i % 2}\n" for i, uid in enumerate(uids))
    )
    args = ("--labels", tmp_path / "labels.csv", "--key", "series_uid")
    assert shard(tmp_path / "in", tmp_path / "out", *args).exit_code == 0
    found = samples(tmp_path / "out")
    assert len(found) == 12
    for number, uid in enumerate(uids):
        fields = found[f"{Hasher(SALT)(uid)}_00002"]
        np.testing.assert_array_equal(fields["ct.npy"], volume(seed=number)[:, :, 2].T)
        np.testing.assert_array_equal(fields["mask.npy"], fields["ct.npy"] % 3)
        assert fields["cls"] == number % 2


def test_two_kinds_of_files_are_not_guessed_between(tmp_path: Path) -> None:
    save_nifti(tmp_path / "in" / "a.nii", volume())
    (tmp_path / "in" / "b.mhd").write_text(MHD)
    source = CtSource(str(tmp_path / "in"), CtOptions(Hasher(SALT), workers=1))
    with pytest.raises(SourceError, match=r"metaimage \(1 files\), nifti \(1 files\)"):
        source.scan()


def test_nothing_of_names_is_kept(tmp_path: Path) -> None:
    save_nifti(tmp_path / "in" / "Anna Miller" / "Anna Miller 1950.nii.gz", volume())
    assert shard(tmp_path / "in", tmp_path / "out").exit_code == 0
    for file in (tmp_path / "out").iterdir():
        assert b"Miller" not in file.read_bytes() and b"1950" not in file.read_bytes(), file.name
