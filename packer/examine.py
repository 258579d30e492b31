"""Looking at every picture of a planned job without packing: all problems of an archive, first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from packer.engines import Report, local_engine
from packer.errors import BadImageError, SourceChangedError
from packer.imaging import decode_check, probe
from packer.pack import Prepared
from packer.sample import is_image_field, printable
from packer.sources.base import Maker, Scan, Source

_SAMPLES_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class _Part:
    source: Source
    scan: Scan
    decode: bool


def examine(prepared: Prepared, progress: Callable[[int, int], None]) -> list[tuple[str, str]]:
    """Read every picture and look at it as packing would.

    Args:
        prepared: the planned job; its `check` says how closely to look.
        progress: called with (samples, bytes) done since the last call.

    Returns:
        `(path, reason)` of every picture that packing would refuse, sorted.
    """
    engine = local_engine(prepared.options.workers, -(-len(prepared.scan) // _SAMPLES_AT_ONCE))
    # Several payloads made from one file say the same of it.
    return sorted({problem for found in engine.run(_look, _parts(prepared), progress) for problem in found})


def _parts(prepared: Prepared) -> Iterator[_Part]:
    scan = replace(prepared.scan, skipped=(), problems=())
    for begin in range(0, len(scan), _SAMPLES_AT_ONCE):
        part = scan.take(np.arange(begin, min(begin + _SAMPLES_AT_ONCE, len(scan))))
        yield _Part(prepared.source, part, prepared.options.check == "decode")


def _look(part: _Part, report: Report) -> list[tuple[str, str]]:
    look = decode_check if part.decode else probe
    scan = part.scan
    problems: list[tuple[str, str]] = []
    reader = part.source.reader()
    try:
        looked_at = [isinstance(reader, Maker) or is_image_field(scan.fields[number]) for number in scan.field.tolist()]
        for file in np.flatnonzero(looked_at).tolist():
            try:
                if isinstance(reader, Maker):
                    reader.make(scan.places[file])
                    continue
                data = memoryview(bytearray(int(scan.sizes[file])))
                reader.read([scan.places[file]], [data])
                look(data)
            except (BadImageError, SourceChangedError) as error:
                problems.append((printable(scan.paths[file]), str(error)))
        report(len(scan), int(scan.sizes.sum()))
    finally:
        reader.close()
    return problems
