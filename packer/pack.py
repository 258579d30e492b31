"""Packing: scan, plan, write every shard, finish. Killed at any moment, the same command goes on.

What a finished shard holds is made durable in the job's state before the shard gets its name (see
`packer.job`). The manifest comes last; then the state is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from packer import __version__
from packer.engines import local_engine
from packer.errors import ProblemsError, SourceError, UsageError
from packer.finish import finish
from packer.formats import get_format
from packer.index import NamesToWrite, Rows
from packer.job import complete, own
from packer.manifest import Manifest, Shard, Split
from packer.plan import Plan, PlannedShard, PlanOptions, empty_classes, plan
from packer.sample import printable
from packer.shard import UNIT_COLUMNS, Encoder, Finished, ShardTask, label_warnings, write_shard
from packer.sources.base import Scan, ScanProgress, Source
from packer.storage import PARTIAL, write_json
from packer.strings import Int64s, Taken, equal_strings

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
        durable: wait for the disk before a shard gets its name; off, a power cut may leave a bad shard behind.
    """

    format: str = "webdataset"
    plan: PlanOptions = field(default_factory=PlanOptions)
    workers: int | None = None
    on_error: str = "raise"
    check: str = "header"
    encoder: Encoder | None = None
    durable: bool = True

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
        skipped: `(path, reason)` of what is no sample by rule.
        broken: `(path, reason)` of what should have been one, left out by `on_error='skip'`.
        warnings: what the user should know.
        seconds: wall time.
        resumed_shards: shards that an earlier run had finished.
        written_bytes: size of the shards that this run wrote.
        encoded: how many payloads the encoder changed, or kept as they were and why.
    """

    manifest: Manifest
    already_complete: bool
    skipped: list[tuple[str, str]]
    broken: list[tuple[str, str]]
    warnings: list[str]
    seconds: float
    resumed_shards: int
    written_bytes: int
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

    def payload_bytes(self) -> list[int]:
        """Per shard, the bytes to be read for it."""
        total = np.concatenate([[0], np.cumsum(self.scan.sizes)])
        first = self.scan.first
        orders = (self.plan.order[shard.start : shard.stop] for shard in self.plan.shards)
        return [int((total[first[order + 1]] - total[first[order]]).sum()) for order in orders]

    def job(self) -> dict[str, Any]:
        """What this job is, for `packer.job.own`."""
        return {
            "fingerprint": self.fingerprint,
            "packer": __version__,
            "source": self.source.describe(),
            "samples": len(self.scan),
            "options": _options(self.options),
        }

    @cached_property
    def fingerprint(self) -> str:
        """Equal fingerprints give equal bytes: everything that decides the output, hashed."""
        scan = self.plan.scan
        settings = {
            "packer": __version__,
            "options": _options(self.options),
            "fields": scan.fields,
            "splits": scan.splits,
            "classes": scan.classes,
            "made_cls": scan.made_cls,
            **({} if scan.made is None else {"made": dict(scan.made)}),
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
            digest.update(np.ascontiguousarray(column).data)
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
        ProblemsError: files longer than the format can hold, all listed.
        SourceError: samples of one key, in different splits so far, that would come into the same one.
    """
    scan = source.scan(progress)
    if choose is not None and len(scan):
        scan = choose(scan)
    format_ = get_format(options.format)
    _refuse_too_long(scan, format_.name, format_.max_field_bytes)
    planned = plan(scan, format_.sample_bytes(scan), format_.overhead(scan), options.plan)
    if options.plan.split is not None:
        _refuse_joined_keys(planned.scan)
        if len(scan.splits) > 1:
            joined = f"--split divides all samples anew: the source's own splits {', '.join(scan.splits)} are given up"
            planned = replace(planned, warnings=(joined, *planned.warnings))
    return Prepared(source, options, planned, _printable(scan.skipped))


