"""`packer shard`."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from packer.cli.ct import CT_LAYOUTS, PICTURE_LAYOUTS, ct_source, is_ct, print_unkept, refuse_ct_options
from packer.cli.options import (
    Bytes,
    Fold,
    SplitFractions,
    as_json,
    counted,
    ct,
    human_bytes,
    quiet,
    workers,
)
from packer.errors import UsageError
from packer.formats import FORMATS

if TYPE_CHECKING:
    from packer.pack import PackResult, Prepared
    from packer.shard import Encoder
    from packer.sources.base import Source
    from packer.withdraw import Withdrawn


@click.command("shard")
@click.argument("src", nargs=-1, required=True, type=click.Path(exists=True))
@click.argument("out", type=click.Path(file_okay=False))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    default="webdataset",
    show_default=True,
    help="; ".join(f"{name}: {row.help}" for name, row in FORMATS.items()) + ".",
)
@click.option(
    "--layout",
    type=click.Choice([*PICTURE_LAYOUTS, *CT_LAYOUTS]),
    help="What the folder is; recognised and printed by default (png16, exported CT slices, must be named).",
)
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False),
    metavar="CSV",
    help="Labels for a flat folder: a name (path or stem) and a label (integer or class name) a row.",
)
@click.option(
    "--classes",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="One class name a line: fixes the label of each class. Default: sorted, as torchvision does.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Take only files that match (repeatable).")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out files that match (repeatable).")
@click.option(
    "--follow-symlinks", is_flag=True, help="Pack what links point to. Default: links are skipped and counted."
)
@click.option(
    "--shard-size",
    type=Bytes(),
    default="512MB",
    show_default=True,
    help="No shard is larger, headers counted; shards come out about equal.",
)
@click.option("--shard-samples", type=click.IntRange(1), metavar="N", help="No shard has more samples.")
@click.option("--single-file", is_flag=True, help="One file for each split, however large: train.h5, val.h5.")
@click.option("--shuffle/--no-shuffle", default=True, show_default=True, help="Pack in random order.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the shuffle, the split and the subsets.")
@click.option(
    "--split",
    type=SplitFractions(),
    metavar="0.9,0.1",
    help="Split by hash of seed and key, so a sample never changes sides as data grows. "
    "Two parts: train, val; three: train, val, test; or name=fraction pairs.",
)
@click.option(
    "--split-exact", is_flag=True, help="Cut every class exactly at the fractions (for data that will not grow)."
)
@click.option("--group-regex", metavar="REGEX", help="Paths with the same match stay on one side of --split.")
@click.option("--fold", type=Fold(), metavar="K/N", help="Only the K-th of N parts of the samples, by hash.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only N samples, chosen by hash.")
@click.option(
    "--keys",
    "keys_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Only these samples: one key or original path a line.",
)
@click.option(
    "--drop-keys",
    "drop_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="All but these samples; the result is checked not to contain them.",
)
@click.option(
    "--resize",
    type=click.IntRange(1),
    metavar="PIXELS",
    help="Scale larger pictures down to this short side (EXIF orientation applied; JPEG at quality "
    "--jpeg-quality, 4:2:0; PNG stays lossless). Smaller ones keep their very bytes.",
)
@click.option(
    "--seekable-jpeg",
    is_flag=True,
    help="Transcode JPEGs losslessly, with restart markers, so that loaders decode only the crop they need "
    "(1.5 to 2 times as fast). Pixels and metadata stay equal and are checked; needs the jpegtran program.",
)
@click.option("--jpeg-quality", type=click.IntRange(1, 100), default=92, show_default=True, help="For --resize.")
@click.option(
    "--check",
    type=click.Choice(["header", "decode", "none"]),
    default="header",
    show_default=True,
    help="How closely to look at each image: its structure, every pixel, or not at all.",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What a broken image does: stop with its name, or be left out and counted.",
)
@click.option(
    "--sync/--no-sync",
    default=True,
    show_default=True,
    help="Wait for the disk before a shard gets its name. Without, packing is faster and survives a killed process, "
    "but not a power cut.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan and every problem found; write nothing. Looks at names and sizes; "
    "with --check header or --check decode, into every picture too.",
)
@ct
@workers
@as_json
@quiet
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Pack SRC into shards in the folder OUT.

    SRC is a folder of pictures (one folder per class, train/val/test splits, sidecar files,
    parallel images/ labels/ masks/ trees, or flat), or a packed dataset of any format, or shards
    that others wrote (tar or TFRecord files, also with .gz), or a folder of parquet files with
    pictures; several of these are merged. Image bytes are packed as they are. Killed at any moment, the same
    command goes on where it was and ends with the same bytes.

    \b
    Examples:
      packer shard /data/imagenet out/
      packer shard photos/ out/ --labels labels.csv --split 0.9,0.1
      packer shard out/ smaller/ --drop-keys withdrawn.txt
      packer shard part-a/ part-b/ all/
      packer shard out/ records/ --format tfrecord
      packer shard train-*.tfrecord.gz out/
    """
    from packer.cli.progress import PackBars
    from packer.examine import examine
    from packer.pack import pack_prepared, prepare
    from packer.withdraw import Withdrawn, check_withdrawn, read_keys, selection

    if options["resize"] is None and ctx.get_parameter_source("jpeg_quality") is ParameterSource.COMMANDLINE:
        raise UsageError("--jpeg-quality is about pictures that --resize scales: give --resize as well")
    if options["single_file"] and ctx.get_parameter_source("shard_size") is ParameterSource.COMMANDLINE:
        raise UsageError("--single-file puts all samples of a split into one file: leave out --shard-size")
    source = _source(ctx, options)
    pack_options = _pack_options(options)
    dropped = read_keys(options["drop_file"]) if options["drop_file"] else None
    choose = selection(
        seed=options["seed"],
        fold=options["fold"],
        limit=options["limit"],
        keys=read_keys(options["keys_file"]) if options["keys_file"] else None,
        drop=dropped,
    )
    with _interruptible(options["out"]), PackBars(quiet=options["quiet"]) as bars:
        prepared = prepare(source, pack_options, choose=choose, progress=bars.scanning)
        bars.close()
        if options["dry_run"]:
            found = None
            if ctx.get_parameter_source("check") is ParameterSource.COMMANDLINE and options["check"] != "none":
                bars.start_checking(len(prepared.scan), int(prepared.scan.sizes.sum()))
                found = examine(prepared, bars.packed)
            bars.close()
            _print_plan(prepared, found, as_json=options["as_json"])
            if (prepared.scan.problems or found) and options["on_error"] == "raise":
                ctx.exit(1)
            return
        if not options["quiet"]:
            click.echo(f"layout: {prepared.scan.layout} ({prepared.scan.rule})", err=True)
            for warning in prepared.plan.warnings:
                click.echo(f"warning: {warning}", err=True)
        result = pack_prepared(prepared, options["out"], progress=bars)
    withdrawn = check_withdrawn(source, options["out"], dropped) if dropped else Withdrawn(0, ())
    if options["as_json"]:
        _print_json(options["out"], result, withdrawn)
    elif not options["quiet"]:
        _print_result(options["out"], result, prepared.plan.warnings)
    for line in withdrawn.lines(options["out"]) if dropped and not options["quiet"] else withdrawn.warnings:
        click.echo(f"  {line}", err=True)
    if not (options["as_json"] or options["quiet"]):
        click.echo(f"next: packer verify {shlex.quote(options['out'])}", err=True)


