#!/usr/bin/env python3
r"""How good `packer tune` and `packer doctor` are: against a full grid, on loads whose limit is known.

Method. Each load is a torch `DataLoader` (or threads) over a dataset that sleeps, burns CPU time, or both, with a step
that sleeps. In a process of its own, and where it says so in a control group with a quota, each load is

- tuned, as `packer tune` does it;
- measured at every worker count of the grid, three times as long per count: the truth;
- diagnosed, with as many workers as CPUs.

The table says: which count was chosen, and the smallest that comes within 3 % of the grid's best; the chosen count's
throughput in the grid over the best, with a step counted up to what it takes; the tuner's time over the grid's; the
limit that the doctor named and the true one; its best remedy's predicted and measured gain.

    scripts/bench_tune.py --json tune.json --markdown docs/tuning.md
    scripts/bench_tune.py --data out/ --cases data --json tune-images.json

Some ten minutes for all loads; the machine must have nothing else to do. `--seconds 0.1 --most 4` tries the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from loaders.curve import GRID  # noqa: E402
from loaders.doctor import doctor  # noqa: E402
from loaders.opening import Reading, open_subject  # noqa: E402
from loaders.options import Settings  # noqa: E402
from loaders.resources import usable_cpus  # noqa: E402
from loaders.subject import Subject, subject_of  # noqa: E402
from loaders.trials import loader_rate  # noqa: E402
from loaders.tune import tune  # noqa: E402

BATCH = 16
FRESH = 1 << 20  # samples in the synthetic datasets: no epoch ends


@dataclass(frozen=True)
class Case:
    """A load.

    Attributes:
        limit: what the doctor must find.
        sleep_ms: a sample waits so long.
        burn_ms: a sample takes so much CPU time, holding the GIL.
        tail_ms: one sample in fifty waits so long instead.
        step_ms: the step.
        transfer_ms: moving a batch.
        quota: CPUs of the control group that it runs in.
        threads: workers are threads of this process, unless the tuner chooses processes.
    """

    limit: str
    sleep_ms: float = 0.0
    burn_ms: float = 0.0
    tail_ms: float = 0.0
    step_ms: float | None = None
    transfer_ms: float | None = None
    quota: float | None = None
    threads: bool = False


CASES = {
    "sleep-bound reads": Case("storage", sleep_ms=4, burn_ms=0.05),
    "CPU burn": Case("CPU", burn_ms=2),
    "mixed": Case("storage", sleep_ms=4, burn_ms=1),
    "heavy tail": Case("storage", sleep_ms=1, burn_ms=0.1, tail_ms=100),
    "GIL-bound transform": Case("one core", burn_ms=2, threads=True),
    "transfer-bound": Case("transfer", burn_ms=0.2, transfer_ms=30, step_ms=5),
    "CPU quota of 1": Case("CPU", burn_ms=2, quota=1.0),
    "step slower than loading": Case("step", burn_ms=0.5, step_ms=40),
    "a step that needs two workers": Case("step", sleep_ms=2, burn_ms=0.2, step_ms=30),
}


class Load(Dataset[torch.Tensor]):
    """Samples that cost what a case says."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return FRESH

    def __getitem__(self, index: int) -> torch.Tensor:
        case = self.case
        slow = case.tail_ms and random.Random(index).random() < 0.02
        if case.sleep_ms or slow:
            time.sleep((case.tail_ms if slow else case.sleep_ms) / 1000)
        end = time.thread_time() + case.burn_ms / 1000
        while time.thread_time() < end:
            pass
        return torch.full((64,), index % 251)


class Threads:
    """Batches in order, each made by one of some threads."""

    def __init__(self, dataset: Load, workers: int) -> None:
        self.dataset = dataset
        self.workers = max(1, workers)

    def __iter__(self) -> Iterator[torch.Tensor]:
        starts = iter(range(0, FRESH, BATCH))
        with ThreadPoolExecutor(self.workers) as pool:
            waiting = [pool.submit(self.batch, next(starts)) for _ in range(2 * self.workers)]
            try:
                while True:
                    yield waiting.pop(0).result()
                    waiting.append(pool.submit(self.batch, next(starts)))
            finally:
                for future in waiting:
                    future.cancel()

    def batch(self, start: int) -> torch.Tensor:
        """The samples from a number on."""
        return torch.stack([self.dataset[index] for index in range(start, start + BATCH)])