def _refuse_joined_keys(scan: Scan) -> None:
    """Datasets of others may use a key once in every split; readers would take the two for one sample."""
    for number, name in enumerate(scan.splits):
        if equal := equal_strings(scan.keys.take(np.flatnonzero(scan.split == number))):
            raise SourceError(
                f"{len(equal)} key(s) of the source are in more than one of its splits and would meet in split "
                f"{name!r}, for example {printable(equal[0])!r}: pack without --split"
            )


def _refuse_too_long(scan: Scan, name: str, limit: int) -> None:
    files = np.flatnonzero(scan.sizes > limit).tolist()
    if files:
        raise ProblemsError(
            f"{len(files)} file(s) are longer than {name} shards can hold ({limit:,} bytes):",
            [(printable(scan.paths[i]), f"{int(scan.sizes[i]):,} bytes") for i in files],
            "leave them out with --exclude, or cut them up",
        )


def _printable(entries: Sequence[tuple[bytes, str]]) -> list[tuple[str, str]]:
    return [(printable(path), reason) for path, reason in entries]


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
    job = prepared.job()
    if (done := complete(out, job)) is not None:
        return PackResult(done, True, [], [], [], time.monotonic() - begin, 0, 0, {})
    problems = _printable(prepared.scan.problems)
    if problems and prepared.options.on_error == "raise":
        raise ProblemsError(
            f"{len(problems)} file(s) cannot become samples; nothing was written:",
            problems,
            "mend or remove them, or leave them out with --on-error skip",
        )
    if not len(prepared.scan):
        raise ProblemsError("no sample is left:", problems, "check the source folder and --layout")
    with own(out, job) as state:
        finished, resumed = _write_shards(prepared, out, state, progress)
        broken = [*problems, *(one for shard in finished.values() for one in shard.broken)]
        if not any(shard.samples for shard in finished.values()):
            raise ProblemsError("every sample was left out:", broken, "check the source, or try --check none")
        manifest = _finish(prepared, out, state, finished, broken)
        shutil.rmtree(state)
    encoded: Counter[str] = Counter()
    for shard in finished.values():
        encoded.update(shard.encoded)
    return PackResult(
        manifest,
        False,
        prepared.skipped,
        broken,
        [*prepared.plan.warnings, *_emptied(prepared.scan, manifest), *label_warnings(finished.values())],
        time.monotonic() - begin,
        len(resumed),
        sum(shard.bytes for name, shard in finished.items() if name not in resumed),
        dict(encoded),
    )


def _emptied(scan: Scan, manifest: Manifest) -> list[str]:
    present = {scan.splits[i] for i in np.unique(scan.split).tolist()}
    return [f"split {name!r}: every sample was left out" for name in sorted(present - set(manifest.splits))]


def _options(options: PackOptions) -> dict[str, Any]:
    """What decides the bytes, as JSON gives it back."""
    value = asdict(options.plan)
    value |= {
        "format": options.format,
        "check": options.check,
        "encoder": None if options.encoder is None else options.encoder.fingerprint(),
    }
    return json.loads(json.dumps(value))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the shards


def _write_shards(
    prepared: Prepared, out: str, state: str, progress: Progress
) -> tuple[dict[str, Finished], frozenset[str]]:
    """Write what is missing; returns every shard by name, in order, and the names of those that were there before."""
    skip = prepared.options.on_error == "skip"
    suffix = get_format(prepared.options.format).suffix
    single = prepared.options.plan.single_file
    shards = {f"{s.split}{'' if single else f'-{s.number:06d}'}{suffix}": s for s in prepared.plan.shards}
    finished: dict[str, Finished] = {}
    for name, shard in shards.items():
        if (found := Finished.load(out, state, name, planned=shard.stop - shard.start, skip=skip)) is not None:
            finished[name] = found
    resumed = frozenset(finished)
    _remove_partial(out)
    if prepared.options.encoder is not None:
        prepared.options.encoder.check_available()
    todo = [(name, shard) for name, shard in shards.items() if name not in finished]
    payload = dict(zip(shards, prepared.payload_bytes(), strict=True))
    progress.start_packing(sum(shard.stop - shard.start for _, shard in todo), sum(payload[name] for name, _ in todo))
    engine = local_engine(prepared.options.workers, len(todo))
    tasks = (_task(prepared, out, state, name, shard) for name, shard in todo)
    try:
        for result in engine.run(write_shard, tasks, progress.packed):
            finished[result.name] = result
    except BaseException:
        _remove_partial(out)  # of workers that were killed
        raise
    return {name: finished[name] for name in shards}, resumed


