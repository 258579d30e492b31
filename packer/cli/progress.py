"""Progress on standard error: a tqdm bar in a terminal, a line now and then elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from packer.cli.options import human_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_EVERY_S = 10.0


class Bar:
    """One long step: so many items and bytes of a total. A context manager.

    Args:
        what: the step's name, for example `packing`.
        unit: what the items are, for example `samples`.
        items: how many, or None where that is not known.
        bytes: how many, or 0 where bytes are not counted.
        quiet: say nothing at all.
    """

    def __init__(self, what: str, unit: str, items: int | None = None, bytes: int = 0, *, quiet: bool = False) -> None:  # noqa: A002
        self.what, self.unit = what, unit
        self.items, self.bytes = items, bytes
        self.done_items = self.done_bytes = 0
        self._begin = self._last_line = time.monotonic()
        self._bar: tqdm[None] | None = None
        self._lines = not quiet and not sys.stderr.isatty()
        if not quiet and not self._lines:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # its thread would forbid forking workers
            total = bytes or items
            self._bar = tqdm(
                total=total,
                desc=what,
                unit="B" if bytes else f" {unit}",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
                leave=False,
                mininterval=0.1,
            )

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, items: int, bytes: int = 0) -> None:  # noqa: A002
        """So much more is done."""
        self.done_items += items
        self.done_bytes += bytes
        if self._bar is not None:
            if self.bytes:
                self._bar.set_postfix_str(
                    f"{self.done_items:,}/{self.items:,} {self.unit}"
                    if self.items
                    else f"{self.done_items:,} {self.unit}",
                    refresh=False,
                )
            self._bar.update(bytes if self.bytes else items)
        elif self._lines and (now := time.monotonic()) - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            print(f"{self.what}: {self._state(now - self._begin)}", file=sys.stderr, flush=True)

    def reach(self, items: int) -> None:
        """So much is done in all."""
        self.update(items - self.done_items)

    def _state(self, seconds: float) -> str:
        of_items = f" of {self.items:,}" if self.items else ""
        text = f"{self.done_items:,}{of_items} {self.unit}"
        if self.bytes:
            left = (self.bytes - self.done_bytes) * seconds / max(self.done_bytes, 1)
            text += f", {human_bytes(self.done_bytes)}, {human_bytes(self.done_bytes / seconds)}/s, {left:.0f} s left"
        return text


class PackBars:
    """The bars of `packer shard`: scanning, then packing. See `packer.pack.Progress`."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._bar: Bar | None = None

    def __enter__(self) -> PackBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def scanning(self, files: int) -> None:
        """So many files were found so far."""
        if self._bar is None:
            self._bar = Bar("scanning", "files", quiet=self.quiet)
        self._bar.reach(files)

    def start_packing(self, samples: int, bytes: int) -> None:  # noqa: A002
        """The scan is over, packing begins."""
        self._start("packing", samples, bytes)

    def start_checking(self, samples: int, bytes: int) -> None:  # noqa: A002
        """The scan is over, a dry run looks into every picture."""
        self._start("checking", samples, bytes)

    def _start(self, what: str, samples: int, size: int) -> None:
        self.close()
        self._bar = Bar(what, "samples", samples, size, quiet=self.quiet)

    def packed(self, samples: int, bytes: int) -> None:  # noqa: A002
        """So much more was packed."""
        if self._bar is not None:
            self._bar.update(samples, bytes)

    def close(self) -> None:
        """Wipe the bar that is on screen."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
