"""How many CPUs this process may use: affinity, control groups, SLURM, and the ranks that it shares them with.

`os.cpu_count()` counts the machine's. In a container, a batch job or under `torchrun` a process has
fewer, often a fraction: 16 threads on a quota of 1.5 CPUs are stopped by the kernel most of the time.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class CpuBudget:
    """The limits on this process's CPUs, each None where there is none.

    Attributes:
        affinity: CPUs in the affinity mask (`taskset`, cpusets).
        quota: CPUs that the control group's quota and those of all its parents come to.
        slurm: CPUs that SLURM gave this task, or the whole job on this node where it does not say.
        ranks: training processes on this machine that share `affinity` and `quota`.
        ranks_of_slurm: those among them that share `slurm`.

    >>> CpuBudget(affinity=64, quota=12.0, slurm=None, ranks=8).usable
    1.5
    """

    affinity: int
    quota: float | None = None
    slurm: int | None = None
    ranks: int = 1
    ranks_of_slurm: int = 1

    @property
    def usable(self) -> float:
        """CPUs for this process alone, a fraction where it shares one."""
        shared = min(self.affinity, math.inf if self.quota is None else self.quota) / self.ranks
        return shared if self.slurm is None else min(shared, self.slurm / self.ranks_of_slurm)

    @property
    def reason(self) -> str:
        """Which of the limits it is, in words."""
        share = f", shared by {self.ranks} ranks" if self.ranks > 1 else ""
        if self.slurm is not None and self.slurm / self.ranks_of_slurm < self._without_slurm:
            return f"SLURM gives {self.slurm}" + (share if self.ranks_of_slurm > 1 else "")
        if self.quota is not None and self.quota < self.affinity:
            return f"control group quota of {self.quota:g}{share}"
        return f"{self.affinity} in the affinity mask{share}"

    @property
    def _without_slurm(self) -> float:
        return min(self.affinity, math.inf if self.quota is None else self.quota) / self.ranks


def cpu_budget(
    root: str = "/", environ: Mapping[str, str] | None = None, affinity: int | None = None
) -> CpuBudget:
    """What limits this process's CPUs.

    Args:
        root: where `/proc` and `/sys` are looked for.
        environ: the environment; None for this process's.
        affinity: CPUs in the affinity mask; None to ask the kernel.
    """
    environ = os.environ if environ is None else environ
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    tasks = _slurm_tasks(environ)
    ranks = next((count for name in _LOCAL_RANKS if (count := _whole(environ, name))), tasks)
    per_task = _whole(environ, "SLURM_CPUS_PER_TASK")
    slurm, sharing = per_task, max(1, ranks // tasks)
    if per_task is None:
        slurm, sharing = _whole(environ, "SLURM_CPUS_ON_NODE"), ranks
    elif tasks > 1 and affinity <= per_task:  # bound: the mask is this task's own, not the node's
        ranks = sharing
    return CpuBudget(affinity, cpu_quota(root), slurm, ranks, sharing)


def usable_cpus() -> float:
    """CPUs that this process may keep busy, possibly a fraction. See `CpuBudget`."""
    return cpu_budget().usable


def cpu_count() -> int:
    """Whole CPUs that this process may keep busy, at least 1."""
    return max(1, int(usable_cpus()))


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    """A positive whole number in the environment."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of this SLURM step on this node: `4(x2),3` is 4 on the first two nodes, 3 on the third."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * min(int(times or 1), 100_000)
    node = environ.get("SLURM_NODEID", "0")
    place = int(node) if node.isascii() and node.isdigit() else 0
    return max(1, counts[place]) if place < len(counts) else 1


# ---------------------------------------------------------------- control groups


def cpu_quota(root: str = "/") -> float | None:
    """CPUs that the quotas of this process's control group and of all groups above it allow; None: no quota."""
    return min((quota for folder in control_groups("cpu", root) if (quota := _quota(folder))), default=None)


def _quota(folder: str) -> float | None:
    words = (read_text(os.path.join(folder, "cpu.max")) or "").split()  # version 2
    if len(words) != 2:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [(read_text(os.path.join(folder, name)) or "").strip() for name in names]
    if not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:  # "max", "-1", nothing
        return None
    return int(words[0]) / int(words[1])


def control_groups(controller: str, root: str = "/") -> Iterator[str]:
    """The folders of this process's control groups, each followed by those above it, of both versions.

    Args:
        controller: "cpu" or "memory".
        root: where `/proc` and `/sys` are looked for.
    """
    paths = {}
    for line in (read_text(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            paths["cgroup2"] = path
        elif controller in names.split(","):
            paths["cgroup"] = path
    for kind, mounted, point in _mounts(controller, root):
        if kind in paths:
            yield from _upwards(os.path.join(root, point.lstrip("/")), _below(paths[kind], mounted))


def _mounts(controller: str, root: str) -> Iterator[tuple[str, str, str]]:
    """(file system type, the group that is mounted, where) of each mounted hierarchy with this controller."""
    text = read_text(os.path.join(root, "proc/self/mountinfo"))
    if text is None:
        yield "cgroup2", "/", "/sys/fs/cgroup"
        return
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and controller in kind[2].split(",")):
            yield kind[0], fields[3], fields[4]


def _below(path: str, mounted: str) -> list[str]:
    """A group's path below the mounted group, as names; nothing where it lies elsewhere, as in some containers."""
    names, top = ([name for name in text.split("/") if name] for text in (path, mounted))
    return names[len(top) :] if names[: len(top)] == top and ".." not in names else []


def _upwards(point: str, names: list[str]) -> Iterator[str]:
    for depth in range(len(names), -1, -1):
        yield os.path.join(point, *names[:depth])


def read_text(path: str) -> str | None:
    """A small file of the kernel's, or None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return None
