"""How a folder of CT data is to be packed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packer.errors import MissingExtraError, UsageError
from packer.sources.ct.dicom import DicomOptions
from packer.sources.ct.layouts import LAYOUTS
from packer.sources.ct.privacy import Hasher
from packer.sources.ct.record import SCHEMA
from packer.sources.listing import Filter

SAMPLES = ("slice", "volume")
CODECS = ("npy", "npy.zst")
#: What a row of `--labels` names.
LABEL_KEYS = ("path", "stem", "sop_uid", "series_uid", "patient")
_ZSTD_LEVEL = 3


@dataclass(frozen=True)
class CtOptions:
    """How to read and write CT slices.

    Attributes:
        hasher: makes the hashes that stand for patients, studies and series (see `privacy.load_salt`).
        layout: one of `layouts.LAYOUTS`, or None to recognise it.
        sample: 'slice' for one sample a slice, 'volume' for one a series.
        codec: 'npy', or 'npy.zst' for half the size at some decoding time.
        windows: up to three (centre, width) in HU; slices become 8-bit PNG pictures, a channel each.
        dicom: see `dicom.DicomOptions`.
        patient_regex: what in a path names the patient, where the file itself does not.
        strict_series: a series of several geometries is a fault.
        labels, label_key, label_col: a CSV file, what its rows name, and its column of labels.
        classes: class names by label, to fix their order.
        filter, follow_symlinks: which files to take.
        workers: processes that read headers; None takes one per CPU.
    """

    hasher: Hasher
    layout: str | None = None
    sample: str = "slice"
    codec: str = "npy"
    windows: tuple[tuple[float, float], ...] = ()
    dicom: DicomOptions = field(default_factory=DicomOptions)
    patient_regex: str | None = None
    strict_series: bool = False
    labels: str | None = None
    label_key: str = "path"
    label_col: str | None = None
    classes: str | None = None
    filter: Filter = field(default_factory=Filter)
    follow_symlinks: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--layout", self.layout, (None, *LAYOUTS)),
            ("--sample", self.sample, SAMPLES),
            ("--codec", self.codec, CODECS),
            ("--key", self.label_key, LABEL_KEYS),
        ):
            if value not in known:
                raise UsageError(f"{name} {value!r} is unknown; choose one of: {', '.join(k for k in known if k)}")
        if len(self.windows) > 3:
            raise UsageError(f"--window was given {len(self.windows)} times; a picture has three channels at most")
        if any(not width > 0 for _, width in self.windows):
            raise UsageError("--window needs a centre and a positive width in HU, for example 40,400")
        if self.windows and (self.sample != "slice" or self.codec != "npy"):
            raise UsageError("--window makes pictures of slices: leave out --sample volume and --codec")
        if self.patient_regex is not None:
            try:
                re.compile(self.patient_regex)
            except re.error as error:
                raise UsageError(f"--patient-regex {self.patient_regex!r}: {error}") from error

    @property
    def image_field(self) -> str:
        """The field of the pixels: `ct.npy`, `vol.npy.zst`, or `png` of windowed slices."""
        if self.windows:
            return "png"
        return f"{'ct' if self.sample == 'slice' else 'vol'}.{self.codec}"

    @property
    def mask_field(self) -> str:
        """The field of a mask."""
        return f"mask.{self.codec}"

    def settings(self) -> Mapping[str, Any]:
        """What decides the bytes beside the files, for the manifest: nothing secret, no path."""
        value: dict[str, Any] = {
            "schema": SCHEMA,
            "sample": self.sample,
            "codec": self.codec,
            "windows": [list(window) for window in self.windows],
            "assume_hu": self.dicom.assume_hu,
            "ich_quirk": self.dicom.ich_quirk,
            "salt_fingerprint": self.hasher.fingerprint,
        }
        if self.codec == "npy.zst":
            zstandard = import_zstandard()
            value["zstd"] = ".".join(map(str, zstandard.ZSTD_VERSION)) + f" level {_ZSTD_LEVEL}"
        return value


def import_zstandard() -> Any:
    """The zstandard package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstandard", "codecs", "--codec npy.zst") from error
    return zstandard


def compress(data: bytes) -> bytes:
    """Bytes as `npy.zst` holds them."""
    compressed: bytes = import_zstandard().ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
    return compressed
