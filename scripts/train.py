#!/usr/bin/env python3
"""Train a small ResNet on a packed folder: a complete training script, to read and to start from.

    scripts/train.py out/ --epochs 3 --batch-size 64 --size 64
    scripts/train.py out/ --checkpoint last.pt             # the same command again goes on where it was stopped
    torchrun --nproc-per-node 4 scripts/train.py out/      # on four GPUs, or with --device cpu on four processes

What it shows of the loader: batches arrive on the device, normalised, in the dtype and memory format that the
network eats; every rank has the same number of training batches; evaluation sees each picture exactly once,
over all ranks; `state_dict` lies in the checkpoint, so a run that was killed within an epoch goes on with the
very next batch and ends with the same weights.

The last figure of each line is the one to watch: the share of the time spent waiting for data. Near 0 %, the
device is what limits training; near 100 %, the loader is, and `--workers`, smaller pictures
(`packer shard --resize`) or seekable JPEGs (`packer shard --seekable-jpeg`) help.

The same seed gives the same order, crops and initial weights anywhere, and on the same CPU the same weights in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from loaders.loader import Loader
from loaders.transforms import EvalCrop, TrainCrop
from loaders.webds_loader import make_loader
from packer.errors import PackerError
from packer.packed import Packed

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "off": torch.float32}
WARM_UP = 0.05  # share of the training in which the learning rate rises


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; gives the exit status."""
    args = parse(arguments)
    try:
        with placed(args.device) as place:
            train(args, place)
    except PackerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a packed folder with classes; the split 'val' is evaluated if there is one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="pictures per batch and process")
    parser.add_argument("--size", type=int, default=64, help="height and width of the crops, pixels")
    parser.add_argument("--width", type=int, default=64, help="channels of the network's first stage")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--amp", choices=tuple(DTYPES), help="default: float16 on cuda, bfloat16 on cpu")
    parser.add_argument("--workers", type=int, help="loader threads per process; default: one per CPU")
    parser.add_argument("--checkpoint", help="written here at every epoch's end, and resumed from if it is there")
    parser.add_argument("--save-every", type=int, default=500, metavar="N", help="also save after every N batches")
    parser.add_argument("--log-every", type=int, default=50, metavar="N", help="a line of progress every N batches")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device

    def say(self, line: str) -> None:
        """Print once, however many processes there are."""
        if self.rank == 0:
            print(line, flush=True)

    def total(self, *values: float) -> list[float]:
        """Each value's sum over all processes."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(sums)
        return cast("list[float]", sums.tolist())


@contextlib.contextmanager
def placed(device: str | None) -> Iterator[Place]:
    """This process's place; joins the others if torchrun started it."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_torchelastic_launched():
        yield Place(0, 1, torch.device(name))
        return
    if name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    dist.init_process_group("gloo" if name == "cpu" else "nccl")
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), torch.device(name))
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- training


def train(args: argparse.Namespace, place: Place) -> None:
    """All epochs, from the checkpoint on if there is one."""
    amp = DTYPES[args.amp or ("bfloat16" if place.device.type == "cpu" else "float16")]
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "seed": args.seed,
        "num_workers": "auto" if args.workers is None else args.workers,
        "device": place.device,
        "dtype": amp,
        "channels_last": True,
    }
    # The rank need not be said: the loader asks torch.distributed.
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(
            make_loader(args.folder, split="train", transform=TrainCrop(args.size), drop_last=True, **options)
        )
        validation = None
        if "val" in Packed(args.folder):
            validation = stack.enter_context(
                make_loader(args.folder, split="val", transform=EvalCrop(args.size), **options)
            )
        training = Training(args, loader, place, amp)
        if args.checkpoint and os.path.exists(args.checkpoint):
            training.load(args.checkpoint)
            place.say(f"{args.checkpoint}: on from epoch {loader.epoch + 1} after {training.seen:,} pictures in all")
        for epoch in range(loader.epoch, args.epochs):
            report = f"epoch {epoch + 1}/{args.epochs}: {training.epoch(f'epoch {epoch + 1}')}"
            if validation is not None:
                report += f"; {training.evaluate(validation)}"
            place.say(report)
            training.save()


