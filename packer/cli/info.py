"""`packer info`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli.options import as_json, counted, dataset, human_bytes
from packer.cli.tables import table

if TYPE_CHECKING:
    from packer.manifest import Manifest


@click.command("info")
@dataset
@as_json
def command(*, dataset: str, as_json: bool) -> None:
    """Say what a packed dataset holds.

    Reads dataset.json only, so it answers at once whatever the dataset's size.

    \b
    Examples:
      packer info out/
      packer info out/ --json | jq .splits.train.samples
    """
    import json

    from packer.manifest import Manifest

    manifest = Manifest.load(dataset)
    if as_json:
        click.echo(json.dumps(_value(manifest), indent=2))
    else:
        click.echo("\n".join(_lines(dataset, manifest)))


def _value(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": manifest.format,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "fields": list(manifest.fields),
        "classes": None if manifest.classes is None else list(manifest.classes),
        "splits": {
            name: {"samples": split.samples, "shards": len(split.shards), "bytes": split.bytes}
            for name, split in manifest.splits.items()
        },
        "source": dict(manifest.source),
        "options": dict(manifest.options),
        "fingerprint": manifest.fingerprint,
    }


def _lines(folder: str, manifest: Manifest) -> list[str]:
    from packer.sample import printable

    splits = [["split", "samples", "shards", "size", "a sample"]]
    for split in manifest.splits.values():
        mean = human_bytes(split.bytes / split.samples) if split.samples else "–"
        splits.append(
            [printable(split.name), f"{split.samples:,}", f"{len(split.shards):,}", human_bytes(split.bytes), mean]
        )
    facts = [["format", manifest.format], ["fields", ", ".join(map(printable, manifest.fields))]]
    if manifest.classes is not None:
        facts.append(["classes", _some(manifest.classes)])
    if rule := manifest.source.get("rule"):
        facts.append(["source", printable(f"{manifest.source.get('layout', '')}: {rule}")])
    skipped = manifest.source.get("skipped")
    for reason, count in skipped.items() if isinstance(skipped, dict) else ():
        facts.append(["left out", printable(f"{count} × {reason}")])
    if broken := manifest.source.get("broken"):
        facts.append(["broken", printable(f"{broken} left out (--on-error skip); report.json lists them")])
    lost = manifest.source.get("lost")
    for what, count in lost.items() if isinstance(lost, dict) else ():
        facts.append(["lost", printable(f"{count} × {what}")])
    if options := _options(manifest.options):
        facts.append(["options", printable(options)])
    head = f"{printable(folder)}: {counted(manifest.samples, 'sample')}, {human_bytes(manifest.bytes)}"
    return [head, "", *table(splits, "<>>>>"), "", *table(facts, "<<")]


def _some(names: tuple[str, ...], shown: int = 3) -> str:
    from packer.sample import printable

    listed = [printable(name) for name in names]
    if len(listed) > 2 * shown:
        listed = [*listed[:shown], "…", listed[-1]]
    return f"{len(names):,}" + (f" ({', '.join(listed)})" if listed else "")


def _options(options: Any) -> str:
    """What was asked for, without what stayed off."""
    shown = []
    for name, value in options.items():
        if value is None or value is False or value == "":
            continue
        if name == "shard_bytes" and isinstance(value, int):
            value = human_bytes(value)
        shown.append(str(name) if value is True else f"{name} {value}")
    return ", ".join(shown)
