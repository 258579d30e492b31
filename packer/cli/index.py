"""`packer index`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from packer.cli.options import as_json, counted, human_bytes, quiet, workers
from packer.errors import UsageError

if TYPE_CHECKING:
    from packer.manifest import Manifest


@click.command("index")
@click.argument("shards")
@click.option(
    "--split",
    "splits",
    multiple=True,
    metavar="NAME=GLOB",
    help="Shards whose names match GLOB are the split NAME (repeatable). Default: by a word of their "
    "names or by their folder's name (train, val, valid, validation, dev, test), else train.",
)
@click.option(
    "--export",
    "exports",
    multiple=True,
    type=click.Choice(["dali", "energon"]),
    help="Write what another reader wants beside the shards (repeatable). dali: an .idx for each shard, of tar or "
    "TFRecord; energon: a .tar.idx for each shard, and .nv-meta/. An index that is there already is kept.",
)
@click.option("--force", is_flag=True, help="Make the index of a packed dataset again from its shards.")
@workers
@as_json
@quiet
def command(
    shards: str,
    splits: tuple[str, ...],
    exports: tuple[str, ...],
    force: bool,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make shards that others wrote readable by index.

    SHARDS is a folder of shards (.tar, .tfrecord, packer's own .h5), or a pattern in quotes:
    '{000000..000146}', '*', lists joined by '::'. Each shard is read once and never changed; index,
    names and dataset.json are written beside it, so all shards of a dataset must lie in one folder.
    Truncated or damaged shards are refused, all of them listed with the offset. Tar shards from GNU
    tar, Python, webdataset and img2dataset will do; hard links count as the file they stand for.

    \b
    Examples:
      packer index /data/cc3m/
      packer index '/data/imagenet/imagenet1k-{train,validation}-*.tar'
      packer index shards/ --split train='shard-0*' --split val='shard-1*'
      packer index out/ --export dali
    """
    from packer.cli.progress import Bar
    from packer.indexing import index_folder
    from packer.manifest import FILE
    from packer.patterns import find_shards

    globs = _globs(splits)
    if exports and not force and not globs and os.path.exists(os.path.join(shards, FILE)):
        _export(shards, exports, quiet=quiet)
        return
    folder, names, _ = find_shards(shards)
    size = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    with Bar("indexing", "samples", bytes=size, quiet=quiet) as bar:
        manifest = index_folder(shards, splits=globs, force=force, workers=workers, progress=bar.update)
    for what, count in manifest.source.get("lost", {}).items():
        click.echo(f"warning: lost of {count:,} samples: {what}", err=True)
    if as_json:
        import json

        click.echo(json.dumps(manifest.to_json(), indent=2))
    elif not quiet:
        _print(manifest, folder)
    _export(folder, exports, quiet=quiet)


def _export(folder: str, exports: tuple[str, ...], *, quiet: bool) -> None:
    from packer.exports import export

    for kind in exports:
        written = export(folder, kind)
        if not quiet:
            click.echo(f"for {kind}: {counted(len(written), 'file')}, {written[0]} first", err=True)


def _globs(splits: tuple[str, ...]) -> dict[str, str] | None:
    pairs = [split.partition("=") for split in splits]
    for name, _, pattern in pairs:
        if not name or not pattern:
            raise UsageError(f"--split {name!r}: write NAME=GLOB, for example train='shard-0*.tar'")
    globs = {name: pattern for name, _, pattern in pairs}
    if len(globs) < len(pairs):
        raise UsageError("--split names one split twice; write one pattern that matches all its shards")
    return globs or None


def _print(manifest: Manifest, folder: str) -> None:
    for split in manifest.splits.values():
        size = human_bytes(split.bytes)
        shards = counted(len(split.shards), "shard")
        click.echo(f"{split.name}: {counted(split.samples, 'sample')} in {shards}, {size}", err=True)
    click.echo(f"  fields: {', '.join(manifest.fields)}", err=True)
    for what in ("skipped", "unknown"):
        for reason, count in manifest.source.get(what, {}).items():
            click.echo(f"  {what} {count:,} × {reason}", err=True)
    click.echo(f"next: packer verify {folder}", err=True)
