"""The command line: one thin module per command, loaded when it is called.

A command module exposes `command`, a click command. Listing the commands imports none of them, so
`packer --help` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from types import FrameType
from typing import Any, TextIO

import click

from packer import __version__
from packer.errors import PackerError, UsageError

#: Command → what `packer --help` says of it (the module is `packer.cli.<command>`).
COMMANDS = {
    "shard": "Pack a folder of files (or a packed dataset) into shards.",
    "index": "Make shards that others wrote readable by index.",
    "info": "Say what a packed dataset holds.",
    "verify": "Check every sample of a packed dataset.",
    "unpack": "Restore the files of a packed dataset.",
    "stats": "Count classes and sizes, measure channel means.",
    "view": "Write one HTML page that shows the dataset.",
    "tune": "Find how many workers keep the GPU fed, and say why.",
    "doctor": "Say why the GPU is idle, and what would help.",
}

#: Exit statuses as a shell gives them to a program that such a signal ended.
INTERRUPTED, READER_LEFT = 128 + signal.SIGINT, 128 + signal.SIGPIPE


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

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _in_words():  # --help and --version print while options are read
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _in_words():
                return super().invoke(ctx)
        except UsageError as error:
            name = ctx.invoked_subcommand
            command = self.get_command(ctx, name) if name else None
            where = click.Context(command, parent=ctx, info_name=name) if command else ctx
            raise click.UsageError(str(error), where) from error
        except PackerError as error:
            raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Ctrl-C, a full disk, a reader that left: each ends with a short message and its own exit status."""
    try:
        yield
    except KeyboardInterrupt as error:
        click.echo(f"\ninterrupted{f'; {error}' if str(error) else ''}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from error
    except OSError as error:
        printed = _printed_to(error)
        if printed is None:
            raise click.ClickException(_reason(error)) from error
        _lead_nowhere(printed)
        if isinstance(error, BrokenPipeError):  # `packer info out/ | head`
            raise click.exceptions.Exit(READER_LEFT) from error
        if printed is sys.stderr:
            raise click.exceptions.Exit(1) from error
        raise click.ClickException(f"cannot write to standard output: {error.strerror}") from error


def _printed_to(error: OSError) -> TextIO | None:
    """The stream that could not be printed to, or None for an error of anything else."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is not click.echo.__code__:
        return None
    return sys.stderr if trace.tb_frame.f_locals["err"] else sys.stdout


def _lead_nowhere(stream: TextIO) -> None:
    """What was printed cannot be written, and Python tries again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _reason(error: OSError) -> str:
    try:
        os.getcwd()
    except OSError:
        return "the working directory does not exist any more; change to one that does, or give absolute paths"
    return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else str(error)


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
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started this wants none
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        cli(prog_name="packer")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError:  # click's own last words, to standard error
        _lead_nowhere(sys.stderr)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: Python's own end is not to be broken off


def _interrupt_once(_number: int, _frame: FrameType | None) -> None:
    """Ctrl-C counts once: pressed again and again, it would break off the tidying up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _open_closed_streams() -> None:
    """Started with `2>&-`, the next file opened would take the stream's place, and Python has no stream to print to."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
