"""Packing: scan, plan, write every shard, finish. Killed at any moment, the same command goes on.

The state of an unfinished job lies in `OUT/.packer/`: `job.json` (the plan's fingerprint) and per
finished shard `<shard>.rows.npy` and `<shard>.json`, made durable before the shard gets its name.
The manifest comes last; then the state is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from packer import __version__
from packer.engines import Engine, InProcess, LocalProcesses, Report, cpu_count
from packer.errors import ManifestError, OutputError, ProblemsError, UsageError
from packer.finish import finish
from packer.formats import get_format
from packer.index import Names, Rows
from packer.manifest import FILE, Manifest, Shard, Split
from packer.plan import Plan, PlannedShard, PlanOptions, plan
from packer.sample import printable
from packer.shard import Encoder, Finished, ShardTask, write_shard
from packer.sources.base import Scan, ScanProgress, Source
from packer.storage import PARTIAL, exclusive, write_json
from packer.strings import Strings

STATE = ".packer"
REPORT = "report.json"


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    Attributes:
        format: a name in `packer.formats.FORMATS`.
        plan: order, shards and splits.
        workers: processes; None takes one per CPU that may be used.
        on_error: 'raise' stops at the first file that is no whole image; 'skip' leaves it out and counts it.
        check: 'header' probes every image's structure, 'decode' decodes each, 'none' takes any bytes.
        encoder: changes payloads on the way (resize, seekable JPEG); None packs the very bytes.
    """

    format: str = "webdataset"
    plan: PlanOptions = field(default_factory=PlanOptions)
    workers: int | None = None
    on_error: str = "raise"
    check: str = "header"
    encoder: Encoder | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise UsageError(f"--on-error is 'raise' or 'skip', got {self.on_error!r}")
        if self.check not in ("header", "decode", "none"):
            raise UsageError(f"--check is 'header', 'decode' or 'none', got {self.check!r}")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.workers}")


@dataclass(frozen=True)
class PackResult:
    """What packing did.

    Attributes:
        manifest: as written.
        already_complete: nothing was done: the folder held this very dataset.
        skipped: `(path, reason)` of every file left out, by rule or by `on_error='skip'`.
        warnings: what the user should know.
        seconds: wall time.
        resumed_shards: shards that an earlier run had finished.
        encoded: how many payloads the encoder changed, kept as they were and why.
    """

    manifest: Manifest
    already_complete: bool
    skipped: list[tuple[str, str]]
    warnings: list[str]
    seconds: float
    resumed_shards: int
    encoded: dict[str, int]


class Progress(Protocol):
    """Told how far each step has come; see `packer.cli.progress`."""

    def scanning(self, files: int) -> None:
        """So many files were found so far."""
        ...

    def start_packing(self, samples: int, bytes: int) -> None:  # noqa: A002
        """Packing begins: so much is left to do."""
        ...

    def packed(self, samples: int, bytes: int) -> None:  # noqa: A002
        """So much more was packed."""
        ...


class Silent:
    """A `Progress` that says nothing."""

    def scanning(self, files: int) -> None:
        """Ignore."""

    def start_packing(self, samples: int, bytes: int) -> None:  # noqa: A002
        """Ignore."""

    def packed(self, samples: int, bytes: int) -> None:  # noqa: A002
        """Ignore."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A scanned and planned job, nothing written yet.

    Attributes:
        source, options: as given.
        plan: see `packer.plan.Plan`.
        skipped: by rule, during the scan.
    """

    source: Source
    options: PackOptions
    plan: Plan
    skipped: list[tuple[str, str]]

    @property
    def scan(self) -> Scan:
        """The samples."""
        return self.plan.scan

    def fingerprint(self) -> str:
        """Equal fingerprints give equal bytes: everything that decides the output, hashed."""
        scan, options = self.plan.scan, self.options
        settings = {
            "packer": __version__,
            "format": options.format,
            "plan": asdict(options.plan),
            "check": options.check,
            "encoder": None if options.encoder is None else options.encoder.fingerprint(),
            "fields": scan.fields,
            "splits": scan.splits,
            "classes": scan.classes,
            "made_cls": scan.made_cls,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode("ascii"))
        for column in (
            scan.paths.blob,
            scan.paths.ends,
            scan.places.blob,
            scan.sizes,
            scan.field,
            scan.first,
            scan.keys.blob,
            scan.keys.ends,
            scan.label,
            scan.split,
            self.plan.order,
        ):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()


def prepare(
    source: Source,
    options: PackOptions,
    *,
    choose: Callable[[Scan], Scan] | None = None,
    progress: ScanProgress | None = None,
) -> Prepared:
    """Scan and plan, without writing or reading a payload.

    Args:
        source: where samples come from.
        options: see `PackOptions`.
        choose: picks a subset of the scan (see `packer.plan.select`).
        progress: called with the number of files found.

    Raises:
        SourceError: see `Source.scan`.
        UsageError: options that contradict the source.
    """
    scan = source.scan(progress)
    if choose is not None and len(scan):
        scan = choose(scan)
    format_ = get_format(options.format)
    planned = plan(scan, format_.sample_bytes(scan), format_.overhead, options.plan)
    return Prepared(source, options, planned, [(printable(path), reason) for path, reason in scan.skipped])


