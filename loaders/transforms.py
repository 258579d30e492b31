"""Transforms that work from the encoded bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loaders.decode import Affine
from loaders.geometry import Crop, apply_to_boxes, apply_to_mask

__all__ = ["Crop", "EvalCrop", "Identity", "Resize", "SampleRng", "TrainCrop", "Transform", "adapt",
           "apply_to_boxes", "apply_to_mask", "sample_rng"]


class SampleRng:
    """A small deterministic generator with the methods of `random.Random` that transforms need."""

    def random(self) -> float:
        """A float in [0, 1)."""
        raise NotImplementedError


def sample_rng(seed: int, epoch: int, sample: int) -> SampleRng:
    """The generator of one sample in one epoch."""
    raise NotImplementedError


class Transform(Protocol):
    """What the loader needs of a transform of ours; anything else goes through `adapt`."""

    @property
    def output_shape(self) -> tuple[int, int, int] | None:
        """(3, height, width), or None where it varies (then only `__call__` works)."""

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:
        """The crop for a picture of this (upright) size."""

    def into(
        self, data: bytes | memoryview, out: torch.Tensor, rng: SampleRng, *, normalize: Affine | None = None
    ) -> Crop:
        """Decode into `out` (3, h, w) and return the crop, for the sample's masks and boxes."""

    def __call__(self, data: bytes | memoryview, rng: SampleRng) -> torch.Tensor:
        """The same as a new uint8 tensor."""


@dataclass(frozen=True)
class TrainCrop:
    """RandomResizedCrop and horizontal flip."""

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    orient: bool = False


@dataclass(frozen=True)
class EvalCrop:
    """Resize the short side, crop the centre."""

    size: int
    resize: int | None = None
    orient: bool = False


@dataclass(frozen=True)
class Resize:
    """The whole picture squeezed to (height, width)."""

    height: int
    width: int
    orient: bool = False


@dataclass(frozen=True)
class Identity:
    """The whole picture at its own size."""

    orient: bool = False


def adapt(transform: Callable[..., Any]) -> Callable[[bytes | memoryview], Any]:
    """Wrap a foreign callable (torchvision, albumentations, any) so that it takes encoded bytes."""
    raise NotImplementedError
