#!/usr/bin/env python3
r"""How fast CT slices are loaded, against what else there is, at equal work.

Method. 800 slices of 512×512 from phantoms (ellipses of tissue, noise as a scanner has it) are written as DICOM, one
folder a patient, and from these as `.npy` files, an HDF5 file (contiguous), WebDataset shards, and by `packer shard`.
Every loader gives batches of 16 in random order: float32 (16, 1, 512, 512), soft tissue window, [0, 1], and the
slices' numbers; two workers. The others are written as their documentation shows it, the window in place.

- An epoch of each in turn (A B C A B C …), so that what else the machine does hits all alike; medians are compared.
- The first epoch is not timed: every slice must come exactly once, and be equal to what pydicom says, within 2⁻²².
- `limit` is no loader: as many threads read every slice from the page cache and fill as much memory as a batch takes.

    scripts/bench_ct.py --work /disk/bench-ct --json ct.json

Needs pydicom, h5py, webdataset. Data stay in --work for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIDE, PER_PATIENT = 512, 40
CENTER, WIDTH = 40.0, 400.0
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


# ---------------------------------------------------------------- data


def phantom(patient: int, index: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """A slice through a body: (512, 512) int16 HU, −1024 outside the circle of reconstruction."""
    rng = np.random.default_rng([patient, index])
    y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) / (SIDE / 2) - 1
    z = index / PER_PATIENT
    hu = np.full((SIDE, SIDE), -1000, np.float32)
    organs = [(0, 0, 0.88, 0.66, -95), (0, 0, 0.83, 0.61, 48), (-0.38, -0.02, 0.26, 0.38 * (0.4 + z), -860),
              (0.38, -0.02, 0.26, 0.38 * (0.4 + z), -860), (0.06, -0.1, 0.2, 0.16, 42), (0, 0.42, 0.08, 0.07, 620)]
    for across, down, a, b, value in organs:
        hu[((x - across) / a) ** 2 + ((y - down) / b) ** 2 < 1] = value + patient % 5
    coarse = rng.standard_normal((SIDE // 2, SIDE // 2), np.float32).repeat(2, 0).repeat(2, 1)
    hu += 14 * coarse + 10 * rng.standard_normal((SIDE, SIDE), np.float32)
    hu[x**2 + y**2 > 1] = -1024
    return np.clip(np.rint(hu), -1024, 3071).astype(np.int16)


def write_dicom(path: Path, hu: np.ndarray[Any, Any], patient: int, index: int) -> None:
    """One slice as scanners write it: unsigned, intercept −1024."""
    from pydicom.dataset import Dataset as Header
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    def uid(*what: object) -> Any:
        return generate_uid(entropy_srcs=[f"bench/{what}"])

    head = Header()
    head.file_meta = FileMetaDataset()
    head.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    head.file_meta.MediaStorageSOPClassUID = head.SOPClassUID = CTImageStorage
    head.file_meta.MediaStorageSOPInstanceUID = head.SOPInstanceUID = uid(patient, index)
    head.Modality, head.PatientID, head.PatientName = "CT", f"P{patient}", f"Phantom^{patient}"
    head.StudyInstanceUID, head.SeriesInstanceUID = uid(patient, "study"), uid(patient, "series")
    head.ImageType, head.InstanceNumber = ["ORIGINAL", "PRIMARY", "AXIAL"], index + 1
    head.ImagePositionPatient, head.ImageOrientationPatient = [-180, -180, index * 2.5], [1, 0, 0, 0, 1, 0]
    head.PixelSpacing, head.SliceThickness, head.KVP = [0.7, 0.7], "2.5", "120"
    head.Rows = head.Columns = SIDE
    head.SamplesPerPixel, head.PhotometricInterpretation, head.PixelRepresentation = 1, "MONOCHROME2", 0
    head.BitsAllocated, head.BitsStored, head.HighBit = 16, 16, 15
    head.RescaleSlope, head.RescaleIntercept, head.RescaleType = "1", "-1024", "HU"
    head.PixelData = (hu.astype(np.int32) + 1024).astype("<u2").tobytes()
    head["PixelData"].VR = "OW"
    head.save_as(path, enforce_file_format=True)


def make(work: Path, slices: int) -> None:
    """All forms of the data; what is there already is kept."""
    if (work / "packed" / "dataset.json").exists():
        return
    import h5py

    for folder in ("dicom", "npy", "shards"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    with h5py.File(work / "slices.h5", "w") as file:
        dense = file.create_dataset("hu", (slices, SIDE, SIDE), np.int16)
        for number in range(slices):
            patient, index = divmod(number, PER_PATIENT)
            hu = phantom(patient, index)
            (work / "dicom" / f"P{patient:03d}").mkdir(exist_ok=True)
            write_dicom(work / "dicom" / f"P{patient:03d}" / f"IM{index:04d}.dcm", hu, patient, index)
            np.save(work / "npy" / f"{number:05d}.npy", hu)
            dense[number] = hu
    for shard in range(8):
        with tarfile.open(work / "shards" / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard, slices, 8):
                stored = (work / "npy" / f"{number:05d}.npy").read_bytes()
                for name, data in ((f"{number:05d}.ct.npy", stored), (f"{number:05d}.cls", b"%d" % number)):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, BytesIO(data))
    salt = ["--id-salt-file", str(work / "salt")]
    command = [sys.executable, "-m", "packer", "shard", str(work / "dicom"), str(work / "packed"), "--quiet", *salt]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


# ---------------------------------------------------------------- loaders


def windowed(hu: np.ndarray[Any, Any]) -> torch.Tensor:
    """(1, H, W) float32 in [0, 1]."""
    image = hu.astype(np.float32)
    image -= CENTER - WIDTH / 2
    image *= 1 / WIDTH
    np.clip(image, 0, 1, out=image)
    return torch.from_numpy(image)[None]


class Slices(Dataset[tuple[torch.Tensor, int]]):
    """A map-style dataset as one writes it: `read` gives HU by number."""

    def __init__(self, count: int, read: Callable[[int], np.ndarray[Any, Any]]) -> None:
        self.count, self.read = count, read

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return windowed(self.read(number)), number


class DicomReader:
    """HU of a DICOM file by pydicom."""

    def __init__(self, work: Path) -> None:
        self.paths = sorted((work / "dicom").glob("*/*.dcm"))

    def __call__(self, number: int) -> np.ndarray[Any, Any]:
        """One slice."""
        import pydicom

        head = pydicom.dcmread(self.paths[number])
        return head.pixel_array.astype(np.float32) * float(head.RescaleSlope) + float(head.RescaleIntercept)


class NpyReader:
    """HU of a `.npy` file."""

    def __init__(self, work: Path) -> None:
        self.paths = sorted((work / "npy").glob("*.npy"))

    def __call__(self, number: int) -> np.ndarray[Any, Any]:
        """One slice."""
        return np.load(self.paths[number])


class Hdf5Reader:
    """HU of a slice of an HDF5 dataset, opened in each worker."""

    def __init__(self, work: Path) -> None:
        self.path, self.dense = work / "slices.h5", None

    def __call__(self, number: int) -> np.ndarray[Any, Any]:
        """One slice."""
        if self.dense is None:
            import h5py

            self.dense = h5py.File(self.path)["hu"]
        return self.dense[number]


def by_torch(
    count: int, read: Callable[[int], np.ndarray[Any, Any]], batch: int, workers: int
) -> Callable[[], Batches]:
    """The DataLoader of torch, its workers kept from epoch to epoch."""
    loader = DataLoader(Slices(count, read), batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: iter(loader)


def to_pair(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """What webdataset decoded, windowed."""
    return windowed(sample["ct.npy"]), sample["cls"]


def by_webdataset(work: Path, batch: int, workers: int) -> Callable[[], Batches]:
    """webdataset, shuffled as far as its buffer goes."""
    import webdataset

    urls = str(work / "shards" / "{000..007}.tar")
    dataset = webdataset.WebDataset(urls, shardshuffle=8).shuffle(100).decode().map(to_pair).batched(batch)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: iter(loader)


def by_packer(work: Path, batch: int, workers: int) -> Callable[[], Batches]:
    """Ours. The packed order is by series; the slices' numbers are those of the files by their keys."""
    from loaders.transforms import Window
    from loaders.webds_loader import make_loader

    loader = make_loader(work / "packed", batch_size=batch, transform=Window(CENTER, WIDTH), num_workers=workers,
                         fields=("ct.npy", "__index__"))
    return lambda: ((each["ct.npy"], each["__index__"]) for each in loader)


