"""The benchmarks run, on little data and our own loaders, and say what they promise. Figures are not looked at."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_S
from loader_helpers import write_tree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from peers import PEERS, REFERENCE, child, harness, limit, measure, ours  # noqa: E402
from peers.base import MEAN, STD, Task, list_tree  # noqa: E402

LOADERS = ("packer-thread", "folder", "dali")
READERS = ("packer-random", "files")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one tiny run of bench_load.py writes."""
    folder = tmp_path_factory.mktemp("bench")
    write_tree(folder / "src", samples=24, sizes=((64, 64),))
    command = [
        *(sys.executable, "scripts/bench_load.py", folder / "src", "--tiny", folder / "src", "--work", folder / "work"),
        *("--tasks", "tiny-float32,read", "--loaders", ",".join((*LOADERS, *READERS)), "--json", folder / "load.json"),
        *("--runs", "1", "--seconds", "0.01", "--warm-up", "1", "--batch-size", "4"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return {"printed": done.stdout, "work": folder / "work", **json.loads((folder / "load.json").read_text())}


def test_every_loader_is_measured_or_says_why_not(report: dict[str, Any]) -> None:
    assert set(report["tasks"]) == {"tiny-float32", "read"}
    assert report["machine"]["cpu"] and report["machine"]["date"] and report["options"]["workers"] == 2
    loaders = report["tasks"]["tiny-float32"]["loaders"]
    assert set(loaders) == set(LOADERS)
    for name in ("packer-thread", "folder"):
        mine = loaders[name]
        assert mine["failed"] == "" and len(mine["runs"]) == 1, mine
        assert {"images_per_s", "open_s", "first_batch_s", "cpu_s_per_1000"} <= set(mine["median"])
        assert mine["check"]["peak_mb"] > 0
        assert mine["runs"][0]["versions"]["torch"] == importlib.metadata.version("torch")
        assert all(samples == 24 for run in mine["runs"] for samples in run["samples"])
        assert mine["title"] in report["printed"]
    assert "images/s" in report["printed"]


@pytest.mark.skipif("nvidia" in sys.modules, reason="DALI is installed here")
def test_a_peer_that_is_not_installed_is_reported(report: dict[str, Any]) -> None:
    dali = report["tasks"]["tiny-float32"]["loaders"]["dali"]
    assert dali["runs"] == [] and "nvidia" in dali["failed"]
    assert f"{dali['title']:34} not measured: ModuleNotFoundError" in report["printed"]


def test_packed_and_unpacked_do_equal_work(report: dict[str, Any]) -> None:
    loaders = [report["tasks"]["tiny-float32"]["loaders"][name] for name in ("packer-thread", "folder")]
    assert [mine["unequal"] for mine in loaders] == [[], []]
    assert [mine["check"]["labels"] for mine in loaders] == [[8, 8, 8], [8, 8, 8]]
    assert loaders[0]["check"]["mean"] == pytest.approx(loaders[1]["check"]["mean"], abs=1e-4)
    assert loaders[0]["check"]["std"] == pytest.approx(loaders[1]["check"]["std"], abs=1e-4)


def test_all_that_read_have_read_the_same(report: dict[str, Any]) -> None:
    loaders = report["tasks"]["read"]["loaders"]
    assert set(loaders) == set(READERS)
    runs = [run for mine in loaders.values() for run in mine["runs"]]
    assert len({(run["samples"], run["checksum"]) for run in runs}) == 1
    assert all(mine["unequal"] == [] and mine["median"]["us_per_sample"] > 0 for mine in loaders.values())


def test_nothing_is_left_behind_but_the_packed_data(report: dict[str, Any]) -> None:
    assert sorted(os.listdir(report["work"])) == ["images-24", "tiny-24"]


def test_the_decode_limit_decodes_every_picture(report: dict[str, Any]) -> None:
    store = report["work"] / "tiny-24" / "packer"
    batches = limit.load(os.fspath(store), Task(side=64, crop=False, batch_size=5), "")
    found = child._time(batches, warm_up=1, seconds=0.001)
    assert found["epochs"] >= 1 and set(found["samples"]) == {24} and found["label_sum"] == 24 * found["epochs"]
    assert found["images_per_s"] > 0 and found["first_batch_s"] > 0


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_crops_are_measured_on_ramps(tmp_path: Path, dtype: Any) -> None:
    harness.make_ramps(os.fspath(tmp_path), 60)
    task = Task(side=96, dtype=dtype, batch_size=8)
    found = child._check(ours.load(os.fspath(tmp_path), task, "folder"), task, ramps=True)
    assert found["samples"] == 60 and found["labels"] == [6] * 10 and found["wrong_labels"] == 0
    assert 0.3 < found["area_mean"] < 0.6 and 0.2 < found["mirrored"] < 0.8 and 0.1 < found["log_ratio_std"] < 0.25


def test_crops_of_ramps_tell_area_mirroring_and_label(tmp_path: Path) -> None:
    """The measure itself, on crops that are known."""
    from loaders.decode import Picture
    from loaders.geometry import Crop

    harness.make_ramps(os.fspath(tmp_path), 10)
    samples = list_tree(os.fspath(tmp_path))
    chosen = [Crop(30, 40, 150, 250, False), Crop(0, 0, 375, 500, True), Crop(100, 20, 200, 100, True)]
    images = torch.empty(3, 3, 224, 224)
    for (path, _), crop, out in zip(samples, chosen, images, strict=False):
        Picture(Path(path).read_bytes()).crop_into(crop, out)
    images = (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    labels = torch.tensor([samples[0][1], samples[1][1], samples[2][1] + 1])
    widths, heights, mirrored, wrong = child._crops(images, labels).T.tolist()
    assert widths == pytest.approx([0.5, 1, 0.2], abs=0.01)
    assert heights == pytest.approx([0.4, 1, 200 / 375], abs=0.01)
    assert mirrored == [0, 1, 1] and wrong == [0, 0, 1]


class _Epochs:
    """Batches that are not what was asked for."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.batches = [(images, labels)]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


@pytest.mark.parametrize(
    "images",
    [
        pytest.param(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), id="dtype"),
        pytest.param(torch.zeros(2, 3, 8, 9), id="size"),
        pytest.param(torch.zeros(2, 8, 8, 3).permute(0, 3, 1, 2), id="layout"),
    ],
)
def test_other_output_than_asked_for_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="wanted"):
        child._check(_Epochs(images, torch.tensor([0, 1])), Task(side=8, crop=False), ramps=False)


def test_unequal_work_is_noted(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=6)
    equal = {"samples": 6, "labels": [2, 2, 2], "mean": [0.0] * 3, "std": [1.0] * 3}
    crops = {"samples": 1000, "area_mean": 0.43, "area_std": 0.22, "log_ratio_std": 0.16, "mirrored": 0.5}
    figures = {
        name: measure.Figures(name, check=equal | {"crops": crops | {"wrong_labels": 0}} | other)
        for name, other in {
            REFERENCE: {},
            "other pixels": {"mean": [0.0, 0.0, 0.5]},
            "a sample twice": {"samples": 7, "labels": [3, 2, 2]},
            "labels mixed up": {"crops": crops | {"wrong_labels": 900}},
            "crops too large": {"crops": crops | {"wrong_labels": 0, "area_mean": 0.6}},
        }.items()
    }
    measure.compare(figures, os.fspath(tree), random_crops=False)
    assert {name: mine.unequal for name, mine in figures.items()} == {
        REFERENCE: [],
        "other pixels": ["mean of the pixels differs by 0.50"],
        "a sample twice": ["gave 7 of 6 samples, or other labels"],
        "labels mixed up": ["900 of 1000 labels are another picture's"],
        "crops too large": ["crops differ: area_mean 0.600, not 0.430"],
    }


def test_a_loader_that_is_too_slow_has_failed(tmp_path: Path) -> None:
    bench = harness.Bench(os.fspath(tmp_path), timeout_s=0.01)
    with pytest.raises(harness.LoaderFailedError, match="took longer than 0 s"):
        bench.run({"do": "read", "peer": "files", "store": os.fspath(tmp_path), "seconds": 0})


def test_every_peer_has_its_module() -> None:
    for peer in PEERS.values():
        assert (ROOT / "scripts" / "peers" / f"{peer.module}.py").exists(), peer
