"""Options and argument types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    _Type = click.ParamType[Any]  # generic in newer stubs only
else:
    _Type = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


class Bytes(_Type):
    """A size such as `512MB` (10⁶) or `512MiB` (2²⁰)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes as an int."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value)
        if not match or match[2].lower() not in _UNITS:
            self.fail(f"{value!r} is no size; write for example 512MB or 1GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].lower()])


class Fold(_Type):
    """`k/n`: the k-th of n parts, counted from 1."""

    name = "k/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """(k, n)."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)/(\d+)", value)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is no fold; write for example 1/5, the first of five parts", param, ctx)
        return int(match[1]), int(match[2])


class SplitFractions(_Type):
    """`0.9,0.1`, `0.8,0.1,0.1` or `train=0.8,mine=0.2`."""

    name = "fractions"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[str, float], ...]:
        """((name, fraction), …)."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        try:
            if all("=" in part for part in parts):
                return tuple((name, float(number)) for name, number in (part.split("=", 1) for part in parts))
            names = {2: ("train", "val"), 3: ("train", "val", "test")}[len(parts)]
            return tuple((name, float(part)) for name, part in zip(names, parts, strict=True))
        except (ValueError, KeyError):
            self.fail(
                f"{value!r}: write 0.9,0.1 (train, val), 0.8,0.1,0.1 (train, val, test) or name=fraction pairs",
                param,
                ctx,
            )


class Window(_Type):
    """`C,W`: a window's centre and width in HU."""

    name = "c,w"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """(centre, width)."""
        if isinstance(value, tuple):
            return value
        try:
            centre, width = map(float, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no window; write centre and width in HU, for example 40,400", param, ctx)
        return centre, width


#: Options of `packer shard` that speak of CT data, by parameter name.
CT_OPTIONS = (
    *("sample", "codec", "windows", "salt_file", "patient_regex", "assume_hu", "strict_series", "force", "ich_quirk"),
    *("label_key", "label_col"),
)


def ct(function: F) -> F:
    """The options of `packer shard` that speak of CT data."""
    for option in reversed(
        [
            click.option(
                "--sample",
                type=click.Choice(["slice", "volume"]),
                help="CT: one sample for each slice (default) or for each series.",
            ),
            click.option(
                "--codec",
                type=click.Choice(["npy", "npy.zst"]),
                help="CT: npy (default) is read fastest by everyone; npy.zst takes half the space and pays where "
                "storage gives less than about 660 MiB/s to each worker.",
            ),
            click.option(
                "--window",
                "windows",
                multiple=True,
                type=Window(),
                help="CT: make 8-bit pictures of slices through this window in HU; up to three become the channels of "
                "RGB. Default: keep HU and window when loading.",
            ),
            click.option(
                "--id-salt-file",
                "salt_file",
                metavar="FILE",
                type=click.Path(dir_okay=False),
                help="CT: the secret that hashes of patients, studies and series are made with; made if it does not "
                "exist. Keep it outside OUT. Default: ~/.config/packer/id-salt.",
            ),
            click.option(
                "--patient-regex",
                metavar="REGEX",
                help="CT: what in a path names the patient, where the file does not say (its groups, else all of it).",
            ),
            click.option("--assume-hu", is_flag=True, help="CT: values without a rescale are Hounsfield units."),
            click.option(
                "--strict-series",
                is_flag=True,
                help="CT: a series of several sizes, orientations or spacings is a fault.",
            ),
            click.option("--force", is_flag=True, help="CT: try to read DICOM files that lack the preamble."),
            click.option(
                "--rsna-ich",
                "ich_quirk",
                is_flag=True,
                help="CT: put right the shifted 12-bit files of the RSNA 2019 haemorrhage data.",
            ),
            click.option(
                "--key",
                "label_key",
                type=click.Choice(["path", "stem", "sop_uid", "series_uid", "patient"]),
                help="CT: what the rows of --labels name.  [default: path]",
            ),
            click.option("--label-col", metavar="NAME", help="CT: the column of --labels that holds the label."),
        ]
    ):
        function = option(function)
    return function


def quiet(function: F) -> F:
    """`--quiet`: no progress, no summary."""
    return click.option("--quiet", "-q", is_flag=True, help="No progress and no summary; errors and results only.")(
        function
    )


def as_json(function: F) -> F:
    """`--json`: the result for programs, on standard output."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")(
        function
    )


def workers(function: F) -> F:
    """`--workers N`."""
    return click.option(
        "--workers",
        "-j",
        type=click.IntRange(1),
        default=None,
        metavar="N",
        help="Worker processes. Default: one per CPU that this process may use.",
    )(function)


def dataset(function: F) -> F:
    """The packed dataset's folder, an argument."""
    return click.argument("dataset", metavar="OUT", type=click.Path(exists=True, file_okay=False))(function)


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "class"), counted(2000, "class"), counted(0, "sample")
    ('1 class', '2,000 classes', '0 samples')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def human_bytes(size: float) -> str:
    """`1.5 GB`, in powers of ten, as disks are sold and `--shard-size` counts.

    >>> human_bytes(1_530_000_000), human_bytes(12)
    ('1.53 GB', '12 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    return f"{size:.4g} TB"
