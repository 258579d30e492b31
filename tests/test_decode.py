"""Decoding: the tricky corpus, parity with Pillow, and what must be an error."""

from __future__ import annotations

import io
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from loaders.decode import Affine, affine, decode_crop_into, decode_image, decode_many_into, image_size
from loaders.geometry import Crop
from loaders.transforms import EvalCrop, TrainCrop, sample_rng
from packer.errors import BadImageError, UsageError

ROOT = Path(__file__).resolve().parent.parent
PHOTOS = sorted((ROOT / "scripts" / "sample-pictures").rglob("*.jpg"))[:8]

# --- helpers ----------------------------------------------------------------------------------


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def photo(number: int = 0) -> Image.Image:
    with Image.open(PHOTOS[number]) as image:
        return image.convert("RGB")


def with_orientation(image: Image.Image, orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, kind, exif=exif, **options)


def by_pillow(data: bytes, crop: Crop, size: int) -> np.ndarray[Any, Any]:
    """Decode, crop, resize and mirror with Pillow: (3, size, size) int."""
    with Image.open(io.BytesIO(data)) as image:
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        made = image.convert("RGB").crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if crop.flip:
        made = ImageOps.mirror(made)
    return np.asarray(made).transpose(2, 0, 1).astype(int)


def cropped(data: bytes, crop: Crop, size: int = 64, **options: Any) -> np.ndarray[Any, Any]:
    out = torch.empty(3, size, size, dtype=torch.uint8)
    decode_crop_into(data, crop, out, **options)
    return out.numpy().astype(int)


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.abs(a - b).mean())


# --- the tricky corpus ------------------------------------------------------------------------


class Case(NamedTuple):
    path: str
    data: bytes
    status: str
    stored: tuple[int, int] | None  # (height, width)
    upright: tuple[int, int] | None
    mode: str
    corners: str
    corners_upright: str


@pytest.fixture(scope="module")
def corpus() -> list[Case]:
    """Every file of the corpus that should be an image or an error, with what is known of it."""
    with tarfile.open(ROOT / "tests" / "data" / "tricky.tar.gz") as tar:
        return list(_cases(tar))


def _cases(tar: tarfile.TarFile) -> Iterator[Case]:
    members = {member.name.encode("utf-8", "surrogateescape"): member for member in tar}
    table = tar.extractfile("tricky/EXPECT.tsv")
    assert table is not None
    head, *rows = (line.split("\t") for line in table.read().decode().splitlines())
    for cells in rows:
        row = dict(zip(head, cells, strict=False))
        member = members[b"tricky/" + unquote_to_bytes(row["path"])]
        extension = row["path"].rpartition(".")[2].lower()
        if not member.isreg() or row["status"] == "skip" or extension in ("json", "cls", "txt", "svg"):
            continue
        file = tar.extractfile(member)
        assert file is not None

        def size(prefix: str, row: dict[str, str] = row) -> tuple[int, int] | None:
            width = row.get(f"{prefix}width" if not prefix else f"{prefix}w", "")
            height = row.get(f"{prefix}height" if not prefix else f"{prefix}h", "")
            return (int(height), int(width)) if width else None

        yield Case(row["path"], file.read(), row["status"], size(""), size("upright_"), row.get("mode", ""),
                   row.get("corners", ""), row.get("corners_upright", ""))


COLOURS = {"R": (230, 20, 20), "G": (20, 200, 20), "B": (20, 20, 230), "Y": (240, 230, 20)}


