"""Lossless transcoding of JPEGs so that loaders can decode a crop alone."""

from __future__ import annotations


def jpegtran_path() -> str:
    """Path of `jpegtran`; raises `MissingToolError` that says how to install it."""
    raise NotImplementedError


def seekable_or_reason(data: bytes) -> tuple[bytes | None, str]:
    """(seekable JPEG, "") or (None, why the picture is left as it is)."""
    raise NotImplementedError


def make_seekable(data: bytes) -> bytes | None:
    """The same picture with restart markers, or None where it is better left alone."""
    return seekable_or_reason(data)[0]
