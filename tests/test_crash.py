"""The real program, killed, interrupted, starved of disk: nothing looks complete, and the same command goes on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE_S, Midway, picture, wait_until

from packer.manifest import FILE

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = (sys.executable, "-m", "packer")


def arguments(source: Path, out: Path, *options: str) -> list[str]:
    return ["shard", str(source), str(out), "--shard-samples", "8", *options]


def start(
    source: Path, out: Path, *options: str, limit_bytes: int | None = None, program: tuple[str, ...] = PROGRAM
) -> subprocess.Popen[str]:
    """The program in a process group of its own, as a shell starts it."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.Popen(
        [*program, *arguments(source, out, *options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=limit,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and messages."""
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


def run(source: Path, out: Path, *options: str, limit_bytes: int | None = None) -> tuple[int, str]:
    return finish(start(source, out, *options, limit_bytes=limit_bytes))


def kill_group(process: subprocess.Popen[str], how: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def living(group: int) -> list[int]:
    """Processes of a group that still run (zombies nobody has buried do not)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, _, pgid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgid) == group and state not in "ZX":
                    found.append(int(entry))
    return found


def start_midway(midway: Midway, source: Path, out: Path, workers: int, calls: int = 12) -> subprocess.Popen[str]:
    """Start the program; with `calls=12`, each worker will stand still in its second shard of eight."""
    program = midway.program(calls, "packer.encoders:Resize.encode")
    return start(source, out, *SMALLER, "-j", str(workers), program=program)


def shards(out: Path) -> dict[str, tuple[int, int]]:
    """Finished shards, each with what changes when it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("*.tar")}


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 small pictures in two classes."""
    root = tmp_path_factory.mktemp("small")
    for i in range(200):
        path = root / f"class-{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        picture(i, (40 + i % 7, 30)).save(path)
    return root


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    status, errors = run(source, out)
    assert status == 0, errors
    return tree(out)


SMALLER = ("--resize", "20")


@pytest.fixture(scope="module")
def undisturbed_smaller(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("smaller") / "out"
    status, errors = run(source, out, *SMALLER)
    assert status == 0, errors
    return tree(out)


def check_half_done(out: Path, undisturbed: dict[str, bytes]) -> None:
    """Every shard that has its name is whole, and nothing claims that the dataset is."""
    assert not (out / FILE).exists()
    for name in shards(out):
        assert (out / name).read_bytes() == undisturbed[name]


def check_ends_well(source: Path, out: Path, undisturbed: dict[str, bytes], *options: str) -> None:
    """The same command goes on: finished shards are not written again, and the end is the same."""
    before = shards(out)
    status, errors = run(source, out, *options)
    assert status == 0, errors
    assert shards(out).items() >= before.items()
    assert tree(out) == undisturbed


# The moments are spread over the whole run: starting, scanning, packing, finishing.
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("PACKER_KILLS", "1"))))
def test_killed_at_random_moments_until_it_is_done(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes], workers: str, seed: int
) -> None:
    moments = random.Random(f"{seed} {workers}")
    out = tmp_path / "out"
    begin = time.monotonic()
    assert run(source, tmp_path / "timed", "-j", workers)[0] == 0
    takes = time.monotonic() - begin
    for _ in range(4):
        process = start(source, out, "-j", workers)
        time.sleep(moments.uniform(0.2, 1.05) * takes)
        before = shards(out)
        if moments.random() < 0.5:
            kill_group(process)
        else:
            process.kill()  # the parent alone: its workers must end by themselves
        status, errors = finish(process)
        if status == 0:  # it was quicker this time
            break
        assert status == -signal.SIGKILL, errors
        wait_until(lambda: not living(process.pid))  # noqa: B023
        assert shards(out).items() >= before.items()
        if not (out / FILE).exists():
            check_half_done(out, undisturbed)
    check_ends_well(source, out, undisturbed, "-j", workers)


