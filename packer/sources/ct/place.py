"""Where a payload comes from, as the scan tells the reader: a short JSON text for each field of each sample."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """What one payload is made from.

    Attributes:
        what: 'image', 'mask' or 'record'.
        key: the sample's.
        slices: `(path, frame, size of the file)` of each slice, in order; one for a slice sample.
        facts: for records: what the stack knows (see `packer.sources.ct.record`).
    """

    what: str
    key: str
    slices: Sequence[tuple[bytes, int, int]]
    facts: Mapping[str, Any] | None = None

    def encode(self) -> bytes:
        """As bytes."""
        slices = [(os.fsdecode(path), frame, size) for path, frame, size in self.slices]
        return json.dumps([self.what, self.key, slices, self.facts], separators=(",", ":")).encode("ascii")

    @staticmethod
    def decode(data: bytes) -> Place:
        """From bytes."""
        what, key, slices, facts = json.loads(data)
        return Place(what, key, [(os.fsencode(path), frame, size) for path, frame, size in slices], facts)
