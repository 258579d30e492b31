"""Engines: the same batches from all, memory that is never overwritten, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PATIENCE_S, wait_until
from loader_helpers import flat, pack_tree, write_tree

from loaders.loader import Loader
from loaders.transforms import EvalCrop, TrainCrop
from loaders.webds_loader import make_loader
from packer.errors import SampleError, UsageError, WorkerDiedError

ENGINES = [("thread", 1), ("thread", 3), ("process", 1), ("process", 2)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    return pack_tree(write_tree(root / "src"), root / "out")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    wait_until(lambda: not loader_threads() and not multiprocessing.active_children())


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_mappings() -> int:
    with open("/proc/self/maps") as f:
        return sum("memfd:" in line or "/dev/shm" in line for line in f)


def loader(packed: Path, engine: str, workers: int, **options: Any) -> Loader:
    return make_loader(packed, engine=engine, num_workers=workers, batch_size=6, seed=5, **options)


# ---------------------------------------------------------------- the same batches


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_every_engine_gives_what_the_serial_one_gives(packed: Path, engine: str, workers: int) -> None:
    options = {"transform": TrainCrop(24), "normalize": "imagenet"}
    with loader(packed, "thread", 0, **options) as serial, loader(packed, engine, workers, **options) as other:
        for _ in range(2):
            assert flat(other) == flat(serial)


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_padded_dicts_are_the_same_in_every_engine(packed: Path, engine: str, workers: int) -> None:
    options = {"fields": ("jpg", "cls", "__key__", "__index__")}
    with loader(packed, "thread", 0, **options) as serial, loader(packed, engine, workers, **options) as other:
        assert flat(other) == flat(serial)


def test_threads_inside_processes_give_the_same(packed: Path) -> None:
    options = {"transform": TrainCrop(24)}
    with loader(packed, "thread", 0, **options) as serial:
        want = flat(serial)
    with loader(packed, "process", 2, **options, threads_per_worker=2) as other:
        assert flat(other) == want


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_gives_the_same(packed: Path, method: str) -> None:
    with loader(packed, "thread", 2, transform=EvalCrop(16)) as threads:
        want = flat(threads)
    with loader(packed, "process", 1, transform=EvalCrop(16), start_method=method) as processes:
        assert flat(processes) == want


def noisy(image: Any) -> torch.Tensor:
    """A transform from elsewhere: it draws from all three global generators."""
    pixels = torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1).float()
    return pixels + random.random() + float(np.random.rand()) + torch.rand(3, 8, 8)


def test_foreign_transforms_repeat_whatever_the_number_of_workers(packed: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with loader(packed, "auto", 0, transform=noisy) as serial:
        first, second = flat(serial), flat(serial)
    assert first != second
    for workers in (1, 3):
        with loader(packed, "auto", workers, transform=noisy) as other:
            assert [flat(other), flat(other)] == [first, second]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "the caller's generators are as they were"


def test_foreign_transforms_are_refused_in_threads(packed: Path) -> None:
    with pytest.raises(UsageError, match="engine='process'"):
        loader(packed, "thread", 2, transform=noisy)


def test_a_transform_that_cannot_be_sent_says_so(packed: Path) -> None:
    local = loader(packed, "process", 1, transform=lambda image: noisy(image), start_method="spawn")
    with pytest.raises(UsageError, match="top of a module"):
        next(iter(local))


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_batches_that_are_kept_are_never_overwritten(packed: Path, engine: str, workers: int) -> None:
    options = {"transform": TrainCrop(64), "normalize": "imagenet"}
    with loader(packed, engine, workers, **options) as kept, loader(packed, engine, workers, **options) as copied:
        for _ in range(3):
            copies = [(images.clone(), labels.clone()) for images, labels in copied]
            assert flat(list(kept)) == flat(copies)


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_any_view_keeps_its_batch(packed: Path, engine: str, workers: int) -> None:
    with (
        loader(packed, engine, workers, transform=TrainCrop(64)) as views,
        loader(packed, engine, workers, transform=TrainCrop(64)) as copies,
    ):
        rows = [images.numpy()[-1, 1:, 3] for images, _ in views]
        want = [images.numpy()[-1, 1:, 3].copy() for images, _ in copies]
        assert all(np.array_equal(row, copy) for row, copy in zip(rows, want, strict=True))


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_batches_that_are_dropped_are_used_again(packed: Path, engine: str) -> None:
    with loader(packed, engine, 2, transform=TrainCrop(128), prefetch=2, drop_last=True) as dropping:
        addresses = set()
        for _ in range(10):
            for images, _ in dropping:
                addresses.add(images.data_ptr())
                del images
        assert len(addresses) <= 30, "60 batches"


def test_more_batches_can_be_kept_than_blocks_are_shared(tmp_path: Path) -> None:
    out = pack_tree(write_tree(tmp_path / "src", samples=120), tmp_path / "out")
    with make_loader(out, batch_size=1, engine="process", num_workers=1, transform=EvalCrop(16)) as processes:
        before = descriptors()
        kept = list(processes)
        assert descriptors() - before < 60
        with make_loader(out, batch_size=1, num_workers=0, transform=EvalCrop(16)) as serial:
            assert flat(kept) == flat(serial)


# ---------------------------------------------------------------- errors


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A packed dataset with one picture overwritten in place, as a bad disk does."""
    out = pack_tree(write_tree(tmp_path / "src", samples=18), tmp_path / "out", shard_samples=None)
    from packer.packed import Packed

    split = Packed(out)["train"]
    row = split.rows[7]
    with open(split.shard_path(0), "r+b") as f:
        f.seek(int(row["jpg:offset"]))
        f.write(bytes(int(row["jpg:length"])))
    return out


