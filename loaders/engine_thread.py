"""Worker threads that decode straight into the batch.

Work is queued by runs of samples, so all threads work on the same few batches and one slow picture
delays nobody but its own batch. Decoding, resizing and copying release the GIL.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch

from loaders.batches import Batches, Draft, Made
from loaders.collate import Empty
from loaders.engine import HEARTBEAT_S
from loaders.engine_buffers import BufferPool, pinned_empty
from loaders.order import Numbers
from packer.errors import WorkerDiedError

#: Batches under way beyond the one in the consumer's hands: enough to ride out an uneven batch.
PREFETCH = 3
#: A thread that will not end is in somebody's C code; daemon threads do not keep the interpreter.
JOIN_S = 10.0


class _Job:
    """A batch under way. Whoever takes the last token finishes it."""

    __slots__ = ("draft", "error", "made", "place", "tokens")

    def __init__(self, place: int, draft: Draft, parts: int) -> None:
        self.place = place
        self.draft: Draft | None = draft
        self.tokens = list(range(parts))  # list.pop is atomic; token 0 comes last
        self.made: Made | None = None
        self.error: BaseException | None = None


_Task: TypeAlias = "tuple[_Job, int, int]"


class _Crew:
    """The threads of one run, and what they share with it. It does not know the run: dropping the run ends them."""

    def __init__(self, recipe: Batches, workers: int) -> None:
        self.recipe = recipe
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.stopped = False
        self.threads = [
            threading.Thread(target=self._work, name=f"loader-{i}", daemon=True) for i in range(workers)
        ]
        _CREWS.add(self)
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        # One thread per worker is what was asked for; torch's own pool inside each would fight over the CPUs.
        _use_one_torch_thread()
        while (task := self.tasks.get()) is not None and not self.stopped:
            job, start, stop = task
            self._do(job, start, stop)
            # While waiting for the next task this frame must not keep a batch from being given back.
            del task, job

    def _do(self, job: _Job, start: int, stop: int) -> None:
        draft = job.draft
        if job.error is None and draft is not None:
            try:
                self.recipe.fill(draft, start, stop)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer gets it
                job.error = error
        if job.tokens.pop() == 0:
            if job.error is None and draft is not None:
                try:
                    job.made = self.recipe.finish(draft)
                except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer gets it
                    job.error = error
            job.draft = None
            self.done.put(job)

    def stop(self) -> None:
        """Tell the threads to end after the sample in hand. Does not wait: it may run in the garbage collector."""
        self.stopped = True
        for _ in self.threads:
            self.tasks.put(None)

    def join(self) -> None:
        """Wait for the threads' end."""
        for thread in self.threads:
            # One that is not alive may never have been started, if Ctrl-C came between: it cannot be joined.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_S)


_CREWS: weakref.WeakSet[_Crew] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Threads must be out of torch's and the decoders' code before the interpreter takes itself apart."""
    crews = list(_CREWS)
    for crew in crews:
        crew.stop()
    for crew in crews:
        crew.join()


_TORCH_THREADS_LOCK = threading.Lock()


def _use_one_torch_thread() -> None:
    """Limit torch's intra-op parallelism to 1 in this thread alone.

    torch.set_num_threads sets the caller's OpenMP team and the default of threads to come; the
    default is put back from a thread that ends at once.
    """
    with _TORCH_THREADS_LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        if before != 1:
            helper = threading.Thread(target=torch.set_num_threads, args=(before,))
            helper.start()
            helper.join()


class ThreadEngine:
    """Makes batches in threads of this process.

    Args:
        recipe: what a batch is.
        workers: number of threads.
        prefetch: batches under way; None for `PREFETCH`.
        pin: make batches in page-locked memory.
    """

    def __init__(self, recipe: Batches, workers: int, *, prefetch: int | None = None, pin: bool = False) -> None:
        self._recipe = recipe
        self._workers = workers
        self._prefetch = PREFETCH if prefetch is None else prefetch
        self._empty = pinned_empty if pin else BufferPool(keep=self._prefetch + 2).empty
        self._crew: weakref.ref[_Crew] | None = None

    def run(self, epoch: int, batches: Sequence[Numbers]) -> ThreadRun:
        """Start making these batches."""
        run = ThreadRun(self._recipe, self._workers, self._prefetch, self._empty, epoch, batches)
        self._crew = weakref.ref(run.crew)
        return run

    def close(self) -> None:
        """Stop the threads of the last run, if they have not ended, and wait for them."""
        crew = None if self._crew is None else self._crew()
        if crew is not None:
            crew.stop()
            crew.join()


class ThreadRun:
    """One pass over some batches; see `loaders.engine.Run`."""

    def __init__(
        self, recipe: Batches, workers: int, prefetch: int, empty: Empty, epoch: int, batches: Sequence[Numbers]
    ) -> None:
        self._recipe = recipe
        self._empty = empty
        self._epoch = epoch
        self._batches = batches
        self._queued = 0
        self._given = 0
        self._finished: dict[int, _Job] = {}
        self.crew = _Crew(recipe, workers)
        self._end = weakref.finalize(self, self.crew.stop)
        for _ in range(prefetch):
            self._queue_next()

    def _queue_next(self) -> None:
        if self._queued == len(self._batches):
            return
        draft = self._recipe.draft(self._batches[self._queued], self._epoch, self._empty)
        runs = self._recipe.runs(draft)
        job = _Job(self._queued, draft, len(runs))
        for start, stop in runs:
            self.crew.tasks.put((job, start, stop))
        self._queued += 1

    def __iter__(self) -> ThreadRun:
        return self

    def __next__(self) -> Made:
        if not self._end.alive or self._given == len(self._batches):
            self.close()
            raise StopIteration
        try:
            while self._given not in self._finished:
                self._receive(HEARTBEAT_S)
            job = self._finished.pop(self._given)
            if job.error is not None:
                error, job.error = job.error, None  # else job → error → traceback → job would wait for the collector
                raise error
            self._given += 1
            self._queue_next()
            if self._given == len(self._batches):
                self.close()
        except BaseException:
            self.close()
            raise
        return cast(Made, job.made)

    def _receive(self, timeout_s: float) -> None:
        try:
            job = self.crew.done.get(timeout=timeout_s) if timeout_s else self.crew.done.get_nowait()
        except queue.Empty:
            if not any(thread.is_alive() for thread in self.crew.threads):
                raise WorkerDiedError(
                    "the loader's threads are gone: a loader does not survive a fork in mid-epoch; "
                    "call iter() in the process that uses it"
                ) from None
            return
        self._finished[job.place] = job

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting."""
        while not self.crew.done.empty():
            self._receive(0)
        return self._given in self._finished

    def close(self) -> None:
        """Stop the threads and wait for them: a sample's decoding at most."""
        if self._end.detach() is not None:
            self.crew.stop()
            self.crew.join()
        self._finished.clear()
