"""`packer view`."""

from __future__ import annotations

import os

import click

from packer.cli.options import as_json, dataset, human_bytes, quiet, workers


@click.command("view")
@dataset
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="The page to write; an earlier page is replaced. Default: view.html in the dataset's folder.",
)
@click.option("--split", metavar="NAME", help="Show only this split.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    metavar="N",
    help="Pictures of each class (of at most 50 classes, and 600 pictures in all).",
)
@workers
@as_json
@quiet
def command(
    *,
    dataset: str,
    output: str | None,
    split: str | None,
    samples: int,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write one HTML page that shows the dataset.

    Pictures by class, histograms of classes and sizes, and the table of shards. The page is
    one file that needs no network and runs no script, so it can be mailed or kept beside the data.
    CT slices are windowed (40/400 HU), with the borders of their masks; of a volume, the middle one.

    \b
    Examples:
      packer view out/
      packer view out/ --split val --samples 24 -o val.html
    """
    import json
    from dataclasses import asdict

    from packer.cli.progress import Bar
    from packer.view import view

    if output == "":
        raise click.UsageError("--output is empty; leave it out to write view.html into the dataset's folder")
    path = os.path.join(dataset, "view.html") if output is None else output
    with Bar("drawing", "pictures", quiet=quiet) as bar:
        page = view(dataset, path, split=split, per_class=samples, workers=workers, progress=bar.update)
    if as_json:
        click.echo(json.dumps(asdict(page), indent=2))
    elif not quiet:
        click.echo(
            f"{page.path}: {page.pictures:,} pictures, {human_bytes(page.bytes)}; open it in a browser", err=True
        )
