"""One run of a training loop, every step noted, with the machine's utilisation beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from loaders.measure import batch_samples
from loaders.resources import GpuWatch
from loaders.subject import batch_bytes
from packer.errors import MeasurementError, PackerError

_SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True)
class LoopStep:
    """One step.

    Attributes:
        begun_s: seconds since the run began.
        wait_s: seconds until the batch was there.
        transfer_s: seconds until it was on the device.
        work_s: seconds of the step.
        samples: in the batch.
    """

    begun_s: float
    wait_s: float
    transfer_s: float
    work_s: float
    samples: int


@dataclass(frozen=True)
class Utilization:
    """How busy the machine was at one moment.

    Attributes:
        at_s: seconds since the run began.
        cpu: share of all the machine's CPUs, 0 to 1.
        disk_bytes_per_s: read by everybody from all disks; None where the system does not say.
        gpu: share of the moment in which a kernel ran; None without GPU.
    """

    at_s: float
    cpu: float
    disk_bytes_per_s: float | None
    gpu: float | None


@dataclass
class Run:
    """All steps of a run after its warm-up.

    Attributes:
        steps: each of them.
        utilization: the machine meanwhile.
        process_cpu: CPU seconds of this process per second.
        batch_bytes: bytes of all batches.
        first_batch_s: seconds until the first batch of all.
        notes: what could not be watched.
    """

    steps: list[LoopStep] = field(default_factory=list)
    utilization: list[Utilization] = field(default_factory=list)
    process_cpu: float = 0.0
    batch_bytes: int = 0
    first_batch_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Samples in all steps."""
        return sum(step.samples for step in self.steps)

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for data."""
        return sum(step.wait_s for step in self.steps)

    @property
    def transfer_s(self) -> float:
        """Seconds spent in moving batches."""
        return sum(step.transfer_s for step in self.steps)

    @property
    def work_s(self) -> float:
        """Seconds spent in the step itself."""
        return sum(step.work_s for step in self.steps)

    @property
    def step_s(self) -> float:
        """Mean seconds from step to step."""
        return (self.wait_s + self.transfer_s + self.work_s) / max(len(self.steps), 1)

    @property
    def samples_per_s(self) -> float:
        """Samples a second."""
        return self.samples / max(self.wait_s + self.transfer_s + self.work_s, 1e-9)


class Watch:
    """Samples utilisation in a thread of its own; a context manager. Without psutil it watches nothing."""

    def __init__(self, run: Run, begun: float) -> None:
        self._run = run
        self._begun = begun
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpu = GpuWatch()

    def __enter__(self) -> Watch:
        try:
            import psutil
        except ImportError:
            self._run.notes.append("no utilisation was sampled: pip install 'packer-loaders[tune]'")
            return self
        psutil.cpu_percent()  # the first call only sets the starting point
        self._thread = threading.Thread(target=self._sample, args=(psutil,), name="doctor-watch", daemon=True)
        self._thread.start()
        return self

    def _sample(self, psutil: Any) -> None:
        before = self._disk(psutil)
        then = time.perf_counter()
        while not self._stop.wait(_SAMPLE_EVERY_S):
            now, disk = time.perf_counter(), self._disk(psutil)
            rate = None if disk is None or before is None else (disk - before) / max(now - then, 1e-9)
            self._run.utilization.append(
                Utilization(now - self._begun, psutil.cpu_percent() / 100, rate, self._gpu.utilization())
            )
            before, then = disk, now

    @staticmethod
    def _disk(psutil: Any) -> int | None:
        counters = psutil.disk_io_counters()
        return None if counters is None else int(counters.read_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._gpu.close()


def run_loop(
    loader: Iterable[Any], step: Callable[[Any], object] | None, transfer: Callable[[Any], Any] | None = None, *,
    seconds: float = 4.0, warm_up: int = 1, together: int = 1,
) -> Run:
    """Run a training loop, over several epochs where one is too short.

    Args:
        loader: gives batches.
        step: called with each batch; None: nothing is done with it.
        transfer: moves a batch to its device, before.
        seconds: how long, after the warm-up.
        warm_up: steps that do not count.
        together: batches that arrive at once; a multiple of them is counted.

    Raises:
        MeasurementError: loader, transfer or step fails, or there is no batch. Errors of this package pass as they are.
    """
    run = Run()
    begun = time.perf_counter()
    with Watch(run, begun):
        cpu, counted_from, seen = time.process_time(), begun, 0
        while True:
            before = seen
            for now in _steps(loader, step, transfer, run, begun):
                seen += 1
                if seen == warm_up:
                    cpu, counted_from = time.process_time(), now
                    run.steps.clear()
                    run.batch_bytes = 0
                full = len(run.steps) % together == 0 and len(run.steps) >= 2 * together
                if seen > warm_up and ((full and now - counted_from >= seconds) or now - counted_from >= 3 * seconds):
                    break
            else:
                if seen == before:
                    break  # it gives nothing (any more)
                # The warm-up may have taken all of an epoch: then nothing has been counted yet.
                if not run.steps or time.perf_counter() - begun < 3 * seconds:
                    continue
            break
        run.process_cpu = (time.process_time() - cpu) / max(time.perf_counter() - counted_from, 1e-9)
    if not run.steps:
        raise MeasurementError("the loader gives no batch, or too few to measure: is the dataset empty, smaller than "
                               "one batch with drop_last=True, or the iterator used up already?")
    return run


def _steps(
    loader: Iterable[Any], step: Callable[[Any], object] | None, transfer: Callable[[Any], Any] | None, run: Run,
    begun: float,
) -> Iterable[float]:
    """One pass of the loop; yields the time after each step."""
    doing = "the loader"
    number = len(run.steps)
    iterator = None
    try:
        iterator = iter(loader)
        while True:
            doing, asked = "the loader", time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            got = time.perf_counter()
            run.first_batch_s = run.first_batch_s or got - begun
            samples, nbytes = batch_samples(batch), batch_bytes(batch)
            if transfer is not None:
                doing = "the transfer"
                batch = transfer(batch)
                _synchronize()
            moved = time.perf_counter()
            if step is not None:
                doing = "the step"
                step(batch)
                _synchronize()
            del batch
            done = time.perf_counter()
            number += 1
            run.steps.append(LoopStep(asked - begun, got - asked, moved - got, done - moved, samples))
            run.batch_bytes += nbytes
            yield done
    except PackerError:
        raise
    except Exception as error:
        raise MeasurementError(f"{doing} fails after {number} steps ({type(error).__name__}: {error})") from error
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