def corners_of(pixels: np.ndarray[Any, Any], expected: str) -> str:
    """The colours of the corner blocks, as the corpus spells them, the nearest of its four (or of their luminances)."""
    height, width = pixels.shape[:2]
    found = ""
    for y, x in ((3, 3), (3, width - 4), (height - 4, 3), (height - 4, width - 4)):
        pixel = pixels[y, x].astype(int)
        if expected == "grey":
            luminances = {name: [(299 * r + 587 * g + 114 * b) // 1000] * 3 for name, (r, g, b) in COLOURS.items()}
            found += min(luminances, key=lambda name: abs(pixel - luminances[name]).sum())
        else:
            found += min(COLOURS, key=lambda name: abs(pixel - COLOURS[name]).sum())
    return found


def complaint(case: Case) -> str:
    """What is wrong with how a case decodes; '' where all is well."""
    try:
        pixels, upright = decode_image(case.data), decode_image(case.data, orient=True)
        kept = decode_image(case.data, mode=None)
    except BadImageError as error:
        return f"did not decode: {error}" if case.status == "ok" else ""
    if case.status == "error":
        return f"decoded to {pixels.shape}"
    if case.stored is None:
        return ""
    if (*case.stored, 3) != pixels.shape or (*case.stored,) != image_size(case.data):
        return f"shape {pixels.shape}"
    if case.upright not in (None, upright.shape[:2]) or image_size(case.data, orient=True) != upright.shape[:2]:
        return f"upright shape {upright.shape}"
    channels = {"RGB": 3, "CMYK": 4, "RGBA": 4, "LA": 2}.get(case.mode, 1)
    if kept.shape[2] != channels or kept.dtype != (np.uint16 if case.mode == "I;16" else np.uint8):
        return f"mode {case.mode} kept as {kept.shape} {kept.dtype}"
    for name, expected, got in (("corners", case.corners, pixels), ("upright corners", case.corners_upright, upright)):
        if expected and corners_of(got, expected) != ("RGBY" if expected == "grey" else expected):
            return f"{name} {corners_of(got, expected)}, not {expected}"
    return ""


def test_every_case_of_the_corpus_decodes_as_its_table_says(corpus: list[Case]) -> None:
    assert len(corpus) > 90
    assert {case.path: said for case in corpus if (said := complaint(case))} == {}


def test_every_case_of_the_corpus_can_be_cropped_or_is_an_error(corpus: list[Case]) -> None:
    wrong = []
    for case in corpus:
        for transform in (TrainCrop(32), EvalCrop(32), TrainCrop(32, orient=True)):
            try:
                made = transform(case.data, sample_rng(0, 0, 1))
            except BadImageError:
                if case.status == "ok":
                    wrong.append((case.path, transform, "did not decode"))
                continue
            if case.status == "error" or made.shape != (3, 32, 32):
                wrong.append((case.path, transform, f"gave {tuple(made.shape)}"))
    assert wrong == []


# --- whole images -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"quality": 90}, {"subsampling": 0}, {"progressive": True},
                                     {"restart_marker_rows": 1}])
def test_jpeg_equals_pillow(options: dict[str, Any]) -> None:
    data = encode(photo(), **options)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode_image(data), np.asarray(image.convert("RGB")))
    assert np.array_equal(decode_image(memoryview(data)), decode_image(data))


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGB"), ("PNG", "L"), ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"),
                                            ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "CMYK"), ("WEBP", "RGB"),
                                            ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "I;16"), ("TIFF", "F")])
def test_without_a_mode_the_file_s_own_samples_come(kind: str, mode: str) -> None:
    image = Image.fromarray(np.arange(6, dtype=np.uint16).reshape(2, 3) * 9999) if mode == "I;16" else (
        photo().resize((30, 20)).convert(mode))
    data = encode(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as read:
        expected = np.asarray(read)
    got = decode_image(data, mode=None)
    assert got.dtype == expected.dtype
    assert np.array_equal(got.squeeze(), expected)
    assert got.ndim == 3


def test_one_bit_pixels_are_black_and_white() -> None:
    data = encode(Image.fromarray(np.array([[True, False]])), "PNG")
    assert decode_image(data, mode=None).tolist() == [[[255], [0]]]
    assert decode_image(data).tolist() == [[[255] * 3, [0] * 3]]


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    data = encode(Image.fromarray(values), "PNG")
    scaled = np.round(values / 257).astype(np.uint8)
    assert np.array_equal(decode_image(data), np.repeat(scaled[..., None], 3, 2))
    assert np.array_equal(decode_image(data, mode="L")[..., 0], scaled)
    for mode in ("I;16", None):
        kept = decode_image(data, mode=mode)
        assert kept.dtype == np.uint16
        assert np.array_equal(kept[..., 0], values)


def test_8_bit_pixels_fill_the_range_of_16_bits() -> None:
    data = encode(Image.fromarray(np.array([[0, 1, 255]], np.uint8)), "PNG")
    assert decode_image(data, mode="I;16")[0, :, 0].tolist() == [0, 257, 65535]


def test_floats_have_no_range_to_scale() -> None:
    data = encode(Image.fromarray(np.array([[0.5, 7.0]], np.float32)), "TIFF")
    assert decode_image(data, mode=None)[0, :, 0].tolist() == [0.5, 7.0]
    with pytest.raises(BadImageError, match="mode=None"):
        decode_image(data)


def test_alpha_is_dropped_and_a_palette_looked_up() -> None:
    image = Image.fromarray(np.array([[[9, 8, 7, 0], [1, 2, 3, 255]]], np.uint8))
    assert decode_image(encode(image, "PNG")).tolist() == [[[9, 8, 7], [1, 2, 3]]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8))
    palette = palette.convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    data = encode(palette, "PNG", transparency=bytes([0, 255]))
    assert decode_image(data).tolist() == [[[10, 20, 30], [40, 50, 60]]]


