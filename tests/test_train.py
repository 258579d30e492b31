"""scripts/train.py: it learns, goes on exactly where it was stopped, and measures what it says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from loader_helpers import pack_tree, write_tree
from PIL import Image

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
SMALL = ("--batch-size", "8", "--size", "16", "--width", "4", "--workers", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only lose by more, and sums come out the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    write_tree(root / "src" / "train", samples=44)
    write_tree(root / "src" / "val", samples=13)
    return pack_tree(root / "src", root / "out")


def test_it_learns_colours(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for i in range(96):
        pixels = rng.integers(0, 100, (24, 24, 3), np.uint8)
        pixels[..., i % 3] += 120
        path = tmp_path / "src" / ("train" if i < 72 else "val") / "rgb"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    out = pack_tree(tmp_path / "src", tmp_path / "out")
    assert script.main([str(out), *SMALL, "--epochs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"epoch {i}/4" for i in range(1, 5)]
    assert lines[-1].endswith("100.0% right of 24 pictures")


@pytest.mark.parametrize("amp", ["float16", "bfloat16", "off"])
def test_every_precision_trains(script: ModuleType, packed: Path, amp: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "last.pt"
    assert script.main([str(packed), *SMALL, "--epochs", "1", "--amp", amp, "--checkpoint", str(checkpoint)]) == 0
    state = torch.load(checkpoint, weights_only=True)
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    assert bool(state["scaler"]) == (amp == "float16"), "only float16 needs its gradients scaled"
    assert state["seen"] == 40, "full batches"


def stop(module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """Let a method of Training raise KeyboardInterrupt when it has been called `after` times."""
    real: Callable[..., Any] = getattr(module.Training, name)
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module.Training, name, counted)


@pytest.mark.parametrize(
    ("name", "after"),
    [("step", 1), ("step", 3), ("evaluate", 0), ("step", 5), ("step", 9), ("evaluate", 1)],
    ids=["before any", "in epoch 1", "before evaluation", "between epochs", "in epoch 2", "at the end"],
)
def test_an_interrupted_run_ends_with_the_same_weights(
    script: ModuleType, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command = [str(packed), *SMALL, "--epochs", "2", "--save-every", "2", "--checkpoint"]
    assert script.main([*command, str(tmp_path / "whole.pt")]) == 0
    whole = capsys.readouterr().out.splitlines()
    with monkeypatch.context() as patched:
        stop(script, patched, name, after)
        with pytest.raises(KeyboardInterrupt):
            script.main([*command, str(tmp_path / "parts.pt")])
    capsys.readouterr()
    assert script.main([*command, str(tmp_path / "parts.pt")]) == 0
    resumed = capsys.readouterr().out.splitlines()
    assert resumed[0].startswith(f"{tmp_path / 'parts.pt'}: on from epoch ") or after == 1
    assert resumed[-1].partition("val:")[2] == whole[-1].partition("val:")[2] != ""
    want, got = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "parts.pt"))
    assert got["loader"] == want["loader"] and got["seen"] == want["seen"] == 80
    for key, value in want["model"].items():
        assert torch.equal(got["model"][key], value), key


def test_a_finished_run_has_nothing_to_do(script: ModuleType, packed: Path, tmp_path: Path) -> None:
    command = [str(packed), *SMALL, "--epochs", "1", "--checkpoint", str(tmp_path / "last.pt")]
    assert script.main(command) == 0
    before = (tmp_path / "last.pt").read_bytes()
    assert script.main(command) == 0
    assert (tmp_path / "last.pt").read_bytes() == before


def test_a_checkpoint_is_whole_or_not_there(
    script: ModuleType, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: object, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    command = [str(packed), *SMALL, "--checkpoint", str(tmp_path / "last.pt")]
    assert script.main([*command, "--epochs", "1"]) == 0
    before = (tmp_path / "last.pt").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(script.torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            script.main([*command, "--epochs", "2"])
    assert (tmp_path / "last.pt").read_bytes() == before
    assert script.main([*command, "--epochs", "2"]) == 0


def test_waiting_is_the_time_in_next(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the loader and the training step turn themselves."""
    now = 0.0

    def turn(seconds: float) -> None:
        nonlocal now
        now += seconds

    def loader() -> Iterator[int]:
        for batch in range(4):
            turn(3.0)
            yield batch

    monkeypatch.setattr(script.time, "perf_counter", lambda: now)
    meter = script.Meter(began_s=now)
    for _ in meter.timed(loader()):
        turn(1.0)
        meter.count(8, 0.5)
    assert (meter.images, meter.waited_s, meter.elapsed_s) == (32, 12.0, 16.0)
    assert str(meter) == "loss 0.5000, 2 images/s, 75.0% of the time waiting for data"


def test_the_network_is_resnet_18(script: ModuleType) -> None:
    """torchvision's resnet18 has 11,689,512 parameters, 3·64·7·7 of them in its stem, where ours has 3·64·3·3."""
    network = script.ResNet(1000)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert parameters == 11_689_512 - 3 * 64 * (7 * 7 - 3 * 3)
    for size in (32, 50):
        assert network(torch.zeros(2, 3, size, size)).shape == (2, 1000)


def test_what_cannot_be_trained_on(
    script: ModuleType, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (20, 20)).save(flat / "a.png")
    out = pack_tree(flat, tmp_path / "out")
    cases = {
        (str(tmp_path),): "dataset.json",
        (str(out),): "has no classes to learn",
        (str(packed), "--batch-size", "64"): "the split 'train' has no 64 pictures",
    }
    for arguments, message in cases.items():
        assert script.main([*arguments, "--device", "cpu", "--epochs", "1"]) == 1
        assert message in capsys.readouterr().err
