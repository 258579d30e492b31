"""How long a training loop waits for its data: two lines in anybody's loop.

    meter = StallMeter(loader)
    for images, labels in meter:
        ...                              # train
    print(meter.summary())               # 1,210 samples/s, step 52.9 ms, 4 % waiting for data

Whatever can be iterated will do. With a progress bar the figures stand beside it, with a
TensorBoard writer they are logged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, TypeVar

from loaders.measure import batch_samples
from loaders.resources import GpuWatch

Batch = TypeVar("Batch")


class Step(NamedTuple):
    """One step of a loop.

    Attributes:
        wait_s: seconds until the batch was there.
        work_s: seconds until the next one was asked for.
        samples: in the batch.
    """

    wait_s: float
    work_s: float
    samples: int


class Bar(Protocol):
    """A progress bar, as tqdm has it."""

    def set_postfix(self, ordered_dict: dict[str, str]) -> object:
        """Show these beside the bar."""
        ...


class Writer(Protocol):
    """Logs figures, as `torch.utils.tensorboard.SummaryWriter` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Log one."""
        ...


class StallMeter(Generic[Batch]):
    """Iterates a loader and keeps account of waiting and working.

    The share of waiting is of the loop's own time: on a GPU whose queue runs ahead a wait may still be covered,
    so `gpu_utilization`, where NVML is there, has the last word.

    Args:
        loader: gives batches.
        bar: shows the figures, every `every` steps.
        writer: logs them under `data/…`, every `every` steps.
        every: see there.
        window: figures are of the last so many steps.
        clock: seconds; for tests.

    Attributes:
        steps: the last `window` steps, the oldest first.
        count: steps so far.

    Example:
        >>> meter = StallMeter([[1, 2], [3, 4]])
        >>> [sum(batch) for batch in meter]
        [3, 7]
        >>> meter.count, [step.samples for step in meter.steps]
        (2, [2, 2])
    """

    def __init__(
        self, loader: Iterable[Batch], *, bar: Bar | None = None, writer: Writer | None = None, every: int = 10,
        window: int = 100, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loader = loader
        self.steps: deque[Step] = deque(maxlen=max(1, window))
        self.count = 0
        self._bar = bar
        self._writer = writer
        self._every = max(1, every)
        self._clock = clock
        self._gpu = GpuWatch()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        clock = self._clock
        asked = clock()
        for batch in self.loader:
            got = clock()
            samples = batch_samples(batch)
            yield batch
            del batch  # its memory is wanted for the next one
            done = clock()
            self._note(Step(got - asked, done - got, samples))
            asked = clock()

    def _note(self, step: Step) -> None:
        self.steps.append(step)
        self.count += 1
        if self.count % self._every:
            return
        if self._bar is not None:
            self._bar.set_postfix(self.postfix())
        if self._writer is not None:
            for name, value in self.figures().items():
                self._writer.add_scalar(f"data/{name}", value, self.count)

    @property
    def seconds(self) -> float:
        """How long the steps of the window took in all."""
        return sum(step.wait_s + step.work_s for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        """Samples a second over the window; 0 before the first step is done."""
        return sum(step.samples for step in self.steps) / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the window's time spent waiting for data, 0 to 1."""
        return sum(step.wait_s for step in self.steps) / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step over the window, waiting included."""
        return self.seconds / len(self.steps) if self.steps else 0.0

    @property
    def gpu_utilization(self) -> float | None:
        """How busy the GPUs are at the moment, 0 to 1; None without GPU or NVML."""
        return self._gpu.utilization()

    def figures(self) -> dict[str, float]:
        """All of them by name."""
        found = {"samples_per_s": self.samples_per_s, "wait_share": self.wait_share, "step_s": self.step_s}
        gpu = self.gpu_utilization
        return found if gpu is None else {**found, "gpu_utilization": gpu}

    def postfix(self) -> dict[str, str]:
        """The figures as a progress bar shows them."""
        shown = {"img/s": f"{self.samples_per_s:,.0f}", "wait": f"{self.wait_share:.0%}"}
        gpu = self.gpu_utilization
        return shown if gpu is None else {**shown, "gpu": f"{gpu:.0%}"}

    def summary(self) -> str:
        """One line."""
        if not self.steps:
            return "no step yet"
        gpu = self.gpu_utilization
        busy = "" if gpu is None else f", GPU {gpu:.0%} busy"
        return (f"{self.samples_per_s:,.0f} samples/s, step {1000 * self.step_s:.1f} ms, "
                f"{self.wait_share:.0%} waiting for data{busy}")

    def close(self) -> None:
        """Let go of NVML. The meter's figures stay."""
        self._gpu.close()

    def __enter__(self) -> StallMeter[Batch]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
