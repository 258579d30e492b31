"""The program `packer`, made to stand still in the middle of its work, so that no test must guess when that is.

    python tests/standing.py GATE CALLS MODULE:CLASS.METHOD shard …

In every process (workers are forked, and count for themselves) the method works for so many calls. Before the next one
the process leaves a note, `GATE.<pid>`, and waits until the file GATE is gone.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any

sys.path[0] = os.path.dirname(sys.path[0])  # the program beside these tests, as `python -m packer` finds it

from packer.cli import main  # noqa: E402

#: A process that a test forgot ends by itself.
LONGEST_S = 1200.0


def stand_before(gate: str, calls: int, where: str) -> None:
    """Let a method stand still after so many calls."""
    module, _, path = where.partition(":")
    class_name, _, name = path.partition(".")
    owner = getattr(import_module(module), class_name)
    method = getattr(owner, name)
    left = calls

    def standing(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 and os.path.exists(gate):
            _wait(gate)
        return method(*args, **options)

    setattr(owner, name, standing)


def _wait(gate: str) -> None:
    with open(f"{gate}.{os.getpid()}", "w"):
        pass
    end = time.monotonic() + LONGEST_S
    while os.path.exists(gate):
        if time.monotonic() > end:
            os._exit(99)
        time.sleep(0.02)


if __name__ == "__main__":
    stand_before(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    del sys.argv[1:4]
    main()
