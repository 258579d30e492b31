"""Cases of layouts with one file a volume: which file is the image, which its mask, whose it is, in which split."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from packer.errors import SourceError
from packer.sample import printable
from packer.sources.ct.layouts import is_metaimage, is_volume
from packer.sources.listing import Listing

#: A folder of masks, or what ends the stem of one.
_MASK_FOLDER = re.compile(rb"(label|mask|seg)", re.IGNORECASE)
_MASK_SUFFIX = re.compile(rb"(.+?)[_-](seg|segmentation|mask|label|labels)", re.IGNORECASE)
#: Folders that hold images of many patients; any other top folder is a patient's.
_SHARED_FOLDER = re.compile(rb"(images?|imgs?|ct|cts|volumes?|scans?|data|train.*|val.*|test.*)", re.IGNORECASE)
_CHANNEL = re.compile(rb"(.+)_(\d{4})")
_EXTENSIONS = (b".nii.gz", b".nii", b".nrrd", b".nhdr", b".mhd", b".mha")
_NO_VOLUME = "no volume by its name"


@dataclass(frozen=True)
class Case:
    """One volume.

    Attributes:
        image, mask: `(path, bytes)`, relative; the mask may be missing.
        name: what its series is called, and `--key series_uid` looks up.
        patient: who it is of, '' where unknown, None to go by the path.
        split: of the source's own, None without.
    """

    image: tuple[bytes, int]
    mask: tuple[bytes, int] | None
    name: str
    patient: str | None
    split: str | None = None


def stem_of(name: bytes) -> bytes:
    """A base name without the extension of a volume.

    >>> stem_of(b"case_01.nii.gz"), stem_of(b"1.3.6.1.mhd")
    (b'case_01', b'1.3.6.1')
    """
    lower = name.lower()
    return next((name[: -len(end)] for end in _EXTENSIONS if lower.endswith(end)), name)


def find_cases(layout: str, listing: Listing, root: str) -> list[Case]:
    """The cases of a layout, sorted by path; what belongs to none is added to `listing.skipped`.

    Raises:
        SourceError: `dataset.json` is unreadable, or names no channel of CT values.
    """
    files = {f.prefix + name: size for f in listing.folders for name, size in zip(f.names, f.sizes, strict=True)}
    if layout == "nnunet":
        cases = list(_nnunet(files, root, listing))
    elif layout == "kits":
        cases = list(_kits(files))
    else:
        cases = list(_volumes(files, listing, metaimage=layout == "metaimage"))
    used = {case.image[0] for case in cases} | {case.mask[0] for case in cases if case.mask}
    known = {path for path, _ in listing.skipped}
    listing.skipped += [
        (path, _why_unused(path)) for path in files if path not in used and path not in known and not _is_values(path)
    ]
    return cases


def _why_unused(path: bytes) -> str:
    name = path.rpartition(b"/")[2]
    return "a mask without an image" if is_volume(name) or is_metaimage(name) else _NO_VOLUME


def _is_values(path: bytes) -> bool:
    return path.lower().endswith((b".raw", b".zraw"))


def _nnunet(files: dict[bytes, int], root: str, listing: Listing) -> Iterator[Case]:
    channel, channels = _ct_channel(os.path.join(root, "dataset.json"))
    for folder, masks, split in ((b"imagesTr", b"labelsTr", "train"), (b"imagesTs", b"labelsTs", "test")):
        for path, size in files.items():
            if path.rpartition(b"/")[0] != folder or not (is_volume(path) or is_metaimage(path)):
                continue
            stem = stem_of(path.rpartition(b"/")[2])
            match = _CHANNEL.fullmatch(stem)
            if match and (channels > 1 or not _mask_of(files, masks, stem)):
                if int(match[2]) != channel:
                    listing.skipped.append((path, "another channel than that of CT values"))
                    continue
                stem = match[1]
            name = stem.decode("utf-8", "surrogateescape")
            yield Case((path, size), _mask_of(files, masks, stem), name, name, split)


def _mask_of(files: dict[bytes, int], folder: bytes, stem: bytes) -> tuple[bytes, int] | None:
    for extension in _EXTENSIONS:
        path = folder + b"/" + stem + extension
        if path in files:
            return path, files[path]
    return None


def _ct_channel(path: str) -> tuple[int, int]:
    """Number of the channel that holds CT values, and how many channels there are."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            value = json.load(f)
        names = value.get("channel_names") or value.get("modality") or {}
        channels = {int(number): str(name) for number, name in dict(names).items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise SourceError(f"{printable(path)} cannot be read as the description of a dataset ({error})") from error
    for number, name in sorted(channels.items()):
        if "CT" in re.split(r"[^A-Z]+", name.upper()):
            return number, len(channels)
    said = ", ".join(channels.values()) or "not named"
    raise SourceError(
        f"{printable(path)}: the channels are {said}; none is CT, and other values are no Hounsfield units"
    )


def _kits(files: dict[bytes, int]) -> Iterator[Case]:
    for path, size in files.items():
        folder, _, name = path.rpartition(b"/")
        if name == b"imaging.nii.gz":
            mask = folder + b"/segmentation.nii.gz"
            case = folder.decode("utf-8", "surrogateescape")
            yield Case((path, size), (mask, files[mask]) if mask in files else None, case, None)


def _volumes(files: dict[bytes, int], listing: Listing, *, metaimage: bool) -> Iterator[Case]:
    """Volumes anywhere; a mask has its image's stem in a folder of masks, or that stem and a suffix beside it."""
    volumes = {path: size for path, size in files.items() if (is_metaimage if metaimage else is_volume)(path)}
    masks: dict[bytes, list[bytes]] = {}
    images = []
    stems = {path: stem_of(path.rpartition(b"/")[2]) for path in volumes}
    beside = {(path.rpartition(b"/")[0], stem) for path, stem in stems.items()}
    for path in volumes:
        folder = path.rpartition(b"/")[0]
        suffixed = _MASK_SUFFIX.fullmatch(stems[path])
        if any(_MASK_FOLDER.match(part) for part in folder.split(b"/")):
            masks.setdefault(suffixed[1] if suffixed else stems[path], []).append(path)
        elif suffixed and (folder, suffixed[1]) in beside:
            masks.setdefault(suffixed[1], []).append(path)
        else:
            images.append(path)
    counts = Counter(stems[path] for path in images)
    for path in images:
        stem = stems[path]
        found = [one for one in masks.get(stem, ()) if counts[stem] == 1 or _near(one, path)]
        if len(found) > 1:
            said = f"MaskGeometry: {len(found)} masks fit; leave all but one out with --exclude"
            listing.problems.append((path, said))
            continue
        mask = (found[0], volumes[found[0]]) if found else None
        yield Case((path, volumes[path]), mask, _series_name(path, stem), None if _has_patient(path) else "")


def _near(mask: bytes, image: bytes) -> bool:
    """Whether both lie in one folder, or in sibling folders: which of several images of a name is meant."""
    a, b = mask.split(b"/")[:-1], image.split(b"/")[:-1]
    return a == b or (len(a) == len(b) and a[:-1] == b[:-1] and len(a) > 1) or a[:-1] == b or a[1:] == b[1:]


def _series_name(path: bytes, stem: bytes) -> str:
    """A stem that is a UID names the series; else the path does."""
    is_uid = re.fullmatch(rb"\d+(\.\d+){4,}", stem) is not None
    name = stem if is_uid else path[: path.rfind(b"/") + 1] + stem
    return name.decode("utf-8", "surrogateescape")


def _has_patient(path: bytes) -> bool:
    """Whether the top folder is one patient's, by its name."""
    folders = path.split(b"/")[:-1]
    return bool(folders) and not _SHARED_FOLDER.fullmatch(folders[0])
