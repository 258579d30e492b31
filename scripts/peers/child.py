"""One loader in a process of its own: packs, is checked, or is measured. Run by `peers.harness`.

    python -m peers.child '{"do": "time", "peer": "packer-thread", "store": …, "task": {…}, "out": "result.json"}'

The clock runs from the end of the warm-up batches to the end of the epoch, over as many epochs as fit into the time; no
figure is taken while it runs. What is looked at (pixels, labels) is looked at in `check`, where nothing is timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from peers import PEERS, Peer
from peers.base import MEAN, STD, Task


def main() -> None:
    """Do what the request says, write the result to its `out`, and end at once.

    How a library ends its workers is not ours to wait for: the harness ends all that is left.
    """
    status = 1
    try:
        _do(json.loads(sys.argv[1]))
        status = 0
    finally:
        if status:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)


def _do(request: dict[str, Any]) -> None:
    peer = PEERS[request["peer"]]
    module = importlib.import_module(f"peers.{peer.module}")
    if request["do"] == "pack":
        result = _pack(module, peer, request)
    elif request["do"] == "read":
        result = _read(module, peer, request)
    else:
        task = Task(**request["task"])
        begin = time.perf_counter()
        batches = module.load(request["store"], task, peer.variant)
        open_s = time.perf_counter() - begin
        if request["do"] == "check":
            result = _check(batches, task, ramps=request["ramps"])
        else:
            result = {"open_s": open_s, **_time(batches, request["warm_up"], request["seconds"])}
    result["versions"] = {name: _version(name) for name in ("torch", "numpy", *peer.distributions)}
    Path(request["out"]).write_text(json.dumps(result))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _pack(module: Any, peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    module.pack(request["tree"], request["store"], peer.variant)
    return {"seconds": time.perf_counter() - begin}


# ---------------------------------------------------------------- checks


def _check(batches: Iterable[Any], task: Task, *, ramps: bool) -> dict[str, Any]:
    """One epoch's samples and labels, and the pixels: their statistics or, on ramps, the crops that made them."""
    import torch

    labels: list[int] = []
    total, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    crops = []
    for images, batch_labels in batches:
        _require(images, batch_labels, task)
        labels += batch_labels.tolist()
        pixels = images if task.normalized else _normalized(images)
        if ramps:
            crops.append(_crops(pixels, batch_labels))
            continue
        total += pixels.sum((0, 2, 3), dtype=torch.float64)
        # A channel's sum of squares without a temporary as large as the batch.
        squares += torch.stack([torch.linalg.vector_norm(pixels[:, c], dtype=torch.float64) ** 2 for c in range(3)])
        count += pixels[:, 0].numel()
    result: dict[str, Any] = {"samples": len(labels), "labels": torch.bincount(torch.tensor(labels)).tolist()}
    if ramps:
        return result | _crop_statistics(torch.cat(crops))
    mean = total / count
    return result | {"mean": mean.tolist(), "std": (squares / count - mean**2).sqrt().tolist()}


def _require(images: Any, labels: Any, task: Task) -> None:
    """Raise unless a batch is what the task asks for."""
    shape, dtype = (len(labels), 3, task.side, task.side), f"torch.{task.dtype}"
    got = f"images {tuple(images.shape)} {images.dtype}, labels {tuple(labels.shape)} {labels.dtype}"
    if tuple(images.shape) != shape or str(images.dtype) != dtype or tuple(labels.shape) != shape[:1]:
        raise ValueError(f"wanted images {shape} {dtype} and as many labels, got {got}")
    if str(labels.dtype) != "torch.int64" or not images.is_contiguous() or images.device.type != "cpu":
        raise ValueError(f"wanted contiguous images on the CPU and int64 labels, got {got}, strides {images.stride()}")


def _normalized(pixels: Any) -> Any:
    import torch

    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    return (pixels / 255 - mean) / std


def _crops(pixels: Any, labels: Any) -> Any:
    """(B, 4) width, height as shares of the picture, mirrored, label is wrong; see `harness.make_ramps`."""
    import torch

    side = pixels.shape[-1]
    pixels = pixels * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)
    at = (torch.arange(side) + 0.5) / side - 0.5
    slope = at / (at**2).sum()  # least squares; the borders, where a resize may repeat pixels, weigh little
    across, down = (pixels[:, 0].mean(1) * slope).sum(1), (pixels[:, 1].mean(2) * slope).sum(1)
    wrong = (pixels[:, 2].mean((1, 2)) * 255 / LABEL_STEP).round().long() != labels
    return torch.stack([across.abs(), down.abs(), (across < 0).float(), wrong.float()], 1)


#: Blue value between the ramps of one label and the next.
LABEL_STEP = 25


def _crop_statistics(crops: Any) -> dict[str, Any]:
    area, log_ratio = crops[:, 0] * crops[:, 1], (crops[:, 0] / crops[:, 1]).log()
    return {
        "area_mean": area.mean().item(),
        "area_std": area.std().item(),
        "log_ratio_std": log_ratio.std().item(),
        "mirrored": crops[:, 2].mean().item(),
        "wrong_labels": int(crops[:, 3].sum().item()),
    }


# ---------------------------------------------------------------- timing


def _time(batches: Iterable[Any], warm_up: int, seconds: float) -> dict[str, Any]:
    """Images/s, CPU seconds per 1,000 images, and seconds from `iter()` to the first batch of the process."""
    images = first_batch_s = wall_s = cpu_s = 0.0
    epochs, samples, labels = 0, [], 0
    while wall_s < seconds:
        begin = time.perf_counter()
        iterator = iter(batches)
        seen = timed = 0
        for number, (batch, batch_labels) in enumerate(iterator):
            if number == 0 and epochs == 0:
                first_batch_s = time.perf_counter() - begin
            seen += len(batch)
            labels += int(batch_labels.sum())
            if number == warm_up - 1:
                clock, cpu, timed = time.perf_counter(), _cpu_seconds(os.getpid()), seen
        if seen == timed or timed == 0:
            raise ValueError(f"an epoch of {seen} images is too short for {warm_up} warm-up batches")
        wall_s += time.perf_counter() - clock
        cpu_s += _cpu_seconds(os.getpid()) - cpu
        images += seen - timed
        samples.append(seen)
        epochs += 1
    return {
        "images_per_s": images / wall_s,
        "cpu_s_per_1000": 1000 * cpu_s / images,
        "first_batch_s": first_batch_s,
        "epochs": epochs,
        "samples": samples,
        "label_sum": labels,
    }


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all its descendants, living or dead."""
    ticks = 0.0
    for process in descendants(pid):
        try:
            values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended just now: its parent's count has it
        ticks += sum(map(int, values[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        children = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in tasks]
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in children:
        for child in line.split():
            yield from descendants(int(child))


def _read(module: Any, peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Microseconds a sample, of reading the encoded bytes in this one process; the start-up is left out."""
    import crc32c

    checksum = count = 0
    for data, label in module.read(request["store"], peer.variant):
        checksum = checksum + crc32c.crc32c(data) + label & 0xFFFFFFFF  # in any order the same
        count += 1
    wall_s, timed = 0.0, 0
    while wall_s < request["seconds"]:
        samples = iter(module.read(request["store"], peer.variant))
        next(samples)
        begin = time.perf_counter()
        timed += sum(1 for _ in samples)
        wall_s += time.perf_counter() - begin
    return {"us_per_sample": 1e6 * wall_s / timed, "samples": count, "checksum": checksum}


if __name__ == "__main__":
    main()
