"""Small CT datasets: tar shards of chosen fields, made without the CT packer; and what the CT packer made."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from packer import npy
from packer.cli import cli
from packer.indexing import index_folder


def write_dataset(out: Path, shards: Mapping[str, Sequence[tuple[str, Mapping[str, bytes]]]]) -> Path:
    """Tar shards by name, each of (key, {field: bytes}), and their index."""
    out.mkdir(parents=True, exist_ok=True)
    for name, samples in shards.items():
        with tarfile.open(out / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, fields in samples:
                for field, data in fields.items():
                    member = tarfile.TarInfo(f"{key}.{field}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    index_folder(os.fspath(out), workers=1)
    return out


def series_name(number: int) -> str:
    """16 hex digits."""
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


def hu_slice(series: int, index: int, shape: tuple[int, int] = (40, 32)) -> np.ndarray[Any, np.dtype[np.int16]]:
    """HU that no other slice has; among them the limits of int16."""
    rng = np.random.default_rng([series, index])
    hu = rng.integers(-1100, 1600, shape).astype(np.int16)
    hu.flat[:4] = (-32768, 32767, -1024, 100 * series + index)
    return hu


def slice_json(series: int, index: int, slices: int, shape: tuple[int, int]) -> bytes:
    """A slice's facts as the CT source records them."""
    facts = {
        "patient": series_name(1000 + series // 2), "study": series_name(2000 + series), "series": series_name(series),
        "index": index, "n_slices": slices, "position_mm": -120.0 + 2.5 * index,
        "ipp": [-150.0, -140.0, -120.0 + 2.5 * index],
        "iop": [1, 0, 0, 0, 1, 0], "spacing_mm": [0.7, 0.8], "slice_spacing_mm": None if series == 1 else 2.5,
        "rows": shape[0], "cols": shape[1], "units": "HU", "schema": 1,
    }  # fmt: skip
    return json.dumps(facts).encode()


def write_slices(
    out: Path,
    *,
    series: int = 4,
    slices: int = 6,
    shape: tuple[int, int] = (40, 32),
    zstd: bool = False,
    shapes: Mapping[int, tuple[int, int]] | None = None,
) -> Path:
    """Series of slices with masks, labels and facts: two series to a shard, the second one's slices first."""
    suffix, level = (".zst", 3) if zstd else ("", None)
    samples = []
    for number in range(series):
        size = (shapes or {}).get(number, shape)
        for index in range(slices):
            hu = hu_slice(number, index, size)
            samples.append((f"{series_name(number)}_{index:05d}", {
                f"ct.npy{suffix}": npy.encode(hu, zstd_level=level),
                f"mask.npy{suffix}": npy.encode((hu > 300).astype(np.uint8), zstd_level=level),
                "cls": str(number % 2).encode(), "json": slice_json(number, index, slices, size),
            }))  # fmt: skip
    half = len(samples) // 2 // slices * slices
    return write_dataset(out, {"train-000000.tar": samples[half:], "train-000001.tar": samples[:half]})


def formula(hu: Any, center: float, width: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The window, as the standard has it, in float64."""
    return np.clip((np.asarray(hu, np.float64) - (center - width / 2)) / width, 0, 1)


SALT = b"a salt for tests, long enough"


def shard(src: Path, out: Path, *args: object) -> Result:
    """`packer shard` by one worker, with a salt that is known."""
    (out.parent / "salt").write_bytes(SALT)
    arguments = ["shard", src, out, "--workers", 1, "--id-salt-file", out.parent / "salt", *args]
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


def samples(out: Path) -> dict[str, dict[str, Any]]:
    """Fields by key, arrays and records decoded."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                found.setdefault(key, {})[field] = (
                    np.load(io.BytesIO(data)) if field.endswith("npy") else json.loads(data)
                )
    return found
