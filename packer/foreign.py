"""Shards that others wrote as a source: indexed in a temporary folder, then read like any packed dataset.

The shards themselves are only linked to. What has no byte ranges (shards compressed with gzip, parquet files) is first
written out there, front to back with bounded memory; `TMPDIR` says where, and must have room for it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

from packer.engines import Report
from packer.errors import DamagedShardError, OutputError, SourceError, UsageError
from packer.formats import all_formats, get_format
from packer.formats.base import HEAD_BYTES
from packer.indexing import index_folder
from packer.manifest import FILE
from packer.parquet import holds_parquet, parquet_files, write_out
from packer.sample import IMAGE_EXTENSIONS, printable, split_extension
from packer.storage import open_regular, output_error

_PIECE = 1 << 20
#: A gzip file that grows more than so many times, and beyond so many bytes, is refused as a decompression bomb.
MAX_GROWTH, GROWTH_ALLOWED = 100, 1 << 30
_GZIP_ENDINGS = {".tgz": ".tar", ".gz": ""}


def holds_shards(path: str) -> bool:
    """Whether a path is a shard, of any format, or a folder of shards and nothing that could be packed itself."""
    if not os.path.isdir(path):
        return (_by_name(os.path.basename(path)) or _by_content(path)) is not None
    if os.path.exists(os.path.join(path, FILE)):
        return False
    found = False
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir() or split_extension(os.fsencode(entry.name))[1] in IMAGE_EXTENSIONS:
                return False
            found = found or _is_shard_name(entry.name)
    return found


def _is_shard_name(name: str) -> bool:
    return _by_name(name) is not None


def _by_name(name: str) -> str | None:
    """The format of shards that are called like this, compressed or not."""
    lower = "" if name.startswith(".") else name.lower()
    return next((f.name for f in all_formats() if lower.endswith((*f.suffixes, *f.packed_suffixes))), None)


def _by_content(path: str) -> str | None:
    try:
        fd = open_regular(path)
    except OSError:
        return None
    try:
        head = os.pread(fd, HEAD_BYTES, 0)
    finally:
        os.close(fd)
    return next((f.name for f in all_formats() if f.recognises(head)), None)


@contextlib.contextmanager
def as_packed(
    paths: Sequence[str], *, workers: int | None = None, progress: Report | None = None
) -> Iterator[tuple[str, ...]]:
    """Folders of packed datasets that hold what these paths do, until the block ends.

    Args:
        paths: packed datasets, which are taken as they are; shards that others wrote, those of one folder together;
            folders of such shards; folders of parquet files, at any depth.
        workers: processes that read the shards; None takes one per CPU that may be used.
        progress: called with (samples, bytes) done since the last call.

    Raises:
        ProblemsError, DamagedShardError: truncated or damaged shards.
        SourceError: a path that is none of these.
        OutputError: no room for what has to be written out.

    >>> with as_packed(["cc3m/00000.tar", "more.tfrecord.gz"]) as folders:       # doctest: +SKIP
    ...     scan = PackedSource(folders).scan()
    """
    with tempfile.TemporaryDirectory(prefix="packer-") as scratch:
        folders = []
        for number, (folder, files) in enumerate(_grouped(paths)):
            if not files:
                folders.append(folder)
                continue
            # Called like the shards' own folder, whose name may say which split they are.
            target = os.path.join(scratch, str(number), os.path.basename(os.path.realpath(folder)) or "shards")
            os.makedirs(target)
            classes = None
            if files[0].lower().endswith(".parquet"):
                classes = write_out(folder, files, target)
            else:
                _provide(files, target)
            manifest = index_folder(target, workers=workers, progress=progress)
            if classes is not None:
                replace(manifest, classes=classes).save(target)
            folders.append(target)
        yield tuple(folders)


def _grouped(paths: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(packed dataset, []) or (folder, those files in it that make one dataset)"""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for path in paths:
        if os.path.exists(os.path.join(path, FILE)):
            groups[path, None] = []
        elif holds_parquet(path):
            groups[path, None] = parquet_files(path)
        elif os.path.isdir(path) and holds_shards(path):
            for name in filter(_is_shard_name, sorted(os.listdir(path))):
                groups.setdefault((path, _by_name(name)), []).append(os.path.join(path, name))
        elif os.path.isfile(path) and holds_shards(path):
            kind = _by_name(os.path.basename(path)) or _by_content(path)
            groups.setdefault((os.path.dirname(path) or ".", kind), []).append(path)
        else:
            raise SourceError(f"{printable(path)} is no packed dataset, shard or parquet file: pack it by itself first")
    for (folder, _), files in groups.items():
        yield folder, files


def _provide(files: Sequence[str], target: str) -> None:
    """Link to shards, or write out what is in them, under a name that says what they are."""
    packed = tuple(ending for f in all_formats() for ending in f.packed_suffixes)
    for file in files:
        name = os.path.basename(file)
        if not name.lower().endswith(packed):
            kind = _by_name(name) or _by_content(file)
            if kind is None or not get_format(kind).write_out(file, os.path.join(target, name)):
                os.symlink(os.path.abspath(file), os.path.join(target, name))
            continue
        ending = next((ending for ending in _GZIP_ENDINGS if name.lower().endswith(ending)), None)
        if ending is None:
            raise UsageError(f"{printable(file)}: of compressed shards only gzip is read; uncompress it first")
        gunzip(file, os.path.join(target, name[: -len(ending)] + _GZIP_ENDINGS[ending]))


def gunzip(source: str, target: str) -> None:
    """Write out what a gzip file holds, piece by piece.

    Raises:
        DamagedShardError: truncated, damaged, no gzip file, or one that grows beyond belief.
        OutputError: the disk is full.
    """
    limit = max(GROWTH_ALLOWED, MAX_GROWTH * os.path.getsize(source))
    try:
        with open(source, "rb") as packed, open(target, "wb") as out:
            for piece in _inflated(packed, source):
                limit -= len(piece)
                if limit < 0:
                    raise DamagedShardError(
                        source, packed.tell(), f"grows more than {MAX_GROWTH} times: a decompression bomb? If you trust"
                        " it, uncompress it yourself",
                    )  # fmt: skip
                _write(out, piece, target)
    except OSError as error:
        raise SourceError(f"{printable(source)}: {error.strerror}") from error


def _write(out: BinaryIO, piece: bytes, target: str) -> None:
    try:
        out.write(piece)
    except OSError as error:
        said = output_error(target, error, resumes=False)
        raise OutputError(f"{said} (TMPDIR says where such files are written)") from error


def _inflated(packed: BinaryIO, source: str) -> Iterator[bytes]:
    """The contents of all members, in order."""
    inflate, data, at = zlib.decompressobj(31), b"", 0
    while True:
        if not data:
            data = packed.read(_PIECE)
            at += len(data)
        if not data:
            raise DamagedShardError(source, at, "truncated: the gzip data end too early")
        try:
            yield inflate.decompress(data, _PIECE)
        except zlib.error as error:
            raise DamagedShardError(source, at - len(data), f"damaged gzip data ({error})") from error
        data = inflate.unconsumed_tail
        if inflate.eof:
            data = inflate.unused_data or packed.read(_PIECE)
            if not data:
                return
            inflate = zlib.decompressobj(31)
