"""Other people's training loops around a loader: Lightning, Accelerate, torchdata and torch's distributed checkpoints.

What must hold in each: the batches are those that our own iterator hands out, no sample is lost or dealt twice, and a
checkpoint made by the trainer's own means goes on with the very next batch.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import PATIENCE_S
from loader_helpers import flat, packed_splits
from trainer_ranks import Numbers, fit_with_accelerate, fit_with_lightning, handed_out, loader

from loaders.dataset import PackedDataset
from loaders.transforms import TrainCrop
from loaders.webds_loader import make_loader

TRAIN, VAL = 45, 11
EPOCH = -(-TRAIN // 6)  # batches
PROGRAM = Path(__file__).with_name("trainer_ranks.py")

# What these packages warn of is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_splits(tmp_path_factory.mktemp("trainers"), train=TRAIN, val=VAL)


@pytest.fixture(scope="module")
def plain(packed: Path) -> Numbers:
    """Two epochs as a plain loop sees them."""
    with loader(packed) as train:
        return [batch["__index__"].tolist() for _ in range(2) for batch in train]


def need(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[trainers]'")


def run(*command: object) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in found:
        assert rank["handed"] and rank["len"] == 4
    return found


def check_training(ranks: list[dict[str, Any]]) -> None:
    """Both epochs of both ranks: as many batches, every sample, none twice but to make the ranks even."""
    for epoch in (slice(0, 4), slice(4, 8)):
        batches = [rank["train"][epoch] for rank in ranks]
        assert [list(map(len, mine)) for mine in batches] == [[6, 6, 6, 5]] * 2
        assert {number for mine in batches for batch in mine for number in batch} == set(range(TRAIN))


# ---------------------------------------------------------------- Lightning


def test_lightning_trains_and_validates_on_our_iterator(packed: Path, plain: Numbers, tmp_path: Path) -> None:
    need("lightning")
    with handed_out() as handed, loader(packed) as train, loader(packed, "val") as val:
        seen, seen_val = fit_with_lightning(train, val, num_sanity_val_steps=0, default_root_dir=tmp_path)
    assert seen == plain
    assert sorted(handed) == sorted(seen + seen_val), "all that we handed out, and nothing else"
    for epoch in (seen_val[:2], seen_val[2:]):
        assert list(chain.from_iterable(epoch)) == list(range(VAL))


def test_lightnings_sanity_check_shifts_nothing(packed: Path, plain: Numbers, tmp_path: Path) -> None:
    need("lightning")
    with loader(packed) as train, loader(packed, "val") as val:
        seen, seen_val = fit_with_lightning(train, val, num_sanity_val_steps=1, default_root_dir=tmp_path)
    assert seen == plain
    assert list(chain.from_iterable(seen_val)) == [*range(VAL)] * 2


def test_lightnings_checkpoints_hold_our_position(packed: Path, plain: Numbers, tmp_path: Path) -> None:
    """Saved every three steps and at the end of an epoch; each is gone on from, by a new trainer and loader."""
    need("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    def saving(folder: str, **options: Any) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, filename="{step}", save_top_k=-1, **options)

    callbacks = [saving("steps", every_n_train_steps=3), saving("epochs", every_n_epochs=1)]
    with loader(packed) as train:
        fit_with_lightning(train, None, callbacks=callbacks)
    steps = {int(path.stem.partition("=")[2]): path for path in tmp_path.glob("*/*.ckpt")}
    assert sorted(steps) == [3, 6, EPOCH, 9, 12, 15, 2 * EPOCH]
    for step in (3, EPOCH, 12):
        with loader(packed) as train:
            seen, _ = fit_with_lightning(train, None, ckpt_path=str(steps[step]), enable_checkpointing=False)
        assert seen == plain[step:]


def test_lightning_with_ddp(packed: Path, tmp_path: Path) -> None:
    need("lightning")
    run(PROGRAM, "lightning", packed, tmp_path)
    ranks = ranks_of(tmp_path)
    check_training(ranks)
    for epoch in (slice(0, 1), slice(1, 2)):
        assert sorted(chain.from_iterable(chain(*(rank["val"][epoch] for rank in ranks)))) == list(range(VAL))
    for rank in ranks:
        assert sorted(rank["handed"]) == sorted(rank["train"] + rank["val"])


# ---------------------------------------------------------------- Accelerate


def test_accelerate_leaves_the_loader_as_it_is(packed: Path, plain: Numbers) -> None:
    need("accelerate")
    with handed_out() as handed, loader(packed) as train:
        assert fit_with_accelerate(train) == handed == plain


def test_accelerate_on_two_ranks(packed: Path, tmp_path: Path) -> None:
    need("accelerate")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", 2)
    run(*launcher, PROGRAM, "accelerate", packed, tmp_path)
    ranks = ranks_of(tmp_path)
    check_training(ranks)
    for rank in ranks:
        assert rank["handed"] == rank["train"]


def test_accelerate_saves_and_loads_our_position(packed: Path, plain: Numbers, tmp_path: Path) -> None:
    need("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    with loader(packed) as train:
        accelerator.register_for_checkpointing(train)
        iteration = iter(train)
        for _ in range(3):
            next(iteration)
        accelerator.save_state(tmp_path / "state")
        list(iteration)
        accelerator.load_state(tmp_path / "state")
        assert [batch["__index__"].tolist() for batch in train] == plain[3:EPOCH]


# ---------------------------------------------------------------- torch, torchdata


def test_torchs_distributed_checkpoints_take_the_loader(packed: Path, plain: Numbers, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    with loader(packed) as train, loader(packed) as resumed:
        assert isinstance(train, Stateful)
        iteration = iter(train)
        for _ in range(3):
            next(iteration)
        dcp.save({"loader": train}, checkpoint_id=tmp_path / "state", no_dist=True)
        dcp.load({"loader": resumed}, checkpoint_id=tmp_path / "state", no_dist=True)
        assert [batch["__index__"].tolist() for batch in resumed] == plain[3:EPOCH]


def test_torchdatas_stateful_loader_over_our_dataset(packed: Path) -> None:
    """Both ways in: our dataset inside torchdata's loader, and our loader wherever torchdata asks for a Stateful."""
    torchdata = need("torchdata.stateful_dataloader")

    def theirs() -> Any:
        dataset = PackedDataset(packed, transform=TrainCrop(8))
        return torchdata.StatefulDataLoader(dataset, batch_size=6, shuffle=True, num_workers=1)

    torch.manual_seed(4)
    whole = theirs()
    iteration = iter(whole)
    for _ in range(3):
        next(iteration)
    state = whole.state_dict()
    resumed = theirs()
    resumed.load_state_dict(state)
    assert flat(resumed) == flat(iteration)
    with loader(packed) as ours:
        assert isinstance(ours, importlib.import_module("torchdata.stateful_dataloader.stateful").Stateful)


