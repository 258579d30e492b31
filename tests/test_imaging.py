"""Knowing pictures by their structure: Pillow says what a file is, and damage is never more than a BadImageError."""

from __future__ import annotations

import doctest
import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import packer.image_headers
import packer.imaging
from packer.errors import BadImageError
from packer.imaging import MAX_PIXELS, ImageInfo, decode_check, probe, probe_all
from packer.pictures import decode_rgb

MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "GIF": ("L", "P", "RGB"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F"),
    "PPM": ("1", "L", "RGB", "I;16"),
}
EMPTY_EXIF = b"Exif\0\0II*\0\x08\0\0\0" + bytes(6)
OPTIONS: dict[str, tuple[dict[str, object], ...]] = {
    "JPEG": (
        *({}, {"progressive": True}, {"restart_marker_blocks": 1}, {"exif": EMPTY_EXIF}),
        {"icc_profile": b"x" * 70000},
    ),
    "PNG": ({}, {"icc_profile": b"x" * 300}),
    "WEBP": ({}, {"lossless": True}, {"exif": EMPTY_EXIF}),
    "TIFF": ({}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"big_tiff": True}),
}
if ".avif" in Image.registered_extensions():
    MODES["AVIF"] = ("RGB", "RGBA")
NAMES = {format_: {"PPM": "netpbm"}.get(format_, format_.lower()) for format_ in MODES}
# How many of its last bytes a file can lack and still hold all of its pixels.
SPARE = {"PNG": 12, "BMP": 3, "TIFF": 4}


def encode(format_: str, mode: str, size: tuple[int, int], **options: object) -> bytes:
    """A picture of noise."""
    blank = Image.new(mode, size)
    noise = np.random.default_rng(7).bytes(len(blank.tobytes()))
    image = blank if mode == "F" else Image.frombytes(mode, size, noise)
    if mode == "P":
        image.putpalette(bytes(range(256)) * 3)
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


@cache
def small_files() -> list[tuple[str, bytes]]:
    """One small file of every format, mode and option."""
    return [
        (format_, encode(format_, mode, size, **options))
        for format_, modes in MODES.items()
        for mode in modes
        for options in OPTIONS.get(format_, ({},))
        for size in ((5, 3), (24, 17))
        if not (options.get("compression") and mode in ("F", "I;16"))
    ]


def look(data: bytes) -> ImageInfo | None:
    """`probe`, None where it refuses. Any other exception fails the test."""
    try:
        info = probe(data)
    except BadImageError as error:
        assert str(error)
        return None
    known = info.height > 0 and info.width > 0 and info.height * info.width <= MAX_PIXELS
    assert known or (info.height, info.width) == (-1, -1)
    return info


# ---------------------------------------------------------------- whole files


