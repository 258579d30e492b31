"""Batches on their way to a device. On a machine with a GPU, the same on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_helpers import pack_tree, write_tree

from loaders.batches import Made
from loaders.device import DeviceRun, Normalizer, map_tensors
from loaders.options import IMAGENET
from loaders.transforms import EvalCrop
from loaders.webds_loader import make_loader
from packer.errors import SampleError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("device")
    return pack_tree(write_tree(root / "src"), root / "out")


class ListRun:
    """Batches from a list; an exception in it is raised."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.todo = list(batches)
        self.closed = False

    def __iter__(self) -> ListRun:
        return self

    def __next__(self) -> Made:
        if not self.todo:
            raise StopIteration
        item = self.todo.pop(0)
        if isinstance(item, Exception):
            raise item
        return Made(item, [])

    def ready(self) -> bool:
        return bool(self.todo)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalizing_on_the_device_is_normalizing_in_the_worker(
    packed: Path, device: str, dtype: torch.dtype, channels_last: bool
) -> None:
    with make_loader(packed, transform=EvalCrop(24), shuffle=False) as loader:
        images, _ = next(iter(loader))
    with make_loader(packed, transform=EvalCrop(24), shuffle=False, normalize="imagenet", dtype=dtype) as loader:
        want, _ = next(iter(loader))
    normalizer = Normalizer(*IMAGENET, torch.device(device), dtype, channels_last)
    got = normalizer(images.to(device))
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert got.dtype == dtype and got.is_contiguous(memory_format=wanted)
    assert torch.allclose(got.cpu().float(), want.float(), atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_every_batch_arrives_in_order_whatever_its_structure(device: str) -> None:
    images = [torch.full((2, 3, 4, 4), i, dtype=torch.uint8) for i in range(5)]
    where = torch.device(device)
    plain = list(DeviceRun(ListRun([(image, [i, "x"]) for i, image in enumerate(images)]), where, None, None))
    assert [made.batch[1] for made in plain] == [[i, "x"] for i in range(5)]
    assert all(torch.equal(made.batch[0].cpu(), image) for made, image in zip(plain, images, strict=True))
    assert all(made.batch[0].device.type == device for made in plain)
    dicts = [{"jpg": image, "n": torch.tensor(i)} for i, image in enumerate(images)]
    halved = list(DeviceRun(ListRun(dicts), where, lambda image: image / 2, "jpg"))
    assert [made.batch["jpg"].max().item() for made in halved] == [0, 0.5, 1, 1.5, 2]
    assert [made.batch["n"].item() for made in halved] == list(range(5))


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_comes_at_its_place(device: str) -> None:
    run = DeviceRun(ListRun([torch.tensor(0), torch.tensor(1), SampleError("broken", "k", 2)]), torch.device(device),
                    None, None)
    assert [next(run).batch.item(), next(run).batch.item()] == [0, 1]
    with pytest.raises(SampleError, match="broken"):
        next(run)


def test_closing_closes_what_is_behind() -> None:
    behind = ListRun([torch.tensor(0)])
    run = DeviceRun(behind, torch.device("cpu"), None, None)
    run.close()
    assert behind.closed


def test_batches_can_be_sent_to_any_device(packed: Path) -> None:
    """`meta` stands for a device of its own: shapes, dtypes and places without the data."""
    options: dict[str, Any] = {"transform": EvalCrop(24), "batch_size": 16, "device": "meta"}
    with make_loader(packed, **options, dtype=torch.bfloat16, channels_last=True) as loader:
        batches = list(loader)
    assert [images.shape[0] for images, _ in batches] == [16, 16, 8]
    assert {(images.device.type, images.dtype, labels.device.type) for images, labels in batches} == {
        ("meta", torch.bfloat16, "meta")
    }
    with make_loader(packed, **options, fields=("jpg", "__key__"), normalize=False, engine="process") as loader:
        batch = next(iter(loader))
    assert (batch["jpg"].device.type, batch["jpg"].dtype, len(batch["__key__"])) == ("meta", torch.uint8, 16)


def test_structures_survive_mapping() -> None:
    value = {"a": torch.tensor(1), "b": (torch.tensor(2), ["x", torch.tensor(3)]), "c": None}
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert doubled == {"a": torch.tensor(2), "b": (torch.tensor(4), ["x", torch.tensor(6)]), "c": None}