@pytest.mark.parametrize(("engine", "workers"), [("thread", 0), *ENGINES])
def test_errors_name_shard_key_and_cause(damaged: Path, engine: str, workers: int) -> None:
    with loader(damaged, engine, workers, transform=EvalCrop(16), shuffle=False) as failing:
        iteration = iter(failing)
        next(iteration)  # samples 0 to 5 are whole
        with pytest.raises(SampleError, match=r"train-000000\.tar, sample 7 'c\d/p\d+', field 'jpg'") as caught:
            next(iteration)
        assert caught.value.number == 7 and caught.value.key.startswith("c")
        assert type(caught.value.__cause__).__name__ == "BadImageError"
        with pytest.raises(StopIteration):
            next(iteration)


def failing_transform(image: Any) -> torch.Tensor:
    raise ZeroDivisionError("by zero, of course")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transforms_own_error_is_the_cause(packed: Path, workers: int) -> None:
    failing = loader(packed, "auto", workers, transform=failing_transform)
    with failing, pytest.raises(SampleError, match="ZeroDivisionError: by zero, of course") as caught:
        next(iter(failing))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    if workers:
        assert "in failing_transform" in str(caught.value.__cause__.__cause__), "the worker's own traceback"


def test_a_shard_truncated_under_a_running_loader_is_an_error(tmp_path: Path) -> None:
    out = pack_tree(write_tree(tmp_path / "src", samples=60), tmp_path / "out", shard_samples=None)
    with loader(out, "thread", 2, transform=EvalCrop(16), shuffle=False) as running:
        iteration = iter(running)
        next(iteration)
        os.truncate(out / "train-000000.tar", 100_000)
        with pytest.raises(SampleError, match=r"train-000000\.tar.*truncated.*packer verify"):
            for _ in iteration:
                pass


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_is_an_error(packed: Path, sig: signal.Signals) -> None:
    with loader(packed, "process", 2, transform=EvalCrop(16), batch_transform=None, prefetch=1) as killed:
        iteration = iter(killed)
        next(iteration)
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, sig)
        with pytest.raises(WorkerDiedError, match=sig.name):
            for _ in iteration:
                pass
        assert len(list(killed)) == len(killed), "the next epoch has new workers"


def test_workers_killed_between_epochs_are_replaced(packed: Path) -> None:
    with loader(packed, "process", 2, transform=EvalCrop(16)) as killed:
        first = len(list(killed))
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
        wait_until(lambda: not multiprocessing.active_children())
        assert len(list(killed)) == first


# ---------------------------------------------------------------- ending


