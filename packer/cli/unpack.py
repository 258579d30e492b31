"""`packer unpack`."""

from __future__ import annotations

import click

from packer.cli.options import as_json, counted, dataset, human_bytes, quiet, workers


@click.command("unpack")
@dataset
@click.argument("dst", type=click.Path(file_okay=False))
@click.option("--split", metavar="NAME", help="Only this split.")
@click.option(
    "--keys",
    "keys_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Only these samples: one key or original path a line.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N samples.")
@click.option(
    "--as",
    "kind",
    type=click.Choice(["nifti", "npy"]),
    help="CT: one file a series, as NIfTI, or as .npy with its geometry as .json; masks likewise.",
)
@workers
@as_json
@quiet
def command(
    *,
    dataset: str,
    dst: str,
    split: str | None,
    keys_file: str | None,
    limit: int | None,
    kind: str | None,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Restore the files of a packed dataset into the folder DST.

    Every file gets its original name and bytes; checksums are compared on the way. Labels that
    packing made are no files and are left out. DST must be new or empty, and stays so until
    everything is written. Names that would leave DST are refused before anything is written.

    CT datasets do not hold the DICOM files that they were made of. Their samples come as they are packed, a file for
    each field, or with --as one file a series.

    \b
    Examples:
      packer unpack out/ restored/
      packer unpack out/ some/ --split val --limit 100
      packer unpack out/ some/ --keys wanted.txt
      packer unpack out/ series/ --as nifti
    """
    import json
    import time
    from dataclasses import asdict

    from packer.cli.progress import Bar
    from packer.safe_tree import tidy_when_ended
    from packer.unpack import prepare_unpack, unpack_prepared
    from packer.withdraw import read_keys

    if kind is not None:
        if keys_file or limit:
            raise click.UsageError("--as writes whole series: leave --keys and --limit out")
        _series(dataset, dst, kind, split, workers, as_json=as_json, quiet=quiet)
        return
    prepared = prepare_unpack(dataset, split=split, keys=read_keys(keys_file) if keys_file else None, limit=limit)
    begin = time.monotonic()
    with tidy_when_ended(), Bar("unpacking", "files", prepared.result.files, prepared.result.bytes, quiet=quiet) as bar:
        result = unpack_prepared(prepared, dst, workers, bar.update)
    seconds = time.monotonic() - begin
    if as_json:
        click.echo(json.dumps({"dst": dst, **asdict(result), "seconds": seconds}, indent=2))
    elif not quiet:
        click.echo(
            f"restored {counted(result.files, 'file')} of {counted(result.samples, 'sample')}, "
            f"{human_bytes(result.bytes)}, in {seconds:.1f} s "
            f"({human_bytes(result.bytes / max(seconds, 1e-9))}/s) into {dst}",
            err=True,
        )


def _series(
    dataset: str, dst: str, kind: str, split: str | None, workers: int | None, *, as_json: bool, quiet: bool
) -> None:
    import json
    from dataclasses import asdict
    from typing import cast

    from packer.cli.progress import Bar
    from packer.safe_tree import tidy_when_ended
    from packer.unpack_ct import Kind, unpack_series

    with tidy_when_ended(), Bar("unpacking", "files", quiet=quiet) as bar:
        result = unpack_series(dataset, dst, cast(Kind, kind), split=split, workers=workers, progress=bar.update)
    if as_json:
        click.echo(json.dumps({"dst": dst, **asdict(result)}, indent=2))
    elif not quiet:
        click.echo(
            f"wrote {result.series:,} series, {counted(result.files, 'file')}, "
            f"{human_bytes(result.bytes)}, into {dst}",
            err=True,
        )
    for name, reason in result.left_out:
        click.echo(f"{name} is left out: {reason}", err=True)
    if result.left_out:
        raise click.exceptions.Exit(1)
