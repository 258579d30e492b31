"""The command line: one thin module per command, loaded when it is called.

A command module exposes `command`, a click command. Listing the commands imports none of them, so
`packer --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from packer import __version__
from packer.errors import PackerError, UsageError

#: Command → what `packer --help` says of it (the module is `packer.cli.<command>`).
COMMANDS = {
    "shard": "Pack a folder of files (or a packed dataset) into shards.",
    "index": "Make tar shards that others wrote readable by index.",
    "info": "Say what a packed dataset holds.",
    "verify": "Check every sample of a packed dataset.",
    "unpack": "Restore the files of a packed dataset.",
    "stats": "Count classes and sizes, measure channel means.",
    "view": "Write one HTML page that shows the dataset.",
}


class _LazyGroup(click.Group):
    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"packer.cli.{name}").command
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise click.UsageError(str(error), ctx) from error
        except PackerError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="packer")
def cli() -> None:
    """Pack a million small files into shards; keep the GPU fed.

    \b
      packer shard /data/imagenet out/     pack
      packer verify out/                   check
      packer info out/                     look
    """


def main() -> None:
    """Run the command line; the `packer` program."""
    try:
        cli(prog_name="packer")
    except BrokenPipeError:  # `packer info out/ | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
