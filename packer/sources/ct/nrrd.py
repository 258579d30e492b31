"""NRRD volumes (`.nrrd`, `.nhdr`): raw or gzip values behind a text header, or in a file beside it."""

from __future__ import annotations

import os
import re

import numpy as np

from packer.sources.ct.errors import MissingGeometryError, NotGrayscaleError, PixelDataError
from packer.sources.ct.volume_file import Stored

_MOST_HEADER_BYTES = 1 << 16
_NAMES = {
    "i1": "signed char, int8, int8_t",
    "u1": "uchar, unsigned char, uint8, uint8_t",
    "i2": "short, short int, signed short, signed short int, int16, int16_t",
    "u2": "ushort, unsigned short, unsigned short int, uint16, uint16_t",
    "i4": "int, signed int, int32, int32_t",
    "u4": "uint, unsigned int, uint32, uint32_t",
    "i8": "longlong, long long, long long int, int64, int64_t",
    "u8": "ulonglong, unsigned long long, uint64, uint64_t",
    "f4": "float",
    "f8": "double",
}
_TYPES = {name: code for code, names in _NAMES.items() for name in names.split(", ")}
_SPACES = {
    "left-posterior-superior": (1, 1, 1), "lps": (1, 1, 1), "right-anterior-superior": (-1, -1, 1), "ras": (-1, -1, 1),
    "left-anterior-superior": (1, -1, 1), "las": (1, -1, 1),
}  # fmt: skip
_VECTOR = re.compile(r"\(([^)]*)\)")


def read_nrrd(path: bytes) -> Stored:
    """What an NRRD header says of its volume.

    Raises:
        CtError: it is damaged, of another number of dimensions, or without orientation.
        OSError: it cannot be read.
    """
    entries, end = _entries(path)
    try:
        sizes = [int(word) for word in entries.get("sizes", "").split()]
        skips = int(entries.get("line skip", "0")), int(entries.get("byte skip", "0"))
    except ValueError as error:
        raise PixelDataError("a size is no number; mend the header") from error
    if len(sizes) != 3:
        raise PixelDataError(f"the volume has sizes {sizes}; a CT volume has three dimensions")
    kind = _TYPES.get(entries.get("type", "").lower())
    if kind is None:
        raise NotGrayscaleError("its type is no type of CT values")
    data = _data_file(path, entries)
    if skips[0]:
        raise PixelDataError("'line skip' is not supported; write the volume anew")
    encoding = entries.get("encoding", "raw").lower()
    if encoding not in ("raw", "gzip", "gz"):
        raise PixelDataError("its encoding is neither raw nor gzip; write the volume anew")
    if skips[1] < -1 or (skips[1] and encoding != "raw"):
        raise PixelDataError(f"'byte skip: {skips[1]}' makes no sense; mend the header")
    offset = -1 if skips[1] == -1 else (end if data == path else 0) + skips[1]
    return Stored(
        shape=(sizes[0], sizes[1], sizes[2]),
        dtype=np.dtype((">" if entries.get("endian", "little").lower() == "big" else "<") + kind),
        affine=_affine(entries),
        path=data,
        offset=offset,
        coding="raw" if encoding == "raw" else "gzip-part",
    )


def _entries(path: bytes) -> tuple[dict[str, str], int]:
    with open(path, "rb") as f:
        head = f.read(_MOST_HEADER_BYTES)
    if not head.startswith(b"NRRD00"):
        raise PixelDataError("no NRRD file: it does not begin with NRRD00")
    end = re.search(rb"\r?\n\r?\n", head)
    text = head[: end.start()] if end else head
    entries = {}
    for line in text.decode("latin-1").splitlines()[1:]:
        key, colon, value = line.partition(":")
        if colon and not line.startswith("#"):
            entries[key.strip().lower()] = value.lstrip("=").strip()
    return entries, end.end() if end else len(head)


def _data_file(path: bytes, entries: dict[str, str]) -> bytes:
    name = entries.get("data file", entries.get("datafile", ""))
    if not name:
        return path
    data = os.path.join(os.path.dirname(path), name.encode("latin-1"))
    if os.path.dirname(name.removeprefix("./")) or not os.path.isfile(data):
        raise PixelDataError("the file of its values ('data file') is not beside it; copy it there")
    return data


def _affine(entries: dict[str, str]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    signs = _SPACES.get(entries.get("space", "").lower())
    if signs is None:
        raise MissingGeometryError("'space' does not say where left and right are; mend the header")
    try:
        vectors = [[float(x) for x in one.split(",")] for one in _VECTOR.findall(entries.get("space directions", ""))]
        origins = [[float(x) for x in one.split(",")] for one in _VECTOR.findall(entries.get("space origin", ""))]
    except ValueError as error:
        raise MissingGeometryError("'space directions' or 'space origin' are no numbers; mend the header") from error
    if [len(vector) for vector in vectors] != [3, 3, 3] or [len(origin) for origin in origins] != [3]:
        raise MissingGeometryError("'space directions' or 'space origin' are not for three dimensions; mend the header")
    affine = np.eye(4)
    affine[:3, :3] = np.array(vectors).T * np.array(signs)[:, None]
    affine[:3, 3] = np.array(origins[0]) * np.array(signs)
    return affine
