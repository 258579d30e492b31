"""CT data on the command line of `packer shard`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from packer.cli.options import CT_OPTIONS
from packer.errors import UsageError

if TYPE_CHECKING:
    from packer.pack import PackResult
    from packer.sources.base import Source

#: As `packer.sources.layouts` and `packer.sources.ct.layouts` name them; importing these would slow `--help`.
PICTURE_LAYOUTS = ("imagefolder", "splits", "sidecars", "parallel", "flat")
CT_LAYOUTS = ("nnunet", "kits", "metaimage", "nifti", "dicom", "arrays", "png16")

#: Broken files of CT data that a summary names.
_SHOWN = 20


def is_ct(options: dict[str, Any]) -> bool:
    """Whether the one source that is given is CT data: by `--layout`, or by a look at its first files."""
    if options["layout"] is not None:
        return options["layout"] in CT_LAYOUTS
    from packer.sources.ct.layouts import looks_like_ct

    return looks_like_ct(options["src"][0])


def _flag(name: str) -> str:
    """The option that sets this parameter."""
    renamed = {"windows": "window", "salt_file": "id-salt-file", "label_key": "key", "ich_quirk": "rsna-ich"}
    return "--" + renamed.get(name, name).replace("_", "-")


def ct_source(options: dict[str, Any]) -> Source:
    """The source that these options speak of."""
    from packer.sources.ct.dicom import DicomOptions
    from packer.sources.ct.options import CtOptions
    from packer.sources.ct.privacy import default_salt_file, load_salt
    from packer.sources.ct.source import CtSource
    from packer.sources.listing import Filter

    for name in ("resize", "seekable_jpeg"):
        if options[name]:
            raise UsageError(f"{_flag(name)} is about pictures; {options['src'][0]} holds CT data")
    if (options["label_key"] or options["label_col"]) and not options["labels"]:
        raise UsageError("--key and --label-col speak of --labels: give it as well")
    salt_file = options["salt_file"] or default_salt_file()
    out, salt = os.path.realpath(options["out"]), os.path.realpath(salt_file)
    if os.path.commonpath([out, salt]) == out:
        raise UsageError(f"--id-salt-file {salt_file} lies inside OUT: whoever gets the dataset must not get the salt")
    hasher = load_salt(salt_file)
    if not options["quiet"]:
        said = "patients, studies and series are hashed with the salt in"
        click.echo(f"{said} {salt_file}: keep it, and keep it secret", err=True)
    return CtSource(
        options["src"][0],
        CtOptions(
            hasher,
            layout=options["layout"],
            sample=options["sample"] or "slice",
            codec=options["codec"] or "npy",
            windows=options["windows"],
            dicom=DicomOptions(options["assume_hu"], options["force"], options["ich_quirk"]),
            patient_regex=options["patient_regex"],
            strict_series=options["strict_series"],
            labels=options["labels"],
            label_key=options["label_key"] or "path",
            label_col=options["label_col"],
            classes=options["classes"],
            filter=Filter(options["include"], options["exclude"]),
            follow_symlinks=options["follow_symlinks"],
            workers=options["workers"],
        ),
    )


def refuse_ct_options(options: dict[str, Any]) -> None:
    """Options that speak of CT data are refused for any other."""
    if given := [name for name in CT_OPTIONS if options[name]]:
        raise UsageError(
            f"{_flag(given[0])} is about CT data, and {options['src'][0]} holds none that is recognised; "
            "name what it is with --layout"
        )


def print_unkept(result: PackResult) -> None:
    """Paths of CT data may name patients: here is the only place where those of broken files are said."""
    for path, reason in result.broken[1:_SHOWN]:
        click.echo(f"    {path}: {reason}", err=True)
    if result.skipped or result.broken:
        said = "report.json has the reasons; paths are not kept: --dry-run --check header tells them all"
        click.echo(f"  {said}", err=True)