@contextlib.contextmanager
def _interruptible(out: str) -> Iterator[None]:
    """Ctrl-C tells what becomes of the work."""
    try:
        yield
    except KeyboardInterrupt as error:
        if os.path.exists(out):
            raise KeyboardInterrupt("finished shards are kept, the same command goes on") from error
        raise


def _source(ctx: click.Context, options: dict[str, Any]) -> Source:
    from packer.foreign import as_packed, holds_shards
    from packer.manifest import FILE
    from packer.parquet import holds_parquet
    from packer.sources.folder import FolderOptions, FolderSource
    from packer.sources.listing import Filter
    from packer.sources.packed import PackedSource

    sources = options["src"]
    # nnU-Net's own dataset.json stands beside imagesTr/.
    packed = [
        (os.path.exists(os.path.join(path, FILE)) and not os.path.isdir(os.path.join(path, "imagesTr")))
        or (options["layout"] is None and (holds_shards(path) or holds_parquet(path)))
        for path in sources
    ]
    out = os.path.realpath(options["out"])
    for path in sources:
        if os.path.commonpath([out, os.path.realpath(path)]) == os.path.realpath(path):
            raise UsageError(
                f"OUT ({options['out']}) lies inside SRC ({path}): the shards would be packed too; "
                "choose a folder outside"
            )
    if all(packed):
        for name in ("layout", "labels", "classes", "include", "exclude", "follow_symlinks"):
            if options[name]:
                raise UsageError(
                    f"--{name.replace('_', '-')} is about folders of files; {sources[0]} holds packed samples"
                )
        return PackedSource(ctx.with_resource(as_packed(sources, workers=options["workers"])), tuple(sources))
    if len(sources) == 1 and is_ct(options):
        return ct_source(options)
    refuse_ct_options(options)
    if len(sources) > 1:
        unpacked = [path for path, is_packed in zip(sources, packed, strict=True) if not is_packed]
        raise UsageError(
            f"several sources are merged when each is a packed dataset, or shards; {unpacked[0]} is neither: "
            "pack it first"
        )
    return FolderSource(
        sources[0],
        FolderOptions(
            layout=options["layout"],
            labels=options["labels"],
            classes=options["classes"],
            filter=Filter(options["include"], options["exclude"]),
            follow_symlinks=options["follow_symlinks"],
        ),
    )