def pack(
    source: Source,
    out: str | os.PathLike[str],
    options: PackOptions = PackOptions(),
    *,
    choose: Callable[[Scan], Scan] | None = None,
    progress: Progress | None = None,
) -> PackResult:
    """Pack a source into a folder.

    Args:
        source: where samples come from, for example `FolderSource("/data/imagenet")`.
        out: the folder, new, empty, or holding this same job unfinished.
        options: see `PackOptions`.
        choose: picks a subset of the samples.
        progress: told how far each step has come.

    Raises:
        ProblemsError: files that cannot become samples, all listed, before anything is written; or
            the first such file met while packing.
        OutputError: the folder is not ours to write, is being written, or cannot be written.
        SourceChangedError: a file changed since the scan.

    >>> from packer.sources.folder import FolderSource
    >>> pack(FolderSource("/data/imagenet"), "out/").manifest.samples       # doctest: +SKIP
    1281167
    """
    progress = progress or Silent()
    prepared = prepare(source, options, choose=choose, progress=progress.scanning)
    return pack_prepared(prepared, out, progress=progress)


def pack_prepared(prepared: Prepared, out: str | os.PathLike[str], *, progress: Progress | None = None) -> PackResult:
    """The second half of `pack`: write what `prepare` planned."""
    progress = progress or Silent()
    begin = time.monotonic()
    out = os.fspath(out)
    fingerprint = prepared.fingerprint()
    if (done := _already_complete(out, fingerprint)) is not None:
        return PackResult(done, True, [], [], time.monotonic() - begin, 0, {})
    problems = [(printable(path), reason) for path, reason in prepared.scan.problems]
    if problems and prepared.options.on_error == "raise":
        raise ProblemsError(
            f"{len(problems)} file(s) cannot become samples; nothing was written:",
            problems,
            "mend or remove them, or leave them out with --on-error skip",
        )
    if not len(prepared.scan):
        raise ProblemsError("no sample is left:", problems, "check the source folder and --layout")
    with _job(out, fingerprint, prepared):
        finished, resumed = _write_shards(prepared, out, progress)
        result = _finish(prepared, out, fingerprint, finished, problems)
        shutil.rmtree(os.path.join(out, STATE))
    encoded: dict[str, int] = {}
    for shard in finished.values():
        for what, count in shard.encoded.items():
            encoded[what] = encoded.get(what, 0) + count
    skipped = [*prepared.skipped, *problems, *(skip for f in finished.values() for skip in f.skipped)]
    return PackResult(result, False, skipped, list(prepared.plan.warnings), time.monotonic() - begin, resumed, encoded)


# ---------------------------------------------------------------- the output folder


def _already_complete(out: str, fingerprint: str) -> Manifest | None:
    if not os.path.exists(os.path.join(out, FILE)):
        return None
    manifest = Manifest.load(out)
    if manifest.fingerprint == fingerprint:
        return manifest
    raise OutputError(
        f"{out} already holds a dataset of {manifest.samples} samples, packed from another source or "
        "with other options; choose another folder, or delete it first"
    )


