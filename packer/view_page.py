"""The parts of the page that `packer view` writes, as HTML. Every name goes through `text`."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from packer.manifest import Manifest
from packer.sample import printable
from packer.spread import Bin, Spread

_LISTED = 30  # classes with a line each; more become one chart
_MAX_BARS = 400
_MAX_ROWS = 2000  # of a table
_OPEN_ROWS = 24  # a longer table is folded


def text(value: object) -> str:
    """Safe as text and inside a quoted attribute.

    >>> text('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(printable(str(value)), quote=True)


def human(size: float) -> str:
    """A size in bytes, in powers of ten.

    >>> human(95_312)
    '95.3 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def head_line(manifest: Manifest) -> str:
    """The line below the title."""
    parts = [f"{manifest.samples:,} samples"]
    if manifest.classes:
        parts.append(f"{len(manifest.classes):,} classes")
    shards = sum(len(split.shards) for split in manifest.splits.values())
    parts += [f"{shards:,} shard{'s' if shards != 1 else ''}", human(manifest.bytes)]
    return text(" · ".join(parts))


def facts(manifest: Manifest) -> str:
    """What the dataset is and where it came from, as a definition list."""
    source = manifest.source
    listed = [("Format", manifest.format), ("Fields", ", ".join(manifest.fields))]
    if rule := source.get("rule"):
        listed.append(("Source", f"{source.get('layout', '')}: {rule}"))
    skipped = source.get("skipped")
    if isinstance(skipped, dict) and skipped:
        listed.append(("Left out", ", ".join(f"{count} × {reason}" for reason, count in skipped.items())))
    if broken := source.get("broken"):
        listed.append(("Broken", f"{broken} left out"))
    return "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in listed)


def splits(manifest: Manifest) -> Iterator[str]:
    """A table of the splits, if there are several."""
    if len(manifest.splits) < 2:
        return
    rows = [
        (split.name, f"{split.samples:,}", f"{len(split.shards):,}", human(split.bytes))
        for split in manifest.splits.values()
    ]
    yield _section("Splits", _table(("split", "samples", "shards", "size"), rows))


def shards(manifest: Manifest) -> Iterator[str]:
    """A table of all shards."""
    every = [shard for split in manifest.splits.values() for shard in split.shards]
    rows = [
        (
            shard.name,
            f"{shard.samples:,}",
            human(shard.bytes),
            human(shard.bytes / shard.samples) if shard.samples else "–",
            f"{shard.crc32c:08x}",
        )
        for shard in every
    ]
    shown = _table(("shard", "samples", "size", "a sample", "crc32c"), rows[:_MAX_ROWS])
    more = f"<p>… and {len(rows) - _MAX_ROWS:,} more</p>" if len(rows) > _MAX_ROWS else ""
    yield _section("Shards", _fold(f"All {len(rows):,} shards", shown + more, folded=len(rows) > _OPEN_ROWS))


def classes(counts: Sequence[tuple[str, int]], unlabelled: int) -> Iterator[str]:
    """How many samples each class has: a line each, or one chart of all."""
    if not counts:
        return
    sizes = sorted((n for _, n in counts), reverse=True)
    equal = sizes[0] == sizes[-1]
    if equal:
        said = f"{len(counts):,} classes of {sizes[0]:,} samples each"
    else:
        said = f"{len(counts):,} classes of {sizes[-1]:,} to {sizes[0]:,} samples; median {sizes[len(sizes) // 2]:,}"
    if unlabelled:
        said += f"; {unlabelled:,} samples without a label"
    if len(counts) <= _LISTED:
        yield _section("Classes", f"<p>{said}.</p>" + _lines(counts))
        return
    rows = [(name, f"{n:,}") for name, n in counts[:_MAX_ROWS]]
    more = f"<p>… and {len(counts) - _MAX_ROWS:,} more</p>" if len(counts) > _MAX_ROWS else ""
    table = _fold(f"All {len(counts):,} classes", _table(("class", "samples"), rows) + more, folded=True)
    yield _section("Classes", f"<p>{said}.</p>" + ("" if equal else _rank_chart(counts)) + table)


def _lines(counts: Sequence[tuple[str, int]]) -> str:
    most = max(n for _, n in counts) or 1
    cells = (
        f'<span>{text(name)}</span><span>{n:,}</span><i style="width:{100 * n / most:.2f}%"></i>' for name, n in counts
    )
    return f'<div class="list">{"".join(cells)}</div>'


def _rank_chart(counts: Sequence[tuple[str, int]]) -> str:
    """Classes from the largest to the smallest; of very many, some."""
    ranked = sorted(counts, key=lambda one: -one[1])
    step = -(-len(ranked) // _MAX_BARS)
    bars = [(f"{name}: {n:,}", n) for name, n in ranked[::step]]
    ends = f"<span>largest: {text(ranked[0][0])}</span><span>smallest: {text(ranked[-1][0])}</span>"
    every = "" if step == 1 else f" (one bar for every {step} classes)"
    caption = f"Samples of each class, from the largest to the smallest{every}"
    return f'<figure><figcaption>{caption}</figcaption>{_bars(bars)}<div class="ticks ends">{ends}</div></figure>'


def histogram(caption: str, spread: Spread, label: str = "plain") -> str:
    """A chart of a spread; `label` 'plain' writes limits as numbers, 'bytes' as sizes."""
    write = human if label == "bytes" else "{:,}".format
    said = f"{caption}: {write(spread.min)} to {write(spread.max)}, median {write(spread.median)}"
    bars = [(_bin_title(one, label), one.count) for one in spread.bins]
    every = -(-len(spread.bins) // 9)  # labels need room
    ticks = "".join(f"<span>{write(one.low) if i % every == 0 else ''}</span>" for i, one in enumerate(spread.bins))
    return f'<figure><figcaption>{text(said)}</figcaption>{_bars(bars)}<div class="ticks">{ticks}</div></figure>'


def histograms(charts: Sequence[str]) -> Iterator[str]:
    """Charts side by side."""
    if charts:
        yield _section("Pictures", f'<div class="charts">{"".join(charts)}</div>')


def _bin_title(one: Bin, label: str) -> str:
    if label == "bytes":
        return f"{human(one.low)} to {human(one.high)}: {one.count:,}"
    return (
        f"{one.low:,}: {one.count:,}" if one.high - one.low == 1 else f"{one.low:,} – {one.high - 1:,}: {one.count:,}"
    )


def _bars(bars: Sequence[tuple[str, int]]) -> str:
    most = max((n for _, n in bars), default=0) or 1
    fine = " fine" if len(bars) > 80 else ""
    drawn = "".join(f'<i style="height:{_height(n / most):.2f}%" title="{text(title)}"></i>' for title, n in bars)
    return f'<div class="bars{fine}" data-most="{most:,}">{drawn}</div>'


def _height(share: float) -> float:
    """Percent; what is there is seen."""
    return max(100 * share, 0.8) if share else 0.0


def sheet_section(said: str, groups: Sequence[tuple[str | None, int, Sequence[str]]], *, wide: bool = False) -> str:
    """The contact sheet: per group its name, its size, and its tiles (HTML), `wide` ones with room for captions."""
    kind = "tiles wide" if wide else "tiles"
    parts = [f"<p>{text(said)}</p>"]
    for name, count, tiles in groups:
        title = "" if name is None else f"<h3>{text(name)}<span>{count:,}</span></h3>"
        parts.append(f'<div class="class">{title}<div class="{kind}">{"".join(tiles)}</div></div>')
    return _section("Contact sheet", "\n".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>\n{body}</section>"


def _fold(title: str, body: str, *, folded: bool) -> str:
    return f"<details><summary>{text(title)}</summary>{body}</details>" if folded else body


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