@given(st.sampled_from(sorted(MODES)), st.data(), st.tuples(st.integers(1, 70), st.integers(1, 70)))
@settings(max_examples=150)
def test_format_and_size_are_what_pillow_says(format_: str, data: st.DataObject, size: tuple[int, int]) -> None:
    mode = data.draw(st.sampled_from(MODES[format_]))
    options = data.draw(st.sampled_from(OPTIONS.get(format_, ({},))))
    if mode in ("F", "I;16") and "compression" in options:
        options = {}
    encoded = encode(format_, mode, size, **options)
    with Image.open(io.BytesIO(encoded)) as image:
        expected = ImageInfo(NAMES[format_], image.height, image.width)
    if options.get("big_tiff"):
        expected = expected._replace(height=-1, width=-1)
    for buffer in (encoded, bytearray(encoded), memoryview(encoded)):
        assert probe(buffer) == expected
    assert decode_check(encoded) == ImageInfo(NAMES[format_], size[1], size[0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_has_the_size_that_decoders_give(orientation: int) -> None:
    encoded = encode("TIFF", "RGB", (24, 17), tiffinfo={274: orientation})
    with Image.open(io.BytesIO(encoded)) as image:
        image.load()
        assert probe(encoded)[1:] == (image.height, image.width)


def test_an_exif_orientation_does_not_change_the_stored_size() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert probe(encode("JPEG", "RGB", (24, 17), exif=exif)) == ImageInfo("jpeg", 17, 24)


@pytest.mark.parametrize("tail", [b"\0", b"\xff\xd8\xff", b"PK\x03\x04" + bytes(2000)])
@pytest.mark.parametrize("format_", sorted(set(MODES) - {"AVIF"}))
def test_garbage_behind_a_picture_is_no_damage(format_: str, tail: bytes) -> None:
    encoded = encode(format_, "RGB", (24, 17))
    assert probe(encoded + tail) == probe(encoded) == decode_check(encoded + tail)


def test_animations_and_stereo_pictures_are_their_first_frame() -> None:
    frames = [Image.new("RGB", (24, 17), colour) for colour in ("red", "green", "blue")]
    for format_, name in (("GIF", "gif"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tiff"), ("MPO", "jpeg")):
        out = io.BytesIO()
        frames[0].save(out, format_, save_all=True, append_images=frames[1:])
        assert probe(out.getvalue()) == ImageInfo(name, 17, 24)


def gif(canvas: tuple[int, int], *frames: tuple[int, int, int, int]) -> bytes:
    """A GIF of one colour, with its canvas size and the place and size of each frame."""
    parts = [b"GIF89a", struct.pack("<HHBBB", *canvas, 0x80, 0, 0), bytes(6)]
    parts += [b"!\xf9\x04\0\0\0\0\0," + struct.pack("<HHHHB", *frame, 0) + b"\x02\x02\x44\x01\0" for frame in frames]
    return b"".join([*parts, b";"])


@pytest.mark.parametrize(
    ("canvas", "frames", "size"),
    [
        ((9, 7), [(0, 0, 1, 1)], (9, 7)),
        ((0, 0), [(0, 0, 1, 1)], (1, 1)),
        ((2, 2), [(4, 5, 1, 1)], (5, 6)),
        ((3, 3), [(0, 0, 1, 1), (8, 8, 1, 1)], (3, 3)),
    ],
)
def test_a_gif_grows_to_its_first_frame(
    canvas: tuple[int, int], frames: list[tuple[int, int, int, int]], size: tuple[int, int]
) -> None:
    encoded = gif(canvas, *frames)
    with Image.open(io.BytesIO(encoded)) as image:
        assert image.size == size
    assert probe(encoded) == ImageInfo("gif", size[1], size[0])


@pytest.mark.parametrize("field", [0, 7, 10**6])
def test_a_bmp_with_a_wrong_file_size_is_whole(field: int) -> None:
    encoded = bytearray(encode("BMP", "RGB", (24, 17)))
    encoded[2:6] = struct.pack("<I", field)
    assert probe(encoded) == decode_check(encoded) == ImageInfo("bmp", 17, 24)


def test_bmps_from_the_top_down_and_of_os2() -> None:
    encoded = bytearray(encode("BMP", "L", (24, 17)))
    encoded[22:26] = struct.pack("<i", -17)
    assert probe(encoded) == decode_check(encoded) == ImageInfo("bmp", 17, 24)
    os2 = b"BM" + struct.pack("<IIIIHHHH", 0, 0, 26, 12, 2, 1, 1, 24) + bytes(8)
    assert probe(os2) == decode_check(os2) == ImageInfo("bmp", 1, 2)


def test_a_tiff_whose_writer_counted_too_many_bytes_is_whole() -> None:
    encoded = bytearray(encode("TIFF", "L", (24, 17)))
    at = encoded.index(struct.pack("<HHI", 279, 4, 1)) + 8
    encoded[at : at + 4] = struct.pack("<I", 10**6)
    assert probe(encoded) == decode_check(encoded) == ImageInfo("tiff", 17, 24)


@pytest.mark.parametrize(
    ("header", "samples"),
    [
        (b"P1\n3 2\n", b"0 1 0\n1 0 1\n"),
        (b"P1 3 2 ", b"010101"),
        (b"P2\n# made by hand\n3 2 # size\n9\n", b"1 2 3 4 5 6"),
        (b"P3\n1 1\n65535\n", b"1 2 3"),
        (b"P4 9 2\n", bytes(4)),
        (b"P5\n3 2 255\n", bytes(6)),
        (b"P5\n3 2 65535\n", bytes(12)),
        (b"P6\t3\r\n2\n255\n", bytes(18)),
    ],
)
def test_netpbm_headers(header: bytes, samples: bytes) -> None:
    with Image.open(io.BytesIO(header + samples)) as image:
        image.load()
        assert probe(header + samples) == ImageInfo("netpbm", image.height, image.width)
    with pytest.raises(BadImageError, match="truncated"):
        probe(header + samples[: len(samples) // 3])


@pytest.mark.parametrize("mode", MODES["PNG"])
def test_a_png_without_its_last_chunk_is_whole_if_its_pixels_are(mode: str) -> None:
    encoded = encode("PNG", mode, (24, 17))
    assert probe(encoded[:-12]) == decode_check(encoded[:-12]) == ImageInfo("png", 17, 24)
    # Two chunks of pixels, cut between them: every chunk that is there is whole, the picture is not.
    start = encoded.index(b"IDAT")
    (length,) = struct.unpack_from(">I", encoded, start - 4)
    half = b"IDAT" + encoded[start + 4 : start + 4 + length // 2]
    cut = encoded[: start - 4] + struct.pack(">I", length // 2) + half + struct.pack(">I", zlib.crc32(half))
    assert look(cut) is None


# ---------------------------------------------------------------- many at once


def test_many_at_once_are_seen_as_one_by_one() -> None:
    datas = [data for _, data in small_files()]
    datas += [b"", b"text", datas[0][:100], gif((0, 0), (0, 0, 0, 1)), *datas[:3]]
    datas += [encode("JPEG", mode, size) for mode in ("L", "RGB") for size in ((1, 1), (60, 33))]
    sizes, bad = probe_all([memoryview(data) for data in datas])
    assert len(sizes) == len(datas)
    for i, data in enumerate(datas):
        info = look(data)
        assert (i in bad) == (info is None)
        if info is not None:
            assert tuple(sizes[i].tolist()) == info[1:]


def test_plain_jpegs_of_no_size_or_too_large_are_found_among_many() -> None:
    plain = encode("JPEG", "RGB", (24, 17))
    at = plain.index(b"\xff\xc0") + 5
    empty, huge = (plain[:at] + struct.pack(">HH", *size) + plain[at + 4 :] for size in ((0, 24), (65500, 65500)))
    sizes, bad = probe_all([memoryview(data) for data in (plain, empty, plain, huge)])
    assert sorted(bad) == [1, 3]
    assert "no picture" in str(bad[1])
    assert "decompression bomb" in str(bad[3])
    assert sizes[[0, 2]].tolist() == [[17, 24]] * 2


def isobmff(brand: bytes, properties: bytes) -> bytes:
    """The boxes of an AVIF or HEIF file, as far as its structure goes."""
    parts = ((b"ftyp", brand + bytes(4) + b"mif1"), (b"meta", properties), (b"mdat", b""))
    return b"".join(struct.pack(">I4s", 8 + len(body), kind) + body for kind, body in parts)


# ---------------------------------------------------------------- damage


def test_every_truncation_is_told() -> None:
    for format_, data in small_files():
        whole = probe(data)
        for length in range(len(data)):
            info = look(data[:length])
            if whole.height < 0:  # BigTIFF is left to decoders
                assert info in (None, whole)
            elif length < len(data) - SPARE.get(format_, 0):
                assert info is None, f"{format_} of {len(data)} bytes, cut to {length}"
            else:
                assert info in (None, whole)


@given(st.sampled_from(range(len(small_files()))), st.data())
@settings(max_examples=400)
def test_damage_raises_nothing_but_bad_image(number: int, data: st.DataObject) -> None:
    damaged = bytearray(small_files()[number][1])
    flips = data.draw(
        st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(1, 255)), min_size=1, max_size=6)
    )
    for at, change in flips:
        damaged[at] ^= change
    look(bytes(damaged))


MAGICS = [
    *(b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8", b"BM", b"II*\0", b"MM\0*"),
    *(b"P5 ", b"P3 ", b"\0\0\0\x18ftypavif", b"\0\0\0\x18ftypheic"),
]


@given(st.sampled_from(MAGICS), st.binary(max_size=300))
@settings(max_examples=600)
def test_any_bytes_raise_nothing_but_bad_image(magic: bytes, rest: bytes) -> None:
    look(magic + rest)


@given(st.sampled_from(range(len(small_files()))), st.data())
@settings(max_examples=150)
def test_decoding_damage_raises_nothing_but_bad_image(number: int, data: st.DataObject) -> None:
    damaged = bytearray(small_files()[number][1])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        info = decode_check(damaged)
    except BadImageError:
        with pytest.raises(BadImageError):
            decode_rgb(damaged)
        return
    assert info.height > 0
    assert info.width > 0


def test_decoding_finds_what_structure_does_not_show() -> None:
    encoded = bytearray(encode("PNG", "RGB", (24, 17)))
    at = encoded.index(b"IDAT") + 10
    encoded[at] ^= 0xFF
    assert probe(encoded) == ImageInfo("png", 17, 24)
    with pytest.raises(BadImageError, match="png that does not decode"):
        decode_check(encoded)


def test_a_format_without_a_decoder_is_named_without_an_address() -> None:
    with pytest.raises(BadImageError, match=r"^heif that no installed decoder reads$"):
        decode_check(isobmff(b"heic", b""))


def test_too_little_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    encoded = encode("PNG", "L", (24, 17))
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(BadImageError):  # memory for so small a picture there is: the file is to blame
        decode_check(encoded)
    monkeypatch.setattr(packer.imaging, "bytearray", fail, raising=False)
    with pytest.raises(MemoryError):
        decode_check(encoded)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty file"),
        (bytes(4096), "zero bytes"),
        (b"hello, world", "not an image that is known here: begins with b'hello, world'"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\xff\x0a\x7f", "JPEG XL"),
        (b"\r\n\xff\xd8\xff\xe0", "2 stray bytes before a JPEG"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "truncated"),
        (b"\xff\xd8\xff\xd9", "ends before its first scan"),
        (b"\xff\xd8\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\xff\xd9", "no frame header"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "not IHDR"),
        (b"GIF89a" + bytes(7) + b";", "before its first picture"),
        (b"RIFF\x20\0\0\0WEBPVP8Y" + bytes(40), "first chunk"),
        (b"BM" + bytes(50), "header of 0 bytes"),
        (b"P5 3 2 70000\n" + bytes(20), "largest sample"),
        (b"P6 x", "netpbm header"),
    ],
)
def test_what_is_said_of_other_files(data: bytes, says: str) -> None:
    with pytest.raises(BadImageError) as caught:
        probe(data)
    assert says in str(caught.value)


# ---------------------------------------------------------------- attacks


def tiff(*tags: tuple[int, int, int, int]) -> bytes:
    """A TIFF of these tags (tag, kind, count, value) and nothing else."""
    return (
        b"II*\0\x08\0\0\0"
        + struct.pack("<H", len(tags))
        + b"".join(struct.pack("<HHII", *tag) for tag in tags)
        + bytes(4)
    )


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR%s" + bytes(9) + b"\0\0\0\0IEND\xae\x42\x60\x82"
SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\xff\xd9"
BOMBS = {
    "png": PNG % struct.pack(">II", 60000, 60000),
    "jpeg": b"\xff\xd8\xff\xc0\x00\x0b\x08\xff\xdc\xff\xdc\x01\x01\x11\x00" + SCAN,
    "gif": gif((65535, 65535), (0, 0, 1, 1)),
    "webp": b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\xff\x00\xff\xff\x00",
    "tiff": tiff((256, 4, 1, 10**9), (257, 4, 1, 10**9)),
    "avif": isobmff(b"avif", b"\0\0\0\x14ispe\0\0\0\0" + b"\xff" * 8),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_is_refused_unopened(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadImageError, match="decompression bomb"):
            decode_check(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_the_largest_picture_allowed() -> None:
    assert probe(PNG % struct.pack(">II", MAX_PIXELS, 1)).width == MAX_PIXELS
    with pytest.raises(BadImageError, match="bomb"):
        probe(PNG % struct.pack(">II", MAX_PIXELS + 1, 1))


@pytest.mark.parametrize("tags", [[(256, 4, 1, 0xFFFFFFFF)], [(257, 4, 1, 7)], [(256, 2, 1, 7), (257, 4, 1, 7)]])
def test_a_tiff_that_names_one_side_has_no_known_size(tags: list[tuple[int, int, int, int]]) -> None:
    sizes, bad = probe_all([memoryview(tiff(*tags))])
    assert sizes.tolist() == [[-1, -1]]
    assert not bad


SIZE = 4 << 20
ENDLESS = zlib.compress(bytes(SIZE * 16))[:-9]
ATTACKS: dict[str, Callable[[], bytes]] = {
    "fill bytes": lambda: b"\xff\xd8" + b"\xff" * SIZE,
    "standalone markers": lambda: b"\xff\xd8" + b"\xff\xd0" * (SIZE // 2),
    "short segments": lambda: b"\xff\xd8" + b"\xff\xe0\x00\x02" * (SIZE // 4),
    "empty chunks": lambda: b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(13) + bytes(SIZE),
    "endless pixels": lambda: (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
        + b"\0\0\xff\xff" * 2
        + bytes(9)
        + struct.pack(">I4s", len(ENDLESS), b"IDAT")
        + ENDLESS
        + bytes(4)
    ),
    "padding in a GIF": lambda: b"GIF89a" + bytes(SIZE),
    "empty extensions": lambda: b"GIF89a" + bytes(7) + b"!\xff\0" * (SIZE // 3),
    "spaces": lambda: b"P6 " + b" " * SIZE,
    "comments": lambda: b"P6 " + b"#\n" * (SIZE // 2),
    "digits": lambda: b"P6 " + b"9" * SIZE,
    "small boxes": lambda: b"\0\0\0\x10ftypheic\0\0\0\0" + b"\0\0\0\x08free" * (SIZE // 8),
    "many extents": lambda: isobmff(b"avif", b"ispe\0\0\0\0\0\0\0\1\0\0\0\1" * (SIZE // 16)),
    "a large tag": lambda: tiff((273, 4, SIZE // 4, 8)) + bytes(SIZE),
    "many tags": lambda: b"II*\0\x08\0\0\0\xff\xff" + struct.pack("<HHII", 273, 4, 90_000, 8) * 65535,
}


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_memory_is_bounded(name: str) -> None:
    data = memoryview(ATTACKS[name]())
    tracemalloc.start()
    try:
        info = look(data)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    assert info is None or name in ("many tags", "many extents")


def test_the_examples_in_the_documentation() -> None:
    for module in (packer.imaging, packer.image_headers):
        assert doctest.testmod(module).failed == 0
