"""DICOM slices: Hounsfield units against pydicom's and ITK's, headers, and what is wrong with files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ct_files import FIVE_SLICES, LOCALIZERS, TEST_FILES, WITH_GAP, make_slice, read, write

from packer.sources.ct.dicom import DicomFile, DicomOptions, read_headers
from packer.sources.ct.errors import (
    CtError,
    DecoderMissingError,
    HURangeError,
    MissingGeometryError,
    MissingRescaleError,
    NotDicomError,
    PixelDataError,
)
from packer.sources.ct.slices import NotASliceError, Plane

REAL = [
    TEST_FILES / "CT_small.dcm",
    TEST_FILES / "J2K_pixelrep_mismatch.dcm",
    TEST_FILES / "693_J2KI.dcm",
    *FIVE_SLICES,
    *WITH_GAP,
]
MORE_REAL = ("693_UNCR", "693_J2KR", "693_UNCI", "eCT_Supplemental", "bad_sequence", "explicit_VR-UN")


def plane(path: Path, frame: int = 0, **options: bool) -> Plane:
    return DicomFile(os.fsencode(path), DicomOptions(**options)).plane(frame)


def headers(path: Path, **options: bool) -> list[Any]:
    return read_headers(os.fsencode(path), DicomOptions(**options))


def more_real(name: str) -> Path:
    data_store = pytest.importorskip("data_store", reason="real files of the pydicom-data package")
    return Path(data_store.__file__).parent / "data" / f"{name}.dcm"


def hu_of_itk(path: Path) -> np.ndarray:
    sitk = pytest.importorskip("SimpleITK", reason="ITK is the oracle")
    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    return np.asarray(sitk.GetArrayFromImage(sitk.ReadImage(str(path))))


def hu_of_pydicom(path: Path) -> np.ndarray:
    from pydicom.pixels import apply_rescale

    dataset = read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(apply_rescale(dataset.pixel_array, dataset))


def floored(hu: np.ndarray) -> np.ndarray:
    return np.maximum(hu, -1024)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_values_are_those_of_pydicom_and_itk(path: Path) -> None:
    got = plane(path)
    assert got.values.dtype == np.int16
    np.testing.assert_array_equal(got.values, floored(hu_of_pydicom(path)))
    np.testing.assert_array_equal(got.values, floored(hu_of_itk(path)[0]))


@pytest.mark.parametrize("name", MORE_REAL)
def test_values_of_further_real_files_are_those_of_itk(name: str) -> None:
    path = more_real(name)
    want = floored(hu_of_itk(path))
    assert len(headers(path)) == len(want)
    for frame, values in enumerate(want):
        np.testing.assert_array_equal(plane(path, frame).values, values)


def test_the_same_slice_in_two_codings_has_the_same_values() -> None:
    np.testing.assert_array_equal(plane(more_real("693_UNCR")).values, plane(more_real("693_J2KR")).values)


def test_padding_without_a_tag_is_floored_and_counted() -> None:
    got = plane(TEST_FILES / "J2K_pixelrep_mismatch.dcm")
    assert got.values.min() == -1024
    assert (got.pad_pixels, got.floored_pixels) == (0, 56587)


@pytest.mark.parametrize(
    ("tags", "lowest", "padded"),
    [
        ({"PixelPaddingValue": 500}, -1024, 1),
        ({"PixelPaddingValue": 500, "PixelPaddingRangeLimit": 100}, -1024, 3),
        ({"PixelPaddingValue": 4000}, -924, 0),
    ],
)
def test_padding_by_tag_is_of_stored_values(tmp_path: Path, tags: dict[str, int], lowest: int, padded: int) -> None:
    stored = np.array([[100, 300, 500, 2000]], np.uint16)
    dataset = make_slice(stored)
    for name, value in tags.items():
        dataset.add_new(name, "US", value)
    got = plane(write(dataset, tmp_path / "a.dcm"))
    assert (int(got.values.min()), got.pad_pixels) == (lowest, padded)
    assert got.values[0, 3] == 976


def test_a_negative_padding_value_written_without_sign(tmp_path: Path) -> None:
    dataset = make_slice(np.array([[-2000, 40]], np.int16), intercept="0")
    dataset.add_new("PixelPaddingValue", "US", 65536 - 2000)
    got = plane(write(dataset, tmp_path / "a.dcm"))
    assert (got.values.tolist(), got.pad_pixels, got.floored_pixels) == ([[-1024, 40]], 1, 0)


@pytest.mark.parametrize("dtype", [np.uint16, np.int16])
def test_whole_rescale_gives_int16_and_any_other_float32(tmp_path: Path, dtype: type) -> None:
    stored = np.array([[0, 1, 1001, 3001]], dtype)
    whole = plane(write(make_slice(stored, slope="2", intercept="-1000"), tmp_path / "a.dcm"))
    assert whole.values.dtype == np.int16
    np.testing.assert_array_equal(whole.values, [[-1000, -998, 1002, 5002]])
    half = plane(write(make_slice(stored, slope="0.5", intercept="-1000"), tmp_path / "b.dcm"))
    assert half.values.dtype == np.float32
    np.testing.assert_array_equal(half.values, np.float32([[-1000, -999.5, -499.5, 500.5]]))


def test_a_value_beyond_int16_is_an_error_and_never_wraps(tmp_path: Path) -> None:
    path = write(make_slice(np.array([[65535]], np.uint16), intercept="0"), tmp_path / "a.dcm")
    with pytest.raises(HURangeError, match="65535 HU"):
        plane(path)


def test_values_of_monochrome1_are_not_inverted(tmp_path: Path) -> None:
    stored = np.array([[0, 1024, 2048]], np.uint16)
    path = write(make_slice(stored, PhotometricInterpretation="MONOCHROME1"), tmp_path / "a.dcm")
    np.testing.assert_array_equal(plane(path).values, [[-1024, 0, 1024]])


def test_big_endian_values_are_native(tmp_path: Path) -> None:
    from pydicom.uid import ExplicitVRBigEndian

    stored = np.arange(12, dtype=np.uint16).reshape(3, 4)
    dataset = make_slice(stored)
    dataset.PixelData = stored.astype(">u2").tobytes()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(tmp_path / "a.dcm", enforce_file_format=True, little_endian=False, implicit_vr=False)
    got = plane(tmp_path / "a.dcm")
    assert got.values.dtype.isnative
    np.testing.assert_array_equal(got.values, stored.astype(np.int32) - 1024)


@pytest.mark.parametrize("coding", ["RLELossless", "JPEGLSLossless", "DeflatedExplicitVRLittleEndian"])
def test_lossless_codings_keep_every_value(tmp_path: Path, coding: str) -> None:
    import pydicom.uid

    if coding == "JPEGLSLossless":
        pytest.importorskip("jpeg_ls", reason="pyjpegls writes the file")
    original = read(TEST_FILES / "CT_small.dcm")
    want = plane(TEST_FILES / "CT_small.dcm").values
    syntax = getattr(pydicom.uid, coding)
    if syntax.is_compressed and not syntax.is_deflated:
        original.compress(syntax, generate_instance_uid=False)
    else:
        original.file_meta.TransferSyntaxUID = syntax
    path = write(original, tmp_path / "a.dcm")
    np.testing.assert_array_equal(plane(path).values, want)
    assert not headers(path)[0].lossy


def test_jpeg_lossless_and_near_lossless_files_decode() -> None:
    assert plane(more_real("bad_sequence")).values.shape == (512, 512)
    assert headers(TEST_FILES / "693_J2KI.dcm")[0].lossy


def test_enhanced_ct_takes_each_frame_from_its_functional_groups() -> None:
    found = headers(more_real("eCT_Supplemental"))
    dataset = read(more_real("eCT_Supplemental"))
    for frame, header in enumerate(found):
        group = dataset.PerFrameFunctionalGroupsSequence[frame]
        assert header.ipp == tuple(group.PlanePositionSequence[0].ImagePositionPatient)
    assert len({header.ipp for header in found}) == len(found) == 2


def test_a_header_gives_geometry_and_identifiers() -> None:
    (header,) = headers(FIVE_SLICES[0])
    dataset = read(FIVE_SLICES[0])
    assert header.ipp == tuple(dataset.ImagePositionPatient)
    assert header.spacing_mm == tuple(dataset.PixelSpacing)
    assert (header.rows, header.cols, header.kvp, header.kernel) == (16, 16, 120.0, "STANDARD")
    assert (header.patient, header.series) == (dataset.PatientID, dataset.SeriesInstanceUID)


def test_localizers_and_other_objects_are_no_slices(tmp_path: Path) -> None:
    for path, why in (
        (LOCALIZERS[0], "localizer"),
        (TEST_FILES / "MR_small.dcm", "not a CT image"),
        (TEST_FILES / "DICOMDIR", "table of contents"),
        (TEST_FILES / "dicomdirtests" / "DICOMDIR", "table of contents"),
    ):
        if path.exists():
            with pytest.raises(NotASliceError, match=why):
                headers(path)
    burned = make_slice(np.zeros((2, 2), np.uint16), BurnedInAnnotation="YES")
    with pytest.raises(NotASliceError, match="BurnedInAnnotation"):
        headers(write(burned, tmp_path / "burned.dcm"))
    colours = make_slice(np.zeros((2, 2), np.uint16), SamplesPerPixel=3, PhotometricInterpretation="RGB")
    with pytest.raises(NotASliceError, match="NotGrayscale"):
        headers(write(colours, tmp_path / "colours.dcm"))


@pytest.mark.parametrize(
    ("tag", "error"),
    [
        ("RescaleSlope", MissingRescaleError),
        ("RescaleIntercept", MissingRescaleError),
        ("ImagePositionPatient", MissingGeometryError),
        ("ImageOrientationPatient", MissingGeometryError),
        ("PixelSpacing", MissingGeometryError),
        ("Rows", PixelDataError),
    ],
)
def test_a_missing_tag_is_an_error_that_names_it(tmp_path: Path, tag: str, error: type[CtError]) -> None:
    dataset = make_slice(np.zeros((2, 2), np.uint16))
    delattr(dataset, tag)
    with pytest.raises(error, match=tag.lower() if tag == "Rows" else tag):
        headers(write(dataset, tmp_path / "a.dcm"))


def test_assume_hu_takes_values_as_they_are(tmp_path: Path) -> None:
    dataset = make_slice(np.array([[-1000, 40]], np.int16))
    del dataset.RescaleSlope, dataset.RescaleIntercept
    path = write(dataset, tmp_path / "a.dcm")
    np.testing.assert_array_equal(plane(path, assume_hu=True).values, [[-1000, 40]])


def test_truncated_pixels_are_an_error_with_both_sizes(tmp_path: Path) -> None:
    whole = write(make_slice(np.zeros((8, 8), np.uint16)), tmp_path / "a.dcm").read_bytes()
    (tmp_path / "b.dcm").write_bytes(whole[:-20])
    with pytest.raises(PixelDataError, match=r"truncated|no pixels|damaged"):
        plane(tmp_path / "b.dcm")
    short = make_slice(np.zeros((8, 8), np.uint16))
    short.PixelData = bytes(100)
    with pytest.raises(PixelDataError, match="100 bytes of pixels where 128"):
        plane(write(short, tmp_path / "c.dcm"))


def test_a_file_without_preamble_needs_force(tmp_path: Path) -> None:
    dataset = read(TEST_FILES / "CT_small.dcm")
    path = tmp_path / "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del dataset.file_meta
        dataset.preamble = None
        dataset.save_as(path, implicit_vr=True, little_endian=True, enforce_file_format=False)
    with pytest.raises(NotDicomError, match="--force"):
        headers(path)
    np.testing.assert_array_equal(plane(path, force=True).values, plane(TEST_FILES / "CT_small.dcm").values)
    (tmp_path / "text").write_bytes(b"no DICOM at all " * 50)
    with pytest.raises(NotDicomError):
        headers(tmp_path / "text", force=True)


def test_a_missing_transfer_syntax_is_an_error(tmp_path: Path) -> None:
    dataset = make_slice(np.zeros((2, 2), np.uint16))
    path = write(dataset, tmp_path / "a.dcm")
    blank = path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"\0" * 20)
    path.write_bytes(blank)
    with pytest.raises(PixelDataError, match="transfer syntax"):
        headers(path)


def test_a_missing_decoder_names_the_coding_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydicom.pixels.decoders.base as base

    class Nothing:
        is_available = False

    monkeypatch.setattr(base, "get_decoder", lambda _: Nothing())
    with pytest.raises(DecoderMissingError, match=r"JPEG 2000.*pip install 'packer-loaders\[codecs\]'"):
        headers(TEST_FILES / "693_J2KI.dcm")


def test_the_ich_quirk_is_put_right_on_request_alone(tmp_path: Path) -> None:
    true_hu = np.array([[-1000, -1, 0, 40, 3000]], np.int32)
    stored = np.where(true_hu < 0, true_hu + 4096, true_hu).astype(np.uint16)
    path = write(make_slice(stored, intercept="0", BitsStored=12, HighBit=11), tmp_path / "a.dcm")
    np.testing.assert_array_equal(plane(path, ich_quirk=True).values, true_hu)
    np.testing.assert_array_equal(plane(path).values, stored)
    sound = write(make_slice(stored, BitsStored=12, HighBit=11), tmp_path / "b.dcm")
    np.testing.assert_array_equal(plane(sound, ich_quirk=True).values, plane(sound).values)
