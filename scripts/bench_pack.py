#!/usr/bin/env python3
"""How fast packing is, against GNU tar and webdataset's ShardWriter.

Method: every packer packs the same folder into the same file system, all of them in turn
(A B C A B C …), each as a process of its own; the median of the runs is compared, the spread
printed beside. The start-up time of `packer` and of the ShardWriter script, measured on a folder
of one file, is subtracted from theirs. `tar cf` leaves its data in the page cache, packer makes
every shard durable before it gets its name unless told otherwise; so both are measured both
ways. Equal work is: `--no-sync` against `tar cf`, the default against tar and fsync. ShardWriter
writes the same samples (jpg and cls members, integer times) without checksum or index. Before
each run as much page cache as it will need is touched once.

    scripts/bench_pack.py /data/imagenet-like --scratch /disk/tmp --scratch /dev/shm --runs 7 --json pack.json

Peers must run in this Python (`pip install webdataset`). `find` is the yardstick for scanning.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHARD_WRITER = """
import os, sys
import webdataset as wds
root, out = sys.argv[1:]
classes = {}
with wds.ShardWriter(os.path.join(out, "train-%06d.tar"), maxsize=512_000_000, verbose=0, mtime=0) as sink:
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            if name.lower().endswith((".jpg", ".jpeg")):
                label = classes.setdefault(folder, len(classes))
                path = os.path.join(folder, name)
                key = os.path.splitext(os.path.relpath(path, root))[0].replace(".", "_")
                with open(path, "rb") as f:
                    sink.write({"__key__": key, "jpg": f.read(), "cls": label})
"""

_touched_bytes = 0


def main() -> None:
    """Measure and print; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="an ImageFolder of JPEG files")
    parser.add_argument("--scratch", action="append", help="where to write; give a disk and a tmpfs (repeatable)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="write all figures here")
    args = parser.parse_args()
    source = os.path.realpath(args.source)
    images = sum(name.lower().endswith((".jpg", ".jpeg", ".png")) for _, _, names in os.walk(source) for name in names)
    report = {"machine": machine(), "source": {"images": images}, "runs": args.runs, "scratch": {}}
    for scratch in args.scratch or [tempfile.gettempdir()]:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            result = measure(source, images, folder, args.runs)
        report["scratch"][filesystem(scratch)] = result
        show(filesystem(scratch), images, result)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


def machine() -> dict[str, object]:
    """What the figures depend on."""
    import packer  # light; importing torch here would count into every child's peak memory

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    tar = subprocess.run(["tar", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tar": tar,
        "webdataset": importlib.metadata.version("webdataset"),
        "packer": packer.__version__,
    }


def filesystem(folder: str) -> str:
    """Kind of file system below a folder, for example `ext4`."""
    return subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True).stdout.strip()


def measure(source: str, images: int, folder: str, runs: int) -> dict[str, dict[str, object]]:
    """Seconds, peak memory and images/s of every packer, and of scanning."""
    one = os.path.join(folder, "one", "class")
    os.makedirs(one)
    first = next(
        os.path.join(top, name)
        for top, _, names in os.walk(source)
        for name in names
        if name.lower().endswith((".jpg", ".jpeg"))
    )
    shutil.copy(first, one)
    one = os.path.dirname(one)
    out, tar = os.path.join(folder, "out"), os.path.join(folder, "t.tar")
    packer = [sys.executable, "-m", "packer", "shard"]
    writer = [sys.executable, "-c", SHARD_WRITER]
    global _touched_bytes
    _touched_bytes = sum(os.path.getsize(os.path.join(top, n)) for top, _, names in os.walk(source) for n in names)
    candidates: dict[str, Callable[[], tuple[float, int]]] = {
        "tar cf": lambda: run(["tar", "cf", tar, "-C", source, "."], tar),
        "tar cf + fsync": lambda: run(["tar", "cf", tar, "-C", source, "."], tar, sync=True),
        "packer, 1 worker": lambda: run([*packer, source, out, "-q", "-j", "1"], out),
        "packer, 2 workers": lambda: run([*packer, source, out, "-q", "-j", "2"], out),
        "packer --no-sync, 1 worker": lambda: run([*packer, source, out, "-q", "-j", "1", "--no-sync"], out),
        "packer --no-sync, 2 workers": lambda: run([*packer, source, out, "-q", "-j", "2", "--no-sync"], out),
        **{
            f"packer --format {name} --no-sync, 1 worker": (
                lambda name=name: run([*packer, source, out, "-q", "-j", "1", "--no-sync", "--format", name], out)
            )
            for name in ("hdf5", "tfrecord")
        },
        "packer, one file": lambda: run([*packer, one, out, "-q", "-j", "1"], out),
        "ShardWriter": lambda: run([*writer, source, out], out, make=True),
        "ShardWriter, one file": lambda: run([*writer, one, out], out, make=True),
        "find": lambda: run(["find", source, "-type", "f", "-printf", "%s %p\\n"], out),
        "packer --dry-run": lambda: run([*packer, source, out, "--dry-run"], out),
        "packer --dry-run, one file": lambda: run([*packer, one, out, "--dry-run"], out),
    }
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in candidates}
    for turn in range(runs + 1):  # the first turn warms the page cache
        for name, candidate in candidates.items():
            figure = candidate()
            if turn:
                taken[name].append(figure)
    start = {
        name: statistics.median(s for s, _ in taken[f"{name}, one file"])
        for name in ("packer", "ShardWriter", "packer --dry-run")
    }
    result: dict[str, dict[str, object]] = {}
    for name, figures in taken.items():
        known = next(
            (
                start[s]
                for s in ("packer --dry-run", "ShardWriter", "packer")
                if name.startswith(s) and "one file" not in name
            ),
            0.0,
        )
        seconds = sorted(max(s - known, 1e-6) for s, _ in figures)
        median = statistics.median(seconds)
        result[name] = {
            "seconds": seconds,
            "median_s": median,
            "start_up_s": known,
            "images_per_s": images / median,
            "peak_mb": max(m for _, m in figures) / 1e3,
        }
    return result


