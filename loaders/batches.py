"""One batch: its buffers made, its samples decoded into them, its parts put together.

Engines decide where and when these three steps run; what they give is decided here alone, so every
engine gives the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from loaders.collate import Empty, Padded, collate_into
from loaders.decode import decode_many_into
from loaders.order import Numbers
from loaders.samples import Reads, Samples
from packer.errors import PackerError, SampleError, UsageError

#: A run of samples is handed to a worker at once; runs of less than this cost more in queueing than they balance.
RUN_BYTES = 1 << 16
LONGEST_RUN = 32


class Made(NamedTuple):
    """A finished batch, None if every sample was skipped, and the samples that were skipped."""

    batch: Any
    skipped: list[SampleError]


@dataclass
class Draft:
    """A batch in the making.

    Attributes:
        numbers: (n,) int64 sample numbers.
        epoch: the epoch it belongs to.
        reads: readers of the samples' bytes.
        empty: makes the tensors that the batch consists of.
        images: (n, 3, H, W), or of slices (n, C, H, W), where pictures are decoded straight into the batch.
        values: per sample, all that is not in `images`.
        failed: errors by position, of samples to skip.
    """

    numbers: Numbers
    epoch: int
    reads: Reads
    empty: Empty
    images: torch.Tensor | None
    values: list[Any]
    failed: dict[int, SampleError] = field(default_factory=dict)


class Batches:
    """Makes batches from sample numbers. Picklable; safe in threads if the samples are.

    Args:
        samples: how one sample is made.
        collate_fn: makes a batch of a list of samples; None for `pad_collate` into recycled buffers.
        on_error: "raise", or "skip" to leave out samples whose bytes are bad.
        dtype: of normalised images.
        channels_last: memory format of image batches.
    """

    def __init__(
        self, samples: Samples, *, collate_fn: Callable[[list[Any]], Any] | None = None, on_error: str = "raise",
        dtype: torch.dtype = torch.float32, channels_last: bool = False,
    ) -> None:
        self.samples = samples
        self.collate_fn = collate_fn
        self.skips = on_error == "skip"
        self.dtype = dtype
        self.channels_last = channels_last
        # A collate_fn gets samples; without one, pictures of one size are decoded straight into the batch.
        self._shape = samples.output_shape if collate_fn is None else None
        # Beside the picture, only what the index holds: no Python value per sample is needed.
        self._pictures_only = self.direct and (
            samples.fields is None or set(samples.others) <= {"__index__", "__label__"}
        )

    @property
    def direct(self) -> bool:
        """Whether pictures are decoded straight into the batch."""
        return self._shape is not None

    def draft(self, numbers: Numbers, epoch: int, empty: Empty) -> Draft:
        """Begin a batch of these samples."""
        images = None
        if self._shape is not None:
            if self.channels_last and len(self._shape) == 3:
                channels, height, width = self._shape
                images = empty((len(numbers), height, width, channels), self.samples.dtype).permute(0, 3, 1, 2)
            else:
                images = empty((len(numbers), *self._shape), self.samples.dtype)
        return Draft(numbers, epoch, self.samples.reads(numbers), empty, images, [None] * len(numbers))

    def runs(self, draft: Draft) -> list[tuple[int, int]]:
        """The batch as (start, stop) pairs that are worth a worker's while each."""
        count = len(draft.numbers)
        length = 1
        if self.samples.picture is not None:
            field = self.samples.picture.split(";")[0]
            mean = float(self.samples.source.sizes(draft.numbers, field).mean())
            length = max(1, min(LONGEST_RUN, int(RUN_BYTES // max(mean, 1)))) if mean > 0 else 1
        return [(start, min(start + length, count)) for start in range(0, count, length)]

    def fill(self, draft: Draft, start: int, stop: int) -> None:
        """Decode the samples from position `start` up to `stop`.

        Raises:
            SampleError: a sample cannot be made, and is not to be skipped.
        """
        if self.samples.same_size is not None and self._pictures_only and self._fill_at_once(draft, start, stop):
            return
        for j in range(start, stop):
            self._fill_one(draft, j)

    def _fill_one(self, draft: Draft, j: int) -> None:
        out = None if draft.images is None else draft.images[j]
        try:
            if out is not None and self._pictures_only:
                self.samples.picture_into(draft.reads, j, draft.epoch, out)
            else:
                draft.values[j] = self.samples.sample(draft.reads, j, draft.epoch, out)
        except SampleError as error:
            if not self.skips or not _is_defect(error):
                raise
            draft.failed[j] = error

    def _fill_at_once(self, draft: Draft, start: int, stop: int) -> bool:
        """Decode a run of equal-sized pictures together; False if one is not what the index says."""
        if draft.images is None:
            return False
        try:
            datas = [self.samples.picture_bytes(draft.reads, j) for j in range(start, stop)]
            decode_many_into(datas, draft.images[start:stop], normalize=self.samples.normalize)
        except (PackerError, ValueError):
            return False  # one by one, to find out which it is
        return True

    def finish(self, draft: Draft) -> Made:
        """Put the batch together.

        Raises:
            CollateError: the samples do not fit together.
        """
        skipped = [draft.failed[j] for j in sorted(draft.failed)]
        if skipped:
            kept = [j for j in range(len(draft.numbers)) if j not in draft.failed]
            if not kept:
                return Made(None, skipped)
            _compact(draft, kept)
        return Made(self._assemble(draft), skipped)

    def _assemble(self, draft: Draft) -> Any:
        samples, empty = self.samples, draft.empty
        if self.collate_fn is not None:
            return call("collate_fn", self.collate_fn, draft.values)
        if self._pictures_only and draft.images is not None:
            return self._assemble_pictures(draft, self._layout(draft.images, empty))
        batch = collate_into(draft.values, empty)
        if samples.fields is None:
            images, labels = batch
            return self._layout(images, empty), labels
        if samples.picture is None:
            return batch
        images = self._layout(batch[samples.picture] if draft.images is None else draft.images, empty)
        return {name: images if name == samples.picture else batch[name] for name in samples.fields}

    def _assemble_pictures(self, draft: Draft, images: torch.Tensor) -> Any:
        """A batch of pictures and what the index knows: nothing of it was made sample by sample."""
        labels = torch.from_numpy(self.samples.source.column("label")[draft.numbers].astype(np.int64))
        if self.samples.fields is None:
            return images, labels
        known = {"__label__": labels, "__index__": torch.from_numpy(draft.numbers.astype(np.int64))}
        return {name: known.get(name, images) for name in self.samples.fields}

    def _layout(self, images: Any, empty: Empty) -> Any:
        """Images in the memory format asked for and, where they were normalised here, in the dtype."""
        if isinstance(images, Padded):
            return images._replace(data=self._layout(images.data, empty))
        if not isinstance(images, torch.Tensor):  # whatever a transform from elsewhere makes
            return images
        floats = self.samples.normalize is not None or (self.samples.arrays and images.dtype == torch.float32)
        dtype = self.dtype if floats else images.dtype
        wanted = torch.channels_last if self.channels_last and images.ndim == 4 else torch.contiguous_format
        if dtype == images.dtype and images.is_contiguous(memory_format=wanted):
            return images
        if wanted is torch.contiguous_format:
            return empty(images.shape, dtype).copy_(images)
        count, channels, height, width = images.shape
        return empty((count, height, width, channels), dtype).permute(0, 3, 1, 2).copy_(images)


def call(option: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """What a function of the user's makes of a batch; a stray StopIteration would end the epoch without a word."""
    try:
        return function(batch)
    except StopIteration as error:
        raise UsageError(f"{option} raised StopIteration, which is how a loader says that its epoch is over") from error


def _compact(draft: Draft, kept: Sequence[int]) -> None:
    """Close the gaps that skipped samples left."""
    if draft.images is not None:
        for to, j in enumerate(kept):
            if to != j:
                draft.images[to].copy_(draft.images[j])
        draft.images = draft.images[: len(kept)]
    draft.numbers = draft.numbers[list(kept)]
    draft.values = [draft.values[j] for j in kept]


def _is_defect(error: SampleError) -> bool:
    """Whether the sample's own bytes are to blame: a disk that fails or memory that runs out is no reason to skip."""
    cause = error.__cause__
    # Pillow's own complaints are OSErrors too, but have no errno.
    return not isinstance(cause, MemoryError) and not (isinstance(cause, OSError) and cause.errno is not None)
