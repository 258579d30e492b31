"""A diagnosis as text for a terminal, and as one self-contained HTML page with charts in SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loaders.remedies import LIMITS, Remedy, capacities
from loaders.run import Run
from loaders.stages import Stages

if TYPE_CHECKING:
    from loaders.doctor import Diagnosis

Points = Sequence[tuple[float, float]]

# ---------------------------------------------------------------- text


def as_text(found: Diagnosis) -> str:
    """All of it in lines of at most some 100 characters."""
    lines = [found.verdict, "", found.subject, ""]
    head = ["stage", "ms/sample", "95 % interval", "on a CPU", "from disk"]
    lines += _aligned([head, *stage_rows(found.stages)], "<>>>>")
    lines += ["", "samples/s that each could give"]
    rows = [[("→ " if name == found.limit else "  ") + LIMITS[name], f"{rate:,.0f}"] for name, rate in _limits(found)]
    lines += _aligned(rows, "<>", "  ")
    if found.remedies:
        head = ["what would help", "predicted", "measured", ""]
        lines += ["", *_aligned([head, *remedy_rows(found.remedies)], "<>><")]
    else:
        lines += ["", "Nothing that is known here would gain 5 %."]
    lines += ["", *_aligned([list(row) for row in found.resources.lines()], "<<")]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def stage_rows(stages: Stages) -> list[list[str]]:
    """Each stage: name, milliseconds per sample, their interval, share on a CPU, and read from the disk itself."""
    rows = []
    for stage in stages.stages:
        timing = stage.timing
        busy = f"{timing.cpu_s / timing.wall_s:.0%}" if timing.wall_s > 1e-7 else ""
        cold = "" if stage.cold is None else f"{1000 * stage.cold.wall_s:.3f}"
        name = stage.name if stage.where == "worker" else f"{stage.name} (main process)"
        rows.append([name, f"{1000 * timing.median_s:.3f}", f"{1000 * timing.low_s:.3f} – {1000 * timing.high_s:.3f}",
                     busy, cold])
    return rows


def remedy_rows(remedies: Sequence[Remedy]) -> list[list[str]]:
    """Each remedy: name, predicted and measured gain, what to do."""
    return [
        [remedy.name, f"{remedy.gain:.2f}×",
         "" if remedy.measured_gain is None else f"{remedy.measured_gain:.2f}×", remedy.how]
        for remedy in remedies
    ]


def _limits(found: Diagnosis) -> list[tuple[str, float]]:
    """(limit, samples a second that it allows), the tightest first; the one that was named is among them."""
    known = {name: rate for name, rate in capacities(found.observed).items() if math.isfinite(rate)}
    known.setdefault(found.limit, found.observed.samples_per_s)
    return sorted(known.items(), key=lambda each: each[1])


def _aligned(rows: Sequence[Sequence[str]], align: str, indent: str = "") -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(
            cell.rjust(width) if side == ">" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        )).rstrip()
        for row in rows
    ]


# ---------------------------------------------------------------- the page

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2025; --soft: #646c75; --line: #e4e6e8; --paper: #fdfdfc; --panel: #f2f3f3;
  --wait: #c2543a; --work: #33708f; --move: #b98a2f; --cold: #9bb9c8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e5e7; --soft: #a0a7af; --line: #2d3237; --paper: #15171a;
  --panel: #1e2226; --wait: #e08a76; --work: #74aeca; --move: #d9b061; --cold: #40606f; } }
* { box-sizing: border-box; margin: 0; }
body { max-width: 980px; margin: 0 auto; padding: 48px 28px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { font-size: 26px; line-height: 1.3; font-weight: 640; letter-spacing: -.014em; max-width: 34em; }
h2 { font-size: 18px; font-weight: 620; margin: 48px 0 6px; }
p { color: var(--soft); max-width: 76ch; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin-top: 12px; }
th, td { padding: 5px 0 5px 28px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 400; font-size: 13px; color: var(--soft); }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: nowrap; }
td:last-child.how { text-align: left; color: var(--soft); }
svg { display: block; width: 100%; height: auto; margin-top: 14px; font-size: 12px; }
svg text { fill: var(--soft); } svg .name { fill: var(--ink); }
.key { display: flex; gap: 22px; margin-top: 10px; font-size: 13px; color: var(--soft); }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; }
.wait { fill: var(--wait); background: var(--wait); } .work { fill: var(--work); background: var(--work); }
.move { fill: var(--move); background: var(--move); } .cold { fill: var(--cold); background: var(--cold); }
.grid { stroke: var(--line); } .drawn { fill: none; stroke: var(--work); stroke-width: 2; }
.drawn.b { stroke: var(--move); } .drawn.c { stroke: var(--wait); }
footer { margin-top: 56px; padding-top: 14px; border-top: 1px solid var(--line); font-size: 13px; color: var(--soft); }
"""


