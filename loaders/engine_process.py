"""Worker processes: each makes whole batches, one ready batch per message.

For transforms that hold the GIL or draw from the global generators, and for more CPUs than one
interpreter can feed. Batches arrive in shared memory (`loaders.engine_shared`).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import select
import signal
import traceback
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from loaders.batches import Batches, Made
from loaders.engine import HEARTBEAT_S
from loaders.engine_shared import SharedReader, SharedWriter
from loaders.order import Numbers
from packer.errors import UsageError, WorkerDiedError

#: Batches under way per worker: one in the making, one waiting to be fetched.
PREFETCH_PER_WORKER = 2
#: How long a worker may take to die of SIGTERM before it gets SIGKILL.
TERMINATE_S = 2.0
#: How long a worker that has hung up may take to be gone, on a machine however busy.
ENDING_S = 10.0

# ---------------------------------------------------------------- the worker


def _main(connection: Connection, recipe: Batches, keep: int, threads: int) -> None:
    """Make batches until the consumer hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the consumer decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection would copy every page that a fork shares
    torch.set_num_threads(1)
    writer = SharedWriter(connection, keep)
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) if threads > 1 else None
    with contextlib.suppress(EOFError, OSError):  # the consumer is gone: nobody is left to tell
        while True:
            place, epoch, numbers, returned = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own bytes
            writer.give_back(returned)
            try:
                writer.send(place, _make(recipe, epoch, numbers, writer, pool))
            except OSError as error:
                if isinstance(error, BrokenPipeError | ConnectionResetError):
                    raise
                writer.discard()
                writer.send(place, _portable(error), ok=False)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer gets it
                writer.discard()
                writer.send(place, _portable(error), ok=False)


def _make(recipe: Batches, epoch: int, numbers: Numbers, writer: SharedWriter, pool: ThreadPoolExecutor | None) -> Made:
    draft = recipe.draft(numbers, epoch, writer.empty)
    if pool is None:
        recipe.fill(draft, 0, len(numbers))
    else:
        for done in [pool.submit(recipe.fill, draft, start, stop) for start, stop in recipe.runs(draft)]:
            done.result()
    return recipe.finish(draft)


class WorkerTraceback(Exception):  # noqa: N818 - it is shown as a cause, and is not an error of its own
    """Where in the worker an exception was raised, as text."""

    def __str__(self) -> str:
        return f"in the worker process:\n{self.args[0]}"


def _portable(error: BaseException) -> tuple[BaseException, BaseException | None, str]:
    """(error, its cause, traceback): a traceback does not pickle, nor does every exception."""
    text = "".join(traceback.format_exception(error))
    return _picklable(error), None if error.__cause__ is None else _picklable(error.__cause__), text


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - an exception's own pickling may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _raise(portable: tuple[BaseException, BaseException | None, str]) -> None:
    error, cause, text = portable
    where = WorkerTraceback(text)
    if cause is not None:
        cause.__cause__ = where
    error.__cause__ = where if cause is None else cause
    raise error


# ---------------------------------------------------------------- the consumer

# A forked child that kept the consumer's end of a pipe open would keep the workers waiting after the consumer's death.
_CONSUMER_ENDS: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_inherited_ends() -> None:
    for connection in list(_CONSUMER_ENDS):
        connection.close()


os.register_at_fork(after_in_child=_close_inherited_ends)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, context: Any, recipe: Batches, keep: int, threads: int, name: str) -> None:
        self.connection, theirs = context.Pipe(duplex=True)
        _CONSUMER_ENDS.add(self.connection)
        self.reader = SharedReader(self.connection)
        self.under_way = 0
        self.process = context.Process(target=_main, args=(theirs, recipe, keep, threads), name=name, daemon=True)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of a fork beside threads, and torch's own sleep in every process that used it.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.connection.close()
            raise UsageError(
                f"the transform, collate_fn or dataset cannot be sent to a worker process ({error}); define it at the "
                "top of a module instead of in a function or as a lambda, or use start_method='fork' where there is one"
            ) from error
        finally:
            theirs.close()

    def send(self, place: int, epoch: int, numbers: Numbers) -> None:
        try:
            # Not Connection.send, whose pickler is made anew for each message.
            self.connection.send_bytes(pickle.dumps((place, epoch, numbers, self.reader.returned())))
        except OSError as error:
            raise self.died() from error
        self.under_way += 1

    def receive(self) -> tuple[int, bool, Any]:
        try:
            received = self.reader.receive()
        except (EOFError, OSError) as error:
            raise self.died() from error
        self.under_way -= 1
        return received

    def died(self) -> WorkerDiedError:
        self.process.join(ENDING_S)
        code = self.process.exitcode
        what = "fewer workers or smaller batches need less memory"
        how = "does not answer" if code is None else f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory? see dmesg)" if code == -signal.SIGKILL else ""
        elif code:
            what = ("its own error is on standard error (with spawn and forkserver, a script must make its loaders "
                    "under: if __name__ == '__main__')")
        return WorkerDiedError(f"loader worker {self.process.name} (pid {self.process.pid}) {how}; {what}")


