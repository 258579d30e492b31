"""Batches from an unpacked folder: the same engine on the files themselves.

    from loaders.folder_loader import make_loader
    for images, labels in make_loader("/data/imagenet", batch_size=256, transform=TrainCrop(224)):
        ...

It shows what packing alone is worth, and serves folders that are not packed yet. Samples are numbered in the
order of their paths; sizes of pictures are not known beforehand, so buckets need a packed dataset.
"""

from __future__ import annotations

import os
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loaders.loader import Loader
from loaders.make import LoaderMaker
from loaders.options import LoaderOptions
from loaders.order import Numbers
from loaders.source import Fetch
from packer.errors import ManifestError, ProblemsError, SourceChangedError
from packer.sample import printable
from packer.sources.base import Scan
from packer.sources.folder import FolderOptions, FolderSource

__all__ = ["FolderSplit", "Loader", "make_loader"]


class FolderSplit:
    """The samples of one split of a folder. A folder without splits is one, whatever it is called.

    Args:
        folder: an ImageFolder tree, or any layout that `packer shard` takes.
        split: `train`, `val` … where the folder has them.
        options: the layout and what goes with it; None: recognised.
        skip_problems: leave out files that cannot be samples (empty ones, broken links) instead of raising.

    Raises:
        SourceError: no pictures there.
        ManifestError: no such split.
        ProblemsError: files that should be samples and cannot.
    """

    def __init__(
        self, folder: str | os.PathLike[str], split: str = "train", *, options: FolderOptions | None = None,
        skip_problems: bool = False,
    ) -> None:
        self.folder = os.path.abspath(folder)  # files are opened late, perhaps in another working directory
        scan = FolderSource(self.folder, options or FolderOptions()).scan()
        if scan.problems and not skip_problems:
            listed = [(printable(path), reason) for path, reason in scan.problems]
            raise ProblemsError(f"{self.folder}: {len(listed)} files cannot become samples:", listed,
                                "mend or remove them, or pass on_error='skip'")
        if scan.layout == "splits":
            if split not in scan.splits:
                raise ManifestError(f"{self.folder} has no split {split!r}; it has: {', '.join(scan.splits)}")
            scan = scan.take(np.flatnonzero(scan.split == scan.splits.index(split)))
        self._scan: Scan = scan

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names; `cls` is made of the label where it is the folder's name."""
        return (*self._scan.fields, "cls") if self._scan.made_cls else self._scan.fields

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names by label, in torchvision's order, or None."""
        return self._scan.classes

    def __len__(self) -> int:
        return len(self._scan)

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """Labels; all else is unknown without opening the files, and there are no shards."""
        if name == "label":
            return self._scan.label
        return np.full(len(self), 0 if name == "shard" else -1, np.int32)

    @cached_property
    def _files(self) -> dict[str, Numbers]:
        """Per field, (n,) the sample's file in the scan, −1 where it has none."""
        scan = self._scan
        sample = np.repeat(np.arange(len(scan)), np.diff(scan.first))
        files: dict[str, Numbers] = {}
        for position, name in enumerate(scan.fields):
            mine = np.flatnonzero(scan.field == position)
            files[name] = np.full(len(scan), -1, np.int64)
            files[name][sample[mine]] = mine
        return files

    def _is_made(self, field: str) -> bool:
        return field == "cls" and self._scan.made_cls

    def fetcher(self, numbers: Numbers, field: str) -> Fetch:
        """Open and read one file per sample."""
        if self._is_made(field):
            labels = self._scan.label[numbers].tolist()
            return lambda j: str(labels[j]).encode() if labels[j] >= 0 else None
        files = self._files[field][numbers].tolist()
        root, names = os.fsencode(self.folder), self._scan.paths
        paths = [os.path.join(root, names[file]) if file >= 0 else None for file in files]

        def fetch(j: int) -> bytes | None:
            path = paths[j]
            if path is None:
                return None
            try:
                with open(path, "rb", buffering=0) as f:
                    return f.read()
            except FileNotFoundError as error:
                raise SourceChangedError("the file is gone since the folder was listed") from error

        return fetch

    def sizes(self, numbers: Numbers, field: str) -> Numbers:
        """(n,) int64, the files' sizes when they were listed, −1 where absent."""
        if self._is_made(field):
            return np.full(len(numbers), -1, np.int64)
        files = self._files[field][numbers]
        sizes: Numbers = np.where(files >= 0, self._scan.sizes[files], -1)
        return sizes

    def key(self, number: int) -> str:
        """The key that packing would give the sample."""
        return self._scan.keys[number].decode("utf-8", "surrogateescape")

    def all_keys(self) -> list[str]:
        """All keys, by number."""
        return [key.decode("utf-8", "surrogateescape") for key in self._scan.keys]

    def path(self, number: int, field: str) -> str:
        """The field's file relative to the folder, empty if there is none."""
        file = -1 if self._is_made(field) else int(self._files[field][number])
        return os.fsdecode(self._scan.paths[file]) if file >= 0 else ""

    def complain(self, number: int, field: str, what: str, *, damaged: bool = True) -> str:  # noqa: ARG002 - no verify
        """A message that names the file."""
        path = self.path(number, field) if field in self.fields else ""
        return f"{os.path.join(self.folder, printable(path or self.key(number)))}, sample {number}: {what}"

    def close(self) -> None:
        """Nothing stays open."""


def _open(folder: str, split: str, options: LoaderOptions) -> FolderSplit:
    return FolderSplit(folder, split, skip_problems=options.on_error == "skip")


make_loader = LoaderMaker(_open)
