"""A network trained by Lightning or Accelerate, that writes down which samples it got: for `test_trainers`.

python trainer_ranks.py lightning FOLDER OUT          two ranks, which Lightning starts itself
torchrun … trainer_ranks.py accelerate FOLDER OUT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from loaders.loader import Iteration, Loader
from loaders.transforms import TrainCrop
from loaders.webds_loader import make_loader

Numbers = list[list[int]]


def loader(folder: Any, split: str = "train") -> Loader:
    return make_loader(
        folder,
        split=split,
        batch_size=6,
        transform=TrainCrop(8),
        normalize="imagenet",
        fields=("jpg", "__label__", "__index__"),
        num_workers=1,
        seed=2,
    )


@contextmanager
def handed_out() -> Iterator[Numbers]:
    """The sample numbers of every batch that our own iterators hand out."""
    numbers: Numbers = []
    real = Iteration.__next__

    def noted(self: Iteration) -> Any:
        batch = real(self)
        numbers.append(batch["__index__"].tolist())
        return batch

    with mock.patch.object(Iteration, "__next__", noted):
        yield numbers


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["jpg"].mean((2, 3))), batch["__label__"])


def fit_with_lightning(
    train: Loader, val: Loader | None, *, ckpt_path: str | None = None, **options: Any
) -> tuple[Numbers, Numbers]:
    """Sample numbers by batch that reached the training and the validation step."""
    import lightning

    seen: tuple[Numbers, Numbers] = [], []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(3, 3)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            assert self.trainer.current_epoch == train.epoch
            seen[0].append(batch["__index__"].tolist())
            return loss_of(self.model, batch)

        def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
            if not self.trainer.sanity_checking:
                seen[1].append(batch["__index__"].tolist())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, **quiet, **options)
    trainer.fit(Module(), train, val, ckpt_path=ckpt_path, weights_only=False)
    assert trainer.train_dataloader is train
    return seen


def fit_with_accelerate(train: Loader) -> Numbers:
    """Sample numbers by batch that reached the training loop, two epochs."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 3)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), train)
    assert prepared is train
    seen = []
    for _ in range(2):
        for batch in prepared:
            seen.append(batch["__index__"].tolist())
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def main(trainer: str, folder: str, out: str) -> None:
    with handed_out() as handed, loader(folder) as train, loader(folder, "val") as val:
        if trainer == "lightning":
            seen, seen_val = fit_with_lightning(
                train, val, strategy="ddp", devices=2, enable_checkpointing=False, num_sanity_val_steps=0
            )
        else:
            seen, seen_val = fit_with_accelerate(train), []
    rank = torch.distributed.get_rank()
    found = {"handed": handed, "train": seen, "val": seen_val, "len": len(train)}
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(*sys.argv[1:])
