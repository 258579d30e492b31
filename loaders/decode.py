"""Encoded bytes to pixels, no more of them than asked for.

JPEG goes through simplejpeg (libjpeg-turbo, without the GIL); everything else, and whatever simplejpeg refuses,
through Pillow, whose result is the reference. What a picture becomes:

- Alpha is dropped, as Pillow's `convert("RGB")` and torchvision's `ImageFolder` do: the colours under
  transparent pixels show. A palette is looked up first.
- Colour profiles and gamma are ignored. CMYK and YCCK come out the right way round.
- 16-bit grey is scaled by 1/257 for "RGB", and keeps its bits for mode=None and "I;16". Pillow has no 16-bit
  colour: such files come as 8 bits.
- Without `orient`, pixels come as they are stored; only TIFFs Pillow always turns upright.
- The first frame stands for an animation, a burst or a stereo pair.
- Truncated files raise; faults that Pillow repairs in silence are repaired.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image

from loaders import pillow_decode, seekable
from loaders.geometry import Crop, stored_crop, upright
from loaders.resample import Affine, Pixels, Span, affine, resize, spans, store, stored_size
from packer import jpeg
from packer.errors import BadImageError, UsageError
from packer.imaging import MAX_PIXELS

Buffer = bytes | memoryview

__all__ = ["MAX_PIXELS", "Affine", "Picture", "affine", "decode_crop_into", "decode_image", "decode_many_into",
           "image_size"]


class Picture:
    """An encoded picture: its size now, its pixels when asked for.

    Attributes:
        height: rows; of the upright picture with `orient`, else as stored.
        width: columns, likewise.

    >>> import io
    >>> stream = io.BytesIO()
    >>> Image.new("RGB", (40, 30), "red").save(stream, "jpeg")
    >>> picture, out = Picture(stream.getvalue()), torch.empty(3, 8, 8, dtype=torch.uint8)
    >>> picture.crop_into(Crop(0, 10, 30, 30), out)
    >>> picture.height, picture.width, out[:, 4, 4].tolist()
    (30, 40, [254, 0, 0])
    """

    __slots__ = ("_data", "_header", "_image", "_orientation", "_raw", "height", "width")

    def __init__(self, data: Buffer, *, orient: bool = False, max_pixels: int = MAX_PIXELS) -> None:
        """Read the header.

        Args:
            data: an encoded image.
            orient: turn the picture as its EXIF orientation says; sizes and crops are then those of the
                upright picture.
            max_pixels: refuse larger pictures.

        Raises:
            BadImageError: no image, or one larger than `max_pixels`.
        """
        self._data = data
        self._image: Image.Image | None = None
        self._raw = _raw_pixels(data)
        self._header = _plain_jpeg(data) if self._raw is None else None
        if self._raw is not None:
            self._orientation = 1
            height, width = self._raw.shape[:2]
            pillow_decode.check_pixels(height, width, max_pixels)
        elif self._header is None:
            self._image = pillow_decode.open_image(data, max_pixels)
            self._orientation = pillow_decode.exif_orientation(self._image) if orient else 1
            height, width = self._image.height, self._image.width
        else:
            self._orientation = jpeg.orientation(data, self._header) if orient else 1
            height, width = self._header.height, self._header.width
            pillow_decode.check_pixels(height, width, max_pixels)
        self.height, self.width = stored_size((height, width), self._orientation)

    def pixels(self, mode: str | None = "RGB") -> npt.NDArray[Any]:
        """All of it, as `decode_image` describes."""
        if self._raw is not None and mode in ("RGB", None):
            return self._raw.copy()
        stored = self._decode_jpeg(mode) if self._header is not None else None
        if stored is None:
            stored = pillow_decode.to_array(self._opened(), mode)
        if self._orientation == 1:
            return stored
        return np.ascontiguousarray(upright(stored, self._orientation))

    def crop_into(
        self, crop: Crop, out: torch.Tensor, *, normalize: Affine | None = None, dct_scaling: bool = True
    ) -> None:
        """Decode what the crop needs and resize it into `out`, as `decode_crop_into` describes."""
        if not (crop.top >= 0 <= crop.left and crop.height > 0 < crop.width
                and crop.top + crop.height <= self.height + 1e-6 and crop.left + crop.width <= self.width + 1e-6):
            raise UsageError(f"{crop} does not lie in a picture of {self.height}×{self.width}")
        size = stored_size((out.shape[1], out.shape[2]), self._orientation)
        height, width = stored_size((self.height, self.width), self._orientation)
        crop_stored = stored_crop(crop, self._orientation, height, width)
        part: Pixels | None = None
        if self._header is not None:
            scale = _dct_scale(self._header, crop_stored, size) if dct_scaling else 1
            rows, columns = spans(crop_stored, size, (-(-height // scale), -(-width // scale)), scale)
            part = self._decode_jpeg_part(self._header, rows, columns, scale)
        if part is None:
            rows, columns = spans(crop_stored, size, (height, width))
            whole = self._raw if self._raw is not None else pillow_decode.to_array(self._opened(), "RGB")
            part = whole[rows.start : rows.stop, columns.start : columns.stop]
        store(resize(part, rows, columns, size), out,
              orientation=self._orientation, flip=crop.flip, normalize=normalize)

    def _opened(self) -> Image.Image:
        if self._image is None:
            self._image = pillow_decode.open_image(self._data, self.height * self.width)
        return self._image

    def _decode_jpeg(self, mode: str | None) -> Pixels | None:
        """The whole JPEG, or None where Pillow has to look at it."""
        grey = mode == "L" or (mode is None and self._header is not None and self._header.components == 1)
        if mode not in ("RGB", "L", None):
            return None
        try:
            into = _odd_empty(self.height * self.width * (1 if grey else 3))
            pixels: Pixels = simplejpeg.decode_jpeg(self._data, "GRAY" if grey else "RGB", buffer=into)
        except ValueError:
            return None
        return pixels

    def _decode_jpeg_part(self, header: jpeg.JpegHeader, rows: Span, columns: Span, scale: int) -> Pixels | None:
        """The spans' pixels of the JPEG at 1/scale, or None where Pillow has to look at it."""
        piece = seekable.cut(self._data, header, rows.start * scale, columns.start * scale,
                             rows.stop * scale, columns.stop * scale, scale=scale)
        pixels: Pixels | None = None
        top, left = rows.start, columns.start
        if piece is not None:
            pixels = _decode_scaled(piece.data, piece.height, piece.width, scale, strict=piece.whole)
            top, left = top - piece.top // scale, left - piece.left // scale
        if pixels is None:
            top, left = rows.start, columns.start
            pixels = _decode_scaled(self._data, header.height, header.width, scale, strict=True)
        if pixels is None:
            return None
        return pixels[top : top + rows.stop - rows.start, left : left + columns.stop - columns.start]