def run(command: list[str], produced: str, *, sync: bool = False, make: bool = False) -> tuple[float, int]:
    """Wall seconds and peak resident kilobytes of one process; what it produced is removed afterwards."""
    if make:
        os.makedirs(produced)
    _touch_memory(os.path.dirname(produced))
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    if sync:
        fd = os.open(produced, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    seconds = time.perf_counter() - begin
    if os.path.isdir(produced):
        shutil.rmtree(produced)
    elif os.path.exists(produced):
        os.unlink(produced)
    return seconds, usage.ru_maxrss


def _touch_memory(folder: str) -> None:
    """Give every run page-cache memory in the same state.

    A virtual machine hands memory back to its host some seconds after it was freed, and whoever
    touches it next waits for the host: as much as the whole of packing. So a file as large as
    what will be written is written and removed just before.
    """
    path = os.path.join(folder, "touch")
    block = bytes(8 << 20)
    with open(path, "wb", buffering=0) as f:
        for _ in range(_touched_bytes // len(block) + 1):
            f.write(block)
    os.unlink(path)
    os.sync()


def show(kind: str, images: int, result: dict[str, dict[str, object]]) -> None:
    """The table."""
    tar, durable = float(result["tar cf"]["median_s"]), float(result["tar cf + fsync"]["median_s"])  # type: ignore[arg-type]
    print(f"\n{images} images, written to {kind}")
    print(f"{'':44}{'images/s':>10}{'× tar':>8}{'× tar+fsync':>13}{'spread':>16}{'peak MB':>9}")
    for name, row in result.items():
        if "one file" in name or name in ("find", "packer --dry-run"):
            continue
        seconds: list[float] = row["seconds"]  # type: ignore[assignment]
        median = float(row["median_s"])  # type: ignore[arg-type]
        spread = f"{images / seconds[-1]:,.0f}–{images / seconds[0]:,.0f}"
        print(
            f"{name:44}{images / median:>10,.0f}{tar / median:>8.2f}{durable / median:>13.2f}"
            f"{spread:>16}{row['peak_mb']:>9.0f}"
        )
    find, scan = float(result["find"]["median_s"]), float(result["packer --dry-run"]["median_s"])  # type: ignore[arg-type]
    print(f"scan and plan: {scan:.3f} s, {scan / find:.1f} × find")


if __name__ == "__main__":
    main()