def subject(case: Case) -> Subject:
    """The load as something to tune."""
    dataset = Load(case)
    if not case.threads:
        return subject_of(DataLoader(dataset, batch_size=BATCH))

    def make(num_workers: int, engine: str) -> Any:
        if engine == "thread" and num_workers:
            return Threads(dataset, num_workers)
        return DataLoader(dataset, batch_size=BATCH, num_workers=num_workers)

    return subject_of(make)


# ---------------------------------------------------------------- measuring one case, in its own process


def measure(load: Subject, case: Case, seconds: float, most: int) -> dict[str, Any]:
    """Tune, grid and doctor."""
    pause = case.transfer_ms

    def transfer(batch: Any) -> Any:
        time.sleep((pause or 0) / 1000)
        return batch

    busy_ms = (case.step_ms or 0) + (pause or 0)
    tuned = tune(load, step_ms=busy_ms or None, max_workers=most, seconds=seconds, keep=False)
    counts = [count for count in GRID if count <= most]
    grid: dict[str, float] = {}
    begun = time.perf_counter()
    for engine in load.engines:
        for count in counts:
            grid[f"{engine} {count}"] = loader_rate(load, Settings(count, engine), 3 * seconds)
    grid_s = time.perf_counter() - begun
    chosen = f"{tuned.engine} {tuned.num_workers}"
    if chosen not in grid:
        grid[chosen] = loader_rate(load, Settings(tuned.num_workers, tuned.engine), 3 * seconds)
    enough = 1.1 * tuned.demand_per_s if tuned.demand_per_s else float("inf")
    best = min(enough, max(grid.values()))
    near = [key for key, rate in grid.items() if rate >= 0.97 * best]
    found = doctor(load, step_ms=case.step_ms, transfer=transfer if pause else None, seconds=2 * seconds, tries=1,
                   num_workers=max(1, round(usable_cpus())))
    tried = next((one for one in found.remedies if one.measured_gain is not None), None)
    return {
        "cpus": usable_cpus(), "chosen": tuned.num_workers, "engine": tuned.engine, "prefetch": tuned.prefetch,
        "reason": tuned.reason, "rule_of_thumb": tuned.rule_of_thumb, "feasible": tuned.feasible,
        "smallest_near_best": min(int(key.split()[1]) for key in near), "share_of_best": min(1.0, grid[chosen] / best),
        "tune_s": tuned.cost_s, "grid_s": grid_s, "cost_share": tuned.cost_s / grid_s, "grid": grid,
        "measured": [[point.engine, point.num_workers, point.per_s] for point in tuned.measured],
        "limit": found.limit, "wait_share": found.observed.wait_share,
        "remedy": None if tried is None else {
            "name": tried.name, "predicted": tried.gain, "measured": tried.measured_gain
        },
    }


# ---------------------------------------------------------------- running them all


