"""Files that hold a whole volume: turned to patient axes, read slice by slice or at once.

Whatever order and direction its axes have in the file, a volume comes out as (slice, row, column) with slices towards
the head, rows towards the back and columns towards the left of the patient (LPS), up to the nearest axis: nothing is
resampled, and no patient is mirrored.
"""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.sources.ct.errors import MaskGeometryError, MissingGeometryError, NotGrayscaleError, PixelDataError
from packer.sources.ct.hu import is_whole, to_hu
from packer.sources.ct.slices import Header, Plane
from packer.sources.ct.volumes import Floats

_PIECE_BYTES = 1 << 20
#: A mask lies on its image where directions and positions differ by no more.
_MASK_DIRECTION, _MASK_POSITION_MM = 1e-3, 0.01


@dataclass(frozen=True, eq=False)
class Stored:
    """How a file stores a volume.

    Attributes:
        shape: voxels along the three axes of the file, the fastest first.
        dtype: of a stored value, with its byte order.
        affine: float64 (4, 4): from voxel numbers in the file's order to LPS mm.
        slope: HU = slope · stored + intercept.
        intercept: see `slope`.
        path: of the file that holds the values.
        offset: where they begin in it, uncompressed bytes from the start; −1: they are its last bytes.
        coding: 'raw', 'gzip' (the whole file) or 'zlib', 'gzip-part' (what follows the offset).
    """

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    affine: Floats
    path: bytes
    offset: int = 0
    coding: str = "raw"
    slope: float = 1.0
    intercept: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype.kind not in "iuf":
            raise NotGrayscaleError(f"voxels are of type {self.dtype}: colours or complex numbers, not CT values")
        if min(self.shape) < 1:
            raise PixelDataError(f"a volume of {' × '.join(map(str, self.shape))} voxels; copy the file anew")
        if not np.isfinite(self.affine).all():
            raise MissingGeometryError("position, direction or spacing is not a finite number; mend the header")

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Oriented:
    """A stored volume seen along patient axes.

    Attributes:
        axes: for slices, rows and columns, the axis of the file.
        flips: whether that axis runs the other way.
        shape: (slices, rows, columns).
        affine: float64 (4, 4): (column, row, slice, 1) to LPS mm.
    """

    axes: tuple[int, int, int]
    flips: tuple[bool, bool, bool]
    shape: tuple[int, int, int]
    affine: Floats

    @staticmethod
    def of(stored: Stored) -> Oriented:
        """The orientation nearest to the patient's axes.

        Raises:
            MissingGeometryError: an axis has no length, or rows and columns are not at right angles.
        """
        columns = stored.affine[:3, :3]
        spacing = np.linalg.norm(columns, axis=0)
        if not spacing.min() > 0:
            raise MissingGeometryError("an axis has no length; mend the header")
        unit = columns / spacing
        # Which file axis goes with which patient axis (x, y, z): the choice that fits best in sum.
        axes = max(
            itertools.permutations(range(3)), key=lambda p: sum(abs(unit[world, p[world]]) for world in range(3))
        )
        if abs(float(unit[:, axes[0]] @ unit[:, axes[1]])) > 0.01:
            raise MissingGeometryError("rows and columns are not at right angles; resample the volume")
        affine = np.eye(4)
        affine[:3, 3] = stored.affine[:3, 3]
        flips = []
        for world, axis in enumerate(axes):
            flip = bool(unit[world, axis] < 0)
            flips.append(flip)
            affine[:3, world] = -columns[:, axis] if flip else columns[:, axis]
            if flip:
                affine[:3, 3] += columns[:, axis] * (stored.shape[axis] - 1)
        x, y, z = axes
        shape = (stored.shape[z], stored.shape[y], stored.shape[x])
        return Oriented((z, y, x), (flips[2], flips[1], flips[0]), shape, affine + 0.0)

    def of_slice(self, slab: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Turn a slice, still with the file's other two axes in their order, to (row, column)."""
        turned = slab.T if self.axes[1] > self.axes[2] else slab
        return turned[:: -1 if self.flips[1] else 1, :: -1 if self.flips[2] else 1]


def headers_of(stored: Stored, oriented: Oriented, *, series: str, units: str = "HU") -> list[Header]:
    """The header of every slice, ascending."""
    affine = oriented.affine
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    row, col = affine[:3, 0] / spacing[0], affine[:3, 1] / spacing[1]
    first, step = affine[:3, 3], affine[:3, 2]
    x, y, z, *_ = (0, 0, 0)
    iop = tuple(round(float(value), 9) + 0.0 for value in (*row, *col))
    made = []
    for number in range(oriented.shape[0]):
        x, y, z = (round(value, 6) + 0.0 for value in (first + step * number).tolist())
        made.append(
            Header(
                rows=oriented.shape[1],
                cols=oriented.shape[2],
                ipp=(x, y, z),
                iop=iop,  # type: ignore[arg-type]
                spacing_mm=(round(float(spacing[1]), 6), round(float(spacing[0]), 6)),
                whole=stored.dtype.kind in "iu" and is_whole(stored.slope, stored.intercept),
                units=units,
                series=series,
            )
        )
    return made


def check_mask(image: Oriented, mask: Oriented) -> None:
    """Raise MaskGeometryError unless a mask lies on its image, voxel on voxel."""
    if image.shape != mask.shape:
        raise MaskGeometryError(f"the mask has shape {mask.shape}, its image {image.shape} (slices, rows, columns)")
    lengths = np.linalg.norm(image.affine[:3, :3], axis=0)
    turned = float(np.abs((image.affine - mask.affine)[:3, :3] / lengths).max())
    moved = float(np.abs((image.affine - mask.affine)[:3, 3]).max())
    if turned > _MASK_DIRECTION:
        raise MaskGeometryError(f"the axes of mask and image differ by {turned:.4g} (limit {_MASK_DIRECTION})")
    if moved > _MASK_POSITION_MM:
        raise MaskGeometryError(f"mask and image lie {moved:.4g} mm apart (limit {_MASK_POSITION_MM})")


class VolumeFile:
    """A volume whose slices are asked for one after the other.

    A compressed file is read once, from start to end, and kept; so is one whose slices are not contiguous. Of
    others, each slice is read by itself.
    """

    def __init__(self, stored: Stored, *, series: str = "", units: str = "HU") -> None:
        self._stored = stored
        self.oriented = Oriented.of(stored)
        self._headers = headers_of(stored, self.oriented, series=series, units=units)
        self._whole: npt.NDArray[Any] | None = None
        self._mask_type: type[np.unsignedinteger[Any]] | None = None

    def plane(self, frame: int) -> Plane:
        """One slice in HU; see `packer.sources.ct.reader.OpenFile`."""
        found = to_hu(self._slice(frame), self._stored.slope, self._stored.intercept)
        return Plane(found.hu, self._headers[frame], found.pad_pixels, found.floored_pixels)

    def labels(self, frame: int) -> npt.NDArray[Any]:
        """One slice of a mask: uint8 (H, W), or uint16 where the mask has labels above 255.

        Raises:
            PixelDataError: values that are no labels.
        """
        if self._mask_type is None:
            self._mask_type = _mask_type(self._all(), self._stored)
        scaled = self._slice(frame)
        if (self._stored.slope, self._stored.intercept) != (1.0, 0.0):
            scaled = np.rint(scaled * self._stored.slope + self._stored.intercept)
        return scaled.astype(self._mask_type)

    def _slice(self, frame: int) -> npt.NDArray[Any]:
        axis = self.oriented.axes[0]
        count = self._stored.shape[axis]
        number = count - 1 - frame if self.oriented.flips[0] else frame
        if self._whole is None and axis == 2 and self._stored.coding == "raw":
            slab = _read_raw(self._stored, number)
        else:
            slab = np.take(self._all(), number, axis=axis)
        return np.ascontiguousarray(self.oriented.of_slice(slab))

    def _all(self) -> npt.NDArray[Any]:
        if self._whole is None:
            values = np.frombuffer(_read_all(self._stored), self._stored.dtype)
            self._whole = values.reshape(self._stored.shape, order="F")
        return self._whole


def _mask_type(values: npt.NDArray[Any], stored: Stored) -> type[np.unsignedinteger[Any]]:
    least, most = float(values.min()), float(values.max())
    ends = sorted((least * stored.slope + stored.intercept, most * stored.slope + stored.intercept))
    if not (ends[0] >= 0 and ends[1] <= np.iinfo(np.uint16).max):
        raise PixelDataError(f"a mask has values from {ends[0]:g} to {ends[1]:g}; labels are 0 to 65535")
    if values.dtype.kind == "f" and not all((plane == np.rint(plane)).all() for plane in values.T):
        raise PixelDataError("a mask has values between whole numbers; labels are whole")
    return np.uint8 if ends[1] <= np.iinfo(np.uint8).max else np.uint16


def check_length(stored: Stored) -> None:
    """Raise PixelDataError if an uncompressed file is shorter than its header says."""
    size = os.stat(stored.path).st_size
    needed = stored.nbytes + max(stored.offset, 0)
    if stored.coding == "raw" and size < needed:
        raise PixelDataError(f"{size:,} bytes where {needed:,} are needed: truncated; copy the file anew")


def _read_raw(stored: Stored, number: int) -> npt.NDArray[Any]:
    count = stored.shape[0] * stored.shape[1]
    size = count * stored.dtype.itemsize
    with open(stored.path, "rb", buffering=0) as f:
        start = stored.offset if stored.offset >= 0 else os.fstat(f.fileno()).st_size - stored.nbytes
        data = os.pread(f.fileno(), size, start + number * size)
    if len(data) != size:
        raise PixelDataError(f"the file ends within slice {number}: truncated; copy the file anew")
    return np.frombuffer(data, stored.dtype).reshape(stored.shape[:2], order="F")


def _read_all(stored: Stored) -> bytearray:
    """All values, decompressed; memory is for what the header promises and no more."""
    out = bytearray()
    try:
        with open(stored.path, "rb") as f:
            if stored.coding == "raw":
                f.seek(
                    stored.offset if stored.offset >= 0 else -stored.nbytes, os.SEEK_SET if stored.offset >= 0 else 2
                )
                out += f.read(stored.nbytes)
            elif stored.coding == "gzip":
                with gzip.open(f) as unpacked:
                    unpacked.seek(stored.offset)
                    _fill(out, unpacked, stored.nbytes)
            elif stored.coding == "gzip-part":
                f.seek(stored.offset)
                with gzip.open(f) as unpacked:
                    _fill(out, unpacked, stored.nbytes)
            else:
                f.seek(max(stored.offset, 0))
                _inflate(out, f, stored.nbytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PixelDataError("the compressed values are damaged or truncated; copy the file anew") from error
    if len(out) < stored.nbytes:
        raise PixelDataError(f"{len(out):,} bytes of values where {stored.nbytes:,} are needed: truncated")
    return out


def _fill(out: bytearray, unpacked: Any, size: int) -> None:
    while len(out) < size:
        piece = unpacked.read(min(_PIECE_BYTES, size - len(out)))
        if not piece:
            return
        out += piece


def _inflate(out: bytearray, f: Any, size: int) -> None:
    unpack = zlib.decompressobj()
    while len(out) < size and (piece := f.read(_PIECE_BYTES)):
        while piece and len(out) < size:
            out += unpack.decompress(piece, min(_PIECE_BYTES, size - len(out)))
            piece = unpack.unconsumed_tail
