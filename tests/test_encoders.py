"""Scaling down while packing: what changes, what must not, and what is said about it."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from packer.encoders import Resize
from packer.errors import BadImageError, UsageError

SHORT = 32


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def smooth(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture without detail, so that any two good resamplers agree; no two corners are alike."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [
        255 * x / width,
        255 * y / height,
        127 + 127 * np.sin(3 * x / width + 2 * y / height),
        255 - 200 * x / width,
    ]
    stack = np.stack(planes[: len(Image.new(mode, (1, 1)).getbands())], axis=-1).astype(np.uint8)
    return Image.frombytes(mode, (width, height), stack.tobytes())


def scaled(data: bytes, field: str = "jpg", **options: int) -> tuple[Image.Image, str]:
    new, what = Resize(SHORT, **options).encode(field, memoryview(data))
    assert new is not None, what
    image = Image.open(io.BytesIO(new))
    image.load()
    return image, what


def far(a: Image.Image, b: Image.Image) -> float:
    assert (a.size, a.mode) == (b.size, b.mode)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).mean())


def png16(pixels: np.ndarray, colour_type: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow writes for grey alone."""
    height, width = pixels.shape[:2]

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(120, 80), (80, 120), (97, 61), (33, 500), (1000, 40), (33, 33)])
def test_the_short_side_gets_the_size_asked_for_and_the_proportion_stays(width: int, height: int) -> None:
    image, what = scaled(encoded(smooth(width, height), "PNG"), "png")
    assert min(image.size) == SHORT
    assert max(image.size) == round(max(width, height) * SHORT / min(width, height))
    assert far(image, smooth(width, height).resize(image.size, Image.Resampling.LANCZOS)) < 1
    assert what == "scaled down to a short side of 32 (PNG)"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_goes_into_the_pixels_and_the_exif_block_goes_away(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    exif[271] = "a camera"
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    data = encoded(smooth(150, 100), kind, exif=exif, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright.size == ((100, 150) if orientation > 4 else (150, 100))
    image, _ = scaled(data, kind.lower())
    assert far(image, upright.resize(image.size, Image.Resampling.LANCZOS)) < 2
    assert image.getexif().get(274, 1) == 1
    assert 271 not in image.getexif()


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("L", "JPEG", {"quality": 95}),
        ("RGB", "JPEG", {"quality": 95}),
        ("RGB", "JPEG", {"quality": 95, "progressive": True}),
        ("CMYK", "JPEG", {"quality": 95}),
        ("L", "PNG", {}),
        ("LA", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("RGB", "WEBP", {"quality": 95}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("RGB", "BMP", {}),
        ("L", "TIFF", {}),
        ("CMYK", "TIFF", {}),
    ],
)
def test_mode_and_format_stay_what_they_were(mode: str, kind: str, options: dict[str, Any]) -> None:
    data = encoded(smooth(400, 300, mode), kind, **options)
    image, _ = scaled(data, kind.lower())
    before = Image.open(io.BytesIO(data))
    assert (image.mode, image.format) == (before.mode, kind)
    assert far(image, before.resize(image.size, Image.Resampling.LANCZOS)) < 2.5


def test_jpeg_is_written_as_stated() -> None:
    data = encoded(smooth(400, 300), "JPEG", quality=100, subsampling="4:4:4")
    image, what = scaled(data, jpeg_quality=92)
    expected = Image.open(io.BytesIO(encoded(smooth(8, 8), "JPEG", quality=92, subsampling="4:2:0")))
    assert image.quantization == expected.quantization  # type: ignore[attr-defined]
    assert image.layer[0][1:3] == (2, 2)  # type: ignore[attr-defined]
    assert what == "scaled down to a short side of 32 (JPEG, quality 92, 4:2:0)"


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_stays_as_lossless_as_it_was(lossless: bool) -> None:
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), np.uint8))
    new, what = Resize(SHORT).encode("webp", memoryview(encoded(noisy, "WEBP", lossless=lossless)))
    assert new is not None
    assert (b"VP8L" in new) == lossless
    assert ("quality 92" in what) == (not lossless)


