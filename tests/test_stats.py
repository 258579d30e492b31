"""`packer stats`: counts and sizes as they are, means and deviations as numpy has them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from conftest import PATIENCE_S, picture
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from packer.errors import UsageError
from packer.pack import PackOptions, pack
from packer.pictures import decode_rgb, picture_fields
from packer.sources.folder import FolderSource
from packer.spread import spread
from packer.stats import SplitStats, stats


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Pictures of many modes and sizes, drawn at random."""
    draw = np.random.default_rng(3)
    root = tmp_path / "src"
    for name, count in (("ant", 5), ("bee", 2), ("cow", 0), ("dog", 9)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            height, width = draw.integers(3, 40, 2)
            pixels = draw.integers(0, 256, (height, width, 4), dtype=np.uint8)
            image = Image.fromarray(pixels)
            mode = ("RGB", "L", "RGBA", "P", "CMYK")[i % 5]
            if mode == "CMYK":
                image.convert(mode).save(root / name / f"{i}.jpg")
            else:
                (image.convert("RGB").convert(mode) if mode == "P" else image.convert(mode)).save(
                    root / name / f"{i}.png"
                )
    return root


def packed(source: Path, **options: str) -> Path:
    out = source.parent / "out"
    pack(FolderSource(str(source)), out, PackOptions(**options))  # type: ignore[arg-type]
    return out


def opened(source: Path) -> list[Image.Image]:
    """Every picture, loaded by Pillow."""
    images = []
    for path in sorted(source.rglob("*.*")):
        with Image.open(path) as image:
            image.load()
            images.append(image)
    return images


def oracle(source: Path) -> np.ndarray:
    """All pixels of all pictures, float64 (n, 3)."""
    return np.concatenate(
        [np.asarray(image.convert("RGB"), np.float64).reshape(-1, 3) / 255 for image in opened(source)]
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_mean_and_deviation_are_numpys(source: Path, workers: int) -> None:
    out = packed(source)
    done = np.zeros(2, np.int64)

    def progress(pictures: int, size: int) -> None:
        done[:] += (pictures, size)

    channels = stats(out, workers=workers, progress=progress)["train"].channels
    pixels = oracle(source)
    assert channels.mean == pytest.approx(pixels.mean(axis=0), abs=1e-12)
    assert channels.std == pytest.approx(pixels.std(axis=0), abs=1e-12)
    assert (channels.pixels, channels.pictures, channels.failed) == (len(pixels), 16, 0)
    assert channels.formats == {"png": 14, "jpeg": 2}
    assert channels.modes == {"RGB": 4, "L": 4, "RGBA": 3, "P": 3, "CMYK": 2}
    assert done[0] == 16
    assert done[1] == sum(path.stat().st_size for path in source.rglob("*.*"))


def test_counts_and_sizes(source: Path) -> None:
    found = stats(packed(source), sample=0)["train"]
    assert [(c.label, c.name, c.count) for c in found.classes] == [
        (0, "ant", 5),
        (1, "bee", 2),
        (2, "cow", 0),
        (3, "dog", 9),
    ]
    shapes = [image.size for image in opened(source)]
    widths, heights = zip(*shapes, strict=True)
    assert found.sizes is not None
    for spread_, values in ((found.sizes.width, widths), (found.sizes.height, heights),
                            (found.sizes.short_side, [min(s) for s in shapes])):  # fmt: skip
        assert (spread_.min, spread_.max) == (min(values), max(values))
        assert spread_.median == sorted(values)[(len(values) - 1) // 2]
    files = sorted(path.stat().st_size for path in source.rglob("*.png"))
    png = found.fields["png"]
    assert (png.count, png.bytes) == (len(files), sum(files))
    assert (png.spread.min, png.spread.median, png.spread.max) == (files[0], files[(len(files) - 1) // 2], files[-1])
    assert found.fields["cls"].bytes == 16
    assert found.channels.mean is None
    assert found.channels.pictures == 0


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    grey = np.linspace(0, 65535, 40 * 30).reshape(30, 40).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "src" / "a.png")
    found = stats(packed(tmp_path / "src"))["train"].channels
    assert found.mean == pytest.approx([0.5] * 3, abs=0.003)
    assert found.std == pytest.approx([12**-0.5] * 3, abs=0.003)


def test_what_does_not_decode_is_counted_and_left_out(
    image_folder: Callable[..., Path], run_packer: Callable[..., Result]
) -> None:
    source = image_folder(per_class=2)
    pixels = oracle(source)
    whole = (source / "cat" / "cat-0.jpg").read_bytes()
    (source / "cat" / "half.jpg").write_bytes(whole[: len(whole) // 2] + b"\xff\xd9")
    out = packed(source)
    channels = stats(out)["train"].channels
    assert channels.failed == 1
    ((_sample, reason),) = channels.undecodable
    assert "does not decode" in reason
    assert channels.mean == pytest.approx(pixels.mean(axis=0), abs=1e-12)
    assert "1 picture of train cannot be decoded; run: packer verify" in run_packer("stats", out).stderr


def test_a_random_part_is_always_the_same(source: Path) -> None:
    out = packed(source)
    once = stats(out, sample=6, workers=1)["train"]
    assert once == stats(out, sample=6, workers=2)["train"]
    assert once.channels.pictures == 6
    assert once.pictures == 16
    assert stats(out, sample=100)["train"].channels.pictures == 16


def test_sizes_that_the_index_lacks_come_from_decoding(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    picture(1, (30, 20)).save(tmp_path / "src" / "a.png")
    source = packed(tmp_path / "src", check="none")
    rows = np.load(source / "train.index.npy")
    rows["height"] = rows["width"] = -1
    np.save(source / "train.index.npy", rows)
    assert stats(source, sample=0)["train"].sizes is None
    sizes = stats(source)["train"].sizes
    assert sizes is not None
    assert sizes.common == ((30, 20, 1),)


def test_splits_and_labels_without_names(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    source = tmp_path / "src"
    for name in ("train", "val"):
        (source / name).mkdir(parents=True)
        for i in range(4):
            picture(i, (4, 4)).save(source / name / f"{name}{i}.png")
    (tmp_path / "labels.csv").write_text(
        "".join(f"{s}{i},{i % 2 * 1000}\n" for s in ("train", "val") for i in range(4))
    )
    run_packer("shard", source, tmp_path / "out", "--labels", tmp_path / "labels.csv", "--quiet")
    found = json.loads(run_packer("stats", tmp_path / "out", "--json").stdout)
    assert list(found) == ["train", "val"]
    assert found["val"]["classes"] == [
        {"label": 0, "name": "0", "count": 2},
        {"label": 1000, "name": "1000", "count": 2},
    ]
    assert list(json.loads(run_packer("stats", tmp_path / "out", "--json", "--split", "val").stdout)) == ["val"]
    assert "it has: train, val" in run_packer("stats", tmp_path / "out", "--split", "x", exit_code=2).output
    with pytest.raises(UsageError):
        stats(tmp_path / "out", split="x")


def test_text_for_people(source: Path, run_packer: Callable[..., Result]) -> None:
    out = packed(source)
    text = run_packer("stats", out, "--quiet").stdout
    mean = oracle(source).mean(axis=0)
    assert "all 16 pictures" in text
    assert "  ".join(["mean", *(f"{value:.4f}" for value in mean)]) in text
    assert "4, of 0 to 9 samples, median 2" in text
    assert "formats: png 14, jpeg 2" in text
    assert "estimated from 3 of 16 pictures" in run_packer("stats", out, "--sample", "3").stdout
    assert "pixels\n" not in run_packer("stats", out, "--sample", "0").stdout.split("fields")[1]


def test_samples_without_pictures(tmp_path: Path) -> None:
    import tarfile

    from packer.indexing import index_folder

    (tmp_path / "a.txt").write_text("hello")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "a.txt", "a.txt")
    index_folder(tmp_path)
    found = stats(tmp_path)["train"]
    assert isinstance(found, SplitStats)
    assert (found.pictures, found.sizes, found.classes, found.unlabelled) == (0, None, (), 1)
    assert found.fields["txt"].bytes == 5


def test_pictures_that_do_not_decode_are_counted_and_explained_the_same_in_every_run(
    tmp_path: Path, run_packer: Callable[..., Result]
) -> None:
    import io
    import tarfile

    from packer.indexing import index_folder

    out = io.BytesIO()
    picture(1, (30, 20)).save(out, "PNG")
    whole = out.getvalue()
    damaged = whole[:29] + bytes(4) + whole[33:]  # the checksum of IHDR: Pillow then knows no such format
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, data in (("a.png", whole), ("b.png", damaged)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    index_folder(tmp_path)
    (failure,) = stats(tmp_path)["train"].channels.undecodable
    assert failure == (1, "png that no installed decoder reads")
    assert "all that decode, 1 of 2 pictures" in run_packer("stats", tmp_path).stdout


@given(arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 2**40)))
def test_histograms_hold_every_value_once(values: np.ndarray) -> None:
    found = spread(values)
    assert (found.min, found.max) == (values.min(), values.max())
    assert found.median == np.sort(values)[(len(values) - 1) // 2]
    assert len(found.bins) <= 18
    assert [a.high for a in found.bins[:-1]] == [b.low for b in found.bins[1:]]
    for one in found.bins:
        assert one.low < one.high
        assert one.count == np.count_nonzero((values >= one.low) & (values < one.high))
    assert sum(one.count for one in found.bins) == len(values)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["jpg", "mask.png", "cls"], ("jpg",)),
        (["cls", "mask.png", "png", "webp"], ("png", "webp")),
        (["a.jpg"], ("a.jpg",)),
        (["txt"], ()),
    ],
)
def test_the_picture_is_not_the_mask(fields: list[str], expected: tuple[str, ...]) -> None:
    assert picture_fields(fields) == expected


def test_orientation_is_read_and_not_applied() -> None:
    import io

    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(1, (30, 20)).save(out, "JPEG", exif=exif)
    decoded = decode_rgb(out.getvalue())
    assert decoded.orientation == 6
    assert decoded.rgb.size == (30, 20)


def test_no_torch() -> None:
    run = "import sys, packer.stats, packer.view, packer.verify, packer.unpack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", run], timeout=PATIENCE_S, check=False).returncode == 0