def as_html(found: Diagnosis) -> str:
    """One page that needs nothing else, not even a network."""
    means = [list(row) for row in found.resources.lines()]
    parts = [
        f"<h1>{_said(found.verdict)}</h1><p>{_said(found.subject)}</p>",
        _section("Waiting and working, step by step", timeline(found.run) + _key(
            ("wait", "waiting for data"), ("move", "moving to the device"), ("work", "the step"))),
        _section("What a sample costs", stage_bars(found.stages) + _key(
            ("work", "on a CPU"), ("wait", "waiting"), ("cold", "more, read from the disk itself"))
            + _table(["stage", "ms", "95 % interval", "on a CPU", "from disk, ms"], stage_rows(found.stages))),
        _section("What would help", _remedies(found)),
        _section("Workers", worker_curve(found)),
        _section("How busy the machine was", utilization(found.run)),
        _section("What this process may use", _table(["", ""], means, how=True)),
    ]
    notes = "".join(f"<p>{_said(note)}</p>" for note in found.notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="packer doctor">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_said(found.verdict)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(parts)}{notes}"
        "<footer>Made by packer doctor. Gains are of the whole loop; a predicted one comes from the stages by a "
        "model, a measured one from a trial of a second or two.</footer></body></html>\n"
    )


def _said(text: str) -> str:
    return html.escape(text)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_said(title)}</h2>\n{body}</section>" if body else ""


def _key(*entries: tuple[str, str]) -> str:
    shown = "".join(f'<span><i class="{kind}"></i>{_said(text)}</span>' for kind, text in entries)
    return f'<div class="key">{shown}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, how: bool = False) -> str:
    top = "".join(f"<th>{_said(cell)}</th>" for cell in head) if any(head) else ""
    body = ""
    for row in rows:
        cells = [f"<td>{_said(cell)}</td>" for cell in row]
        if how:
            cells[-1] = f'<td class="how">{_said(row[-1])}</td>'
        body += f"<tr>{''.join(cells)}</tr>\n"
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def _remedies(found: Diagnosis) -> str:
    if not found.remedies:
        return "<p>Nothing that is known here would gain 5 %.</p>"
    return _table(["", "predicted", "measured", ""], remedy_rows(found.remedies), how=True)


# ---------------------------------------------------------------- charts

_WIDTH, _LEFT = 920, 64
_MOST_BARS = 240


def _svg(height: int, body: str, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_said(label)}">{body}</svg>'


