"""`packer stats`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from packer.cli.options import as_json, counted, dataset, human_bytes, quiet, workers
from packer.cli.tables import bar, table

if TYPE_CHECKING:
    from packer.ct_stats import CtStats
    from packer.stats import ClassCount, Sizes, SplitStats

_LISTED = 20  # classes; of more, the largest and the smallest are shown
_BINS_A_LINE = 2  # of the histogram of HU


@click.command("stats")
@dataset
@click.option("--split", metavar="NAME", help="Only this split (means for training belong to its own split).")
@click.option(
    "--sample",
    type=click.IntRange(0),
    metavar="N",
    help="Decode only N pictures (or slices, volumes) of each split, chosen at random: estimates in seconds. 0: none.",
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

    Of CT slices and volumes: least, greatest and mean Hounsfield units (HU) and their histogram in
    bins of 64 HU, series, patients, slices of each series, spacings in mm (--json: the key `ct`).

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
    from packer.sample import is_picture_array
    from packer.stats import stats

    manifest = Manifest.load(dataset)
    sizes = [s.samples for name, s in manifest.splits.items() if split in (None, name)]
    total = sum(size if sample is None else min(size, sample) for size in sizes)
    what = "samples" if any(map(is_picture_array, manifest.fields)) else "pictures"
    with Bar("decoding", what, total, quiet=quiet) as progress:
        found = stats(dataset, split=split, sample=sample, workers=workers, progress=progress.update)
    if as_json:
        click.echo(json.dumps({name: asdict(one) for name, one in found.items()}, indent=2))
    else:
        click.echo("\n\n".join("\n".join(_lines(name, one)) for name, one in found.items()))
    for name, one in found.items():
        failed = one.channels.failed + (one.ct.hu.failed if one.ct else 0)
        if failed and not quiet:
            click.echo(
                f"{counted(failed, 'array' if one.ct else 'picture')} of {name} cannot be decoded; "
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
    if found.ct is not None:
        yield from _section("CT series", list(_series(found.ct)))
        yield from _section("Hounsfield units", list(_hounsfield(found.ct)))


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
    decoded = _decoded(channels.pictures, channels.failed, found.pictures)
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


def _decoded(count: int, failed: int, total: int) -> str:
    """Of how many the figures are."""
    if count == total:
        return f"all {count:,}"
    if count + failed == total:
        return f"all that decode, {count:,} of {total:,}"
    return f"estimated from {count:,} of {total:,}"


def _series(ct: CtStats) -> Iterator[str]:
    patients = f", of {counted(ct.patients, 'patient')}" if ct.patients else ""
    yield f"{ct.series:,} series{patients}"
    rows = [["", "smallest", "median", "largest"]]
    if ct.slices is not None:
        rows.append(["slices", f"{ct.slices.min:,}", f"{ct.slices.median:,}", f"{ct.slices.max:,}"])
    for name, mm in (("rows", ct.row_mm), ("columns", ct.column_mm), ("slices", ct.slice_mm)):
        if mm is not None:
            rows.append([f"mm between {name}", f"{mm.min:.4g}", f"{mm.median:.4g}", f"{mm.max:.4g}"])
    if len(rows) > 1:
        yield from table(rows, "<>>>")


def _hounsfield(ct: CtStats) -> Iterator[str]:
    hu = ct.hu
    if hu.min is None or hu.max is None or hu.mean is None or hu.std is None:
        return
    decoded = _decoded(hu.arrays, hu.failed, ct.samples)
    yield f"{decoded} slices or volumes, {hu.voxels:,} voxels"
    if others := ct.series - ct.units.get("HU", 0):
        yield f"the values of {others:,} series are of unknown unit"
    if hu.left_out:
        yield f"{counted(hu.left_out, 'voxel')} left out: NaN, infinite, or beyond ±1e9"
    yield f"{hu.min:g} to {hu.max:g}, mean {hu.mean:.2f}, std {hu.std:.2f}"
    lines = [("below", hu.bins[0].low, hu.below)] if hu.below else []
    for i in range(0, len(hu.bins), _BINS_A_LINE):
        bins = hu.bins[i : i + _BINS_A_LINE]
        lines.append((f"{bins[0].low:,}", bins[-1].high, sum(one.count for one in bins)))
    if hu.above:
        lines.append(("from", hu.bins[-1].high, hu.above))
    while not lines[-1][2]:
        lines.pop()
    first = next(i for i, (_, _, count) in enumerate(lines) if count)
    most = max(count for _, _, count in lines)
    yield from table(
        [
            [low, f"{high:,}" if low in ("below", "from") else f"– {high - 1:,}", f"{count:,}", bar(count / most)]
            for low, high, count in lines[first:]
        ],
        ">>><",
    )
