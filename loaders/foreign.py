"""Other people's transforms: what they want to be given, and what they give back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image

from loaders.decode import Buffer, decode_image
from packer import npy
from packer.errors import UsageError

Wanted = Literal["pil", "tensor", "image=", "array", "bytes"]


# Steps of torchvision's pipelines. v2 would pass a tensor through the first two unscaled.
_FROM_PIL = frozenset(("ToTensor", "PILToTensor"))
_ON_TENSORS = frozenset(("Normalize", "ConvertImageDtype", "RandomErasing", "LinearTransformation", "ToPILImage"))


def wanted_input(transform: Callable[..., Any]) -> Wanted:
    """What a callable wants to be given.

    The first rule that fits: albumentations → "image="; torchvision with a step that converts from PIL → "pil";
    torchvision v2, or v1 with a step that only tensors can take → "tensor"; other torchvision → "pil"; other
    `torch.nn.Module` → "tensor"; a parameter that must be given as `image` → "image="; the annotation of the first
    parameter; "pil", as torchvision's `ImageFolder` hands out.
    """
    function = transform.func if isinstance(transform, functools.partial) else transform
    packages = {cls.__module__.partition(".")[0] for cls in type(function).__mro__}
    if "albumentations" in packages:
        return "image="
    module = type(function).__module__
    if module.startswith("torchvision.transforms"):
        steps = {type(step).__name__ for step in _steps(function)}
        if steps & _FROM_PIL:
            return "pil"
        return "tensor" if ".v2" in module or steps & _ON_TENSORS else "pil"
    if isinstance(function, torch.nn.Module):
        return "tensor"
    return _annotated_input(function)


def _steps(transform: Any) -> Iterator[Any]:
    """The transform and, where it is made of others (`Compose`, `RandomApply` …), those."""
    yield transform
    inner = getattr(transform, "transforms", None)
    if isinstance(inner, (list, tuple, torch.nn.ModuleList)):
        for step in inner:
            yield from _steps(step)


def _annotated_input(function: Callable[..., Any]) -> Wanted:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return "pil"
    if any(p.name == "image" and p.kind is p.KEYWORD_ONLY for p in parameters):
        return "image="
    annotation = parameters[0].annotation if parameters else inspect.Parameter.empty
    # Under `from __future__ import annotations` it is the text; a class is known by its name too.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", str(annotation))
    if "Tensor" in name:
        return "tensor"
    if "ndarray" in name or "NDArray" in name:
        return "array"
    return "bytes" if name in ("bytes", "memoryview", "Buffer") else "pil"


def adapt(
    transform: Callable[..., Any], *, wants: Wanted | None = None, orient: bool = False
) -> Callable[[Buffer], Any]:
    r"""Let a foreign callable take encoded bytes.

    Args:
        transform: torchvision v1 or v2, albumentations, or any callable of one picture.
        wants: what it is given: "pil" (an RGB `PIL.Image`), "tensor" (uint8, (3, H, W)), "array" (uint8,
            (H, W, 3)), "image=" (the array, by keyword; of the dict it gives, "image" is taken), "bytes". None: see
            `wanted_input`.
        orient: turn the picture as its EXIF orientation says, before.

    Returns:
        A picklable callable (if `transform` is) from encoded bytes to whatever the transform returns; PIL images
        and (H, W, C) arrays become tensors (C, H, W), so that they can be batched.

    Raises:
        UsageError: not a callable, or another word for `wants`.

    Example:
        >>> adapt(lambda image: image.size)(b"P5 2 1 255 \x07\x09")
        (2, 1)
    """
    if not callable(transform):
        raise UsageError(f"a transform is a callable, not {type(transform).__name__}")
    if wants is not None and wants not in get_args(Wanted):
        raise UsageError(f"wants is one of {', '.join(get_args(Wanted))}, not {wants!r}")
    return functools.partial(_apply, transform, wants or wanted_input(transform), orient)


def _apply(transform: Callable[..., Any], wants: Wanted, orient: bool, data: Buffer) -> Any:
    if wants == "bytes":
        return _as_tensor(transform(data))
    pixels = decode_image(data, orient=orient)
    if wants == "pil":
        return _as_tensor(transform(Image.fromarray(pixels)))
    if wants == "tensor":
        return _as_tensor(transform(torch.from_numpy(pixels).permute(2, 0, 1).contiguous()))
    if wants == "array":
        return _as_tensor(transform(pixels))
    return _as_tensor(transform(image=pixels)["image"])


def _as_tensor(result: Any) -> Any:
    """Pictures that are no tensors yet, as tensors with channels first; anything else as it is."""
    if isinstance(result, Image.Image):
        result = np.array(result if result.mode != "P" else result.convert("RGB"))
        result = result[..., None] if result.ndim == 2 else result
    if isinstance(result, np.ndarray) and result.ndim == 3:
        return torch.from_numpy(np.ascontiguousarray(result.transpose(2, 0, 1)))
    return result


def adapt_array(transform: Callable[..., Any]) -> Callable[[Buffer], Any]:
    """Let a foreign callable take the bytes of a CT slice or volume.

    Args:
        transform: MONAI, albumentations, or any callable of one array.

    Returns:
        A picklable callable (if `transform` is) from `.npy` or `.npy.zst` bytes to whatever the transform returns. It
        is given an array (H, W) or (D, H, W) in Hounsfield units as stored; where `wanted_input` says "tensor", a
        tensor with a channel axis before it.
    """
    return functools.partial(_apply_to_array, transform, wanted_input(transform))


def _apply_to_array(transform: Callable[..., Any], wants: Wanted, data: Buffer) -> Any:
    if wants == "bytes":
        return transform(data)
    array = npy.decode(data)
    array = array if array.flags.writeable else array.copy()
    if wants == "tensor":
        return transform(torch.from_numpy(array)[None])
    return transform(image=array)["image"] if wants == "image=" else transform(array)
