"""One self-contained HTML page that shows a packed dataset: pictures by class, histograms, shards.

The page holds no script and asks for nothing from the network (its own policy forbids both). Every
name in it is escaped; names of control or direction characters are shown as escapes. It depends on
the dataset and the options alone, so the same call gives the same bytes.
"""

from __future__ import annotations

import base64
import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packer import __version__
from packer import view_page as html
from packer.ct_pictures import CENTRE_HU, WIDTH_HU, slice_picture
from packer.ct_samples import array_field, series_of
from packer.engines import Report, local_engine, no_report
from packer.errors import BadImageError, OutputError
from packer.manifest import FILE, Manifest
from packer.packed import Packed, PackedSplit
from packer.pictures import Picture, decode_rgb, picture_fields
from packer.sample import is_picture_array, printable
from packer.spread import spread
from packer.storage import PARTIAL, output_error, write_atomic
from packer.strings import Int64s

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CLASSES = 50
MAX_PICTURES = 600
WITHOUT_CLASSES = 120  # pictures, where there are no classes to sort them by

_SHORT_SIDE = 144  # of a thumbnail: 88 CSS pixels at 1.6 device pixels
_LONG_SIDE = 320
_PIXEL_ART = 48  # pictures this small are shown pixel by pixel
_AT_ONCE = 24

