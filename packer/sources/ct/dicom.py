"""DICOM files: the header of each frame, cheaply, and its pixels in Hounsfield units."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packer.errors import MissingExtraError
from packer.sources.ct.errors import (
    CtError,
    DecoderMissingError,
    HURangeError,
    MissingGeometryError,
    MissingRescaleError,
    NotDicomError,
    PixelDataError,
)
from packer.sources.ct.fast_header import FastHeader, read_fast
from packer.sources.ct.hu import is_whole, to_hu, without_ich_quirk
from packer.sources.ct.privacy import known_kernel
from packer.sources.ct.slices import Header, NotASliceError, Plane

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

#: Nothing else of a header is ever looked at.
TAGS = (
    "SOPClassUID", "SOPInstanceUID", "ImageType", "Modality", "PatientID", "StudyInstanceUID", "SeriesInstanceUID",
    "SamplesPerPixel", "PhotometricInterpretation", "NumberOfFrames", "Rows", "Columns", "PixelSpacing",
    "BitsAllocated", "BitsStored", "PixelRepresentation", "ImagePositionPatient", "ImageOrientationPatient",
    "SliceThickness", "KVP", "ConvolutionKernel", "RescaleSlope", "RescaleIntercept", "RescaleType",
    "PixelPaddingValue", "PixelPaddingRangeLimit", "BurnedInAnnotation", "LossyImageCompression",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
)  # fmt: skip

_CT_CLASSES = frozenset(("1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.2.1", "1.2.840.10008.5.1.4.1.1.2.2"))
_DICOMDIR = "1.2.840.10008.1.3.10"
_GRAYSCALE = frozenset(("MONOCHROME1", "MONOCHROME2"))

_IMPLICIT_LITTLE = "1.2.840.10008.1.2"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_NATIVE = frozenset((_IMPLICIT_LITTLE, "1.2.840.10008.1.2.1", _DEFLATED, "1.2.840.10008.1.2.2"))
_LOSSY = frozenset(f"1.2.840.10008.1.2.4.{n}" for n in (50, 51, 81, 91, 203))
_NAMES = {
    "1.2.840.10008.1.2.5": "RLE Lossless",
    "1.2.840.10008.1.2.4.50": "JPEG Baseline",
    "1.2.840.10008.1.2.4.51": "JPEG Extended",
    "1.2.840.10008.1.2.4.57": "JPEG Lossless (process 14)",
    "1.2.840.10008.1.2.4.70": "JPEG Lossless (process 14, SV1)",
    "1.2.840.10008.1.2.4.80": "JPEG-LS Lossless",
    "1.2.840.10008.1.2.4.81": "JPEG-LS Near-lossless",
    "1.2.840.10008.1.2.4.90": "JPEG 2000 Lossless",
    "1.2.840.10008.1.2.4.91": "JPEG 2000",
    "1.2.840.10008.1.2.4.201": "HTJ2K Lossless",
    "1.2.840.10008.1.2.4.202": "HTJ2K Lossless RPCL",
    "1.2.840.10008.1.2.4.203": "HTJ2K",
}
#: What pydicom and the decoders raise for damaged files.
_DAMAGE = (ValueError, RuntimeError, AttributeError, KeyError, IndexError, TypeError, NotImplementedError, EOFError,
           OverflowError, MemoryError, struct.error, OSError)  # fmt: skip


@dataclass(frozen=True)
class DicomOptions:
    """How files are taken.

    Attributes:
        assume_hu: a file without rescale holds Hounsfield units.
        force: a file without preamble is read as Implicit Little Endian, if it then has rows and pixels.
        ich_quirk: put the shifted files of the RSNA 2019 data right (see `hu.without_ich_quirk`).
    """

    assume_hu: bool = False
    force: bool = False
    ich_quirk: bool = False


def check_installed() -> None:
    """Raise MissingExtraError without pydicom."""
    try:
        import pydicom  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pydicom", "dicom", "reading DICOM files") from error


def has_preamble(path: bytes) -> bool:
    """Whether bytes 128–131 of a file are `DICM`, whatever its name."""
    with open(path, "rb", buffering=0) as f:
        return f.read(132)[128:] == b"DICM"


def read_headers(path: bytes, options: DicomOptions) -> list[Header]:
    """The header of every frame of a file, pixels unread; one entry for a plain slice.

    Raises:
        NotASliceError: another kind of object, a localizer, colours, or text burned into the pixels.
        CtError: a slice that cannot be packed.
        OSError: the file cannot be read.
    """
    return _headers(read_fast(path) or _open(path, options, pixels=False), options)


class DicomFile:
    """A file with its pixels; see `plane`."""

    def __init__(self, path: bytes, options: DicomOptions) -> None:
        self._options = options
        self._dataset = _open(path, options, pixels=True)
        self._headers = _headers(self._dataset, options)

    def plane(self, frame: int) -> Plane:
        """One frame in Hounsfield units.

        Raises:
            CtError: it cannot be decoded, or does not fit.
        """
        dataset, options = self._dataset, self._options
        stored = _decode(dataset, frame, len(self._headers))
        groups = _Groups(dataset, frame)
        slope, intercept, _ = _rescale(groups, options)
        if options.ich_quirk:
            signed = bool(dataset.get("PixelRepresentation"))
            stored, intercept = without_ich_quirk(stored, int(dataset.get("BitsStored") or 0), signed, intercept)
        header = self._headers[frame]
        if stored.shape != (header.rows, header.cols):
            raise PixelDataError(f"the pixels have shape {stored.shape}, the header says {(header.rows, header.cols)}")
        return Plane(*_converted(stored, slope, intercept, _padding(dataset), header))


def _converted(stored: Any, slope: float, intercept: float, padding: Any, header: Header) -> tuple[Any, ...]:
    hu = to_hu(stored, slope, intercept, padding)
    if (hu.hu.dtype.kind == "i") != header.whole:
        raise HURangeError(f"values of type {hu.hu.dtype} are not what the header promised")
    return hu.hu, header, hu.pad_pixels, hu.floored_pixels


# ---------------------------------------------------------------- opening


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence: pydicom warns of every oddity of a header; here it is either harmless or an error of our own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(path: bytes, options: DicomOptions, *, pixels: bool) -> FileDataset:
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    wanted: list[Any] = [*TAGS, "PixelData"] if pixels else list(TAGS)
    preamble = has_preamble(path)
    if not preamble and not options.force:
        raise NotDicomError("bytes 128 to 131 are not 'DICM'; if it is a slice all the same, try --force")
    with _quietly(), open(path, "rb") as f:
        try:
            dataset = dcmread(f, stop_before_pixels=not pixels, specific_tags=wanted, force=not preamble)
            if not preamble:
                _check_forced(path, dataset)
        except NotDicomError:
            raise
        except InvalidDicomError as error:
            raise NotDicomError("the header makes no sense; mend or remove the file") from error
        except _DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise PixelDataError(f"the header is damaged ({type(error).__name__}); copy the file anew") from error
    return dataset


def _check_forced(path: bytes, dataset: FileDataset) -> None:
    """Without a preamble anything parses as something: believe what has rows and pixels."""
    if not isinstance(dataset.get("Rows"), int) or not isinstance(dataset.get("Columns"), int):
        raise NotDicomError("no preamble, and as Implicit Little Endian it has no rows: no DICOM file")
    if dataset.original_encoding[1] is False:
        raise NotDicomError("no preamble, and its byte order is not Little Endian; convert the file")
    if "PixelData" not in dataset:
        from pydicom import dcmread

        with open(path, "rb") as f:
            if "PixelData" not in dcmread(f, specific_tags=["PixelData"], force=True, defer_size=1024):
                raise NotDicomError("no preamble, and as Implicit Little Endian it has no pixels: no DICOM file")


# ---------------------------------------------------------------- headers


def _headers(dataset: FileDataset | FastHeader, options: DicomOptions) -> list[Header]:
    with _quietly():
        try:
            _refuse_other_objects(dataset)
            syntax = _transfer_syntax(dataset)
            _require_decoder(syntax)
            frames = _whole(dataset.get("NumberOfFrames")) or 1
            per_frame = dataset.get("PerFrameFunctionalGroupsSequence")
            if frames > 1 and (per_frame is None or len(per_frame) != frames):
                known = 0 if per_frame is None else len(per_frame)
                raise MissingGeometryError(f"{frames} frames, positions of {known}; mend or remove the file")
            kept = []
            for frame in range(frames):
                groups = _Groups(dataset, frame)
                _refuse_localizer(groups.image_type)
                kept.append(_header(dataset, groups, syntax, options))
        except (CtError, NotASliceError):
            raise
        except _DAMAGE as error:
            raise PixelDataError(f"the header is damaged ({type(error).__name__}); copy the file anew") from error
    return kept


def _refuse_other_objects(dataset: FileDataset | FastHeader) -> None:
    sop_class = str(dataset.get("SOPClassUID") or dataset.file_meta.get("MediaStorageSOPClassUID") or "")
    if sop_class == _DICOMDIR:
        raise NotASliceError("DICOMDIR, a table of contents")
    if sop_class not in _CT_CLASSES and (sop_class or dataset.get("Modality") != "CT"):
        raise NotASliceError("a DICOM object that is not a CT image")
    if str(dataset.get("BurnedInAnnotation") or "").strip().upper() == "YES":
        raise NotASliceError("BurnedInAnnotation is YES: text in the pixels may name the patient")
    samples = _whole(dataset.get("SamplesPerPixel"))
    if samples not in (None, 1):
        raise NotASliceError(f"NotGrayscale: SamplesPerPixel is {samples}")
    if dataset.get("PhotometricInterpretation", "MONOCHROME2") not in _GRAYSCALE:
        raise NotASliceError("NotGrayscale: its colours are a palette or components")


def _refuse_localizer(image_type: Sequence[str]) -> None:
    if any(str(one).strip().upper() == "LOCALIZER" for one in image_type):
        raise NotASliceError("a localizer, no slice of the series")


def _transfer_syntax(dataset: FileDataset | FastHeader) -> str:
    syntax = str(dataset.file_meta.get("TransferSyntaxUID") or "")
    if syntax:
        return syntax
    if not getattr(dataset, "preamble", None):  # --force
        return _IMPLICIT_LITTLE
    raise PixelDataError("no transfer syntax: how the pixels are coded is not known; copy the file anew")


def _require_decoder(syntax: str) -> None:
    from pydicom.pixels.decoders.base import get_decoder

    if syntax in _NATIVE:
        return
    name = _NAMES.get(syntax)
    if name is None:
        raise PixelDataError("an unknown transfer syntax; convert the file, for example with gdcmconv --raw")
    try:
        available = bool(get_decoder(syntax).is_available)
    except NotImplementedError:
        available = False
    if not available:
        raise DecoderMissingError(
            f"nothing installed decodes {name} ({syntax}); run: pip install 'packer-loaders[codecs]'"
        )


class _Groups:
    """Where a frame's facts stand: its own functional groups, then the shared ones, then the header itself."""

    def __init__(self, dataset: FileDataset | FastHeader, frame: int) -> None:
        self._dataset = dataset
        self._groups = []
        per_frame = dataset.get("PerFrameFunctionalGroupsSequence")
        if per_frame is not None and frame < len(per_frame):
            self._groups.append(per_frame[frame])
        if shared := dataset.get("SharedFunctionalGroupsSequence"):
            self._groups.append(shared[0])

    def get(self, group: str, name: str) -> Any:
        """The value of an attribute, None where no place has it."""
        for functional in self._groups:
            items = functional.get(group)
            if items and (value := items[0].get(name)) is not None:
                return value
        return self._dataset.get(name)

    @property
    def image_type(self) -> Sequence[str]:
        """The words of the image type; of the frame, where it has its own."""
        words: list[str] = []
        for value in (self._dataset.get("ImageType"), self.get("CTImageFrameTypeSequence", "FrameType")):
            words += [value] if isinstance(value, str) else list(value or ())
        return words


