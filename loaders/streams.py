"""For those who build on webdataset: shards without an index as a stream, and ours as a source of its stages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.utils.data
import webdataset as wds
from webdataset import tariterators, utils

from loaders.order import Deal, Order, Shuffle, Tail, batch_count, batches
from loaders.source import PackedSource
from packer.errors import ShardError, UsageError

RawSample: TypeAlias = dict[str, Any]
Urls: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Handler: TypeAlias = Callable[[Exception], bool]

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_ZEROS = bytes(1024)  # what every tar ends with
_READ = 16  # samples of an indexed source are looked up so many at a time


class Epoch:
    """A counter that worker processes see when it changes, also those that started before."""

    def __init__(self) -> None:
        self._value = torch.full((1,), -1, dtype=torch.int64)
        self._value.share_memory_()  # type: ignore[no-untyped-call]

    def set(self, epoch: int) -> None:
        """Let this be the epoch of the iterations to come."""
        self._value[0] = epoch

    def begin(self, local: int) -> int:
        """The epoch of an iteration that begins: what was set, or else the `local`-th of this process."""
        value = int(self._value[0])
        return local if value < 0 else value


class StreamSource(torch.utils.data.IterableDataset[RawSample]):
    """Samples of tar shards, one after the other, shared out among all workers of all nodes.

    With at least as many shards as workers, each worker reads shards of its own; with fewer, those that share a
    shard each take every n-th sample of it. So nobody is without data, and nobody raises or waits for ever.

    Args:
        urls: as for `pipeline`.
        shuffle_shards: read them in another order each epoch, the same on all nodes.
        seed: of that order.
        epoch_samples: as for `pipeline`.
        handler: as for `pipeline`.
    """

    def __init__(
        self, urls: Sequence[str], *, shuffle_shards: bool, seed: int, epoch_samples: int | None, handler: Handler
    ) -> None:
        if not urls:
            raise UsageError("no shards: the list of urls is empty, or names folders without .tar files")
        if epoch_samples is not None and epoch_samples < 1:
            raise UsageError(f"epoch_samples must be at least 1, got {epoch_samples!r}")
        self.urls = list(urls)
        self.epoch = Epoch()
        self._order = Order(samples=len(urls), seed=seed, shuffle=shuffle_shards)
        self._epoch_samples = epoch_samples
        self._handler = handler
        self._begun = -1

    def __iter__(self) -> Iterator[RawSample]:
        self._begun += 1
        epoch = self.epoch.begin(self._begun)
        rank, world_size, worker, workers = utils.pytorch_worker_info()
        me, all_of_us = rank * workers + worker, world_size * workers
        if self._epoch_samples is None:
            yield from self._one_pass(epoch, me, all_of_us)
            return
        per_rank = -(-self._epoch_samples // world_size)
        left = per_rank // workers + (worker < per_rank % workers)
        while left > 0:
            before = left
            for sample in self._one_pass(epoch, me, all_of_us):
                yield sample
                left -= 1
                if left == 0:
                    return
            if left == before:
                raise ShardError(f"no samples in {self.urls[0]} and the other shards of worker {me} of {all_of_us}")
            epoch += 1

    def _one_pass(self, epoch: int, me: int, all_of_us: int) -> Iterator[RawSample]:
        order = batches(self._order, Deal(len(self.urls)), epoch)[0].tolist()
        shards = len(order)
        if shards >= all_of_us:
            mine, turn, sharing = order[me::all_of_us], 0, 1
        else:
            mine, turn = [order[me % shards]], me // shards
            sharing = len(range(me % shards, all_of_us, shards))
        for shard in mine:
            for count, sample in enumerate(self._samples(self.urls[shard])):
                if count % sharing == turn:
                    yield sample

    def _samples(self, url: str) -> Iterator[RawSample]:
        """The samples of one shard; what webdataset would pass over in silence goes to the handler."""
        try:
            stream = _WholeTar(url, wds.gopen(url))
        except Exception as error:
            if self._handler(error):
                return
            raise
        try:
            files = tariterators.tar_file_expander([{"url": url, "stream": stream}], handler=self._handler)
            yield from tariterators.group_by_keys(files, handler=self._handler)
            try:
                stream.finish()
            except Exception as error:
                if not self._handler(error):
                    raise
        finally:
            stream.close()


class _WholeTar:
    """A stream that can say whether it was a whole tar: one cut between two files looks like a shorter one."""

    def __init__(self, url: str, stream: Any) -> None:
        self._url = url
        self._stream = stream
        self._head = b""
        self._tail = b""

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self._head = self._head or data[:8]
        self._tail = data[-len(_ZEROS) :] if len(data) >= len(_ZEROS) else (self._tail + data)[-len(_ZEROS) :]
        return data

    def finish(self) -> None:
        """Read what is left and close.

        Raises:
            ShardError: the stream ended without a tar's end.
            OSError: the process behind a pipe failed.
        """
        while self.read(1 << 16):
            pass
        self._stream.close()
        if hasattr(self._stream, "wait_for_child"):  # a pipe, whose process may have failed
            self._stream.wait_for_child()
        if self._tail != _ZEROS and not self._head.startswith(_COMPRESSED):
            raise ShardError(f"{self._url}: truncated: the stream ends without a tar's end; fetch or pack it again")

    def close(self) -> None:
        """Close, whatever is left: a pipe's process then ends by itself."""
        with contextlib.suppress(OSError):
            self._stream.close()


