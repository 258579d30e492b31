"""Shard formats: one module knows one byte layout, and one row here names it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from packer.errors import UsageError

if TYPE_CHECKING:
    from packer.formats.base import Format

#: Format name → module with `FORMAT`.
FORMATS = {
    "webdataset": "packer.formats.tar",
}


def get_format(name: str) -> Format:
    """The format of this name. Raises UsageError for a name that is not in `FORMATS`."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; choose one of: {', '.join(FORMATS)}")
    return cast("Format", import_module(FORMATS[name]).FORMAT)