def test_workers_go_on_to_the_next_epoch(packed: Path) -> None:
    """Also where the loop takes just as many batches as there are, and never asks for one more."""
    with loader(packed, "process", 2, transform=EvalCrop(16)) as going:
        workers = set()
        for _ in range(3):
            for _ in zip(range(len(going)), going, strict=False):
                pass
            gc.collect()
            workers |= {child.pid for child in multiprocessing.active_children()}
        assert len(workers) == 2


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_leaving_the_loop_stops_the_workers(packed: Path, engine: str, workers: int) -> None:
    leaving = loader(packed, engine, workers, transform=TrainCrop(24))
    for _ in leaving:
        assert loader_threads() or multiprocessing.active_children()
        break
    gc.collect()
    wait_until(lambda: not loader_threads() and not multiprocessing.active_children())
    assert len(list(leaving)) == len(leaving)


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_an_exception_in_the_loop_stops_the_workers(packed: Path, engine: str, workers: int) -> None:
    leaving = loader(packed, engine, workers, transform=TrainCrop(24))
    with pytest.raises(KeyboardInterrupt):
        for _ in leaving:
            raise KeyboardInterrupt
    leaving.close()
    assert not loader_threads() and not multiprocessing.active_children()


@pytest.mark.parametrize(("engine", "workers"), ENGINES)
def test_an_iterator_outlives_the_name_of_its_loader(packed: Path, engine: str, workers: int) -> None:
    iteration = iter(loader(packed, engine, workers, transform=TrainCrop(24)))
    gc.collect()
    assert sum(len(labels) for _, labels in iteration) == 40


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_new_iteration_ends_the_one_before(packed: Path, engine: str) -> None:
    with loader(packed, engine, 2, transform=TrainCrop(24)) as both:
        first = iter(both)
        next(first)
        assert len(list(both)) == len(both)
        with pytest.raises(UsageError, match="ended by another iter"):
            next(first)


@pytest.mark.parametrize(("engine", "epochs"), [("thread", 100), ("process", 100)])
def test_a_hundred_epochs_leak_nothing(packed: Path, engine: str, epochs: int) -> None:
    with loader(packed, engine, 2, transform=EvalCrop(16), subset=range(12)) as leaking:
        for _ in leaking:
            pass
        files, maps = descriptors(), shared_mappings()
        for epoch in range(epochs):
            for _ in leaking:
                if engine == "thread" and epoch % 10 == 3:
                    break
        gc.collect()
        wait_until(lambda: descriptors() <= files + 2)
        assert shared_mappings() <= maps + 4
        assert len(multiprocessing.active_children()) <= 2


def test_breaking_off_again_and_again_leaks_nothing(packed: Path) -> None:
    with loader(packed, "process", 1, transform=EvalCrop(16)) as leaking:
        next(iter(leaking))
        gc.collect()
        files = descriptors()
        for _ in range(5):
            next(iter(leaking))
            gc.collect()
        wait_until(lambda: descriptors() <= files + 1)


PROGRAM = """
import os, sys, signal, threading
from multiprocessing import active_children
from loaders.webds_loader import make_loader
from loaders.transforms import TrainCrop
if __name__ == "__main__":
    loader = make_loader({path!r}, batch_size=4, engine={engine!r}, num_workers=2, transform=TrainCrop(32),
                         start_method={method!r}, prefetch=2)
    iteration = iter(loader)
    next(iteration)
    print("running", flush=True)
    {then}
"""


def run_program(packed: Path, engine: str, then: str, method: str | None = None) -> subprocess.Popen[str]:
    text = PROGRAM.format(path=os.fspath(packed), engine=engine, then=then, method=method)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("engine", "method"), [("thread", None), ("process", "fork"), ("process", "spawn")])
def test_the_interpreter_ends_in_the_middle_of_an_epoch(packed: Path, engine: str, method: str | None) -> None:
    program = run_program(packed, engine, "pass", method)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, out.strip(), err) == (0, "running", "")
    wait_until(lambda: not group_members(program.pid))


IN_THE_BODY = "threading.Event().wait()"
# Workers that are stopped never answer.
IN_THE_LOADER = "[os.kill(child.pid, signal.SIGSTOP) for child in active_children()]; list(iteration)"


@pytest.mark.parametrize(
    ("engine", "then"), [("thread", IN_THE_BODY), ("process", IN_THE_BODY), ("process", IN_THE_LOADER)]
)
def test_control_c_ends_everything_at_once(packed: Path, engine: str, then: str) -> None:
    program = run_program(packed, engine, then)
    assert program.stdout is not None and program.stdout.readline() == "running\n"
    os.killpg(program.pid, signal.SIGINT)
    _, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not group_members(program.pid))


def test_workers_end_when_the_consumer_is_killed(packed: Path) -> None:
    program = run_program(packed, "process", "threading.Event().wait()")
    assert program.stdout is not None and program.stdout.readline() == "running\n"
    assert len(group_members(program.pid)) == 3
    program.kill()
    program.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not group_members(program.pid))


