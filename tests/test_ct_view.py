"""`packer view` on CT: the right slices, windowed, with the borders of their masks, and nothing of any header."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE_S
from ct_helpers import hu_slice, series_name, slice_json, write_dataset, write_slices
from test_view import Page

from packer import npy
from packer.ct_pictures import OUTLINE_RGB, border, shrink, windowed
from packer.view import view

SQUARE = {"series": "ab" * 8, "spacing_mm": [1, 1], "units": "HU"}


def grey_of(hu: np.ndarray) -> np.ndarray:
    """The soft-tissue window, as uint8."""
    return np.floor(np.clip((hu.astype(np.float64) + 160) / 400, 0, 1) * 255 + 0.5).astype(np.uint8)


def border_of(region: np.ndarray) -> np.ndarray:
    """Pixels of a region that touch what is not of it, one by one."""
    height, width = region.shape
    found = np.zeros_like(region)
    for y, x in np.argwhere(region):
        beside = ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1))
        found[y, x] = any(not (0 <= j < height and 0 <= i < width and region[j, i]) for j, i in beside)
    return found


def sample(key: str, array: np.ndarray, mask: np.ndarray | None = None, *, field: str = "ct", **record: Any) -> Any:
    fields = {f"{field}.npy": npy.encode(array), "json": json.dumps(SQUARE | record).encode()}
    return key, fields if mask is None else {**fields, "mask.npy": npy.encode(mask)}


def page_of(out: Path) -> Page:
    view(out, out.parent / "page.html", workers=1)
    return Page(out.parent / "page.html")


def only_image(out: Path) -> np.ndarray:
    page = page_of(out)
    ((name, _),) = page.tiles.items()
    (image,) = page.images(name)
    return np.asarray(image.convert("RGB"))


def test_a_slice_is_windowed_and_its_mask_has_a_border_of_one_pixel(tmp_path: Path) -> None:
    hu = hu_slice(0, 0, (40, 32))
    mask = np.zeros((40, 32), np.uint8)
    mask[5:20, 3:17] = 1
    mask[30:, 20:] = 7  # up to the edges of the slice
    mask[10, 10] = 0
    shown = only_image(write_dataset(tmp_path / "out", {"train-000000.tar": [sample("s_00000", hu, mask)]}))
    edge = border_of(mask != 0)
    assert (shown[edge] == OUTLINE_RGB).all()
    assert (shown[~edge] == grey_of(hu)[~edge][:, None]).all()


def test_a_volume_shows_its_middle_slice_with_that_slices_mask(tmp_path: Path) -> None:
    hu = np.stack([hu_slice(0, i, (30, 30)) for i in range(5)]).astype(np.float32)
    hu[2, 0, 0] = np.nan
    mask = np.zeros(hu.shape, np.uint8)
    mask[2, 10:20, 10:20], mask[3, :5, :5] = 1, 1
    volume = sample("case", hu, mask, field="vol", positions=[0.0, 2.5, 5.0, 7.5, 10.0], position_mm=0.0)
    out = write_dataset(tmp_path / "out", {"train-000000.tar": [volume]})
    shown, edge = only_image(out), border_of(mask[2] != 0)
    expected = grey_of(np.nan_to_num(hu[2], nan=-1024))
    assert (shown[edge] == OUTLINE_RGB).all()
    assert (shown[~edge] == expected[~edge][:, None]).all()
    assert page_of(out).texts["span"][-3:] == ["ab" * 8, "slice 2 of 5", "5.0 mm"]


@pytest.mark.parametrize("zstd", [False, True])
def test_classes_group_slices_and_captions_say_which_they_are(tmp_path: Path, zstd: bool) -> None:
    if zstd:
        pytest.importorskip("zstandard", reason="zstd arrays need it")
    page = page_of(write_slices(tmp_path / "out", series=4, slices=3, zstd=zstd))
    assert {name: len(tiles) for name, tiles in page.tiles.items()} == {"0": 6, "1": 6}
    lines = page.texts["span"]
    for number in range(4):
        at = lines.index(series_name(number))
        assert lines[at : at + 3] == [series_name(number), "slice 0 of 3", "-120.0 mm"]
    assert all("window 40/400 HU" in tile["title"] for tile in page.tiles["0"])
    # Rows are 0.7 mm apart, columns 0.8.
    assert page.images("0")[0].size == (round(32 * 0.8 / 0.7), 40)


def test_without_classes_the_series_are_the_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    samples = [
        (f"{series_name(s)}_{i:05d}", {"ct.npy": npy.encode(rng.integers(-1000, 1000, (9, 9)).astype(np.int16)),
                                       "json": slice_json(s, i, 20, (9, 9))})
        for s in range(3) for i in range(20)
    ]  # fmt: skip
    page = page_of(write_dataset(tmp_path / "out", {"train-000000.tar": samples}))
    assert {name: len(tiles) for name, tiles in page.tiles.items()} == {series_name(s): 12 for s in range(3)}


def test_what_is_broken_is_a_tile_that_says_so(tmp_path: Path) -> None:
    hu = hu_slice(0, 0)
    good = dict(sample("x", hu)[1])
    samples = [
        sample("s_00000", hu),
        ("s_00001", good | {"ct.npy": good["ct.npy"][:-7]}),
        sample("s_00002", hu, np.zeros((3, 3), np.uint8)),
        ("s_00003", good | {"mask.npy": b"no array"}),
        ("s_00004", good | {"json": b"{"}),
        sample("s_00005", hu.astype(np.complex64)),
        sample("s_00006", hu[0]),
        sample("s_00007", hu, index=10**400, n_slices=True, position_mm=10**400, spacing_mm=[1e300, "x"], series=[]),
        ("s_00008", good | {"json": b"[" * 100_000}),
    ]
    page = page_of(write_dataset(tmp_path / "out", {"train-000000.tar": samples}))
    (tiles,) = page.tiles.values()
    assert [tile["tag"] for tile in tiles] == ["img", *["div"] * 6, "img", "div"]
    said = [text for text in page.texts["div"] if text.strip()]
    for found, expected in zip(
        said,
        ("ct.npy: ", "mask.npy has the shape (3, 3), ct.npy (40, 32)", "mask.npy: no .npy", "no JSON", "complex64",
         "no slice or volume", "no JSON"),
        strict=True,
    ):  # fmt: skip
        assert expected in found


def test_values_that_are_not_hu_are_shown_from_least_to_greatest(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    out = write_dataset(tmp_path / "out", {"train-000000.tar": [sample("s_00000", values, units="unknown")]})
    assert (only_image(out)[:, :, 0].ravel() == np.arange(256)).all()
    assert windowed(np.full((2, 2), 7, np.uint16), hounsfield=False).tolist() == [[0, 0], [0, 0]]
    ends = np.array([[-np.inf, np.finfo(np.float64).min, np.finfo(np.float64).max, np.nan]])
    assert windowed(ends, hounsfield=False).tolist() == [[0, 0, 255, 0]]


def test_large_slices_shrink_and_small_regions_stay(tmp_path: Path) -> None:
    hu, mask = np.full((512, 512), 40, np.int16), np.zeros((512, 512), np.uint8)
    mask[300, 100] = 1
    mask[64:192, 320:448] = 1
    shown = only_image(write_dataset(tmp_path / "out", {"train-000000.tar": [sample("s_00000", hu, mask)]}))
    assert shown.shape == (144, 144, 3)
    red = shown[:, :, 0].astype(int) - shown[:, :, 2] > 80  # JPEG blurs colours
    assert red[300 * 144 // 512, 100 * 144 // 512]
    assert not red[30:40, 105:110].any()
    assert red[18, 100:120].mean() > 0.9


@pytest.mark.parametrize("shape", [(3, 5), (7, 9), (4, 20), (1, 1)])
def test_shrinking_and_borders_follow_their_definitions(shape: tuple[int, int]) -> None:
    region = np.random.default_rng(5).random((7, 9)) < 0.4
    small = shrink(region, shape)
    assert small.shape == shape
    for y, x in np.ndindex(*shape):
        top, left = y * 7 // shape[0], x * 9 // shape[1]
        bottom, right = max((y + 1) * 7 // shape[0], top + 1), max((x + 1) * 9 // shape[1], left + 1)
        assert small[y, x] == region[top:bottom, left:right].any()
    assert (border(region) == border_of(region)).all()


def test_nothing_of_a_header_appears(tmp_path: Path) -> None:
    from click.testing import CliRunner
    from ct_files import make_series

    from packer.cli import cli

    canaries = {"PatientName": "CANARY^NAME", "InstitutionName": "CANARYPLACE", "StudyDescription": "CANARYTEXT"}
    make_series(tmp_path / "src" / "CANARYFOLDER", patient="CANARYID", series="1.2.77.31415", **canaries)
    (tmp_path / "salt").write_bytes(b"a salt for tests, long enough")
    out = tmp_path / "out"
    for command in (
        ("shard", tmp_path / "src", out, "--workers", 1, "--id-salt-file", tmp_path / "salt", "--quiet"),
        ("view", out, "--workers", 1, "--quiet"),
    ):
        result = CliRunner().invoke(cli, [str(word) for word in command], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    page = Page(out / "view.html")
    assert sum(map(len, page.tiles.values())) == 4
    assert not {word for word in ("CANARY", "31415") if word in page.source}


def test_no_torch(tmp_path: Path) -> None:
    out = write_slices(tmp_path / "out", series=1, slices=1)
    run = "import sys; from packer.view import view; view(*sys.argv[1:], workers=1); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", run, str(out), str(tmp_path / "page.html")]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
