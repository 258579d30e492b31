"""What a loader gives: samples, labels, fields, order, and where it stands."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import SIZES, flat, jpeg, pack_tree, write_tree
from PIL import Image
from torch.utils.data import DataLoader

from loaders import Padded, folder_loader, pad_collate
from loaders.dataset import PackedDataset
from loaders.loader import Loader
from loaders.options import Sampling
from loaders.samples import parse_boxes
from loaders.transforms import EvalCrop, Identity, TrainCrop
from loaders.webds_loader import make_loader
from packer.errors import ManifestError, SampleError, StateError, UsageError, WorkerDiedError
from packer.packed import Packed

SAMPLES = 40


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loader")
    return pack_tree(write_tree(root / "src", samples=SAMPLES), root / "out")


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of jpg, json, txt and npy."""
    root = tmp_path_factory.mktemp("rich")
    return pack_tree(write_tree(root / "src", samples=12, sidecars=True), root / "out")


@pytest.fixture(scope="module")
def equal_sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("equal")
    return pack_tree(write_tree(root / "src", samples=SAMPLES, sizes=((32, 24),)), root / "out")


def number_of(path: str) -> int:
    """The picture's number in `write_tree`, from c1/p016.jpg."""
    return int(path[-7:-4])


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def indices(loader: Loader) -> list[list[int]]:
    return [batch["__index__"].tolist() for batch in loader]


def index_loader(packed: Path, **options: Any) -> Loader:
    return make_loader(packed, fields=("__index__",), **{"batch_size": 7, "num_workers": 2, **options})


# ---------------------------------------------------------------- samples


def test_images_and_labels_are_those_of_the_folder(packed: Path) -> None:
    seen = {}
    loader = make_loader(packed, batch_size=1, fields=("jpg", "__label__", "__path__", "__key__"), num_workers=1)
    with loader:
        for batch in loader:
            [path], [key] = batch["__path__"], batch["__key__"]
            number = number_of(path)
            want = np.asarray(Image.open(io.BytesIO(jpeg(number, SIZES[number % len(SIZES)]))))
            assert np.array_equal(batch["jpg"][0].permute(1, 2, 0).numpy(), want)
            assert (path, key) == (f"c{number % 3}/p{number:03d}.jpg", f"c{number % 3}/p{number:03d}")
            seen[number] = int(batch["__label__"])
    assert seen == {number: number % 3 for number in range(SAMPLES)}
    assert loader.classes == ("c0", "c1", "c2")


def test_a_batch_is_uint8_images_and_int64_labels(packed: Path) -> None:
    with make_loader(packed, batch_size=16, transform=TrainCrop(24)) as loader:
        images, labels = next(iter(loader))
    assert (images.shape, images.dtype) == ((16, 3, 24, 24), torch.uint8)
    assert (labels.shape, labels.dtype) == ((16,), torch.int64)


@pytest.mark.parametrize("name", ["packed", "equal_sized"])
def test_normalized_batches_are_what_the_formula_gives(name: str, request: pytest.FixtureRequest) -> None:
    path, transform = request.getfixturevalue(name), EvalCrop(24) if name == "packed" else None
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    with make_loader(path, transform=transform, shuffle=False) as plain:
        pixels = torch.cat([images for images, _ in plain]).double() / 255
    with make_loader(path, transform=transform, shuffle=False, normalize=(mean, std)) as loader:
        got = torch.cat([images for images, _ in loader])
    want = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, atol=1e-5)


def test_device_cpu_gives_normalized_floats(packed: Path) -> None:
    with make_loader(packed, transform=EvalCrop(24), shuffle=False, device="cpu") as loader:
        images, _ = next(iter(loader))
    with make_loader(packed, transform=EvalCrop(24), shuffle=False, normalize="imagenet") as same:
        assert torch.equal(images, next(iter(same))[0])
    with make_loader(packed, transform=EvalCrop(24), shuffle=False, device="cpu", normalize=False) as plain:
        assert next(iter(plain))[0].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_other_dtypes_and_memory_formats(packed: Path, dtype: torch.dtype, engine: Any) -> None:
    options: dict[str, Any] = {"transform": EvalCrop(24), "shuffle": False, "normalize": "imagenet"}
    with make_loader(packed, **options) as reference:
        want = next(iter(reference))[0].to(dtype)
    with make_loader(packed, **options, dtype=dtype, channels_last=True, engine=engine, num_workers=1) as loader:
        images, _ = next(iter(loader))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, want)


