"""Real ranks, started by torchrun: each sample once, equal steps, and states that fit any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_S
from distributed_ranks import BATCH_SIZE, STEPS
from loader_helpers import packed_splits

TRAIN, VAL = 61, 23
WORLDS = (2, 1, 3, 4)  # 2 comes first: all resume from its state

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train.py"

Found = dict[str, Any]


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python script in so many ranks; its output is shown if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launcher += ["--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, *map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_splits(tmp_path_factory.mktemp("distributed"), train=TRAIN, val=VAL)


@pytest.fixture(scope="module")
def found(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """What each rank got, by world size."""
    root = tmp_path_factory.mktemp("found")
    program = Path(__file__).with_name("distributed_ranks.py")
    state, by_world = root / "state.json", {}
    for world in WORLDS:
        out = root / f"world-{world}"
        out.mkdir()
        torchrun(world, program, packed, out, *([state] if state.exists() else []))
        by_world[world] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
        if world == WORLDS[0]:
            state.write_text(json.dumps(by_world[world][0]["thread"]["state"]))
    return by_world


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("world", WORLDS)
def test_training_gives_every_sample_in_equal_steps(found: dict[int, list[Found]], world: int, engine: str) -> None:
    ranks = [rank[engine] for rank in found[world]]
    for epoch in (0, 1):
        batches = [rank["train"][epoch] for rank in ranks]
        sizes = [[len(batch) for batch in mine] for mine in batches]
        assert all(mine == sizes[0] for mine in sizes), "as many batches, of the same sizes"
        assert {rank["len"] for rank in ranks} == {len(sizes[0])}
        numbers = joined(joined(batches))
        assert set(numbers) == set(range(TRAIN))
        assert len(numbers) - TRAIN < world, "repeated only to make the ranks even"
    assert ranks[0]["train"][0] != ranks[0]["train"][1], "shuffled anew"


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_gives_every_sample_once(found: dict[int, list[Found]], world: int, engine: str) -> None:
    ranks = [rank[engine] for rank in found[world]]
    assert sorted(joined(joined(rank["val"] for rank in ranks))) == list(range(VAL))
    assert [rank["val len"] for rank in ranks] == [len(rank["val"]) for rank in ranks]


@pytest.mark.parametrize("world", WORLDS)
def test_engines_and_moments_of_making_do_not_matter(found: dict[int, list[Found]], world: int) -> None:
    for rank in found[world]:
        assert rank["thread"] == rank["process"]
        assert rank["made before the group"] == rank["thread"]["train"][0]


def test_the_epoch_is_the_same_for_any_number_of_ranks(found: dict[int, list[Found]]) -> None:
    """Step by step, the ranks of any world take the next samples of one common order."""
    order = joined(found[1][0]["thread"]["train"][0])
    for world in WORLDS:
        ranks = [rank["thread"]["train"][0] for rank in found[world]]
        full = TRAIN // (BATCH_SIZE * world)
        dealt = joined(batch for step in range(full) for batch in (rank[step] for rank in ranks))
        assert dealt == order[: len(dealt)]


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_checkpoint_of_two_ranks_goes_on_in_any_world(found: dict[int, list[Found]], world: int, engine: str) -> None:
    states = [rank[engine]["state"] for rank in found[2]]
    assert states[0] == states[1], "any rank's state will do"
    assert (states[0]["epoch"], states[0]["consumed"]) == (2, 2 * STEPS * BATCH_SIZE)
    begun = joined(joined(rank[engine]["begun"] for rank in found[2]))
    ranks = [rank[engine] for rank in found[world]]
    sizes = [[len(batch) for batch in rank["rest"]] for rank in ranks]
    assert all(mine == sizes[0] for mine in sizes)
    rest = joined(joined(rank["rest"] for rank in ranks))
    assert set(begun) | set(rest) == set(range(TRAIN))
    again = len(begun) + len(rest) - TRAIN
    assert 0 <= again < world, "what was consumed does not come again, save to make the ranks even"
    assert {rank["next epoch"] for rank in ranks} == {3}


def test_the_training_script_on_two_ranks_and_then_on_one(packed: Path, tmp_path: Path) -> None:
    command = [SCRIPT, packed, "--batch-size=6", "--size=16", "--width=4", "--device=cpu", "--workers=1"]
    command.append(f"--checkpoint={tmp_path / 'last.pt'}")
    on_two = torchrun(2, *command, "--epochs=1").stdout.splitlines()
    assert [line.partition(":")[0] for line in on_two] == ["epoch 1/1"], "one rank speaks for all"
    assert on_two[0].endswith(f"right of {VAL} pictures"), "each once"
    assert torch.load(tmp_path / "last.pt", weights_only=True)["seen"] == 60, "five full batches on both"
    on_one = subprocess.run(
        [sys.executable, *map(str, command), "--epochs=2"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout.splitlines()
    assert on_one[0].endswith("last.pt: on from epoch 2 after 60 pictures in all")
    assert on_one[1].startswith("epoch 2/2") and on_one[1].endswith(f"right of {VAL} pictures")
