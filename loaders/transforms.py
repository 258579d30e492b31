"""Transforms that work from the encoded bytes, so that what is cropped away is never decoded.

`TrainCrop`, `EvalCrop`, `Resize` and `Identity` are for pictures; `Window` and `Slab` for CT (`loaders.arrays`).

A transform is a frozen dataclass: picklable, comparable, and a pure function of the bytes and the random
generator it is given. The loader seeds one generator a sample (`sample_rng`), so a sample gets the same
crop in an epoch whoever decodes it, on every platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from loaders.arrays import CenterCrop, RandomCrop, Slab, Window
from loaders.decode import Affine, Buffer, Picture
from loaders.foreign import adapt
from loaders.geometry import Crop, apply_to_boxes, apply_to_mask
from packer.errors import UsageError

__all__ = ["CenterCrop", "Crop", "EvalCrop", "Identity", "RandomCrop", "Resize", "SampleRng", "Slab", "TrainCrop",
           "Transform", "Window", "adapt", "apply_to_boxes", "apply_to_mask", "sample_rng"]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


class SampleRng:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) with the methods of `random.Random` that crops need.

    Seeding costs 1 µs where `random.Random` takes 6.

    >>> SampleRng(7).random() == SampleRng(7).random()
    True
    """

    __slots__ = ("_state",)

    def __init__(self, state: int) -> None:
        self._state = state & _WORD

    def getrandbits(self, bits: int) -> int:
        """An integer of 1 to 64 random bits."""
        self._state = self._state + _GOLDEN & _WORD
        return _mix(self._state) >> 64 - bits

    def random(self) -> float:
        """Uniform in [0, 1), 53 bits."""
        self._state = word = self._state + _GOLDEN & _WORD
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
        return ((word ^ word >> 31) >> 11) * 2.0**-53

    def uniform(self, low: float, high: float) -> float:
        """Uniform between the two."""
        return low + (high - low) * self.random()

    def randrange(self, stop: int) -> int:
        """Uniform in 0 … stop − 1, for stop far below 2⁵³."""
        return int(self.random() * stop)

    def randint(self, low: int, high: int) -> int:
        """Uniform in low … high, both included."""
        return low + self.randrange(high - low + 1)


def sample_rng(seed: int, epoch: int, sample: int) -> SampleRng:
    """The generator of one sample in one epoch: a function of these three numbers alone."""
    return SampleRng(_mix(_mix(_mix(seed & _WORD) + epoch & _WORD) + sample & _WORD))


class Transform(Protocol):
    """What the loader needs of a transform of ours; anything else goes through `adapt`."""

    @property
    def orient(self) -> bool:
        """Whether pictures are turned as their EXIF orientation says."""

    @property
    def output_shape(self) -> tuple[int, int, int] | None:
        """(3, height, width), or None where each picture keeps its own size."""

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:
        """The crop for a picture of this (with `orient`, upright) size in pixels."""

    def into(
        self, data: Buffer, out: torch.Tensor, rng: SampleRng, *, normalize: Affine | None = None
    ) -> Crop:
        """Decode into `out` (3, h, w); return the crop, which the sample's masks and boxes follow."""

    def __call__(self, data: Buffer, rng: SampleRng) -> torch.Tensor:
        """The transformed picture as a new uint8 tensor (3, h, w)."""


class _Cropping:
    """What follows from a `box` and an `output_shape`."""

    __slots__ = ()

    orient: bool

    @property
    def output_shape(self) -> tuple[int, int, int] | None:
        """(3, height, width), or None where each picture keeps its own size."""
        raise NotImplementedError

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:
        """The crop for a picture of this (with `orient`, upright) size in pixels."""
        raise NotImplementedError

    def into(
        self, data: Buffer, out: torch.Tensor, rng: SampleRng, *, normalize: Affine | None = None
    ) -> Crop:
        """Decode an encoded image into a tensor.

        Args:
            data: an encoded image.
            out: (3, h, w) on the CPU, any strides: uint8, or a float type.
            rng: from `sample_rng`.
            normalize: for float output, `pixel * scale + bias`; without it floats are 0 to 255.

        Returns:
            The crop that was taken, which the sample's masks and boxes follow (`apply_to_mask`, `apply_to_boxes`).

        Raises:
            BadImageError: no image, damaged, or truncated.
        """
        picture = Picture(data, orient=self.orient)
        crop = self.box(picture.height, picture.width, rng)
        picture.crop_into(crop, out, normalize=normalize)
        return crop

    def __call__(self, data: Buffer, rng: SampleRng) -> torch.Tensor:
        """The transformed picture as a new uint8 tensor (3, h, w)."""
        picture = Picture(data, orient=self.orient)
        crop = self.box(picture.height, picture.width, rng)
        shape = self.output_shape or (3, picture.height, picture.width)
        out = torch.empty(shape, dtype=torch.uint8)
        picture.crop_into(crop, out)
        return out


