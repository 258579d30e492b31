"""Tables of text, and plain bars, for people to read."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉"


def table(rows: Sequence[Sequence[str]], align: str, *, indent: str = "") -> list[str]:
    """Lines of aligned columns.

    Args:
        rows: of equal length.
        align: `<` or `>` for each column.
        indent: before each line.

    >>> table([["train", "1,000"], ["val", "50"]], "<>")
    ['train  1,000', 'val       50']
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            " " * (width - _width(cell)) + cell if side == ">" else cell + " " * (width - _width(cell))
            for cell, width, side in zip(row, widths, align, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def bar(share: float, width: int = 30) -> str:
    """A bar of `share` (0 to 1) of `width` characters, an eighth of a character exact; never empty above 0.

    >>> bar(0.5, 4), bar(0.001, 4), bar(0, 4)
    ('██', '▏', '')
    """
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _width(text: str) -> int:
    """Columns that a terminal gives it: two for wide East Asian characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
