"""What is tuned and diagnosed: our loader, torch's, or a function that makes one, under one interface.

>>> subject_of(lambda num_workers: [1, 2, 3]).engines
(None,)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset

from loaders.engine_thread import PREFETCH
from loaders.loader import Loader
from loaders.options import EngineName, Settings
from loaders.samples import is_ours
from packer.errors import MeasurementError, PackerError, UsageError

#: Batches in an epoch of our loaders, if the dataset has fewer.
_EPOCH_BATCHES = 1000
#: Batches that each process makes ahead: while the first one is late, the others have theirs ready.
_AHEAD = 2
#: Samples in a batch while timing: throughput in samples hardly depends on it, the time for a few batches does.
_TRIAL_BATCH = 32

Factory: TypeAlias = Callable[..., Iterable[Any]]


class Subject(Protocol):
    """A loader that can be opened with any settings."""

    @property
    def engines(self) -> tuple[EngineName | None, ...]:
        """The engines that can be tried, the likeliest first."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch, where that is known beforehand."""
        ...

    def current(self) -> Settings | None:
        """The settings that the loader has as it is; None: it is yet to be made."""
        ...

    def for_trials(self) -> Subject:
        """The same with batches small enough to be timed quickly, where the batch size can be chosen."""
        ...

    def open(self, settings: Settings) -> contextlib.AbstractContextManager[Iterable[Any]]:
        """The loader with these settings; closed at the end."""
        ...

    def rounds(self, settings: Settings) -> tuple[int, int]:
        """(batches that finish about together, batches before the first that is typical)."""
        ...

    def code(self, settings: Settings) -> str:
        """The settings as Python to paste."""
        ...


