"""The part of scripts/quickstart that runs inside the environment: pack, stream, compare."""

from __future__ import annotations

import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from loaders.transforms import TrainCrop
from loaders.webds_loader import make_loader
from packer.manifest import FILE as MANIFEST
from packer.packed import Packed, PackedSplit

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "scripts" / "sample-pictures"
SAMPLES_OUT = ROOT / "out" / "quickstart"
PICTURES = ("jpg", "png", "webp", "bmp", "tiff", "tif", "gif")

CROP = 224
BATCH = 64
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORKERS = min(8, CORES)
WARM_UP_S = 1.0
MEASURE_S = 3.0


def main() -> int:
    """Pack the folder named on the command line, or the sample pictures, and stream the result."""
    if len(sys.argv) > 1:
        source, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
        out = output_for(source)
    else:
        source, options, out = SAMPLES, [], SAMPLES_OUT
        shutil.rmtree(out, ignore_errors=True)  # this script's own folder; may be an older version's work
        out.parent.mkdir(exist_ok=True)

    heading(f"1. Pack {shown(source)} into {shown(out)}")
    status = pack(source, out, options)
    if status or not (out / MANIFEST).exists():  # failed, or --dry-run
        return status
    heading("2. Stream it")
    stream(source, out)
    heading("3. Next")
    next_steps(out)
    return 0


def output_for(source: Path) -> Path:
    """Beside the source; in a new temporary folder where nothing can be written beside it."""
    beside = source.with_name(source.name + "-packed")
    if os.access(beside if beside.exists() else source.parent, os.W_OK):
        return beside
    return Path(tempfile.mkdtemp(prefix=f"{source.name}-packed-"))


def pack(source: Path, out: Path, options: list[str]) -> int:
    """Run the command as a user would; gives its exit status."""
    arguments = ["shard", shown(source), shown(out), *options]
    print("$", shlex.join(["packer", *arguments]), flush=True)
    return subprocess.run([sys.executable, "-m", "packer", *arguments], check=False).returncode


def stream(source: Path, out: Path) -> None:
    """Show the first batch, then measure, and the same pictures from the loose files beside it."""
    dataset = Packed(out)
    name = "train" if "train" in dataset else next(iter(dataset))
    split = dataset[name]
    picture = next((field for field in split.fields if field in PICTURES), None)
    if picture is None:
        print(f"No pictures among the fields ({', '.join(split.fields)}): nothing to crop and compare.")
        return

    batch_size = min(BATCH, len(split))
    started = time.perf_counter()
    loader = make_loader(
        out, split=name, batch_size=batch_size, transform=TrainCrop(CROP), num_workers=WORKERS, shuffle=True
    )
    images, labels = next(iter(loader))
    print(
        f"First batch after {time.perf_counter() - started:.2f} s: "
        f"images {kind(images)}, labels {kind(labels)}{class_names(dataset, labels)}."
    )

    packed = images_per_s(images for images, _ in chain.from_iterable(repeat(loader)))
    print(f"{packed:8,.0f} images/s  from the shards, by loaders.webds_loader.make_loader")
    folder = FolderCrops(source, split, picture)
    if not folder.exists():  # the source was itself a packed dataset
        return
    with_torch = DataLoader(folder, batch_size, sampler=forever(len(folder)), num_workers=WORKERS)
    loose = images_per_s(with_torch)
    print(
        f"{loose:8,.0f} images/s  from the loose files, by torch's DataLoader with Pillow\n"
        f"Both: random crops to {CROP}×{CROP}, uint8, batches of {batch_size}, {WORKERS} workers, over and "
        f"over the {len(split):,} pictures of split\n"
        f"{name!r} for {MEASURE_S:.0f} s after {WARM_UP_S:.0f} s of warm-up. "
        "The files were read a moment ago and come from memory, so this\n"
        "compares the work per picture, not the disk."
    )


class FolderCrops(Dataset[torch.Tensor]):
    """The pictures of a split from their loose files, cropped as most training scripts do it."""

    def __init__(self, source: Path, split: PackedSplit, field: str) -> None:
        self.source = os.fsencode(source)
        self.paths = [path for path in split.names.paths[split.fields.index(field)] if path]

    def __len__(self) -> int:
        return len(self.paths)

    def exists(self) -> bool:
        """Whether the first picture is there as a file."""
        return bool(self.paths) and os.path.exists(os.path.join(self.source, self.paths[0]))

    def __getitem__(self, i: int) -> torch.Tensor:
        """Sample i as uint8 (3, CROP, CROP)."""
        with Image.open(os.path.join(self.source, self.paths[i])) as image:
            box = crop_box(*image.size)
            crop = image.convert("RGB").resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous()


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """A random box of 8–100 % of the area and a ratio of 3:4–4:3: torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = random.uniform(0.08, 1) * width * height
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def forever(samples: int) -> Iterator[int]:
    """One random permutation after the other, so that starting workers is no part of the measurement."""
    while True:
        yield from random.sample(range(samples), samples)


def images_per_s(batches: Iterable[torch.Tensor]) -> float:
    """Images per second after the warm-up."""
    batches = iter(batches)
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_S:
        next(batches)
    started, images = time.perf_counter(), 0
    while time.perf_counter() - started < MEASURE_S:
        images += len(next(batches))
    return images / (time.perf_counter() - started)


def class_names(dataset: Packed, labels: torch.Tensor) -> str:
    """The first labels in words, if the dataset has classes."""
    classes = dataset.manifest.classes
    names = [classes[i] for i in islice(labels.tolist(), 4) if i >= 0] if classes else []
    return f" ({', '.join(names)}, …)" if names else ""


def kind(tensor: torch.Tensor) -> str:
    """Type and shape, as in `uint8 (64, 3, 224, 224)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def shown(path: Path) -> str:
    """The path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def heading(text: str) -> None:
    """A line that stands out."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def next_steps(out: Path) -> None:
    """What to type now."""
    where = shlex.quote(shown(out))
    commands = {
        f"source {shlex.quote(shown(ROOT / '.venv' / 'bin' / 'activate'))}": "",
        f"packer info {where}": "what is in it",
        f"packer verify {where}": "every byte checked",
        f"packer view {where}": "a page of its pictures",
        "packer --help": "everything else",
    }
    width = max(map(len, commands))
    for command, what in commands.items():
        print(f"    {command:{width}}  {what}".rstrip())
    print(
        f"\n"
        f"In a training script:\n"
        f"    from loaders.transforms import TrainCrop\n"
        f"    from loaders.webds_loader import make_loader\n"
        f"    loader = make_loader({shown(out)!r}, batch_size=64, transform=TrainCrop({CROP}))\n"
        f"    for images, labels in loader: ..."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
