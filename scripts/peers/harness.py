"""What the benchmarks share: data of a fixed size, each format packed once, each loader in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import PEERS
from peers.base import list_tree
from peers.child import LABEL_STEP, descendants

ROOT = Path(__file__).resolve().parent.parent.parent


class LoaderFailedError(Exception):
    """A loader cannot be measured; the message is one line that says why."""


@dataclass(frozen=True)
class Bench:
    """Where everything lies, and what runs it.

    Attributes:
        work: folder for the packed data, kept from run to run.
        python: the interpreter that runs the loaders.
        cores: CPUs that a loader may use, its main process included.
        timeout_s: after which a loader has failed.
    """

    work: str
    python: str = sys.executable
    cores: tuple[int, ...] = ()
    timeout_s: float = 600

    def run(self, request: Mapping[str, Any], *, memory: bool = False) -> dict[str, Any]:
        """One loader's process: its result, with `peak_mb` and `peak_rss_mb` if memory is to be watched.

        Raises:
            LoaderFailedError: it raised, died or took too long; says how.
        """
        name = request["peer"]
        with tempfile.TemporaryDirectory(dir=self.work, prefix=f"tmp-{name}-") as temporary:
            out = os.path.join(temporary, "result.json")
            command = [self.python, "-m", "peers.child", json.dumps({**request, "out": out})]
            with open(os.path.join(temporary, "log"), "w+b") as log:
                process = subprocess.Popen(
                    command,
                    env=self._environment(name, temporary),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd=temporary,
                    preexec_fn=None if not self.cores else lambda: os.sched_setaffinity(0, self.cores),
                )
                with _ending(process), _Memory(process.pid if memory else None) as peak:
                    try:
                        process.wait(self.timeout_s)
                    except subprocess.TimeoutExpired as error:
                        raise LoaderFailedError(f"took longer than {self.timeout_s:.0f} s") from error
                if not os.path.exists(out):
                    log.seek(0)
                    raise LoaderFailedError(_reason(process.returncode, log.read().decode(errors="replace")))
            result: dict[str, Any] = json.loads(Path(out).read_text())
            return result | peak.figures

    def _environment(self, name: str, temporary: str) -> dict[str, str]:
        """Each loader has a home and a temporary folder of its own: some delete what they take for theirs."""
        path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        private = dict.fromkeys(("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"), temporary)
        return {**os.environ, **private, **PEERS[name].env, "PYTHONPATH": path.rstrip(os.pathsep)}

    # ------------------------------------------------------------ data

    def tree(self, name: str, source: str, images: int) -> str:
        """An ImageFolder tree of some of a source's JPEGs, the same ones each time.

        Raises:
            SystemExit: the source has none.
        """
        found = list_tree(source)
        if not found:
            raise SystemExit(f"{source} has no JPEGs in folders of classes")
        chosen = sorted(random.Random(0).sample(found, min(images, len(found))))
        folder = os.path.join(self.work, f"{name}-{len(chosen)}")
        return self._once(folder, "tree", lambda tree: _link(source, [path for path, _ in chosen], tree))

    def ramps(self, images: int) -> str:
        """The tree of pictures by which a loader's crops are measured."""
        return self._once(os.path.join(self.work, f"ramps-{images}"), "tree", lambda tree: make_ramps(tree, images))

    def store(self, tree: str, name: str) -> str:
        """Where a loader finds the pictures of a tree, packed if that was not done before.

        Raises:
            LoaderFailedError: it cannot be packed.
        """
        peer = PEERS[name]
        if peer.store == "tree":
            return tree

        def pack(store: str) -> None:
            self.run({"do": "pack", "peer": name, "tree": tree, "store": store})

        return self._once(os.path.dirname(tree), peer.store, pack)

    def _once(self, folder: str, name: str, make: Any) -> str:
        made = os.path.join(folder, name)
        if not os.path.exists(f"{made}.complete"):
            shutil.rmtree(made, ignore_errors=True)
            os.makedirs(made)
            make(made)
            Path(f"{made}.complete").touch()
        return made


def _link(source: str, paths: Sequence[str], tree: str) -> None:
    for path in paths:
        target = os.path.join(tree, os.path.relpath(path, source))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, target)


def make_ramps(tree: str, images: int) -> None:
    """Pictures that tell where a crop came from: red grows to the right, green downwards, blue is the label.

    The slope of red across a loader's output is the crop's width as a share of the picture's, negative if mirrored.
    """
    from PIL import Image

    width, height = 500, 375
    across = Image.linear_gradient("L").transpose(Image.Transpose.ROTATE_90).resize((width, height))
    down = Image.linear_gradient("L").resize((width, height))
    for number in range(images):
        label = number % 10
        folder = os.path.join(tree, f"class{label}")
        os.makedirs(folder, exist_ok=True)
        flat = Image.new("L", (width, height), label * LABEL_STEP)
        picture = Image.merge("RGB", (across, down, flat))
        picture.save(os.path.join(folder, f"{number:05d}.jpg"), quality=95, subsampling=0)


# ---------------------------------------------------------------- processes


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave nothing of a process behind, nor of what it started."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(status: int, log: str) -> str:
    """The line of a log that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith("File ")]
    ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return (errors or lines or [ended])[-1][:300]


class _Memory:
    """The most memory that a process and all below it held, looked at ten times a second.

    Attributes:
        figures: `peak_mb`, in which processes share what they share (PSS), and `peak_rss_mb`, in which each counts it.
    """

    def __init__(self, pid: int | None) -> None:
        self.figures: dict[str, float] = {}
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Memory:
        if self._pid is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._pid is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._pid is not None
        pss = rss = 0
        while not self._stop.wait(0.1):
            now = [_resident_kb(pid) for pid in descendants(self._pid)]
            pss, rss = max(pss, sum(p for p, _ in now)), max(rss, sum(r for _, r in now))
            self.figures = {"peak_mb": pss / 1e3, "peak_rss_mb": rss / 1e3}


def _resident_kb(pid: int) -> tuple[int, int]:
    """(PSS, RSS) of one process; zeros once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    values = {line.split()[0]: int(line.split()[1]) for line in lines}
    return values.get("Pss:", 0), values.get("Rss:", 0)


def machine() -> dict[str, Any]:
    """What the figures depend on, beside the versions."""
    with open("/proc/cpuinfo") as f:
        cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.processor())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }
