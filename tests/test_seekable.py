"""Seekable JPEG: pieces equal the full decode, transcoding changes no pixel, and the rest is left alone."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import shutil
import struct
import subprocess
from collections import Counter
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from loaders.decode import decode_crop_into, decode_image
from loaders.geometry import Crop
from loaders.seekable import Piece, cut, has_restart
from loaders.transforms import TrainCrop, sample_rng
from packer import jpeg
from packer.errors import BadImageError, MissingToolError
from packer.jpeg import parse_header
from packer.seekable import SeekableJpeg, jpegtran_path, make_seekable, seekable_or_reason

needs_jpegtran = pytest.mark.skipif(
    shutil.which("jpegtran") is None, reason="needs jpegtran (apt install libjpeg-turbo-progs)")


def noisy(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """(H, W, 3): blotches and noise, so that a pixel in the wrong place or interpolated otherwise shows."""
    rng = np.random.default_rng(seed)
    blotches = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(blotches).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (smooth + rng.integers(-40, 41, smooth.shape)).clip(0, 255).astype(np.uint8)


def encode(pixels: np.ndarray[Any, Any], sampling: str = "420", interval: int = 0, quality: int = 90) -> bytes:
    """A JPEG of this chroma sampling with a restart marker every `interval` MCUs."""
    if sampling == "Gray":
        pixels = pixels[..., :1]
    space = "Gray" if sampling == "Gray" else "RGB"
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, space, sampling)
    if interval == 0:
        return bytes(data)
    return subprocess.run(["jpegtran", "-restart", f"{interval}B"], input=data, capture_output=True, check=True).stdout


def by_pillow(pixels: np.ndarray[Any, Any], kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def decode_scaled(data: Any, height: int, width: int, scale: int, *, strict: bool = True) -> np.ndarray[Any, Any]:
    least = (-(-height // scale), -(-width // scale)) if scale > 1 else (0, 0)
    pixels = simplejpeg.decode_jpeg(data, "RGB", False, False, *least, scale, None, strict)
    assert pixels.shape == (-(-height // scale), -(-width // scale), 3)
    return pixels


def check_random_pieces(data: bytes, rng: random.Random, count: int = 6) -> Counter[str]:
    """Cut random regions at random scales; each piece's pixels must equal those of the full decode."""
    header = parse_header(data)
    kinds: Counter[str] = Counter()
    for _ in range(count):
        scale = rng.choice([1, 1, 2, 4, 8]) if min(header.height, header.width) >= 8 else 1
        full = decode_scaled(data, header.height, header.width, scale)
        top, left = rng.randrange(full.shape[0]), rng.randrange(full.shape[1])
        bottom, right = rng.randint(top + 1, full.shape[0]), rng.randint(left + 1, full.shape[1])
        piece = cut(data, header, top * scale, left * scale, bottom * scale, right * scale, scale=scale)
        if piece is None:
            kinds["none"] += 1
            continue
        kinds["splice" if piece.whole else "cut below"] += 1
        part = decode_scaled(piece.data, piece.height, piece.width, scale, strict=piece.whole)
        y, x = top - piece.top // scale, left - piece.left // scale
        assert piece.top % scale == 0 == piece.left % scale
        assert y >= 0 <= x
        assert np.array_equal(part[y : y + bottom - top, x : x + right - left], full[top:bottom, left:right])
    return kinds


# --- cutting ----------------------------------------------------------------------------------


@needs_jpegtran
@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411", "Gray"])
def test_pieces_equal_the_full_decode(sampling: str) -> None:
    rng = random.Random(sampling)
    kinds: Counter[str] = Counter()
    for number in range(70):
        longest = rng.choice([40, 200, 300])
        height, width = rng.randint(1, longest), rng.randint(1, longest)
        row = parse_header(encode(noisy(height, width), sampling)).mcus_per_row
        divisors = [n for n in range(1, row + 1) if row % n == 0]
        interval = rng.choice([rng.choice(divisors), row * rng.randint(1, 4), rng.randint(1, 2 * row), 0])
        data = encode(noisy(height, width, number), sampling, interval, rng.choice([60, 90, 98]))
        kinds += check_random_pieces(data, rng)
    assert kinds["splice"] > 60
    assert kinds["cut below"] > 20


@pytest.mark.parametrize("options", [{"restart_marker_rows": 1}, {"restart_marker_rows": 3}, {},
                                     *({"restart_marker_blocks": n} for n in (1, 4, 7))])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_pieces_of_jpegs_that_pillow_wrote(options: dict[str, int], subsampling: int) -> None:
    rng = random.Random(1)
    for number, (height, width) in enumerate([(97, 256), (131, 64), (256, 131), (9, 200)]):
        data = by_pillow(noisy(height, width, number), subsampling=subsampling, **options)
        check_random_pieces(data, rng, 12)


@settings(max_examples=60)
@given(st.data())
def test_crops_are_the_same_with_and_without_markers(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(20, 150)), data.draw(st.integers(20, 150))
    pixels, orientation = noisy(height, width), data.draw(st.integers(1, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    subsampling = data.draw(st.integers(0, 2))
    plain = by_pillow(pixels, exif=exif, subsampling=subsampling)
    marked = by_pillow(pixels, exif=exif, subsampling=subsampling, restart_marker_blocks=1)
    size = data.draw(st.sampled_from([8, 24, 100]))
    for one in (plain, marked):
        upright = decode_image(one, orient=True)
        crop = TrainCrop(size).box(*upright.shape[:2], sample_rng(0, 0, data.draw(st.integers(0, 10**6))))
        made, expected = torch.empty(2, 3, size, size, dtype=torch.uint8)
        decode_crop_into(one, crop, made, orient=True, dct_scaling=False)
        decode_crop_into(by_pillow(upright, "PNG"), crop, expected)
        assert (made.int() - expected.int()).abs().max() <= 2  # a mirrored resize rounds otherwise
    assert has_restart(marked)
    assert not has_restart(plain)


def crop_pixels(data: bytes) -> np.ndarray[Any, Any]:
    out = torch.empty(3, 40, 50, dtype=torch.uint8)
    decode_crop_into(data, Crop(70, 90, 40, 50), out)
    return out.numpy()


@pytest.fixture
def marked() -> bytes:
    return by_pillow(noisy(160, 192), restart_marker_blocks=2, subsampling=2)


def test_a_piece_of_a_good_file_holds_little_more_than_the_crop(marked: bytes) -> None:
    piece = cut(marked, parse_header(marked), 70, 90, 110, 140)
    assert isinstance(piece, Piece)
    assert piece.whole
    assert piece.height <= 64
    assert piece.width <= 96
    assert len(piece.data) < len(marked) / 3


def test_markers_out_of_turn_are_no_reason_to_fail(marked: bytes) -> None:
    expected = crop_pixels(marked)
    at = parse_header(marked).scan_at
    first = re.compile(rb"\xff\xd1").search(marked, at)
    assert first is not None
    damaged = marked[: first.start()] + b"\xff\xd5" + marked[first.end() :]
    piece = cut(damaged, parse_header(damaged), 70, 90, 110, 140)
    assert piece is not None
    assert not piece.whole  # not a splice
    assert crop_pixels(damaged).shape == expected.shape  # libjpeg's own recovery, as in Pillow


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_an_error_even_if_the_crop_is_there(marked: bytes, share: float) -> None:
    header = parse_header(marked)
    part = marked[: header.scan_at + int((len(marked) - header.scan_at) * share)]
    assert cut(part, header, 0, 0, 16, 16) is None
    with pytest.raises(BadImageError):
        crop_pixels(part)


def test_what_follows_the_image_does_not_matter(marked: bytes) -> None:
    assert np.array_equal(crop_pixels(marked + b"\xff\xd8 a second picture \xff\xd9"), crop_pixels(marked))
    assert np.array_equal(crop_pixels(marked + b"garbage"), crop_pixels(marked))


@pytest.mark.parametrize("kind", ["progressive", "cmyk", "png", "not divisible", "no markers"])
def test_where_it_does_not_apply_the_crop_is_right_all_the_same(kind: str) -> None:
    pixels = noisy(160, 192)
    if kind == "cmyk":
        stream = io.BytesIO()
        Image.fromarray(pixels).convert("CMYK").save(stream, "JPEG", restart_marker_blocks=2)
        data = stream.getvalue()
    elif kind == "png":
        data = by_pillow(pixels, "PNG")
    else:
        data = by_pillow(pixels, progressive=kind == "progressive",
                         restart_marker_blocks={"not divisible": 7, "progressive": 2}.get(kind, 0))
    assert not has_restart(data)
    assert np.array_equal(crop_pixels(data), decode_image(data)[70:110, 90:140].transpose(2, 0, 1))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_never_breaks_more_than_the_picture(damage: list[tuple[int, int]]) -> None:
    data = bytearray(by_pillow(noisy(60, 64), restart_marker_blocks=2))
    for place, value in damage:
        data[place % len(data)] = value
    out = torch.empty(3, 8, 8, dtype=torch.uint8)
    with contextlib.suppress(BadImageError):
        TrainCrop(8).into(bytes(data), out, sample_rng(0, 0, len(damage)))
    assert has_restart(bytes(data)) in (True, False)


def test_orientation_offsets_are_read_within_the_file() -> None:
    data = by_pillow(noisy(16, 16), exif=b"Exif\0\0II*\0\xf0\xff\xff\xff")
    assert jpeg.orientation(data, parse_header(data)) == 1


# --- transcoding ------------------------------------------------------------------------------


@needs_jpegtran
@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411", "Gray"])
@pytest.mark.parametrize("size", [(375, 500), (333, 376), (63, 97), (8, 8), (1, 1)])
def test_a_transcoded_jpeg_has_the_same_pixels_and_is_seekable(sampling: str, size: tuple[int, int]) -> None:
    data = encode(noisy(*size), sampling)
    made, reason = seekable_or_reason(data)
    if made is None:
        assert reason == "would grow by more than 3%"
        assert max(size) < 10
        return
    assert reason == ""
    with Image.open(io.BytesIO(data)) as before, Image.open(io.BytesIO(made)) as after:
        assert np.array_equal(np.asarray(before), np.asarray(after))
    assert has_restart(made)
    assert len(made) <= 1.03 * len(data)
    assert make_seekable(data) == made  # the same bytes each time
    assert seekable_or_reason(made) == (None, "seekable already")


@needs_jpegtran
def test_the_interval_is_about_32_pixels_and_divides_the_row() -> None:
    for sampling, width in (("444", 504), ("420", 512), ("422", 480), ("Gray", 320)):
        header = parse_header(make_seekable(encode(noisy(320, width), sampling)) or b"")
        assert 16 <= header.restart_interval * header.mcu_width <= 48
        assert header.mcus_per_row % header.restart_interval == 0


@needs_jpegtran
def test_a_prime_row_gets_an_interval_of_one_row_rather_than_grow() -> None:
    data = encode(noisy(300, 47 * 8), "444", quality=30)
    header = parse_header(make_seekable(data) or b"")
    assert header.restart_interval == 47


@needs_jpegtran
def test_metadata_is_kept() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    data = by_pillow(noisy(200, 256), exif=exif, icc_profile=profile, comment=b"a comment", dpi=(72, 72))
    made = make_seekable(data)
    assert made is not None
    with Image.open(io.BytesIO(data)) as before, Image.open(io.BytesIO(made)) as after:
        assert dict(before.getexif()) == dict(after.getexif())
        assert {**before.info} == {**after.info}


def cases_left_alone() -> dict[str, tuple[bytes, str]]:
    good = by_pillow(noisy(64, 96))
    cmyk = io.BytesIO()
    Image.fromarray(noisy(64, 96)).convert("CMYK").save(cmyk, "JPEG")
    arithmetic = bytearray(good)
    arithmetic[good.index(b"\xff\xc0") + 1] = 0xC9
    zero = bytearray(good)
    struct.pack_into(">H", zero, good.index(b"\xff\xc0") + 5, 0)
    return {
        "png": (by_pillow(noisy(64, 96), "PNG"), "not a JPEG"),
        "empty": (b"", "not a JPEG"),
        "progressive": (by_pillow(noisy(64, 96), progressive=True), "progressive"),
        "cmyk": (cmyk.getvalue(), "CMYK"),
        "arithmetic": (bytes(arithmetic), "not baseline (arithmetic, lossless, 12-bit or several scans)"),
        "no height": (bytes(zero), "not baseline (arithmetic, lossless, 12-bit or several scans)"),
        "second picture": (good + good, "bytes after the end of the image (such as a second picture)"),
        "trailing zero": (good + b"\0", "bytes after the end of the image (such as a second picture)"),
        "truncated": (good[:-9], "truncated, or several scans"),
        "header only": (good[:200], "damaged header"),
        "seekable": (by_pillow(noisy(64, 96), restart_marker_blocks=2), "seekable already"),
        "tiny": (by_pillow(noisy(8, 8)), ""),
    }


@needs_jpegtran
@pytest.mark.parametrize("name", cases_left_alone())
def test_what_is_left_alone_and_why(name: str) -> None:
    data, expected = cases_left_alone()[name]
    made, reason = seekable_or_reason(data)
    assert reason == expected
    assert (made is None) == bool(expected)


@needs_jpegtran
def test_damage_that_jpegtran_reports_is_left_alone() -> None:
    data = bytearray(by_pillow(noisy(64, 96)))
    at = parse_header(bytes(data)).scan_at
    data[at + 300 : at + 900] = bytes(600)
    made, reason = seekable_or_reason(bytes(data))
    assert made is None
    assert reason == "refused by jpegtran as damaged"


def test_a_missing_jpegtran_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    jpegtran_path.cache_clear()
    try:
        with pytest.raises(MissingToolError, match="apt install libjpeg-turbo-progs") as caught:
            SeekableJpeg().check_available()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    finally:
        jpegtran_path.cache_clear()


@needs_jpegtran
def test_the_encoder_counts_what_it_did() -> None:
    encoder = SeekableJpeg()
    good = by_pillow(noisy(64, 96))
    made, what = encoder.encode("jpg", memoryview(good))
    assert made == make_seekable(good)
    assert what == "made seekable"
    assert encoder.encode("cls", memoryview(b"7")) == (None, "")
    assert encoder.encode("png", memoryview(b"\x89PNG")) == (None, "kept as they were: not a JPEG")
    assert "jpegtran" in encoder.fingerprint() or "libjpeg" in encoder.fingerprint()
