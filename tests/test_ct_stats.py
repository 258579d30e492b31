"""`packer stats` on CT: Hounsfield units as numpy has them, series and spacings as the records say."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from ct_helpers import hu_slice, series_name, slice_json, write_dataset, write_slices
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from packer import npy
from packer.ct_stats import Hounsfield, HuCounts, Range
from packer.stats import stats

EDGES = np.arange(-1024, 3073, 64)


def check(found: Hounsfield, values: np.ndarray) -> None:
    """Compare with numpy's own answers over all values, (n,) float64."""
    assert found.voxels == len(values)
    assert (found.min, found.max) == (values.min(), values.max())
    assert found.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-6)
    assert found.std == pytest.approx(values.std(), rel=1e-9, abs=1e-6)
    inside = values[(values >= -1024) & (values < 3072)]
    assert [one.count for one in found.bins] == np.histogram(inside, EDGES)[0].tolist()
    assert [(one.low, one.high) for one in found.bins] == list(pairwise(EDGES))
    assert (found.below, found.above) == (np.count_nonzero(values < -1024), np.count_nonzero(values >= 3072))


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_units_series_and_spacings_of_slices(tmp_path: Path, workers: int, zstd: bool) -> None:
    if zstd:
        pytest.importorskip("zstandard", reason="zstd arrays need it")
    out = write_slices(tmp_path / "out", series=4, slices=6, zstd=zstd)
    done = np.zeros(2, np.int64)

    def progress(samples: int, size: int) -> None:
        done[:] += (samples, size)

    found = stats(out, workers=workers, progress=progress)["train"]
    assert found.ct is not None
    check(found.ct.hu, np.concatenate([hu_slice(s, i).ravel() for s in range(4) for i in range(6)]).astype(np.float64))
    assert (found.ct.samples, found.ct.series, found.ct.patients, found.ct.units) == (24, 4, 2, {"HU": 4})
    assert found.ct.slices is not None
    assert (found.ct.slices.min, found.ct.slices.median, found.ct.slices.max) == (6, 6, 6)
    assert (found.ct.row_mm, found.ct.column_mm) == (Range(0.7, 0.7, 0.7), Range(0.8, 0.8, 0.8))
    assert found.ct.slice_mm == Range(2.5, 2.5, 2.5)  # series 1 does not say
    assert (found.ct.hu.arrays, found.ct.hu.failed, found.ct.hu.left_out) == (24, 0, 0)
    assert (found.pictures, found.channels.pictures, found.channels.mean) == (0, 0, None)
    assert done.tolist() == [24, found.fields[f"ct.npy{'.zst' if zstd else ''}"].bytes]


def test_series_of_several_lengths_and_spacings(tmp_path: Path) -> None:
    spacings = [(0.5, 0.6, 1.0), (0.9, 0.8, 5.0), (0.7, 0.7, 2.0), (0.6, 0.9, 3.0)]
    samples = []
    for s, (row, column, between) in enumerate(spacings):
        for i in range(s + 1):
            facts = json.loads(slice_json(s, i, s + 1, (4, 4)))
            facts |= {"spacing_mm": [row, column], "slice_spacing_mm": between, "units": "HU" if s else "unknown"}
            samples.append((f"{series_name(s)}_{i:05d}", {
                "ct.npy": npy.encode(np.zeros((4, 4), np.int16)), "json": json.dumps(facts).encode()}))  # fmt: skip
    ct = stats(write_dataset(tmp_path / "out", {"train-000000.tar": samples}), sample=0)["train"].ct
    assert ct is not None
    assert (ct.row_mm, ct.column_mm, ct.slice_mm) == (Range(0.5, 0.6, 0.9), Range(0.6, 0.7, 0.9), Range(1.0, 2.0, 5.0))
    assert ct.slices is not None
    assert (ct.slices.min, ct.slices.median, ct.slices.max) == (1, 2, 4)
    assert ct.units == {"HU": 3, "unknown": 1}
    assert (ct.hu.arrays, ct.hu.voxels, ct.hu.mean) == (0, 0, None)


def test_volumes_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    volumes = [draw.normal(100, 900, (depth, 9, 7)).astype(np.float32) for depth in (3, 5, 8)]
    volumes[1][0, 0, :3] = np.nan, np.inf, 1e30
    samples = [
        (series_name(i), {"vol.npy": npy.encode(one), "json": slice_json(i, 0, len(one), (9, 7))})
        for i, one in enumerate(volumes)
    ]
    ct = stats(write_dataset(tmp_path / "out", {"train-000000.tar": samples}))["train"].ct
    assert ct is not None
    assert ct.slices is not None
    assert (ct.slices.min, ct.slices.median, ct.slices.max) == (3, 5, 8)
    values = np.concatenate([one.ravel() for one in volumes]).astype(np.float64)
    check(ct.hu, values[np.abs(values) < 1e9])
    assert (ct.samples, ct.series, ct.hu.arrays, ct.hu.left_out) == (3, 3, 3, 3)