def _pack_options(options: dict[str, Any]) -> Any:
    from packer.encoders import Chain, Resize
    from packer.pack import PackOptions
    from packer.plan import PlanOptions
    from packer.seekable import SeekableJpeg

    resize = [Resize(options["resize"], options["jpeg_quality"])] if options["resize"] else []
    seekable = [SeekableJpeg()] if options["seekable_jpeg"] else []
    encoders: tuple[Encoder, ...] = (*resize, *seekable)
    return PackOptions(
        format=options["format_name"],
        plan=PlanOptions(
            shard_bytes=options["shard_size"],
            shard_samples=options["shard_samples"],
            shuffle=options["shuffle"],
            seed=options["seed"],
            split=options["split"],
            split_exact=options["split_exact"],
            group_regex=options["group_regex"],
            single_file=options["single_file"],
        ),
        workers=options["workers"],
        on_error=options["on_error"],
        check=options["check"],
        durable=options["sync"],
        encoder=Chain(encoders) if len(encoders) > 1 else encoders[0] if encoders else None,
    )


# ---------------------------------------------------------------- what is printed


def _print_plan(prepared: Prepared, found: list[tuple[str, str]] | None, *, as_json: bool) -> None:
    import json

    from packer.sample import printable

    scan, plan = prepared.scan, prepared.plan
    problems = [*((printable(path), reason) for path, reason in scan.problems), *(found or [])]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "layout": scan.layout,
                    "rule": scan.rule,
                    "samples": len(scan),
                    "classes": scan.classes,
                    "fields": scan.fields,
                    "splits": {name: int((scan.split == i).sum()) for i, name in enumerate(scan.splits)},
                    "shards": [{"split": s.split, "samples": s.stop - s.start, "bytes": s.bytes} for s in plan.shards],
                    "bytes": sum(s.bytes for s in plan.shards),
                    "warnings": plan.warnings,
                    "skipped": dict(scan.skipped_by_reason),
                    "problems": problems,
                },
                indent=2,
            )
        )
        return
    click.echo(f"layout   {scan.layout} ({scan.rule})")
    click.echo(f"samples  {len(scan):,}" + (f" in {counted(len(scan.classes), 'class')}" if scan.classes else ""))
    click.echo(f"fields   {', '.join([*scan.fields, 'cls'] if scan.made_cls else scan.fields)}")
    for number, name in enumerate(scan.splits):
        shards = [s for s in plan.shards if s.split == name]
        click.echo(
            f"split    {name}: {counted(int((scan.split == number).sum()), 'sample')}, "
            f"{counted(len(shards), 'shard')}, "
            f"{human_bytes(sum(s.bytes for s in shards))}"
        )
    for warning in plan.warnings:
        click.echo(f"warning  {warning}")
    for reason, count in scan.skipped_by_reason.most_common():
        click.echo(f"skipped  {count:,} × {reason}")
    for path, reason in problems:
        click.echo(f"problem  {path}: {reason}")
    click.echo(
        f"{counted(len(problems), 'problem')} found "
        + (
            "by name and size (--check header looks into every picture)"
            if found is None
            else "in names, sizes and pictures"
        )
        + "; nothing was written"
        + (". Packing would stop here; --on-error skip leaves them out" if problems else "")
    )