_RAW = re.compile(rb"P6 (\d{1,9}) (\d{1,9}) 255\n")


def _raw_pixels(data: Buffer) -> Pixels | None:
    """The pixels (H, W, 3) of a binary PPM, as they lie: a view, nothing is decoded. None for all else."""
    match = _RAW.match(data[:32])
    if match is None:
        return None
    width, height = int(match[1]), int(match[2])
    if len(data) - match.end() != height * width * 3:
        return None  # Pillow says what is wrong
    return np.frombuffer(data, np.uint8, offset=match.end()).reshape(height, width, 3)


def _plain_jpeg(data: Buffer) -> jpeg.JpegHeader | None:
    """The header of a JPEG that simplejpeg decodes as Pillow does (so not CMYK), else None."""
    if not jpeg.is_jpeg(data):
        return None
    try:
        header = jpeg.parse_header(data)
    except BadImageError:
        return None  # Pillow may be more forgiving; if not, its error is as good
    return header if header.components in (1, 3) else None


_DCT_ROOM = 1.5
"""How many times as large as the result a scaled picture must stay. For crops of photographs of 2 megapixels to
224 pixels, 1.5 gives a mean difference of 0.3 levels to Pillow in 7.8 ms, 1 gives 0.75 in 7.0, 2 gives 0.16 in 8.3
and no scaling 0.00 in 10.1; at 500×375 pixels all of them take the same time."""


def _dct_scale(header: jpeg.JpegHeader, crop: Crop, size: tuple[int, int]) -> int:
    """1, 2, 4 or 8: by how much the decoder may shrink the picture on the way to a crop of `size`."""
    # Below 8 pixels two scales give the same size, and the decoder could choose the other.
    if header.height < 8 or header.width < 8:
        return 1
    room = min(crop.height / size[0], crop.width / size[1]) / _DCT_ROOM
    return 1 if room < 2 else 2 if room < 4 else 4 if room < 8 else 8


def _odd_empty(size: int) -> Pixels:
    """Bytes for decoded pixels, (size,) uint8 and not initialised, at an odd address.

    libjpeg-turbo writes rows that begin at a multiple of 32 bytes past the cache, which whoever reads them next pays
    for: 46 µs against 36 for a picture of 64×64, 470 against 440 for a crop of 300×250.
    """
    return np.empty(size + 1, np.uint8)[1:]  # numpy's memory begins at a multiple of 16


class _Scratch(threading.local):
    """Each thread's memory for pixels that are used up before the next picture; it stays in the cache."""

    LARGEST = 16 << 20  # bytes that a thread may keep: 5 megapixels

    def __init__(self) -> None:
        self._bytes = _odd_empty(0)

    def of(self, size: int) -> Pixels:
        if size > self.LARGEST:
            return _odd_empty(size)
        if size > len(self._bytes):
            self._bytes = _odd_empty(size)
        return self._bytes


_scratch = _Scratch()


