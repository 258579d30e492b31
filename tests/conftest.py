"""Fixtures that many test modules share. What one module alone needs belongs into that module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, settings
from PIL import Image

#: How long a test waits for what takes a moment on an idle machine. Only what hangs takes longer, however busy it is.
PATIENCE_S = 600.0

# A time limit, per example or for drawing them, would test the machine, and how busy it is. The examples of a test
# that gets a fixture per function leave nothing behind in it. The tests of a contract run for each class that inherits
# them.
settings.register_profile(
    "packer",
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors
    ],
)  # fmt: skip
# A change is judged by the same examples every time; new ones are looked for where somebody can look at them.
settings.register_profile("ci", settings.get_profile("packer"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "packer")


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what must come true, and fail if it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class Midway:
    """Lets the program stand still in the middle of its work (see `standing.py`)."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate
        gate.touch()

    def program(self, calls: int, where: str) -> tuple[str, ...]:
        """What to run in place of `python -m packer`: a process stands still before one more call of `where`."""
        return sys.executable, str(Path(__file__).with_name("standing.py")), str(self.gate), str(calls), where

    def wait(self, process: subprocess.Popen[Any], workers: int) -> None:
        """Wait until so many of its processes stand still."""
        wait_until(lambda: process.poll() is not None or len(list(self.gate.parent.glob("gate.*"))) == workers)
        assert process.poll() is None, process.communicate()

    def go_on(self) -> None:
        """Let it run to its end."""
        self.gate.unlink(missing_ok=True)


@pytest.fixture
def midway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Midway]:
    """The means to act on the program while it is busy, however fast the machine is."""
    midway = Midway(tmp_path_factory.mktemp("midway") / "gate")
    yield midway
    midway.go_on()


def pytest_configure(config: pytest.Config) -> None:
    # Started in the background of a shell or by nohup, all that tests start would be deaf to these.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks find each other whatever this machine is called
    config.addinivalue_line(
        "markers", "torchvision: wants torchvision in this very process (`scripts/test --interop` sees to it)"
    )


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """A factory of ImageFolder trees of small real pictures, each picture different, the same in every run.

    `image_folder("src", splits=("train", "val"))` writes `src/train/cat/cat-0.jpg`, `cat-1.png`, … and gives
    the path of `src`. Without splits the classes lie directly in it. Sizes (width, height) and suffixes take
    turns.
    """

    def make(
        name: str = "src",
        *,
        classes: Sequence[str] = ("cat", "dog"),
        per_class: int = 3,
        splits: Sequence[str] = ("",),
        suffixes: Sequence[str] = (".jpg", ".png"),
        sizes: Sequence[tuple[int, int]] = ((48, 32), (33, 57)),
    ) -> Path:
        root = tmp_path / name
        number = 0
        for split in splits:
            for class_name in classes:
                folder = root / split / class_name
                folder.mkdir(parents=True, exist_ok=True)
                for i in range(per_class):
                    path = folder / f"{class_name}-{i}{suffixes[i % len(suffixes)]}"
                    picture(number, sizes[i % len(sizes)]).save(path)
                    number += 1
        return root

    return make


def picture(number: int, size: tuple[int, int]) -> Image.Image:
    """An RGB picture of two gradients and one flat channel, with another flat value for each number."""
    width, height = size
    across = Image.linear_gradient("L").resize(size).transpose(Image.Transpose.ROTATE_90).resize(size)
    down = Image.linear_gradient("L").resize(size)
    return Image.merge("RGB", (across, down, Image.new("L", (width, height), number * 37 % 256)))


@pytest.fixture
def run_packer() -> Callable[..., Result]:
    """Runs the command line in this process: `run_packer("shard", src, out)` gives click's Result.

    Fails the test if the exit status is not `exit_code`; the message then shows what the program printed.
    Where the process itself matters (signals, the light import), use subprocess.
    """

    def run(
        *args: str | os.PathLike[str],
        exit_code: int = 0,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
    ) -> Result:
        from packer.cli import cli

        result = CliRunner().invoke(cli, [os.fspath(arg) for arg in args], env=env, input=stdin)
        unexpected = result.exception
        if unexpected is not None and not isinstance(unexpected, SystemExit):
            raise unexpected
        assert result.exit_code == exit_code, f"exit status {result.exit_code}:\n{result.output}"
        return result

    return run
