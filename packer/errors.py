"""Every error a user can meet, in one place.

A message says what is wrong, where, what was found, and what to do about it. The command line
shows the message alone and exits 1 (or 2 for `UsageError`); from Python the type tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence


class PackerError(Exception):
    """Base of all errors raised on purpose; its message is fit to be shown to a user."""


class UsageError(PackerError):
    """An option or argument that cannot be meant (exit status 2)."""


class GroupUnknownError(UsageError):
    """A split by patient was asked for, and nothing says whose a sample is."""


class MissingExtraError(PackerError):
    """An optional dependency is not installed; the message names the `pip install` to run."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed; run: pip install 'packer-loaders[{extra}]'"
        )
        self._said = (package, extra, purpose)

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingExtraError, self._said)


class MissingToolError(PackerError):
    """A program that pip cannot install is not on the PATH; the message says where to get it."""

    def __init__(self, tool: str, purpose: str, how: str) -> None:
        super().__init__(f"{purpose} needs the program {tool}, which is not on the PATH; {how}")
        self._said = (tool, purpose, how)

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingToolError, self._said)


class SourceError(PackerError):
    """The source cannot be packed as asked (no samples, unreadable folder, unknown layout)."""


class SourceChangedError(PackerError):
    """A file changed, shrank or vanished between the scan and the read. Never a silent skip."""


class ProblemsError(PackerError):
    """Files that must not become samples, all of them listed.

    Attributes:
        problems: `(path, reason)` pairs, every offender, in source order.
    """

    SHOWN = 20

    def __init__(self, headline: str, problems: Sequence[tuple[str, str]], advice: str) -> None:
        self.problems = list(problems)
        self._said = (headline, advice)
        lines = [f"  {path}: {reason}" for path, reason in self.problems[: self.SHOWN]]
        if len(self.problems) > self.SHOWN:
            lines.append(f"  … and {len(self.problems) - self.SHOWN} more")
        super().__init__("\n".join([headline, *lines, advice]))

    def __reduce__(self) -> tuple[object, ...]:  # workers send it to their parent
        headline, advice = self._said
        return (ProblemsError, (headline, self.problems, advice))


class BadImageError(PackerError):
    """The bytes are not a whole image of a known format, or one too large to be believed.

    Carries the reason only; whoever knows the path adds it.
    """


class BadArrayError(BadImageError):
    """The bytes are not one whole array of numbers, or not one of the shape and type that is wanted."""


class OutputError(PackerError):
    """The output folder cannot take this job (another job's files, a running job, a full disk)."""


class WorkerDiedError(PackerError):
    """A worker process ended without an answer (killed, out of memory)."""


class ManifestError(PackerError):
    """`dataset.json` is missing, not ours, or contradicts itself."""


class ShardError(PackerError):
    """A shard is truncated, damaged, or not what the index says it is."""


class DamagedShardError(ShardError):
    """A shard goes wrong at a known place: truncated, damaged, or of a kind that has no byte ranges.

    Attributes:
        shard: the file.
        offset: the byte at which it goes wrong.
        what: the reason alone.
    """

    def __init__(self, shard: str, offset: int, what: str) -> None:
        super().__init__(shard, offset, what)
        self.shard, self.offset, self.what = shard, offset, what

    def __str__(self) -> str:
        from packer.sample import printable

        return f"{printable(self.shard)}: at offset {self.offset}: {self.what}"


class SampleError(PackerError):
    """A sample cannot be read, decoded or transformed; its cause is chained.

    Attributes:
        key: the sample's key.
        number: its number in the split.
    """

    def __init__(self, message: str, key: str, number: int) -> None:
        super().__init__(message)
        self.key = key
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return (SampleError, (str(self), self.key, self.number))


class CollateError(PackerError):
    """Samples that cannot become one batch: other ranks, dtypes, keys or lengths."""


class BudgetError(PackerError):
    """A dataset does not fit where it was to be preloaded."""


class StateError(PackerError):
    """A saved loader state does not fit: another seed, dataset, order or, with buckets, batch size."""


class MeasurementError(PackerError):
    """A loader or a training step that was to be measured fails, or gives nothing to measure."""


class UnsafeNameError(PackerError):
    """A stored name would write outside its folder (absolute, `..`, or a link)."""
