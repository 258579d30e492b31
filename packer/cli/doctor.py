"""`packer doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.loading import loading
from packer.cli.options import as_json, quiet

if TYPE_CHECKING:
    from loaders.options import EngineName


@click.command("doctor")
@loading
@click.option("--num-workers", type=click.IntRange(0), metavar="N",
              help="Run with so many workers. Default: what num_workers='auto' takes.")
@click.option("--seconds", type=click.FloatRange(0.05), default=4.0, show_default=True, metavar="S",
              help="Length of the run.")
@click.option("--tries", type=click.IntRange(0), default=3, show_default=True, metavar="N",
              help="Try so many of the remedies.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page with charts.")
@as_json
@quiet
def command(
    *, path: str | None, loader: str | None, split: str, batch_size: int, size: int, transform: str | None,
    normalize: bool, engine: EngineName, step_ms: float | None, num_workers: int | None, seconds: float, tries: int,
    html: str | None, as_json: bool, quiet: bool,
) -> None:
    """Say why the GPU is idle: what each stage costs, what the limit is, what would help.

    OUT is a packed dataset, or a folder of pictures; or name a function of yours that takes num_workers
    and gives any loader. The loop is run for some seconds, with a pause of --step-ms in place of a
    training step. Gains are predicted from the stages; the best remedies that can be tried here are.

    \b
    Examples:
      packer doctor /data/imagenet --step-ms 180
      packer doctor out/ --step-ms 180 --html doctor.html
      packer doctor --loader train:make_loader --step-ms 95
    """
    import json

    from loaders.doctor import doctor
    from loaders.opening import Reading, open_subject

    subject = open_subject(path, loader, Reading(split, batch_size, size, transform, normalize, engine))
    if not quiet:
        click.echo("measuring …", err=True)
    found = doctor(subject, step_ms=step_ms, num_workers=num_workers, seconds=seconds, tries=tries)
    if html is not None:
        with open(html, "w", encoding="utf-8") as f:
            f.write(found.html())
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else found.text())
