"""Progress: a bar in a terminal, a line now and then elsewhere, nothing with --quiet."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest
from conftest import PATIENCE_S, picture

from packer.cli import progress
from packer.cli.progress import Bar, PackBars

ROOT = Path(__file__).resolve().parent.parent
# tqdm draws ten times a second at most; by this clock a second passes at every look, so it draws every step.
PROGRAM = """
import itertools, tqdm.std
looks = itertools.count()
tqdm.std.time = lambda: float(next(looks))
from packer.cli import main
main()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One picture under 40 names."""
    root = tmp_path / "src"
    (root / "class").mkdir(parents=True)
    picture(1, (160, 120)).save(root / "class" / "0.png")
    for i in range(1, 40):
        os.link(root / "class" / "0.png", root / "class" / f"{i}.png")
    return root


def in_terminal(*arguments: str) -> tuple[str, str]:
    """Run the program with a terminal of 110 columns as its standard error: (that, standard output)."""
    main, side = pty.openpty()
    try:
        ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, stdin=side, stdout=subprocess.PIPE, stderr=side
        )
    finally:
        os.close(side)
    seen = b""
    with contextlib.suppress(OSError), os.fdopen(main, "rb", buffering=0) as terminal:  # ends with EIO
        while data := terminal.read(65536):
            seen += data
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, seen.decode()
    return seen.decode(), output.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_terminal_sees_files_samples_bytes_speed_and_what_is_left(
    source: Path, tmp_path: Path, workers: str
) -> None:
    arguments = [
        "shard",
        str(source),
        str(tmp_path / "out"),
        "--resize",
        "64",
        "--shard-samples",
        "4",
        "-j",
        workers,
    ]
    seen, output = in_terminal(*arguments)
    assert output == ""
    assert re.search(r"scanning: [\d.]+ files", seen)
    size = r"[\d.]+[kMG]?"
    state = rf"packing: +\d+%\|.*?\| {size}/{size} \[\d\d:\d\d<\d\d:\d\d, +{size}B/s, (\d+)/40 samples\]"
    samples = [int(number) for number in re.findall(state, seen)]
    # At most one shard more than there are workers is under way at a time: so many steps there are at least.
    assert len(set(samples)) >= 10 // (int(workers) + 1), seen
    assert samples == sorted(samples)
    # The bar is wiped when it is done: what stays on screen is the summary alone.
    last = seen.replace("\r\n", "\n").rstrip("\n").split("\r")[-1]
    assert "packed 40 samples in 1 class into 10 shards" in last
    assert "%|" not in last


def test_a_terminal_sees_nothing_with_quiet(source: Path, tmp_path: Path) -> None:
    seen, output = in_terminal("shard", str(source), str(tmp_path / "out"), "--quiet")
    assert (seen, output) == ("", "")


def test_json_stays_pure_while_a_bar_is_shown(source: Path, tmp_path: Path) -> None:
    seen, output = in_terminal("shard", str(source), str(tmp_path / "out"), "--json")
    assert output.startswith("{")
    assert output.endswith("}\n")
    assert "packing:" in seen


# ---------------------------------------------------------------- without a terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still until it is told to move."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_elsewhere_there_is_a_line_now_and_then(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with PackBars(quiet=False) as bars:
        bars.scanning(10)
        bars.start_packing(100, 200_000_000)
        for _ in range(50):
            clock(0.5)
            bars.packed(1, 2_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "packing: 20 of 100 samples, 40 MB, 4 MB/s, 40 s left",
        "packing: 40 of 100 samples, 80 MB, 4 MB/s, 30 s left",
    ]


def test_a_step_of_unknown_length_counts(clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("scanning", "files") as bar:
        clock(11)
        bar.reach(5000)
        clock(11)
        bar.reach(12_345)
    assert capsys.readouterr().err.splitlines() == ["scanning: 5,000 files", "scanning: 12,345 files"]


def test_quiet_is_quiet_elsewhere_too(clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    with PackBars(quiet=True) as bars:
        bars.scanning(10)
        bars.start_packing(1, 1)
        clock(100)
        bars.packed(1, 1)
    assert capsys.readouterr() == ("", "")


def test_nothing_to_do_is_no_division_by_zero(clock: Callable[[float], None]) -> None:
    with PackBars(quiet=False) as bars:
        bars.start_packing(0, 0)
        clock(100)
        bars.packed(0, 0)
    with PackBars(quiet=False) as bars:  # everything counts as done before any byte is
        bars.start_packing(5, 100)
        clock(100)
        bars.packed(0, 0)
