"""The doctor: limits and gains from made-up measurements, and real runs for their structure."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from ct_helpers import write_slices
from loader_helpers import pack_tree, write_tree
from torch.utils.data import DataLoader, Dataset

from loaders.doctor import Diagnosis, doctor
from loaders.folder_loader import make_loader as folder_loader
from loaders.measure import Timing
from loaders.options import Settings
from loaders.remedies import LIMITS, Observed, find_limit, remedies
from loaders.resources import Resources
from loaders.run import LoopStep, Run, Utilization, run_loop
from loaders.stages import MAIN, WORKER, Stage, Stages, measure_stages
from loaders.transforms import Slab, TrainCrop, Window
from loaders.webds_loader import make_loader
from packer.errors import MeasurementError, UsageError
from packer.limits import CpuBudget


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("doctor") / "src", samples=20)


@pytest.fixture(scope="module")
def packed(tree: Path) -> Path:
    return pack_tree(tree, tree.parent / "out")


def took(wall: float, cpu: float | None = None) -> Timing:
    return Timing(wall, wall, wall, wall, wall if cpu is None else cpu, 10)


def stages(read: float = 0.0001, read_cpu: float | None = None, decode: float = 0.001, crop: float = 0.0005,
           **about: Any) -> Stages:
    return Stages((Stage("read", took(read, read_cpu)), Stage("decode", took(decode)),
                   Stage("crop and resize", took(crop)), Stage("collate", took(0.00001))), **about)


def seen(of: Stages, *, rate: float, wait: float, step: float = 0.0, transfer: float = 0.0, workers: int = 2,
         cpus: float = 2, process_cpu: float = 2.0, **more: Any) -> Observed:
    return Observed(rate, wait, step, transfer, workers, "thread", cpus, process_cpu, of, **more)


# ---------------------------------------------------------------- limits and gains


def limits() -> dict[str, Observed]:
    """What loops look like that are held up by each of the limits."""
    plain = stages()  # 1.61 ms a sample, all of it on a CPU
    return {
        "step": seen(plain, rate=200, wait=0.0001, step=0.005, process_cpu=0.3),
        "transfer": seen(plain, rate=250, wait=0.0, step=0.001, transfer=0.003, process_cpu=0.4),
        "CPU": seen(plain, rate=1200, wait=0.0007, step=0.0001),
        "storage": seen(stages(read=0.02, read_cpu=0.0001), rate=95, wait=0.01, process_cpu=0.2),
        "memory": seen(plain, rate=700, wait=0.001, workers=8, cpus=8, batch_bytes=4e6, bandwidth=1.2e10,
                       process_cpu=3.0),
        "one core": seen(plain, rate=600, wait=0.0016, workers=4, cpus=4, process_cpu=1.0),
        "workers": seen(plain, rate=600, wait=0.0016, workers=1, cpus=4, process_cpu=1.0),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_recognised(name: str) -> None:
    assert find_limit(limits()[name]) == name


def test_a_fraction_of_a_cpu_is_the_cpus_limit() -> None:
    assert find_limit(seen(stages(), rate=310, wait=0.003, workers=1, cpus=0.5, process_cpu=0.5)) == "CPU"


def test_cold_reads_count_where_the_data_do_not_fit_into_memory() -> None:
    of = Stages((Stage("read", took(0.0001), cold=took(0.02, 0.0002)), Stage("decode", took(0.001))))
    assert find_limit(seen(of, rate=1800, wait=0.0005)) == "CPU"
    assert find_limit(seen(of, rate=95, wait=0.01, cold=True)) == "storage"


def gains(of: Observed, **how: Any) -> dict[str, float]:
    return {remedy.name: remedy.gain for remedy in remedies(of, **{"packed": True, **how})}


def test_gains_follow_from_the_stages() -> None:
    found = gains(limits()["CPU"])
    assert found["seekable JPEG"] == pytest.approx(1.61 / (1.61 - 0.55), rel=1e-3)
    assert "more workers" not in found and "faster disk" not in found
    assert gains(limits()["workers"])["more workers"] == pytest.approx(4, rel=0.05)
    waits = gains(limits()["storage"])
    assert waits["more workers"] > 10 and waits["faster disk"] > 5 and waits["preload"] > 5
    assert gains(limits()["storage"], packed=False)["pack"] > 1.5 and "pack" not in waits


def test_a_step_that_is_fed_gains_nothing() -> None:
    assert gains(limits()["step"]) == {}


def test_no_gain_goes_beyond_the_step() -> None:
    of = seen(stages(), rate=1000, wait=0.0002, step=0.0007)
    assert all(gain <= 1.61 / 2 / 0.7 + 1e-6 for gain in gains(of).values())


def test_pictures_that_are_small_or_seekable_already_need_no_more() -> None:
    large = gains(seen(stages(pixels=(500.0, 700.0)), rate=1200, wait=0.0008))
    small = gains(seen(stages(pixels=(256.0, 300.0), restart_markers=1.0), rate=1200, wait=0.0008))
    assert {"pre-resize", "seekable JPEG"} <= set(large) and not {"pre-resize", "seekable JPEG"} & set(small)


def test_gpus_bring_pinning_and_bytes() -> None:
    moves = seen(stages(), rate=300, wait=0.0, step=0.001, transfer=0.002)
    assert gains(moves, cuda=True)["pin_memory"] == pytest.approx(1.5)
    assert "pin_memory" not in gains(moves, cuda=True, pinned=True)
    assert gains(limits()["CPU"], normalized=0.0005)["uint8"] == pytest.approx(1.61 / 1.11, rel=1e-3)


def test_the_gil_is_left_by_processes() -> None:
    stuck = seen(stages(), rate=600, wait=0.0016, workers=4, cpus=4, process_cpu=1.0, serial_s=1 / 600)
    assert gains(stuck)["process engine"] == pytest.approx(4 / 0.00161 / 600, rel=0.01)


def test_without_workers_nothing_overlaps() -> None:
    alone = seen(stages(), rate=380, wait=0.00161, step=0.001, workers=0)
    assert alone.loop_rate(1 / 0.00161) == pytest.approx(1 / 0.00261)
    assert gains(alone)["more workers"] > 1


# ---------------------------------------------------------------- the page


class Checked(HTMLParser):
    """Nesting, and everything that would be fetched."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert tag not in ("script", "img", "link", "iframe")
        for name, value in attrs:
            assert name not in ("src", "href", "onload")
            assert "nan" not in (value or "") or name in ("content", "aria-label")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def diagnosis(of: Observed, run: Run, **more: Any) -> Diagnosis:
    means = Resources(CpuBudget(2), 10**9, None, None, None, ())
    found: dict[str, Any] = {"measured": ((2, 80.0), (4, 90.0)), "notes": ("a <note>",), **more}
    return Diagnosis("<folder> & more", means, Settings(2, "thread"), of.stages, run, of, find_limit(of),
                     tuple(remedies(of, packed=False)), ((1, 50.0), (2, 100.0), (4, math.inf)), **found)


