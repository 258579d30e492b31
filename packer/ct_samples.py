"""What a packed CT sample says of itself: its series by its key, its geometry by its record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packer import npy
from packer.errors import BadArrayError
from packer.packed import PackedSplit
from packer.sample import is_picture_array

_NUMBERED = re.compile(r"(.+)_[0-9]{1,18}")
_MOST_MM = 1e6


def array_field(packed: PackedSplit, sample: int) -> str | None:
    """The field that holds the sample's slice or volume; None where it has neither."""
    row = packed.rows[sample]
    return next((name for name in packed.fields if is_picture_array(name) and row[f"{name}:length"] >= 0), None)


def has_array(packed: PackedSplit) -> npt.NDArray[np.bool_]:
    """Which samples have a slice or volume, (n,)."""
    found = np.zeros(len(packed.rows), bool)
    for name in filter(is_picture_array, packed.fields):
        found |= packed.rows[f"{name}:length"] >= 0
    return found


def voxels(packed: PackedSplit, sample: int, field: str) -> npt.NDArray[Any]:
    """A field's array, (D, H, W); a slice is a volume of one.

    Raises:
        BadArrayError: it is damaged, or no slice or volume of real numbers.
        ShardError: the shard is truncated or damaged.
    """
    try:
        array = npy.decode(packed.read(sample, field, check=True) or b"")
    except BadArrayError as error:
        raise BadArrayError(f"{field}: {error}") from error
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or not array.size or array.dtype.kind == "c":
        raise BadArrayError(f"{field}: {array.dtype} of shape {array.shape} is no slice or volume")
    return array


def series_of(key: str, fields: Sequence[str]) -> str:
    """The series that a key is of: slices are `SERIES_INDEX`, volumes `SERIES`.

    >>> series_of("0123abcd_00007", ["ct.npy"]), series_of("case_00007", ["vol.npy"])
    ('0123abcd', 'case_00007')
    """
    match = _NUMBERED.fullmatch(key) if any(field.startswith("ct.") for field in fields) else None
    return key if match is None else match[1]


def record_of(packed: PackedSplit, sample: int) -> Mapping[str, Any]:
    """The sample's `json` field; empty where it has none, or one that is no record.

    Raises:
        BadArrayError: it is no JSON.
    """
    if "json" not in packed.fields:
        return {}
    try:
        record = json.loads(packed.read(sample, "json", check=True) or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadArrayError(f"its record is no JSON ({error})") from error
    return record if isinstance(record, dict) else {}


def millimetres(value: object) -> float | None:
    """A distance from a record, or None where it cannot be one."""
    return float(value) if isinstance(value, int | float) and 0 < value < _MOST_MM else None


def pixel_spacing(record: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Distance in mm between rows, and between columns; None where the record does not say."""
    said = record.get("spacing_mm")
    if not isinstance(said, list) or len(said) != 2:
        return None, None
    return millimetres(said[0]), millimetres(said[1])