def test_pictures_that_keep_their_sizes_are_padded(packed: Path) -> None:
    with make_loader(packed, batch_size=8, shuffle=False) as loader:
        images, labels = next(iter(loader))
    assert isinstance(images, Padded)
    dataset = PackedDataset(packed)
    for j in range(8):
        image, label = dataset[j]
        _, height, width = images.sizes[j].tolist()
        assert torch.equal(images.data[j, :, :height, :width], image)
        assert int(images.mask[j].sum()) == image.numel()
        assert label == labels[j]


def test_padding_is_put_on_after_normalizing(packed: Path) -> None:
    with make_loader(packed, batch_size=8, shuffle=False) as loader:
        plain, _ = next(iter(loader))
    with make_loader(packed, batch_size=8, shuffle=False, normalize=((0.5,) * 3, (0.25,) * 3)) as loader:
        images, _ = next(iter(loader))
    want = torch.where(plain.mask, (plain.data / 255 - 0.5) / 0.25, 0.0)
    assert torch.allclose(images.data, want, atol=1e-5)


def test_pictures_of_one_size_need_no_padding(equal_sized: Path) -> None:
    for transform in (None, Identity()):
        with make_loader(equal_sized, batch_size=8, shuffle=False, transform=transform) as loader:
            images, _ = next(iter(loader))
        want = torch.stack([PackedDataset(equal_sized)[j][0] for j in range(8)])
        assert torch.equal(images, want)


def test_the_index_may_be_wrong_about_sizes(equal_sized: Path, tmp_path: Path) -> None:
    """One picture of another size among those that the index calls equal is an error that names it."""
    out = pack_tree(write_tree(tmp_path / "src", samples=6, sizes=((32, 24), (32, 24), (24, 32))), tmp_path / "out")
    rows = np.lib.format.open_memmap(out / "train.index.npy", mode="r+")
    rows["height"], rows["width"] = 24, 32
    rows.flush()
    with make_loader(out, batch_size=6) as loader, pytest.raises(SampleError, match=r"sample \d 'c\d/p\d+'"):
        next(iter(loader))


def test_fields_are_decoded_by_extension(rich: Path) -> None:
    fields = ("jpg", "json", "txt", "npy", "__key__", "__index__")
    with make_loader(rich, batch_size=12, fields=fields, shuffle=False, transform=EvalCrop(16)) as loader:
        [batch] = loader
    assert tuple(batch) == fields
    assert batch["jpg"].shape == (12, 3, 16, 16)
    assert batch["__index__"].tolist() == list(range(12))
    for j in range(12):
        number = batch["json"]["number"][j].item()
        assert batch["txt"][j] == f"picture {number}"
        assert batch["__key__"][j] == f"c{number % 3}/p{number:03d}"
        length = number % 4 + 1
        assert batch["npy"].data[j, :length].tolist() == list(range(length))
        assert batch["npy"].sizes[j].tolist() == [length]


def test_one_field_may_stand_alone(rich: Path) -> None:
    with make_loader(rich, fields="txt", batch_size=5, shuffle=False) as loader:
        assert [len(batch["txt"]) for batch in loader] == [5, 5, 2]


def test_pickles_are_refused(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "src", samples=3)
    for path in source.glob("*/*.jpg"):
        path.with_suffix(".pkl").write_bytes(pickle.dumps({"a": 1}))
    out = pack_tree(source, tmp_path / "out")
    with pytest.raises(UsageError, match="is a pickle"):
        make_loader(out, fields=("jpg", "pkl"))
    with make_loader(out, batch_size=3) as loader:
        assert len(next(iter(loader))[1]) == 3


def test_npy_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "src", samples=3)
    for path in source.glob("*/*.jpg"):
        np.save(path.with_suffix(".npy"), np.array([{"a": 1}], object), allow_pickle=True)
    out = pack_tree(source, tmp_path / "out")
    refused = pytest.raises(SampleError, match=r"field 'npy'.*objects")
    with make_loader(out, fields=("npy",), num_workers=1) as loader, refused:
        next(iter(loader))