def page(found: Diagnosis) -> dict[str, int]:
    text = found.html()
    assert "http" not in re.sub(r'http-equiv="', "", text)
    assert "<folder>" not in text and "&lt;folder&gt; &amp; more" in text
    checked = Checked()
    checked.feed(text)
    checked.close()
    assert checked.open == []
    return checked.counts


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    run = Run([LoopStep(i, 0.01, 0.0, 0.02, 8) for i in range(1000)],
              [Utilization(i / 10, 0.5, 1e7 * i, None if i < 2 else 0.5) for i in range(9)])
    counts = page(diagnosis(limits()["storage"], run))
    assert counts["svg"] == 4 and counts["polyline"] == 4 and counts["circle"] == 3
    assert counts["rect"] < 1000  # a thousand steps are drawn as some


def test_the_page_without_psutil_steps_or_remedies() -> None:
    counts = page(diagnosis(limits()["step"], Run([LoopStep(0, 0, 0, 0, 8)]), measured=()))
    assert counts["svg"] == 3


def test_the_text_names_stages_limit_and_remedies() -> None:
    text = diagnosis(limits()["storage"], Run([LoopStep(0, 0.1, 0, 0, 8)])).text()
    assert "the storage is the limit" in text and "→ the storage" in text
    assert re.search(r"^pack +\d", text, re.MULTILINE) and "note: a <note>" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


# ---------------------------------------------------------------- real runs


def test_stages_of_our_loaders(packed: Path, tree: Path) -> None:
    for loader in (make_loader(packed, transform=TrainCrop(16)), folder_loader(tree, transform=TrainCrop(16))):
        with loader:
            found = measure_stages(loader, samples=8)
            assert [stage.name for stage in found.stages] == ["read", "decode", "crop and resize", "collate"]
            assert found.pixels is not None and 40 <= found.pixels[0] <= 56 and found.sample_bytes > 100
            assert found.restart_markers == 0
            assert found["read"] is not None and found["read"].cold is not None
            assert found.load().wall_s == pytest.approx(sum(stage.timing.wall_s for stage in found.stages))
            assert found.load(without=["decode"]).wall_s <= found.load().wall_s


