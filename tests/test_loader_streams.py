"""webdataset pipelines: streams without an index, and indexed samples for webdataset's own stages."""

from __future__ import annotations

import collections
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from conftest import PATIENCE_S
from loader_helpers import pack_tree, write_tree
from torch.utils.data import DataLoader

from loaders.webds_loader import IndexedSamples, make_loader, pipeline
from packer.errors import ShardError, UsageError
from packer.packed import Packed

SAMPLES, PER_SHARD = 40, 10


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of ten samples."""
    root = tmp_path_factory.mktemp("streams")
    return pack_tree(write_tree(root / "src", samples=SAMPLES), root / "out", shard_samples=PER_SHARD)


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Plays one worker of one rank, as webdataset looks it up."""

    def play(rank: int, world_size: int, worker: int, workers: int) -> None:
        names = {"RANK": rank, "WORLD_SIZE": world_size, "WORKER": worker, "NUM_WORKERS": workers}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))

    return play


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its own files open
def test_a_stream_gives_what_webdataset_gives(packed: Path) -> None:
    urls = [os.fspath(path) for path in sorted(packed.glob("*.tar"))]
    theirs = list(wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples()))
    braces = os.fspath(packed / "train-{000000..000003}.tar")
    for ours in (packed, os.fspath(packed), urls, braces, "::".join(urls), f"pipe:cat {' '.join(urls[:1])}"):
        count = PER_SHARD if str(ours).startswith("pipe:") else SAMPLES
        got = list(pipeline(ours))
        assert [{**sample, "__url__": None} for sample in got] == [{**s, "__url__": None} for s in theirs[:count]]
    [first] = itertools.islice(pipeline(packed, wds.decode("rgb"), wds.to_tuple("jpg", "cls")), 1)
    assert first[0].ndim == 3 and isinstance(first[1], int)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (1, 3), (2, 2), (3, 1), (2, 3), (7, 2)])