def _header(dataset: FileDataset | FastHeader, groups: _Groups, syntax: str, options: DicomOptions) -> Header:
    rows, cols = _whole(dataset.get("Rows")), _whole(dataset.get("Columns"))
    if not rows or not cols:
        raise PixelDataError("no rows or columns: the file has no image; remove it")
    slope, intercept, units = _rescale(groups, options)
    ipp = _numbers(groups.get("PlanePositionSequence", "ImagePositionPatient"), 3)
    iop = _numbers(groups.get("PlaneOrientationSequence", "ImageOrientationPatient"), 6)
    spacing = _numbers(groups.get("PixelMeasuresSequence", "PixelSpacing"), 2)
    for name, value in (("ImagePositionPatient", ipp), ("ImageOrientationPatient", iop), ("PixelSpacing", spacing)):
        if value is None:
            raise MissingGeometryError(f"{name} is missing or no list of numbers; mend or remove the file")
    kernel: Any = dataset.get("ConvolutionKernel")
    lossy = str(dataset.get("LossyImageCompression") or "").strip()
    return Header(
        rows=rows,
        cols=cols,
        ipp=ipp,  # type: ignore[arg-type]
        iop=_orthonormal(iop),  # type: ignore[arg-type]
        spacing_mm=_positive(spacing),  # type: ignore[arg-type]
        whole=is_whole(slope, intercept),
        thickness_mm=_number(groups.get("PixelMeasuresSequence", "SliceThickness")),
        kvp=_number(dataset.get("KVP")),
        kernel=known_kernel("\\".join(kernel) if _is_multi(kernel) else str(kernel or "")),
        lossy=lossy == "01" or (syntax in _LOSSY and lossy != "00"),
        units=units,
        patient=_text(dataset.get("PatientID")),
        study=_text(dataset.get("StudyInstanceUID")),
        series=_text(dataset.get("SeriesInstanceUID")),
        sop=_text(dataset.get("SOPInstanceUID")),
    )