@dataclass(frozen=True)
class TrainCrop(_Cropping):
    """A random part of the picture, resized to a square, mirrored at random: for training.

    The distribution is torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`: ten tries at a uniform share
    of the area and a log-uniform aspect ratio, then the largest centred crop within the ratio's bounds.

    Attributes:
        size: height and width of the result, pixels.
        scale: bounds of the crop's share of the picture's area.
        ratio: bounds of the crop's width / height.
        flip: probability of mirroring left-right.
        orient: turn the picture as its EXIF orientation says (torchvision does not).

    >>> TrainCrop(224).box(375, 500, sample_rng(seed=0, epoch=0, sample=1))
    Crop(top=22, left=94, height=264, width=343, flip=True)
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    orient: bool = False

    def __post_init__(self) -> None:
        _check_side("size", self.size)
        if not _holds(lambda: len(self.scale) == 2 and 0 < self.scale[0] <= self.scale[1] <= 1):
            raise UsageError(f"TrainCrop: scale is two shares of the area, 0 < low ≤ high ≤ 1, not {self.scale}")
        if not _holds(lambda: len(self.ratio) == 2 and 0 < self.ratio[0] <= self.ratio[1] < math.inf):
            raise UsageError(f"TrainCrop: ratio is two aspect ratios, 0 < low ≤ high, not {self.ratio}")
        if not _holds(lambda: 0 <= self.flip <= 1):
            raise UsageError(f"TrainCrop: flip is a probability, not {self.flip!r}")

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """(3, size, size)."""
        return 3, self.size, self.size

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:
        """A random crop of a picture of this size; whole pixels."""
        area, lowest, highest = height * width, *self.ratio
        log_lowest, log_highest = math.log(lowest), math.log(highest)
        for _ in range(10):
            target = area * rng.uniform(*self.scale)
            aspect = math.exp(rng.uniform(log_lowest, log_highest))
            columns, rows = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < columns <= width and 0 < rows <= height:
                top, left = rng.randrange(height - rows + 1), rng.randrange(width - columns + 1)
                return Crop(top, left, rows, columns, rng.random() < self.flip)
        rows, columns = height, width
        if width < lowest * height:
            rows = max(1, round(width / lowest))
        elif width > highest * height:
            columns = max(1, round(height * highest))
        return Crop((height - rows) // 2, (width - columns) // 2, rows, columns, rng.random() < self.flip)


@dataclass(frozen=True)
class EvalCrop(_Cropping):
    """The centre of the picture, resized: for evaluation.

    As torchvision's `Resize(resize)` (short side) and `CenterCrop(size)`, on the same grid of pixels, without
    resizing what the crop throws away.

    Attributes:
        size: height and width of the result, pixels.
        resize: what the whole picture's short side would become, at least `size`; by default 256/224 of it.
        orient: turn the picture as its EXIF orientation says (torchvision does not).

    >>> EvalCrop(224).box(256, 512, sample_rng(0, 0, 0))
    Crop(top=16.0, left=144.0, height=224.0, width=224.0, flip=False)
    """

    size: int
    resize: int | None = None
    orient: bool = False

    def __post_init__(self) -> None:
        _check_side("size", self.size)
        if self.resize is not None:
            _check_side("resize", self.resize)
        if self.resize is not None and self.resize < self.size:
            raise UsageError(f"EvalCrop: resize ({self.resize}) must not be smaller than size ({self.size})")

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """(3, size, size)."""
        return 3, self.size, self.size

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:  # noqa: ARG002 - as `Transform` has it
        """The centre crop of a picture of this size, as a fractional rectangle; `rng` is not used."""
        short = self.resize if self.resize is not None else round(self.size * 256 / 224)
        if width < height:
            resized = int(short * height / width), short
        else:
            resized = short, int(short * width / height)
        down, across = height / resized[0], width / resized[1]
        top, left = round((resized[0] - self.size) / 2), round((resized[1] - self.size) / 2)
        return Crop(top * down, left * across, self.size * down, self.size * across)


@dataclass(frozen=True)
class Resize(_Cropping):
    """The whole picture, resized to one size whatever its aspect ratio.

    Attributes:
        height: rows of the result.
        width: columns of the result.
        orient: turn the picture as its EXIF orientation says.
    """

    height: int
    width: int
    orient: bool = False

    def __post_init__(self) -> None:
        _check_side("height", self.height)
        _check_side("width", self.width)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """(3, height, width)."""
        return 3, self.height, self.width

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:  # noqa: ARG002 - as `Transform` has it
        """All of the picture; `rng` is not used."""
        return Crop(0, 0, height, width)


@dataclass(frozen=True)
class Identity(_Cropping):
    """The whole picture at its own size.

    Attributes:
        orient: turn the picture as its EXIF orientation says.
    """

    orient: bool = False

    @property
    def output_shape(self) -> None:
        """None: each picture keeps its own size."""
        return

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:  # noqa: ARG002 - as `Transform` has it
        """All of the picture; `rng` is not used."""
        return Crop(0, 0, height, width)


def _holds(condition: Callable[[], bool]) -> bool:
    """Whether a condition on values of any type is met; what cannot be compared does not meet it."""
    try:
        return condition()
    except (TypeError, ValueError):
        return False


def _check_side(name: str, pixels: int) -> None:
    if isinstance(pixels, bool) or not (isinstance(pixels, int | np.integer) and pixels > 0):
        raise UsageError(f"{name} is a positive number of pixels, not {pixels!r}")
