"""NVIDIA DALI's CPU pipeline, reading the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from peers.base import CROP_RATIO, CROP_SCALE, MEAN, STD, Task


@pipeline_def
def _pipeline(store: str, task: Task) -> tuple[Any, Any]:
    encoded, label = fn.readers.file(file_root=store, random_shuffle=True, initial_fill=1000, name="files")
    if task.crop:
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=list(CROP_SCALE),
            random_aspect_ratio=list(CROP_RATIO),
            num_attempts=10,
        )
        images = fn.resize(
            images, resize_x=task.side, resize_y=task.side, interp_type=types.INTERP_LINEAR, antialias=True
        )
    else:
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    images = fn.crop_mirror_normalize(
        images,
        output_layout="CHW",
        mirror=fn.random.coin_flip() if task.crop else 0,
        dtype=types.FLOAT if task.normalized else types.UINT8,
        mean=[255 * m for m in MEAN] if task.normalized else [0.0],
        std=[255 * s for s in STD] if task.normalized else [1.0],
    )
    return images, fn.cast(label, dtype=types.INT64)


def load(store: str, task: Task, variant: str) -> Iterable[object]:
    """Its reader shuffles within a buffer of a thousand samples; threads share a batch."""
    del variant
    pipeline = _pipeline(store, task, batch_size=task.batch_size, num_threads=task.workers, device_id=None, seed=1)
    return _Tuples(
        DALIGenericIterator(
            pipeline,
            ["images", "labels"],
            reader_name="files",
            auto_reset=True,
            last_batch_policy=LastBatchPolicy.PARTIAL,
        )
    )


class _Tuples:
    """Batches as (images, labels), labels (B,)."""

    def __init__(self, batches: Iterable[list[dict[str, Any]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch["images"], batch["labels"][:, 0]) for [batch] in self.batches)