def _print_json(out: str, result: PackResult, withdrawn: Withdrawn) -> None:
    import json

    manifest = result.manifest
    value = {
        "out": out,
        "already_complete": result.already_complete,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "shards": sum(len(split.shards) for split in manifest.splits.values()),
        "classes": len(manifest.classes or ()),
        "splits": {name: split.samples for name, split in manifest.splits.items()},
        "skipped": manifest.source.get("skipped", {}),
        "broken": manifest.source.get("broken", 0),
        "encoded": result.encoded,
        "warnings": [*result.warnings, *withdrawn.warnings],
        "withdrawn": withdrawn.listed,
        "seconds": result.seconds,
        "resumed_shards": result.resumed_shards,
    }
    click.echo(json.dumps(value, indent=2))


def _print_result(out: str, result: PackResult, said: Sequence[str]) -> None:
    manifest = result.manifest
    shards = sum(len(split.shards) for split in manifest.splits.values())
    if result.already_complete:
        click.echo(f"already complete: {out} holds these {manifest.samples:,} samples", err=True)
        return
    click.echo(
        f"packed {counted(manifest.samples, 'sample')}"
        + (f" in {counted(len(manifest.classes), 'class')}" if manifest.classes else "")
        + f" into {counted(shards, 'shard')}, {human_bytes(manifest.bytes)}, "
        f"in {result.seconds:.1f} s ({_speed(result)})",
        err=True,
    )
    if result.resumed_shards:
        click.echo(f"  {counted(result.resumed_shards, 'shard')} finished by an earlier run", err=True)
    for what, count in sorted(result.encoded.items()):
        click.echo(f"  {count:,} × {what}", err=True)
    for reason, count in Counter(reason for _, reason in result.skipped).most_common():
        click.echo(f"  skipped {count:,} × {reason}", err=True)
    if result.broken:
        path, reason = result.broken[0]
        click.echo(f"  left out {counted(len(result.broken), 'broken file')}, first {path}: {reason}", err=True)
    for warning in result.warnings:
        if warning not in said:
            click.echo(f"  warning: {warning}", err=True)
    if "made" in manifest.source:
        print_unkept(result)
    elif result.skipped or result.broken:
        click.echo(f"  all of them are listed in {os.path.join(out, 'report.json')}", err=True)


def _speed(result: PackResult) -> str:
    """Of this run alone: what an earlier one wrote costs no time now."""
    seconds = max(result.seconds, 1e-9)
    rate = f"{human_bytes(result.written_bytes / seconds)}/s"
    return rate if result.resumed_shards else f"{result.manifest.samples / seconds:,.0f} samples/s, {rate}"
