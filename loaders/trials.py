"""Trying remedies: the same loader, small and for a second, with and without."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loaders.loader import Loader
from loaders.measure import measure_rate
from loaders.options import Sampling, Settings
from loaders.remedies import Observed, Remedy
from loaders.source import PackedSource
from loaders.subject import OwnSubject, Subject
from packer.encoders import Resize
from packer.errors import PackerError
from packer.pack import PackOptions, pack
from packer.plan import PlanOptions
from packer.sample import is_image_field
from packer.seekable import SeekableJpeg
from packer.shard import Encoder
from packer.sources.folder import FolderSource

#: Samples, and bytes of them, that are packed anew or held in memory for a trial.
_SAMPLES, _BYTES = 256, 64 * 10**6

_SETTINGS = ("more workers", "process engine")
_OPTIONS = ("uint8", "preload")
_ENCODERS = {"pack": None, "seekable JPEG": SeekableJpeg, "pre-resize": lambda: Resize(256)}


def loader_rate(subject: Subject, settings: Settings, seconds: float) -> float:
    """Samples a second of the loader alone."""
    together, warm_up = subject.rounds(settings)
    with subject.open(settings) as loader:
        return measure_rate(loader, round_batches=together, warm_up=warm_up, seconds=seconds).per_s


@dataclass
class Trials:
    """Tries remedies on one subject.

    Attributes:
        subject: what is diagnosed.
        settings: those of the run.
        seen: the run.
        seconds: how long each trial lasts.
        notes: what could not be tried, and why.
    """

    subject: Subject
    settings: Settings
    seen: Observed
    seconds: float

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self._trial = self.subject.for_trials()
        self._plain: dict[str, float] = {}

    def of(self, found: Sequence[Remedy], tries: int) -> tuple[list[Remedy], dict[int, float]]:
        """The remedies, the best ones tried; and samples a second of the loader by workers, where measured."""
        tried: list[Remedy] = []
        curve: dict[int, float] = {}
        for remedy in found:
            if len([one for one in tried if one.measured_per_s is not None]) < tries and self._can(remedy.name):
                try:
                    before, after = self._pair(remedy)
                except PackerError as error:
                    self.notes.append(f"{remedy.name} could not be tried: {error}")
                else:
                    gain = self.seen.loop_rate(after) / self.seen.loop_rate(before)
                    remedy = replace(remedy, measured_gain=gain, measured_per_s=gain * self.seen.samples_per_s)
                    if remedy.name == "more workers":
                        curve = {self.settings.num_workers: before, remedy.workers: after}
            tried.append(remedy)
        return tried, curve

    def _can(self, name: str) -> bool:
        if name in _SETTINGS:
            return name != "process engine" or "process" in self.subject.engines
        subject = self._trial
        if not isinstance(subject, OwnSubject):
            return False
        plain = subject.loader.options.fields is None and not hasattr(subject.loader.source, "parts")
        plain = plain and is_image_field((subject.loader._recipe.samples.picture or "").split(";")[0])
        return name in _OPTIONS or (name in _ENCODERS and plain)

    def _pair(self, remedy: Remedy) -> tuple[float, float]:
        """Samples a second of the loader without and with the remedy, on the same samples."""
        if remedy.name in _SETTINGS:
            then = (replace(self.settings, num_workers=remedy.workers) if remedy.workers
                    else replace(self.settings, engine="process"))
            return self._as_it_is(), loader_rate(self._trial, then, self.seconds)
        with self._changed(remedy.name) as subject:
            return self._as_it_is(), loader_rate(subject, self.settings, self.seconds)

    def _as_it_is(self) -> float:
        if "all" not in self._plain:
            self._plain["all"] = loader_rate(self._trial, self.settings, self.seconds)
        return self._plain["all"]

    @contextlib.contextmanager
    def _changed(self, name: str) -> Iterator[OwnSubject]:
        """The subject with a remedy applied, to some of its samples where all would take long."""
        if not isinstance(self._trial, OwnSubject):
            raise PackerError("it is not a loader of ours")
        loader, size = self._trial.loader, self._trial.batch_size
        if name == "uint8":
            changed = replace(loader.options, normalize=False, device=None, preload=None)
            yield OwnSubject(Loader(loader.source, changed), size)
        elif name == "preload":
            some = replace(loader.options, preload="memory", subset=_some(loader), sampling=Sampling())
            with Loader(loader.source, some) as preloaded:
                yield OwnSubject(preloaded, size)
        else:
            make = _ENCODERS[name]
            with tempfile.TemporaryDirectory(prefix="packer-doctor-") as folder:
                source = _repacked(loader, folder, None if make is None else make())
                options = replace(loader.options, preload=None, subset=None, sampling=Sampling(), targets={})
                with Loader(source, options) as repacked:
                    yield OwnSubject(repacked, size)


def _some(loader: Loader) -> list[int]:
    """Numbers of samples spread over the dataset, so many that they are quickly copied."""
    total = len(loader.source)
    numbers = np.unique(np.linspace(0, total - 1, min(_SAMPLES, total)).astype(np.int64))
    field = next(iter(loader._recipe.samples.read_fields))
    sizes = np.maximum(loader.source.sizes(numbers, field), 0)
    fitting = numbers[np.cumsum(sizes) <= _BYTES]
    chosen: list[int] = (fitting if len(fitting) else numbers[:1]).tolist()
    return chosen


def _repacked(loader: Loader, folder: str, encoder: Encoder | None) -> PackedSource:
    """Some samples' pictures, packed anew."""
    numbers = np.array(_some(loader))
    samples = loader._recipe.samples
    reads, labels = samples.reads(numbers), loader.source.column("label")
    for j, number in enumerate(numbers.tolist()):
        place = os.path.join(folder, "in", f"c{int(labels[number])}")
        os.makedirs(place, exist_ok=True)
        suffix = next(field for field in samples.read_fields).rpartition(".")[2]
        with open(os.path.join(place, f"{j:05d}.{suffix}"), "wb") as f:
            f.write(samples.picture_bytes(reads, j))
    options = PackOptions(plan=PlanOptions(), workers=1, encoder=encoder, durable=False)
    pack(FolderSource(os.path.join(folder, "in")), os.path.join(folder, "out"), options)
    return PackedSource(os.path.join(folder, "out"), "train")