class _Crew:
    """All workers of a loader."""

    def __init__(self, recipe: Batches, workers: int, prefetch: int, threads: int, start_method: str | None) -> None:
        self.pid = os.getpid()
        self.workers: list[_Worker] = []
        self._by_descriptor: dict[int, _Worker] = {}
        self._poll = select.poll()
        context = multiprocessing.get_context(start_method)
        keep = -(-prefetch // workers) + 1
        try:
            for i in range(workers):
                self.workers.append(_Worker(context, recipe, keep, threads, f"loader-{i}"))
                descriptor = self.workers[-1].connection.fileno()
                self._by_descriptor[descriptor] = self.workers[-1]
                self._poll.register(descriptor, select.POLLIN)
        except BaseException:
            self.stop()
            raise

    def ready(self, timeout_s: float) -> list[_Worker]:
        """The workers that have sent something, or died. Waits for one at most so long."""
        return [self._by_descriptor[fd] for fd, _ in self._poll.poll(timeout_s * 1000)]

    def is_well(self) -> bool:
        """Whether all workers live, and are this process's own."""
        mine = os.getpid() == self.pid
        return mine and bool(self.workers) and all(worker.process.is_alive() for worker in self.workers)

    def stop(self) -> None:
        """Kill the workers. They hold nothing that would need tidying."""
        if os.getpid() != self.pid:  # a forked copy: they are not ours to stop
            return
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join(TERMINATE_S)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.process.close()


class ProcessEngine:
    """Makes batches in worker processes. They live until the engine is closed, or a run is given up.

    Args:
        recipe: what a batch is.
        workers: number of processes.
        prefetch: batches under way in all; None for `PREFETCH_PER_WORKER` each.
        threads: threads in each process.
        start_method: "fork", "forkserver" or "spawn"; None for multiprocessing's own.

    Raises:
        UsageError: no such start method here.
    """

    def __init__(
        self, recipe: Batches, workers: int, *, prefetch: int | None = None, threads: int = 1,
        start_method: str | None = None,
    ) -> None:
        if start_method is not None and start_method not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise UsageError(f"start_method must be one of {known}, got {start_method!r}")
        self._recipe = recipe
        self._count = workers
        self._prefetch = PREFETCH_PER_WORKER * workers if prefetch is None else prefetch
        self._threads = threads
        self._start_method = start_method
        self._end: weakref.finalize[..., Any] | None = None
        self._crew: _Crew | None = None
        self._run: weakref.ref[ProcessRun] | None = None

    def run(self, epoch: int, batches: Sequence[Numbers]) -> ProcessRun:
        """Start making these batches; a run still under way is given up."""
        before = None if self._run is None else self._run()
        if before is not None:
            before.close()
        if self._crew is None or not self._crew.is_well():
            self.close()
            self._crew = _Crew(self._recipe, self._count, self._prefetch, self._threads, self._start_method)
            self._end = weakref.finalize(self, self._crew.stop)
        run = ProcessRun(self._crew, self._prefetch, epoch, batches)
        self._run = weakref.ref(run)
        return run

    def close(self) -> None:
        """Stop the workers. A later run starts new ones."""
        if self._end is not None:
            self._end()


class ProcessRun:
    """One pass over some batches; see `loaders.engine.Run`."""

    def __init__(self, crew: _Crew, prefetch: int, epoch: int, batches: Sequence[Numbers]) -> None:
        self._crew = crew
        self._epoch = epoch
        self._batches = batches
        self._sent = 0
        self._given = 0
        self._finished: dict[int, tuple[bool, Any]] = {}
        # Given up half-way, batches are under way that nobody will fetch: the workers end with the run.
        self._give_up = weakref.finalize(self, crew.stop)
        try:
            for _ in range(prefetch):
                self._send_next()
        except BaseException:
            self.close()
            raise

    def _send_next(self) -> None:
        if self._sent < len(self._batches):
            worker = min(self._crew.workers, key=lambda worker: worker.under_way)
            worker.send(self._sent, self._epoch, self._batches[self._sent])
            self._sent += 1

    def __iter__(self) -> ProcessRun:
        return self

    def __next__(self) -> Made:
        if not self._give_up.alive or self._given == len(self._batches):
            raise StopIteration
        try:
            while self._given not in self._finished:
                self._receive(HEARTBEAT_S)
            ok, value = self._finished.pop(self._given)
            if not ok:
                _raise(value)
            self._given += 1
            self._send_next()
            if self._given == len(self._batches):
                self._give_up.detach()  # all is fetched: the workers wait for the next run
        except BaseException:
            self.close()
            raise
        return cast(Made, value)

    def _receive(self, timeout_s: float) -> None:
        """Fetch what has arrived; wait for something if `timeout_s` says so."""
        ready = self._crew.ready(timeout_s)
        for worker in ready:
            place, ok, value = worker.receive()
            self._finished[place] = ok, value
        if not ready and timeout_s:
            for worker in self._crew.workers:
                if not worker.process.is_alive():
                    raise worker.died()

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting."""
        if self._give_up.alive and self._given not in self._finished:
            self._receive(0)
        return self._given in self._finished

    def close(self) -> None:
        """Stop the workers at once, unless all batches were fetched."""
        self._give_up()
        self._finished.clear()
