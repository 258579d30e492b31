"""`packer tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.loading import loading
from packer.cli.options import as_json, quiet
from packer.cli.tables import bar, table

if TYPE_CHECKING:
    from loaders.options import EngineName
    from loaders.tune import Tuned


@click.command("tune")
@loading
@click.option("--max-workers", type=click.IntRange(1), metavar="N", help="Never try more workers than this.")
@click.option("--ranks", type=click.IntRange(1), default=1, metavar="N",
              help="Training processes that will share this machine: each gets its part of the CPUs.")
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True, metavar="S",
              help="How long each count is measured.")
@click.option("--no-remember", is_flag=True, help="Do not keep the answer for num_workers='auto'.")
@as_json
@quiet
def command(
    *, path: str | None, loader: str | None, split: str, batch_size: int, size: int, transform: str | None,
    normalize: bool, engine: EngineName, step_ms: float | None, max_workers: int | None, ranks: int, seconds: float,
    no_remember: bool, as_json: bool, quiet: bool,
) -> None:
    """Find how many workers keep the GPU fed, and say why.

    OUT is a packed dataset, or a folder of pictures; or name a function of yours that takes num_workers
    and gives any loader. A few counts are measured, not all: the smallest that feeds a step of --step-ms
    is chosen, or without it the smallest that gives 97 % of all there is. num_workers="auto" uses the
    answer from then on. Exit status 1: no count feeds the step.

    \b
    Examples:
      packer tune out/ --batch-size 256 --step-ms 180
      packer tune out/ --transform augment:train_transform --ranks 8
      packer tune --loader train:make_loader --step-ms 95 --json
    """
    import json

    from loaders.opening import Reading, open_subject
    from loaders.tune import tune

    subject = open_subject(path, loader, Reading(split, batch_size, size, transform, normalize, engine))
    if not quiet:
        click.echo("measuring …", err=True)
    found = tune(subject, step_ms=step_ms, max_workers=max_workers, ranks=ranks, seconds=seconds,
                 keep=not no_remember, engine=engine)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        click.echo("\n".join(_lines(found)))
    if not found.feasible:
        raise click.exceptions.Exit(1)


def _lines(found: Tuned) -> list[str]:
    predicted = dict(found.predicted)
    measured = {(point.engine, point.num_workers): point for point in found.measured}
    engines = list(dict.fromkeys(point.engine for point in found.measured))
    top = max([*predicted.values(), *(point.per_s for point in found.measured)])
    rows = [["workers", "predicted/s", *(f"{engine or 'measured'}/s" for engine in engines), ""]]
    for count in sorted({*predicted, *(point.num_workers for point in found.measured)}):
        cells = [point.per_s if (point := measured.get((engine, count))) else None for engine in engines]
        best = max((cell for cell in cells if cell), default=0.0)
        mark = "  ←" if count == found.num_workers else ""
        rows.append([f"{count}", f"{predicted[count]:,.0f}" if count in predicted else "",
                     *(f"{cell:,.0f}" if cell else "" for cell in cells), bar(best / top, 24) + mark])
    lines = table(rows, "<>" + ">" * len(engines) + "<")
    lines += ["", f"{found.reason}.", ""]
    lines += [f"  {found.code}", ""]
    lines.append(f"The rule of thumb min(cores, load time / step time) says {found.rule_of_thumb}. "
                 f"Measured in {found.cost_s:.1f} s.")
    if found.remedies:
        lines += ["What would help:", *(f"  - {remedy}" for remedy in found.remedies)]
    if found.remembered:
        lines.append("Remembered: num_workers=\"auto\" uses this from now on.")
    return lines