@contextlib.contextmanager
def _job(out: str, fingerprint: str, prepared: Prepared) -> Iterator[None]:
    """Own the output folder: nobody else's files in it, nobody else at work in it."""
    state = os.path.join(out, STATE)
    try:
        existing = os.listdir(out)
    except FileNotFoundError:
        existing = []
    except OSError as error:
        raise OutputError(f"{out}: {error.strerror}; choose a folder for the shards") from error
    if existing and STATE not in existing:
        raise OutputError(
            f"{out} is not empty ({', '.join(sorted(existing)[:3])}…) and holds no packing job; choose a new folder"
        )
    try:
        os.makedirs(state, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make {out}: {error.strerror}") from error
    with exclusive(os.path.join(state, "lock"), out):
        _claim(os.path.join(state, "job.json"), out, fingerprint, prepared)
        yield


def _claim(path: str, out: str, fingerprint: str, prepared: Prepared) -> None:
    job = {
        "fingerprint": fingerprint,
        "source": prepared.source.describe(),
        "samples": len(prepared.scan),
        "options": _options(prepared.options),
    }
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    except (FileNotFoundError, ValueError):
        write_json(path, job)
        return
    if found.get("fingerprint") != fingerprint:
        differences = [
            f"{name} was {found.get(name)!r}, is {job[name]!r}"
            for name in ("source", "samples", "options")
            if json.dumps(found.get(name)) != json.dumps(job[name])
        ]
        raise OutputError(
            f"{out} holds an unfinished job that differs from this one ("
            f"{'; '.join(differences) or 'the files in the source have changed'}); "
            "run that command again to finish it, or delete the folder and start afresh"
        )


def _options(options: PackOptions) -> dict[str, Any]:
    value = asdict(options.plan)
    value |= {
        "format": options.format,
        "check": options.check,
        "encoder": None if options.encoder is None else options.encoder.fingerprint(),
    }
    return json.loads(json.dumps(value))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the shards


def _write_shards(prepared: Prepared, out: str, progress: Progress) -> tuple[dict[str, Finished], int]:
    """Write what is missing; returns every shard by name, and how many were there before."""
    suffix = get_format(prepared.options.format).suffix
    names = [f"{shard.split}-{shard.number:06d}{suffix}" for shard in prepared.plan.shards]
    finished = {name: found for name in names if (found := Finished.load(out, os.path.join(out, STATE), name))}
    resumed = len(finished)
    todo = [(name, shard) for name, shard in zip(names, prepared.plan.shards, strict=True) if name not in finished]
    for entry in os.scandir(out):
        if entry.name.endswith(PARTIAL):
            os.unlink(entry.path)
    progress.start_packing(sum(s.stop - s.start for _, s in todo), sum(s.bytes for _, s in todo))
    if prepared.options.encoder is not None:
        prepared.options.encoder.check_available()
    workers = min(prepared.options.workers or cpu_count(), max(len(todo), 1))
    engine: Engine = InProcess() if workers == 1 else LocalProcesses(workers)
    tasks = (_task(prepared, out, name, shard) for name, shard in todo)
    report: Report = progress.packed
    for result in engine.run(write_shard, tasks, report):
        finished[result.name] = result
    return {name: finished[name] for name in names}, resumed


def _task(prepared: Prepared, out: str, name: str, shard: PlannedShard) -> ShardTask:
    options = prepared.options
    return ShardTask(
        out=out,
        state=os.path.join(out, STATE),
        name=name,
        format=options.format,
        source=prepared.source,
        scan=prepared.scan.take(prepared.plan.order[shard.start : shard.stop]),
        skip=options.on_error == "skip",
        check=options.check,
        encoder=options.encoder,
    )


# ---------------------------------------------------------------- the end


def _finish(
    prepared: Prepared, out: str, fingerprint: str, finished: dict[str, Finished], problems: list[tuple[str, str]]
) -> Manifest:
    scan = prepared.scan
    fields = (*scan.fields, "cls") if scan.made_cls else scan.fields
    splits = []
    by_split: dict[str, list[tuple[PlannedShard, Finished]]] = {name: [] for name in scan.splits}
    for shard, done in zip(prepared.plan.shards, finished.values(), strict=True):
        by_split[shard.split].append((shard, done))
    for name, shards in by_split.items():
        if not shards:
            continue
        rows = [done.rows(os.path.join(out, STATE)) for _, done in shards]
        for number, part in enumerate(rows):
            part["shard"] = number
        kept = [
            prepared.plan.order[shard.start : shard.stop][done.kept(shard.stop - shard.start)] for shard, done in shards
        ]
        facts = tuple(Shard(done.name, done.samples, done.bytes, done.crc32c) for _, done in shards)
        splits.append((Split(name, facts), _concatenate(rows), _names(scan.take(np.concatenate(kept)), fields)))
    skipped = [*prepared.skipped, *problems, *(skip for f in finished.values() for skip in f.skipped)]
    write_json(os.path.join(out, REPORT), {"skipped": [{"path": path, "reason": reason} for path, reason in skipped]})
    reasons: dict[str, int] = {}
    for _, reason in skipped:
        reasons[reason] = reasons.get(reason, 0) + 1
    return finish(
        out,
        format=prepared.options.format,
        splits=splits,
        fields=fields,
        classes=scan.classes,
        source={"layout": scan.layout, "rule": scan.rule, "skipped": reasons},
        options=_options(prepared.options),
        fingerprint=fingerprint,
    )


def _concatenate(rows: list[Rows]) -> Rows:
    return np.concatenate(rows) if len(rows) > 1 else rows[0]


def _names(scan: Scan, fields: tuple[str, ...]) -> Names:
    """Keys, and per field the original path: empty where the sample lacks it or packing made it."""
    columns = []
    sample = np.repeat(np.arange(len(scan)), np.diff(scan.first))
    for number in range(len(fields)):
        files = np.flatnonzero(scan.field == number)
        if len(files) == len(scan):
            columns.append(scan.paths.take(files))
            continue
        lengths = np.zeros(len(scan) + 1, np.int64)
        lengths[sample[files] + 1] = scan.paths.lengths[files]
        columns.append(Strings(scan.paths.take(files).blob, np.cumsum(lengths)))
    return Names(scan.keys, tuple(columns))


__all__ = [
    "Encoder",
    "ManifestError",
    "PackOptions",
    "PackResult",
    "Prepared",
    "Progress",
    "pack",
    "pack_prepared",
    "prepare",
]
