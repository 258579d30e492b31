"""Statistics of a packed dataset: classes, picture sizes, formats, bytes, the channels' means and deviations.

Counts, sizes and bytes come from the index. Formats and channels come from decoding every picture
(or a random part): its RGB pixels as stored, uint8, divided by 255. Mean and standard deviation are
taken over all pixels of all pictures together, so a large picture counts for more than a small one:

    mean = Σ x / n        std = sqrt(Σ x² / n − mean²)

Both follow from exact integer counts of the 256 values, so no rounding adds up.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.engines import Report, local_engine, no_report
from packer.errors import BadImageError
from packer.index import Rows
from packer.packed import Packed, PackedSplit
from packer.pictures import decode_rgb, picture_fields
from packer.strings import Int64s

#: Pictures a task; some seconds of decoding.
_AT_ONCE = 512
_REPORT_EVERY = 16
_BINS = 16
_KEPT = 100  # undecodable pictures that are named, of one split


@dataclass(frozen=True)
class Bin:
    """So many values lie in low ≤ value < high."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Spread:
    """How values are spread.

    Attributes:
        min, median, max: the median is the lower of the two middle values.
        bins: consecutive, of round limits.
    """

    min: int
    median: int
    max: int
    bins: tuple[Bin, ...]


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
    """

    samples: int
    unlabelled: int
    classes: tuple[ClassCount, ...]
    fields: dict[str, FieldStats]
    sizes: Sizes | None
    pictures: int
    channels: Channels


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
        sample: decode only so many pictures of a split, chosen at random (always the same).
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
    tasks = [
        _Task(name, splits[name], samples[i : i + _AT_ONCE])
        for name, samples in chosen.items()
        for i in range(0, len(samples), _AT_ONCE)
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


def spread(values: npt.NDArray[np.signedinteger]) -> Spread:
    """Minimum, median, maximum, and a histogram of at most 18 bins; values (n,) ≥ 0, n ≥ 1.

    >>> spread(np.array([3, 3, 4])).bins
    (Bin(low=3, high=4, count=2), Bin(low=4, high=5, count=1))
    """
    values = np.sort(values.astype(np.int64))
    low, median, high = int(values[0]), int(values[(len(values) - 1) // 2]), int(values[-1])
    edges = _edges(values)
    counts = np.diff(np.searchsorted(values, edges)).tolist()
    bins = tuple(Bin(a, b, n) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True))
    return Spread(low, median, high, bins)


def _edges(values: Int64s) -> list[int]:
    """Round limits that show the bulk well: steps of 1, 2 or 5 × 10ᵏ between the 1st and the 99th hundredth.

    What lies beyond goes into one wide bin on each side.
    """
    low, high = int(values[len(values) // 100]), int(values[-1 - len(values) // 100])
    step = next(s for s in _round_steps() if (high // s - low // s) < _BINS)
    edges = list(range(low // step * step, high + step + 1, step))
    edges = [edge for edge in edges if edge - step <= high]
    if values[0] < edges[0]:
        edges.insert(0, int(values[0]))
    if values[-1] >= edges[-1]:
        edges.append(int(values[-1]) + 1)
    return edges


def _round_steps() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


# ---------------------------------------------------------------- from the pixels


def _choose(packed: PackedSplit, sample: int | None) -> Int64s:
    """Numbers of the samples to decode, ascending, so that the shards are read front to back."""
    samples = np.flatnonzero(has_picture(packed))
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
    """Decode some pictures and count their values."""
    sums, packed = _Sums(), task.packed
    fields = picture_fields(packed.fields)
    done = size = 0
    for sample in task.samples.tolist():
        row = packed.rows[sample]
        field = next(name for name in fields if row[f"{name}:length"] >= 0)
        data = packed.read(sample, field, check=True) or b""
        try:
            picture = decode_rgb(data)
        except BadImageError as error:
            sums.fail(sample, str(error))
        else:
            sums.values += np.array(picture.rgb.histogram(), np.uint64).reshape(3, 256)
            sums.formats[picture.format] += 1
            sums.modes[picture.mode] += 1
            if row["height"] < 0:
                sums.sizes[sample] = (picture.rgb.height, picture.rgb.width)
        done, size = done + 1, size + len(data)
        if done == _REPORT_EVERY:
            report(done, size)
            done = size = 0
    report(done, size)
    packed.close()
    return task.name, sums
