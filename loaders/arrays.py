"""CT slices and volumes, from `.npy` bytes to the batch: windowed, cropped, with their neighbours.

    Window(40, 400)                                   # (1, H, W) float32 in [0, 1]
    Window((-600, 1500), (100, 700), (40, 400))       # (3, H, W): lung, bone, soft tissue
    Slab(5, Window(40, 400, crop=RandomCrop(256)))    # (5, 256, 256): two neighbours on either side
    Window()                                          # Hounsfield units as stored, what no transform means

Each is a frozen dataclass and a pure function of the bytes and the sample's generator, as the transforms for pictures
are. Nothing is resampled, and by default nothing is mirrored: a mirrored body has its heart on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.geometry import Crop
from loaders.windowing import Bounds, bounds, write_windows
from packer import npy
from packer.errors import BadArrayError, PackerError, UsageError

if TYPE_CHECKING:
    from loaders.source import Source
    from loaders.transforms import SampleRng

Array: TypeAlias = npt.NDArray[Any]
Buffer = bytes | memoryview

AIR_HU = -1024
"""What stands beyond the first and last slice of a series with `Slab(edges="air")`."""


@dataclass(frozen=True)
class RandomCrop:
    """A part of a slice at a random place, at its own resolution.

    Attributes:
        size: height and width in pixels, or one number for both.
        flip: probability of mirroring left-right; 0 unless asked for.

    >>> from loaders.transforms import sample_rng
    >>> RandomCrop(256).box(512, 512, sample_rng(seed=0, epoch=0, sample=1))
    Crop(top=192, left=95, height=256, width=256, flip=False)
    """

    size: int | tuple[int, int]
    flip: float = 0.0

    def __post_init__(self) -> None:
        _sides("RandomCrop", self.size)
        if not 0 <= self.flip <= 1:
            raise UsageError(f"RandomCrop: flip is a probability, not {self.flip}")

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:
        """A random crop of a slice of this size.

        Raises:
            BadArrayError: the slice is smaller than the crop.
        """
        rows, columns = _fitting(self.size, height, width)
        top, left = rng.randrange(height - rows + 1), rng.randrange(width - columns + 1)
        return Crop(top, left, rows, columns, rng.random() < self.flip)


@dataclass(frozen=True)
class CenterCrop:
    """The middle of a slice, at its own resolution.

    Attributes:
        size: height and width in pixels, or one number for both.
    """

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        _sides("CenterCrop", self.size)

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:  # noqa: ARG002 - as `RandomCrop` has it
        """The centre crop of a slice of this size; `rng` is not used. Raises BadArrayError where it does not fit."""
        rows, columns = _fitting(self.size, height, width)
        return Crop((height - rows) // 2, (width - columns) // 2, rows, columns)


class ArrayTransform:
    """What `Window` and `Slab` share. Arrays are (H, W) slices or (D, H, W) volumes; crops are of H and W."""

    __slots__ = ()

    orient = False
    windows: tuple[Bounds, ...]
    crop: RandomCrop | CenterCrop | None
    slices = 1

    @property
    def channels(self) -> int:
        """Channels of the result."""
        return self.slices * max(1, len(self.windows))

    @property
    def output_shape(self) -> None:
        """None: how large the result is depends on the arrays, see `shape_of`."""
        return

    def shape_of(self, stored: Sequence[int]) -> tuple[int, ...]:
        """(C, H, W) or (C, D, H, W) of the result for arrays of this shape."""
        if len(stored) not in (2, 3):
            raise BadArrayError(f"an array of shape {tuple(stored)} is neither a slice (H, W) nor a volume (D, H, W)")
        if self.slices > 1 and len(stored) != 2:
            raise BadArrayError(f"Slab takes neighbouring slices (H, W), and this is an array of shape {tuple(stored)}")
        height, width = stored[-2:]
        rows, columns = (height, width) if self.crop is None else _fitting(self.crop.size, height, width)
        return (self.channels, *stored[:-2], rows, columns)

    def box(self, height: int, width: int, rng: SampleRng) -> Crop:
        """The crop for a slice of this size in pixels."""
        return Crop(0, 0, height, width) if self.crop is None else self.crop.box(height, width, rng)

    def into(
        self, data: Buffer | Sequence[Buffer | None], out: torch.Tensor, rng: SampleRng, *, normalize: Any = None
    ) -> Crop:
        """Decode arrays into a tensor.

        Args:
            data: `.npy` or `.npy.zst` bytes; for a slab the bytes of each slice, None for air.
            out: on the CPU, any strides, of `shape_of` the arrays' shape: float32 with windows, else of a type
                that holds the stored values.
            rng: from `sample_rng`.
            normalize: None: a window gives [0, 1] already.

        Returns:
            The crop that was taken, which the sample's masks follow.

        Raises:
            BadArrayError: no array, damaged, or of another shape or type than `out` can hold.
        """
        if normalize is not None:
            raise UsageError("normalize is for 8-bit pictures; a Window gives values in [0, 1]")
        return self._write([None if one is None else npy.view(npy.plain(one)) for one in self._parts(data)], out, rng)

    def take(
        self, data: Buffer | Sequence[Buffer | None], rng: SampleRng, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, Crop]:
        """As `into`, in a new tensor: float32 with windows, else of the type given, or if it is None the stored one."""
        arrays = [None if one is None else npy.view(npy.plain(one)) for one in self._parts(data)]
        first = next(array for array in arrays if array is not None)
        out = torch.empty(self.shape_of(first.shape), dtype=dtype or self.dtype_of(first.dtype))
        return out, self._write(arrays, out, rng)

    def __call__(self, data: Buffer | Sequence[Buffer | None], rng: SampleRng) -> torch.Tensor:
        """The transformed array as a new tensor."""
        return self.take(data, rng)[0]

    def dtype_of(self, stored: np.dtype[Any]) -> torch.dtype:
        """The result's type for arrays of this type."""
        if self.windows:
            return torch.float32
        return torch.from_numpy(np.empty(0, stored.newbyteorder("="))).dtype

    def _parts(self, data: Buffer | Sequence[Buffer | None]) -> Sequence[Buffer | None]:
        parts: Sequence[Buffer | None] = [data] if isinstance(data, bytes | memoryview) else data
        if len(parts) != self.slices:
            raise UsageError(f"{self} works on {self.slices} slices, and is given {len(parts)}")
        return parts

    def _write(self, arrays: Sequence[Array | None], out: torch.Tensor, rng: SampleRng) -> Crop:
        shape = next(array.shape for array in arrays if array is not None)
        if self.shape_of(shape) != tuple(out.shape):
            raise BadArrayError(
                f"an array of shape {shape} gives {self.shape_of(shape)} among samples that give {tuple(out.shape)}; "
                "crop to one size with Window(…, crop=CenterCrop(size))"
            )
        crop, target = self.box(shape[-2], shape[-1], rng), out.numpy()
        each = max(1, len(self.windows))
        for k, array in enumerate(arrays):
            channels = target[k * each : (k + 1) * each]
            if array is None:
                array = np.broadcast_to(np.int16(AIR_HU), shape)
            elif array.shape != shape:
                raise BadArrayError(f"neighbouring slices of shapes {shape} and {array.shape}: no slab")
            _write_channels(cut(array, crop), channels, self.windows)
        return crop