_SLICES = (
    f" CT is shown through the window {CENTRE_HU}/{WIDTH_HU} HU, of a volume its middle slice, with the border of "
    "its mask in red."
)
_REPORT = "report.json"  # of what packing left out
#: What every page begins with, and nothing else does.
_HEAD = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="packer view">
"""


@dataclass(frozen=True)
class Page:
    """The page that was written.

    Attributes:
        path: where.
        pictures: thumbnails in it.
        classes: classes in the contact sheet; series, where CT slices have no classes.
        bytes: its size.
    """

    path: str
    pictures: int
    classes: int
    bytes: int


def view(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    per_class: int = 12,
    workers: int | None = None,
    progress: Report | None = None,
) -> Page:
    """Write the page.

    Args:
        folder: a packed dataset.
        output: the HTML file to write; an earlier page that is there is replaced, and nothing else is.
        split: show only this split.
        per_class: pictures of each class. At most `MAX_CLASSES` classes and `MAX_PICTURES` pictures are shown.
        workers: processes; None takes one per CPU that may be used.
        progress: called with (pictures, bytes) done since the last call.

    Raises:
        ManifestError: no packed dataset.
        UsageError: no such split.
        ShardError: a shard is truncated or damaged.
        OutputError: the file cannot be written, or is there and is no page of ours.

    >>> view("out/", "out.html").pictures                                    # doctest: +SKIP
    600
    """
    dataset = Packed(folder)
    path = os.fspath(output)
    _refuse_overwriting(path, dataset)
    shown = _Shown(list(dataset.only(split).values()), dataset.manifest.classes)
    groups = list(shown.groups(per_class))
    tiles = _tiles(shown, groups, workers, progress or no_report)
    page = _page(dataset, shown, groups, tiles).encode("utf-8")
    _refuse_overwriting(path, dataset)
    write_atomic(path, [page])
    return Page(path, len(tiles), len(groups), len(page))


def _refuse_overwriting(path: str, dataset: Packed) -> None:
    """The page takes the place of an earlier page only: neither of the dataset's files, nor of anything else's."""
    name, folder = os.path.basename(path), os.path.dirname(path) or "."
    advice = "choose another name, such as view.html"
    if name.endswith(PARTIAL) or (name in _own_files(dataset.manifest) and _same_folder(folder, dataset.folder)):
        raise OutputError(f"{printable(path)} is the name of a file of the dataset; {advice}")
    try:
        # Not through a link: the page would replace the link, or the file that it leads to.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        if os.path.islink(path):
            raise OutputError(f"{printable(path)} is a link; {advice}") from error
        raise output_error(path, error, resumes=False) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OutputError(f"{printable(path)} is not a regular file; {advice}")
        head = os.read(fd, len(_HEAD))
    finally:
        os.close(fd)
    if head != _HEAD:
        raise OutputError(f"{printable(path)} is there already and is no page that packer wrote; {advice}")


def _own_files(manifest: Manifest) -> set[str]:
    splits = manifest.splits.values()
    beside = {name for split in splits for name in (split.index_file, split.names_file)}
    return {FILE, _REPORT, *beside, *manifest.sidecars, *(shard.name for split in splits for shard in split.shards)}


def _same_folder(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _page(dataset: Packed, shown: _Shown, groups: Sequence[_Group], tiles: dict[int, str]) -> str:
    manifest = dataset.manifest
    slices = any(map(is_picture_array, manifest.fields))
    sections = [
        *html.splits(manifest),
        *html.classes(shown.class_counts(), int(np.count_nonzero(shown.labels < 0))),
        *html.histograms(_charts(shown)),
        html.sheet_section(
            _said(shown, groups) + (_SLICES if slices else ""),
            [(group.name, group.count, [tiles[i] for i in group.samples.tolist()]) for group in groups],
            wide=slices,
        ),
        *html.shards(manifest),
    ]
    fingerprint = manifest.fingerprint[:16]
    return Template(files("packer").joinpath("view_template.html").read_text("utf-8")).substitute(
        title=html.text(os.path.basename(os.path.abspath(dataset.folder))),
        key=html.head_line(manifest),
        facts=html.facts(manifest),
        sections="\n".join(sections),
        version=__version__,
        fingerprint=f'Fingerprint <span class="mono">{html.text(fingerprint)}</span>.' if fingerprint else "",
    )


def _charts(shown: _Shown) -> list[str]:
    charts = []
    if len(sides := shown.sizes()):
        charts.append(html.histogram("Short side in pixels", spread(sides)))
    if len(sizes := shown.picture_bytes()):
        charts.append(html.histogram("Encoded size", spread(sizes), "bytes"))
    return charts


def _said(shown: _Shown, groups: Sequence[_Group]) -> str:
    """What the contact sheet shows of how much."""
    pictures = sum(len(group.samples) for group in groups)
    of = "" if len(shown.splits) == 1 and shown.splits[0].split.name == "train" else (
        f" from {', '.join(packed.split.name for packed in shown.splits)}")  # fmt: skip
    classes, series = len(shown.class_counts()), len(shown.series.names)
    every, kind = (classes, "classes") if classes else (series, "series")
    some = f" of {len(groups):,} of the {every:,} {kind}" if len(groups) < every else ""
    if pictures == len(shown.labels):
        return f"All {pictures:,} samples{of}."
    return f"{pictures:,} of {len(shown.labels):,} samples{of}{some}, evenly spaced in the order they are packed."


# ---------------------------------------------------------------- what is shown


@dataclass(frozen=True)
class _Group:
    """A class, or a series of CT slices, or all samples where there are neither.

    Attributes:
        name: to be shown; None for all samples.
        count: how many samples it has.
        samples: numbers of those that are shown.
    """

    name: str | None
    count: int
    samples: Int64s


class _Series(NamedTuple):
    """Series of CT slices: each sample's number of its series (−1: none), and the names of all."""

    of: Int64s
    names: Sequence[str]


