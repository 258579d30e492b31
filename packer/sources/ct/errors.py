"""What can be wrong with a CT slice, a series or its mask: one class each, named in front of the message.

A reason holds numbers of the geometry and of the coding only, never text of a header: it is stored with the dataset.
"""

from __future__ import annotations

from packer.errors import BadImageError, GroupUnknownError, PackerError


class CtError(BadImageError):
    """A slice, a series or a mask that cannot be packed. `str` gives its kind and the reason; the path is the caller's.

    >>> str(HURangeError("41000 HU"))
    'HURange: 41000 HU'
    """

    def __str__(self) -> str:
        return f"{type(self).__name__.removesuffix('Error')}: {super().__str__()}"


class NotDicomError(CtError):
    """The file has no DICOM preamble."""


class DecoderMissingError(CtError):
    """Nothing that is installed decodes this transfer syntax; the message names the `pip install` to run."""


class PixelDataError(CtError):
    """The pixels are missing, truncated, damaged, or of an unknown transfer syntax."""


class MissingRescaleError(CtError):
    """Nothing says how stored values become Hounsfield units."""


class NotGrayscaleError(CtError):
    """The image has colours."""


class MissingGeometryError(CtError):
    """Position, orientation or spacing is missing or makes no sense."""


class DuplicateSliceError(CtError):
    """Two slices of one series lie at the same position and have different pixels."""


class MissingSliceError(CtError):
    """A series has a gap where a slice should be."""


class SpacingError(CtError):
    """The slices of a series are unevenly spaced."""


class GantryTiltError(CtError):
    """The slices are not stacked along their normal."""


class MixedGeometryError(CtError):
    """The slices of one series differ in size, orientation or spacing."""


class HURangeError(CtError):
    """A value does not fit the type that holds it."""


class MaskGeometryError(CtError):
    """A mask does not lie on its image."""


class PHIError(PackerError):
    """Something that could identify a patient would have been written. Nothing was."""


#: A split by patient was asked for, and nothing says whose a slice is.
PatientUnknownError = GroupUnknownError