@given(
    st.lists(
        st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64, np.bool_])
        .flatmap(lambda kind: arrays(kind, array_shapes(max_dims=3, max_side=5), elements=None if kind in (
            np.int8, np.uint8, np.int16, np.uint16, np.bool_) else st.integers(-5000, 70000))),
        min_size=1, max_size=5,
    ),
    st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_counts_of_any_type_add_up_to_numpys(parts: list[np.ndarray], cut: int) -> None:
    one, other = HuCounts(), HuCounts()
    for i, part in enumerate(parts):
        (one if i < cut else other).count(part)
    one.add(other)
    check(one.result(), np.concatenate([part.ravel() for part in parts]).astype(np.float64))


def test_what_is_broken_is_counted_and_said(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    good: dict[str, Any] = {"ct.npy": npy.encode(hu_slice(0, 0)), "json": slice_json(0, 0, 5, (40, 32))}
    samples = [
        ("s_00000", good),
        ("s_00001", good | {"ct.npy": good["ct.npy"][:-1]}),
        ("s_00002", good | {"ct.npy": npy.encode(np.zeros(4, np.int16))}),
        ("t_00000", good | {"json": b"{"}),
        ("u_00000", good | {"json": b'{"spacing_mm": [true, 1e400], "n_slices": -1, "patient": 3, "units": []}'}),
    ]
    out = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    result = run_packer("stats", out)
    assert "2 arrays of train cannot be decoded; run: packer verify" in result.stderr
    assert "all that decode, 3 of 5 slices or volumes" in result.stdout
    ct = stats(out)["train"].ct
    assert ct is not None
    assert [sample for sample, _ in ct.hu.undecodable] == [1, 2]
    assert (ct.series, ct.patients, ct.units) == (3, 1, {"unknown": 2, "HU": 1})


def test_text_and_json(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    out = write_slices(tmp_path / "out", series=2, slices=3)
    values = np.concatenate([hu_slice(s, i).ravel() for s in range(2) for i in range(3)]).astype(np.float64)
    text = run_packer("stats", out, "--quiet").stdout
    assert f"-32768 to 32767, mean {values.mean():.2f}, std {values.std():.2f}" in text
    assert "2 series, of 1 patient" in text
    assert "mm between rows" in text
    assert "red" not in text
    ct = json.loads(run_packer("stats", out, "--json").stdout)["train"]["ct"]
    assert ct["slices"]["median"] == 3
    assert ct["column_mm"] == {"min": 0.8, "median": 0.8, "max": 0.8}
    assert ct["hu"]["mean"] == pytest.approx(values.mean())
    assert sum(one["count"] for one in ct["hu"]["bins"]) + ct["hu"]["below"] + ct["hu"]["above"] == len(values)
    assert "estimated from 4 of 6 slices" in run_packer("stats", out, "--sample", "4").stdout
    assert "Hounsfield" not in run_packer("stats", out, "--sample", "0").stdout
    assert stats(out, sample=4, workers=1) == stats(out, sample=4, workers=2)


def test_pictures_have_no_ct(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    from packer.pack import pack
    from packer.sources.folder import FolderSource

    pack(FolderSource(str(image_folder(per_class=2))), tmp_path / "packed")
    assert stats(tmp_path / "packed")["train"].ct is None


def test_nothing_of_a_header_appears(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    from ct_files import make_series

    canaries = {"PatientName": "CANARY^NAME", "InstitutionName": "CANARYPLACE", "StudyDescription": "CANARYTEXT"}
    make_series(tmp_path / "src" / "CANARYFOLDER", patient="CANARYID", series="1.2.77.31415", **canaries)
    (tmp_path / "salt").write_bytes(b"a salt for tests, long enough")
    run_packer("shard", tmp_path / "src", tmp_path / "out", "--id-salt-file", tmp_path / "salt", "--quiet")
    for said in (run_packer("stats", tmp_path / "out").output, run_packer("stats", tmp_path / "out", "--json").output):
        assert "1 series" in said or '"series": 1' in said
        assert not {word for word in ("CANARY", "31415") if word in said}
