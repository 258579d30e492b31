"""Samples of any size into one batch: equal sizes are stacked, others padded.

    >>> import torch
    >>> batch = pad_collate([(torch.ones(3, 2, 4), 0), (torch.ones(3, 5, 1), 1)])
    >>> images, labels = batch
    >>> images.data.shape, images.sizes.tolist(), labels.tolist()
    (torch.Size([2, 3, 5, 4]), [[3, 2, 4], [3, 5, 1]], [0, 1])

Faster than stacking padded copies: each element is written once, and only the margins are filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from packer.errors import CollateError


class Padded(NamedTuple):
    """Tensors of different sizes in one.

    Attributes:
        data: (B, *largest size), dtype as it came; what is not a sample's own is `pad_value`.
        sizes: (B, rank) int64, each sample's own shape.
        mask: bool, shape of `data`, true where the sample's own elements lie. A read-only view,
            expanded along axes that no sample is padded on: `mask[:, 0]` of images is (B, H, W).
    """

    data: torch.Tensor
    sizes: torch.Tensor
    mask: torch.Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Padded:
        """The same on another device."""
        return Padded(*(part.to(device, non_blocking=non_blocking) for part in self))


class Empty(Protocol):
    """Makes the uninitialised tensor that a batch is written into."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of this shape and type."""
        ...


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of its own."""
    return torch.empty(tuple(shape), dtype=dtype)


def pad_collate(batch: Sequence[Any], *, pad_value: float = 0, multiple_of: int = 1) -> Any:
    """Collate samples whose tensors may differ in size: images, masks, boxes, token sequences, volumes.

    Dicts, tuples, named tuples and lists are collated element by element. A tensor or array whose
    shape is the same in all samples becomes a plain stacked tensor (B, …); where shapes of one rank
    differ, a `Padded`, each axis as long as its longest. Lists of numbers count as sequences;
    numbers become int64, float64 or bool (B,). All else (text, bytes, None, objects) stays a list.

    Args:
        batch: the samples, at least one, all of one structure.
        pad_value: what fills the padding; must be a value of the tensor's dtype.
        multiple_of: padded axes are rounded up to a multiple of this, and so are the last two axes
            of tensors of rank ≥ 3, padded or not: networks that halve an image n times need 2**n.

    Raises:
        CollateError: ranks or dtypes differ, keys or lengths of the structure differ, or
            `pad_value` does not fit the dtype. The message names the place in the sample.

    >>> import torch
    >>> boxes = pad_collate([{"boxes": torch.zeros(2, 5)}, {"boxes": torch.zeros(0, 5)}])["boxes"]
    >>> boxes.data.shape, boxes.mask[..., 0].tolist()
    (torch.Size([2, 2, 5]), [[True, True], [False, False]])
    """
    return collate_into(batch, fresh, pad_value=pad_value, multiple_of=multiple_of)


def collate_into(batch: Sequence[Any], empty: Empty, *, pad_value: float = 0, multiple_of: int = 1) -> Any:
    """`pad_collate` into tensors that `empty` provides, such as those of a pool."""
    if len(batch) == 0:
        raise CollateError("cannot collate an empty batch")
    if not isinstance(multiple_of, int) or multiple_of < 1:
        raise CollateError(f"multiple_of must be an integer of at least 1, got {multiple_of!r}")
    return _Collator(empty, pad_value, multiple_of).collate(list(batch), "sample")


class _Collator:
    """The settings of one call, so that the recursion carries only values and their place."""

    def __init__(self, empty: Empty, pad_value: float, multiple_of: int) -> None:
        self.empty = empty
        self.pad_value = pad_value
        self.multiple_of = multiple_of

    def collate(self, values: list[Any], place: str) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor | np.ndarray | np.generic):
            return self._tensors([_as_tensor(value, place) for value in values], place)
        if isinstance(first, bool | int | float | list) and any(value is None for value in values):
            return values  # JSON's null: not known of this sample
        if isinstance(first, bool | int | float):
            return _numbers(values, place)
        if isinstance(first, Mapping):
            return self._mapping(values, place)
        if isinstance(first, tuple):
            return self._tuple(values, place)
        if isinstance(first, list):
            if all(isinstance(value, list) and all(_is_number(item) for item in value) for value in values):
                return self._tensors(_sequences(values, place), place)
            return self._items(values, place)
        return values

    def _mapping(self, values: list[Any], place: str) -> dict[Any, Any]:
        first = values[0]
        for number, value in enumerate(values):
            if not isinstance(value, Mapping) or value.keys() != first.keys():
                got = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                raise CollateError(
                    f"{place} {number} of the batch has {got}, {place} 0 has {sorted(map(str, first))}; "
                    "every sample of a batch needs the same keys"
                )
        return {key: self.collate([value[key] for value in values], f"{place}[{key!r}]") for key in first}

    def _tuple(self, values: list[Any], place: str) -> Any:
        items = self._items(values, place)
        kind = type(values[0])
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)

    def _items(self, values: list[Any], place: str) -> list[Any]:
        width = len(values[0])
        for number, value in enumerate(values):
            if not isinstance(value, tuple | list) or len(value) != width:
                got = f"{len(value)} items" if isinstance(value, tuple | list) else type(value).__name__
                raise CollateError(f"{place} {number} of the batch has {got}, {place} 0 has {width} items")
        return [self.collate([value[i] for value in values], f"{place}[{i}]") for i in range(width)]

    def _tensors(self, tensors: list[torch.Tensor], place: str) -> torch.Tensor | Padded:
        if len({(tensor.dtype, tensor.ndim) for tensor in tensors}) > 1:
            _complain_of_kinds(tensors, place)
        first = tensors[0]
        shapes: list[tuple[int, ...]] = [tensor.shape for tensor in tensors]
        largest = self._largest(shapes)
        if all(shape == largest for shape in shapes):
            out = self.empty((len(tensors), *largest), first.dtype)
            torch.stack(tensors, out=out)
            return out
        return self._pad(tensors, shapes, largest, place)

    def _largest(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        rank = len(shapes[0])
        largest = []
        for axis, lengths in enumerate(zip(*shapes, strict=True)):
            longest = max(lengths)
            if min(lengths) != longest or (rank >= 3 and axis >= rank - 2):
                longest = -(-longest // self.multiple_of) * self.multiple_of
            largest.append(longest)
        return tuple(largest)

    def _pad(
        self, tensors: list[torch.Tensor], shapes: list[tuple[int, ...]], largest: tuple[int, ...], place: str
    ) -> Padded:
        data = self.empty((len(tensors), *largest), tensors[0].dtype)
        value = _pad_value(self.pad_value, data.dtype, place)
        slots, padding, *arrays = _as_arrays([data, torch.tensor(value, dtype=data.dtype), *tensors])
        filler = padding.item()  # numpy fills faster from a scalar than from an array
        for slot, array, shape in zip(slots, arrays, shapes, strict=True):
            _write_padded(slot, array, shape, largest, filler)
        sizes = torch.tensor(shapes, dtype=torch.int64).reshape(len(shapes), len(largest))
        return Padded(data, sizes, self._mask(shapes, largest))

    def _mask(self, shapes: list[tuple[int, ...]], largest: tuple[int, ...]) -> torch.Tensor:
        """(B, *largest) bool, written along the padded axes and expanded along the others."""
        axes = [axis for axis, n in enumerate(largest) if any(shape[axis] < n for shape in shapes)]
        lengths = tuple(largest[axis] for axis in axes)
        mask = self.empty((len(shapes), *lengths), torch.bool)
        if len(axes) == 1:
            np.less(np.arange(lengths[0]), np.array([[shape[axes[0]]] for shape in shapes]), out=mask.numpy())
        else:
            for slot, shape in zip(mask.numpy(), shapes, strict=True):
                _write_padded(slot, True, tuple(shape[axis] for axis in axes), lengths, False)
        along = [n if axis in axes else 1 for axis, n in enumerate(largest)]
        return mask.view(len(shapes), *along).expand(len(shapes), *largest)


def _complain_of_kinds(tensors: list[torch.Tensor], place: str) -> None:
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        where = f"in sample {number} of the batch"
        if tensor.dtype != first.dtype:
            raise CollateError(
                f"{place} is {tensor.dtype} {where} and {first.dtype} in sample 0: one batch holds one dtype; "
                "convert in the transform"
            )
        if tensor.ndim != first.ndim:
            raise CollateError(
                f"{place} has shape {tuple(tensor.shape)} {where} and {tuple(first.shape)} in sample 0: "
                "padding needs equal ranks"
            )


def _write_padded(
    slot: npt.NDArray[Any], value: Any, shape: Sequence[int], largest: Sequence[int], padding: Any
) -> None:
    """Write a sample and its margins, each element once. numpy does this twice as fast as torch."""
    before: tuple[slice, ...] = ()
    for length, longest in zip(shape, largest, strict=True):
        if length < longest:
            slot[(*before, slice(length, None))] = padding
        before = (*before, slice(length))
    slot[before] = value


def _as_arrays(tensors: list[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """Views for copying: where numpy lacks the dtype (bfloat16), of the same bits as integers."""
    try:
        return [tensor.numpy() for tensor in tensors]
    except (TypeError, RuntimeError):  # no such dtype, a gradient is wanted, or a lazy conjugate
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        kind = kinds[tensors[0].itemsize]
        return [tensor.detach().resolve_conj().resolve_neg().view(kind).numpy() for tensor in tensors]


def _as_tensor(value: Any, place: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise CollateError(f"{place} is a {value.layout} tensor: use .to_dense() in the transform")
        return value
    if isinstance(value, np.ndarray | np.generic):
        try:
            # Negative strides (a flipped view), foreign byte orders and read-only memory have no tensor.
            native = np.asarray(value, value.dtype.newbyteorder("="), order="C")
            return torch.from_numpy(native if native.flags.writeable else native.copy())
        except TypeError as error:
            raise CollateError(f"{place}: an array of {value.dtype} cannot become a tensor") from error
    raise CollateError(f"{place} is a {type(value).__name__} in one sample of the batch and an array in another")


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _numbers(values: list[Any], place: str) -> torch.Tensor:
    kind = type(values[0])
    for value in values:
        if type(value) is not kind:
            raise CollateError(
                f"{place} is a {kind.__name__} in one sample of the batch and a {type(value).__name__} in another"
            )
    return _tensor_of(values, {bool: torch.bool, int: torch.int64}.get(kind, torch.float64), place)


def _sequences(values: list[list[Any]], place: str) -> list[torch.Tensor]:
    """Lists of numbers as tensors (T,) of one dtype, for an empty list has none of its own."""
    whole = all(isinstance(item, int) for value in values for item in value)
    return [_tensor_of(value, torch.int64 if whole else torch.float64, place) for value in values]


def _tensor_of(numbers: list[Any], dtype: torch.dtype, place: str) -> torch.Tensor:
    try:
        return torch.tensor(numbers, dtype=dtype)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise CollateError(f"{place} holds a number too large for {dtype}; make it text or a float") from error


def _pad_value(value: float, dtype: torch.dtype, place: str) -> float:
    if dtype == torch.bool:
        fits = value in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        fits = True
    else:
        limits = torch.iinfo(dtype)
        fits = float(value).is_integer() and limits.min <= value <= limits.max
    if not fits:
        raise CollateError(f"{place}: pad_value {value} is not a value of {dtype}")
    return value
