"""Statistics of a packed dataset: classes, picture sizes, formats, bytes, the channels' means and deviations.

Counts, sizes and bytes come from the index. Formats and channels come from decoding every picture
(or a random part): its RGB pixels as stored, uint8, divided by 255. Mean and standard deviation are
taken over all pixels of all pictures together, so a large picture counts for more than a small one:

    mean = Σ x / n        std = sqrt(Σ x² / n − mean²)

Both follow from exact integer counts of the 256 values, so no rounding adds up. What is said of CT slices and volumes
is in `packer.ct_stats`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.ct_samples import array_field, has_array, voxels
from packer.ct_stats import CtStats, HuCounts, ct_stats
from packer.engines import Report, local_engine, no_report
from packer.errors import BadImageError
from packer.index import Rows
from packer.packed import Packed, PackedSplit
from packer.pictures import decode_rgb, picture_fields
from packer.spread import Spread, spread
from packer.strings import Int64s

#: Pictures a task; some seconds of decoding.
_AT_ONCE = 512
_VOLUMES_AT_ONCE = 4
_REPORT_EVERY = 16
_KEPT = 100  # undecodable pictures that are named, of one split


@dataclass(frozen=True)
class Sizes:
    """Picture sizes as stored, in pixels.

    Attributes:
        known: pictures whose size is known.
        width, height, short_side: their spreads.
        common: the most frequent (width, height, count), at most five.
    """

    known: int
    width: Spread
    height: Spread
    short_side: Spread
    common: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ClassCount:
    """How many samples a class has."""

    label: int
    name: str
    count: int


@dataclass(frozen=True)
class FieldStats:
    """How many samples have a field, and the bytes it takes."""

    count: int
    bytes: int
    spread: Spread


@dataclass(frozen=True)
class Channels:
    """What decoding showed.

    Attributes:
        pictures: how many were decoded.
        pixels: how many they have together.
        mean, std: of red, green, blue in [0, 1] (see the module's text); None without a pixel.
        formats: pictures by format of content (not by name).
        modes: pictures by Pillow's name of the stored pixels: `RGB`, `L`, `CMYK` …
        undecodable: `(sample number, reason)` of the first that do not decode.
        failed: how many do not decode.
    """

    pictures: int
    pixels: int
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None
    formats: dict[str, int]
    modes: dict[str, int]
    undecodable: tuple[tuple[int, str], ...]
    failed: int


@dataclass(frozen=True)
class SplitStats:
    """Statistics of one split.

    Attributes:
        samples: how many.
        unlabelled: those without a label.
        classes: one entry a class, in label order; empty classes included.
        fields: by name.
        sizes: None where no picture's size is known.
        channels: from decoding `channels.pictures` of the pictures.
        pictures: samples that have one.
        ct: of CT slices or volumes; None where there are none.
    """

    samples: int
    unlabelled: int
    classes: tuple[ClassCount, ...]
    fields: dict[str, FieldStats]
    sizes: Sizes | None
    pictures: int
    channels: Channels
    ct: CtStats | None = None


def stats(
    folder: str | os.PathLike[str],
    *,
    split: str | None = None,
    sample: int | None = None,
    workers: int | None = None,
    progress: Report | None = None,
) -> dict[str, SplitStats]:
    """Statistics of every split.

    Args:
        folder: a packed dataset.
        split: only this split.
        sample: decode only so many pictures (slices, volumes) of a split, chosen at random (always the same).
        workers: processes; None takes one per CPU that may be used.
        progress: called with (pictures, bytes) done since the last call.

    Raises:
        ManifestError: no packed dataset.
        UsageError: no such split.
        ShardError: a shard is truncated or damaged.

    >>> stats("out/", split="train", sample=2000)["train"].channels.mean     # doctest: +SKIP
    (0.4803, 0.4569, 0.4081)
    """
    dataset = Packed(folder)
    splits = dataset.only(split)
    chosen = {name: _choose(packed, sample) for name, packed in splits.items()}
    sums = {name: _Sums() for name in splits}
    at_once = _VOLUMES_AT_ONCE if any(field.startswith("vol.") for field in dataset.manifest.fields) else _AT_ONCE
    tasks = [
        _Task(name, splits[name], samples[i : i + at_once])
        for name, samples in chosen.items()
        for i in range(0, len(samples), at_once)
    ]
    for name, found in local_engine(workers, len(tasks)).run(_decode, tasks, progress or no_report):
        sums[name].add(found)
    return {name: _split_stats(packed, dataset.manifest.classes, sums[name]) for name, packed in splits.items()}


# ---------------------------------------------------------------- from the index


def _split_stats(packed: PackedSplit, classes: Sequence[str] | None, sums: _Sums) -> SplitStats:
    rows = packed.rows
    labels, counts = np.unique(rows["label"], return_counts=True)
    by_label = dict(zip(labels.tolist(), counts.tolist(), strict=True))
    fields = {}
    for name in packed.fields:
        lengths = rows[f"{name}:length"]
        lengths = lengths[lengths >= 0]
        if len(lengths):
            fields[name] = FieldStats(len(lengths), int(lengths.sum()), spread(lengths))
    return SplitStats(
        samples=len(rows),
        unlabelled=by_label.pop(-1, 0),
        classes=tuple(
            ClassCount(label, _class_name(label, classes), by_label.get(label, 0))
            for label in sorted({*by_label, *range(len(classes or ()))})
        ),
        fields=fields,
        sizes=_sizes(rows, sums.sizes),
        pictures=int(np.count_nonzero(has_picture(packed))),
        channels=sums.channels(),
        ct=ct_stats(packed, sums.hu),
    )


def _class_name(label: int, classes: Sequence[str] | None) -> str:
    return classes[label] if classes is not None and 0 <= label < len(classes) else str(label)


def has_picture(packed: PackedSplit) -> npt.NDArray[np.bool_]:
    """Which samples have a picture, (n,)."""
    found = np.zeros(len(packed.rows), bool)  # opening the index compares its length with the manifest
    for name in picture_fields(packed.fields):
        found |= packed.rows[f"{name}:length"] >= 0
    return found


def _sizes(rows: Rows, decoded: dict[int, tuple[int, int]]) -> Sizes | None:
    """Sizes by the index, and by decoding where the index has none."""
    height, width = rows["height"].astype(np.int64), rows["width"].astype(np.int64)
    for sample, size in decoded.items():
        height[sample], width[sample] = size
    known = (height > 0) & (width > 0)
    if not known.any():
        return None
    height, width = height[known], width[known]
    pairs, counts = np.unique(height << 32 | width, return_counts=True)
    first = np.argsort(-counts, kind="stable")[:5]
    common = tuple(
        (pair & 0xFFFFFFFF, pair >> 32, count)
        for pair, count in zip(pairs[first].tolist(), counts[first].tolist(), strict=True)
    )
    return Sizes(int(known.sum()), spread(width), spread(height), spread(np.minimum(height, width)), common)


# ---------------------------------------------------------------- from the pixels


def _choose(packed: PackedSplit, sample: int | None) -> Int64s:
    """Numbers of the samples to decode, ascending, so that the shards are read front to back."""
    samples = np.flatnonzero(has_picture(packed) | has_array(packed))
    if sample is not None and sample < len(samples):
        samples = np.sort(np.random.default_rng(0).choice(samples, sample, replace=False))
    return samples


@dataclass(frozen=True, eq=False)
class _Task:
    name: str
    packed: PackedSplit
    samples: Int64s


class _Sums:
    """What was found in pictures so far. Adding up is exact, so the order of tasks makes no difference."""

    def __init__(self) -> None:
        self.values = np.zeros((3, 256), np.uint64)  # how often each value occurs in each channel
        self.formats: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.failures: list[tuple[int, str]] = []
        self.failed = 0
        self.sizes: dict[int, tuple[int, int]] = {}  # (height, width), only where the index has none
        self.hu: HuCounts | None = None  # a large table, which pictures do without

    def fail(self, sample: int, reason: str) -> None:
        """Note a picture that does not decode."""
        self.failed += 1
        self.failures = sorted([*self.failures, (sample, reason)])[:_KEPT]

    def add(self, other: _Sums) -> None:
        """Add another task's finds."""
        self.values += other.values
        self.formats.update(other.formats)
        self.modes.update(other.modes)
        self.failed += other.failed
        self.failures = sorted([*self.failures, *other.failures])[:_KEPT]
        self.sizes |= other.sizes
        if self.hu is None:
            self.hu = other.hu
        elif other.hu is not None:
            self.hu.add(other.hu)

    def channels(self) -> Channels:
        """Mean and standard deviation by exact integers."""
        counts: list[list[int]] = self.values.tolist()
        pixels = sum(counts[0])
        first = [sum(v * n for v, n in enumerate(channel)) for channel in counts]
        second = [sum(v * v * n for v, n in enumerate(channel)) for channel in counts]
        mean = std = None
        if pixels:
            red, green, blue = (s / pixels / 255 for s in first)
            mean = (red, green, blue)
            red, green, blue = (
                math.sqrt(pixels * ss - s * s) / pixels / 255 for s, ss in zip(first, second, strict=True)
            )
            std = (red, green, blue)
        return Channels(
            pictures=sum(self.modes.values()),
            pixels=pixels,
            mean=mean,
            std=std,
            formats=dict(self.formats.most_common()),
            modes=dict(self.modes.most_common()),
            undecodable=tuple(self.failures),
            failed=self.failed,
        )


def _decode(task: _Task, report: Report) -> tuple[str, _Sums]:
    """Decode some pictures and slices and count their values."""
    sums, packed = _Sums(), task.packed
    fields = picture_fields(packed.fields)
    done = size = 0
    for sample in task.samples.tolist():
        row = packed.rows[sample]
        picture = next((name for name in fields if row[f"{name}:length"] >= 0), None)
        array = array_field(packed, sample)
        if picture is not None:
            _count_picture(sums, packed, sample, picture)
        if array is not None:
            _count_array(sums, packed, sample, array)
        done, size = done + 1, size + sum(int(row[f"{name}:length"]) for name in (picture, array) if name is not None)
        if done == _REPORT_EVERY:
            report(done, size)
            done = size = 0
    report(done, size)
    packed.close()
    return task.name, sums


def _count_picture(sums: _Sums, packed: PackedSplit, sample: int, field: str) -> None:
    try:
        picture = decode_rgb(packed.read(sample, field, check=True) or b"")
    except BadImageError as error:
        sums.fail(sample, str(error))
        return
    sums.values += np.array(picture.rgb.histogram(), np.uint64).reshape(3, 256)
    sums.formats[picture.format] += 1
    sums.modes[picture.mode] += 1
    if packed.rows[sample]["height"] < 0:
        sums.sizes[sample] = (picture.rgb.height, picture.rgb.width)


def _count_array(sums: _Sums, packed: PackedSplit, sample: int, field: str) -> None:
    sums.hu = sums.hu or HuCounts()
    try:
        array = voxels(packed, sample, field)
    except BadImageError as error:
        sums.hu.fail(sample, str(error))
        return
    sums.hu.count(array)
    if packed.rows[sample]["height"] < 0:
        sums.sizes[sample] = (array.shape[1], array.shape[2])
