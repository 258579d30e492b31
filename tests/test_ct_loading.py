"""CT datasets through the loader: windows, crops, slabs, volumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ct_helpers import formula, hu_slice, series_name, slice_json, write_dataset, write_slices
from hypothesis import given
from hypothesis import strategies as st

from loaders import Padded
from loaders.dataset import PackedDataset
from loaders.neighbours import Neighbours
from loaders.source import ConcatSource, PackedSource
from loaders.transforms import CenterCrop, RandomCrop, Slab, TrainCrop, Window, sample_rng
from loaders.webds_loader import make_loader
from loaders.windowing import bounds, write_windows
from packer import npy
from packer.errors import SampleError, UsageError
from packer.verify import verify

SOFT = (40.0, 400.0)


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slices(tmp_path_factory.mktemp("ct") / "out")


def by_key(folder: Path, **options: Any) -> dict[str, Any]:
    """What each sample of an epoch gives, by key."""
    options.setdefault("fields", ("ct.npy", "__key__"))
    found = {}
    for batch in make_loader(folder, batch_size=5, **options):
        for j, key in enumerate(batch["__key__"]):
            found[key] = {name: value[j] for name, value in batch.items() if name != "__key__"}
    return found


def expected(key: str, series: int = 4) -> np.ndarray[Any, Any]:
    name, _, index = key.partition("_")
    return hu_slice(next(i for i in range(series) if series_name(i) == name), int(index))


# ---------------------------------------------------------------- the arithmetic


def close(got: Any, want: Any) -> bool:
    """Within 2⁻²² of the value."""
    return bool(np.all(np.abs(np.asarray(got, np.float64) - want) <= want * 2.0**-22))


@given(
    st.integers(-2000, 2000), st.integers(1, 8000), st.booleans(), st.sampled_from(["<i2", "<f4", "<u2", "<i4", "|u1"]),
    st.integers(1, 70), st.integers(1, 70), st.booleans(),
)  # fmt: skip
def test_windows_equal_the_formula(
    center: int, width: int, half: bool, kind: str, rows: int, columns: int, mirrored: bool
) -> None:
    rng = np.random.default_rng([center % 7, width])
    dtype = np.dtype(kind)
    low, high = (
        (0, 60000) if dtype.kind == "u" and dtype.itemsize == 2 else (0, 255) if dtype.kind == "u" else (-32768, 32767)
    )
    hu = rng.integers(low, high, (rows, columns), endpoint=True).astype(dtype)
    hu = hu[:, ::-1] if mirrored else hu
    out = np.full((2, rows, columns), np.nan, np.float32)
    where = center + (0.5 if half else 0.0)
    write_windows(hu, out, bounds([(where, width), SOFT]))
    assert close(out[0], formula(hu, where, width))
    assert close(out[1], formula(hu, *SOFT))


def test_windows_of_every_int16_value() -> None:
    hu = np.arange(-32768, 32768, dtype=np.int16).reshape(256, 256)
    out = np.empty((4, 256, 256), np.float32)
    windows = [(-600, 1500), (0, 32767), (0, 65535), (32000, 3)]
    write_windows(hu, out, bounds(windows))
    for channel, window in zip(out, windows, strict=True):
        assert close(channel, formula(hu, *window))
        assert channel.min() == 0


def test_a_wide_row_and_a_volume() -> None:
    hu = np.random.default_rng(0).integers(-1024, 3000, (2, 3, 40_000)).astype(np.int16)
    out = np.empty((1, 2, 3, 40_000), np.float32)
    write_windows(hu, out, bounds(SOFT))
    assert close(out[0], formula(hu, *SOFT))


@pytest.mark.parametrize(
    "wrong", [(40,), (40, 0), (40, -1), (40, float("nan")), ((40, 400), 3), ("a", "b"), ((1, 2, 3),), (float("inf"), 1)]
)
def test_windows_that_cannot_be_meant(wrong: Any) -> None:
    with pytest.raises(UsageError, match="centre and a width"):
        Window(*wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Slab(2), lambda: Slab(0), lambda: Slab(True), lambda: Slab(3, TrainCrop(8)),
        lambda: Slab(3, edges="wrap"),
        lambda: RandomCrop(0), lambda: RandomCrop(8, flip=2), lambda: CenterCrop((1, 2, 3)),
        lambda: Window(40, 400, crop=8), lambda: Window(40, 400, crop=TrainCrop(8)),
    ],
)  # fmt: skip
def test_transforms_that_cannot_be_meant(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


# ---------------------------------------------------------------- slices through the loader


@pytest.mark.parametrize(("engine", "workers"), [("thread", 0), ("thread", 1), ("thread", 3), ("process", 2)])
def test_a_window_in_every_engine(slices: Path, engine: Any, workers: int) -> None:
    found = by_key(slices, transform=Window(*SOFT), engine=engine, num_workers=workers)
    assert len(found) == 24
    for key, sample in found.items():
        assert sample["ct.npy"].shape == (1, 40, 32)
        assert sample["ct.npy"].dtype == torch.float32
        assert close(sample["ct.npy"][0], formula(expected(key), *SOFT))


def test_images_and_labels(slices: Path) -> None:
    loader = make_loader(slices, batch_size=5, shuffle=False, transform=Window(*SOFT), num_workers=2)
    assert loader._recipe.direct
    images, labels = next(iter(loader))
    assert images.shape == (5, 1, 40, 32)
    assert labels.tolist() == [0, 0, 0, 0, 0]


def test_without_a_transform_hounsfield_units_come_as_stored(slices: Path) -> None:
    for key, sample in by_key(slices, num_workers=2).items():
        assert sample["ct.npy"].dtype == torch.int16
        assert np.array_equal(sample["ct.npy"][0], expected(key))
    images, _ = next(iter(make_loader(slices, batch_size=3)))
    assert images.dtype == torch.int16
    assert images.shape == (3, 1, 40, 32)


def test_several_windows_are_channels(slices: Path) -> None:
    windows = ((-600, 1500), (100, 700), (40, 400))
    for key, sample in by_key(slices, transform=Window(*windows), channels_last=True).items():
        for channel, window in zip(sample["ct.npy"], windows, strict=True):
            assert close(channel, formula(expected(key), *window))
    images, _ = next(iter(make_loader(slices, batch_size=3, transform=Window(*windows), channels_last=True)))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_half_precision(slices: Path) -> None:
    images, _ = next(iter(make_loader(slices, batch_size=3, transform=Window(*SOFT), dtype=torch.bfloat16)))
    assert images.dtype == torch.bfloat16
    assert next(iter(make_loader(slices, batch_size=3, dtype=torch.bfloat16)))[0].dtype == torch.int16


def test_zstd_gives_the_same(slices: Path, tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="the extra [codecs]")
    packed = write_slices(tmp_path / "zst", zstd=True)
    plain = by_key(slices, transform=Window(*SOFT), fields=("ct.npy", "mask.npy", "__key__"))
    found = by_key(packed, transform=Window(*SOFT), fields=("ct.npy.zst", "mask.npy.zst", "__key__"))
    assert found.keys() == plain.keys()
    for key, sample in found.items():
        assert torch.equal(sample["ct.npy.zst"], plain[key]["ct.npy"])
        assert torch.equal(sample["mask.npy.zst"], plain[key]["mask.npy"])
    loader = make_loader(packed, batch_size=4)
    assert loader._recipe.direct
    images, _ = next(iter(loader))
    assert images.dtype == torch.int16


def test_the_index_knows_the_size(slices: Path) -> None:
    source = PackedSource(slices, "train")
    assert set(source.column("height").tolist()) == {40}
    assert set(source.column("width").tolist()) == {32}


def test_deep_verification_decodes_arrays(slices: Path, tmp_path: Path) -> None:
    assert verify(slices, deep=True).problems == []
    good = npy.encode(hu_slice(0, 0))
    samples = [(f"s_{i:05d}", {"ct.npy": data}) for i, data in enumerate([good, good[:-2]])]
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    assert verify(packed).problems == []
    (problem,) = verify(packed, deep=True).problems
    assert "shape (40, 32)" in problem.what
    assert problem.key == "s_00001"


def test_everything_of_a_sample(slices: Path) -> None:
    names = ("ct.npy", "mask.npy", "cls", "json", "__key__")
    batch = next(iter(make_loader(slices, batch_size=24, fields=names, transform=Window(*SOFT))))
    assert batch["mask.npy"].shape == (24, 40, 32)
    assert batch["mask.npy"].dtype == torch.uint8
    assert batch["cls"].dtype == torch.int64
    assert sorted(batch["json"]["index"].tolist()) == sorted(list(range(6)) * 4)
    for j, key in enumerate(batch["__key__"]):
        assert np.array_equal(batch["mask.npy"][j], expected(key) > 300)
        assert batch["json"]["series"][j] == key.partition("_")[0]
        assert batch["json"]["slice_spacing_mm"][j] in (2.5, None)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_crops_follow_seed_epoch_and_sample_and_masks_follow_them(slices: Path, engine: Any) -> None:
    transform = Window(*SOFT, crop=RandomCrop((16, 24), flip=0.5))
    with_mask = {"fields": ("ct.npy", "mask.npy", "__index__", "__key__"), "transform": transform, "seed": 3}
    found = by_key(slices, engine=engine, num_workers=2, **with_mask)
    flips = set()
    for key, sample in found.items():
        crop = transform.box(40, 32, sample_rng(3, 0, int(sample["__index__"])))
        flips.add(crop.flip)
        top, left = int(crop.top), int(crop.left)
        part = expected(key)[top : top + 16, left : left + 24]
        part = part[:, ::-1] if crop.flip else part
        assert close(sample["ct.npy"][0], formula(part, *SOFT))
        assert np.array_equal(sample["mask.npy"], part > 300)
    assert flips == {True, False}


def test_crops_differ_between_epochs_and_are_the_same_again(slices: Path) -> None:
    def epoch(number: int) -> dict[str, Any]:
        loader = make_loader(slices, batch_size=24, transform=Window(*SOFT, crop=RandomCrop(16)), shuffle=False)
        loader.set_epoch(number)
        return {"images": next(iter(loader))[0].clone()}

    assert torch.equal(epoch(1)["images"], epoch(1)["images"])
    assert not torch.equal(epoch(0)["images"], epoch(1)["images"])


def test_center_crop_makes_one_size_of_many(tmp_path: Path) -> None:
    packed = write_slices(tmp_path / "out", shapes={1: (50, 32), 2: (40, 60)})
    found = by_key(packed, transform=Window(*SOFT, crop=CenterCrop(20)), shuffle=True)
    assert {sample["ct.npy"].shape for sample in found.values()} == {(1, 20, 20)}
    key = f"{series_name(2)}_00003"
    assert close(found[key]["ct.npy"][0], formula(hu_slice(2, 3, (40, 60))[10:30, 20:40], *SOFT))


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("transform", [None, Window(*SOFT)])
def test_slices_of_different_sizes_are_padded(tmp_path: Path, transform: Any, zstd: bool) -> None:
    if zstd:
        pytest.importorskip("zstandard", reason="the extra [codecs]")
    packed = write_slices(tmp_path / "out", shapes={1: (50, 32)}, zstd=zstd)
    images, _ = next(iter(make_loader(packed, batch_size=24, transform=transform, shuffle=False)))
    assert isinstance(images, Padded)
    assert images.data.shape == (24, 1, 50, 32)
    assert images.data.dtype == (torch.int16 if transform is None else torch.float32)
    assert images.mask.sum() == 18 * 40 * 32 + 6 * 50 * 32


def test_a_crop_larger_than_a_slice_names_the_sample(slices: Path) -> None:
    with pytest.raises(SampleError, match="40×32 is smaller than the crop of 36×36"):
        list(make_loader(slices, transform=Window(*SOFT, crop=RandomCrop(36))))


def test_float_slices_among_integers(tmp_path: Path) -> None:
    samples = [(f"s_{i:05d}", {"ct.npy": npy.encode(np.full((16, 16), 40 + i / 2, kind))})
               for i, kind in enumerate(["<i2", ">i2", "<f4", "|u1"])]  # fmt: skip
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    values = by_key(packed, transform=Window(*SOFT))
    assert [round(float(values[f"s_{i:05d}"]["ct.npy"][0, 0, 0]), 4) for i in range(4)] == [0.5, 0.5, 0.5025, 0.5025]
    images, _ = next(iter(make_loader(packed, batch_size=4, shuffle=False)))
    assert images.dtype == torch.float32
    assert images[:, 0, 0, 0].tolist() == [40, 40, 41, 41]
    images, _ = next(iter(make_loader(packed, batch_size=2, subset=[0, 1], shuffle=False)))
    assert images[:, 0, 0, 0].tolist() == [40, 40]


def test_fortran_order(tmp_path: Path) -> None:
    import io

    hu = hu_slice(0, 0)
    stream = io.BytesIO()
    np.save(stream, np.asfortranarray(hu))
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": [("s_00000", {"ct.npy": stream.getvalue()})]})
    assert np.array_equal(by_key(packed)["s_00000"]["ct.npy"][0], hu)
    assert close(by_key(packed, transform=Window(*SOFT))["s_00000"]["ct.npy"][0], formula(hu, *SOFT))


def test_damage_is_told_and_can_be_skipped(tmp_path: Path) -> None:
    good = npy.encode(hu_slice(0, 0))
    samples = [(f"s_{i:05d}", {"ct.npy": data}) for i, data in enumerate([good, good[:-2], good])]
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    with pytest.raises(SampleError, match=r"s_00001.*shape \(40, 32\)"):
        list(make_loader(packed, batch_size=3, transform=Window(*SOFT)))
    loader = make_loader(packed, batch_size=3, transform=Window(*SOFT), on_error="skip")
    images, _ = next(iter(loader))
    assert len(images.data if isinstance(images, Padded) else images) == 2
    assert len(loader.skipped) == 1


def test_dataset_and_preload_give_the_same(slices: Path) -> None:
    transform = Window(*SOFT, crop=RandomCrop(16))
    dataset = PackedDataset(slices, transform=transform)
    image, label = dataset[7]
    assert image.shape == (1, 16, 16)
    assert label in (0, 1)
    for preload in (None, "memory", "decoded"):
        loader = make_loader(slices, batch_size=24, transform=transform, shuffle=False, preload=preload)
        images, _ = next(iter(loader))
        assert torch.equal(images[7], image)


def test_what_is_for_pictures_is_refused(slices: Path) -> None:
    with pytest.raises(UsageError, match="TrainCrop is for pictures"):
        make_loader(slices, transform=TrainCrop(16))
    with pytest.raises(UsageError, match="normalize"):
        make_loader(slices, transform=Window(*SOFT), normalize="imagenet")


def test_a_device_does_not_imply_normalisation(slices: Path) -> None:
    images, _ = next(iter(make_loader(slices, batch_size=4, transform=Window(*SOFT), device="cpu", shuffle=False)))
    plain, _ = next(iter(make_loader(slices, batch_size=4, transform=Window(*SOFT), shuffle=False)))
    assert torch.equal(images, plain)


def brighten(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array + np.int16(1)


def doubled(image: torch.Tensor) -> torch.Tensor:
    return image.float() * 2


def test_foreign_callables_get_arrays(slices: Path) -> None:
    found = by_key(slices, transform=brighten, num_workers=0)
    for key, sample in found.items():
        assert np.array_equal(sample["ct.npy"], expected(key) + np.int16(1))
    for key, sample in by_key(slices, transform=doubled, num_workers=2).items():
        assert np.array_equal(sample["ct.npy"][0], expected(key).astype(np.float32) * 2)


# ---------------------------------------------------------------- slabs


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("edges", ["repeat", "air"])
def test_a_slab_is_a_slice_among_its_neighbours(slices: Path, engine: Any, edges: Any) -> None:
    transform = Slab(5, Window(*SOFT), edges=edges)
    for key, sample in by_key(slices, transform=transform, engine=engine, num_workers=2).items():
        series, _, index = key.partition("_")
        number = next(i for i in range(4) if series_name(i) == series)
        for k in range(5):
            at = int(index) + k - 2
            hu = hu_slice(number, min(max(at, 0), 5))
            if edges == "air" and not 0 <= at <= 5:
                hu = np.full((40, 32), -1024, np.int16)
            assert close(sample["ct.npy"][k], formula(hu, *SOFT))


def test_a_slab_of_stored_values_with_a_crop_and_its_mask(slices: Path) -> None:
    transform = Slab(3, Window(crop=RandomCrop(16)))
    names = ("ct.npy", "mask.npy", "__key__")
    for sample in by_key(slices, transform=transform, fields=names).values():
        assert sample["ct.npy"].shape == (3, 16, 16)
        assert sample["ct.npy"].dtype == torch.int16
        assert np.array_equal(sample["mask.npy"], sample["ct.npy"][1] > 300)


def test_a_slab_with_several_windows(slices: Path) -> None:
    windows = ((-600, 1500), SOFT)
    key = f"{series_name(2)}_00003"
    sample = by_key(slices, transform=Slab(3, Window(*windows)))[key]["ct.npy"]
    assert sample.shape == (6, 40, 32)
    for k in range(3):
        for w, window in enumerate(windows):
            assert close(sample[2 * k + w], formula(hu_slice(2, 2 + k), *window))


def test_neighbours_against_a_plain_count(slices: Path) -> None:
    source = ConcatSource([PackedSource(slices, "train"), PackedSource(slices, "train")])
    neighbours = Neighbours(source)
    keys = source.all_keys()
    numbers = np.random.default_rng(0).permutation(len(source))
    around = neighbours.around(numbers, 3, repeat=False)
    for number, (before, itself, after) in zip(numbers.tolist(), around.tolist(), strict=True):
        assert itself == number
        series, _, index = keys[number].partition("_")
        part = range(24) if number < 24 else range(24, 48)
        for other, at in ((before, int(index) - 1), (after, int(index) + 1)):
            wanted = [i for i in part if keys[i] == f"{series}_{at:05d}"]
            assert [other] == (wanted or [-1])


def test_a_slab_without_series_is_refused(tmp_path: Path) -> None:
    samples = [(name, {"ct.npy": npy.encode(hu_slice(0, i))}) for i, name in enumerate("abc")]
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    with pytest.raises(UsageError, match="series"):
        make_loader(packed, transform=Slab(3))


# ---------------------------------------------------------------- volumes


@pytest.mark.parametrize("zstd", [False, True])
def test_volumes_of_different_depth_are_padded(tmp_path: Path, zstd: bool) -> None:
    if zstd:
        pytest.importorskip("zstandard", reason="the extra [codecs]")
    depths, suffix = (3, 5, 4), ".zst" if zstd else ""
    volumes = [np.stack([hu_slice(i, k, (12, 10)) for k in range(depth)]) for i, depth in enumerate(depths)]
    samples = [
        (series_name(i), {
            f"vol.npy{suffix}": npy.encode(volume, zstd_level=3 if zstd else None), "cls": b"1",
            f"mask.npy{suffix}": npy.encode((volume > 300).astype(np.uint8), zstd_level=3 if zstd else None),
            "json": slice_json(i, 0, len(volume), (12, 10)),
        })
        for i, volume in enumerate(volumes)
    ]  # fmt: skip
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    images, labels = next(iter(make_loader(packed, batch_size=3, transform=Window(*SOFT), shuffle=False)))
    assert images.data.shape == (3, 1, 5, 12, 10)
    assert labels.tolist() == [1, 1, 1]
    for j, volume in enumerate(volumes):
        depth = len(volume)
        assert close(images.data[j, 0, :depth], formula(volume, *SOFT))
        assert images.mask[j].sum() == depth * 120
    crop = Window(crop=CenterCrop(8))
    batch = next(iter(make_loader(packed, batch_size=3, transform=crop, shuffle=False,
                                  fields=(f"vol.npy{suffix}", f"mask.npy{suffix}"))))  # fmt: skip
    for j, volume in enumerate(volumes):
        part = volume[:, 2:10, 1:9]
        assert np.array_equal(batch[f"vol.npy{suffix}"].data[j, 0, : len(part)], part)
        assert np.array_equal(batch[f"mask.npy{suffix}"].data[j, : len(part)], part > 300)


def test_volumes_of_one_shape_are_decoded_into_the_batch(tmp_path: Path) -> None:
    volumes = [np.stack([hu_slice(i, k, (12, 10)) for k in range(4)]) for i in range(3)]
    samples = [(series_name(i), {"vol.npy": npy.encode(volume)}) for i, volume in enumerate(volumes)]
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    loader = make_loader(packed, batch_size=3, transform=Window(SOFT, (-600, 1500)), shuffle=False)
    assert loader._recipe.direct
    images, labels = next(iter(loader))
    assert images.shape == (3, 2, 4, 12, 10)
    assert labels.tolist() == [-1, -1, -1]
    assert close(images[2, 1], formula(volumes[2], -600, 1500))
    with pytest.raises(UsageError, match="series"):
        make_loader(packed, transform=Slab(3))


def test_other_arrays_stay_plain_values(tmp_path: Path) -> None:
    samples = [(f"t_{i}", {"tokens.npy": npy.encode(np.arange(i + 1)), "cls": b"0"}) for i in range(3)]
    packed = write_dataset(tmp_path / "out", {"train-000000.tar": samples})
    batch = next(iter(make_loader(packed, batch_size=3, fields=("tokens.npy", "cls"), shuffle=False)))
    assert batch["tokens.npy"].data.shape == (3, 3)
    with pytest.raises(UsageError, match="no pictures"):
        make_loader(os.fspath(packed))