def flip(image: Any) -> Any:
    return image.resize((8, 8))


def test_stages_of_other_transforms_and_fields(packed: Path) -> None:
    with make_loader(packed, transform=flip, num_workers=1) as loader:
        assert [stage.name for stage in measure_stages(loader, samples=4).stages][2] == "transform"
    with make_loader(packed, fields=["cls"], num_workers=1) as loader:
        assert [stage.name for stage in measure_stages(loader, samples=4).stages] == ["read", "decode", "collate"]


def test_stages_of_ct(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    out = write_slices(tmp_path / "ct")
    with make_loader(out, transform=Window(40, 400), batch_size=4) as loader:
        assert [stage.name for stage in measure_stages(loader, samples=6).stages] == ["read", "decode", "collate"]
    with make_loader(out, transform=Slab(3, Window(40, 400)), batch_size=4) as loader:
        assert [stage.name for stage in measure_stages(loader, samples=6).stages] == ["sample", "collate"]
    found = json.loads(run_packer("doctor", out, "--batch-size", "4", "--seconds", "0.05", "--json", "-q").stdout)
    assert found["limit"] in LIMITS


class Pictures(Dataset[Any]):
    """As torchvision's ImageFolder."""

    def __init__(self, root: Path) -> None:
        self.samples = [(os.fspath(path), 0) for path in sorted(root.rglob("*.jpg"))]
        self.transform = flip

    def loader(self, path: str) -> Any:
        from PIL import Image

        return Image.open(path).convert("RGB")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.transform(self.loader(self.samples[index][0]))
        return torch.zeros(3)


def test_stages_of_torchs_loader(tree: Path) -> None:
    found = measure_stages(DataLoader(Pictures(tree), batch_size=4), samples=6)
    assert [stage.name for stage in found.stages] == ["read", "decode", "transform", "collate"]
    rows = DataLoader([torch.zeros(2)] * 6, batch_size=2)  # type: ignore[arg-type]
    assert [stage.name for stage in measure_stages(rows).stages] == ["sample", "collate"]


def test_stages_of_anything_else_and_of_the_transfer() -> None:
    found = measure_stages([torch.zeros(4)] * 3, transfer=lambda batch: batch.clone())
    assert [(stage.name, stage.where) for stage in found.stages] == [("sample", WORKER), ("to device", MAIN)]
    with pytest.raises(MeasurementError, match="no batch"):
        measure_stages([])


def test_a_run_notes_every_step() -> None:
    worked: list[Any] = []
    run = run_loop([torch.zeros(4)] * 5, worked.append, lambda batch: batch + 1, seconds=0.01)
    assert run.samples == 4 * len(run.steps) > 0 and len(worked) > len(run.steps)
    assert all(torch.equal(batch, torch.ones(4)) for batch in worked)
    assert run.batch_bytes == 16 * len(run.steps)


def test_without_psutil_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    run = run_loop([torch.zeros(4)] * 5, None, seconds=0.01)
    assert run.utilization == [] and "pip install 'packer-loaders[tune]'" in run.notes[0]


def fails(_: Any) -> None:
    raise RuntimeError("CUDA out of memory")


def broken() -> Iterator[Any]:
    yield torch.zeros(2)
    raise OSError("disk gone")


@pytest.mark.parametrize(
    ("loader", "step", "transfer", "message"),
    [([torch.zeros(2)], fails, None, "the step fails after 0 steps .*CUDA out of memory"),
     ([torch.zeros(2)], None, fails, "the transfer fails"), (broken(), None, None, "the loader fails .*disk gone"),
     ([], None, None, "no batch"), (iter(()), None, None, "used up")],
)  # fmt: skip
def test_failures_are_named(loader: Any, step: Any, transfer: Any, message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        run_loop(loader, step, transfer, seconds=0.01)


FAST: dict[str, Any] = {"seconds": 0.05, "tries": 1}


def check(found: Diagnosis) -> None:
    assert found.limit in LIMITS and found.run.steps and found.verdict in found.text()
    json.dumps(found.to_dict(), allow_nan=False)
    page_text = found.html()
    assert page_text.startswith("<!doctype html>")


def test_a_loader_of_ours(packed: Path) -> None:
    steps: list[Any] = []
    with make_loader(packed, batch_size=4, transform=TrainCrop(16), normalize="imagenet", num_workers=1) as loader:
        before = loader.state_dict()
        found = doctor(loader, steps.append, **FAST)
        assert loader.state_dict() == before and len(list(loader)) == 5
    check(found)
    assert steps and found.settings == Settings(1, "thread", None)


def test_remedies_are_tried_on_the_loader_itself(tree: Path, packed: Path) -> None:
    from loaders.remedies import Remedy
    from loaders.subject import subject_of
    from loaders.trials import Trials

    found = [Remedy(name, "", 10.0, 2.0, workers=2 * (name == "more workers"))
             for name in ("more workers", "process engine", "pack", "pre-resize", "preload", "uint8", "faster disk")]
    for loader in (make_loader(packed, batch_size=4, transform=TrainCrop(16)),
                   folder_loader(tree, batch_size=4, transform=TrainCrop(16))):
        with loader:
            trials = Trials(subject_of(loader), Settings(1, "thread"), limits()["CPU"], seconds=0.05)
            tried, curve = trials.of(found, tries=9)
        assert [remedy.name for remedy in tried if remedy.measured_gain is None] == ["faster disk"]
        assert set(curve) == {1, 2} and trials.notes == []


def test_what_cannot_be_tried_is_noted(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loaders.remedies import Remedy
    from loaders.subject import subject_of
    from loaders.trials import Trials

    monkeypatch.setenv("PATH", "")
    with make_loader(packed, transform=TrainCrop(16)) as loader:
        trials = Trials(subject_of(loader), Settings(1, "thread"), limits()["CPU"], seconds=0.05)
        [tried], _ = trials.of([Remedy("seekable JPEG", "", 1.0, 2.0)], 1)
    assert tried.measured_gain is None and "jpegtran" in trials.notes[0]


def torch_loader(num_workers: int) -> DataLoader[Any]:
    return DataLoader([torch.zeros(3)] * 32, batch_size=4, num_workers=num_workers)  # type: ignore[arg-type]


def test_other_peoples_loaders(tree: Path) -> None:
    check(doctor(DataLoader(Pictures(tree), batch_size=4), **FAST))
    found = doctor(torch_loader, step_ms=1, num_workers=0, **FAST)
    check(found)
    assert found.settings.num_workers == 0 and found.subject == "torch_loader(num_workers=0)"
    check(doctor(lambda num_workers: [torch.zeros(4)] * 4, transfer=lambda batch: batch + 1, **FAST))


@pytest.mark.parametrize("warm_up", range(1, 9))
def test_a_warm_up_may_take_whole_epochs(warm_up: int) -> None:
    run = run_loop([torch.zeros(4)] * 4, None, seconds=0.01, warm_up=warm_up)
    assert run.steps


def test_bad_input_gets_a_clear_answer(packed: Path) -> None:
    with pytest.raises(UsageError, match="two answers"):
        doctor(torch_loader, print, step_ms=1)
    with pytest.raises(UsageError, match="must be positive"):
        doctor(torch_loader, step_ms=-1)
    with pytest.raises(UsageError, match="cannot be opened"):
        doctor(iter([1]))
    crop = TrainCrop(8)
    with make_loader(packed, batch_size=4, transform=crop) as loader, pytest.raises(MeasurementError, match="the step"):
        doctor(loader, fails, **FAST)
    with (
        make_loader(packed, batch_size=64, drop_last=True, transform=crop) as loader,
        pytest.raises(MeasurementError, match="smaller than one batch"),
    ):
        doctor(loader, **FAST)
    with make_loader(packed, subset=[]) as loader, pytest.raises(MeasurementError, match="no batch"):
        doctor(loader, **FAST)


def test_the_command(tree: Path, tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    fast = ("--size", "16", "--batch-size", "4", "--seconds", "0.05", "--tries", "1", "--num-workers", "1")
    result = run_packer("doctor", tree, *fast, "--step-ms", "1", "--html", tmp_path / "page.html")
    assert "crop and resize" in result.stdout and "waiting for data" in result.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    found = json.loads(run_packer("doctor", tree, *fast, "--json", "--tries", "0", "-q").stdout)
    assert {"limit", "verdict", "stages", "remedies", "wait_share"} <= set(found)
    assert "either OUT" in run_packer("doctor", exit_code=2).stderr