def timeline(run: Run) -> str:
    """A bar for each step: waiting, moving, working, from the bottom; of many steps, the means of some."""
    every = -(-len(run.steps) // _MOST_BARS)
    groups = [run.steps[start : start + every] for start in range(0, len(run.steps), every)]
    bars = [
        tuple(1000 * sum(values) / len(group) for values in zip(
            *((step.wait_s, step.transfer_s, step.work_s) for step in group), strict=True))
        for group in groups
    ]
    if not bars:
        return ""
    top = max(sum(bar) for bar in bars) or 1.0
    width, height = (_WIDTH - _LEFT) / len(bars), 170
    drawn = _axis(height, top, lambda value: f"{_short(value)} ms")
    for i, bar in enumerate(bars):
        low = float(height)
        for kind, value in zip(("wait", "move", "work"), bar, strict=True):
            tall = (height - 20) * value / top
            low -= tall
            drawn += (f'<rect class="{kind}" x="{_LEFT + i * width:.1f}" y="{low:.1f}" '
                      f'width="{max(width - 1, 0.6):.1f}" height="{tall:.1f}"/>')
    return _svg(height + 4, drawn, "milliseconds of each step")


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _axis(height: int, top: float, written: Callable[[float], str]) -> str:
    """Two lines with their values: at the top and half-way."""
    drawn = ""
    for share in (1.0, 0.5):
        y = height - (height - 20) * share
        drawn += (f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
                  f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_said(written(top * share))}</text>')
    return drawn + f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{height}" y2="{height}"/>'


def stage_bars(stages: Stages) -> str:
    """A bar for each stage: on a CPU, waiting, and what reading from the disk itself would add."""
    if not stages.stages:
        return ""
    left, row = 190, 26
    longest = max((stage.cold or stage.timing).wall_s for stage in stages.stages)
    longest = max(longest, *(stage.timing.wall_s for stage in stages.stages), 1e-9)
    scale = (_WIDTH - left - 90) / longest
    drawn = ""
    for i, stage in enumerate(stages.stages):
        y, x = i * row + 4, float(left)
        drawn += f'<text class="name" x="{left - 12}" y="{y + 13}" text-anchor="end">{_said(stage.name)}</text>'
        more = 0.0 if stage.cold is None else max(0.0, stage.cold.wall_s - stage.timing.wall_s)
        for kind, value in (("work", stage.timing.cpu_s), ("wait", stage.timing.idle_s), ("cold", more)):
            drawn += f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="17"/>'
            x += value * scale
        drawn += f'<text x="{x + 8:.1f}" y="{y + 13}">{_short(1000 * stage.timing.wall_s)} ms</text>'
    return _svg(len(stages.stages) * row + 4, drawn, "milliseconds per sample of each stage")


def worker_curve(found: Diagnosis) -> str:
    """Samples a second by workers: the model's line, the run and the trials as dots."""
    seen = found.observed
    dots = [(float(count), rate) for count, rate in found.measured]
    line = [(float(count), rate) for count, rate in found.predicted if math.isfinite(rate)]
    if not line:
        return ""
    most = max(x for x, _ in (*line, *dots))
    top = max(y for _, y in (*line, *dots, (0.0, seen.samples_per_s)))
    height = 190

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (_WIDTH - _LEFT - 20) * x / most, height - (height - 20) * y / top

    drawn = _axis(height, top, lambda value: f"{value:,.0f}/s") + _line([place(x, y) for x, y in line], "drawn")
    for x, y in dots:
        across, up = place(x, y)
        drawn += (f'<circle class="wait" cx="{across:.1f}" cy="{up:.1f}" r="5">'
                  f"<title>{x:.0f}: {y:,.0f}/s</title></circle>")
    across, up = place(found.settings.num_workers, seen.samples_per_s)
    drawn += f'<circle class="move" cx="{across:.1f}" cy="{up:.1f}" r="5"/>'
    for x, _ in line:
        drawn += f'<text x="{place(x, 0)[0]:.1f}" y="{height + 16}" text-anchor="middle">{x:.0f}</text>'
    return _svg(height + 22, drawn, "samples a second by workers") + _key(
        ("work", "the loader alone, by the model"), ("wait", "the loader alone, measured"),
        ("move", "the loop of this run"))


def utilization(run: Run) -> str:
    """CPU, GPU and disk over the run, each as a share of its own greatest."""
    watched = run.utilization
    if len(watched) < 2:
        return ""
    end, height = watched[-1].at_s or 1.0, 120
    most_read = max((one.disk_bytes_per_s or 0.0 for one in watched), default=0.0)
    series: list[tuple[str, str, str, Points]] = [
        ("drawn", "work", "CPUs of the whole machine", [(one.at_s, one.cpu) for one in watched])
    ]
    if any(one.gpu is not None for one in watched):
        series.append(("drawn c", "wait", "GPU", [(one.at_s, one.gpu or 0.0) for one in watched]))
    if most_read > 1e5:
        series.append(("drawn b", "move", f"read from disks (most: {most_read / 1e6:,.0f} MB/s)",
                       [(one.at_s, (one.disk_bytes_per_s or 0.0) / most_read) for one in watched]))
    drawn = _axis(height, 1.0, lambda value: f"{value:.0%}")
    for kind, _, _, points in series:
        drawn += _line([(_LEFT + (_WIDTH - _LEFT) * x / end, height - (height - 20) * min(y, 1.0)) for x, y in points],
                       kind)
    return _svg(height + 4, drawn, "utilisation over the run") + _key(*((kind, text) for _, kind, text, _ in series))


def _line(points: Points, kind: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}"/>'