def test_pictures_of_several_formats_are_one_field(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "src", samples=6)
    for path in sorted(source.glob("*/*.jpg"))[::2]:
        Image.open(path).save(path.with_suffix(".png"))
        path.unlink()
    out = pack_tree(source, tmp_path / "out")
    with make_loader(out, batch_size=6, transform=EvalCrop(16)) as loader:
        images, labels = next(iter(loader))
    assert images.shape == (6, 3, 16, 16)
    with make_loader(out, batch_size=6, fields=("jpg;png", "__path__"), num_workers=1) as loader:
        batch = next(iter(loader))
    assert {os.path.splitext(path)[1] for path in batch["__path__"]} == {".jpg", ".png"}
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]


def test_masks_and_boxes_follow_the_crop(tmp_path: Path) -> None:
    """A picture that is one white square on black: its mask and its box must lie where the square is."""
    root = tmp_path / "src"
    for name in ("images", "masks", "labels"):
        (root / name).mkdir(parents=True)
    for i in range(8):
        pixels = np.zeros((60, 80, 3), np.uint8)
        top, left = 8 + 2 * i, 10 + 3 * i
        pixels[top : top + 24, left : left + 24] = 255
        Image.fromarray(pixels).save(root / "images" / f"p{i}.png")
        Image.fromarray((pixels[..., 0] > 0).astype(np.uint8) * 7).save(root / "masks" / f"p{i}.png")
        box = [(left + 12) / 80, (top + 12) / 60, 24 / 80, 24 / 60]
        (root / "labels" / f"p{i}.txt").write_text(f"3 {' '.join(map(str, box))}\n")
    out = pack_tree(root, tmp_path / "out")
    fields = ("png", "mask.png", "txt")
    with make_loader(out, batch_size=8, fields=fields, targets={"txt": "yolo"}, num_workers=1,
                     transform=TrainCrop(48, scale=(0.6, 1.0))) as loader:
        [batch] = loader
    boxes = batch["txt"].data if isinstance(batch["txt"], Padded) else batch["txt"]
    for image, mask, [box] in zip(batch["png"], batch["mask.png"], boxes.unsqueeze(1).flatten(1, 2), strict=True):
        bright = image.float().mean(0) > 127
        assert mask.shape == (48, 48) and set(mask.unique().tolist()) <= {0, 7}
        assert ((mask > 0) == bright).float().mean() > 0.97
        rows, columns = (torch.nonzero(bright.any(axis)).flatten() for axis in (1, 0))
        want = [(columns[0] + columns[-1] + 1) / 96, (rows[0] + rows[-1] + 1) / 96]
        assert box[0] == 3 and abs(box[1] - want[0]) < 0.04 and abs(box[2] - want[1]) < 0.04


def shrink(image: Image.Image) -> Image.Image:
    return image.resize((8, 8))


def test_targets_that_a_foreign_transform_leaves_behind_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, field in (("images", "jpg"), ("masks", "png")):
        (tmp_path / "src" / name).mkdir(parents=True)
        Image.new("L", (9, 9)).save(tmp_path / "src" / name / f"a.{field}")
    out = pack_tree(tmp_path / "src", tmp_path / "out", shard_samples=None)
    make_loader(out, fields=("jpg", "mask.png"), transform=EvalCrop(8)).close()
    make_loader(out, fields=("jpg",), transform=shrink).close()
    assert "stay as stored" not in caplog.text
    make_loader(out, fields=("jpg", "mask.png"), transform=shrink).close()
    assert "these fields stay as stored: mask.png;" in caplog.text


def test_polygons_are_not_taken_for_boxes() -> None:
    assert parse_boxes(b"1 0.5 0.5 0.2 0.2 0.9\n").tolist() == [pytest.approx([1, 0.5, 0.5, 0.2, 0.2])]
    for line, match in ((b"1 0.1 0.1 0.2 0.1 0.2 0.2", r"7 numbers \(a polygon\?\)"), (b"1 0.5 0.5", "3 numbers")):
        with pytest.raises(ValueError, match=match):
            parse_boxes(line)


