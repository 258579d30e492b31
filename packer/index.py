"""The index: where every sample's bytes lie. One flat numpy array per split, memory-mapped.

`<split>.index.npy` is an ordinary `.npy` file of a structured array, one row per sample:

| column | type | meaning |
|---|---|---|
| `label` | int64 | the class index, −1 where there is none |
| `<field>:offset` | int64 | absolute byte offset of the field in its shard |
| `<field>:length` | int64 | its length in bytes, −1 where the sample lacks the field |
| `shard` | int32 | position of the shard in the manifest's list |
| `height`, `width` | int32 | of the first image, as stored (before EXIF); −1 where unknown |
| `<field>:crc32c` | uint32 | of the field's bytes |

`<split>.names` holds the keys and the original paths, read only when asked for:
the magic `PKNAMES1`, two little-endian uint64 (samples n, columns c), then per column
uint64 ends[n + 1] and the bytes. Column 0 holds the keys, column 1 + f the original path of
field f, empty where the field was made by packing or is absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tokenize import TokenError

import numpy as np
import numpy.typing as npt

from packer.errors import ManifestError
from packer.strings import Strings, Taken

Rows = npt.NDArray[np.void]

_MAGIC = b"PKNAMES1"
_MAX_HEADER = 1 << 20  # numpy's own 10,000 characters hold some 100 fields

# Besides its own ValueError, numpy lets through what a damaged header makes Python's parser raise; and where
# warnings are errors, the one of an old name of a type ('a4').
_NUMPY_RAISES = (OSError, ValueError, EOFError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError,
                 OverflowError, MemoryError, TokenError, DeprecationWarning)  # fmt: skip


def row_dtype(fields: Sequence[str], extra: Sequence[str] = ()) -> np.dtype[np.void]:
    """The structured type of a row.

    Args:
        fields: field names, in the manifest's order.
        extra: further int32 columns (CT: `series`, `slice`).
    """
    columns: list[tuple[str, str]] = [("label", "<i8")]
    columns += [(f"{field}:{what}", "<i8") for field in fields for what in ("offset", "length")]
    columns += [(name, "<i4") for name in ("shard", "height", "width", *extra)]
    columns += [(f"{field}:crc32c", "<u4") for field in fields]
    return np.dtype(columns, align=True)


def empty_rows(samples: int, fields: Sequence[str], extra: Sequence[str] = ()) -> Rows:
    """Rows that say 'absent' everywhere."""
    rows = np.zeros(samples, row_dtype(fields, extra))
    for name in rows.dtype.names or ():
        if not name.endswith((":crc32c", ":offset")):
            rows[name] = -1
    return rows


def load_rows(path: str, samples: int, fields: Sequence[str]) -> Rows:
    """Memory-map an index and check that it is the one the manifest speaks of.

    Opening costs one header, whatever the number of samples; pages are read when touched and
    shared between processes.

    Raises:
        ManifestError: not an index, or for another number of samples, or without a column that it must have.
    """
    rows = _open_array(path, mapped=samples > 0)  # an empty array cannot be memory-mapped
    if rows.ndim != 1 or rows.dtype.names is None:
        raise ManifestError(f"{path} is not an index: it holds an array of shape {rows.shape}, type {rows.dtype}")
    needed = row_dtype(fields)
    for name in needed.names or ():
        if name not in rows.dtype.names or rows.dtype[name] != needed[name]:
            raise ManifestError(
                f"{path} lacks the column {name!r} ({needed[name]}); run 'packer index --force' to rebuild it"
            )
    if len(rows) != samples:
        raise ManifestError(
            f"{path} has {len(rows)} rows, dataset.json says {samples} samples; "
            "run 'packer index --force' to rebuild it"
        )
    return rows


def _open_array(path: str, *, mapped: bool) -> Rows:
    rows: Rows
    try:
        if not os.path.isfile(path):  # a pipe would block
            raise ManifestError(f"{path} is missing; run 'packer index --force' on the folder to rebuild it")
        if mapped:
            rows = np.lib.format.open_memmap(path, mode="r", max_header_size=_MAX_HEADER)
        else:
            with open(path, "rb") as f:
                rows = np.lib.format.read_array(f, allow_pickle=False, max_header_size=_MAX_HEADER)
    except _NUMPY_RAISES as error:
        raise ManifestError(
            f"{path} is not a readable index ({error}); run 'packer index --force' to rebuild it"
        ) from error
    return rows


def npy_header(dtype: np.dtype[np.void], samples: int) -> bytes:
    """What a `.npy` file of so many rows begins with; the rows' own bytes follow.

    numpy's own writer copies the rows, and warns where a header needs more than format 1.0.
    """
    descr = np.lib.format.dtype_to_descr(dtype)
    text = repr({"descr": descr, "fortran_order": False, "shape": (samples,)}).encode("utf-8")
    plain = text.isascii() and len(text) < 65_000
    before = 10 if plain else 12
    text += b" " * (-(before + len(text) + 1) % 64) + b"\n"
    if plain:
        return bytes(np.lib.format.magic(1, 0)) + len(text).to_bytes(2, "little") + text
    return bytes(np.lib.format.magic(3, 0)) + len(text).to_bytes(4, "little") + text


def npy_rows(rows: Rows) -> memoryview:
    """The bytes of these rows as they stand in a `.npy` file, without a copy."""
    return np.ascontiguousarray(rows).view(np.uint8).data


@dataclass(frozen=True, eq=False)
class Names:
    """Keys and original paths of one split.

    Attributes:
        keys: (n,) the samples' keys, UTF-8.
        paths: per field, (n,) the original path relative to the source, as raw bytes.
    """

    keys: Strings
    paths: tuple[Strings, ...]

    def parts(self) -> Iterator[bytes | memoryview]:
        """The bytes of the `.names` file, in pieces, the strings without a copy."""
        return _names_parts((self.keys, *self.paths))

    @staticmethod
    def load(path: str, samples: int, fields: Sequence[str]) -> Names:
        """Memory-map a `.names` file.

        Raises:
            ManifestError: the file is missing, truncated, or for another dataset.
        """
        try:
            if not os.path.isfile(path):  # a pipe would block
                raise FileNotFoundError("no such file")
            raw = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise ManifestError(f"cannot read {path} ({error}); run 'packer index --force' to rebuild it") from error
        wrong = ManifestError(
            f"{path} is damaged or belongs to another dataset; run 'packer index --force' to rebuild it"
        )
        head = len(_MAGIC) + 16
        if len(raw) < head or raw[: len(_MAGIC)].tobytes() != _MAGIC:
            raise wrong
        count, width = raw[len(_MAGIC) : head].view("<u8").tolist()
        if count != samples or width != 1 + len(fields):
            raise wrong
        columns = []
        at = head
        for _ in range(width):
            until = at + 8 * (count + 1)
            if until > len(raw):
                raise wrong
            ends = np.frombuffer(raw, "<i8", count + 1, at).astype(np.int64)
            if ends[0] != 0 or np.any(ends[1:] < ends[:-1]) or until + int(ends[-1]) > len(raw):
                raise wrong
            at = until + int(ends[-1])
            columns.append(Strings(raw.data[until:at], ends))
        return Names(columns[0], tuple(columns[1:]))


@dataclass(frozen=True, eq=False)
class NamesToWrite:
    """What `Names` holds, for writing alone: columns in another order that is made piece by piece."""

    keys: Taken
    paths: tuple[Taken, ...]

    def parts(self) -> Iterator[bytes | memoryview]:
        """The bytes of the `.names` file, in pieces."""
        return _names_parts((self.keys, *self.paths))


def _names_parts(columns: Sequence[Strings] | Sequence[Taken]) -> Iterator[bytes | memoryview]:
    yield _MAGIC + np.array([len(columns[0]), len(columns)], "<u8").tobytes()
    for column in columns:
        yield column.ends.astype("<i8", copy=False).view(np.uint8).data
        yield from column.pieces()
