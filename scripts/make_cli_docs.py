"""Write docs/cli.md from the program's own --help, so that the two never differ.

python scripts/make_cli_docs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from packer.cli import cli

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 100


def contexts(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """The command and all that are below it, in the order of --help."""
    settings = {**command.context_settings, "terminal_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None and not found.hidden:
                yield from contexts(found, below, context)


def cli_docs() -> str:
    """The text of docs/cli.md."""
    parts = ["# The command line\n\nWritten by `scripts/make_cli_docs.py` from each command's `--help`.\n"]
    for context in contexts(cli, "packer"):
        text = context.command.get_help(context).strip("\n")
        parts.append(f"## {context.command_path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(cli_docs(), encoding="utf-8")