def test_sixteen_bit_grey_keeps_its_depth_and_never_wraps_around() -> None:
    edge = np.zeros((64, 96), np.uint16)
    edge[:, 48:] = 65535
    image, _ = scaled(encoded(Image.fromarray(edge), "PNG"), "png")
    got = np.asarray(image, np.int64)
    assert image.mode.startswith("I")
    assert (got[:, :20] < 2000).all()
    assert (got[:, 28:] > 63000).all()
    ramp = (np.arange(64 * 96) * 10).reshape(64, 96).astype(np.uint16)
    image, _ = scaled(encoded(Image.fromarray(ramp), "PNG"), "png")
    assert len(np.unique(np.asarray(image))) > 1000  # 8 bits would leave 256


@pytest.mark.parametrize(("colour_type", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_sixteen_bit_colour_is_kept_because_pillow_cannot_hold_it(colour_type: int, channels: int) -> None:
    data = png16(np.zeros((64, 64, channels), np.uint16), colour_type)
    assert Resize(SHORT).encode("png", memoryview(data)) == (None, "kept as they were: 16-bit colour")


def test_palettes_become_rgb_but_not_in_masks() -> None:
    numbers = np.zeros((90, 120), np.uint8)
    numbers[20:70, 30:90] = 7
    mask = Image.frombytes("P", numbers.shape[::-1], numbers.tobytes())
    mask.putpalette([value for i in range(256) for value in (i * 37 % 256, i * 91 % 256, i * 53 % 256)])
    data = encoded(mask, "PNG")
    for field in ("mask.png", "seg.png", "label.png", "a_mask.png", "segmentation.png"):
        image, _ = scaled(data, field)
        assert image.mode == "P", field
        assert set(np.unique(np.asarray(image))) == {0, 7}
        assert image.getpalette()[:24] == mask.getpalette()[:24]  # type: ignore[index]
    for field in ("png", "segment.png", "labelled.png"):
        assert scaled(data, field)[0].mode == "RGB", field


def test_transparent_colours_become_alpha() -> None:
    data = encoded(smooth(90, 60).quantize(16), "PNG", transparency=3)
    assert scaled(data, "png")[0].mode == "RGBA"


def test_the_colour_profile_is_kept() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        image, _ = scaled(encoded(smooth(100, 80), kind, icc_profile=profile), kind.lower())
        assert image.info.get("icc_profile") == profile, kind


def animation(kind: str) -> bytes:
    frames = [smooth(80, 60).rotate(turn) for turn in (0, 90, 180)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(smooth(32, 90), "JPEG"), "short side at most 32"),
        (encoded(smooth(1, 5000), "PNG"), "short side at most 32"),
        (encoded(smooth(5000, 1), "PNG"), "short side at most 32"),
        (animation("WEBP"), "several frames"),
        (animation("PNG"), "several frames"),
        (animation("TIFF"), "several frames"),
        (animation("GIF"), "format GIF"),
        (encoded(smooth(80, 60), "GIF"), "format GIF"),
        (encoded(smooth(80, 60), "PPM"), "format PPM"),
    ],
)
def test_what_is_kept_is_kept_byte_for_byte_and_counted(data: bytes, why: str) -> None:
    assert Resize(SHORT).encode("jpg", memoryview(data)) == (None, f"kept as they were: {why}")


def test_only_pictures_are_touched() -> None:
    data = encoded(smooth(100, 80), "PNG")
    assert Resize(SHORT).encode("json", memoryview(data)) == (None, "")
    assert Resize(SHORT).encode("npy", memoryview(b"whatever")) == (None, "")


@pytest.mark.parametrize("cut", [0, 10, 300, 2000])
def test_what_does_not_decode_is_an_error_not_a_silent_copy(cut: int) -> None:
    data = encoded(Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 120, 3), np.uint8)), "JPEG")
    with pytest.raises(BadImageError, match="does not decode"):
        Resize(SHORT).encode("jpg", memoryview(data[:cut]))


def test_equal_input_gives_equal_bytes_in_any_process() -> None:
    data = memoryview(encoded(smooth(200, 150), "JPEG"))
    encoder = Resize(SHORT)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.encode("jpg", data) == encoder.encode("jpg", data)
    assert copy.fingerprint() == encoder.fingerprint()


def test_the_fingerprint_tells_options_apart() -> None:
    prints = {Resize(a, b).fingerprint() for a, b in ((32, 92), (33, 92), (32, 91))}
    assert len(prints) == 3


@pytest.mark.parametrize(("short_side", "quality"), [(0, 92), (-1, 92), (8, 0), (8, 101)])
def test_impossible_options_are_refused(short_side: int, quality: int) -> None:
    with pytest.raises(UsageError):
        Resize(short_side, quality)