# ---------------------------------------------------------------- what trainers do


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_made_under_inference_mode_are_ordinary_tensors(packed: Path, engine: Any, workers: int) -> None:
    """Evaluation loops run under it; their loaders' workers do not, and training may use the batches later."""
    layer = torch.nn.Linear(3 * 40 * 40, 1)
    options: dict[str, Any] = {"transform": TrainCrop(40), "normalize": "imagenet"}
    with make_loader(packed, batch_size=6, engine=engine, num_workers=workers, **options) as evaluating:
        with torch.inference_mode():
            batches = list(evaluating)
        for images, _ in batches:
            layer(images.flatten(1)).sum().backward()
    assert sum(len(labels) for _, labels in batches) == TRAIN


def test_an_iterator_that_is_thrown_away_uses_nothing_up(packed: Path, plain: Numbers) -> None:
    with loader(packed) as train:
        iter(train)
        assert (train.epoch, train.state_dict()["consumed"]) == (0, 0)
        state = {**train.state_dict(), "consumed": 12}
        assert [batch["__index__"].tolist() for batch in train] == plain[:EPOCH]
    with loader(packed) as train:
        train.load_state_dict(state)
        iter(train)
        assert [batch["__index__"].tolist() for batch in train] == plain[2:EPOCH]
        assert train.epoch == 1


def test_an_epoch_may_be_set_until_its_first_batch(packed: Path, plain: Numbers) -> None:
    with loader(packed) as train:
        iteration = iter(train)
        train.set_epoch(1)
        assert [batch["__index__"].tolist() for batch in iteration] == plain[EPOCH:]
        train.set_epoch(0)
        iteration = iter(train)
        numbers = [next(iteration)["__index__"].tolist()]
        train.set_epoch(1)  # from now on it is the next one that is meant
        numbers += [batch["__index__"].tolist() for batch in iteration]
        assert numbers == plain[:EPOCH]
        assert [batch["__index__"].tolist() for batch in train] == plain[EPOCH:]