class OwnSubject:
    """A loader of ours, made anew for each setting from the samples of the one given."""

    def __init__(self, loader: Loader, batch_size: int | None = None) -> None:
        self.loader = loader
        self.batch_size = batch_size or loader.batch_size
        # What was preloaded stays so; it is not loaded once more for every setting. And an epoch is never too short.
        options = loader.options
        sampling = replace(options.sampling, epoch_samples=max(_EPOCH_BATCHES * self.batch_size, len(loader.source)))
        self._options = replace(
            options, preload=None, batch_size=self.batch_size,
            sampling=sampling if len(loader) else options.sampling,
        )

    @property
    def engines(self) -> tuple[EngineName | None, ...]:
        """Threads first where they are allowed."""
        options = self.loader.options
        if options.engine != "auto":
            return (options.engine,)
        ours = is_ours(options.transform) and options.collate_fn is None
        return ("thread", "process") if ours else ("process",)

    def current(self) -> Settings:
        """See `Subject`."""
        return self.loader.settings

    def for_trials(self) -> OwnSubject:
        """See `Subject`."""
        return OwnSubject(self.loader, min(self.batch_size, _TRIAL_BATCH))

    @contextlib.contextmanager
    def open(self, settings: Settings) -> Iterator[Loader]:
        """See `Subject`. The source stays open: it is the given loader's."""
        engine = settings.engine or self._options.engine
        options = replace(
            self._options, num_workers=settings.num_workers, engine=engine, prefetch=settings.prefetch
        )
        loader = Loader(self.loader.source, options)
        try:
            yield loader
        finally:
            loader._engine.close()

    def rounds(self, settings: Settings) -> tuple[int, int]:
        """Threads share each batch, and have some under way before the first is done; processes make one each."""
        workers = max(1, settings.num_workers)
        if settings.engine == "process":
            return workers, _AHEAD * workers
        # What is under way is made in parallel, and may come all at once: a round is long beside it.
        return max(2 * PREFETCH, -(-4 * workers // self.batch_size)), PREFETCH + 1

    def code(self, settings: Settings) -> str:
        """Arguments of `make_loader`."""
        prefetch = "" if settings.prefetch is None else f", prefetch={settings.prefetch}"
        return f"make_loader(…, num_workers={settings.num_workers}, engine={settings.engine!r}{prefetch})"


class TorchSubject:
    """A `torch.utils.data.DataLoader`, made anew for each setting."""

    engines: tuple[EngineName | None, ...] = (None,)

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batch_size: int | None = loader.batch_size

    def current(self) -> Settings:
        """See `Subject`."""
        return Settings(self.loader.num_workers, None, self.loader.prefetch_factor)

    def for_trials(self) -> Subject:
        """The batch size is the loader's."""
        return self

    @contextlib.contextmanager
    def open(self, settings: Settings) -> Iterator[DataLoader[Any]]:
        """See `Subject`."""
        loader, workers = self.loader, settings.num_workers
        options: dict[str, Any] = {
            "num_workers": workers, "collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory,
            "worker_init_fn": loader.worker_init_fn, "generator": loader.generator, "timeout": loader.timeout,
        }
        if workers:
            options["prefetch_factor"] = settings.prefetch or loader.prefetch_factor or 2
            options["multiprocessing_context"] = loader.multiprocessing_context
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            if not isinstance(loader.dataset, IterableDataset):
                options["sampler"] = loader.sampler
        else:
            options["batch_sampler"] = loader.batch_sampler
        yield DataLoader(loader.dataset, **options)

    def rounds(self, settings: Settings) -> tuple[int, int]:
        """Each worker makes a batch."""
        return max(1, settings.num_workers), _AHEAD * max(1, settings.num_workers)

    def code(self, settings: Settings) -> str:
        """Arguments of `DataLoader`."""
        if settings.num_workers == 0:
            return "DataLoader(…, num_workers=0)"
        return (f"DataLoader(…, num_workers={settings.num_workers}, prefetch_factor={settings.prefetch or 2}, "
                "persistent_workers=True)")


class FactorySubject:
    """A function that makes a loader: it takes `num_workers`, and may take `engine` and `prefetch`."""

    batch_size: int | None = None

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._takes = _parameters(factory)
        if "num_workers" not in self._takes:
            raise UsageError(f"{_name(factory)} must take num_workers, to be tried with several; "
                             f"it takes {', '.join(self._takes) or 'nothing'}")

    def current(self) -> None:
        """None: the function is asked for the settings, and not the other way round."""

    @property
    def engines(self) -> tuple[EngineName | None, ...]:
        """Both where the function lets us choose."""
        return ("thread", "process") if "engine" in self._takes else (None,)

    def for_trials(self) -> Subject:
        """The batch size is the loader's."""
        return self

    @contextlib.contextmanager
    def open(self, settings: Settings) -> Iterator[Iterable[Any]]:
        """See `Subject`.

        Raises:
            MeasurementError: the function fails, or what it makes cannot be iterated.
        """
        loader = self._make(settings)
        try:
            yield loader
        finally:
            close = getattr(loader, "close", None)
            if callable(close):
                close()

    def _make(self, settings: Settings) -> Iterable[Any]:
        given: dict[str, Any] = {"num_workers": settings.num_workers}
        if settings.engine is not None and "engine" in self._takes:
            given["engine"] = settings.engine
        if settings.prefetch is not None and "prefetch" in self._takes:
            given["prefetch"] = settings.prefetch
        try:
            loader = self._factory(**given)
        except PackerError:
            raise
        except Exception as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise MeasurementError(f"{_name(self._factory)}({shown}) fails: {type(error).__name__}: {error}") from error
        if not hasattr(loader, "__iter__"):
            raise MeasurementError(f"{_name(self._factory)} gives a {type(loader).__name__}, which cannot be iterated")
        return loader

    def rounds(self, settings: Settings) -> tuple[int, int]:
        """Each worker makes a batch, unless they are said to be threads."""
        workers = max(1, settings.num_workers)
        return (2 * PREFETCH, PREFETCH + 1) if settings.engine == "thread" else (workers, _AHEAD * workers)

    def code(self, settings: Settings) -> str:
        """A call of the function."""
        shown = f"num_workers={settings.num_workers}"
        if settings.engine is not None:
            shown += f", engine={settings.engine!r}"
        if settings.prefetch is not None and "prefetch" in self._takes:
            shown += f", prefetch={settings.prefetch}"
        return f"{_name(self._factory)}({shown})"


def subject_of(loader: Loader | DataLoader[Any] | Factory | Subject) -> Subject:
    """Anything that can be tuned, as a `Subject`.

    Raises:
        UsageError: an iterator or anything else that cannot be opened anew, or a function without `num_workers`.
    """
    if isinstance(loader, Loader):
        return OwnSubject(loader)
    if isinstance(loader, DataLoader):
        return TorchSubject(loader)
    if isinstance(loader, OwnSubject | TorchSubject | FactorySubject):
        return loader
    if callable(loader):
        return FactorySubject(loader)
    raise UsageError(
        f"a {type(loader).__name__} cannot be opened with other settings: pass a loader of make_loader, a torch "
        "DataLoader, or a function that takes num_workers and makes one"
    )


def load_factory(name: str) -> Factory:
    """The function `module:function`; modules in the working directory are found too.

    Raises:
        UsageError: no such module or function; the module's own errors are chained.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"--loader takes module:function, got {name!r}; for example train:make_loader")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import {module_name!r} ({error}); run where it lies, or set PYTHONPATH") from error
    except Exception as error:
        raise MeasurementError(f"importing {module_name!r} fails: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"{module_name} has no function {function_name!r}")
    found: Factory = function
    return found


def _parameters(function: Factory) -> tuple[str, ...]:
    """Names that a function takes by keyword; one with **kwargs is believed to take all three."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ("num_workers",)
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return (*names, "num_workers") if any(p.kind is p.VAR_KEYWORD for p in parameters) else names


def _name(function: Factory) -> str:
    return getattr(function, "__name__", type(function).__name__)


def batch_bytes(batch: Any) -> int:
    """Bytes of all tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(batch_bytes(value) for value in batch.values())
    if isinstance(batch, tuple | list):
        return sum(batch_bytes(value) for value in batch)
    return int(getattr(batch, "nbytes", 0))