class Training:
    """Network, optimiser and loader: what one training step needs, and what a checkpoint holds.

    Args:
        args: the command line.
        loader: gives the training batches.
        place: this process among the others.
        amp: what the network computes in; float32 for all in full.
    """

    def __init__(self, args: argparse.Namespace, loader: Loader, place: Place, amp: torch.dtype) -> None:
        if not loader.classes:
            raise PackerError(f"{args.folder} has no classes to learn; pack a folder with one folder per class")
        if len(loader) == 0:
            step = args.batch_size * place.world_size
            raise PackerError(f"the split 'train' has no {step} pictures, one batch for all; lower --batch-size")
        self.args, self.loader, self.place, self.amp = args, loader, place, amp
        torch.manual_seed(args.seed)
        self.network = ResNet(len(loader.classes), args.width).to(place.device)
        self.network = self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model: nn.Module = self.network
        if place.world_size > 1:
            self.model = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)
        # float16 has too small a range for gradients as they are; bfloat16 has float32's.
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=amp == torch.float16)
        self.seen = 0  # pictures that all processes have trained on

    def autocast(self) -> torch.autocast:
        """The context in which the network computes in `amp`."""
        return torch.autocast(self.place.device.type, self.amp, enabled=self.amp != torch.float32)

    def epoch(self, name: str) -> str:
        """Train one epoch, or what is left of it; gives a line that says how it went."""
        args, meter = self.args, Meter()
        self.model.train()
        batches = len(self.loader)
        consumed = cast("int", self.loader.state_dict()["consumed"])  # of this epoch, if it is resumed
        before = consumed // (args.batch_size * self.place.world_size)
        for done, (images, labels) in enumerate(meter.timed(self.loader), before + 1):
            meter.count(len(labels), self.step(images, labels))
            if done % args.log_every == 0:
                self.place.say(f"{name}, batch {done}/{batches}: {meter}")
            # The last batch's checkpoint comes after the evaluation: resumed before it, none would be made.
            if done % args.save_every == 0 and done < batches:
                self.save()
        return str(meter.over(self.place))

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Learn from one batch: (B, 3, size, size) `amp`, (B,) int64; gives the loss."""
        self.seen += len(labels) * self.place.world_size
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * self.schedule()
        with self.autocast():
            loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # item() waits for the device, so that what it still computes does not pass for waiting for data.
        return loss.detach().item()

    def schedule(self) -> float:
        """The learning rate's share of its highest: a short linear rise, then half a cosine down to 0."""
        step = self.args.batch_size * self.place.world_size
        progress: float = min(1.0, self.seen / (self.args.epochs * len(self.loader) * step))
        return min(progress / WARM_UP, (1 + math.cos(math.pi * progress)) / 2)

    @torch.inference_mode()
    def evaluate(self, loader: Loader) -> str:
        """Loss and accuracy over a whole split, each picture once; gives a line that says so."""
        loss = correct = count = 0.0
        self.network.eval()
        if self.place.world_size > 1:
            for buffer in self.network.buffers():  # each process has means and variances of its own batches
                dist.broadcast(buffer, 0)
        for images, labels in loader:
            # Not through DistributedDataParallel: it would wait for ranks that have a batch less.
            with self.autocast():
                scores = self.network(images).float()
            loss += functional.cross_entropy(scores, labels, reduction="sum").item()
            correct += (scores.argmax(1) == labels).sum().item()
            count += len(labels)
        loss, correct, count = self.place.total(loss, correct, count)
        return f"val: loss {loss / count:.4f}, {correct / count:.1%} right of {count:,.0f} pictures"

    def save(self) -> None:
        """Write the checkpoint, if asked for. A file under its name is always a complete one."""
        if not self.args.checkpoint or self.place.rank:
            return
        state = {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "loader": self.loader.state_dict(),
            "seen": self.seen,
        }
        partial = self.args.checkpoint + ".partial"
        with open(partial, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, self.args.checkpoint)

    def load(self, path: str) -> None:
        """Go on from a checkpoint, on any number of processes. The network draws nothing at random any more."""
        state = torch.load(path, map_location=self.place.device, weights_only=True)
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.loader.load_state_dict(state["loader"])
        self.seen = state["seen"]


@dataclass
class Meter:
    """Counts pictures and seconds, and how many of these passed waiting for data.

    Attributes:
        images: pictures trained on.
        loss: sum of their losses.
        waited_s: seconds in `next()` of the loader; the start of an epoch and its first batch count.
        elapsed_s: seconds from the start of the epoch to the end of the last step.
        began_s: when the epoch started, on `time.perf_counter`.
    """

    images: int = 0
    loss: float = 0.0
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    began_s: float = field(default_factory=time.perf_counter)

    def timed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches; what passes until each is there counts as waiting."""
        asked_s = self.began_s
        for batch in loader:
            self.waited_s += time.perf_counter() - asked_s
            yield batch
            asked_s = time.perf_counter()
        self.elapsed_s = time.perf_counter() - self.began_s

    def count(self, images: int, loss: float) -> None:
        """One more batch is done; `loss` is its mean."""
        self.images += images
        self.loss += loss * images
        self.elapsed_s = time.perf_counter() - self.began_s

    def over(self, place: Place) -> Meter:
        """All processes' counts together; their seconds are averages."""
        images, loss, waited_s, elapsed_s = place.total(self.images, self.loss, self.waited_s, self.elapsed_s)
        return Meter(int(images), loss, waited_s / place.world_size, elapsed_s / place.world_size)

    def __str__(self) -> str:
        return (
            f"loss {self.loss / max(self.images, 1):.4f}, {self.images / self.elapsed_s:,.0f} images/s, "
            f"{self.waited_s / self.elapsed_s:.1%} of the time waiting for data"
        )


# ---------------------------------------------------------------- the network


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.norm2.weight)  # each block begins as its shortcut
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, channels_in, H, W) → (B, channels, H / stride, W / stride)."""
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-18 (He et al., CVPR 2016), but a 3×3 stem of stride 2: made for pictures of 32 to 224 pixels.

    Args:
        classes: how many to tell apart.
        width: channels of the first stage; each further one has twice as many.
    """

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                layers.append(Block(channels, width << stage, stride))
                channels = width << stage
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) → scores (B, classes)."""
        return cast("torch.Tensor", self.head(self.features(images).mean((2, 3))))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