def _is_multi(value: Any) -> bool:
    return value is not None and not isinstance(value, str) and hasattr(value, "__iter__")


def _orthonormal(iop: Sequence[float]) -> Sequence[float]:
    row, col = iop[:3], iop[3:]
    lengths = math.hypot(*row), math.hypot(*col)
    if abs(lengths[0] - 1) > 0.01 or abs(lengths[1] - 1) > 0.01:
        raise MissingGeometryError(
            f"ImageOrientationPatient has vectors of length {lengths[0]:.3g} and {lengths[1]:.3g}"
        )
    cosine = sum(a * b for a, b in zip(row, col, strict=True))
    if abs(cosine) > 0.01:
        raise MissingGeometryError(
            f"ImageOrientationPatient has vectors that are not at right angles (cosine {cosine:.3g})"
        )
    return iop


def _positive(spacing: Sequence[float]) -> Sequence[float]:
    if min(spacing) <= 0:
        raise MissingGeometryError(f"PixelSpacing is {spacing[0]:g}, {spacing[1]:g} mm; it must be positive")
    return spacing


def _rescale(groups: _Groups, options: DicomOptions) -> tuple[float, float, str]:
    name = "PixelValueTransformationSequence"
    slope = _number(groups.get(name, "RescaleSlope"))
    intercept = _number(groups.get(name, "RescaleIntercept"))
    kind = str(groups.get(name, "RescaleType") or "HU").strip().upper()
    if options.assume_hu and (slope is None or intercept is None):
        return 1.0, 0.0, "HU"
    if slope is None or intercept is None:
        lacks = "RescaleSlope" if slope is None else "RescaleIntercept"
        raise MissingRescaleError(f"{lacks} is missing; if the values are Hounsfield units, use --assume-hu")
    if slope == 0:
        raise MissingRescaleError("RescaleSlope is 0; if the values are Hounsfield units, mend the header")
    if kind not in ("HU", "HU_MOD", "US") and not options.assume_hu:
        raise MissingRescaleError("RescaleType is not HU; if the values are Hounsfield units, use --assume-hu")
    return slope, intercept, "HU"