def _write_channels(array: Array, channels: Array, windows: tuple[Bounds, ...]) -> None:
    """One array (…, H, W) into its channels (C, …, H, W)."""
    if array.dtype.kind not in "biuf":
        raise BadArrayError(f"an array of {array.dtype} is no picture")
    if windows:
        write_windows(array, channels, windows)
    elif np.can_cast(array.dtype, channels.dtype, "safe"):
        np.copyto(channels[0], array)
    else:
        raise BadArrayError(
            f"an array of {array.dtype} among arrays of {channels.dtype}: without a window, all of a split have "
            "the first one's type"
        )


@dataclass(frozen=True, init=False)
class Window(ArrayTransform):
    """Hounsfield units to [0, 1]: `clip((hu − (centre − width/2)) / width, 0, 1)`, one channel for each window.

    The result is float32 and differs from the formula in float64 by at most 2⁻²² of its value. Without windows, stored
    values stay as they are.

    Attributes:
        windows: (centre, width) in HU of each channel.
        crop: `RandomCrop` or `CenterCrop`; None takes slices whole.

    Raises:
        UsageError: a width that is not positive, or a number that is not finite.

    >>> stored = npy.encode(np.array([[-1024, -160, 40, 240, 3071]], np.int16))
    >>> Window(40, 400)(stored, None).tolist()
    [[[0.0, 0.0, 0.5, 1.0, 1.0]]]
    """

    windows: tuple[Bounds, ...]
    crop: RandomCrop | CenterCrop | None

    def __init__(self, *windows: float | tuple[float, float], crop: RandomCrop | CenterCrop | None = None) -> None:
        """Of a centre and a width, or of any number of such pairs."""
        object.__setattr__(self, "windows", bounds(windows))
        object.__setattr__(self, "crop", _checked_crop(crop))


