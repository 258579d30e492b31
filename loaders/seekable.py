"""Crop a JPEG that has restart markers without decoding it."""

from __future__ import annotations


def has_restart(data: bytes | memoryview) -> bool:
    """Whether a crop of this JPEG can be cut out without decoding the rest."""
    raise NotImplementedError
