"""One sample: read, decoded, transformed. The same values in any engine, worker, rank or resume."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from loaders.arrange import mix
from loaders.arrays import ArrayTransform, Window, cut, first_array
from loaders.decode import Affine, decode_image, decode_many_into, image_size
from loaders.fields import Buffer, check_readable, decode_field
from loaders.foreign import adapt_array
from loaders.geometry import Crop, apply_to_boxes, apply_to_mask
from loaders.neighbours import Neighbours
from loaders.options import TargetKind
from loaders.order import Numbers
from loaders.source import Fetch, Source
from loaders.transforms import Identity, Transform, adapt, sample_rng
from packer import npy
from packer.errors import BadArrayError, BadImageError, PackerError, SampleError, ShardError, UsageError
from packer.sample import is_image_field, is_picture_array

#: Fields that no file holds: the key, the original path, the sample's number, its class.
ABOUT = ("__key__", "__path__", "__index__", "__label__")

_MASK_PREFIXES = ("mask", "seg", "segmentation", "object", "label", "annotation", "target")


def is_ours(transform: Callable[..., Any] | None) -> bool:
    """Whether a transform works from the encoded bytes with a generator of its own (see `loaders.transforms`)."""
    return transform is None or all(hasattr(transform, name) for name in ("into", "box", "output_shape"))


def _is_mask_name(field: str) -> bool:
    return "." in field and field.split(".", 1)[0] in _MASK_PREFIXES


def picture_fields(source: Source, transform: Callable[..., Any] | None = None) -> tuple[str, ...]:
    """The fields that hold the picture itself: `jpg`, `png` …, or failing these `left.jpg`, but never `mask.png`.

    Of a dataset without such pictures, or with a transform for arrays, the CT slices or volumes: `ct.npy`, `vol.npy`.
    """
    arrays = tuple(field for field in source.fields if _is_array_picture(field, transform))
    if isinstance(transform, ArrayTransform):
        return tuple(field for field in arrays if is_picture_array(field)) or arrays[:1]
    images = [field for field in source.fields if is_image_field(field) and not _is_mask_name(field)]
    return tuple(field for field in images if "." not in field) or tuple(images) or arrays


def _is_array_picture(field: str, transform: Callable[..., Any] | None) -> bool:
    if isinstance(transform, ArrayTransform):
        return npy.is_array_field(field) and not _is_mask_name(field)
    return is_picture_array(field)


@dataclass(frozen=True)
class Reads:
    """Readers of some samples' fields, made at once for a whole batch.

    Attributes:
        numbers: the samples.
        fetch: for each name, a reader of each of its alternatives.
        around: for slabs, (n, slices) the samples whose slices make up each; the picture's readers count through them.
    """

    numbers: list[int]
    fetch: Mapping[str, Sequence[Fetch]]
    around: Numbers | None = None

    def read(self, name: str, j: int) -> Buffer | None:
        """The bytes of the j-th sample: of the first alternative of `a;b` that it has."""
        for fetch in self.fetch[name]:
            data = fetch(j)
            if data is not None:
                return data
        return None


class Samples:
    """The samples of a source as values. Picklable, and safe in threads if the transform is ours.

    Args:
        source: where the bytes are.
        fields: what a sample consists of: field names, alternatives (`jpg;png`) and `ABOUT`. None
            for (image, label).
        transform: ours, or any callable that takes a PIL image or a uint8 tensor.
        normalize: (scale, bias) for the picture, or None to leave it uint8.
        targets: for fields beside the picture: `mask` (nearest neighbour, the picture's crop),
            `yolo` or `xyxy` (boxes as text, the picture's crop), `image` (RGB, whole), `stored` (whole, with
            the channels and bits that the file has). Image fields named like a mask (`mask.png`, `seg.png`)
            are masks without being listed.
        seed: decides, with epoch and sample number, all that is random.

    Raises:
        UsageError: a field that the source lacks, or a pickle.
    """

    def __init__(
        self, source: Source, *, fields: Sequence[str] | None = None, transform: Callable[..., Any] | None = None,
        normalize: Affine | None = None, targets: Mapping[str, TargetKind] | None = None, seed: int = 0,
    ) -> None:
        self.source = source
        self.fields = None if fields is None else tuple(fields)
        self.transform = transform
        self.normalize = normalize
        self.seed = seed
        self.ours = is_ours(transform)
        self.picture = self._picture(targets or {})
        self.arrays = self.picture is not None and npy.is_array_field(self.picture.split(";")[0])
        self._check_transform()
        default = Window() if self.arrays else Identity()
        self._crop = cast(Transform, default if transform is None else transform) if self.ours else None
        adapter = adapt_array if self.arrays else adapt
        self._adapted = None if self.ours else adapter(cast(Callable[..., Any], transform))
        self.targets = self._target_kinds(targets or {})
        self.others = tuple(name for name in self.fields or () if name != self.picture)
        self.same_size = self._size_of_all()
        self._slices = self._crop.slices if isinstance(self._crop, ArrayTransform) else 1
        self._neighbours = Neighbours(source) if self._slices > 1 and len(source) else None
        self._array_shape, self.dtype = self._stored_arrays()

    # ------------------------------------------------------------ what is asked for

    def _picture(self, targets: Mapping[str, TargetKind]) -> str | None:
        """The field that the transform applies to: the first image field asked for that is no mask or target."""
        if self.fields is None:
            found = picture_fields(self.source, self.transform)
            if not found:
                raise UsageError(
                    f"the dataset has no pictures (its fields: {', '.join(self.source.fields)}); "
                    "say what a sample consists of with fields=(…)"
                )
            return ";".join(found)
        for name in self.fields:
            for part in () if name in ABOUT else name.split(";"):
                self._check_field(part)
        for_arrays = isinstance(self.transform, ArrayTransform)
        for name in self.fields:
            first = name.split(";")[0]
            if name not in targets and is_image_field(first) and not _is_mask_name(first) and not for_arrays:
                return name
            if name not in targets and _is_array_picture(first, self.transform):
                return name
        return None

    def _check_transform(self) -> None:
        if self.transform is None or not self.ours or self.picture is None:
            return
        for_arrays = isinstance(self.transform, ArrayTransform)
        if self.arrays and not for_arrays:
            raise UsageError(
                f"{type(self.transform).__name__} is for pictures, and {self.picture!r} holds arrays: "
                "take Window(centre, width, crop=RandomCrop(size)) of loaders.transforms"
            )
        if self.arrays and self.normalize is not None:
            raise UsageError("normalize is for 8-bit pictures; a Window gives values in [0, 1]: leave normalize out")

    def _check_field(self, name: str) -> None:
        if name not in self.source.fields:
            known = ", ".join((*self.source.fields, *ABOUT))
            raise UsageError(f"the dataset has no field {name!r}; it has: {known}")
        check_readable(name)

    def _target_kinds(self, given: Mapping[str, TargetKind]) -> dict[str, TargetKind]:
        for name in given:
            if name not in (self.fields or ()):
                raise UsageError(f"targets names {name!r}, which is not among fields={self.fields}")
        kinds = dict(given)
        for name in self.fields or ():
            if name != self.picture and name not in ABOUT and is_image_field(name):
                kinds.setdefault(name, "mask" if _is_mask_name(name) else "image")
            elif self.arrays and npy.is_array_field(name) and _is_mask_name(name):
                kinds.setdefault(name, "mask")
        return kinds

    def _size_of_all(self) -> tuple[int, int, int] | None:
        """(3, height, width) if pictures are taken as they are and the index says that all are of one size."""
        if self.picture is None or self._crop != Identity() or len(self.source) == 0:
            return None
        heights, widths = self.source.column("height"), self.source.column("width")
        height, width = int(heights[0]), int(widths[0])
        if height < 1 or width < 1 or np.any(heights != height) or np.any(widths != width):
            return None
        return 3, height, width

    def _stored_arrays(self) -> tuple[tuple[int, ...] | None, torch.dtype]:
        """The shape that all arrays come out with, None where it differs; and the type of the picture in a batch.

        The first array speaks for the others where the index says that they are of one size, or takes no more than
        as many bytes of each; each is compared when it is read.
        """
        if not (self.arrays and isinstance(self._crop, ArrayTransform)):
            return None, torch.uint8 if self.normalize is None else torch.float32
        first, alike = first_array(self.source, cast(str, self.picture))
        if first is None:
            return None, torch.float32
        try:
            fixed = alike or (self._crop.crop is not None and len(first.shape) == 2)
            return self._crop.shape_of(first.shape) if fixed else None, self._crop.dtype_of(first.dtype)
        except BadArrayError:  # each sample says it of itself
            return None, torch.float32

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """(3, height, width), or (C, H, W) of slices and (C, D, H, W) of volumes, where all come out the same size."""
        if self._crop is None or self.picture is None:
            return None
        return self._array_shape if self.arrays else self.same_size or self._crop.output_shape

    @property
    def read_fields(self) -> tuple[str, ...]:
        """The source's fields that samples are made of."""
        names = [name for name in (self.picture, *self.others) if name is not None and name not in ABOUT]
        return tuple(dict.fromkeys(part for name in names for part in name.split(";")))

    # ------------------------------------------------------------ reading

    def reads(self, numbers: Numbers) -> Reads:
        """Readers of everything that these samples need."""
        names = [name for name in (self.picture, *self.others) if name is not None and name not in ABOUT]
        if self._neighbours is None:
            fetch = {name: [self.source.fetcher(numbers, part) for part in name.split(";")] for name in names}
            return Reads(numbers.tolist(), fetch)
        around = self._neighbours.around(numbers, self._slices, repeat=getattr(self._crop, "edges", "") == "repeat")
        which = {name: around.ravel() if name == self.picture else numbers for name in names}
        fetch = {name: [self.source.fetcher(which[name], part) for part in name.split(";")] for name in names}
        return Reads(numbers.tolist(), fetch, around)

    def picture_bytes(self, reads: Reads, j: int) -> Buffer:
        """The encoded picture of the j-th sample."""
        picture = cast(str, self.picture)
        data = reads.read(picture, j)
        if data is None:
            raise BadImageError(f"the sample has no field {picture!r}")
        return data

    def _picture_data(self, reads: Reads, j: int) -> Any:
        """What the transform works on: the encoded picture, or those of a slab, None for air."""
        if reads.around is None:
            return self.picture_bytes(reads, j)
        whose = reads.around[j].tolist()
        return [None if whose[k] < 0 else self.picture_bytes(reads, j * self._slices + k) for k in range(self._slices)]

    def sample(self, reads: Reads, j: int, epoch: int, out: torch.Tensor | None = None) -> Any:
        """The j-th sample: (image, label), or a dict by field.

        Args:
            reads: from `reads`.
            j: position within it.
            epoch: decides, with seed and number, the random crop.
            out: where the picture goes, (3, H, W) uint8 or, normalised, float32; it is then absent
                from the result. Only with a transform of ours that has an `output_shape`.

        Raises:
            SampleError: it cannot be read or decoded; names shard, key and field; the cause is chained.
        """
        number, name = reads.numbers[j], self.picture or ""
        try:
            image, crop, data = self._image(reads, j, epoch, out)
            if self.fields is None:
                return None if out is not None else (image, int(self.source.column("label")[number]))
            values: dict[str, Any] = {}
            for name in self.fields:
                if name == self.picture:
                    if out is None:
                        values[name] = image
                elif name in ABOUT:
                    values[name] = self._about(name, number)
                else:
                    values[name] = self._value(name, reads, j, crop, data)
            return values
        except Exception as error:
            raise self._error(number, name, error) from error

    def picture_into(self, reads: Reads, j: int, epoch: int, out: torch.Tensor) -> None:
        """`sample` where only the picture is wanted: nothing but the decoder costs time."""
        try:
            self._into(self._picture_data(reads, j), out, reads.numbers[j], epoch)
        except Exception as error:
            raise self._error(reads.numbers[j], self.picture or "", error) from error

    def _error(self, number: int, name: str, error: Exception) -> SampleError:
        if isinstance(error, ShardError):  # it names the place already
            return SampleError(str(error), self.source.key(number), number)
        field = next((part for part in name.split(";") if part in self.source.fields), name)
        text = str(error) if isinstance(error, PackerError) else f"{type(error).__name__}: {error}"
        theirs = self._crop is None and name == self.picture and not isinstance(error, PackerError | OSError)
        damaged = not theirs and not isinstance(error, UsageError)
        text = self.source.complain(number, field, f"the transform raised {text}" if theirs else text, damaged=damaged)
        return SampleError(text, self.source.key(number), number)

    # ------------------------------------------------------------ the picture

    def _image(
        self, reads: Reads, j: int, epoch: int, out: torch.Tensor | None
    ) -> tuple[Any, Crop | None, Buffer | None]:
        """(image, its crop, its bytes); all None where no picture is asked for."""
        if self.picture is None:
            return None, None, None
        data, number = self._picture_data(reads, j), reads.numbers[j]
        if self._crop is None:
            with _seeded(self.seed, epoch, number):
                return self._normalized(cast(Any, self._adapted)(data)), None, data
        shape = self.output_shape
        if shape is None and isinstance(self._crop, ArrayTransform):
            return *self._crop.take(data, sample_rng(self.seed, epoch, number), self.dtype), data
        if shape is None:
            return self._normalized(self._crop(data, sample_rng(self.seed, epoch, number))), None, data
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        return out, self._into(data, out, number, epoch), data

    def _into(self, data: Buffer, out: torch.Tensor, number: int, epoch: int) -> Crop:
        if self.same_size is not None:  # a transform would squeeze a picture that is not what the index says
            decode_many_into([data], out.unsqueeze(0), normalize=self.normalize)
            return Crop(0, 0, *self.same_size[1:])
        crop = cast(Transform, self._crop)
        return crop.into(data, out, sample_rng(self.seed, epoch, number), normalize=self.normalize)

    def _normalized(self, image: Any) -> Any:
        if self.normalize is None:
            return image
        is_tensor = isinstance(image, torch.Tensor)
        if is_tensor and image.dtype == torch.uint8 and (image.ndim < 3 or image.shape[-3] != 3):
            raise UsageError(
                f"normalize works on (3, H, W) pixels, the transform gives {tuple(image.shape)}: pass normalize=None "
                "(or False) and normalise in the transform, or let the transform end with three channels"
            )
        if not is_tensor or image.dtype != torch.uint8:
            got = f"a {image.dtype} tensor" if is_tensor else type(image).__name__
            raise UsageError(
                f"normalize works on uint8 pixels, the transform gives {got}: pass normalize=None (or False) "
                "and normalise in the transform, or let the transform end with uint8"
            )
        scale, bias = self.normalize
        return image * scale + bias

    # ------------------------------------------------------------ everything else

    def _about(self, name: str, number: int) -> Any:
        if name == "__key__":
            return self.source.key(number)
        if name == "__index__":
            return number
        if name == "__label__":
            return int(self.source.column("label")[number])
        fields = (self.picture or self.source.fields[0]).split(";")
        return next((path for path in (self.source.path(number, field) for field in fields) if path), "")

    def _value(self, name: str, reads: Reads, j: int, crop: Crop | None, picture: Buffer | None) -> Any:
        data = reads.read(name, j)
        kind = self.targets.get(name)
        if data is None:
            return None
        if kind is None:
            return decode_field(name.split(";")[0], data)
        if kind == "image":
            return torch.from_numpy(decode_image(data)).permute(2, 0, 1)
        if kind == "stored":
            return torch.from_numpy(decode_image(data, mode=None)).permute(2, 0, 1)
        shape = self.output_shape
        if kind == "mask" and npy.is_array_field(name.split(";")[0]):
            mask = decode_field(name.split(";")[0], data)
            if self.arrays:
                return np.ascontiguousarray(cut(mask, crop))
            return mask if crop is None or shape is None else apply_to_mask(mask, crop, (shape[1], shape[2]))
        if kind == "mask":
            mask = decode_image(data, mode=None)
            mask = mask[..., 0] if mask.ndim == 3 and mask.shape[-1] == 1 else mask
            return mask if crop is None or shape is None else apply_to_mask(mask, crop, (shape[1], shape[2]))
        boxes = parse_boxes(data)
        if crop is None or shape is None:
            return boxes
        size = image_size(cast(Buffer, picture), orient=bool(getattr(self._crop, "orient", False)))
        return apply_to_boxes(boxes, crop, image_size=size, size=(shape[1], shape[2]), layout=kind)[0]


def parse_boxes(data: Buffer) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Boxes as label files hold them, one a line: class and four numbers → (N, 5) float32.

    >>> parse_boxes(b"0 0.5 0.5 0.2 0.1").shape, parse_boxes(b"").shape
    ((1, 5), (0, 5))
    """
    rows = [line.split() for line in bytes(data).decode("ascii").splitlines() if line.strip()]
    for row in rows:
        if len(row) not in (5, 6):  # the sixth is a confidence
            raise ValueError(
                f"a line of boxes is class and four coordinates, here are {len(row)} numbers"
                + (" (a polygon?)" if len(row) > 6 else "")
            )
    return np.array([row[:5] for row in rows], np.float32).reshape(len(rows), 5)


@contextlib.contextmanager
def _seeded(seed: int, epoch: int, number: int) -> Iterator[None]:
    """The global generators as this sample has them in this epoch; afterwards as they were."""
    word = mix(mix(mix(seed) ^ epoch) ^ number)
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word >> 1)  # torch.manual_seed would also queue a seed for each GPU
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
