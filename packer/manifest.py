"""`dataset.json`: what a packed folder holds. Written last, so its presence means complete."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from packer.errors import ManifestError
from packer.formats import FORMATS
from packer.sample import bad_fields
from packer.storage import write_json

if TYPE_CHECKING:
    from packer.formats.base import Format

FILE = "dataset.json"
VERSION = 1

#: Half a million shards fit; more is an attack on memory.
MAX_BYTES = 64 << 20

#: Samples of a split, and bytes of a shard, that are believed; arrays of such lengths can still be spoken of.
_MOST_SAMPLES, _MOST_BYTES = 1 << 40, 1 << 60

# A shard's name is joined to the dataset's folder: one component, nothing that climbs or hides.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][^/\\\x00]*")


@dataclass(frozen=True)
class Shard:
    """One shard file: its name inside the folder, how many samples, how large, its checksum."""

    name: str
    samples: int
    bytes: int
    crc32c: int


@dataclass(frozen=True)
class Split:
    """The shards of one split, in order; sample numbers run through them."""

    name: str
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def index_file(self) -> str:
        """Name of the split's index inside the folder."""
        return f"{self.name}.index.npy"

    @property
    def names_file(self) -> str:
        """Name of the file of keys and original paths inside the folder."""
        return f"{self.name}.names"

    def beside(self, format: Format) -> tuple[str, ...]:  # noqa: A002
        """Names of the files that the shards' format has beside them, for other readers; none for a single file."""
        return tuple(name for ending in format.beside if (name := self.name + ending) not in self._shard_names())

    def _shard_names(self) -> set[str]:
        return {shard.name for shard in self.shards}


