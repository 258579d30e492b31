"""Slices that another program has exported: 2-D arrays (`.npz`, `.npy`) and 8- or 16-bit pictures.

They carry no geometry and no rescale. Values stay as they are and their units are 'unknown', but for 16-bit PNGs of
DeepLesion's kind, which hold HU + 32768.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.errors import BadImageError
from packer.imaging import probe
from packer.sample import IMAGE_EXTENSIONS, split_extension
from packer.sources.ct.errors import HURangeError, NotGrayscaleError, PixelDataError
from packer.sources.ct.hu import to_hu
from packer.sources.ct.layouts import slice_of_npz
from packer.sources.ct.slices import Header, Plane

#: Names of the slice in an `.npz`, the best first.
_IMAGE_NAMES = ("image", "img", "ct", "data", "x", "arr_0")
_DIGITS = re.compile(rb"(\d+)")
_MASK_NAMES = ("label", "mask", "seg")
_MOST_PIXELS = 1 << 26
#: DeepLesion stores HU + 32768; a picture whose least value means more than −4096 HU is taken for one of its kind.
_DEEP_OFFSET, _DEEP_LEAST = 32768, 28672
_DAMAGE = (ValueError, EOFError, KeyError, IndexError, TypeError, zipfile.BadZipFile, zlib.error)


def natural(name: bytes) -> list[tuple[int, bytes]]:
    """A key that sorts `I2` before `I10`.

    >>> sorted([b"I10.png", b"I2.png"], key=natural)
    [b'I2.png', b'I10.png']
    """
    return [(int(part), b"") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


@dataclass(frozen=True)
class Export:
    """One exported slice and the series that its place says it belongs to."""

    path: bytes
    size: int
    series: str
    patient: str
    label: str


def find_exports(layout: str, files: Iterable[tuple[bytes, int]]) -> list[Export]:
    """Exported slices by series, in natural order.

    Pictures: `label/slice` one level deep (every picture a series of its own), `label/patient/…/slice` deeper. Arrays:
    by case (`case_slice007.npz`), else by folder; a label is in no path.
    """
    found = []
    for path, size in files:
        folder, _, name = path.rpartition(b"/")
        parts = [part.decode("utf-8", "surrogateescape") for part in folder.split(b"/") if part]
        if layout == "png16" and split_extension(name)[1] in IMAGE_EXTENSIONS:
            deep = len(parts) > 1
            series = folder if deep else path
            found.append(Export(path, size, _text(series), parts[1] if deep else "", parts[0] if parts else ""))
        elif layout == "arrays" and name.lower().endswith((b".npz", b".npy")):
            case = slice_of_npz(name)
            series = folder + b"/" + case[0] if case else folder
            patient = _text(case[0]) if case else parts[0] if parts else ""
            found.append(Export(path, size, f"folder {_text(series)}", patient, ""))
    return sorted(found, key=lambda one: (one.series, natural(one.path)))


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def header_of(path: bytes, export: Export, number: int) -> tuple[Header, bool]:
    """The header of an exported slice by its first bytes, and whether a mask lies in the same file.

    Its place in the series stands for a position.

    Raises:
        CtError: it is no slice.
        OSError: it cannot be read.
    """
    masked = False
    if path.lower().endswith((b".npz", b".npy")):
        facts = _array_facts(path)
        shape, dtype = facts[_image_name(facts)]
        masked = (mask := _mask_name(facts)) is not None and facts[mask][0] == shape
    else:
        with open(path, "rb") as f:
            try:
                info = probe(f.read())
            except BadImageError as error:
                raise PixelDataError(f"no whole picture: {error}") from error
        shape, dtype = (info.height, info.width), np.dtype(np.int16)
    return _header(shape, dtype, export.series, export.patient, number), masked


def _header(shape: Sequence[int], dtype: np.dtype[Any], series: str, patient: str, number: int) -> Header:
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > _MOST_PIXELS:
        raise NotGrayscaleError(f"an array of shape {tuple(shape)}; a slice is (rows, columns)")
    if dtype.kind not in "iuf":
        raise NotGrayscaleError(f"an array of type {dtype}; a slice has numbers")
    return Header(
        rows=int(shape[0]),
        cols=int(shape[1]),
        ipp=(0.0, 0.0, float(number)),
        iop=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        spacing_mm=(1.0, 1.0),
        whole=dtype.kind in "iu",
        units="unknown",
        placed=False,
        patient=patient,
        series=series,
    )


class ArrayFile:
    """An `.npy` or `.npz` file of one slice, values as they are."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._facts = _array_facts(path)

    def plane(self, frame: int) -> Plane:  # noqa: ARG002 - a file holds one slice
        """The slice: int16, or float32 where it has fractions."""
        name = _image_name(self._facts)
        values = _load(self._path, name)
        header = _header(values.shape, values.dtype, "", "", 0)
        if not header.whole:
            return Plane(values.astype(np.float32), header, 0, 0)
        return Plane(_as_int16(values), header, 0, 0)

    def labels(self, frame: int) -> npt.NDArray[Any]:  # noqa: ARG002
        """The mask in the same file: uint8, or uint16 with labels above 255."""
        values = _load(self._path, _mask_name(self._facts) or "")
        least, most = float(values.min()), float(values.max())
        if not (least >= 0 and most <= np.iinfo(np.uint16).max) or (values != np.rint(values)).any():
            raise PixelDataError(f"a mask has values from {least:g} to {most:g}; labels are whole, 0 to 65535")
        return values.astype(np.uint8 if most <= np.iinfo(np.uint8).max else np.uint16)