def test_every_sample_once_however_many_workers_share_the_shards(
    packed: Path, as_worker: Any, world_size: int, workers: int
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for rank, worker in itertools.product(range(world_size), range(workers)):
        as_worker(rank, world_size, worker, workers)
        mine = keys(pipeline(packed, shuffle=5, seed=3))
        assert mine, "nobody is without data"
        seen.update(mine)
    assert len(seen) == SAMPLES and set(seen.values()) == {1}


@pytest.mark.parametrize("epoch_samples", [8, 30, 100])
def test_every_rank_has_as_many_samples(packed: Path, as_worker: Any, epoch_samples: int) -> None:
    counts = []
    for rank in range(3):
        count = 0
        for worker in range(2):
            as_worker(rank, 3, worker, 2)
            count += len(list(pipeline(packed, epoch_samples=epoch_samples)))
        counts.append(count)
    assert counts == [-(-epoch_samples // 3)] * 3


def test_shards_come_in_another_order_each_epoch(packed: Path) -> None:
    def shards(stream: Any) -> list[str]:
        return [url for url, _ in itertools.groupby(sample["__url__"] for sample in stream)]

    stream = pipeline(packed, shuffle=1, seed=1)
    epochs = [shards(stream) for _ in range(4)]
    assert len({tuple(order) for order in epochs}) > 1
    assert all(sorted(order) == sorted(epochs[0]) for order in epochs)
    stream.set_epoch(2)
    assert shards(stream) == epochs[2]
    assert shards(pipeline(packed)) == sorted(epochs[0])


def test_workers_of_a_dataloader_share_and_see_the_epoch(packed: Path) -> None:
    stream = pipeline(packed, wds.map(lambda sample: (sample["__key__"], sample["__url__"])), shuffle=1)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    first, second = list(loader), list(loader)
    assert sorted(first) == sorted(second) and len({key for key, _ in first}) == SAMPLES
    stream.set_epoch(0)
    again = list(loader)
    assert again == list(DataLoader(stream, batch_size=None, num_workers=2))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its own files open
def test_failures_that_webdataset_passes_over_are_errors(packed: Path, tmp_path: Path) -> None:
    shard = packed / "train-000000.tar"
    row = Packed(packed)["train"].rows[5]
    cut = tmp_path / "cut.tar"
    cut.write_bytes(shard.read_bytes()[: int(row["jpg:offset"]) - 512])
    assert len(list(wds.DataPipeline(wds.SimpleShardList([str(cut)]), wds.tarfile_to_samples()))) == 5, "in silence"
    with pytest.raises(ShardError, match=r"cut\.tar: truncated"):
        list(pipeline(os.fspath(cut)))
    with pytest.raises(OSError, match="exit 3"):
        list(pipeline(f"pipe:cat {shard}; exit 3"))
    with pytest.raises(FileNotFoundError):
        list(pipeline(os.fspath(tmp_path / "missing.tar")))
    kept = pipeline([str(cut), str(shard), str(tmp_path / "missing.tar")], handler=wds.ignore_and_continue)
    assert len(list(kept)) == 5 + PER_SHARD


def test_compressed_shards_stream(packed: Path, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "train.tar.gz"
    path.write_bytes(gzip.compress((packed / "train-000003.tar").read_bytes()))
    assert len(list(pipeline(os.fspath(path)))) == PER_SHARD


def test_standard_input(packed: Path) -> None:
    import subprocess
    import sys

    program = "from loaders.webds_loader import pipeline; print(sum(1 for _ in pipeline('-')))"
    with open(packed / "train-000000.tar", "rb") as shard:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=shard, capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert done.stdout == f"{PER_SHARD}\n", done.stderr


def test_no_shards_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="list of urls is empty"):
        pipeline(tmp_path)
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    with pytest.raises(ShardError, match="no samples"):
        list(pipeline(tmp_path, epoch_samples=4))


# ---------------------------------------------------------------- indexed samples


def test_indexed_samples_feed_webdatasets_stages(packed: Path) -> None:
    samples = IndexedSamples(packed, shuffle=False)
    data = wds.DataPipeline(samples, wds.decode("torchrgb8"), wds.to_tuple("jpg", "cls", "__key__"))
    with make_loader(packed, shuffle=False, batch_size=1, fields=("jpg", "cls", "__key__"), num_workers=1) as ours:
        for (image, label, key), batch in zip(data, ours, strict=True):
            assert torch.equal(image, batch["jpg"][0]) and label == batch["cls"].item() and [key] == batch["__key__"]
    streamed = {sample["__key__"]: sample for sample in pipeline(packed)}
    for sample in samples:
        assert sample == streamed[sample["__key__"]]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (2, 3), (3, 2), (50, 1)])
@pytest.mark.parametrize("shuffle", [True, False, "window"])
def test_indexed_samples_are_shared_out_exactly(
    packed: Path, as_worker: Any, world_size: int, workers: int, shuffle: Any
) -> None:
    per_rank = []
    for rank in range(world_size):
        per_rank.append([])
        for worker in range(workers):
            as_worker(rank, world_size, worker, workers)
            samples = IndexedSamples(packed, shuffle=shuffle)
            per_rank[-1] += keys(samples)
        assert len(samples) == len(per_rank[-1])
    everything = list(itertools.chain.from_iterable(per_rank))
    assert len(set(everything)) == SAMPLES
    if shuffle is False:
        assert len(everything) == SAMPLES, "exactly once"
    else:
        assert len({len(mine) for mine in per_rank}) == 1, "the same number on every rank"


def test_indexed_samples_shuffle_by_epoch_and_pickle(packed: Path) -> None:
    samples = IndexedSamples(packed)
    first, second = keys(samples), keys(samples)
    assert first != second and sorted(first) == sorted(second)
    samples.set_epoch(0)
    assert keys(samples) == first
    loader = DataLoader(samples, batch_size=None, num_workers=2)
    assert sorted(keys(loader)) == sorted(first)
    assert len(keys(pickle.loads(pickle.dumps(IndexedSamples(packed))))) == SAMPLES


def test_streams_that_cannot_be_meant(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="epoch_samples must be at least 1, got 0"):
        pipeline(packed, epoch_samples=0)
    with pytest.raises(UsageError, match=r"names folders without \.tar files"):
        pipeline(tmp_path)
