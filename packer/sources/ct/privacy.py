"""What leaves a header: numbers of the geometry and a few coded words. Whatever identifies a patient is hashed.

Identifiers become the first 16 hexadecimal digits of HMAC-SHA256 under a salt. The salt is a secret file: with
it the hashes can be recomputed from a list of patients, without it they cannot. It is kept outside the dataset,
which knows only its fingerprint.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packer.errors import UsageError
from packer.sources.ct.errors import PHIError

_SHORTEST_SALT = 16
_HASH = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(r"[0-9a-f]{16}(_\d{5,})?")

# A kernel is free text in a header. These words and codes (B30f, Br40d, FC13, H31s\3) are known; nothing else is kept.
_KERNEL_WORDS = frozenset((
    "STANDARD", "STND", "SOFT", "DETAIL", "LUNG", "BONE", "BONEPLUS", "BONEPLUS2", "EDGE", "ULTRA", "CHEST",
    "SMOOTH", "SHARP", "BODY", "BRAIN", "HEAD", "A", "B", "C", "CB", "CC", "D", "E", "EB", "EC", "F", "L", "YA",
    "YB", "YC", "YD", "UA", "UB", "UC", "IMR1", "IMR2", "SPC",
))  # fmt: skip
_KERNEL_CODE = re.compile(r"[A-Z]{1,2}[a-z]{0,2}\d{1,3}[a-z]{0,2}([\\-][A-Z0-9])?")

#: Keys of a record whose values are hashes.
_HASHED = frozenset(("patient", "study", "series"))
_WORDS = frozenset(("HU", "unknown", "window", "packer-ct-1"))
#: Keys that a record may have; see `packer.sources.ct.record`.
_KEYS = frozenset((
    "patient", "study", "series", "index", "n_slices", "position_mm", "positions", "ipp", "iop", "affine",
    "spacing_mm", "slice_spacing_mm", "thickness_mm", "rows", "cols", "units", "windows", "kvp", "kernel", "lossy",
    "pad_pixels", "floored_pixels", "tilt_deg", "schema",
))  # fmt: skip


def known_kernel(text: str) -> str | None:
    r"""A reconstruction kernel as it may be kept, None for text that is no kernel of a known spelling.

    >>> known_kernel("B30f"), known_kernel("I31f\\3"), known_kernel("ask Dr. Miller")
    ('B30f', 'I31f\\3', None)
    """
    text = text.strip()
    return text if text in _KERNEL_WORDS or (len(text) <= 8 and _KERNEL_CODE.fullmatch(text)) else None


@dataclass(frozen=True)
class Hasher:
    """Makes the hashes of one salt. Picklable."""

    salt: bytes

    def __repr__(self) -> str:
        return "Hasher(…)"  # a salt in a log is no secret any more

    def __call__(self, identifier: str) -> str:
        """16 hexadecimal digits that stand for a patient, a study or a series."""
        return hmac.new(self.salt, identifier.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """Tells salts apart and gives nothing of them away."""
        return hashlib.sha256(b"fingerprint of a packer salt\0" + self.salt).hexdigest()[:16]


def default_salt_file() -> str:
    """Where the salt of this user is kept: made once, used by all later runs."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "packer", "id-salt")


def load_salt(path: str) -> Hasher:
    """The salt in a file; a file that does not exist is made, readable by its owner alone.

    Raises:
        UsageError: the file cannot be read or made, or holds too little to be a secret.
    """
    try:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _make_salt(path)
        with open(fd, "rb") as f:
            salt = f.read(4096).strip()
    except OSError as error:
        raise UsageError(f"--id-salt-file {path}: {error.strerror}; name a file that can be read or made") from error
    if len(salt) < _SHORTEST_SALT:
        raise UsageError(
            f"--id-salt-file {path} holds {len(salt)} bytes; a salt needs at least {_SHORTEST_SALT} random ones "
            "(name a file that does not exist, and it is made)"
        )
    return Hasher(salt)


def _make_salt(path: str) -> Hasher:
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    salt = secrets.token_hex(32).encode("ascii")
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as f:
            f.write(salt + b"\n")
            f.flush()
            os.fsync(f.fileno())
        os.link(partial, path)  # two first runs at once: one of them is the first
    except FileExistsError:
        return load_salt(path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    return Hasher(salt)


def check_record(key: str, record: Mapping[str, Any]) -> None:
    """The last look before a record is written: it holds what a record may hold, and nothing else of the header.

    Args:
        key: the sample's key: a hash and a number.
        record: as it will be written: hashes, finite numbers, and words of a short list.

    Raises:
        PHIError: something else is in it. The message names the entry, not what it holds.
    """
    if not _KEY.fullmatch(key):
        raise PHIError("the key of a sample is not a hash and a number; it was not written: please report this")
    for name, value in record.items():
        if name not in _KEYS or not _is_plain(name, value):
            shown = repr(name) if name in _KEYS else "of an unknown name"
            raise PHIError(
                f"sample {key}: the entry {shown} of its record is not what such an entry may hold; "
                "it was not written: please report this"
            )


def _is_plain(name: str, value: Any) -> bool:
    if name in _HASHED:
        return value is None or (isinstance(value, str) and _HASH.fullmatch(value) is not None)
    if isinstance(value, str):
        return value in _WORDS or (name == "kernel" and known_kernel(value) == value)
    if isinstance(value, (list, tuple)):
        return all(not isinstance(one, str) and _is_plain(name, one) for one in value)
    return value is None or (isinstance(value, (bool, int, float)) and math.isfinite(value))
