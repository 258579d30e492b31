"""Small CT files for tests: synthetic series, and copies of the real ones that pydicom brings."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pydicom = pytest.importorskip("pydicom", reason="CT files are written and read with pydicom")

from pydicom import dcmread  # noqa: E402
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid  # noqa: E402

TEST_FILES = Path(pydicom.__file__).parent / "data" / "test_files"
#: A real series of five slices whose names and instance numbers descend in z.
FIVE_SLICES = sorted((TEST_FILES / "dicomdirtests" / "98892001" / "CT5N").iterdir())
#: A real series with a gap of 202.5 mm.
WITH_GAP = sorted((TEST_FILES / "dicomdirtests" / "77654033" / "CT2").iterdir())
LOCALIZERS = sorted((TEST_FILES / "dicomdirtests" / "98892001" / "CT2N").iterdir())

Edit = Callable[[Dataset, int], None]


def read(path: os.PathLike[str] | str) -> Any:
    """A file as pydicom reads it, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcmread(path)


def write(dataset: Dataset, path: Path) -> Path:
    """Write a dataset with preamble."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(path, enforce_file_format=True)
    return path


def copy_series(files: list[Path], folder: Path, edit: Edit | None = None) -> list[Path]:
    """Copies of real slices, each edited by `edit(dataset, number)`."""
    out = []
    for number, file in enumerate(files):
        dataset = read(file)
        if edit is not None:
            edit(dataset, number)
        out.append(write(dataset, folder / f"{number:03d}.dcm"))
    return out


def make_slice(
    stored: np.ndarray,
    *,
    z: float = 0.0,
    patient: str = "P1",
    study: str = "1.2.3",
    series: str = "1.2.3.4",
    slope: str = "1",
    intercept: str = "-1024",
    **tags: Any,
) -> Dataset:
    """A CT slice that holds these stored values (H, W) of 16 bits."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = CTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = generate_uid()
    dataset.Modality, dataset.ImageType = "CT", ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.PatientID, dataset.StudyInstanceUID, dataset.SeriesInstanceUID = patient, study, series
    dataset.ImagePositionPatient, dataset.ImageOrientationPatient = [-10.0, -20.0, z], [1, 0, 0, 0, 1, 0]
    dataset.PixelSpacing, dataset.SliceThickness, dataset.KVP = [0.5, 0.75], "3", "120"
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.Rows, dataset.Columns = stored.shape
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    dataset.RescaleSlope, dataset.RescaleIntercept = slope, intercept
    dataset.PixelData = stored.astype("<" + stored.dtype.str[1:]).tobytes()
    dataset["PixelData"].VR = "OW"
    for name, value in tags.items():
        setattr(dataset, name, value)
    return dataset


def make_series(folder: Path, count: int = 4, *, spacing: float = 2.5, seed: int = 0, **tags: Any) -> list[Path]:
    """A series of `count` slices of 12×16 random values, ascending in z and in name."""
    generator = np.random.default_rng(seed)
    return [
        write(
            make_slice(generator.integers(0, 3000, (12, 16)).astype(np.uint16), z=i * spacing, **tags),
            folder / f"{i:03d}.dcm",
        )
        for i in range(count)
    ]
