"""What may change payloads while packing: scaling down. Everything else is packed byte for byte."""

from __future__ import annotations

import io
import re
import struct
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from packer.errors import BadImageError, UsageError
from packer.sample import is_image_field

if TYPE_CHECKING:
    from PIL.Image import Image

    from packer.shard import Encoder

_KEPT = "kept as they were: "

#: Words in a field's name that say its pixels are numbers of something: a mean of two would be a third.
_MASK_WORD = re.compile(
    r"\b(annotations?|depth|gt|instances?|labels?|masks?|objects?|panoptic|seg|segmentation|semantic|targets?)\b"
)


@dataclass(frozen=True)
class Resize:
    """Scale pictures down to a short side; see `packer.shard.Encoder`.

    Each keeps its file format: JPEG is written at `jpeg_quality`, 4:2:0, and lossy WebP at the same
    quality; all others are lossless. 16-bit grey, alpha, CMYK and the colour profile are kept;
    palettes become RGB, but not in masks (fields named `mask.png`, `seg.png` and the like), which are
    scaled without mixing pixels. EXIF orientation is applied to the pixels and the EXIF block dropped.

    Pictures that are small enough, animations, 16-bit colour (which Pillow cannot hold) and formats that
    cannot be written keep their very bytes. Coordinates in sidecar files are not scaled.

    Attributes:
        short_side: pixels.
        jpeg_quality: of libjpeg, 1–100. 92 keeps the mean error of a 256-pixel picture below 1.5 of 255 levels.
    """

    short_side: int
    jpeg_quality: int = 92

    def __post_init__(self) -> None:
        if self.short_side < 1:
            raise UsageError(f"--resize must be at least 1 pixel, got {self.short_side}")
        if not 1 <= self.jpeg_quality <= 100:
            raise UsageError(f"--jpeg-quality is from 1 to 100, got {self.jpeg_quality}")

    def fingerprint(self) -> str:
        """Options and library versions: another libjpeg may give other bytes."""
        from PIL import __version__, features

        libraries = ", ".join(
            f"{name} {features.version(name)}" for name in ("libjpeg_turbo", "jpg", "zlib", "libtiff", "webp")
        )
        return f"resize {self.short_side} q{self.jpeg_quality} 4:2:0 lanczos; Pillow {__version__}, {libraries}"

    def check_available(self) -> None:
        """Pillow is always there."""

    def encode(self, field: str, data: memoryview) -> tuple[bytes | None, str]:
        """See `packer.shard.Encoder.encode`."""
        import PIL.Image

        if not is_image_field(field):
            return None, ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged EXIF block does not damage pixels
            try:
                image = PIL.Image.open(io.BytesIO(data))
                if reason := self._why_keep(image):
                    return None, _KEPT + reason
                size = self._size(image.size)
                image.draft(image.mode, (2 * size[0], 2 * size[1]))  # JPEG: decode no more than is needed
                image.load()
            except (*_DECODE_ERRORS, PIL.Image.DecompressionBombError) as error:
                raise BadImageError(f"does not decode: {error}") from error
            mask = _MASK_WORD.search(field.replace("_", "-")) is not None
            small = _upright(_resample(image if mask else _with_plain_pixels(image), size, mask=mask), image)
            try:
                return self._write(small, image, lossless=_is_lossless_webp(data))
            except (OSError, ValueError) as error:
                return None, f"{_KEPT}{image.mode} {image.format} cannot be written ({error})"

    def _why_keep(self, image: Image) -> str:
        if image.format not in _WRITTEN_AS:
            return f"format {image.format}"
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            return "several frames"
        if min(image.size) <= self.short_side:
            return f"short side at most {self.short_side}"
        tiles = getattr(image, "tile", None)
        if tiles and ";16" in str(tiles[0][3]) and not image.mode.startswith("I"):
            return "16-bit colour"
        return ""

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        scale = self.short_side / min(width, height)
        return max(1, round(width * scale)), max(1, round(height * scale))

    def _write(self, small: Image, image: Image, *, lossless: bool) -> tuple[bytes, str]:
        kind = _WRITTEN_AS[str(image.format)]
        quality = ""
        options: dict[str, Any] = {"icc_profile": image.info.get("icc_profile")}
        if kind == "JPEG":
            options |= {"quality": self.jpeg_quality, "subsampling": "4:2:0", "optimize": True}
            quality = f", quality {self.jpeg_quality}, 4:2:0"
        elif kind == "WEBP" and lossless:
            options |= {"lossless": True, "exact": True}
        elif kind == "WEBP":
            options |= {"quality": self.jpeg_quality}
            quality = f", quality {self.jpeg_quality}"
        elif kind == "TIFF":
            options |= {"compression": "tiff_adobe_deflate"}
        for name in ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"):
            small.info.pop(name, None)
        out = io.BytesIO()
        small.save(out, kind, **options)
        return out.getvalue(), f"scaled down to a short side of {self.short_side} ({kind}{quality})"


#: Pillow's name of a format it has read → of the one to write.
_WRITTEN_AS = {"JPEG": "JPEG", "MPO": "JPEG", "PNG": "PNG", "WEBP": "WEBP", "TIFF": "TIFF", "BMP": "BMP"}
_DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error)


def _with_plain_pixels(image: Image) -> Image:
    """Pixels that can be mixed: no palette, no colour that means 'transparent', no single bits."""
    if "transparency" in image.info or image.mode == "PA":
        return image.convert("RGBA")
    if image.mode == "1":
        return image.convert("L")
    return image.convert("RGB") if image.mode == "P" else image


def _resample(image: Image, size: tuple[int, int], *, mask: bool) -> Image:
    import PIL.Image

    if mask:
        return image.resize(size, PIL.Image.Resampling.NEAREST)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Lanczos overshoots at edges: in 32 bits nothing wraps around.
        wide = np.asarray(image.convert("I").resize(size, PIL.Image.Resampling.LANCZOS))
        return PIL.Image.fromarray(wide.clip(0, 65535).astype(np.uint16))
    return image.resize(size, PIL.Image.Resampling.LANCZOS, reducing_gap=3.0)


def _upright(small: Image, image: Image) -> Image:
    """`small`, turned as the EXIF orientation of `image` says (CIPA DC-008, tag 274)."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(image.getexif().get(274, 1))
    return small if turn is None else small.transpose(turn)


def _is_lossless_webp(data: memoryview) -> bool:
    if bytes(data[8:12]) != b"WEBP":
        return False
    at = 12
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind in (b"VP8 ", b"VP8L"):
            return bool(kind == b"VP8L")
        at += 8 + size + size % 2
    return False


@dataclass(frozen=True)
class Chain:
    """Several encoders, each changing what the one before it left; see `packer.shard.Encoder`."""

    encoders: tuple[Encoder, ...]

    def fingerprint(self) -> str:
        """Those of all, in order."""
        return "; then ".join(encoder.fingerprint() for encoder in self.encoders)

    def check_available(self) -> None:
        """Raise if any lacks a program or package."""
        for encoder in self.encoders:
            encoder.check_available()

    def encode(self, field: str, data: memoryview) -> tuple[bytes | None, str]:
        """See `packer.shard.Encoder.encode`."""
        made: bytes | None = None
        said: list[str] = []
        for encoder in self.encoders:
            new, what = encoder.encode(field, data if made is None else memoryview(made))
            made = made if new is None else new
            said += [what] if what else []
        return made, "; then ".join(said)
