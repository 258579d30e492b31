"""The members of a batch of samples: the files of the source, and the labels that packing makes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from packer.formats.base import Batch
from packer.sources.base import Scan
from packer.strings import Int64s

LABEL_FIELD = "cls"


class MadeLabels:
    """The payloads of `cls` files that packing makes: class numbers in decimal digits."""

    def __init__(self, labels: Int64s) -> None:
        self._labels = np.unique(labels)
        texts = [b"%d" % label for label in self._labels.tolist()]
        self._lengths = np.array([len(text) for text in texts], np.int64)
        width = int(self._lengths.max(initial=0))
        padded = b"".join(text.ljust(width) for text in texts)
        self._texts = np.frombuffer(padded, np.uint8).reshape(len(texts), width)
        self._crcs = np.array([crc32c(text) for text in texts], np.uint32)

    def text(self, label: int) -> bytes:
        """The payload of one label."""
        return b"%d" % label

    def put(self, labels: Int64s, buffer: memoryview, at: Int64s) -> npt.NDArray[np.uint32]:
        """Write the payloads of these labels at these positions; returns the crc32c of each."""
        which = np.searchsorted(self._labels, labels)
        lengths = self._lengths[which]
        bytes_ = np.frombuffer(buffer, np.uint8)
        for column in range(self._texts.shape[1]):
            reach = lengths > column
            bytes_[at[reach] + column] = self._texts[which[reach], column]
        return self._crcs[which]


class Members:
    """The members of a batch: the source's files, and after each sample's files its made label.

    Attributes:
        batch: for the writer.
        samples_count: m, number of samples.
        samples: per member, its sample.
        numbers: per member, its field; len(scan.fields) is the made label.
        file_members, file_samples: per file of the source, its member and its sample.
        labelled: (m,) which samples have a made label; label_members: those members.
    """

    def __init__(self, scan: Scan, begin: int, end: int, files: slice, sizes: Int64s) -> None:
        self.samples_count = end - begin
        counts = np.diff(scan.first[begin : end + 1])
        labels = scan.label[begin:end]
        self.labelled = labels >= 0 if scan.made_cls else np.zeros(len(labels), bool)
        first = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts + self.labelled, out=first[1:])
        self.samples = np.repeat(np.arange(end - begin), counts + self.labelled)
        is_label = np.zeros(len(self.samples), bool)
        self.label_members = first[1:][self.labelled] - 1
        is_label[self.label_members] = True
        self.file_members = np.flatnonzero(~is_label)
        self.file_samples = self.samples[self.file_members]
        self.numbers = np.full(len(self.samples), len(scan.fields), np.int64)
        self.numbers[self.file_members] = scan.field[files]
        member_sizes = np.zeros(len(self.samples), np.int64)
        member_sizes[self.file_members] = sizes
        member_sizes[self.label_members] = _digits(labels[self.labelled])
        names = (*scan.fields, LABEL_FIELD)
        made = labels if scan.made_cls else np.full(len(labels), -1)
        self.batch = Batch(scan.keys.part(begin, end), first, names, self.numbers, member_sizes, made)


def _digits(labels: Int64s) -> Int64s:
    """How many decimal digits each label has."""
    digits = np.ones(len(labels), np.int64)
    power = 10
    while len(labels) and power <= labels.max():
        digits += labels >= power
        power *= 10
    return digits
