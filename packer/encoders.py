"""What may change payloads while packing: scaling down. Everything else is packed byte for byte."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from packer.errors import BadImageError
from packer.sample import is_image_field

_KEPT = "kept as they were: "


@dataclass(frozen=True)
class Resize:
    """Scale pictures down to a short side; see `packer.shard.Encoder`.

    EXIF orientation is applied to the pixels and the EXIF block dropped; a colour profile is kept.
    JPEG becomes JPEG (quality as given, 4:2:0), everything else lossless PNG or WebP of its own kind.
    Pictures that are small enough, and animations, keep their very bytes.

    Attributes:
        short_side: pixels.
        jpeg_quality: of libjpeg, 1–100. 92 keeps the mean error of a 256-pixel picture below 1.5 of 255 levels.
    """

    short_side: int
    jpeg_quality: int = 92

    def fingerprint(self) -> str:
        """Options and library versions: another libjpeg may give other bytes."""
        from PIL import __version__, features

        return (
            f"resize {self.short_side} q{self.jpeg_quality} 4:2:0 lanczos, Pillow {__version__}, "
            f"libjpeg {features.version('jpg')}, zlib {features.version('zlib')}"
        )

    def check_available(self) -> None:
        """Pillow is always there."""

    def encode(self, field: str, data: memoryview) -> tuple[bytes | None, str]:
        """See `packer.shard.Encoder.encode`."""
        from PIL import Image

        if not is_image_field(field):
            return None, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data)) as image:
                    return self._encode(image, mask="mask" in field or "label" in field or "seg" in field)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise BadImageError(f"does not decode: {error}") from error

    def _encode(self, image: object, *, mask: bool) -> tuple[bytes | None, str]:
        from PIL import Image, ImageOps

        if not isinstance(image, Image.Image):
            raise TypeError(type(image))
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            return None, _KEPT + "animations"
        if min(image.size) <= self.short_side:
            return None, _KEPT + f"short side at most {self.short_side}"
        if image.format not in ("JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF"):
            return None, _KEPT + f"format {image.format}"
        kind = {"MPO": "JPEG"}.get(image.format, image.format)
        profile = image.info.get("icc_profile")
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("P", "PA", "1") and not mask:
            upright = upright.convert(
                "RGBA"
                if "transparency" in upright.info or upright.mode == "PA"
                else "L"
                if upright.mode == "1"
                else "RGB"
            )
        if kind == "JPEG" and upright.mode == "CMYK":
            upright, profile = upright.convert("RGB"), None  # a CMYK profile says nothing about RGB
        width, height = upright.size
        scale = self.short_side / min(width, height)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        wide = upright.mode.startswith("I")  # 16 bits: only nearest works on I;16 itself, floats keep every value
        if mask:
            small = upright.resize(size, Image.Resampling.NEAREST)
        elif wide:
            small = (
                upright.convert("F").resize(size, Image.Resampling.LANCZOS).point(lambda v: v * 1 + 0.5).convert("I")
            )
            small = small.convert("I;16")
        else:
            small = upright.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        out = io.BytesIO()
        if kind == "JPEG":
            small.save(out, "JPEG", quality=self.jpeg_quality, subsampling="4:2:0", optimize=True, icc_profile=profile)
        elif kind == "WEBP":
            small.save(out, "WEBP", lossless=True, icc_profile=profile, exif=b"")
        elif kind == "TIFF":
            small.save(out, "TIFF", compression="tiff_deflate", icc_profile=profile)
        else:
            small.save(out, kind, icc_profile=profile) if kind == "PNG" else small.save(out, kind)
        return out.getvalue(), f"scaled down to a short side of {self.short_side} ({kind}" + (
            f", quality {self.jpeg_quality}, 4:2:0)" if kind == "JPEG" else ")"
        )