class PictureFile:
    """An exported picture of one slice."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def plane(self, frame: int) -> Plane:  # noqa: ARG002 - a file holds one slice
        """The slice: int16; in HU where it is stored as DeepLesion does, else as it is."""
        values = _decode(self._path)
        header = _header(values.shape, np.dtype(np.int16), "", "", 0)
        if values.dtype != np.uint16 or int(values.min()) < _DEEP_LEAST:
            return Plane(_as_int16(values), header, 0, 0)
        found = to_hu(values, 1, -_DEEP_OFFSET)
        return Plane(found.hu, replace(header, units="HU"), found.pad_pixels, found.floored_pixels)


def _as_int16(values: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    limits = np.iinfo(np.int16)
    if values.size and not (limits.min <= int(values.min()) and int(values.max()) <= limits.max):
        raise HURangeError(
            f"values from {int(values.min())} to {int(values.max())} do not fit int16; convert them to HU"
        )
    return values.astype(np.int16)


_Facts = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]


def _array_facts(path: bytes) -> _Facts:
    """Shape and type of every array of a file, by name, values unread."""
    try:
        with open(path, "rb") as f:
            if not path.lower().endswith(b".npz"):
                return {"": _npy_facts(f)}
            with zipfile.ZipFile(f) as archive:
                found = {}
                for member in archive.namelist():
                    if member.endswith(".npy"):
                        with archive.open(member) as array:
                            found[member.removesuffix(".npy")] = _npy_facts(array)
                return found
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise PixelDataError(f"no whole array ({type(error).__name__}); copy the file anew") from error


def _npy_facts(f: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(f)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(f)
    return shape, dtype


def _image_name(facts: _Facts) -> str:
    names = [name for name in ("", *_IMAGE_NAMES) if name in facts] or (list(facts) if len(facts) == 1 else [])
    if not names:
        raise PixelDataError(f"{len(facts)} arrays, none called {', '.join(_IMAGE_NAMES)}")
    return names[0]


def _mask_name(facts: _Facts) -> str | None:
    return next((name for name in _MASK_NAMES if name in facts), None)


def _load(path: bytes, name: str) -> npt.NDArray[Any]:
    """One array of a file; nothing pickled is ever read."""
    try:
        with open(path, "rb") as f:
            found = np.load(f, allow_pickle=False)
            return np.asarray(found[name] if name else found)
    except _DAMAGE as error:
        raise PixelDataError(f"no whole array ({type(error).__name__}); copy the file anew") from error


def _decode(path: bytes) -> npt.NDArray[Any]:
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            if image.mode not in ("L", "I", "I;16", "I;16B", "I;16L"):
                raise NotGrayscaleError("a picture in colours; exported slices are grey")
            values = np.asarray(image)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise PixelDataError(f"the picture does not decode ({type(error).__name__}); copy the file anew") from error
    return values if values.dtype == np.uint8 else values.astype(np.uint16)