@contextlib.contextmanager
def quota_group(cpus: float | None) -> Iterator[str | None]:
    """A control group with a quota; None for no quota.

    Raises:
        OSError: none can be made here.
    """
    if cpus is None:
        yield None
        return
    v1 = Path("/sys/fs/cgroup/cpu")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"bench-tune-{os.getpid()}"
    folder.mkdir()
    try:
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_quota_us").write_text(f"{int(cpus * 100_000)}")
        else:
            (folder / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000")
        yield str(folder / "cgroup.procs")
    finally:
        folder.rmdir()


def run_case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    case = CASES.get(name)
    command = [sys.executable, __file__, "--inside", name, "--seconds", str(args.seconds), "--most", str(args.most)]
    command += ["--data", args.data] if args.data else []
    try:
        with quota_group(None if case is None else case.quota) as group:
            done = subprocess.run([*command, *(["--group", group] if group else [])], capture_output=True, text=True,
                                  timeout=1800, check=False)
    except OSError as error:
        return {"failed": f"no control group: {error.strerror}"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "true_limit": None if case is None else case.limit}


def inside(args: argparse.Namespace) -> None:
    """The process of one case."""
    if args.group:
        Path(args.group).write_text(str(os.getpid()))
    if args.inside == "data":
        load, case = open_subject(args.data, None, Reading()), Case("")
    else:
        case = CASES[args.inside]
        load = subject(case)
    print(json.dumps(measure(load, case, args.seconds, args.most)))


def table(cases: dict[str, dict[str, Any]]) -> list[str]:
    """The Markdown table."""
    lines = ["| load | chosen | smallest within 3 % | of the best | time of the grid's | rule of thumb | limit named "
             "| best remedy: predicted, measured |", "|---|---|---|---|---|---|---|---|"]
    for name, found in cases.items():
        if "failed" in found:
            lines.append(f"| {name} | not measured: {found['failed']} | | | | | | |")
            continue
        engine = f" {found['engine']}" if found["engine"] else ""
        right = found["true_limit"] in (None, found["limit"])
        limit = found["limit"] if right else f"**{found['limit']}** (true: {found['true_limit']})"
        remedy = found["remedy"]
        gain = f"{remedy['name']}: {remedy['predicted']:.2f}×, {remedy['measured']:.2f}×" if remedy else "–"
        lines.append(
            f"| {name} | {found['chosen']}{engine} | {found['smallest_near_best']} | {found['share_of_best']:.0%} "
            f"| {found['cost_share']:.0%} | {found['rule_of_thumb']} | {limit} | {gain} |"
        )
    return lines


def page(report: dict[str, Any]) -> str:
    """docs/tuning.md."""
    about = report["machine"]
    return "\n".join([
        "# How good the tuner and the doctor are", "",
        "Written by `scripts/bench_tune.py`, whose head says how it measures. Synthetic loads sleep, burn CPU time, or "
        "both, and so have a limit that is known; each is tuned, measured at every worker count of a grid, and "
        "diagnosed.", "",
        *table(report["cases"]), "",
        f"Measured on {report['date']}: {about['cpus']:g} CPUs ({about['processor']}), Python {about['python']}, torch "
        f"{about['torch']}; {report['seconds']:g} s for each count of the tuner, three times that in the grid of "
        f"{report['grid']}; load average {about['load']:.1f} at the start. *Of the best*: the chosen count's "
        "throughput in the grid, over the best there is, or over what the step takes with a tenth to spare.", "",
    ])


def main() -> None:
    """Measure, print, write; see the module's text."""
    args = arguments()
    if args.inside:
        inside(args)
        return
    names = args.cases.split(",") if args.cases else [*CASES, *(["data"] if args.data else [])]
    report: dict[str, Any] = {
        "date": date.today().isoformat(), "seconds": args.seconds, "cases": {},
        "grid": f"{', '.join(str(count) for count in GRID if count <= args.most)} workers",
        "machine": {"cpus": usable_cpus(), "processor": platform.processor() or platform.machine(),
                    "python": platform.python_version(), "torch": torch.__version__, "load": os.getloadavg()[0]},
    }
    if os.getloadavg()[0] > 0.5:
        print(f"other programs are running (load {os.getloadavg()[0]:.1f}): the figures will scatter", file=sys.stderr)
    for name in names:
        print(f"{name} …", file=sys.stderr)
        report["cases"][name] = run_case(name, args)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report["cases"])))
    if args.markdown:
        Path(args.markdown).write_text(page(report), "utf-8")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}, data; default: all, data where --data is given")
    parser.add_argument("--data", help="a packed dataset, or a folder of pictures")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each count of the tuner; a third of the grid's")
    parser.add_argument("--most", type=int, default=32, help="largest number of workers")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--markdown", help="write the table here, with a text")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    unknown = {*(args.cases.split(",") if args.cases else ())} - {*CASES, "data"}
    if unknown or (args.cases and "data" in args.cases.split(",") and not args.data):
        parser.error(f"no such case: {', '.join(sorted(unknown)) or 'data without --data'}")
    return args


if __name__ == "__main__":
    main()
