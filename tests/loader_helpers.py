"""Small packed datasets, and ways to compare what loaders give."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from packer.pack import PackOptions, pack
from packer.plan import PlanOptions
from packer.sources.folder import FolderSource


def jpeg(number: int, size: tuple[int, int] = (48, 40)) -> bytes:
    """A smooth picture (width, height) that no other number gives."""
    width, height = size
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    out = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(out, "jpeg", quality=90)
    return out.getvalue()


SIZES = ((48, 40), (40, 56), (64, 48))


def write_tree(
    root: Path, *, samples: int = 40, classes: int = 3, sizes: Sequence[tuple[int, int]] = SIZES, sidecars: bool = False
) -> Path:
    """An ImageFolder `root/c0/p000.jpg` …; with sidecars, a .json, .txt and .npy beside each picture."""
    for i in range(samples):
        folder = root / f"c{i % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"p{i:03d}.jpg").write_bytes(jpeg(i, sizes[i % len(sizes)]))
        if sidecars:
            (folder / f"p{i:03d}.json").write_text(json.dumps({"number": i}))
            (folder / f"p{i:03d}.txt").write_text(f"picture {i}")
            np.save(folder / f"p{i:03d}.npy", np.arange(i % 4 + 1, dtype=np.float32))
    return root


def pack_tree(source: Path, out: Path, *, shard_samples: int | None = 12, shuffle: bool = True) -> Path:
    """Pack a folder, some samples to a shard."""
    plan = PlanOptions(shard_samples=shard_samples, shuffle=shuffle)
    pack(FolderSource(os.fspath(source)), out, PackOptions(plan=plan, workers=1))
    return out


def packed_splits(root: Path, *, train: int, val: int) -> Path:
    """A packed dataset of two splits, with so many samples each."""
    write_tree(root / "src" / "train", samples=train)
    write_tree(root / "src" / "val", samples=val)
    return pack_tree(root / "src", root / "out")


def flat(batches: Iterable[Any]) -> list[Any]:
    """Batches as nested plain values, to be compared with ==."""
    return [_plain(batch) for batch in batches]


def _digest(array: np.ndarray) -> str:
    """Short, so that pytest can print how two lists of batches differ."""
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), _digest(value.reshape(-1).contiguous().view(torch.uint8).numpy())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, _digest(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
