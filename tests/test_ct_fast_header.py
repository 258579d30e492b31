"""The quick look into DICOM headers says what pydicom says, or nothing."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.sources.ct import dicom
from packer.sources.ct.dicom import DicomOptions, read_headers
from packer.sources.ct.errors import CtError
from packer.sources.ct.fast_header import read_fast
from packer.sources.ct.slices import NotASliceError
from tests.ct_files import FIVE_SLICES, LOCALIZERS, TEST_FILES, WITH_GAP, make_series, make_slice, write


def real_files() -> list[Path]:
    files = [*sorted(TEST_FILES.glob("*.dcm")), *FIVE_SLICES, *LOCALIZERS, *WITH_GAP]
    try:
        import data_store
    except ImportError:
        return files
    return [*files, *sorted((Path(data_store.__file__).parent / "data").glob("*.dcm"))]


def outcome(path: Path) -> Any:
    try:
        return read_headers(os.fsencode(path), DicomOptions())
    except (CtError, NotASliceError) as error:
        return type(error), str(error)


def test_headers_of_all_real_files_are_those_of_pydicom(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {path: outcome(path) for path in real_files()}
    known = sum(read_fast(os.fsencode(path)) is not None for path in quick)
    assert known > 30
    assert all(read_fast(os.fsencode(path)) is not None for path in [*FIVE_SLICES, *WITH_GAP])
    monkeypatch.setattr(dicom, "read_fast", lambda _: None)
    for path, found in quick.items():
        assert found == outcome(path), path.name


@pytest.mark.parametrize("implicit", [False, True])
def test_sequences_and_private_elements_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, implicit: bool
) -> None:
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence
    from pydicom.uid import ImplicitVRLittleEndian

    inner = Dataset()
    inner.Rows, inner.PatientID = 9, "NESTED"
    outer = Dataset()
    outer.ReferencedSeriesSequence = Sequence([inner])
    for undefined in (False, True):
        dataset = make_slice(np.zeros((4, 6), np.uint16), ConvolutionKernel=["I31f", "3"], patient="Q7")
        dataset.SourceImageSequence = Sequence([outer, Dataset()])
        dataset["SourceImageSequence"].is_undefined_length = undefined
        block = dataset.private_block(0x0019, "SOMEONE", create=True)
        block.add_new(0x01, "OB", bytes(70_00))
        if implicit:
            dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
        path = write(dataset, tmp_path / f"{undefined}.dcm")
        assert read_fast(os.fsencode(path)) is not None
        quick = outcome(path)
        assert (quick[0].rows, quick[0].cols, quick[0].patient, quick[0].kernel) == (4, 6, "Q7", "I31f\\3")
        with monkeypatch.context() as patch:
            patch.setattr(dicom, "read_fast", lambda _: None)
            assert outcome(path) == quick


def test_what_it_does_not_know_is_left_to_pydicom(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = make_slice(np.zeros((4, 6), np.uint16), patient="Müller")
        names.SpecificCharacterSet = "ISO_IR 192"
        path = write(names, tmp_path / "a.dcm")
    assert read_fast(os.fsencode(path)) is None
    assert outcome(path)[0].patient == "Müller"
    for text in (b"", b"\0" * 128 + b"DICM", b"\0" * 128 + b"DICM" + bytes(300), b"\0" * 128 + b"DICM" + b"\xff" * 300):
        (tmp_path / "b").write_bytes(text)
        assert read_fast(os.fsencode(tmp_path / "b")) is None


def test_a_header_cut_anywhere_is_never_believed(tmp_path: Path) -> None:
    (file,) = make_series(tmp_path / "in", 1)
    whole = file.read_bytes()
    begin = whole.rindex(b"\xe0\x7f\x10\x00")
    for end in range(0, begin + 1, 7):
        (tmp_path / "cut").write_bytes(whole[:end])
        assert read_fast(os.fsencode(tmp_path / "cut")) is None
