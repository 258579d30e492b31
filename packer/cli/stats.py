"""`packer stats`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from packer.cli.options import as_json, counted, dataset, human_bytes, quiet, workers
from packer.cli.tables import bar, table

if TYPE_CHECKING:
    from packer.stats import ClassCount, Sizes, SplitStats

_LISTED = 20  # classes; of more, the largest and the smallest are shown


@click.command("stats")
@dataset
@click.option("--split", metavar="NAME", help="Only this split (means for training belong to its own split).")
@click.option(
    "--sample",
    type=click.IntRange(0),
    metavar="N",
    help="Decode only N pictures of each split, chosen at random: estimates in seconds. 0 decodes none.",
)
@workers
@as_json
@quiet
def command(
    *, dataset: str, split: str | None, sample: int | None, workers: int | None, as_json: bool, quiet: bool
) -> None:
    """Count classes, picture sizes and formats; measure channel means and deviations.

    Mean and standard deviation are of the RGB values in [0, 1], over all pixels of all pictures
    as stored, without resizing: what Normalize(mean, std) wants. Every picture is decoded (some
    600 to 900 a second and core), unless --sample says how many are enough.

    \b
    Examples:
      packer stats out/
      packer stats out/ --split train --sample 5000
      packer stats out/ --json | jq .train.channels.mean
    """
    import json
    from dataclasses import asdict

    from packer.cli.progress import Bar
    from packer.manifest import Manifest
    from packer.stats import stats

    sizes = [s.samples for name, s in Manifest.load(dataset).splits.items() if split in (None, name)]
    total = sum(size if sample is None else min(size, sample) for size in sizes)
    with Bar("decoding", "pictures", total, quiet=quiet) as progress:
        found = stats(dataset, split=split, sample=sample, workers=workers, progress=progress.update)
    if as_json:
        click.echo(json.dumps({name: asdict(one) for name, one in found.items()}, indent=2))
    else:
        click.echo("\n\n".join("\n".join(_lines(name, one)) for name, one in found.items()))
    for name, one in found.items():
        if one.channels.failed and not quiet:
            click.echo(
                f"{counted(one.channels.failed, 'picture')} of {name} cannot be decoded; "
                f"run: packer verify {dataset} --deep",
                err=True,
            )


def _lines(name: str, found: SplitStats) -> Iterator[str]:
    from packer.sample import printable

    size = sum(field.bytes for field in found.fields.values())
    yield f"{printable(name)}: {counted(found.samples, 'sample')}, {human_bytes(size)}"
    yield from _section("classes", list(_classes(found)))
    if found.sizes is not None:
        yield from _section("sizes in pixels", list(_sizes(found.sizes)))
    rows = [["", "samples", "smallest", "median", "largest", "together"]]
    for field, facts in found.fields.items():
        spread = (facts.spread.min, facts.spread.median, facts.spread.max, facts.bytes)
        rows.append([printable(field), f"{facts.count:,}", *map(human_bytes, spread)])
    yield from _section("fields", table(rows, "<>>>>>"))
    yield from _section("pixels", list(_channels(found)))


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"  {title}", *(f"    {line}" for line in lines)] if lines else []


def _classes(found: SplitStats) -> Iterator[str]:
    if found.unlabelled:
        yield f"{counted(found.unlabelled, 'sample')} without a label"
    counts = sorted(one.count for one in found.classes)
    if not counts:
        return
    largest = counts[-1]
    if counts[0] == largest:
        yield f"{len(counts):,}, {counted(largest, 'sample')} each"
        return
    yield f"{len(counts):,}, of {counts[0]:,} to {largest:,} samples, median {counts[(len(counts) - 1) // 2]:,}"
    shown = list(found.classes)
    if len(shown) > _LISTED:
        by_count = sorted(shown, key=lambda one: -one.count)
        yield from table([_row(one, largest) for one in by_count[:5]] + [["…", "", ""]]
                         + [_row(one, largest) for one in by_count[-5:]], "<><")  # fmt: skip
    else:
        yield from table([_row(one, largest) for one in shown], "<><")


def _row(one: ClassCount, largest: int) -> list[str]:
    from packer.sample import printable

    return [printable(one.name), f"{one.count:,}", bar(one.count / largest) if largest else ""]


def _sizes(sizes: Sizes) -> Iterator[str]:
    rows = [["", "smallest", "median", "largest"]]
    for name, spread in (("width", sizes.width), ("height", sizes.height), ("short side", sizes.short_side)):
        rows.append([name, f"{spread.min:,}", f"{spread.median:,}", f"{spread.max:,}"])
    yield from table(rows, "<>>>")
    common = (f"{width}×{height} ({count / sizes.known:.0%})" for width, height, count in sizes.common)
    yield f"most frequent: {', '.join(common)}"
    bins = sizes.short_side.bins
    if len(bins) > 1:
        yield "short side:"
        most = max(one.count for one in bins)
        yield from table(
            [[f"{one.low:,}", f"– {one.high - 1:,}", f"{one.count:,}", bar(one.count / most)] for one in bins], ">>><"
        )


def _channels(found: SplitStats) -> Iterator[str]:
    channels = found.channels
    if channels.mean is None or channels.std is None:
        return
    if channels.pictures == found.pictures:
        decoded = f"all {channels.pictures:,}"
    elif channels.pictures + channels.failed == found.pictures:
        decoded = f"all that decode, {channels.pictures:,} of {found.pictures:,}"
    else:
        decoded = f"estimated from {channels.pictures:,} of {found.pictures:,}"
    yield f"{decoded} pictures, {channels.pixels:,} pixels, RGB in [0, 1]"
    yield from table(
        [
            ["", "red", "green", "blue"],
            ["mean", *(f"{value:.4f}" for value in channels.mean)],
            ["std", *(f"{value:.4f}" for value in channels.std)],
        ],
        "<>>>",
    )
    yield f"formats: {', '.join(f'{name} {count:,}' for name, count in channels.formats.items())}"
    yield f"modes: {', '.join(f'{name} {count:,}' for name, count in channels.modes.items())}"
