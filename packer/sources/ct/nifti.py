"""NIfTI volumes (`.nii`, `.nii.gz`): the header by nibabel, the values as they are stored."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np

from packer.errors import MissingExtraError
from packer.sources.ct.errors import MissingGeometryError, NotGrayscaleError, PixelDataError
from packer.sources.ct.volume_file import Stored

#: NIfTI has x to the right and y to the front; DICOM has them the other way.
_RAS_TO_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def check_installed() -> None:
    """Raise MissingExtraError without nibabel."""
    try:
        import nibabel  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("nibabel", "nifti", "reading NIfTI files") from error


def read_nifti(path: bytes) -> Stored:
    """What a NIfTI file says of its volume.

    Raises:
        CtError: it is damaged, has a fourth dimension, colours, or no orientation.
        OSError: it cannot be read.
    """
    check_installed()
    import nibabel
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Any = nibabel.load(os.fsdecode(path), mmap=False)
            header: Any = image.header
            affine = _RAS_TO_LPS @ np.asarray(image.affine, np.float64)
            codes = int(header["sform_code"]), int(header["qform_code"])
            slope, intercept = float(image.dataobj.slope), float(image.dataobj.inter)
            shape, dtype = _three(image.shape), np.dtype(header.get_data_dtype())
            offset = int(image.dataobj.offset)
    except (ImageFileError, HeaderDataError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise PixelDataError(f"no NIfTI file that is whole ({type(error).__name__}); copy it anew") from error
    if dtype.fields is not None:
        raise NotGrayscaleError("voxels are colours")
    if not any(codes):
        raise MissingGeometryError("neither sform nor qform is set, so left and right are not known; set one of them")
    return Stored(
        shape=shape,
        dtype=dtype.newbyteorder(header.endianness) if dtype.itemsize > 1 else dtype,
        affine=affine,
        path=path,
        offset=offset,
        coding="gzip" if path.lower().endswith(b".gz") else "raw",
        slope=slope,
        intercept=intercept,
    )


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) == 2:
        shape = (*shape, 1)
    if len(shape) != 3:
        raise PixelDataError(f"the volume has shape {shape}; a CT volume has three dimensions")
    return shape[0], shape[1], shape[2]
