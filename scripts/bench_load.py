#!/usr/bin/env python3
r"""How fast our loaders are, against their peers, at equal work.

Method. All loaders get the same JPEGs, packed into the format of each beforehand, and must give the same thing:
shuffled batches of 64, images a contiguous (B, 3, 224, 224) tensor of normalised float32, labels int64; a random crop
of the same distribution, resized, every second one mirrored. Each has two workers, and two cores for everything.

- Every loader runs in a process of its own, all of them in turn (A B C A B C …), so that what else the machine does
  hits all alike. The median of the runs is compared; lowest and highest stand beside it.
- The first turn is not timed: it looks at what comes out. Each sample must come exactly once, with its label. Mean and
  standard deviation of the pixels must be those of torchvision's ImageFolder on Pillow. On pictures of colour ramps the
  crops themselves are measured: area, aspect ratio, mirroring, and that each label belongs to its picture. Whoever
  differs is marked in the table. Peak memory is taken in this turn: PSS of the process and all below it.
- Images/s count from the end of the warm-up batches to the end of the epoch, over as many epochs as fit into the time.
  The loader is opened, and gives its first batch after `iter()`, in a new process; its imports are not counted, what it
  compiles is. CPU seconds include workers.
- `limit` is no loader: as many bare threads, which run our decode function over pictures in memory and nothing else.

Tasks: crop-float32 and crop-uint8 as above; tiny-float32, pictures of 64×64 as they are; read and read-tiny, encoded
bytes and label one by one in one process, without decoding.

    scripts/make_peers_env
    scripts/bench_load.py /data/imagenet/train --tiny /data/tiny/train --work /disk/bench \
        --python .venv-peers/bin/python --json load.json

A peer that is not installed, or fails, is listed with the reason. Data stay in --work for the next time; --runs 0 only
packs and checks. A task with all loaders and five runs takes some 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from peers import PEERS, REFERENCE  # noqa: E402
from peers.base import Task, list_tree  # noqa: E402
from peers.harness import Bench, machine  # noqa: E402
from peers.measure import Figures, Settings, measure, measure_reading, say  # noqa: E402

TASKS: Mapping[str, Task | None] = {
    "crop-float32": Task(),
    "crop-uint8": Task(dtype="uint8"),
    "tiny-float32": Task(side=64, crop=False),
    "read": None,
    "read-tiny": None,
}
READERS = ("packer-random", "packer-in-order", "files", "webdataset")
LOADERS = tuple(name for name in PEERS if name not in READERS)
RAMPS = 640


def main() -> None:
    """Measure, print, write; see the module's text."""
    args = arguments()
    os.makedirs(args.work, exist_ok=True)
    cores = tuple(sorted(os.sched_getaffinity(0)))[: args.cores]
    bench = Bench(os.path.realpath(args.work), os.path.abspath(args.python), cores, args.timeout)
    settings = Settings(args.runs, args.seconds, args.warm_up, args.ramps)
    if os.getloadavg()[0] > 0.5:
        say(f"other programs are running (load {os.getloadavg()[0]:.1f}): the figures will scatter")
    report: dict[str, Any] = {
        "benchmark": "load",
        "machine": machine(),
        "cores_used": len(cores),
        "options": {"runs": args.runs, "seconds": args.seconds, "workers": args.workers, "batch_size": args.batch_size},
        "tasks": {},
    }
    for name in args.tasks.split(","):
        tiny = "tiny" in name
        source, images = (args.tiny, args.tiny_images) if tiny else (args.images, args.image_count)
        if source is None:
            continue
        tree = bench.tree("tiny" if tiny else "images", os.path.realpath(source), images)
        task = TASKS[name]
        if task is None:
            figures = measure_reading(bench, tree, chosen(args.loaders, READERS), settings)
            show_reading(name, figures)
        else:
            task = Task(task.side, task.crop, task.dtype, args.batch_size, args.workers)
            figures = measure(bench, tree, task, chosen(args.loaders, LOADERS), settings)
            show(name, task, figures)
        report["tasks"][name] = {
            "images": len(list_tree(tree)),
            "loaders": {key: value.summary() for key, value in figures.items()},
        }
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="?", help="an ImageFolder of JPEGs")
    parser.add_argument("--tiny", help="an ImageFolder of 64×64 JPEGs")
    parser.add_argument("--work", required=True, help="folder for packed data; several GB, kept")
    parser.add_argument("--python", default=sys.executable, help="of the environment made by scripts/make_peers_env")
    parser.add_argument("--tasks", default="crop-float32,tiny-float32,read,read-tiny", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--loaders", help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5, help="a run lasts until the epoch after this")
    parser.add_argument("--warm-up", type=int, default=4, help="batches of each epoch that do not count")
    parser.add_argument("--image-count", type=int, default=3200)
    parser.add_argument("--tiny-images", type=int, default=19200)
    parser.add_argument("--ramps", type=int, default=RAMPS, help="pictures by which crops are checked; 0: no check")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a loader has failed")
    parser.add_argument("--json", help="write all figures here")
    args = parser.parse_args()
    if unknown := {*args.tasks.split(",")} - {*TASKS}:
        parser.error(f"no such task: {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    if unknown := {*(args.loaders or "").split(","), ""} - {*PEERS, ""}:
        parser.error(f"no such loader: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return args


def chosen(names: str | None, among: Iterable[str]) -> list[str]:
    """Those of the loaders that were asked for."""
    return [name for name in among if names is None or name in names.split(",")]


# ---------------------------------------------------------------- showing


def show(name: str, task: Task, figures: Mapping[str, Figures]) -> None:
    """One table, fastest first."""
    measured = {key: mine for key, mine in figures.items() if mine.runs}
    print(f"\n{name}: {task.side}×{task.side}, {task.dtype}, batch {task.batch_size}, {task.workers} workers")
    columns = ("images/s", 9), ("spread", 16), ("× ref", 7), ("open s", 8), ("1st batch s", 12), ("peak MB", 9)
    print(" " * 34 + "".join(f"{head:>{width}}" for head, width in columns) + f"{'CPU s/1000':>11}")
    reference = measured[REFERENCE].spread("images_per_s")[0] if REFERENCE in measured else float("nan")
    for mine in sorted(measured.values(), key=lambda mine: -mine.spread("images_per_s")[0]):
        median, low, high = mine.spread("images_per_s")
        print(
            f"{mine.title:34}{median:>9,.0f}{f'{low:,.0f}–{high:,.0f}':>16}{median / reference:>7.2f}"
            f"{mine.spread('open_s')[0]:>8.2f}{mine.spread('first_batch_s')[0]:>12.2f}{mine.check['peak_mb']:>9,.0f}"
            f"{mine.spread('cpu_s_per_1000')[0]:>11.2f}{'  NOT EQUAL' if mine.unequal else ''}"
        )
    show_rest(figures)


def show_reading(name: str, figures: Mapping[str, Figures]) -> None:
    """The table of those that only read."""
    print(f"\n{name}: encoded bytes and label, one process, page cache warm")
    print(f"{'':34}{'µs a sample':>12}{'spread':>16}")
    for mine in figures.values():
        if mine.runs:
            median, low, high = mine.spread("us_per_sample")
            print(f"{mine.title:34}{median:>12.1f}{f'{low:.1f}–{high:.1f}':>16}")
    show_rest(figures)


def show_rest(figures: Mapping[str, Figures]) -> None:
    """What was not measured, and what is not equal."""
    for mine in figures.values():
        if mine.failed:
            print(f"{mine.title:34} not measured: {mine.failed}")
        for what in mine.unequal:
            print(f"{mine.title:34} not equal: {what}")


if __name__ == "__main__":
    main()