def _padding(dataset: FileDataset) -> tuple[int, int] | None:
    """First and last stored value that are padding."""
    value = _whole(dataset.get("PixelPaddingValue"))
    if value is None:
        return None
    limit = _whole(dataset.get("PixelPaddingRangeLimit"))
    bits = _whole(dataset.get("BitsAllocated")) or 16
    signed = bool(dataset.get("PixelRepresentation"))
    # Both tags are often written with the other sign: −2000 as 63536.
    ends = [_as_stored(one, bits, signed=signed) for one in (value, value if limit is None else limit)]
    return min(ends), max(ends)


def _as_stored(value: int, bits: int, *, signed: bool) -> int:
    value %= 1 << bits
    return value - (1 << bits) if signed and value >= 1 << (bits - 1) else value


# ---------------------------------------------------------------- pixels


def _decode(dataset: FileDataset, frame: int, frames: int) -> Any:
    from pydicom.pixels.utils import pixel_array
    from pydicom.uid import UID

    syntax = _transfer_syntax(dataset)
    if "PixelData" not in dataset:
        raise PixelDataError("the file has no pixels, or ends before them; copy it anew")
    if syntax in _NATIVE:
        _require_bytes(dataset, frames)
    if "TransferSyntaxUID" not in dataset.file_meta:
        dataset.file_meta.TransferSyntaxUID = UID(syntax)
    with _quietly():
        try:
            return pixel_array(dataset, raw=True, index=frame)
        except _DAMAGE as error:
            name = _NAMES.get(syntax, "the native coding")
            raise PixelDataError(
                f"the pixels do not decode ({name}: {type(error).__name__}); copy the file anew"
            ) from error


def _require_bytes(dataset: FileDataset, frames: int) -> None:
    pixels = (_whole(dataset.get("Rows")) or 0) * (_whole(dataset.get("Columns")) or 0) * frames
    needed = (pixels * (_whole(dataset.get("BitsAllocated")) or 16) + 7) // 8
    got = len(dataset.PixelData or b"")
    if got < needed:
        raise PixelDataError(f"{got:,} bytes of pixels where {needed:,} are needed: truncated; copy the file anew")


# ---------------------------------------------------------------- values


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip().strip("\0")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    try:
        numbers = tuple(float(one) for one in value)
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == count and all(map(math.isfinite, numbers)) else None


def _whole(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None
