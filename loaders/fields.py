"""A field's bytes to a value, by the field's last extension, as WebDataset names them.

| extensions | value |
|---|---|
| `cls cls2 index inx id` | int |
| `txt text transcript` | str |
| `json jsn` | what the JSON holds |
| `npy`, `npy.zst` | array of numbers |
| `npz` | dict of arrays |
| `pkl pickle pyd pth pt ckpt joblib dill` | refused: reading them can run any program |
| all else | the bytes |

Pictures are decoded by `loaders.decode`, not here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from packer import npy
from packer.errors import UsageError

REFUSED = frozenset(("pkl", "pickle", "pyd", "pth", "pt", "ckpt", "joblib", "dill"))

Buffer = bytes | memoryview


def check_readable(field: str) -> None:
    """Raise UsageError for a field that only unpickling could read."""
    if field.rpartition(".")[2] in REFUSED:
        raise UsageError(
            f"field {field!r} is a pickle, and reading one runs whatever program it holds: refused; "
            "store json or npy, or ask for the raw bytes through packer.packed.Packed and decode them yourself"
        )


def decode_field(field: str, data: Buffer) -> Any:
    """The value of a field that is no picture; see the module's table.

    Raises:
        UsageError: a pickle.
        BadArrayError: no array of numbers, or a damaged one.
        ValueError: the bytes are not what the extension says.

    >>> decode_field("cls", b"7"), decode_field("meta.json", b'{"a": [1, 2]}'), decode_field("bin", b"x")
    (7, {'a': [1, 2]}, b'x')
    """
    extension = field.rpartition(".")[2]
    if extension in REFUSED:
        check_readable(field)
    if npy.is_array_field(field):
        return npy.decode(data)
    decoder = _DECODERS.get(extension)
    return bytes(data) if decoder is None else decoder(data)


def _integer(data: Buffer) -> int:
    return int(bytes(data))


def _text(data: Buffer) -> str:
    return str(data, "utf-8")


def _json(data: Buffer) -> Any:
    return json.loads(bytes(data))


def _npz(data: Buffer) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return dict(archive)


_DECODERS: dict[str, Callable[[Buffer], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _integer),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), _json),
    "npz": _npz,
}
