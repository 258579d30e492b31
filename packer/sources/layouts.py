"""Recognising how a folder is laid out, by the names in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from packer.sample import IMAGE_EXTENSIONS, printable, split_extension
from packer.sources.listing import Folder, Listing

LAYOUTS = ("imagefolder", "splits", "sidecars", "parallel", "flat")
#: Splits in the order in which they are packed.
SPLITS = ("train", "val", "valid", "validation", "dev", "test")
DEFAULT_SPLIT = "train"
IMAGE_FOLDERS = frozenset((b"images", b"image", b"imgs", b"img", b"JPEGImages"))
COMPANION_FOLDERS = {
    b"labels": "label",
    b"label": "label",
    b"masks": "mask",
    b"mask": "mask",
    b"annotations": "annotation",
    b"annotation": "annotation",
    b"Annotations": "annotation",
    b"segmentations": "segmentation",
    b"SegmentationClass": "segmentation",
    b"SegmentationObject": "object",
    b"captions": "caption",
    b"texts": "text",
    b"depth": "depth",
    b"boxes": "box",
    b"targets": "target",
}

# Case and COCO's years do not matter: Train, val2017.
_SPLIT = re.compile(rb"(train|val|valid|validation|dev|test)(?:ing)?(?:(?:19|20)\d\d)?", re.IGNORECASE)

#: A folder with its path below the folder of its split (or below the root, without splits).
Placed = tuple[bytes, Folder]


def split_of(folder: bytes) -> str | None:
    """The split that a folder's name stands for, None for all other names.

    >>> split_of(b"val2017"), split_of(b"Training"), split_of(b"trains")
    ('val', 'train', None)
    """
    match = _SPLIT.fullmatch(folder)
    return match[1].decode("ascii").lower() if match else None


def by_split(folders: Iterable[Folder]) -> tuple[dict[str, list[Placed]], list[Folder]]:
    """Folders by split, in the order of `SPLITS`; and those below no split folder."""
    groups: dict[str, list[Placed]] = {}
    outside: list[Folder] = []
    for folder in folders:
        top, _, below = folder.path.partition(b"/")
        name = split_of(top)
        if name is None:
            outside.append(folder)
        else:
            groups.setdefault(name, []).append((below, folder))
    return dict(sorted(groups.items(), key=lambda item: SPLITS.index(item[0]))), outside


def recognise(listing: Listing, *, labels: bool = False) -> tuple[str, str]:
    """Name the layout of a listed folder, and the rule that fired.

    Args:
        listing: all folders.
        labels: a file of labels is given.
    """
    tops = {_top(folder.path) for folder in listing.folders if folder.path and holds_picture(folder)}
    splits = {top: name for top in tops if (name := split_of(top)) is not None}
    # One class may be called "train"; two folders of such names among others are splits.
    if splits and (len(splits) == len(tops) or len(set(splits.values())) > 1):
        names = ", ".join(sorted(printable(top) for top in splits))
        others = ", ".join(sorted(printable(top) for top in tops - splits.keys()))
        return "splits", f"the top-level folders are {names}" + (f"; left out: {others}" if others else "")
    if labels:
        return "flat", "--labels was given"
    return inner_layout([(folder.path, folder) for folder in listing.folders])


def inner_layout(folders: Sequence[Placed]) -> tuple[str, str]:
    """The same for what lies within splits, or for a folder without them."""
    tops = {_top(path) for path, folder in folders if path and folder.sizes}
    with_pictures = {_top(path) for path, folder in folders if holds_picture(folder)}
    images, companions = with_pictures & IMAGE_FOLDERS, tops & COMPANION_FOLDERS.keys()
    if len(images) == 1 and companions:
        names = ", ".join(sorted(printable(top) for top in images | companions))
        return "parallel", f"parallel trees of the same names: {names}"
    pictures, with_sidecar = _count_sidecars([folder for _, folder in folders])
    if with_sidecar and 2 * with_sidecar >= pictures:
        return "sidecars", f"{with_sidecar} of {pictures} pictures have a file of the same stem beside them"
    if len(images) == 1 and {path for path, folder in folders if holds_picture(folder)} == images:
        return "flat", f"pictures lie in {printable(*images)}/, without classes"
    if with_pictures - {b""}:
        return "imagefolder", "pictures lie in one folder per class"
    return "flat", "pictures lie in one folder, without classes"


def _top(path: bytes) -> bytes:
    return path.split(b"/", 1)[0]


def holds_picture(folder: Folder) -> bool:
    """Whether any file of the folder itself is a picture by its extension."""
    return any(map(is_picture_extension, folder.extensions))


def is_picture_extension(extension: bytes) -> bool:
    """Whether files of this extension, as written in their names, are pictures."""
    return extension.decode("utf-8", "replace").lower() in IMAGE_EXTENSIONS


def _count_sidecars(folders: Sequence[Folder]) -> tuple[int, int]:
    """How many pictures there are, and how many of them have another file of the same stem beside them."""
    pictures = sidecars = 0
    for folder in folders:
        if all(map(is_picture_extension, folder.extensions)):  # by far the most folders
            pictures += len(folder.sizes)
            continue
        stems: set[bytes] = set()
        others: set[bytes] = set()
        for name in folder.names:
            stem, extension = split_extension(name)
            (stems if extension in IMAGE_EXTENSIONS else others).add(stem)
        pictures += len(stems)
        sidecars += len(stems & others)
    return pictures, sidecars
