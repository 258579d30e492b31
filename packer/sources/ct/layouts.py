"""Recognising how a folder of CT data is laid out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from packer.errors import SourceError, UsageError
from packer.sample import IMAGE_EXTENSIONS, printable
from packer.sources.ct.dicom import has_preamble
from packer.sources.listing import Listing

LAYOUTS = ("nnunet", "kits", "metaimage", "nifti", "dicom", "arrays", "png16")

_SLICE_NPZ = re.compile(rb"(.+)_slice(\d+)\.npz", re.IGNORECASE)
_VOLUMES = (b".nii", b".nii.gz", b".nrrd", b".nhdr")
_METAIMAGES = (b".mhd", b".mha")
_OBVIOUS = (*_VOLUMES, *_METAIMAGES, b".dcm", b".dicom", b".ima")
_PICTURES = tuple(b"." + extension.encode() for extension in IMAGE_EXTENSIONS)
#: Extensions that need no look inside to be known for something else.
_OTHER = (*_PICTURES, b".txt", b".csv", b".tsv", b".json", b".xml", b".pdf", b".md", b".zip", b".gz", b".tar", b".npy",
          b".npz", b".raw", b".zraw", b".html", b".xlsx", b".py", b".log", b".yaml", b".yml")  # fmt: skip
#: How many files are looked at before a folder is taken for one of pictures.
_LOOK_AT = 500
_OPEN_AT_MOST = 32


def is_volume(name: bytes) -> bool:
    """Whether a file is a volume by its name: NIfTI or NRRD."""
    return name.lower().endswith(_VOLUMES)


def is_metaimage(name: bytes) -> bool:
    """Whether a file is a MetaImage header by its name."""
    return name.lower().endswith(_METAIMAGES)


def slice_of_npz(name: bytes) -> tuple[bytes, int] | None:
    """Case and number of `case_slice007.npz`, None for other names."""
    match = _SLICE_NPZ.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def looks_like_ct(root: str) -> bool:
    """Whether a folder holds CT data rather than pictures, by a look at its first files; the same effort at any size.

    Pictures that are exported slices look like any others: for these, `--layout png16` must be given.
    """
    pictures = ct = arrays = opened = 0
    for path, name in _first_files(os.fsencode(root)):
        lower = name.lower()
        if lower.endswith(_OBVIOUS) or slice_of_npz(name):
            ct += 1
        elif lower.endswith(_PICTURES):
            pictures += 1
        elif lower.endswith(b".npy"):
            arrays += 1
        elif not lower.endswith(_OTHER) and opened < _OPEN_AT_MOST:
            opened += 1
            ct += _has_preamble(path)
    return (ct > 0 and ct >= pictures) or (arrays > 0 and not pictures)


def _has_preamble(path: bytes) -> bool:
    try:
        return os.path.isfile(path) and has_preamble(path)
    except OSError:
        return False


def _first_files(root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Some files of a tree, folder by folder; no folder is read further than need be."""
    left = _LOOK_AT
    pending = [root]
    while pending and left > 0:
        folder = pending.pop()
        below: list[bytes] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
                        if len(below) > _LOOK_AT:
                            break
                    else:
                        yield entry.path, entry.name
                        left -= 1
                    if left <= 0:
                        break
        except OSError:
            continue  # the scan proper will say so
        pending += sorted(below, reverse=True)


def recognise(listing: Listing, root: str, asked: str | None = None) -> tuple[str, str]:
    """Name the layout of a listed folder, and the rule that fired.

    Args:
        listing: all folders.
        root: where they are.
        asked: what `--layout` says.

    Raises:
        SourceError: no rule fits, or several do for different files.
        UsageError: `asked` is no layout of CT data.
    """
    if asked is not None:
        if asked not in LAYOUTS:
            raise UsageError(f"--layout {asked} is no layout of CT data; choose one of: {', '.join(LAYOUTS)}")
        return asked, "asked for by --layout"
    names = {folder.path: set(folder.names) for folder in listing.folders}
    if b"dataset.json" in names.get(b"", ()) and any(path == b"imagesTr" for path in names):
        return "nnunet", "dataset.json and imagesTr/ are there"
    kits = sum(b"imaging.nii.gz" in found and b"segmentation.nii.gz" in found for found in names.values())
    if kits:
        return "kits", f"{kits} folders have imaging.nii.gz and segmentation.nii.gz"
    found = _by_type((path, name) for path, folder in names.items() for name in folder)
    if not found["dicom"]:
        found["dicom"] = _count_dicom(listing, root)
    fitting = {layout: count for layout, count in found.items() if count}
    if len(fitting) > 1:
        said = ", ".join(f"{layout} ({count} files)" for layout, count in fitting.items())
        raise SourceError(
            f"{printable(root)} fits several layouts: {said}; "
            "choose one with --layout, or leave files out with --exclude"
        )
    if not fitting:
        raise SourceError(
            f"NoSlices: {printable(root)} holds no CT data of a known layout ({', '.join(LAYOUTS)}); "
            "exported slices need --layout png16"
        )
    (layout,) = fitting
    return layout, _RULES[layout]


_RULES = {
    "metaimage": "there are MetaImage headers (.mhd, .mha)",
    "nifti": "there are NIfTI or NRRD volumes",
    "dicom": "there are files named .dcm, or with the letters DICM at byte 128",
    "arrays": "there are arrays of slices (…_slice….npz or .npy)",
}


def _by_type(files: Iterable[tuple[bytes, bytes]]) -> dict[str, int]:
    found = dict.fromkeys(("metaimage", "nifti", "dicom", "arrays"), 0)
    for _, name in files:
        lower = name.lower()
        if is_metaimage(lower):
            found["metaimage"] += 1
        elif is_volume(lower):
            found["nifti"] += 1
        elif lower.endswith((b".dcm", b".dicom", b".ima")):
            found["dicom"] += 1
        elif slice_of_npz(lower) or lower.endswith(b".npy"):
            found["arrays"] += 1
    return found


def _count_dicom(listing: Listing, root: str) -> int:
    """How many of the first files of other names are DICOM inside."""
    opened = count = 0
    for folder in listing.folders:
        for name in folder.names:
            if not name.lower().endswith(_OTHER):
                opened += 1
                count += _has_preamble(os.path.join(os.fsencode(root), folder.prefix + name))
                if opened >= 10 * _OPEN_AT_MOST:
                    return count
    return count