def _decode_scaled(data: jpeg.Buffer, height: int, width: int, scale: int, *, strict: bool) -> Pixels | None:
    """RGB at 1/scale of a JPEG of this size, (⌈H/scale⌉, ⌈W/scale⌉, 3); None where simplejpeg refuses.

    The pixels are valid until the thread decodes the next picture.
    """
    rows, columns = -(-height // scale), -(-width // scale)
    least = (rows, columns) if scale > 1 else (0, 0)
    into = _scratch.of(rows * columns * 3)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB", False, False, *least, scale, into, strict)
    except ValueError:
        return None
    return pixels


def image_size(data: Buffer, *, orient: bool = False) -> tuple[int, int]:
    """(height, width) of an encoded image, from its header.

    Args:
        data: an encoded image.
        orient: the size after turning it as its EXIF orientation says.

    Raises:
        BadImageError: no image, or one larger than `MAX_PIXELS`.
    """
    picture = Picture(data, orient=orient)
    return picture.height, picture.width


def decode_image(
    data: Buffer, *, mode: str | None = "RGB", orient: bool = False, max_pixels: int = MAX_PIXELS
) -> npt.NDArray[Any]:
    r"""Decode a whole image.

    Args:
        data: an encoded image of any format that Pillow knows.
        mode: "RGB" or "L": uint8, C = 3 or 1. "I;16": uint16, C = 1, 8-bit samples times 257. None: as the
            file holds them (palette indices, 16 bits, alpha, CMYK); 1-bit pixels become 0 and 255.
        orient: turn the picture as its EXIF orientation says.
        max_pixels: refuse larger pictures, before any memory is taken.

    Returns:
        (H, W, C), a new writable array.

    Raises:
        BadImageError: no image, damaged, truncated, or larger than `max_pixels`.
        UsageError: another mode.

    Example:
        >>> decode_image(b"P5 2 1 255 \x07\x09").tolist()
        [[[7, 7, 7], [9, 9, 9]]]
    """
    return Picture(data, orient=orient, max_pixels=max_pixels).pixels(mode)


def decode_crop_into(
    data: Buffer,
    box: Crop,
    out: torch.Tensor,
    *,
    normalize: Affine | None = None,
    orient: bool = False,
    dct_scaling: bool = True,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Decode no more of a picture than a crop needs, and resize it into a tensor.

    Args:
        data: an encoded image.
        box: the crop, in pixels of the (with `orient`, upright) picture.
        out: (3, h, w) on the CPU, any strides: uint8, or a float type.
        normalize: for float output, `pixel * scale + bias`; without it floats are 0 to 255.
        orient: turn the picture as its EXIF orientation says.
        dct_scaling: let the JPEG decoder halve (or quarter …) a picture whose crop then is still 1.5 times as
            large as `out`: a mean difference of 0.3 levels in such crops, for a fifth of their time.
        max_pixels: refuse larger pictures.

    Raises:
        BadImageError: no image, damaged, truncated, or larger than `max_pixels`.
        UsageError: the crop reaches over the picture's edge.
    """
    Picture(data, orient=orient, max_pixels=max_pixels).crop_into(
        box, out, normalize=normalize, dct_scaling=dct_scaling)


def decode_many_into(datas: Sequence[Buffer], out: torch.Tensor, *, normalize: Affine | None = None) -> None:
    """Decode pictures of one size, uncropped: the fast path for small ones.

    Pictures of 64×64 take 9 µs (uint8) or 15 µs (float32, normalised) above the 31 of the decoder alone.

    Args:
        datas: B encoded images, each exactly h×w as stored.
        out: (B, 3, h, w) on the CPU, any strides: uint8, or a float type.
        normalize: for float output, `pixel * scale + bias`; without it floats are 0 to 255.

    Raises:
        BadImageError: no image, damaged, truncated, or of another size; the message names its place in `datas`.
    """
    height, width = out.shape[2:]
    group = max(1, min(len(datas), _GROUP_PIXELS // max(1, height * width)))
    interleaved = _odd_empty(group * height * width * 3).reshape(group, height, width, 3)
    planes = torch.empty((group, 3, height, width), dtype=torch.uint8)
    for start in range(0, len(datas), group):
        part = out[start : start + group]
        for i in range(len(part)):
            _decode_exactly(datas[start + i], interleaved[i], start + i)
        if part.dtype == torch.uint8:
            np.copyto(part.numpy(), interleaved[: len(part)].transpose(0, 3, 1, 2))
            continue
        np.copyto(planes.numpy()[: len(part)], interleaved[: len(part)].transpose(0, 3, 1, 2))
        part.copy_(planes[: len(part)])
        if normalize is not None:
            part.mul_(normalize.scale).add_(normalize.bias)


_GROUP_PIXELS = 8 * 64 * 64
"""As many pictures are handled at once as keep the float pixels, 12 bytes each, in the second-level cache."""


def _decode_exactly(data: Buffer, into: Pixels, place: int) -> None:
    """Decode a picture of the very size of `into` (H, W, 3)."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in ("CMYK", "YCCK") and (height, width) == into.shape[:2]:
            simplejpeg.decode_jpeg(data, "RGB", False, False, 0, 0, 1, into)
            return
    except ValueError:
        pass
    try:
        pixels = decode_image(data)
        if pixels.shape != into.shape:
            raise BadImageError(f"{pixels.shape[1]}×{pixels.shape[0]} pixels among pictures of "
                                f"{into.shape[1]}×{into.shape[0]}; crop or resize them with a transform")
    except BadImageError as error:
        raise BadImageError(f"picture {place} of the batch: {error}") from error
    into[:] = pixels
