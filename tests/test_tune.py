"""Tuning: the stopwatch on a made-up clock, the search on made-up machines, the real thing for its structure."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import pack_tree, write_tree
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loaders import auto, remember
from loaders.curve import NEAR, Load, Search, choose, field_rule, predict
from loaders.folder_loader import make_loader as folder_loader
from loaders.measure import Clock, batch_samples, measure_rate, median_interval, time_each, time_step, timing
from loaders.options import LoaderOptions, Settings
from loaders.resources import Disk
from loaders.subject import subject_of
from loaders.transforms import TrainCrop
from loaders.tune import Point, Probe, Tuned, conclude, most_workers, probe_load, tune
from loaders.webds_loader import make_loader
from packer.errors import MeasurementError, SampleError, UsageError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tune")
    return pack_tree(write_tree(root / "src", samples=20), root / "out")


class Time:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.busy, lambda: 0.0)

    def batches(self, seconds: list[float], samples: int = 10) -> Iterator[torch.Tensor]:
        for second in seconds:
            self.now += second
            yield torch.zeros(samples)


# ---------------------------------------------------------------- the stopwatch


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_an_interval_holds_the_median(values: list[float]) -> None:
    median, low, high = median_interval(values)
    assert min(values) <= low <= median <= high <= max(values)


def test_the_interval_is_the_binomial_one() -> None:
    # 100 values: ranks 40 and 61 of the exact binomial interval, one more either way by the approximation.
    _, low, high = median_interval([float(i) for i in range(1, 101)])
    assert 40 <= low <= 41 and 60 <= high <= 62


def test_calls_are_timed_one_by_one_after_the_warm_up() -> None:
    time_ = Time()
    calls: list[int] = []

    def work(i: int) -> None:
        calls.append(i)
        time_.now += 5.0 if len(calls) <= 2 else 1.0 + (i == 3) * 6
        time_.busy += 0.5

    found = time_each(work, 5, warm_up=2, budget_s=100, clock=time_.clock())
    assert calls == [4, 3, 0, 1, 2, 3, 4]
    assert (found.median_s, found.high_s, found.count) == (1.0, 7.0, 5)
    assert found.wall_s == pytest.approx(2.2) and found.cpu_s == 0.5 and found.idle_s == pytest.approx(1.7)


def test_timing_ends_when_its_time_is_up() -> None:
    time_ = Time()

    def work(_: int) -> None:
        time_.now += 1

    assert time_each(work, 1000, budget_s=3, clock=time_.clock()).count == 4


def test_nothing_takes_longer_on_the_cpu_than_in_all() -> None:
    assert timing([1.0], [1.5]).cpu_s == 1.0


def test_a_rate_is_of_full_rounds_after_the_warm_up() -> None:
    time_ = Time()
    # Two workers: batches come in pairs, every 2 s; the first pair after 9 s of start-up.
    seconds = [9.0, 0.0] + [2.0, 0.0] * 10
    found = measure_rate(time_.batches(seconds), round_batches=2, warm_up=2, seconds=6, clock=time_.clock())
    assert found.per_s == pytest.approx(10.0) and found.low == found.high == pytest.approx(10.0)
    assert found.first_batch_s == 9.0 and not found.rough and found.samples == 60


def test_short_epochs_are_added_up() -> None:
    time_ = Time()

    class Short:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return time_.batches([5.0, 1.0, 1.0])

    found = measure_rate(Short(), seconds=3, clock=time_.clock())
    assert found.per_s == pytest.approx(10.0) and not found.rough


def test_an_epoch_too_short_for_rounds_counts_with_its_start() -> None:
    time_ = Time()

    class Tiny:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return time_.batches([4.0, 0.0])

    found = measure_rate(Tiny(), round_batches=8, warm_up=8, seconds=1, clock=time_.clock())
    assert found.rough and found.per_s == pytest.approx(5.0)


@pytest.mark.parametrize("nothing", [[], iter(())])
def test_a_loader_that_gives_nothing(nothing: Any) -> None:
    with pytest.raises(MeasurementError, match="no batch"):
        measure_rate(nothing)


def test_a_loader_that_raises_is_named_with_its_cause() -> None:
    def fails() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise ValueError("bad sample 7")

    with pytest.raises(MeasurementError, match=r"after 1 batches \(ValueError: bad sample 7") as caught:
        measure_rate(fails(), seconds=100)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_step_is_timed_and_its_failure_explained() -> None:
    seen: list[Any] = []
    assert time_step(seen.append, "batch", runs=5).count == 5 and len(seen) == 8

    def fails(_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(MeasurementError, match=r"the step fails on the first batch .*cannot be multiplied"):
        time_step(fails, 0)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [(torch.zeros(3, 2), 3), ((torch.zeros(4), 1), 4), ({"a": torch.zeros(5)}, 5), ([torch.zeros(6), 0], 6),
     (["x", "y"], 2), (torch.tensor(1), 1), ((), 1), ({}, 1), (None, 1), ([], 0)],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert batch_samples(batch) == samples


# ---------------------------------------------------------------- the model and the search


def test_the_model_has_its_ceilings() -> None:
    mixed = Load(wall_s=0.01, cpu_s=0.005)
    assert [predict(mixed, n, 2) for n in (1, 2, 4, 8)] == [100, 200, 400, 400]
    assert predict(Load(0.01, 0.01), 8, 1.5) == 150
    assert predict(Load(0.01, 0.001, serial_s=0.005), 8, 8) == 200
    assert predict(Load(0.01, 0.001, ceiling_per_s=250), 8, 8) == 250


def test_the_rule_of_thumb() -> None:
    assert field_rule(8, 0.4, 0.1) == 4 and field_rule(2, 0.4, 0.1) == 2 and field_rule(1.5, 1.0, None) == 1


def run(search: Search, machine: Callable[[int], float]) -> list[int]:
    """What a search measures on a machine whose curve is known."""
    asked: list[int] = []
    while (workers := search.next()) is not None:
        assert workers not in asked and 1 <= workers <= search.most
        asked.append(workers)
        search.add(workers, machine(workers))
    return asked


MACHINES: dict[str, tuple[Load, float, int, Callable[[int], float]]] = {
    "CPU": (Load(0.01, 0.01), 8, 32, lambda n: min(n, 8) * 100),
    "half a CPU": (Load(0.01, 0.01), 0.5, 4, lambda n: 50.0),
    "waits": (Load(0.01, 0.0002), 2, 32, lambda n: n * 100.0),
    "waits, eight at a time": (Load(0.01, 0.0002), 2, 32, lambda n: min(n, 8) * 100.0),
    "mixed": (Load(0.01, 0.005), 2, 32, lambda n: min(n * 100.0, 400)),
    "more hurt": (Load(0.01, 0.0002), 2, 32, lambda n: min(n, 6) * 100.0 - max(0, n - 6) * 15),
    "one at a time": (Load(0.01, 0.01), 8, 32, lambda n: 100.0),
    "faster than the probe said": (Load(0.02, 0.02), 4, 16, lambda n: min(n, 8) * 100.0),
    "hyper-threads": (Load(0.01, 0.01), 8, 32, lambda n: 100.0 * min(n, 4) + 30.0 * min(max(n - 4, 0), 4)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_search_finds_the_smallest_count_near_the_best_in_few_tries(name: str) -> None:
    load, cpus, most, machine = MACHINES[name]
    search = Search(load, cpus, most)
    asked = run(search, machine)
    chosen = choose(search.points)
    best = max(machine(n) for n in range(1, most + 1))
    smallest = next(n for n in range(1, most + 1) if machine(n) >= NEAR * best)
    assert chosen.per_s >= 0.95 * best
    assert chosen.workers <= smallest
    assert len(asked) <= 6


@pytest.mark.parametrize("demand", [50.0, 150.0, 390.0, 1000.0])
def test_with_a_demand_no_more_than_is_needed(demand: float) -> None:
    load, cpus, most, machine = MACHINES["mixed"]
    search = Search(load, cpus, most, demand)
    run(search, machine)
    chosen = choose(search.points, demand)
    assert chosen.feasible == (demand <= 400)
    needed = next((n for n in range(1, most + 1) if machine(n) >= 1.1 * demand), None)
    assert needed is None or chosen.workers <= needed
    assert machine(chosen.workers) >= min(demand, 0.97 * 400)


@given(
    wall=st.floats(1e-4, 1), share=st.floats(0.01, 1), cpus=st.floats(0.1, 64), most=st.integers(1, 64),
    limit=st.floats(1, 1e5), demand=st.one_of(st.just(math.inf), st.floats(1, 1e5)),
)
def test_a_search_always_ends(
    wall: float, share: float, cpus: float, most: int, limit: float, demand: float
) -> None:
    search = Search(Load(wall, wall * share), cpus, most, demand)
    assert len(run(search, lambda n: min(n / wall, limit))) <= most
    assert choose(search.points, demand).workers <= most


def test_one_core_tries_one_worker_first() -> None:
    assert Search(Load(0.01, 0.01), 1, 4).next() == 1


def probe(load: Load, samples: int = 64, nbytes: int = 10**7, variation: float = 0.0) -> Probe:
    return Probe(load, samples, nbytes, variation)


def test_most_workers_depends_on_waiting_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.tune.memory_headroom", lambda: 10**9)
    busy, waits = Load(0.01, 0.01), Load(0.01, 0.001)
    assert most_workers(probe(busy), 2, "thread", own=True) == 8
    assert most_workers(probe(waits), 2, "thread", own=True) == 32
    assert most_workers(probe(waits), 2, "process", own=True) == 16  # 0.5 GB in parts of 30 MB
    assert most_workers(probe(waits), 2, "process", own=True, ranks=4) == 4
    monkeypatch.setattr("loaders.tune.shm_free", lambda: 64 * 10**6)
    assert most_workers(probe(waits), 2, None, own=False) == 1
    monkeypatch.setattr("loaders.tune.shm_free", lambda: None)
    assert most_workers(probe(waits), 2, None, own=False) == 16


def concluded(points: list[Point], load: Load, *, cpus: float = 2, step_s: float | None = None, **about: Any) -> Tuned:
    return conclude(subject_of(lambda num_workers, engine: []), probe(load, **about), points, cpus, step_s)


def point(engine: str | None, workers: int, per_s: float) -> Point:
    return Point(engine, workers, per_s, per_s, per_s, 1.0)  # type: ignore[arg-type]


def test_the_reason_says_what_the_limit_is() -> None:
    burn = concluded([point("thread", 2, 195.0), point("thread", 4, 196.0)], Load(0.01, 0.01))
    assert burn.num_workers == 2 and "2 threads give 195 samples/s" in burn.reason and "2 CPUs" in burn.reason
    waits = concluded([point(None, 32, 3000.0)], Load(0.01, 0.0001))
    assert "32 workers" in waits.reason and "wait for storage" in waits.reason
    fed = concluded([point("process", 1, 90.0), point("process", 2, 195.0)], Load(0.01, 0.01), step_s=0.5)
    assert (fed.num_workers, fed.demand_per_s, fed.feasible) == (2, 128.0, True)
    assert fed.reason == "the step takes 128 samples/s, and 2 processes give 195; fewer would not do"


def test_an_infeasible_step_gets_remedies() -> None:
    burn = concluded([point("thread", 2, 195.0)], Load(0.01, 0.01), step_s=0.064)
    assert not burn.feasible and burn.num_workers == 2
    assert "no count gives more than 195" in burn.reason
    assert any("11 CPUs" in remedy for remedy in burn.remedies)
    waits = concluded([point("thread", 2, 195.0)], Load(0.01, 0.001), step_s=0.064)
    assert any("pack" in remedy for remedy in waits.remedies)


def test_the_first_engine_wins_a_tie_and_loses_a_race() -> None:
    tie = concluded([point("thread", 2, 195.0), point("process", 2, 198.0)], Load(0.01, 0.01))
    race = concluded([point("thread", 2, 105.0), point("process", 2, 198.0)], Load(0.01, 0.01))
    assert (tie.engine, race.engine) == ("thread", "process")


def test_uneven_batches_get_more_prefetch() -> None:
    points = [point("thread", 2, 100.0)]
    assert concluded(points, Load(0.01, 0.01)).prefetch is None
    assert concluded(points, Load(0.01, 0.01), variation=2.0).prefetch == 4


# ---------------------------------------------------------------- the real thing


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int = 24, bad: int = -1) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise ValueError("number 5 is bad")
        return torch.full((3,), index)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(24))


def upside_down(image: Any) -> Any:
    return image.resize((16, 16)).transpose(1)


def torch_loader(num_workers: int) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size=4, num_workers=num_workers)


FAST: dict[str, Any] = {"seconds": 0.05, "budget_s": 0.2, "max_workers": 2}


def check(found: Tuned) -> None:
    assert 1 <= found.num_workers <= 2 and found.per_s > 0 and found.reason and found.measured
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["num_workers"] == found.num_workers


def test_our_loader_is_tuned_and_the_answer_used(packed: Path, own_cache: Path) -> None:
    loader = make_loader(packed, batch_size=4, transform=TrainCrop(16))
    before = loader.state_dict()
    found = tune(loader, **FAST)
    check(found)
    assert found.engine in ("thread", "process") and found.code.startswith("make_loader(…, num_workers=")
    assert loader.state_dict() == before and len(list(loader)) == 5
    assert found.remembered is not None and Path(found.remembered).is_relative_to(own_cache)
    options = LoaderOptions(transform=TrainCrop(16))
    assert auto.settle(loader.source, options, []) == Settings(found.num_workers, found.engine, found.prefetch)
    loader.close()


def test_a_foreign_transform_runs_in_processes(packed: Path) -> None:
    with make_loader(packed, batch_size=4, transform=upside_down) as loader:
        found = tune(loader, keep=False, **FAST)
    assert found.engine == "process" and found.remembered is None


@pytest.mark.parametrize("loader", [
    torch_loader, DataLoader(Numbers(), batch_size=4), DataLoader(Stream(), batch_size=4),
    DataLoader(Numbers(), batch_size=None),
])  # fmt: skip
def test_other_loaders_are_tuned(loader: Any) -> None:
    found = tune(loader, step_ms=1000, **FAST)
    check(found)
    assert found.engine is None and found.demand_per_s is not None
    assert "num_workers=" in found.code


def test_a_factory_may_choose_engine_and_prefetch(packed: Path) -> None:
    opened: list[tuple[int, str, Any]] = []

    def make(num_workers: int, engine: str, prefetch: int | None = None) -> Any:
        opened.append((num_workers, engine, prefetch))
        return make_loader(packed, batch_size=4, transform=TrainCrop(16), num_workers=num_workers, engine=engine)  # type: ignore[arg-type]

    found = tune(make, engine="thread", **FAST)
    assert {engine for _, engine, _ in opened} == {"thread"} and found.engine == "thread"
    assert found.code.startswith("make(num_workers=")


def test_a_real_step_sets_the_demand(packed: Path) -> None:
    sizes: list[int] = []

    def step(batch: Any) -> None:
        sizes.append(len(batch[0]))
        time.sleep(0.001)

    with make_loader(packed, batch_size=10, transform=TrainCrop(16)) as loader:
        found = tune(loader, step=step, keep=False, **FAST)
    assert set(sizes) == {10} and found.demand_per_s is not None and 0 < found.demand_per_s <= 10_000


def test_what_cannot_be_tuned_says_so(packed: Path) -> None:
    with pytest.raises(UsageError, match="num_workers"):
        tune(lambda workers: [])
    with pytest.raises(UsageError, match="cannot be opened with other settings"):
        tune(iter([1]))
    with pytest.raises(UsageError, match="two answers"):
        tune(torch_loader, step=print, step_ms=3)
    with pytest.raises(UsageError, match="positive"):
        tune(torch_loader, ranks=0)
    with pytest.raises(UsageError, match="engine 'thread' cannot be tried"):
        tune(torch_loader, engine="thread")


def test_bad_loaders_give_clear_answers(packed: Path) -> None:
    with pytest.raises(MeasurementError, match="no batch"):
        tune(lambda num_workers: [])
    with pytest.raises(MeasurementError, match="no batch"):  # smaller than a batch
        tune(DataLoader(Numbers(3), batch_size=4, drop_last=True))
    with pytest.raises(MeasurementError, match="ValueError: number 5 is bad"):
        tune(DataLoader(Numbers(bad=5), batch_size=4))
    with pytest.raises(MeasurementError, match="cannot be iterated"):
        tune(lambda num_workers: 5)
    with pytest.raises(MeasurementError, match=r"<lambda>\(num_workers=0\) fails: ZeroDivisionError"):
        tune(lambda num_workers: 1 / 0)
    used_up = iter([torch.zeros(1)])
    list(used_up)
    with pytest.raises(MeasurementError, match="used up"):
        tune(lambda num_workers: used_up)


def test_an_empty_split_and_a_broken_picture(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "src", samples=4)
    (tree / "c0" / "p000.jpg").write_bytes(b"\xff\xd8 no picture")
    with folder_loader(tree, batch_size=4, transform=TrainCrop(8)) as loader, pytest.raises(SampleError, match="p000"):
        tune(loader, **FAST)
    out = pack_tree(write_tree(tmp_path / "good", samples=4), tmp_path / "out")
    with make_loader(out, subset=[], transform=TrainCrop(8)) as loader, pytest.raises(MeasurementError):
        tune(loader, **FAST)


def test_the_probe_leaves_waiting_for_a_cpu_out() -> None:
    time_ = Time()
    queued = [0.0]

    class Crowded:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(5):
                time_.now += 4.0
                time_.busy += 1.0
                queued[0] += 3.0
                yield torch.zeros(2)

    clock = Clock(lambda: time_.now, lambda: time_.busy, lambda: queued[0])
    found = probe_load(subject_of(lambda num_workers: Crowded()), None, seconds=100, clock=clock)
    assert found.load == Load(0.5, 0.5) and found.samples == 2 and found.variation == 0


# ---------------------------------------------------------------- what "auto" stands for


@pytest.mark.parametrize(
    ("cpus", "disk", "most", "want"),
    [(8.0, None, None, 8), (1.5, None, None, 2), (0.2, None, None, 1), (2.67, None, None, 3),
     (4.0, "network", None, 16), (16.0, "network", None, 32), (64.0, "network", None, 64), (4.0, "memory", None, 4),
     (8.0, None, 3, 3), (8.0, None, 0, 1)],
)
def test_the_estimate(cpus: float, disk: Any, most: int | None, want: int) -> None:
    assert auto.workers_for(cpus, disk and Disk(disk, "x", 1), most) == want


def test_processes_must_fit_into_memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_loader(packed).source
    monkeypatch.setattr(auto, "usable_cpus", lambda: 16.0)
    monkeypatch.setattr(auto, "memory_headroom", lambda: 4 * 5 * 3 * 64 * 3 * 224 * 224)
    options = LoaderOptions(transform=TrainCrop(224))
    assert auto.estimate(source, options, "thread") == 16
    assert auto.estimate(source, options, "process") == 5


def test_settling_starts_nothing(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_loader(packed).source

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is to be started")

    monkeypatch.setattr(os, "fork", never)
    monkeypatch.setattr("threading.Thread.start", never)
    assert auto.settle(source, LoaderOptions(), ["transform"]).num_workers >= 1


def test_a_given_number_or_engine_goes_before_what_is_remembered(packed: Path) -> None:
    source = make_loader(packed).source
    key = remember.key_of(source, LoaderOptions())
    assert key is not None
    remember.remember(key, Settings(7, "process", 5), {})
    assert auto.settle(source, LoaderOptions(), []) == Settings(7, "process", 5)
    assert auto.settle(source, LoaderOptions(prefetch=2), []) == Settings(7, "process", 2)
    assert auto.settle(source, LoaderOptions(num_workers=3), []) == Settings(3, "thread", None)
    assert auto.settle(source, LoaderOptions(engine="thread"), []).engine == "thread"
    assert auto.settle(source, LoaderOptions(transform=TrainCrop(8)), []).num_workers != 7


def test_answers_are_told_apart(packed: Path, tmp_path: Path) -> None:
    source = make_loader(packed).source
    key = remember.key_of(source, LoaderOptions(transform=TrainCrop(8)))
    assert key == remember.key_of(make_loader(packed).source, LoaderOptions(transform=TrainCrop(8)))
    assert key != remember.key_of(source, LoaderOptions(transform=TrainCrop(9)))
    assert key != remember.key_of(source, LoaderOptions(transform=upside_down))
    assert remember.key_of(source, LoaderOptions(transform=upside_down)) == remember.key_of(
        source, LoaderOptions(transform=upside_down)
    )
    with make_loader(packed, preload="memory") as loader:
        assert remember.key_of(loader.source, LoaderOptions()) is None
    assert remember.recall(None) is None


@pytest.mark.parametrize("content", [
    "", "{", "[]", "{}", '{"num_workers": "2", "engine": null, "prefetch": null}',
    '{"num_workers": -1, "engine": null, "prefetch": null}', '{"num_workers": true, "engine": null, "prefetch": null}',
    '{"num_workers": 2, "engine": "auto", "prefetch": null}', '{"num_workers": 2, "engine": "thread", "prefetch": 0}',
    pytest.param("[" * 100_000, id="nested"),
])  # fmt: skip
def test_a_damaged_memory_counts_as_none(content: str) -> None:
    folder = Path(remember.cache_folder())
    folder.mkdir(parents=True)
    (folder / "k.json").write_text(content)
    assert remember.recall("k") is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "file"))
    assert remember.remember("k", Settings(1), {}) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert remember.cache_folder().startswith(os.path.expanduser("~"))


def test_nothing_partial_is_left(own_cache: Path) -> None:
    remember.remember("k", Settings(1, "thread", 3), {"reason": "because"})
    remember.remember("k", Settings(2, "thread", None), {})
    assert [path.name for path in Path(remember.cache_folder()).iterdir()] == ["k.json"]
    assert remember.recall("k") == Settings(2, "thread", None)


# ---------------------------------------------------------------- the command


def test_the_command(packed: Path, run_packer: Callable[..., Result]) -> None:
    options = ("--size", "16", "--batch-size", "4", "--max-workers", "2", "--seconds", "0.05")
    result = run_packer("tune", packed, *options)
    assert "workers  predicted/s  thread/s" in result.stdout and "make_loader(…, num_workers=" in result.stdout
    assert "rule of thumb" in result.stdout and "Remembered" in result.stdout
    found = json.loads(run_packer("tune", packed, *options, "--json", "--no-remember", "-q").stdout)
    assert {"num_workers", "engine", "prefetch", "reason", "predicted", "measured"} <= set(found)
    assert found["remembered"] is None


def test_the_command_says_when_no_count_will_do(packed: Path, run_packer: Callable[..., Result]) -> None:
    result = run_packer(
        "tune", packed, "--size", "16", "--max-workers", "1", "--seconds", "0.05", "--step-ms", "0.0001",
        "--no-remember", exit_code=1,
    )
    assert "no count gives more than" in result.stdout and "What would help" in result.stdout


def test_the_command_on_a_users_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_packer: Callable[..., Result]
) -> None:
    (tmp_path / "my_training.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def make(num_workers):\n"
        "    return DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=8, num_workers=num_workers)\n"
        "def transform():\n    return lambda image: image.resize((8, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tree = write_tree(tmp_path / "src", samples=8)
    fast = ("--max-workers", "1", "--seconds", "0.05")
    assert "make(num_workers=1)" in run_packer("tune", "--loader", "my_training:make", *fast).stdout
    result = run_packer("tune", tree, "--transform", "my_training:transform", "--batch-size", "4", *fast, "--json")
    assert json.loads(result.stdout)["engine"] == "process"
    assert "no function 'other'" in run_packer("tune", "--loader", "my_training:other", exit_code=2).stderr
    assert "cannot import 'no_such'" in run_packer("tune", "--loader", "no_such:make", exit_code=2).stderr
    assert "module:function" in run_packer("tune", "--loader", "my_training", exit_code=2).stderr
    assert "either OUT" in run_packer("tune", exit_code=2).stderr
    assert "either OUT" in run_packer("tune", tree, "--loader", "my_training:make", exit_code=2).stderr
