"""Batches on their way to the device: copied while the step before still runs, normalised where it is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from loaders.batches import Made
from loaders.engine import Run


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same structure of dicts, tuples and lists with every tensor replaced."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


class Normalizer:
    """uint8 images (B, 3, H, W) to normalised ones, on the device that they are on.

    Args:
        mean: of the pixels / 255, per channel.
        std: likewise.
        device: where the images will be.
        dtype: of the result; the arithmetic is float32.
        channels_last: memory format of the result.
    """

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device).view(1, 3, 1, 1)
        self._bias = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(1, 3, 1, 1)
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalised images in `dtype`."""
        return torch.addcmul(self._bias, images.float(), self._scale).to(self._dtype, memory_format=self._format)


class DeviceRun:
    """A run whose batches are moved to a device, the next one while the last is in use.

    On CUDA the copy and the normalisation run on a stream of their own; the consumer's stream waits
    for them, and the allocator is told which streams use the memory.

    Args:
        run: the batches, pinned for a CUDA device (others are pinned here).
        device: where to.
        normalize: applied to the images on the device; None leaves them as they are.
        picture: the images' key in dict batches.
    """

    def __init__(
        self, run: Run, device: torch.device, normalize: Callable[[torch.Tensor], torch.Tensor] | None,
        picture: str | None,
    ) -> None:
        self._run = run
        self._device = device
        self._normalize = normalize
        self._picture = picture
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ahead: tuple[Made, torch.cuda.Event | None] | None = None
        self._error: BaseException | None = None

    def __iter__(self) -> DeviceRun:
        return self

    def __next__(self) -> Made:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        made, copied = self._ahead or self._begin(next(self._run))
        self._ahead = None
        if self._stream is not None and self._run.ready():
            try:
                self._ahead = self._begin(next(self._run))
            except BaseException as error:  # noqa: BLE001 - it belongs to the next batch
                self._error = error
        if copied is not None:
            self._hand_over(made.batch, copied)
        return made

    def _begin(self, made: Made) -> tuple[Made, torch.cuda.Event | None]:
        """Start moving a batch."""
        if self._stream is None:
            return made._replace(batch=self._moved(made.batch)), None
        with torch.cuda.stream(self._stream):
            batch = self._moved(made.batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return made._replace(batch=batch), copied

    def _moved(self, batch: Any) -> Any:
        moved = map_tensors(self._move, batch)
        if self._normalize is None or moved is None:
            return moved
        if isinstance(moved, dict):
            return {**moved, self._picture: self._normalize(moved[self._picture])}
        images, *rest = moved
        return (self._normalize(images), *rest)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stream is not None and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=self._stream is not None)

    def _hand_over(self, batch: Any, copied: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)

        def used_by_consumer(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        map_tensors(used_by_consumer, batch)

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting."""
        return self._ahead is not None or self._error is not None or self._run.ready()

    def close(self) -> None:
        """Stop at once."""
        self._ahead = self._error = None
        self._run.close()
