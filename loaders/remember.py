"""Tuning answers, remembered by dataset, transform and machine in the user's cache folder.

One small JSON file each, replaced as a whole; whatever cannot be read counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from loaders.options import ENGINES, LoaderOptions, Settings
from loaders.resources import usable_cpus
from loaders.source import Source
from packer.limits import read_text


def cache_folder() -> str:
    """`$XDG_CACHE_HOME/packer-loaders/tune`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "packer-loaders", "tune")


def key_of(source: Source, options: LoaderOptions) -> str | None:
    """The name of what is remembered for a dataset, how it is read, and this machine; None: it has no name."""
    parts = getattr(source, "parts", (source,))
    datasets = [_dataset(part) for part in parts]
    if None in datasets:
        return None
    how = (_described(options.transform), _described(options.collate_fn), options.fields, str(options.image_dtype))
    return hashlib.blake2b(repr((datasets, how, _machine())).encode(), digest_size=12).hexdigest()


def _dataset(source: Any) -> tuple[Any, ...] | None:
    """Where a dataset lies and what it holds; a preloaded one is no longer the one on disk."""
    folder = getattr(source, "folder", None)
    if folder is None:
        return None
    split = getattr(getattr(source, "split", None), "name", "")
    return os.path.realpath(folder), split, len(source), type(source).__name__


def _described(function: object) -> str:
    """A transform in words that are the same in the next process: its `repr` without addresses."""
    if function is None:
        return ""
    name = f"{type(function).__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return name + re.sub(r" at 0x[0-9a-fA-F]+", "", repr(function))


def _machine() -> tuple[Any, ...]:
    """This machine, and how much of it is ours."""
    model = re.search(r"^model name\s*:\s*(.*)$", read_text("/proc/cpuinfo") or "", re.MULTILINE)
    return platform.node(), model[1] if model else platform.processor(), round(usable_cpus(), 2)


def recall(key: str | None) -> Settings | None:
    """The settings that tuning found, or None."""
    if key is None:
        return None
    try:
        with open(os.path.join(cache_folder(), f"{key}.json"), encoding="utf-8") as f:
            found = json.load(f)
        workers, engine, prefetch = found["num_workers"], found["engine"], found["prefetch"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = type(workers) is int and workers >= 0 and (prefetch is None or (type(prefetch) is int and prefetch > 0))
    return Settings(workers, engine, prefetch) if sound and engine in (*ENGINES[1:], None) else None


def remember(key: str, settings: Settings, facts: Mapping[str, Any]) -> str | None:
    """Keep an answer.

    Args:
        key: from `key_of`.
        settings: what to use from now on.
        facts: what else a person who opens the file may want to know; JSON values.

    Returns:
        The file, or None where the cache folder cannot be written: the answer holds, but only for now.
    """
    folder = cache_folder()
    content = {
        "num_workers": settings.num_workers, "engine": settings.engine, "prefetch": settings.prefetch, **facts
    }
    target = os.path.join(folder, f"{key}.json")
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with open(descriptor, "w", encoding="utf-8") as f:
                json.dump(content, f, indent=1)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        return None
    return target
