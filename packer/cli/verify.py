"""`packer verify`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from packer.cli.options import as_json, counted, dataset, human_bytes, quiet, workers


@click.command("verify")
@dataset
@click.option("--deep", is_flag=True, help="Decode every image (some 600 to 900 a second and core) and array too.")
@workers
@as_json
@quiet
@click.pass_context
def command(ctx: click.Context, *, dataset: str, deep: bool, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Check every byte of a packed dataset.

    Reads each shard once and compares it with its checksums, with the index and with its own
    headers. Prints one line per problem, which names shard, sample and offset, and exits 1 if
    there is any. Nothing is changed.

    \b
    Examples:
      packer verify out/
      packer verify out/ --deep
      packer verify out/ --json | jq length
    """
    import time

    from packer.cli.progress import Bar
    from packer.errors import ManifestError
    from packer.manifest import Manifest
    from packer.verify import verify

    samples = size = 0
    try:
        manifest = Manifest.load(dataset)
        samples, size = manifest.samples, manifest.bytes
    except ManifestError:
        pass  # `verify` says so
    begin = time.monotonic()
    with Bar("verifying", "samples", samples, size, quiet=quiet) as bar:
        result = verify(dataset, deep=deep, workers=workers, progress=bar.update)
    seconds = time.monotonic() - begin
    if as_json:
        click.echo(json.dumps([asdict(problem) for problem in result.problems], indent=2))
    else:
        for problem in result.problems:
            click.echo(str(problem))
    if result.problems:
        if not quiet:
            click.echo(f"{counted(len(result.problems), 'problem')} in {dataset}", err=True)
        ctx.exit(1)
    if not quiet:
        done = "checked and decoded" if deep else "checked"
        click.echo(
            f"ok: {done} {counted(result.samples, 'sample')} in {counted(result.shards, 'shard')}, "
            f"{human_bytes(result.bytes)}, in {seconds:.1f} s ({human_bytes(result.bytes / max(seconds, 1e-9))}/s)",
            err=as_json,
        )
