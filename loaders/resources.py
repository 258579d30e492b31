"""What this process has to work with: CPUs, memory, shared memory, open files, the disk, GPUs.

>>> resources().cpus.usable > 0
True

Nothing here imports torch or starts a process; all of it together takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from packer.limits import CpuBudget, control_groups, cpu_budget, cpu_count, read_text, usable_cpus

__all__ = ["CpuBudget", "Disk", "Gpu", "GpuWatch", "Resources", "cpu_budget", "cpu_count", "disk_of", "gpus",
           "memory_headroom", "open_files_limit", "resources", "shm_free", "usable_cpus"]

DiskKind: TypeAlias = Literal["solid state", "rotating", "network", "memory", "unknown"]

SHM = "/dev/shm"  # noqa: S108 - where shared memory is mounted, not a temporary file
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "glusterfs", "wekafs", "afs", "fuse.")
_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Disk:
    """Where a folder lies.

    Attributes:
        kind: as far as the kernel knows: virtual disks may call themselves rotating.
        filesystem: its type, such as "ext4" or "nfs4".
        free_bytes: room for this user.
    """

    kind: DiskKind
    filesystem: str
    free_bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees.

    Attributes:
        name: the model.
        memory_bytes: all of its memory.
    """

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Resources:
    """See `resources`.

    Attributes:
        cpus: what limits the CPUs; `cpus.usable` is their number, possibly a fraction.
        memory_bytes: what can be taken without swapping or being killed.
        shm_bytes: room in /dev/shm, through which worker processes of torch hand over batches; None: there is none.
        open_files: the most files that this process may have open; None: no limit.
        disk: where the data lie, if a path was given and exists.
        gpus: visible GPUs.
    """

    cpus: CpuBudget
    memory_bytes: int
    shm_bytes: int | None
    open_files: int | None
    disk: Disk | None
    gpus: tuple[Gpu, ...]

    def lines(self) -> list[tuple[str, str]]:
        """(what, how much) for people to read."""
        found = [
            ("CPUs", f"{self.cpus.usable:g} ({self.cpus.reason})"),
            ("memory free", f"{self.memory_bytes / 1e9:.1f} GB"),
            ("shared memory free", "there is none" if self.shm_bytes is None else f"{self.shm_bytes / 1e9:.1f} GB"),
            ("open files", "no limit" if self.open_files is None else f"{self.open_files:,}"),
        ]
        if self.disk is not None:
            disk = self.disk
            found.append(("disk", f"{disk.kind} ({disk.filesystem}), {disk.free_bytes / 1e9:.0f} GB free"))
        names = ", ".join(f"{gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB" for gpu in self.gpus)
        return [*found, ("GPU", names or "none")]


def resources(path: str | os.PathLike[str] | None = None, root: str = "/") -> Resources:
    """What this process may use.

    Args:
        path: where the data lie.
        root: where `/proc`, `/sys` and `/dev` are looked for.
    """
    return Resources(
        cpu_budget(root), memory_headroom(root), shm_free(root), open_files_limit(),
        None if path is None else disk_of(path, root), gpus(),
    )


# ---------------------------------------------------------------- memory and files


def memory_headroom(root: str = "/") -> int:
    """Bytes that can be taken without swapping: what the kernel has left, within the control groups' limits.

    A group's page cache counts as free where the kernel would drop it (`inactive_file`).
    """
    known = re.search(r"^MemAvailable:\s+(\d+)", read_text(os.path.join(root, "proc/meminfo")) or "", re.MULTILINE)
    if known is None:  # macOS: all there is, for want of better
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        free = int(known[1]) * 1024
    for folder in control_groups("memory", root):
        room = _group_room(folder)
        free = free if room is None else min(free, room)
    return free


def _group_room(folder: str) -> int | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = (
            (read_text(os.path.join(folder, name)) or "").strip() for name in (limit_name, used_name)
        )
        if limit.isdigit() and used.isdigit():
            stat = read_text(os.path.join(folder, "memory.stat")) or ""
            cache = re.search(rf"^{cache_name} (\d+)", stat, re.MULTILINE)
            return max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0))
    return None


def shm_free(root: str = "/") -> int | None:
    """Bytes free in /dev/shm; None where there is none."""
    try:
        return shutil.disk_usage(os.path.join(root, SHM.lstrip("/"))).free
    except OSError:
        return None


def open_files_limit() -> int | None:
    """The most files this process may open (the hard limit, up to which it may raise its own)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


# ---------------------------------------------------------------- disks


def disk_of(path: str | os.PathLike[str], root: str = "/") -> Disk | None:
    """The disk that a file or folder lies on; None if there is no such path."""
    try:
        free = shutil.disk_usage(path).free
        device = os.stat(path).st_dev
    except OSError:
        return None
    filesystem = _filesystem_at(os.path.realpath(path), root)
    if filesystem.startswith(_NETWORK):
        return Disk("network", filesystem, free)
    if filesystem in _MEMORY:
        return Disk("memory", filesystem, free)
    rotates = _rotates(f"{os.major(device)}:{os.minor(device)}", root)
    kind: DiskKind = "unknown" if rotates is None else "rotating" if rotates else "solid state"
    return Disk(kind, filesystem, free)


def _filesystem_at(path: str, root: str) -> str:
    """The type of the file system that is mounted deepest above a path."""
    best, found = -1, "unknown"
    for line in (read_text(os.path.join(root, "proc/self/mountinfo")) or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two on one point the later hides the earlier
            best, found = len(point), kind[0]
    return found


def _rotates(device: str, root: str) -> bool | None:
    """Whether a block device, or the one that the partition is of, says that it rotates."""
    folder = os.path.realpath(os.path.join(root, "sys/dev/block", device))
    for place in (folder, os.path.dirname(folder)):
        text = read_text(os.path.join(place, "queue/rotational"))
        if text is not None:
            return text.strip() == "1"
    return None


# ---------------------------------------------------------------- GPUs


def _nvml() -> Any | None:
    """NVML, started; None where the package or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handles(nvml: Any) -> list[Any]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order."""
    every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return every
    words = [word.strip() for word in visible.split(",")]
    if not all(word.isdigit() for word in words):  # UUIDs, MIG slices
        return every if visible else []
    return [every[int(word)] for word in words if int(word) < len(every)]


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that NVML knows; empty without GPU, driver, or `pip install 'packer-loaders[tune]'`."""
    nvml = _nvml()
    if nvml is None:
        return ()
    found = []
    try:
        for handle in _handles(nvml):
            name = nvml.nvmlDeviceGetName(handle)
            found.append(Gpu(name.decode() if isinstance(name, bytes) else name,
                             int(nvml.nvmlDeviceGetMemoryInfo(handle).total)))
    except nvml.NVMLError:
        pass
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return tuple(found)


class GpuWatch:
    """Asks how busy the visible GPUs are; a context manager.

    >>> with GpuWatch() as watch:
    ...     busy = watch.utilization()
    >>> busy is None or 0 <= busy <= 1
    True
    """

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._handles = [] if self._nvml is None else _handles(self._nvml)

    def utilization(self) -> float | None:
        """Share of the last moment in which a kernel ran, mean of all visible GPUs; None where nobody knows."""
        if self._nvml is None or not self._handles:
            return None
        try:
            rates = [float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in self._handles]
        except self._nvml.NVMLError:
            return None
        return sum(rates) / len(rates) / 100

    def close(self) -> None:
        """Let go of NVML."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def __enter__(self) -> GpuWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