def test_sixteen_bits_are_kept_on_request(tmp_path: Path) -> None:
    root = tmp_path / "src" / "c0"
    root.mkdir(parents=True)
    pixels = np.arange(30 * 20, dtype=np.uint16).reshape(30, 20) * 109
    for i, size in enumerate([(30, 20), (20, 20)]):
        Image.fromarray(pixels[: size[0], : size[1]]).save(root / f"p{i}.png")
    out = pack_tree(tmp_path / "src", tmp_path / "out", shuffle=False)
    with make_loader(out, fields=("png",), targets={"png": "stored"}, shuffle=False, num_workers=1) as loader:
        [batch] = loader
    assert batch["png"].data.dtype == torch.uint16
    assert np.array_equal(batch["png"].data[0, 0].numpy(), pixels)
    with make_loader(out, shuffle=False, num_workers=1) as loader:
        images, _ = next(iter(loader))
    assert np.array_equal(images.data[0, 0].numpy(), np.rint(pixels / 257).astype(np.uint8))


def to_double(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.resize((8, 8)), np.float64))


def test_what_a_foreign_transform_gives_is_not_cast(packed: Path) -> None:
    with make_loader(packed, transform=to_double, num_workers=1) as loader:
        images, _ = next(iter(loader))
    assert (images.dtype, images.shape) == (torch.float64, (40, 8, 8, 3))
    refused = pytest.raises(SampleError, match=r"normalize works on uint8 pixels, .* gives a torch\.float64")
    with make_loader(packed, transform=to_double, normalize="imagenet", num_workers=1) as loader, refused:
        next(iter(loader))


def test_unknown_fields_and_splits_are_named(packed: Path) -> None:
    with pytest.raises(UsageError, match="no field 'png'; it has: jpg, cls, __key__"):
        make_loader(packed, fields=("png",))
    with pytest.raises(ManifestError, match="no split 'val'; it has: train"):
        make_loader(packed, split="val")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"engine": "threads"}, "engine must be one of"),
        ({"normalize": "imagenette"}, "normalize must be"),
        ({"normalize": ((0.5,), (0.5,))}, "three numbers"),
        ({"shuffle": "windows"}, "shuffle must be one of"),
        ({"preload": "ram"}, "preload must be one of"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"fields": ("jpg", "jpg")}, "twice"),
        ({"dtype": torch.uint8}, "dtype must be one of"),
        ({"transform": 3}, "transform must be callable"),
        ({"transform": TrainCrop}, "transform is the class TrainCrop; give an instance"),
        ({"normalize": ((0, 0, 0), (1, 1, float("nan")))}, "normalize must be"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"drop_last": "no"}, "drop_last must be one of True, False"),
        ({"channels_last": 1}, "channels_last must be one of True, False"),
        ({"device": "gpu"}, "device must be 'cpu', 'cuda'"),
        ({"preload": True}, "preload must be one of"),
        ({"preload": "memory:4"}, "preload must be one of"),
        ({"memory_budget": "4GB"}, r"memory_budget must be an integer of at least 0 \(bytes\)"),
        ({"targets": "mask"}, "targets must be like"),
        ({"sampling": "balance"}, "sampling must be a loaders.options.Sampling"),
        ({"rank": "0", "world_size": 2}, "rank must be an integer"),
        ({"targets": {"txt": "mask"}}, "not among fields"),
    ],
)
def test_options_that_cannot_be_meant(packed: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make_loader(packed, **options)


@pytest.mark.parametrize("path", [[], 5, None])
def test_a_path_that_cannot_be_meant(path: Any) -> None:
    with pytest.raises(UsageError, match="path must be a folder, or several in a list"):
        make_loader(path)


@pytest.mark.parametrize("options", [{"weights": "abc"}, {"epoch_samples": 2.5}, {"window_shards": 0}])
def test_sampling_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} must be"):
        Sampling(**options)


# ---------------------------------------------------------------- order


def test_every_sample_once_and_len_is_exact(packed: Path) -> None:
    for drop_last, want in ((False, 6), (True, 5)):
        with index_loader(packed, drop_last=drop_last) as loader:
            batches = indices(loader)
            assert len(loader) == len(batches) == want
            assert len(set(joined(batches))) == sum(map(len, batches)) == (35 if drop_last else 40)


def test_the_train_split_is_shuffled_anew_each_epoch_and_others_are_not(packed: Path, tmp_path: Path) -> None:
    with index_loader(packed) as loader:
        first, second = indices(loader), indices(loader)
        assert first != second and sorted(joined(first)) == sorted(joined(second))
        loader.set_epoch(0)
        assert indices(loader) == first
    (tmp_path / "src").mkdir()
    write_tree(tmp_path / "src" / "val", samples=9)
    with index_loader(pack_tree(tmp_path / "src", tmp_path / "out"), split="val") as loader:
        assert joined(indices(loader)) == list(range(9))