class _Shown:
    """The samples of the chosen splits, numbered through."""

    def __init__(self, splits: Sequence[PackedSplit], classes: Sequence[str] | None) -> None:
        self.splits = splits
        self.starts = np.concatenate([[0], np.cumsum([len(packed) for packed in splits])]).astype(np.int64)
        self.labels = self._column("label")
        self._names = classes

    def _column(self, name: str) -> Int64s:
        return np.concatenate([np.zeros(0, np.int64), *(packed.rows[name].astype(np.int64) for packed in self.splits)])

    def class_counts(self) -> list[tuple[str, int]]:
        """(name, samples) by label; empty without labels."""
        labels, counts = np.unique(self.labels[self.labels >= 0], return_counts=True)
        by_label = dict(zip(labels.tolist(), counts.tolist(), strict=True))
        every = sorted({*by_label, *range(len(self._names or ()))}) if by_label else []
        return [(self.class_name(label), by_label.get(label, 0)) for label in every]

    def class_name(self, label: int) -> str:
        """A class's name, or its number where it has none."""
        return self._names[label] if self._names is not None and 0 <= label < len(self._names) else str(label)

    @cached_property
    def series(self) -> _Series:
        """The series, where they are to sort by: there are no labels, and the samples are slices."""
        of = np.full(len(self.labels), -1, np.int64)
        numbers: dict[str, int] = {}
        if not (self.labels >= 0).any():
            for packed, start in zip(self.splits, self.starts.tolist(), strict=False):
                if any(field.startswith("ct.") and is_picture_array(field) for field in packed.fields):
                    for i in range(len(packed)):
                        name = series_of(packed.key(i), packed.fields)
                        of[start + i] = numbers.setdefault(name, len(numbers))
        return _Series(of, list(numbers))

    def groups(self, per_class: int) -> Iterator[_Group]:
        """Some samples of each class, evenly spaced over the dataset, so that the same call shows the same."""
        series = self.series
        group, name = (series.of, series.names.__getitem__) if series.names else (self.labels, self.class_name)
        labels, counts = np.unique(group[group >= 0], return_counts=True)
        if not len(labels):
            yield _Group(None, len(self.labels), _evenly(np.arange(len(self.labels)), WITHOUT_CLASSES))
            return
        order = np.argsort(group, kind="stable")
        first = np.searchsorted(group[order], labels)
        for i in _evenly(np.arange(len(labels)), min(MAX_CLASSES, max(MAX_PICTURES // per_class, 1))).tolist():
            members = order[first[i] : first[i] + counts[i]]
            yield _Group(name(int(labels[i])), int(counts[i]), _evenly(members, per_class))

    def sizes(self) -> Int64s:
        """Known short sides in pixels."""
        height, width = self._column("height"), self._column("width")
        return np.minimum(height, width)[(height > 0) & (width > 0)]

    def picture_bytes(self) -> Int64s:
        """The encoded size of each sample's picture, slice or volume."""
        found = [np.zeros(0, np.int64)]
        for packed in self.splits:
            length = np.full(len(packed), -1, np.int64)
            for field in (*filter(is_picture_array, packed.fields), *picture_fields(packed.fields)):
                length = np.where(length < 0, packed.rows[f"{field}:length"], length)
            found.append(length[length >= 0])
        return np.concatenate(found)

    def split_of(self, sample: int) -> tuple[PackedSplit, int]:
        """The split that a sample is in, and its number there."""
        at = int(np.searchsorted(self.starts, sample, "right")) - 1
        return self.splits[at], sample - int(self.starts[at])


def _evenly(values: Int64s, most: int) -> Int64s:
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(np.int64)]


# ---------------------------------------------------------------- thumbnails


@dataclass(frozen=True)
class _Job:
    """Samples of one split whose tiles one worker makes; `numbers` are those of `_Shown`."""

    packed: PackedSplit
    samples: tuple[int, ...]
    numbers: tuple[int, ...]


def _tiles(shown: _Shown, groups: Iterable[_Group], workers: int | None, report: Report) -> dict[int, str]:
    """One tile of HTML for each sample."""
    jobs: dict[int, list[tuple[int, int]]] = {}
    for number in sorted(int(sample) for group in groups for sample in group.samples):
        packed, sample = shown.split_of(number)
        jobs.setdefault(shown.splits.index(packed), []).append((sample, number))
    tasks = [
        _Job(shown.splits[at], *zip(*pairs[i : i + _AT_ONCE], strict=True))
        for at, pairs in jobs.items()
        for i in range(0, len(pairs), _AT_ONCE)
    ]
    tiles: dict[int, str] = {}
    for made in local_engine(workers, len(tasks)).run(_make_tiles, tasks, report):
        tiles |= made
    return tiles


def _make_tiles(job: _Job, report: Report) -> dict[int, str]:
    tiles = {}
    for sample, number in zip(job.samples, job.numbers, strict=True):
        tiles[number] = _tile(job.packed, sample)
        report(1, 0)
    job.packed.close()
    return tiles


def _tile(packed: PackedSplit, sample: int) -> str:
    row, key = packed.rows[sample], packed.key(sample)
    where = f"{key}\n{packed.split.name}, sample {sample}, {os.path.basename(packed.shard_path(int(row['shard'])))}"
    if array_field(packed, sample) is not None:
        return _slice_tile(packed, sample, where)
    field = next((name for name in picture_fields(packed.fields) if row[f"{name}:length"] >= 0), None)
    if field is None:
        held = ", ".join(
            f"{name} {html.human(row[f'{name}:length'])}" for name in packed.fields if row[f"{name}:length"] >= 0
        )
        return f'<div class="none" title="{_title(where)}">{html.text(held or "empty")}</div>'
    data = packed.read(sample, field, check=True) or b""
    try:
        picture = decode_rgb(data)
    except BadImageError as error:
        return f'<div class="bad" title="{_title(where)}">{html.text(error)}</div>'
    facts = f"{picture.rgb.width}×{picture.rgb.height} {picture.format}, {html.human(len(data))}"
    small = max(picture.rgb.size) <= _PIXEL_ART
    return _img(_thumbnail(picture), small=small, key=key, title=f"{where}{chr(10)}{facts}")


def _slice_tile(packed: PackedSplit, sample: int, where: str) -> str:
    """A CT slice with its caption below."""
    try:
        picture = slice_picture(packed, sample, _SHORT_SIDE, _LONG_SIDE)
    except BadImageError as error:
        return f'<div class="bad" title="{_title(where)}">{html.text(error)}</div>'
    facts = f"{picture.pixels[1]}×{picture.pixels[0]}, {picture.window}"
    title = "\n".join((where, *picture.caption, facts))
    small = max(picture.rgb.size) <= _PIXEL_ART
    image = _img(picture.rgb, small=small, key=packed.key(sample), title=title, fine=True)
    caption = "".join(f"<span>{html.text(line)}</span>" for line in picture.caption)
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _img(image: Image, *, small: bool, key: str, title: str, fine: bool = False) -> str:
    """The picture within the page: as PNG, shown pixel by pixel, if it is small, else as JPEG.

    `fine` keeps coloured lines of one pixel, which JPEG's usual subsampling of colours takes away.
    """
    out = io.BytesIO()
    kind, pixels = ("png", ' class="px"') if small else ("jpeg", "")
    if small:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=90 if fine else 80, optimize=True, subsampling=0 if fine else -1)
    return (
        f'<img{pixels} src="data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode("ascii")}" '
        f'width="{image.width}" height="{image.height}" loading="lazy" decoding="async" alt="{html.text(key)}" '
        f'title="{_title(title)}">'
    )


def _title(lines: str) -> str:
    """Lines of a tooltip."""
    return "&#10;".join(html.text(line) for line in lines.split("\n"))


def _thumbnail(picture: Picture) -> Image:
    """The picture made smaller, upright."""
    from PIL.Image import Resampling, Transpose

    turn = {
        2: (Transpose.FLIP_LEFT_RIGHT,), 3: (Transpose.ROTATE_180,), 4: (Transpose.FLIP_TOP_BOTTOM,),
        5: (Transpose.TRANSPOSE,), 6: (Transpose.ROTATE_270,), 7: (Transpose.TRANSVERSE,),
        8: (Transpose.ROTATE_90,),
    }.get(picture.orientation, ())  # fmt: skip
    image = picture.rgb
    scale = min(_SHORT_SIDE / min(image.size), _LONG_SIDE / max(image.size), 1.0)
    if scale < 1:
        size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
        image = image.resize(size, Resampling.LANCZOS, reducing_gap=3.0)
    for operation in turn:
        image = image.transpose(operation)
    return image
