"""Shard formats: one module knows one byte layout, and one row here names it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from packer.errors import UsageError

if TYPE_CHECKING:
    from packer.formats.base import Format


class Row(NamedTuple):
    """Where a format's `FORMAT` is, and what `--format` says of it."""

    module: str
    help: str


#: By the name that `--format` takes and `dataset.json` holds.
FORMATS = {
    "webdataset": Row("packer.formats.tar", "tar shards that every WebDataset reader accepts"),
    "hdf5": Row("packer.formats.hdf5", "HDF5 files for h5py, MATLAB and the like, payloads and labels as datasets"),
    "tfrecord": Row("packer.formats.tfrecord", "tf.train.Example records, for TensorFlow and DALI"),
}


def get_format(name: str) -> Format:
    """The format of this name. Raises UsageError for a name that is not in `FORMATS`."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; choose one of: {', '.join(FORMATS)}")
    return cast("Format", import_module(FORMATS[name].module).FORMAT)


def all_formats() -> list[Format]:
    """Every format, in the table's order."""
    return [get_format(name) for name in FORMATS]
