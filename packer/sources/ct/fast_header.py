"""The few elements of a DICOM header that matter, picked out of its first bytes: five times as fast as a full parse.

Only the plain case is known here: little endian, whole before the pixels, of a single frame. Whatever else is met
(functional groups, other codings, a header longer than what was read) is left to pydicom, which knows all of it.
"""

from __future__ import annotations

import struct
from typing import Any

_HEAD_BYTES = 1 << 16
_LONG = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"))
_PIXELS = 0x7FE00010
_UNDEFINED = 0xFFFFFFFF
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_EXPLICIT = frozenset(
    b"1.2.840.10008.1.2" + end
    for end in (b".1", b".5", b".4.50", b".4.51", b".4.57", b".4.70", b".4.80", b".4.81", b".4.90", b".4.91")
)
_IMPLICIT = b"1.2.840.10008.1.2"
_TAG = struct.Struct("<HH").unpack_from
_U16, _U32 = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from

#: Tag → keyword and how its value reads: words, numbers, or a little-endian integer.
_WANTED = {
    0x00080008: ("ImageType", "words"), 0x00080016: ("SOPClassUID", "text"), 0x00080018: ("SOPInstanceUID", "text"),
    0x00080060: ("Modality", "text"), 0x00100020: ("PatientID", "text"), 0x00180050: ("SliceThickness", "text"),
    0x00180060: ("KVP", "text"), 0x00181210: ("ConvolutionKernel", "words"), 0x0020000D: ("StudyInstanceUID", "text"),
    0x0020000E: ("SeriesInstanceUID", "text"), 0x00200032: ("ImagePositionPatient", "words"),
    0x00200037: ("ImageOrientationPatient", "words"), 0x00280002: ("SamplesPerPixel", "integer"),
    0x00280004: ("PhotometricInterpretation", "text"), 0x00280008: ("NumberOfFrames", "text"),
    0x00280010: ("Rows", "integer"), 0x00280011: ("Columns", "integer"), 0x00280030: ("PixelSpacing", "words"),
    0x00280301: ("BurnedInAnnotation", "text"), 0x00281052: ("RescaleIntercept", "text"),
    0x00281053: ("RescaleSlope", "text"), 0x00281054: ("RescaleType", "text"),
    0x00282110: ("LossyImageCompression", "text"),
}  # fmt: skip
#: Functional groups: of enhanced CT, for pydicom.
_ENHANCED = frozenset((0x52009229, 0x52009230))


class FastHeader(dict[str, Any]):
    """Elements by keyword, with the `file_meta` that a dataset of pydicom has."""

    file_meta: dict[str, str]
    preamble = b"\0" * 128


def read_fast(path: bytes) -> FastHeader | None:
    """The header of a plain slice, None where pydicom must look.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as f:
        data = f.read(_HEAD_BYTES)
    if data[128:132] != b"DICM":
        return None
    try:
        return _parse(data)
    except (struct.error, IndexError, ValueError):
        return None


def _parse(data: bytes) -> FastHeader | None:
    meta, at = _meta(data)
    syntax = meta.get(0x00020010, b"")
    if syntax not in _EXPLICIT and syntax != _IMPLICIT:
        return None
    explicit = syntax != _IMPLICIT
    found = FastHeader()
    found.file_meta = {
        "TransferSyntaxUID": syntax.decode("ascii"),
        "MediaStorageSOPClassUID": meta.get(0x00020002, b"").decode("ascii"),
    }
    while at + 8 <= len(data):
        group, element = _TAG(data, at)
        tag = group << 16 | element
        if tag >= _PIXELS:
            return found if tag == _PIXELS else None
        if tag in _ENHANCED:
            return None
        length, begin = _length(data, at, explicit)
        if length == _UNDEFINED:
            at = _skip_sequence(data, begin, explicit)
            continue
        at = begin + length
        if tag in _WANTED:
            if at > len(data):
                return None
            name, kind = _WANTED[tag]
            found[name] = _value(data[begin:at], kind)
    return None  # the pixels begin further on than was read


def _meta(data: bytes) -> tuple[dict[int, bytes], int]:
    """The file's own group, always explicit little endian, and where it ends."""
    at, meta = 132, {}
    while _TAG(data, at)[0] == 2:
        group, element = _TAG(data, at)
        length, begin = _length(data, at, True)
        at = begin + length
        meta[group << 16 | element] = data[begin:at].rstrip(b"\0 ")
    return meta, at


def _length(data: bytes, at: int, explicit: bool) -> tuple[int, int]:
    """Length of a value, and where it begins."""
    if not explicit:
        return _U32(data, at + 4)[0], at + 8
    kind = data[at + 4 : at + 6]
    if kind in _LONG:
        return _U32(data, at + 8)[0], at + 12
    if not kind.isalpha():
        raise ValueError("no value representation where one must be")
    return _U16(data, at + 6)[0], at + 8


def _skip_sequence(data: bytes, at: int, explicit: bool) -> int:
    """Past a sequence of undefined length; what is in it is not looked at."""
    depth = 1
    while depth:
        group, element = _TAG(data, at)
        tag = group << 16 | element
        if tag in (_ITEM, _ITEM_END, _SEQUENCE_END):
            length = _U32(data, at + 4)[0]
            at += 8
            if tag == _SEQUENCE_END:
                depth -= 1
            elif tag == _ITEM and length != _UNDEFINED:
                at += length
            continue
        if explicit and data[at + 4 : at + 6] == b"UN":
            raise ValueError("an unknown value may hold a sequence of the other coding")
        length, at = _length(data, at, explicit)
        if length == _UNDEFINED:
            depth += 1
        else:
            at += length
    return at


def _value(raw: bytes, kind: str) -> Any:
    if kind == "integer":
        return _U16(raw)[0] if len(raw) == 2 else None
    text = raw.decode("ascii").strip("\0 ")  # other characters depend on a character set: pydicom knows them all
    if "\\" in text:
        if kind != "words":
            raise ValueError("several values where one should be")
        return [word.strip() for word in text.split("\\")]
    return text or None
