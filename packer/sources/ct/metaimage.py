"""MetaImage volumes: a text header (`.mhd`, or `.mha` with the values behind it) that names the file of the values."""

from __future__ import annotations

import math
import os

import numpy as np

from packer.sources.ct.errors import MissingGeometryError, NotGrayscaleError, PixelDataError
from packer.sources.ct.volume_file import Stored

_MOST_HEADER_BYTES = 1 << 16
_TYPES = {
    "MET_CHAR": "i1", "MET_UCHAR": "u1", "MET_SHORT": "i2", "MET_USHORT": "u2", "MET_INT": "i4", "MET_UINT": "u4",
    "MET_LONG": "i4", "MET_ULONG": "u4", "MET_LONG_LONG": "i8", "MET_ULONG_LONG": "u8", "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}  # fmt: skip


def read_metaimage(path: bytes) -> Stored:
    """What a MetaImage header says of its volume.

    Raises:
        CtError: it is damaged, of another number of dimensions, has colours, or its file of values is missing.
        OSError: it cannot be read.
    """
    entries, end = _entries(path)
    shape = _numbers(entries, "DimSize")
    if len(shape) == 4 and shape[3] == 1:
        shape = shape[:3]
    if len(shape) != 3 or not all(value.is_integer() for value in shape):
        raise PixelDataError(f"DimSize is {shape}; a CT volume has three dimensions")
    if _numbers(entries, "ElementNumberOfChannels", "1") != [1.0]:
        raise NotGrayscaleError("ElementNumberOfChannels is not 1")
    kind = entries.get("ElementType", "")
    if kind not in _TYPES:
        raise NotGrayscaleError("ElementType is no type of CT values")
    big = entries.get("BinaryDataByteOrderMSB", entries.get("ElementByteOrderMSB", "False")).lower() == "true"
    compressed = entries.get("CompressedData", "False").lower() == "true"
    data, local = _data_file(path, entries)
    skip = int(_numbers(entries, "HeaderSize", "0")[0])
    return Stored(
        shape=(int(shape[0]), int(shape[1]), int(shape[2])),
        dtype=np.dtype((">" if big else "<") + _TYPES[kind]),
        affine=_affine(entries),
        path=data,
        offset=end if local else skip,
        coding="zlib" if compressed else "raw",
    )


def _entries(path: bytes) -> tuple[dict[str, str], int]:
    """The `Key = Value` lines, and where they end."""
    with open(path, "rb") as f:
        head = f.read(_MOST_HEADER_BYTES)
    entries: dict[str, str] = {}
    at = 0
    while at < len(head):
        end = head.find(b"\n", at)
        end = len(head) if end < 0 else end
        key, equals, value = head[at:end].decode("latin-1").partition("=")
        at = end + 1
        if equals:
            entries[key.strip()] = value.strip()
        if key.strip() == "ElementDataFile":
            return entries, at
    raise PixelDataError("no MetaImage header: it does not name the file of its values (ElementDataFile)")


def _numbers(entries: dict[str, str], name: str, default: str = "") -> list[float]:
    try:
        return [float(word) for word in entries.get(name, default).split()]
    except ValueError as error:
        raise PixelDataError(f"{name} is no list of numbers; mend the header") from error


def _data_file(path: bytes, entries: dict[str, str]) -> tuple[bytes, bool]:
    name = entries["ElementDataFile"]
    if name.upper() == "LOCAL":
        return path, True
    if name.upper().startswith("LIST") or "%" in name:
        raise PixelDataError("its values lie in several files; write the volume as one .mha file")
    data = os.path.join(os.path.dirname(path), name.encode("latin-1"))
    # Values come from beside the header, wherever a header of unknown origin may point.
    if os.path.dirname(name) or not os.path.isfile(data):
        raise PixelDataError("the file of its values (ElementDataFile) is not beside it; copy it there")
    return data, False


def _affine(entries: dict[str, str]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    spacing = _numbers(entries, "ElementSpacing") or _numbers(entries, "ElementSize")
    matrix = next((_numbers(entries, n) for n in ("TransformMatrix", "Rotation", "Orientation") if n in entries), None)
    origin = next((_numbers(entries, n) for n in ("Offset", "Position", "Origin") if n in entries), None)
    if not spacing or matrix is None or origin is None:
        lacks = "ElementSpacing" if not spacing else "TransformMatrix" if matrix is None else "Offset"
        raise MissingGeometryError(f"{lacks} is missing; mend the header")
    if len(spacing) < 3 or len(matrix) != 9 or len(origin) < 3 or not all(map(math.isfinite, spacing)):
        raise MissingGeometryError("ElementSpacing, TransformMatrix or Offset is not for three dimensions")
    affine = np.eye(4)
    # Each three numbers are the direction of one axis of the file.
    affine[:3, :3] = np.array(matrix).reshape(3, 3).T * np.array(spacing[:3])
    affine[:3, 3] = origin[:3]
    return affine