def group_members(group: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(name))
    return found


def test_torchs_own_thread_count_is_left_alone(packed: Path) -> None:
    before = torch.get_num_threads()
    with loader(packed, "thread", 2, transform=TrainCrop(24)) as running:
        for _ in running:
            pass
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), seen) == (before, [before])


def test_auto_says_what_it_chose_and_why(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "loaders"):
        loader(packed, "auto", 2)
        loader(packed, "auto", 2, transform=noisy)
    assert [record.getMessage() for record in caplog.records] == [
        "engine 'auto': thread, 2 workers (all steps release the GIL)",
        "engine 'auto': process, 2 workers (a transform from elsewhere)",
    ]


def test_shared_batches_hold_whatever_a_collate_fn_gives(packed: Path) -> None:
    with make_loader(packed, batch_size=4, shuffle=False, collate_fn=odd_batch, num_workers=1) as processes:
        [batch, *_] = processes
    want = odd_batch([None] * 4)
    assert flat([batch]) == flat([want])
    assert batch["expanded"].stride() == (0, 1), "an expanded view stays one"
    assert batch["object"] == {1, 2} and batch["structured"].dtype.names == ("a", "b")


def odd_batch(samples: list[Any]) -> dict[str, Any]:
    """What a batch may hold: views, empty and tiny tensors, arrays of any kind, and plain objects."""
    count, numbers = len(samples), torch.arange(40_000, dtype=torch.float32)
    return {
        "strided": numbers.view(200, 200)[::3, 5:50].t(),
        "expanded": numbers[:1000].expand(count, 1000),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "bfloat16": numbers[:600].bfloat16(),
        "complex": torch.complex(numbers[:300], numbers[:300]),
        "array": np.arange(5000, dtype=np.int32).reshape(50, 100)[:, ::-1],
        "fortran": np.asfortranarray(np.arange(5000.0).reshape(50, 100)),
        "structured": np.zeros(100, [("a", "<i4"), ("b", "<f8")]),
        "text": np.array(["a", "bc"]),
        "object": {1, 2},
        "list": [numbers, [1, "x", None]],
    }


def test_a_batch_that_cannot_be_sent_is_an_error(packed: Path) -> None:
    with make_loader(packed, collate_fn=unsendable, num_workers=1) as processes:
        for _ in range(2):
            with pytest.raises(Exception, match=r"pickle|local object"):
                next(iter(processes))


def test_batches_of_changing_size_share_blocks(packed: Path) -> None:
    with make_loader(packed, collate_fn=changing, batch_size=1, num_workers=1, fields=("__index__",)) as processes:
        before = descriptors()
        for _ in range(5):
            for batch in processes:
                number = int(batch[0])
                assert len(batch) == size_of(number) and (batch == number).all()
        assert descriptors() < before + 20, "200 batches"


def size_of(number: int) -> int:
    return 1000 * (number * 7 % 40 + 1) ** 2


def changing(samples: list[Any]) -> torch.Tensor:
    number = samples[0]["__index__"]
    return torch.full((size_of(number),), number, dtype=torch.int32)


def unsendable(samples: list[Any]) -> Any:
    return lambda: samples


class UnpicklableError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raising_collate(samples: list[Any]) -> Any:
    raise UnpicklableError(1, 2)


def test_an_exception_that_does_not_pickle_arrives_as_text(packed: Path) -> None:
    processes = make_loader(packed, collate_fn=raising_collate, num_workers=1)
    with processes, pytest.raises(RuntimeError, match="UnpicklableError: 1 and 2") as caught:
        next(iter(processes))
    assert "in raising_collate" in str(caught.value.__cause__)


DDP = """
import sys, torch, torch.distributed as dist
from loaders.webds_loader import make_loader
path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loader = make_loader(path, fields=("__index__",), batch_size=4, num_workers=1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=world)
numbers = torch.cat([batch["__index__"] for batch in loader])
print(len(loader), *numbers.tolist())
dist.destroy_process_group()
"""


def test_the_rank_is_asked_for_when_the_epoch_begins(packed: Path, tmp_path: Path) -> None:
    """The process group is made after the loader, as training scripts do."""
    command = [sys.executable, "-c", DDP, os.fspath(packed)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", os.fspath(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=PATIENCE_S)[0].split() for rank in ranks]
    assert [out[0] for out in outputs] == ["5", "5"]
    assert sorted(int(number) for out in outputs for number in out[1:]) == list(range(40))