def _remove_partial(out: str) -> None:
    for entry in os.scandir(out):
        if entry.name.endswith(PARTIAL):
            os.unlink(entry.path)


def _task(prepared: Prepared, out: str, state: str, name: str, shard: PlannedShard) -> ShardTask:
    options = prepared.options
    return ShardTask(
        out=out,
        state=state,
        name=name,
        format=options.format,
        source=prepared.source,
        scan=replace(prepared.scan, skipped=(), problems=(), warnings=()).take(
            prepared.plan.order[shard.start : shard.stop]
        ),
        skip=options.on_error == "skip",
        check=options.check,
        encoder=options.encoder,
        durable=options.durable,
    )


# ---------------------------------------------------------------- the end


def _finish(
    prepared: Prepared, out: str, state: str, finished: dict[str, Finished], broken: list[tuple[str, str]]
) -> Manifest:
    scan = prepared.scan
    fields = (*scan.fields, "cls") if scan.made_cls else scan.fields
    extra = UNIT_COLUMNS if scan.number is not None else ()
    splits = []
    for name in scan.splits:
        pairs = zip(prepared.plan.shards, finished.values(), strict=True)
        shards = [(shard, done) for shard, done in pairs if shard.split == name and done.samples]
        if shards:
            order = np.concatenate(
                [prepared.plan.order[s.start : s.stop][done.kept(s.stop - s.start)] for s, done in shards]
            )
            split = Split(name, tuple(Shard(done.name, done.samples, done.bytes, done.crc32c) for _, done in shards))
            rows = _rows([done for _, done in shards], state, fields, extra)
            splits.append((split, rows, _names(scan, order, len(fields))))
    entries = [("rule", *entry) for entry in prepared.skipped] + [("broken", *entry) for entry in broken]
    # Paths to what payloads are made from may name a patient: they are told, and not kept.
    listed = [
        {"path": path if scan.made is None else None, "reason": reason, "kind": kind} for kind, path, reason in entries
    ]
    write_json(os.path.join(out, REPORT), {"skipped": listed, "empty_classes": [*map(printable, empty_classes(scan))]})
    return finish(
        out,
        format=prepared.options.format,
        splits=splits,
        fields=fields,
        classes=scan.classes,
        source={
            "layout": scan.layout,
            "rule": scan.rule,
            "skipped": dict(Counter(reason for _, reason in prepared.skipped)),
            "broken": len(broken),
            **({} if scan.made is None else {"made": dict(scan.made)}),
        },
        options=_options(prepared.options),
        fingerprint=prepared.fingerprint,
    )


def _rows(shards: Sequence[Finished], state: str, fields: Sequence[str], extra: Sequence[str]) -> Iterator[Rows]:
    """The index, shard by shard: all of it in memory would be too much for some datasets."""
    for number, shard in enumerate(shards):
        rows = shard.rows(state, fields, extra)
        rows["shard"] = number
        yield rows


def _names(scan: Scan, order: Int64s, fields: int) -> NamesToWrite:
    """Keys, and per field the original path: empty where the sample lacks it or packing made it."""
    columns = []
    for number in range(fields):
        files = np.flatnonzero(scan.field == number)
        if len(files) == 0 or scan.made is not None:
            columns.append(Taken(scan.paths, np.broadcast_to(np.int64(-1), len(order))))
        elif len(files) == len(scan.paths) == len(scan):  # file i is sample i
            columns.append(Taken(scan.paths, order))
        else:
            file_of = np.full(len(scan), -1, np.int64)
            file_of[np.searchsorted(scan.first, files, "right") - 1] = files
            columns.append(Taken(scan.paths, file_of[order]))
    return NamesToWrite(Taken(scan.keys, order), tuple(columns))