def limit(work: Path, workers: int) -> Callable[[], float]:
    """Seconds in which bare threads read all slices and write as many float32."""
    path = work / "packed" / "train-000000.tar"
    size, count = SIDE * SIDE * 2, path.stat().st_size // (SIDE * SIDE * 2 + 2048)
    memory = np.zeros((64, SIDE, SIDE), np.float32)

    def read(first: int) -> None:
        into = np.empty(size, np.uint8)
        with open(path, "rb", buffering=0) as file:
            for number in np.random.default_rng(first).permutation(count)[first::workers].tolist():
                os.preadv(file.fileno(), [into], number * size)
                memory[number % 64].fill(number)

    def run() -> float:
        threads = [threading.Thread(target=read, args=(first,)) for first in range(workers)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count / (time.perf_counter() - begin)

    return run


# ---------------------------------------------------------------- measuring


def check(name: str, batches: Batches, work: Path, slices: int) -> None:
    """Every slice once, and equal to what pydicom says."""
    reader, seen = DicomReader(work), {}
    wanted = {}
    for number in range(0, slices, 7):
        hu = reader(number).astype(np.float64)
        wanted[number] = np.clip((hu - (CENTER - WIDTH / 2)) / WIDTH, 0, 1)
    sums = {round(float(value.sum()), 1): number for number, value in wanted.items()}
    count = found = 0
    for images, numbers in batches:
        assert images.shape[1:] == (1, SIDE, SIDE), (name, images.shape)
        assert images.dtype == torch.float32, name
        for image, number in zip(images, numbers.tolist(), strict=True):
            count += 1
            seen[number] = True
            near = round(float(image.double().sum()), 1)
            which = next((sums[key] for key in (near, round(near - 0.1, 1), round(near + 0.1, 1)) if key in sums), None)
            if which is not None and np.abs(image[0].numpy() - wanted[which]).max() <= 2.0**-22:
                found += 1
    if (count, len(seen), found) != (slices, slices, len(wanted)):
        raise SystemExit(f"{name}: {count} slices, {len(seen)} different; {found} of {len(wanted)} equal pydicom's")


def epoch_rate(batches: Batches) -> float:
    """Slices a second over one epoch; each batch is looked at and dropped."""
    begin, count = time.perf_counter(), 0
    for images, _ in batches:
        count += len(images)
    return count / (time.perf_counter() - begin)


def main() -> None:
    """Make, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path, help="folder for the data; 2 GB, kept")
    parser.add_argument("--slices", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    make(args.work, args.slices)
    sizes = args.batch_size, args.workers
    loaders = {
        "packer": by_packer(args.work, *sizes),
        "DICOM, pydicom": by_torch(args.slices, DicomReader(args.work), *sizes),
        "npy files": by_torch(args.slices, NpyReader(args.work), *sizes),
        "h5py": by_torch(args.slices, Hdf5Reader(args.work), *sizes),
        "webdataset": by_webdataset(args.work, *sizes),
    }
    for name, start in loaders.items():
        check(name, start(), args.work, args.slices)
    bare = limit(args.work, args.workers)
    rates: dict[str, list[float]] = {name: [] for name in (*loaders, "limit")}
    for _ in range(args.runs):
        for name, start in loaders.items():
            rates[name].append(epoch_rate(start()))
        rates["limit"].append(bare())
    mine = statistics.median(rates["packer"])
    for name, values in rates.items():
        middle = statistics.median(values)
        spread = f"({min(values):,.0f}–{max(values):,.0f})"
        print(f"{name:16}{middle:>8,.0f} slices/s  {spread}, packer {mine / middle:.2f}×")
    if args.json:
        report = {"slices_per_s": rates, "cores": len(os.sched_getaffinity(0))}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
