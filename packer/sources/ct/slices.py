"""What is known of one slice before its pixels are decoded, from whatever kind of file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Header:
    """One slice's geometry and coding, and the identifiers that it is grouped and hashed by.

    Identifiers stay in memory: a record takes the other attributes alone (see `packer.sources.ct.record`).

    Attributes:
        rows, cols: pixels.
        ipp: of the centre of the first pixel, LPS, mm.
        iop: direction of growing column index, then of growing row index, LPS; unit vectors.
        spacing_mm: between rows, between columns.
        whole: values in HU are integers (int16), else float32.
        thickness_mm, kvp, kernel: as stated, None where not.
        lossy: the coding has changed values.
        units: 'HU' or 'unknown'.
        placed: False where no geometry is known: ipp, iop and spacing then stand for the order alone.
        patient, study, series, sop: identifiers, '' where unknown.
    """

    rows: int
    cols: int
    ipp: Vector
    iop: tuple[float, float, float, float, float, float]
    spacing_mm: tuple[float, float]
    whole: bool = True
    thickness_mm: float | None = None
    kvp: float | None = None
    kernel: str | None = None
    lossy: bool = False
    units: str = "HU"
    placed: bool = True
    patient: str = ""
    study: str = ""
    series: str = ""
    sop: str = ""


class Plane(NamedTuple):
    """One decoded slice: int16 or float32 (rows, cols), its header, and what padding cost (see `hu.Converted`)."""

    values: npt.NDArray[Any]
    header: Header
    pad_pixels: int
    floored_pixels: int


class NotASliceError(Exception):
    """A file that is no CT slice by rule; its message says which. It is left out and counted, never a fault."""
