"""Making payloads: pixels in Hounsfield units, windowed pictures, masks and records."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from packer.errors import SourceChangedError
from packer.sample import printable
from packer.sources.ct.options import CtOptions, compress
from packer.sources.ct.place import Place
from packer.sources.ct.record import encode_record, slice_record, volume_record
from packer.sources.ct.slices import NotASliceError, Plane


class OpenFile(Protocol):
    """A file whose slices can be decoded. See `MaskFile` for those that may be masks."""

    def plane(self, frame: int) -> Plane:
        """One slice."""
        ...


@runtime_checkable
class MaskFile(Protocol):
    """A file whose slices can be masks."""

    def labels(self, frame: int) -> npt.NDArray[Any]:
        """One slice: uint8 or uint16 (H, W)."""
        ...


class CtReader:
    """Makes the payloads of CT samples; see `packer.sources.base.Maker`.

    Args:
        root: the folder.
        options: how to write samples.
        open_file: opens a file of this source's layout.

    The last image, the last mask and the last sample are kept decoded: the fields of a sample come one after the
    other, and so do the slices of a file.
    """

    def __init__(self, root: bytes, options: CtOptions, open_file: Callable[[bytes], OpenFile]) -> None:
        self._root, self._options, self._open_file = root, options, open_file
        self._files: dict[str, tuple[bytes, OpenFile]] = {}
        self._sample: tuple[Sequence[tuple[bytes, int, int]], list[Plane]] | None = None

    def make(self, place: bytes) -> bytes:
        """Make one payload.

        Raises:
            CtError: the files cannot become a sample.
            SourceChangedError: a file is gone or has another size.
            PHIError: the record would hold what must not leave the header.
        """
        wanted = Place.decode(place)
        if wanted.what == "mask":
            return self._array([self._labels(*one) for one in wanted.slices])
        planes = self._planes(wanted.slices)
        if wanted.what == "record":
            facts = wanted.facts or {}
            is_slice = self._options.sample == "slice"
            return encode_record(
                wanted.key, slice_record(planes[0], facts) if is_slice else volume_record(planes, facts)
            )
        if self._options.windows:
            return png_bytes(windowed(planes[0].values, self._options.windows))
        return self._array([plane.values for plane in planes])

    def _array(self, planes: Sequence[npt.NDArray[Any]]) -> bytes:
        data = npy_bytes(planes[0] if self._options.sample == "slice" else np.stack(planes))
        return compress(data) if self._options.codec == "npy.zst" else data

    def _planes(self, slices: Sequence[tuple[bytes, int, int]]) -> list[Plane]:
        if self._sample is None or self._sample[0] != slices:
            self._sample = None
            self._sample = slices, [self._open("image", path, size).plane(frame) for path, frame, size in slices]
        return self._sample[1]

    def _labels(self, path: bytes, frame: int, size: int) -> npt.NDArray[Any]:
        mask = self._open("mask", path, size)
        if not isinstance(mask, MaskFile):
            raise SourceChangedError(f"{printable(path)} was a mask when the folder was scanned, and is none now")
        return mask.labels(frame)

    def _open(self, what: str, path: bytes, size: int) -> OpenFile:
        if what not in self._files or self._files[what][0] != path:
            self._files.pop(what, None)  # let go of the last one first: it may be large
            full = os.path.join(self._root, path)
            try:
                found = os.stat(full).st_size
                if found != size:
                    raise SourceChangedError(
                        f"{printable(path)} has {found} bytes, had {size} when the folder was scanned; "
                        "let it come to rest, then run the same command again"
                    )
                self._files[what] = path, self._open_file(full)
            except OSError as error:
                raise SourceChangedError(
                    f"{printable(path)}: {error.strerror or error} (it was read when the folder was scanned)"
                ) from error
            except NotASliceError as error:
                raise SourceChangedError(f"{printable(path)} is not what was scanned: {error}") from error
        return self._files[what][1]

    def read(self, places: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Make payloads whose size is known; see `packer.sources.base.Reader`."""
        for place, view in zip(places, views, strict=True):
            made = self.make(place)
            if len(made) != len(view):
                raise SourceChangedError(f"{len(made)} bytes were made where {len(view)} were reckoned with")
            view[:] = made

    def read_piece(self, place: bytes, size: int, offset: int, view: memoryview) -> None:
        """A part of a payload; see `packer.sources.base.Reader`."""
        made = self.make(place)
        if len(made) != size:
            raise SourceChangedError(f"{len(made)} bytes were made where {size} were reckoned with")
        view[:] = made[offset : offset + len(view)]

    def close(self) -> None:
        """Let go of what is kept."""
        self._files.clear()
        self._sample = None


def npy_bytes(values: npt.NDArray[Any]) -> bytes:
    """An array as the bytes of a `.npy` file, little-endian, in C order."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(little), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def windowed(hu: npt.NDArray[Any], windows: Sequence[tuple[float, float]]) -> npt.NDArray[np.uint8]:
    """HU (H, W) through windows (centre, width): `clip((hu − (c − w/2)) / w, 0, 1)` as uint8.

    Returns:
        (H, W) for one window; (H, W, 3) for two or three, the third channel 0 where there are two.
    """
    channels: list[npt.NDArray[np.uint8]] = [
        np.rint(np.clip((hu.astype(np.float32) - (centre - width / 2)) / width, 0, 1) * 255).astype(np.uint8)
        for centre, width in windows
    ]
    if len(channels) == 1:
        return channels[0]
    channels += [np.zeros_like(channels[0])] * (3 - len(channels))
    return np.stack(channels, axis=-1)


def png_bytes(picture: npt.NDArray[np.uint8]) -> bytes:
    """uint8 (H, W) or (H, W, 3) as a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()