@dataclass(frozen=True)
class Manifest:
    """What `dataset.json` says.

    Attributes:
        format: name of the shard format (`webdataset`, `hdf5`, `tfrecord`).
        fields: field names in the index's order.
        splits: by name, in the source's order.
        classes: class names by label, or None without classes.
        source: where the samples came from, in counts (layout, skipped files by reason).
        options: what was asked for, so that the same bytes can be made again.
        fingerprint: of the plan; equal fingerprints give equal bytes.
        sidecars: crc32c and size of each index and names file, and of those that the format has beside its shards.
    """

    format: str
    fields: tuple[str, ...]
    splits: Mapping[str, Split]
    classes: tuple[str, ...] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    sidecars: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples in all splits."""
        return sum(split.samples for split in self.splits.values())

    @property
    def bytes(self) -> int:
        """Size of all shards of all splits."""
        return sum(split.bytes for split in self.splits.values())

    def to_json(self) -> dict[str, Any]:
        """The value that `dataset.json` holds."""
        value = {
            "packer": VERSION,
            "format": self.format,
            "fields": list(self.fields),
            "classes": None if self.classes is None else list(self.classes),
            "splits": {
                split.name: {
                    "samples": split.samples,
                    "bytes": split.bytes,
                    "index": split.index_file,
                    "names": split.names_file,
                    "shards": [vars(shard) for shard in split.shards],
                }
                for split in self.splits.values()
            },
            "source": dict(self.source),
            "options": dict(self.options),
            "fingerprint": self.fingerprint,
            "sidecars": {name: dict(facts) for name, facts in self.sidecars.items()},
        }
        return value | {"crc32c": checksum(value)}

    def save(self, folder: str) -> None:
        """Write `dataset.json` atomically. Call it last: it declares the folder complete."""
        write_json(os.path.join(folder, FILE), self.to_json())

    @staticmethod
    def load(folder: str) -> Manifest:
        """Read and check `dataset.json`.

        Raises:
            ManifestError: it is missing, not ours, contradicts itself, or names files outside its folder.
        """
        path = os.path.join(folder, FILE)
        try:
            value = read_json(path)
        except FileNotFoundError as error:
            raise ManifestError(_why_missing(folder)) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ManifestError(f"{path} cannot be read: {error}") from error
        return Manifest.from_json(value, path)

    @staticmethod
    def from_json(value: Any, path: str = FILE) -> Manifest:
        """Check a parsed `dataset.json`; see `load`."""
        if not isinstance(value, dict) or "packer" not in value:
            raise ManifestError(f"{path} was not written by packer (no 'packer' entry)")
        if value["packer"] != VERSION:
            raise ManifestError(f"{path} has version {value['packer']!r}, this packer reads {VERSION}: update packer")
        if value.get("format") not in tuple(FORMATS):  # it need not be hashable
            raise ManifestError(
                f"{path}: shards of format {value.get('format')!r} are not known to this packer "
                f"(it reads {', '.join(FORMATS)}): update packer"
            )
        try:
            splits = {}
            for name, entry in value["splits"].items():
                _check_name(name, path)
                shards = tuple(
                    Shard(str(s["name"]), int(s["samples"]), int(s["bytes"]), int(s["crc32c"])) for s in entry["shards"]
                )
                for shard in shards:
                    _check_name(shard.name, path)
                    if shard.samples < 0 or shard.bytes < 0:
                        raise ManifestError(f"{path}: shard {shard.name!r} has a negative size")
                    if shard.bytes >= _MOST_BYTES:
                        raise ManifestError(f"{path}: shard {shard.name!r} cannot have {shard.bytes} bytes")
                splits[name] = Split(name, shards)
                if splits[name].samples != entry["samples"]:
                    raise ManifestError(
                        f"{path}: split {name!r} says {entry['samples']!r} samples, "
                        f"its shards add up to {splits[name].samples}"
                    )
                if splits[name].samples >= _MOST_SAMPLES:
                    raise ManifestError(f"{path}: split {name!r} cannot have {splits[name].samples} samples")
            if not splits:
                raise ManifestError(f"{path} names no split; pack again, or run 'packer index' on the folder")
            classes = value.get("classes")
            return Manifest(
                format=str(value["format"]),
                fields=_field_names(value["fields"]),
                splits=splits,
                classes=None if classes is None else tuple(str(name) for name in classes),
                source=dict(value.get("source", {})),
                options=dict(value.get("options", {})),
                fingerprint=str(value.get("fingerprint", "")),
                sidecars={
                    name: {"bytes": int(facts["bytes"]), "crc32c": int(facts["crc32c"])}
                    for name, facts in value.get("sidecars", {}).items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ManifestError(f"{path} is not a complete manifest: {type(error).__name__} {error}") from error


def checksum(value: Mapping[str, Any]) -> int:
    """crc32c of what a parsed `dataset.json` says, whatever its layout, its own `crc32c` entry left out.

    Only `packer verify` compares it: who edits the file by hand (to rename a class) may go on using it.
    """
    said = {name: entry for name, entry in value.items() if name != "crc32c"}
    return int(crc32c(json.dumps(said, sort_keys=True, separators=(",", ":")).encode("ascii")))


def read_json(path: str) -> Any:
    """Parse a JSON file of at most `MAX_BYTES`; a pipe in its place does not block.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is not JSON.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as f:
        facts = os.fstat(f.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("not a regular file")
        if facts.st_size > MAX_BYTES:
            raise ValueError(f"{facts.st_size} bytes; the limit is {MAX_BYTES}")
        return json.loads(f.read(MAX_BYTES))


def _field_names(value: Any) -> tuple[str, ...]:
    names = tuple(value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("'fields' is not a list of names")
    if bad := bad_fields(names):
        raise ValueError(f"{bad[0]!r} cannot be a field's name")
    if len(set(names)) < len(names):
        raise ValueError("a field is named twice")
    return names


def is_plain_name(name: str) -> bool:
    """Whether a shard or split may have this name: one component, which neither climbs nor hides."""
    return _SAFE_NAME.fullmatch(name) is not None


def _check_name(name: str, path: str) -> None:
    if not is_plain_name(name):
        raise ManifestError(f"{path} names {name!r}, which is not a plain file name: refusing to follow it")


def _why_missing(folder: str) -> str:
    path = os.path.join(folder, FILE)
    if not os.path.isdir(folder):
        return f"{folder} is not a folder" if os.path.exists(folder) else f"{folder} does not exist"
    if os.path.isdir(os.path.join(folder, ".packer")):
        return f"{path} is missing: packing was not finished; run the same 'packer shard' command again to finish it"
    return (
        f"{path} is missing: not a packed dataset; 'packer index {folder}' makes it from shards, "
        f"'packer shard {folder} OUT' packs a folder of files"
    )