class StreamPipeline(wds.DataPipeline):  # type: ignore[misc] # webdataset ships no types
    """A `webdataset.DataPipeline` whose shard order follows the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Let the iterations to come shuffle their shards for this epoch; without it they count by themselves."""
        self.pipeline[0].epoch.set(epoch)


def pipeline(
    urls: Urls, *stages: Any, shuffle: int = 0, seed: int = 0, epoch_samples: int | None = None,
    handler: Handler = wds.reraise_exception,
) -> StreamPipeline:
    """A webdataset pipeline over shards that have no index: pipes, standard input, URLs.

    Args:
        urls: brace ranges, `::` lists, `pipe:` commands, "-" for standard input (without workers), a list of
            all these, or a folder of `.tar` files.
        *stages: appended, such as `wds.decode("rgb")`, `wds.to_tuple("jpg", "cls")`, `wds.batched(64)`.
        shuffle: samples in the shuffle buffer; also shuffles the order of shards. 0: as stored.
        seed: of the order of shards.
        epoch_samples: let an epoch be exactly so many samples over all nodes (rounded up to the same number on
            each), repeating the stream or breaking it off, so that every rank takes as many steps: for DDP.
        handler: what happens on a damaged or truncated shard or a pipe that fails: `wds.reraise_exception`,
            `wds.warn_and_continue` …

    Returns:
        A pipeline of samples as dicts: `__key__`, `__url__`, and per field its bytes.

    Raises:
        UsageError: no shards.

    Example:
        >>> import webdataset as wds
        >>> stream = pipeline("pipe:cat out/train-000000.tar", wds.decode("rgb"))             # doctest: +SKIP
        >>> loader = torch.utils.data.DataLoader(stream.compose(wds.batched(64)), batch_size=None)  # doctest: +SKIP
    """
    source = StreamSource(
        _expanded(urls), shuffle_shards=shuffle > 0, seed=seed, epoch_samples=epoch_samples, handler=handler
    )
    return StreamPipeline(source, wds.shuffle(shuffle) if shuffle else None, *stages)


def _expanded(urls: Urls) -> list[str]:
    if not isinstance(urls, str | os.PathLike):
        return [url for item in urls for url in _expanded(item)]
    urls = os.fspath(urls)
    if os.path.isdir(urls):
        return [os.path.join(urls, name) for name in sorted(os.listdir(urls)) if name.endswith(".tar")]
    expanded: list[str] = [urls] if urls.startswith("pipe:") and "::" not in urls and "{" not in urls else list(
        wds.shardlists.expand_urls(urls))
    return expanded


class IndexedSamples(torch.utils.data.IterableDataset[RawSample]):
    """The samples of a packed split as webdataset's stages take them, read by index.

    Order, ranks and workers are exact: every rank has as many samples in training (`shuffle`), every sample
    comes exactly once in evaluation, whatever the number of shards.

    Args:
        path: the packed folder.
        split: name of the split.
        shuffle: as for `make_loader`; None: in `train` only.
        seed: of the order.

    Example:
        >>> import webdataset as wds
        >>> samples = IndexedSamples("out/")                                                  # doctest: +SKIP
        >>> data = wds.DataPipeline(samples, wds.decode("rgb"), wds.to_tuple("jpg", "cls"))   # doctest: +SKIP
    """

    def __init__(
        self, path: str | os.PathLike[str], *, split: str = "train", shuffle: Shuffle | None = None, seed: int = 0
    ) -> None:
        self.source = PackedSource(path, split)
        self.epoch = Epoch()
        shuffle = split == "train" if shuffle is None else shuffle
        shards = self.source.column("shard") if shuffle == "window" else None
        self._order = Order(samples=len(self.source), seed=seed, shuffle=shuffle, shards=shards)
        self._tail: Tail = "pad" if shuffle else "exact"
        self._begun = -1

    def set_epoch(self, epoch: int) -> None:
        """Let the iterations to come shuffle for this epoch; without it they count by themselves."""
        self.epoch.set(epoch)

    def _deal(self, rank: int, world_size: int) -> Deal:
        return Deal(_READ, rank, world_size, self._tail)

    def __len__(self) -> int:
        """Samples of this rank."""
        rank, world_size, _, _ = utils.pytorch_worker_info()
        deal = self._deal(rank, world_size)
        count = batch_count(self._order, deal)
        return 0 if count == 0 else (count - 1) * _READ + len(batches(self._order, deal, 0)[count - 1])

    def __iter__(self) -> Iterator[RawSample]:
        self._begun += 1
        rank, world_size, worker, workers = utils.pytorch_worker_info()
        mine = batches(self._order, self._deal(rank, world_size), self.epoch.begin(self._begun))
        source = self.source
        for batch in range(worker, len(mine), workers):
            numbers = mine[batch]
            fetch = {field: source.fetcher(numbers, field) for field in source.fields}
            shards = source.column("shard")[numbers].tolist()
            for j, number in enumerate(numbers.tolist()):
                sample: RawSample = {"__key__": source.key(number), "__url__": source.split.shard_path(shards[j])}
                values = ((field, read(j)) for field, read in fetch.items())
                sample.update((field, value) for field, value in values if value is not None)
                yield sample