def test_cmyk_jpeg_is_no_negative() -> None:
    image = photo()
    pixels = decode_image(encode(image.convert("CMYK"), quality=95))
    assert difference(pixels.astype(int), np.asarray(image).astype(int)) < 3


def test_colour_profiles_are_ignored() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert np.array_equal(decode_image(encode(photo(), icc_profile=profile)), decode_image(encode(photo())))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_on_request(kind: str, orientation: int) -> None:
    data = with_orientation(photo().resize((37, 22)), orientation, kind)
    with Image.open(io.BytesIO(data)) as image:
        stored, turned = np.asarray(image), np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(decode_image(data), stored)
    assert np.array_equal(decode_image(data, orient=True), turned)
    assert image_size(data) == stored.shape[:2]
    assert image_size(data, orient=True) == turned.shape[:2]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_always_upright_as_pillow_reads_it(orientation: int) -> None:
    data = with_orientation(photo().resize((37, 22)), orientation, "TIFF")
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image)
    for orient in (False, True):
        assert np.array_equal(decode_image(data, orient=orient), expected)
        assert image_size(data, orient=orient) == expected.shape[:2]


@pytest.mark.parametrize("block", [b"", b"II", b"II*\0\x08\0\0\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff",
                                   b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0"])
def test_a_damaged_exif_block_leaves_the_picture_upright(block: bytes) -> None:
    segment = b"Exif\0\0" + block
    plain = encode(photo().resize((37, 22)))
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + plain[2:]
    assert np.array_equal(decode_image(data, orient=True), decode_image(plain))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="'BGR'"):
        decode_image(encode(photo()), mode="BGR")


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@settings(max_examples=40)
@given(share=st.floats(0, 0.95))
def test_a_truncated_file_is_an_error_wherever_it_is_cut(kind: str, share: float) -> None:
    data = encode(photo().resize((64, 48)), kind)
    part = data[: int(len(data) * share)]
    with pytest.raises(BadImageError):
        decode_image(part)
    with pytest.raises(BadImageError):
        TrainCrop(16)(part, sample_rng(0, 0, int(share * 1000)))


@settings(max_examples=150)
@given(st.data())
def test_damage_is_an_error_or_a_picture_never_another_exception(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"]))
    damaged = bytearray(encode(photo().resize((40, 30)), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = decode_image(bytes(damaged), max_pixels=10**6)
    except BadImageError:
        return
    assert pixels.ndim == 3


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\0" * 4096, b"\x1f\x8b\x08rest", b"text"])
def test_what_is_no_image_is_an_error(data: bytes) -> None:
    for call in (decode_image, image_size):
        with pytest.raises(BadImageError):
            call(data)


def bombs() -> dict[str, bytes]:
    jpeg = bytearray(encode(Image.new("RGB", (8, 8))))
    at = jpeg.index(b"\xff\xc0")
    struct.pack_into(">HH", jpeg, at + 5, 65500, 65500)
    png = encode(Image.new("RGB", (8, 8)), "PNG")
    header = b"IHDR" + struct.pack(">II", 60000, 60000) + png[24:29]
    return {"jpeg": bytes(jpeg), "png": png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]}


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_a_bomb_is_refused_before_memory_is_taken(kind: str) -> None:
    data = bombs()[kind]
    tracemalloc.start()
    try:
        with pytest.raises(BadImageError, match="pixels"):
            decode_image(data)
        with pytest.raises(BadImageError, match="pixels"):
            TrainCrop(8)(data, sample_rng(0, 0, 0))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_pixel_limit_can_be_set() -> None:
    data = encode(Image.new("RGB", (20, 10)))
    assert decode_image(data, max_pixels=200).shape == (10, 20, 3)
    with pytest.raises(BadImageError, match="20×10"):
        decode_image(data, max_pixels=199)


@pytest.mark.parametrize("crop", [Crop(-1, 0, 5, 5), Crop(0, 0, 11, 5), Crop(0, 16, 5, 5), Crop(0, 0, 0, 5),
                                  Crop(float("nan"), 0, 5, 5)])
def test_a_crop_outside_the_picture_is_refused(crop: Crop) -> None:
    with pytest.raises(UsageError, match="10×20"):
        cropped(encode(Image.new("RGB", (20, 10))), crop)


# --- crops ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_crops() -> list[tuple[bytes, Crop]]:
    """Crops of photographs as JPEG and PNG, as training takes them."""
    crops = []
    for i in range(240):
        image = photo(i % len(PHOTOS))
        data = encode(image, "PNG") if i % 6 == 0 else encode(image, quality=90, subsampling=i % 3,
                                                              progressive=i % 5 == 0, restart_marker_rows=i % 4)
        crops.append((data, TrainCrop(64).box(image.height, image.width, sample_rng(1, 0, i))))
    return crops


def test_crops_without_dct_scaling_are_pillow_s(random_crops: list[tuple[bytes, Crop]]) -> None:
    differences = [difference(cropped(data, crop, dct_scaling=False), by_pillow(data, crop, 64))
                   for data, crop in random_crops]
    assert np.mean(differences) < 0.1
    assert np.max(differences) < 0.5


def test_crops_with_dct_scaling_are_nearly_pillow_s() -> None:
    differences = []
    for i in range(len(PHOTOS) * 6):
        image = photo(i % len(PHOTOS))
        # Three times as large, as soft at the scale of a pixel as what cameras give.
        height, width = 3 * image.height, 3 * image.width
        data = encode(image.resize((width, height), Image.Resampling.BICUBIC), quality=92)
        crop = TrainCrop(64).box(height, width, sample_rng(2, 0, i))
        differences.append(difference(cropped(data, crop), by_pillow(data, crop, 64)))
    assert np.median(differences) > 0.1  # most crops are large enough to be scaled
    assert np.mean(differences) < 0.5


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("restart", [0, 1])
def test_crops_of_turned_pictures_are_those_of_the_upright_one(orientation: int, restart: int) -> None:
    image = photo()
    data = with_orientation(image, orientation, quality=95, restart_marker_blocks=4 * restart)
    with Image.open(io.BytesIO(data)) as stored:
        upright = encode(ImageOps.exif_transpose(stored), "PNG")
    height, width = image_size(upright)
    for i in range(6):
        crop = TrainCrop(48).box(height, width, sample_rng(3, 0, i))
        turned = cropped(data, crop, 48, orient=True, dct_scaling=False)
        assert difference(turned, by_pillow(upright, crop, 48)) < 0.3
    centre = EvalCrop(48).box(height, width, sample_rng(3, 0, 0))
    assert difference(cropped(data, centre, 48, orient=True, dct_scaling=False), cropped(upright, centre, 48)) < 0.3


@pytest.mark.parametrize(("width", "height"), [(500, 375), (333, 500), (256, 256), (90, 61), (1000, 300), (61, 1200)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_eval_crop_is_resize_and_centre_crop(width: int, height: int, kind: str) -> None:
    data = encode(photo().resize((width, height)), kind, quality=95)
    with Image.open(io.BytesIO(data)) as image:
        short = 73
        size = (short, int(short * height / width)) if width < height else (int(short * width / height), short)
        left, top = round((size[0] - 64) / 2), round((size[1] - 64) / 2)
        whole = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        expected = np.asarray(whole.crop((left, top, left + 64, top + 64))).transpose(2, 0, 1).astype(int)
    crop = EvalCrop(64, resize=short).box(height, width, sample_rng(0, 0, 0))
    assert difference(cropped(data, crop, dct_scaling=False), expected) < 0.1
    assert difference(cropped(data, crop), expected) < 0.8


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (7, 3), (8, 8), (17, 1)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_extreme_shapes(size: tuple[int, int], kind: str) -> None:
    data = encode(Image.new("RGB", size, (200, 100, 50)), kind, quality=100, subsampling=0)
    for transform in (EvalCrop(24), TrainCrop(24), TrainCrop(1), EvalCrop(1)):
        for number in range(5):
            made = transform(data, sample_rng(0, 0, number))
            assert (made.amax((1, 2)) - made.amin((1, 2))).max() <= 1
            assert abs(made[:, 0, 0].int() - torch.tensor([200, 100, 50])).max() <= 2


# --- where the pixels go ----------------------------------------------------------------------

IMAGENET = affine((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("same_size", [False, True])
def test_every_layout_and_type_gets_the_same_pixels(flip: bool, orientation: int, same_size: bool) -> None:
    data = with_orientation(photo(), orientation)
    crop = Crop(10, 20, 48, 48, flip) if same_size else Crop(3, 5, 70, 90, flip)
    plain = torch.empty(3, 48, 48, dtype=torch.uint8)
    decode_crop_into(data, crop, plain, orient=True)
    last = torch.empty(2, 3, 48, 48, dtype=torch.uint8, memory_format=torch.channels_last)
    decode_crop_into(data, crop, last[1], orient=True)
    assert torch.equal(last[1], plain)
    expected = (plain / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]).view(3, 1, 1)
    for out, tolerance in (
        (torch.empty(3, 48, 48), 1e-5),
        (torch.empty(2, 3, 48, 48, memory_format=torch.channels_last)[1], 1e-5),
        (torch.empty(3, 48, 48, dtype=torch.bfloat16), 0.05),
    ):
        decode_crop_into(data, crop, out, orient=True, normalize=IMAGENET)
        assert (out.float() - expected).abs().max() < tolerance
    decode_crop_into(data, crop, out := torch.empty(3, 48, 48), orient=True)
    assert torch.equal(out, plain.float())


def small_pictures() -> list[bytes]:
    image = photo().resize((24, 16))
    return [encode(image), encode(image.convert("L")), encode(image, "PNG"), encode(image.convert("CMYK")),
            encode(image, progressive=True), encode(image, subsampling=0, restart_marker_blocks=1)] * 9


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("normalize", [None, IMAGENET])
def test_many_small_pictures_are_those_decoded_one_by_one(
    memory_format: torch.memory_format, normalize: Affine | None
) -> None:
    datas = small_pictures()
    expected = torch.stack([torch.from_numpy(decode_image(data)).permute(2, 0, 1) for data in datas])
    out = torch.empty(expected.shape, dtype=torch.uint8 if normalize is None else torch.float32).contiguous(
        memory_format=memory_format)
    decode_many_into(datas, out, normalize=normalize)
    if normalize is not None:
        assert torch.allclose(out, expected * normalize.scale + normalize.bias, atol=1e-5)
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("size", [(24, 17), (23, 16), (12, 8), (48, 32)])
def test_a_picture_of_another_size_among_many_is_named(size: tuple[int, int]) -> None:
    datas = [*small_pictures()[:5], encode(Image.new("RGB", size))]
    with pytest.raises(BadImageError, match=rf"picture 5 .* {size[0]}×{size[1]} pixels among pictures of 24×16"):
        decode_many_into(datas, torch.empty(6, 3, 16, 24, dtype=torch.uint8))


def test_a_broken_picture_among_many_is_named() -> None:
    datas = [*small_pictures()[:2], small_pictures()[0][:300]]
    with pytest.raises(BadImageError, match="picture 2 of the batch"):
        decode_many_into(datas, torch.empty(3, 3, 16, 24, dtype=torch.uint8))


def test_threads_do_not_disturb_each_other() -> None:
    datas = [encode(photo(i % len(PHOTOS)), restart_marker_blocks=i % 3) for i in range(24)]

    def crop(i: int) -> torch.Tensor:
        return TrainCrop(48)(datas[i % len(datas)], sample_rng(0, 0, i))

    expected = [crop(i) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(crop, range(200)), expected))


def test_a_decoded_image_is_the_caller_s_own() -> None:
    first, second = decode_image(encode(photo(0))), decode_image(encode(photo(0).convert("L")))
    before = first.copy()
    TrainCrop(8)(encode(photo(1)), sample_rng(0, 0, 0))
    second[:] = 0
    assert np.array_equal(first, before)