def test_subsets(packed: Path) -> None:
    keys = [Packed(packed)["train"].key(i) for i in (5, 3)]
    for subset, want in (([4, 2, 9], [4, 2, 9]), (keys, [5, 3]), (np.arange(40) < 2, [0, 1])):
        with index_loader(packed, subset=subset, shuffle=False) as loader:
            assert joined(indices(loader)) == want
    folds = []
    for k in range(1, 4):
        with index_loader(packed, subset=f"{k}/3", shuffle=False) as loader:
            folds.append(joined(indices(loader)))
    assert sorted(joined(folds)) == list(range(40))
    with pytest.raises(UsageError, match="1 keys of the subset are not in the dataset: 'c9/x'"):
        index_loader(packed, subset=["c9/x"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_an_epoch(packed: Path, world_size: int) -> None:
    def ranks(**options: Any) -> list[list[list[int]]]:
        found = []
        for rank in range(world_size):
            with index_loader(packed, rank=rank, world_size=world_size, num_workers=1, **options) as loader:
                found.append(indices(loader))
                assert len(loader) == len(found[-1])
        return found

    training = ranks(shuffle=True)
    assert len({len(batches) for batches in training}) == 1, "every rank has as many batches"
    assert set(joined(joined(training))) == set(range(40))
    evaluation = ranks(shuffle=False)
    assert sorted(joined(joined(evaluation))) == list(range(40)), "every sample exactly once"


def test_windows_balance_weights_and_buckets(packed: Path) -> None:
    with index_loader(packed, shuffle="window", sampling=Sampling(window_shards=1)) as loader:
        shards = Packed(packed)["train"].rows["shard"][joined(indices(loader))]
        assert (np.diff(shards) != 0).sum() == 3, "four shards, one after the other"
    with make_loader(packed, sampling=Sampling(balance=True, epoch_samples=39), transform=EvalCrop(8)) as loader:
        assert torch.bincount(torch.cat([labels for _, labels in loader])).tolist() == [13, 13, 13]
    weights = np.zeros(40)
    weights[[3, 8]] = 1, 3
    with index_loader(packed, sampling=Sampling(weights=weights, epoch_samples=40)) as loader:
        assert np.bincount(joined(indices(loader)), minlength=40)[[3, 8]].tolist() == [10, 30]
    with make_loader(packed, batch_size=8, sampling=Sampling(bucket=True)) as loader:
        padded = sum(isinstance(images, Padded) for images, _ in loader)
        assert padded <= 2, "only batches at a boundary between sizes"


# ---------------------------------------------------------------- where it stands


@settings(max_examples=25)
@given(
    taken=st.integers(0, 6), workers=st.integers(0, 3), prefetch=st.integers(1, 5), new_size=st.integers(1, 12),
    new_world=st.integers(1, 3),
)
def test_an_interrupted_epoch_goes_on_exactly(
    packed: Path, taken: int, workers: int, prefetch: int, new_size: int, new_world: int
) -> None:
    """For any number of workers, prefetched batches, and onto another batch size and number of ranks."""
    with index_loader(packed, num_workers=workers, prefetch=prefetch, seed=9) as loader:
        whole = joined(indices(loader))
    with index_loader(packed, num_workers=workers, prefetch=prefetch, seed=9) as loader:
        iteration = iter(loader)
        had = [next(iteration)["__index__"].tolist() for _ in range(taken)]
        state = json.loads(json.dumps(loader.state_dict()))
    assert joined(had) == whole[: 7 * taken]
    rest: list[list[int]] = []
    for rank in range(new_world):
        with index_loader(packed, seed=9, batch_size=new_size, rank=rank, world_size=new_world,
                          num_workers=1) as resumed:
            resumed.load_state_dict(state)
            assert resumed.epoch == (1 if taken == 6 else 0)
            rest.append(joined(indices(resumed)))
    if taken < 6:
        assert set(joined(rest)) | set(whole[: 7 * taken]) == set(range(40))
        assert len(joined(rest)) - (40 - 7 * taken) < new_world
    else:
        assert set(joined(rest)) == set(range(40)), "an epoch that is over resumes as the next"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_resumed_batches_are_those_that_were_missed(packed: Path, engine: Any) -> None:
    options: dict[str, Any] = {"transform": TrainCrop(16), "batch_size": 6, "engine": engine, "num_workers": 2}
    with make_loader(packed, **options) as loader:
        list(loader)
        whole = flat(loader)
        third = flat(loader)
    with make_loader(packed, **options) as loader:
        loader.set_epoch(1)
        iteration = iter(loader)
        next(iteration), next(iteration)
        state = loader.state_dict()
    with make_loader(packed, **{**options, "num_workers": 1}) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(1)  # as training scripts do; the position within this epoch is kept
        assert flat(loader) == whole[2:]
        assert flat(loader) == third


def test_a_state_of_something_else_is_refused(packed: Path) -> None:
    with index_loader(packed) as loader, index_loader(packed, seed=1) as other:
        with pytest.raises(StateError, match="seed"):
            other.load_state_dict(loader.state_dict())
        with pytest.raises(StateError):
            other.load_state_dict({"epoch": 3})


def test_the_epoch_advances_by_itself(packed: Path) -> None:
    with index_loader(packed) as loader:
        assert loader.epoch == 0
        for _ in loader:
            assert loader.epoch == 0
        assert loader.epoch == 1
        for _ in loader:
            break
        assert loader.epoch == 1, "what was broken off is still where it stands"
        iter(loader)
        assert loader.epoch == 2


def test_a_loader_pickles_with_its_position(packed: Path) -> None:
    with index_loader(packed) as loader:
        iteration = iter(loader)
        next(iteration)
        copy = pickle.loads(pickle.dumps(loader))
        assert [batch["__index__"].tolist() for batch in iteration] == indices(copy)


# ---------------------------------------------------------------- errors that are skipped


@pytest.fixture
def holed(tmp_path: Path) -> Iterator[Path]:
    """Two pictures of twelve are overwritten with zeros."""
    out = pack_tree(write_tree(tmp_path / "src", samples=12), tmp_path / "out", shard_samples=None)
    split = Packed(out)["train"]
    with open(split.shard_path(0), "r+b") as f:
        for number in (2, 7):
            f.seek(int(split.rows[number]["jpg:offset"]))
            f.write(bytes(int(split.rows[number]["jpg:length"])))
    return out


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_skipped_samples_are_left_out_and_counted(holed: Path, engine: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "engine": engine, "num_workers": 2}
    with make_loader(holed, **options, transform=EvalCrop(16), on_error="skip",
                     fields=("jpg", "__index__", "__key__")) as loader:
        batches = list(loader)
        assert [batch["__index__"].tolist() for batch in batches] == [[0, 1, 3], [4, 5, 6], [8, 9, 10, 11]]
        assert [batch["jpg"].shape[0] for batch in batches] == [3, 3, 4]
        assert [error.number for error in loader.skipped] == [2, 7]
        dataset = PackedDataset(holed, transform=EvalCrop(16), fields=("jpg", "__index__"))
        for batch in batches:
            for image, number in zip(batch["jpg"], batch["__index__"].tolist(), strict=True):
                assert torch.equal(image, dataset[number]["jpg"])
        list(loader)
        assert len(loader.skipped) == 2, "counted per epoch"


def test_too_many_skips_are_an_error(holed: Path) -> None:
    options: dict[str, Any] = {"shuffle": False, "on_error": "skip", "max_skipped": 1, "transform": EvalCrop(16)}
    with make_loader(holed, batch_size=4, **options) as loader:
        iteration = iter(loader)
        next(iteration)
        with pytest.raises(SampleError, match=r"2 samples skipped \(max_skipped=1\); the last: .*sample 7"):
            next(iteration)
    nothing = pytest.raises(SampleError, match="no sample of a batch is left")
    with make_loader(holed, batch_size=1, subset=[2, 3], shuffle=False, on_error="skip") as loader, nothing:
        next(iter(loader))


def test_a_failing_disk_is_never_skipped(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> bytes:
        raise OSError(5, "Input/output error")

    with make_loader(packed, on_error="skip", transform=EvalCrop(16), num_workers=1) as loader:
        monkeypatch.setattr("os.pread", broken)
        with pytest.raises(SampleError, match="Input/output error") as caught:
            next(iter(loader))
        assert isinstance(caught.value.__cause__, OSError)


# ---------------------------------------------------------------- hooks, and torch's own DataLoader


def double(batch: Any) -> Any:
    images, labels = batch
    return images, labels * 2


def count_samples(samples: list[Any]) -> int:
    return len(samples)


def test_hooks_for_batches(packed: Path) -> None:
    with make_loader(packed, shuffle=False, transform=EvalCrop(8), batch_transform=double) as loader:
        labels = next(iter(loader))[1]
    with make_loader(packed, shuffle=False, transform=EvalCrop(8)) as plain:
        assert torch.equal(labels, next(iter(plain))[1] * 2)
    for engine in ("auto", "thread"):
        options: dict[str, Any] = {"collate_fn": count_samples, "engine": engine, "num_workers": 2}
        with make_loader(packed, batch_size=16, transform=EvalCrop(8), **options) as loader:
            assert list(loader) == [16, 16, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_dataset_in_torchs_dataloader_gives_the_same_samples(packed: Path, workers: int) -> None:
    dataset = PackedDataset(packed, transform=TrainCrop(24), normalize="imagenet", seed=4)
    dataset.set_epoch(3)
    theirs = DataLoader(dataset, batch_size=8, num_workers=workers)
    options: dict[str, Any] = {"transform": TrainCrop(24), "normalize": "imagenet", "seed": 4, "shuffle": False}
    with make_loader(packed, batch_size=8, **options) as ours:
        ours.set_epoch(3)
        assert flat(theirs) == flat(ours)


def test_the_dataset_by_number(packed: Path) -> None:
    dataset = PackedDataset(packed, subset=[3, 1])
    assert len(dataset) == 2 and dataset.classes == ("c0", "c1", "c2")
    image, label = dataset[-1]
    whole = PackedDataset(packed)
    assert torch.equal(image, whole[1][0]) and label == whole[1][1] == dataset.targets[1]
    with pytest.raises(IndexError):
        dataset[2]
    batch = next(iter(DataLoader(whole, batch_size=4, collate_fn=pad_collate)))
    assert isinstance(batch[0], Padded)
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[0][0], dataset[0][0])


# ---------------------------------------------------------------- several datasets


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve more samples of the same classes, with sidecars."""
    root = tmp_path_factory.mktemp("other")
    return pack_tree(write_tree(root / "src", samples=12, sidecars=True), root / "out")


def test_several_datasets_are_one(packed: Path, other: Path) -> None:
    options: dict[str, Any] = {"fields": ("__index__", "__key__", "txt"), "num_workers": 1, "batch_size": 7}
    with make_loader([packed, other], **options, seed=2) as loader:
        batches = list(loader)
        assert len(loader) == len(batches) == 8
        assert loader.classes == ("c0", "c1", "c2")
    numbers = joined([batch["__index__"].tolist() for batch in batches])
    assert sorted(numbers) == list(range(52))
    for batch in batches:
        for number, key, text in zip(batch["__index__"].tolist(), batch["__key__"], batch["txt"], strict=True):
            split = Packed(other if number >= 40 else packed)["train"]
            assert key == split.key(number - 40 if number >= 40 else number)
            assert text == (f"picture {int(key[-3:])}" if number >= 40 else None)


@pytest.mark.parametrize("preload", [None, "memory", "shm"])
def test_datasets_are_mixed_in_shares(packed: Path, other: Path, preload: str | None, tmp_path: Path) -> None:
    sampling = Sampling(weights=(1, 3), epoch_samples=40)
    preload = f"shm:{tmp_path}" if preload == "shm" else preload
    with make_loader([packed, other], sampling=sampling, transform=EvalCrop(16), fields=("jpg", "__index__"),
                     preload=preload, batch_size=10) as loader:
        first, state = list(loader), loader.state_dict()
        second = list(loader)
        loader.load_state_dict(state)
        assert flat(loader) == flat(second)
    numbers = torch.cat([batch["__index__"] for batch in first])
    assert ((numbers < 40).sum().item(), (numbers >= 40).sum().item()) == (10, 30)
    assert first[0]["jpg"].shape == (10, 3, 16, 16)
    with pytest.raises(UsageError, match="one for each of the 2 datasets"):
        make_loader([packed, other], sampling=Sampling(weights=(1, 2, 3)))


def test_a_subset_of_several_datasets(packed: Path, other: Path) -> None:
    with index_loader([packed, other], subset=[3, 45, 41], shuffle=False) as loader:  # type: ignore[arg-type]
        assert joined(indices(loader)) == [3, 45, 41]


def test_datasets_of_different_classes_do_not_mix(packed: Path, tmp_path: Path) -> None:
    stranger = pack_tree(write_tree(tmp_path / "src", samples=4, classes=4), tmp_path / "out")
    with pytest.raises(UsageError, match="different classes"):
        make_loader([packed, stranger])


# ---------------------------------------------------------------- functions and iterations that misbehave


def refuse(image: Image.Image) -> None:
    raise ValueError("not today")


def no_more(batch: Any) -> None:
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_transform_raises_is_not_blamed_on_the_data(packed: Path, workers: int) -> None:
    with (
        make_loader(packed, transform=refuse, engine="process", num_workers=workers) as loader,
        pytest.raises(SampleError, match="field 'jpg': the transform raised ValueError: not today") as raised,
    ):
        list(loader)
    assert "packer verify" not in str(raised.value)


@pytest.mark.parametrize(("engine", "workers"), [("thread", 0), ("thread", 1), ("process", 1)])
def test_a_stray_stop_iteration_does_not_end_the_epoch(packed: Path, engine: Any, workers: int) -> None:
    for option in ("collate_fn", "batch_transform"):
        options: dict[str, Any] = {option: no_more, "engine": engine, "num_workers": workers}
        with (
            make_loader(packed, transform=EvalCrop(8), **options) as loader,
            pytest.raises(UsageError, match=f"{option} raised StopIteration"),
        ):
            list(loader)


def test_an_iteration_that_was_ended_early_says_so(packed: Path) -> None:
    with index_loader(packed) as loader:
        ends: list[tuple[Callable[[], Any], str]] = [
            (lambda: iter(loader), "another iter"),
            (lambda: loader.load_state_dict(loader.state_dict()), "load_state_dict"),
            (loader.close, "close"),
        ]
        for end, by in ends:
            iteration = iter(loader)
            next(iteration)
            end()
            with pytest.raises(UsageError, match=f"ended by {by}.* before its epoch was over"):
                next(iteration)
        iteration = iter(loader)
        assert len(list(iteration)) == len(loader)
        iter(loader)
        assert list(iteration) == [], "it was over by itself"


@pytest.mark.parametrize("epoch", [-1, 1.5, "3", None])
def test_epochs_that_cannot_be_meant(packed: Path, epoch: Any) -> None:
    with index_loader(packed) as loader, pytest.raises(UsageError, match="epoch must be an integer of at least 0"):
        loader.set_epoch(epoch)


def test_integers_may_be_numpys(packed: Path) -> None:
    with index_loader(packed, seed=3, batch_size=8) as loader:
        loader.set_epoch(2)
        want = indices(loader)
    with index_loader(packed, seed=np.int64(3), batch_size=np.int32(8)) as loader:
        loader.set_epoch(np.int64(2))  # type: ignore[arg-type] # as numpy's loops give it
        assert indices(loader) == want
        assert {type(value) for value in loader.state_dict().values()} == {int, str}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_relative_path_holds_after_a_change_of_directory(
    packed: Path, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"transform": EvalCrop(8), "engine": "process", "num_workers": workers}
    for make, path in ((make_loader, packed), (folder_loader.make_loader, packed.parent / "src")):
        monkeypatch.chdir(path.parent)
        with make(path.name, **options) as loader:
            monkeypatch.chdir(tmp_path)
            assert len(list(loader)) == len(loader)


def to_one_channel(image: Image.Image) -> torch.Tensor:
    return torch.zeros(1, 8, 8, dtype=torch.uint8)


def test_pixels_of_other_channels_are_not_spread_over_three(packed: Path) -> None:
    with make_loader(packed, transform=to_one_channel, num_workers=0, engine="process") as loader:
        assert next(iter(loader))[0].shape[1:] == (1, 8, 8)
    with (
        make_loader(packed, transform=to_one_channel, normalize="imagenet", num_workers=0, engine="process") as loader,
        pytest.raises(SampleError, match=r"normalize works on \(3, H, W\) pixels, the transform gives \(1, 8, 8\)"),
    ):
        next(iter(loader))


def leave(image: Image.Image) -> None:
    os._exit(7)


def test_a_worker_that_ends_by_itself_is_not_said_to_lack_memory(packed: Path) -> None:
    with (
        make_loader(packed, transform=leave, num_workers=1, engine="process") as loader,
        pytest.raises(WorkerDiedError, match="ended with status 7; its own error is on standard error"),
    ):
        next(iter(loader))
