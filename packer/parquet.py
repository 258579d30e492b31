"""Parquet files of pictures, as Hugging Face stores them: written out, front to back, as records that can be indexed.

A column of `{bytes, path}` (or of bytes) holds the pictures, a column of whole numbers the labels. Other pictures
become fields called like their columns, everything else the field `json`. Rows are read in batches, so memory does not
grow with the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from packer.errors import MissingExtraError, SourceError
from packer.formats.example import FILE_NAME, IMAGE, LABEL, bytes_entry, int_entry, utf8
from packer.formats.tfrecord import FORMAT, frame
from packer.sample import IMAGE_EXTENSIONS, printable, split_extension
from packer.storage import output_error

if TYPE_CHECKING:
    import pyarrow as pa

_ENDING = ".parquet"
_ROWS = 64  # at once: pictures may have megabytes
_IMAGES = ("image", "img", "jpg", "jpeg", "png", "picture")
_LABELS = ("label", "labels", "fine_label", "class", "class_id", "cls")


def holds_parquet(path: str) -> bool:
    """Whether a path is a parquet file, or a folder of them, at most two folders down."""
    return (os.path.isfile(path) and path.lower().endswith(_ENDING)) or next(_below(path), None) is not None


def parquet_files(path: str) -> list[str]:
    """The parquet files of a folder, in order."""
    return [path] if os.path.isfile(path) else sorted(_below(path))


def _below(folder: str, depth: int = 2) -> Iterator[str]:
    if not os.path.isdir(folder):
        return
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.lower().endswith(_ENDING) and entry.is_file():
                yield entry.path
            elif split_extension(os.fsencode(entry.name))[1] in IMAGE_EXTENSIONS:
                return  # a folder of pictures
            elif depth and entry.is_dir():
                folders.append(entry.path)
    if len(folders) <= _MOST_FOLDERS:  # more are the classes of an ImageFolder
        for below in folders:
            yield from _below(below, depth - 1)


_MOST_FOLDERS = 16


class _Columns(NamedTuple):
    """Names of columns: the picture's, the label's, further pictures', and all others'."""

    image: str
    label: str | None
    more_images: tuple[str, ...]
    others: tuple[str, ...]


def write_out(folder: str, files: Sequence[str], target: str) -> tuple[str, ...] | None:
    """Write every parquet file's rows as a file of records into `target`; returns the class names, if there are any.

    Raises:
        MissingExtraError: pyarrow is not installed.
        SourceError: not readable as parquet, without a column of pictures, or with a row that has none.
        OutputError: the disk is full.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "reading parquet files") from error
    import pyarrow as pa

    classes: tuple[str, ...] | None = None
    for file in files:
        name = os.path.relpath(file, folder) if file != folder else os.path.basename(file)
        stem = name[: -len(_ENDING)].replace(os.sep, "-")
        try:
            with pq.ParquetFile(file) as table:
                columns = _columns(table.schema_arrow, file)
                classes = _class_names(table.schema_arrow.metadata, columns.label) or classes
                _write_rows(table.iter_batches(_ROWS), columns, file, os.path.join(target, stem + FORMAT.suffix), stem)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{printable(file)} cannot be read as parquet: {error}") from error
    return classes


def _columns(schema: pa.Schema, file: str) -> _Columns:
    import pyarrow as pa

    def holds_picture(kind: pa.DataType) -> bool:
        if pa.types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    pictures = [field.name for field in schema if holds_picture(field.type)]
    if not pictures:
        raise SourceError(f"{printable(file)} has no column of pictures; its columns: {', '.join(schema.names)}")
    image = next((name for name in _IMAGES if name in pictures), pictures[0])
    numbers = {field.name for field in schema if pa.types.is_integer(field.type)}
    label = next((name for name in _LABELS if name in numbers), None)
    others = tuple(name for name in schema.names if name not in pictures and name != label)
    return _Columns(image, label, tuple(name for name in pictures if name != image), others)


def _class_names(metadata: Mapping[bytes, bytes] | None, label: str | None) -> tuple[str, ...] | None:
    """As Hugging Face keeps them beside the schema."""
    try:
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][label]
        return tuple(map(str, feature["names"])) if feature["_type"] == "ClassLabel" else None
    except (KeyError, ValueError, TypeError):
        return None


def _write_rows(batches: Any, columns: _Columns, file: str, target: str, stem: str) -> None:
    number = 0
    with open(target, "xb") as out:
        for batch in batches:
            for row in batch.to_pylist():
                where = f"{printable(file)}, row {number}"
                data = frame(_example(row, columns, f"{stem}/{number:08d}", where))
                try:
                    out.write(data)
                except OSError as error:
                    raise output_error(target, error, resumes=False) from error
                number += 1


def _example(row: Mapping[str, Any], columns: _Columns, key: str, where: str) -> bytes:
    picture, path = _picture(row[columns.image])
    if picture is None:
        raise SourceError(
            f"{where} has no bytes in column {columns.image!r}: embed the pictures into the parquet files"
        )
    extension = split_extension(os.fsencode(path))[1]
    if extension not in IMAGE_EXTENSIONS:
        extension = "png" if picture.startswith(b"\x89PNG") else "jpg"
    entries = [bytes_entry(FILE_NAME, utf8(f"{key}.{extension}")), bytes_entry(IMAGE, picture)]
    more = ((name, _picture(row[name])[0]) for name in columns.more_images)
    entries += [bytes_entry(utf8(name), data) for name, data in more if data is not None]
    others = {name: row[name] for name in columns.others} | ({"path": path} if path else {})
    if others:
        entries.append(bytes_entry(b"json", json.dumps(others, sort_keys=True, default=str).encode("ascii")))
    if columns.label is not None and row[columns.label] is not None:
        entries.append(int_entry(LABEL, int(row[columns.label])))
    return b"".join(entries)


def _picture(value: Any) -> tuple[bytes | None, str]:
    """Bytes and path of a picture, either of which may be missing."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path") or ""
    return value, ""
