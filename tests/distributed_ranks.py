"""What each rank of `test_distributed` runs, started by torchrun: iterates loaders, and writes down what it got.

python -m torch.distributed.run … distributed_ranks.py FOLDER OUT [STATE]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loaders.loader import Loader
from loaders.transforms import EvalCrop, TrainCrop
from loaders.webds_loader import make_loader

BATCH_SIZE = 5
STEPS = 3  # of the epoch that is broken off


def loader(folder: str, engine: Any, split: str) -> Loader:
    return make_loader(
        folder,
        split=split,
        batch_size=BATCH_SIZE,
        transform=TrainCrop(8) if split == "train" else EvalCrop(8),
        fields=("jpg", "__label__", "__index__"),
        engine=engine,
        num_workers=1,
        seed=3,
    )


def in_step(batches: Any) -> list[list[int]]:
    """Sample numbers by batch. As in training, every step waits for all ranks: one with fewer would stop them."""
    numbers = []
    for batch in batches:
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        assert int(ranks) == dist.get_world_size()
        numbers.append(batch["__index__"].tolist())
    return numbers


def run(folder: str, engine: str, state: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with loader(folder, engine, "train") as train:
        found["len"] = len(train)
        found["train"] = [in_step(train), in_step(train)]
        iteration = iter(train)
        found["begun"] = [next(iteration)["__index__"].tolist() for _ in range(STEPS)]
        found["state"] = train.state_dict()
    with loader(folder, engine, "val") as val:
        found["val len"] = len(val)
        found["val"] = [batch["__index__"].tolist() for batch in val]
    if state is not None:
        with loader(folder, engine, "train") as train:
            train.load_state_dict(json.loads(Path(state).read_text()))
            found["rest"] = in_step(train)
            found["next epoch"] = train.epoch
    return found


def main(folder: str, out: str, state: str | None = None) -> None:
    made_before = loader(folder, "thread", "train")
    dist.init_process_group("gloo")
    found: dict[str, Any] = {engine: run(folder, engine, state) for engine in ("thread", "process")}
    found["made before the group"] = in_step(made_before)
    made_before.close()
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
