"""The stall meter: what it counts, shows and logs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loaders.stall import StallMeter, Step


class Time:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def loop(time: Time, waits: list[float], works: list[float], **options: object) -> StallMeter[torch.Tensor]:
    def slow() -> Iterator[torch.Tensor]:
        for wait in waits:
            time.now += wait
            yield torch.zeros(4, 3)

    meter = StallMeter(slow(), clock=time, **options)  # type: ignore[arg-type]
    for _, work in zip(meter, works, strict=False):
        time.now += work
    return meter


def test_waiting_and_working_are_told_apart() -> None:
    meter = loop(Time(), [1.0, 0.5, 0.5], [3.0, 1.5, 1.5])
    assert list(meter.steps) == [Step(1.0, 3.0, 4), Step(0.5, 1.5, 4), Step(0.5, 1.5, 4)]
    assert meter.wait_share == 0.25 and meter.samples_per_s == 1.5 and meter.count == 3
    assert meter.step_s == pytest.approx(8 / 3)
    assert meter.summary().startswith("2 samples/s, step 2666.7 ms, 25% waiting for data")


def test_the_window_slides() -> None:
    meter = loop(Time(), [9.0, 1.0, 1.0], [1.0, 1.0, 1.0], window=2)
    assert meter.wait_share == 0.5 and meter.count == 3


def test_before_the_first_step_nothing_is_known() -> None:
    with StallMeter([]) as meter:
        assert (meter.wait_share, meter.samples_per_s, meter.step_s, len(meter)) == (0, 0, 0, 0)
        assert meter.summary() == "no step yet"


def test_bar_and_writer_get_the_figures_every_so_often() -> None:
    class Spy:
        def __init__(self) -> None:
            self.shown: list[dict[str, str]] = []
            self.logged: list[tuple[str, float, int]] = []

        def set_postfix(self, ordered_dict: dict[str, str]) -> None:
            self.shown.append(ordered_dict)

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.logged.append((tag, scalar_value, global_step))

    spy = Spy()
    loop(Time(), [1.0] * 5, [1.0] * 5, bar=spy, writer=spy, every=2)
    assert [shown["wait"] for shown in spy.shown] == ["50%", "50%"]
    assert [(tag, step) for tag, _, step in spy.logged if tag == "data/wait_share"] == [
        ("data/wait_share", 2), ("data/wait_share", 4)
    ]


def test_it_works_with_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=3) as bar:
        for _ in StallMeter([[1], [2], [3]], bar=bar, every=1):
            bar.update()
    assert "img/s" in capsys.readouterr().err


def test_it_is_the_loader_to_whoever_asks() -> None:
    batches = [torch.zeros(2), torch.ones(2)]
    meter = StallMeter(batches)
    assert len(meter) == 2
    assert [batch.sum().item() for batch in meter] == [0, 2]
    assert [batch.sum().item() for batch in meter] == [0, 2]  # the next epoch


def test_an_error_of_the_loader_passes_through() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(StallMeter(fails()))