def test_a_killed_parent_takes_its_workers_along_at_once(
    source: Path, tmp_path: Path, midway: Midway, undisturbed_smaller: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = start_midway(midway, source, out, 2)
    midway.wait(process, 2)
    assert len(living(process.pid)) >= 3
    process.kill()
    finish(process)
    wait_until(lambda: not living(process.pid))  # though the workers' own work stands still
    assert len(shards(out)) == 2
    check_half_done(out, undisturbed_smaller)
    check_ends_well(source, out, undisturbed_smaller, *SMALLER)


def test_a_killed_worker_is_an_error_that_says_what_to_do(
    source: Path, tmp_path: Path, midway: Midway, undisturbed_smaller: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = start_midway(midway, source, out, 2)
    midway.wait(process, 2)
    workers = [pid for pid in living(process.pid) if pid != process.pid]
    os.kill(workers[0], signal.SIGKILL)
    status, errors = finish(process)
    assert status == 1
    assert "a worker process died without a word (killed? out of memory?); finished shards are kept" in errors
    assert "Traceback" not in errors
    assert not living(process.pid)
    check_half_done(out, undisturbed_smaller)
    check_ends_well(source, out, undisturbed_smaller, *SMALLER, "-j", "2")


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_calmly(
    source: Path, tmp_path: Path, midway: Midway, undisturbed_smaller: dict[str, bytes], workers: int
) -> None:
    out = tmp_path / "out"
    process = start_midway(midway, source, out, workers)
    midway.wait(process, workers)
    kill_group(process, signal.SIGINT)
    status, errors = finish(process)
    assert status == 130
    assert errors.rstrip().endswith("interrupted; finished shards are kept, the same command goes on")
    assert "Traceback" not in errors
    assert not living(process.pid)
    assert not list(out.glob("*.partial"))
    assert len(shards(out)) == workers
    check_half_done(out, undisturbed_smaller)
    check_ends_well(source, out, undisturbed_smaller, *SMALLER)


def test_ctrl_c_again_and_again_ends_too(source: Path, tmp_path: Path, midway: Midway) -> None:
    out = tmp_path / "out"
    process = start_midway(midway, source, out, 2)
    midway.wait(process, 2)
    for _ in range(5):
        kill_group(process, signal.SIGINT)
        time.sleep(0.01)
    status, errors = finish(process)
    assert status in (1, 130)
    assert "Traceback" not in errors
    wait_until(lambda: not living(process.pid))
    assert not (out / FILE).exists()


@pytest.mark.parametrize("running", [1, 2, 3, 4])
def test_ctrl_c_while_workers_start_shows_no_traceback(
    source: Path, tmp_path: Path, midway: Midway, running: int
) -> None:
    out = tmp_path / "out"
    process = start_midway(midway, source, out, 3, calls=0)
    wait_until(lambda: (out / ".packer" / "job.json").exists() and len(living(process.pid)) >= running)
    kill_group(process, signal.SIGINT)
    status, errors = finish(process)
    assert status == 130
    assert "Traceback" not in errors
    assert not living(process.pid)


def test_sigterm_ends_it_and_the_same_command_goes_on(
    source: Path, tmp_path: Path, midway: Midway, undisturbed_smaller: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = start_midway(midway, source, out, 2)
    midway.wait(process, 2)
    process.terminate()
    status, _ = finish(process)
    assert status == -signal.SIGTERM
    wait_until(lambda: not living(process.pid))
    check_half_done(out, undisturbed_smaller)
    check_ends_well(source, out, undisturbed_smaller, *SMALLER)


def test_two_at_once_are_refused_and_the_first_goes_on(
    source: Path, tmp_path: Path, midway: Midway, undisturbed_smaller: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    first = start_midway(midway, source, out, 2)
    midway.wait(first, 2)
    status, errors = run(source, out, *SMALLER)
    assert (status, "is being written by another packer process" in errors) == (1, True)
    midway.go_on()
    status, errors = finish(first)
    assert status == 0, errors
    assert tree(out) == undisturbed_smaller


# ---------------------------------------------------------------- no room


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_limit_on_file_sizes_is_explained(
    source: Path, tmp_path: Path, undisturbed: dict[str, bytes], workers: str
) -> None:
    largest = max(len(data) for name, data in undisturbed.items() if name.endswith(".tar"))
    out = tmp_path / "out"
    status, errors = run(source, out, "-j", workers, limit_bytes=largest - 1)
    assert status == 1
    assert "File too large; no file may become so large here" in errors
    assert "Traceback" not in errors
    assert not list(out.glob("*.partial"))
    check_half_done(out, undisturbed)
    check_ends_well(source, out, undisturbed, "-j", workers)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a file system of a given size can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_explained_and_nothing_is_lost(
    source: Path, small_disk: Path, undisturbed: dict[str, bytes], workers: str
) -> None:
    out = small_disk / "out"
    status, errors = run(source, out, "-j", workers)
    assert status == 1
    assert "No space left on device; free some space and run the same command again" in errors
    assert "Traceback" not in errors
    assert shards(out)
    check_half_done(out, undisturbed)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    check_ends_well(source, out, undisturbed, "-j", workers)


def test_a_disk_that_fills_up_at_any_other_moment(
    source: Path, small_disk: Path, undisturbed: dict[str, bytes]
) -> None:
    """From too small for the job's state to too small for the last file, and no traceback anywhere."""
    total = sum(-(-len(data) // 4096) * 4096 for data in undisturbed.values())
    for kib in (4, 12, total // 1024 - 20, total // 1024 + 40):
        subprocess.run(["mount", "-o", f"remount,size={kib}k", small_disk], check=True)
        out = small_disk / f"out-{kib}"
        status, errors = run(source, out)
        if status:
            assert "No space left on device" in errors
            assert not (out / FILE).exists()
        assert "Traceback" not in errors
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        check_ends_well(source, out, undisturbed)
        shutil.rmtree(out)


# ---------------------------------------------------------------- no access


def test_an_unreadable_file_is_named_before_a_byte_is_written(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "class-1" / "77.png").chmod(0)
    without_privilege: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything, and setpriv is not there to take that away")
        without_privilege = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    done = subprocess.run(
        [*without_privilege, *PROGRAM, *arguments(copy, tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "class-1/77.png: cannot be read: Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_may_not_be_written_is_explained(source: Path) -> None:
    status, errors = run(source, Path("/proc/out"))
    assert status == 1
    assert "cannot write /proc/out" in errors
    assert "Traceback" not in errors
