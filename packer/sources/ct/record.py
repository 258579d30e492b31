"""The record that goes with every sample as its `json` field. Only what is named here is ever written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from packer.sources.ct.privacy import check_record
from packer.sources.ct.slices import Plane

SCHEMA = "packer-ct-1"

#: What planning reckons a record to take; positions of a volume come on top.
RECORD_BYTES = 640

_GEOMETRY = ("position_mm", "positions", "ipp", "iop", "affine", "spacing_mm", "slice_spacing_mm", "tilt_deg")


def slice_key(series: str, index: int) -> str:
    """The key of a slice: no dots, so that no reader cuts it in two.

    >>> slice_key("0123456789abcdef", 7)
    '0123456789abcdef_00007'
    """
    return f"{series}_{index:05d}"


def slice_record(plane: Plane, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one slice.

    Args:
        plane: the slice.
        facts: what its stack knows: patient, study, series (hashes or None), index, n_slices, position_mm,
            slice_spacing_mm, tilt_deg, and `windows` where values were windowed.
    """
    header = plane.header
    record = {
        "patient": facts["patient"],
        "study": facts["study"],
        "series": facts["series"],
        "index": facts["index"],
        "n_slices": facts["n_slices"],
        "position_mm": facts["position_mm"],
        "ipp": list(header.ipp),
        "iop": list(header.iop),
        **_common([plane], facts),
    }
    return record if header.placed else _without_geometry(record)


def volume_record(planes: Sequence[Plane], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one volume; beside a slice's facts, `facts` has `affine` and `positions`."""
    header = planes[0].header
    record = {
        "patient": facts["patient"],
        "study": facts["study"],
        "series": facts["series"],
        "index": 0,
        "n_slices": len(planes),
        "position_mm": facts["positions"][0],
        "positions": facts["positions"],
        "ipp": list(header.ipp),
        "iop": list(header.iop),
        "affine": facts["affine"],
        **_common(planes, facts),
    }
    return record if header.placed else _without_geometry(record)


def _without_geometry(record: dict[str, Any]) -> dict[str, Any]:
    """Where no geometry is known, null says so."""
    return record | {name: None for name in _GEOMETRY if name in record}


def _common(planes: Sequence[Plane], facts: Mapping[str, Any]) -> dict[str, Any]:
    header = planes[0].header
    units = {"units": "window", "windows": facts["windows"]} if facts.get("windows") else {"units": header.units}
    return {
        "spacing_mm": list(header.spacing_mm),
        "slice_spacing_mm": facts["slice_spacing_mm"],
        "thickness_mm": header.thickness_mm,
        "rows": header.rows,
        "cols": header.cols,
        **units,
        "kvp": header.kvp,
        "kernel": header.kernel,
        "lossy": any(plane.header.lossy for plane in planes),
        "pad_pixels": sum(plane.pad_pixels for plane in planes),
        "floored_pixels": sum(plane.floored_pixels for plane in planes),
        "tilt_deg": facts["tilt_deg"],
        "schema": SCHEMA,
    }


def encode_record(key: str, record: Mapping[str, Any]) -> bytes:
    """The bytes of a record, once it is known to hold nothing that must stay behind.

    Raises:
        PHIError: it does.
    """
    check_record(key, record)
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")
