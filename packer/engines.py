"""Where shard tasks run: in this process, or in worker processes of this machine."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from packer.errors import WorkerDiedError
from packer.limits import cpu_count

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Called by a task with (samples, bytes) done since the last call.
Report = Callable[[int, int], None]
_POLL_S = 0.1


def no_report(_done: int, _bytes: int) -> None:
    """A `Report` that nobody reads."""


class Engine(Protocol):
    """Runs independent tasks and hands their results back as they finish, in any order."""

    def run(self, work: Callable[[Any, Report], Result], tasks: Iterable[Any], report: Report) -> Iterator[Result]:
        """Run `work(task, report)` for every task. The first exception stops everything and is raised."""
        ...


class InProcess:
    """One task after the other, here."""

    def run(self, work: Callable[[Any, Report], Result], tasks: Iterable[Any], report: Report) -> Iterator[Result]:
        """See `Engine.run`."""
        for task in tasks:
            yield work(task, report)
            del task  # large, and the next one is about to be made


class LocalProcesses:
    """Worker processes on this machine, at most one more task than workers in memory at a time.

    Args:
        workers: number of processes.

    Raises:
        WorkerDiedError: (from `run`) a worker was killed, most often for memory, or cannot be started.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, work: Callable[[Any, Report], Result], tasks: Iterable[Any], report: Report) -> Iterator[Result]:
        """See `Engine.run`."""
        context = multiprocessing.get_context(_start_method())
        with _no_workers_explained():
            samples, size = context.Value("q", 0), context.Value("q", 0)
            pool = ProcessPoolExecutor(self.workers, context, _start_worker, (samples, size))
        seen = (0, 0)
        waiting = iter(tasks)
        running: set[Future[Result]] = set()
        try:
            while True:
                for task in itertools.islice(waiting, self.workers + 1 - len(running)):
                    with _no_interrupt(), _no_workers_explained():
                        running.add(pool.submit(_in_worker, work, task))
                if not running:
                    return
                done, running = wait(running, _POLL_S, FIRST_COMPLETED)
                # Read without the lock: a worker killed while it holds it must not stop this process too.
                now = (samples.get_obj().value, size.get_obj().value)
                report(now[0] - seen[0], now[1] - seen[1])
                seen = now
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a worker process died without a word (killed? out of memory?); finished shards are kept: "
                "run the same command again, with fewer --workers if memory was short"
            ) from error
        finally:
            with _no_interrupt():
                _stop(pool)


@contextlib.contextmanager
def _no_workers_explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a limit on processes, or no /dev/shm for the locks between them
        raise WorkerDiedError(
            f"cannot start worker processes: {error.strerror or error}; run again with fewer, or with --workers 1"
        ) from error


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the block ends: processes started in it are born deaf to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def local_engine(workers: int | None, tasks: int) -> Engine:
    """The engine for so many tasks on this machine: this process alone where one worker is enough.

    Args:
        workers: number of processes; None takes one per CPU that may be used.
        tasks: how many there are; there are never more workers.
    """
    workers = min(workers or cpu_count(), tasks)
    return LocalProcesses(workers) if workers > 1 else InProcess()


def _start_method() -> str:
    """Forking is quick and safe as long as this process has one thread; otherwise start afresh."""
    return "fork" if sys.platform.startswith("linux") and threading.active_count() == 1 else "spawn"


_counters: tuple[Synchronized[int], Synchronized[int]] | None = None


def _start_worker(samples: Synchronized[int], size: Synchronized[int]) -> None:
    global _counters
    _counters = (samples, size)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent must not leave workers writing into a folder that the next run takes over."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_worker(work: Callable[[Any, Report], Result], task: Any) -> Result:
    return work(task, _count)


def _count(samples: int, size: int) -> None:
    if _counters is not None:
        for counter, value in zip(_counters, (samples, size), strict=True):
            with counter.get_lock():
                counter.value += value


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the workers now: what they were writing is worth nothing without the rest."""
    processes = list((pool._processes or {}).values())
    calls, results = getattr(pool, "_call_queue", None), getattr(pool, "_result_queue", None)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.join(0.05) if process.is_alive() else None
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
    # A worker killed halfway through a message leaves the pool's threads waiting for the rest, and Python waits for
    # them at exit: this process alone still holds the other ends.
    for end in (getattr(results, "_writer", None), getattr(calls, "_reader", None)):
        if end is not None:
            with contextlib.suppress(OSError):
                _lead_nowhere(end.fileno())


def _lead_nowhere(descriptor: int) -> None:
    """Give up what this descriptor stands for without closing it: a pool's own thread may be about to do that."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)
