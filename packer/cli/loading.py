"""What `tune` and `doctor` are pointed at: a dataset and how it is read, or a loader of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def loading(function: F) -> F:
    """The argument OUT, and the options that say how it is read."""
    decorators = [
        click.argument("path", metavar="[OUT]", required=False, type=click.Path(exists=True, file_okay=False)),
        click.option("--loader", metavar="MODULE:FUNCTION",
                     help="Instead of OUT: a function that takes num_workers (and may take engine and prefetch) and "
                     "gives a loader, torch's or any other."),
        click.option("--split", default="train", show_default=True, metavar="NAME", help="Which split."),
        click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, metavar="N",
                     help="Samples in a batch."),
        click.option("--size", type=click.IntRange(1), default=224, show_default=True, metavar="PIXELS",
                     help="Crop and resize pictures to this."),
        click.option("--transform", metavar="MODULE:NAME",
                     help="A transform of yours instead of the crop; 'none' for pictures as they are."),
        click.option("--normalize", is_flag=True, help="Let workers make float32, instead of uint8 for the device."),
        click.option("--engine", type=click.Choice(["auto", "thread", "process"]), default="auto", show_default=True,
                     help="Try this kind of worker only."),
        click.option("--step-ms", type=click.FloatRange(0, min_open=True), metavar="MS",
                     help="How long a training step takes; without it, as much as can be had is wanted."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