@dataclass(frozen=True)
class Slab(ArrayTransform):
    """A slice among its neighbours of the same series, one after the other as channels: 2.5-D.

    The slice itself, whose label and mask the sample has, is in the middle. Neighbours are the next ones that the
    dataset has, by the number at the end of the keys (`{series}_{index}`), wherever they are packed. With several
    windows, each slice's channels stand together.

    Attributes:
        slices: how many slices; an odd number.
        window: what becomes of each; by default nothing.
        edges: beyond the first and last slice of a series: "repeat" that slice, or "air" (−1024 HU).

    >>> Slab(3, Window(40, 400)).shape_of((512, 512))
    (3, 512, 512)
    """

    slices: int
    window: Window = field(default_factory=Window)
    edges: Literal["repeat", "air"] = "repeat"

    def __post_init__(self) -> None:
        if isinstance(self.slices, bool) or not isinstance(self.slices, int) or self.slices < 1 or self.slices % 2 == 0:
            raise UsageError(f"Slab: slices is an odd number, so that one is in the middle, not {self.slices!r}")
        if not isinstance(self.window, Window):
            raise UsageError(f"Slab: window is a Window, such as Window(40, 400), not {self.window!r}")
        if self.edges not in ("repeat", "air"):
            raise UsageError(f"Slab: edges is 'repeat' or 'air', not {self.edges!r}")

    @property
    def windows(self) -> tuple[Bounds, ...]:  # type: ignore[override]
        """(centre, width) in HU of each channel of a slice."""
        return self.window.windows

    @property
    def crop(self) -> RandomCrop | CenterCrop | None:  # type: ignore[override]
        """The crop, the same for all slices of a slab."""
        return self.window.crop


def first_array(source: Source, name: str) -> tuple[npy.NpyHeader | None, bool]:
    """The header of a source's first readable array, and whether the others seem to be of the same shape.

    That is so where the index knows their heights and widths and these are equal, or where plain arrays take
    equally many bytes. Where it is int16 and some of the others take more bytes a pixel, float32 stands in the header:
    slices whose rescaling was not whole are stored so, and it holds the values of both.

    Args:
        source: the samples.
        name: a field, or alternatives `a;b`.
    """
    numbers = np.arange(len(source))
    parts = name.split(";")
    sizes = np.stack([source.sizes(numbers, part) for part in parts])
    which = np.argmax(sizes >= 0, axis=0)
    lengths = sizes[which, numbers] if len(numbers) else np.zeros(0, np.int64)
    for number in np.flatnonzero(lengths >= 0)[:_TRIES].tolist():
        try:
            part = parts[int(which[number])]
            header = npy.parse_header(npy.plain(source.fetcher(numbers[number : number + 1], part)(0) or b""))
        except PackerError:  # whoever reads this sample hears of it
            continue
        heights, widths = (source.column(name).astype(np.int64) for name in ("height", "width"))
        known, packed = len(header.shape) == 2 and bool(np.all(heights > 0)), part.endswith(".zst")
        if known and not packed and header.dtype.kind == "i" and np.any(lengths >= 4 * heights * widths):
            header = header._replace(dtype=np.dtype(np.float32))
        same = _all_equal(heights) and _all_equal(widths)
        return header, same if known else _all_equal(lengths[lengths >= 0]) and not packed
    return None, False


_TRIES = 8


def _all_equal(values: npt.NDArray[Any]) -> bool:
    return bool(np.all(values == values[:1]))


def cut(array: Array, crop: Crop | None) -> Array:
    """A view of the part of an array (…, H, W) that a crop in whole pixels shows."""
    if crop is None:
        return array
    top, left = int(crop.top), int(crop.left)
    part = array[..., top : top + int(crop.height), left : left + int(crop.width)]
    return part[..., ::-1] if crop.flip else part


def _sides(name: str, size: int | tuple[int, int]) -> None:
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise UsageError(f"{name}: size is a positive number of pixels, or (height, width), not {size!r}")


def _fitting(size: int | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    rows, columns = size if isinstance(size, tuple) else (size, size)
    if rows > height or columns > width:
        raise BadArrayError(f"a slice of {height}×{width} is smaller than the crop of {rows}×{columns}")
    return rows, columns


def _checked_crop(crop: RandomCrop | CenterCrop | None) -> RandomCrop | CenterCrop | None:
    if crop is not None and not isinstance(crop, RandomCrop | CenterCrop):
        raise UsageError(
            f"Window: crop is RandomCrop(size) or CenterCrop(size), which keep the resolution, not {crop!r}"
        )
    return crop
