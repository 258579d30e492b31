"""What this process may use: on made-up trees of /proc and /sys, and in real control groups where one can be made."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from loaders import resources as res
from packer.limits import CpuBudget, control_groups, cpu_budget, cpu_count, cpu_quota

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def tree(root: Path, files: Mapping[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return os.fspath(root)


def budget(root: str = "/nowhere", affinity: int = 64, **environ: str) -> CpuBudget:
    return cpu_budget(root, environ, affinity)


# ---------------------------------------------------------------- CPUs


def test_the_tightest_quota_of_all_parents_counts_v2(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/jobs/mine\n", "proc/self/mountinfo": V2,
        "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n", "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
    })
    assert cpu_quota(root) == 1.5
    assert budget(root).usable == 1.5 and budget(root, affinity=1).usable == 1
    assert budget(root, LOCAL_WORLD_SIZE="4").usable == 0.375
    assert "quota of 1.5" in budget(root).reason


def test_quotas_v1(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:cpu,cpuacct:/a/b\n2:memory:/a\n0::/\n", "proc/self/mountinfo": V1,
        "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
    })
    assert cpu_quota(root) == 2.5


def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path) -> None:
    mounts = "31 23 0:27 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:cpu:/docker/abc/inner\n", "proc/self/mountinfo": mounts,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    })
    folders = [os.path.relpath(folder, root) for folder in control_groups("cpu", root)]
    assert folders == ["sys/fs/cgroup/cpu/inner", "sys/fs/cgroup/cpu"]
    assert cpu_quota(root) == 0.5


@pytest.mark.parametrize("text", ["", "max", "max 100000", "-1 100000", "100000 0", "ten 5", "100000"])
def test_what_is_no_quota_limits_nothing(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": text})
    assert cpu_quota(root) is None


def test_no_proc_at_all(tmp_path: Path) -> None:
    assert cpu_quota(str(tmp_path)) is None
    assert cpu_budget(str(tmp_path), {}, 3).usable == 3


@pytest.mark.parametrize(
    ("environ", "affinity", "want"),
    [
        ({}, 64, 64),
        ({"SLURM_CPUS_PER_TASK": "8"}, 64, 8),  # sbatch: one task
        ({"SLURM_CPUS_PER_TASK": "16", "LOCAL_WORLD_SIZE": "8"}, 64, 2),  # torchrun within one task
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 64, 8),  # srun, not bound
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 8, 8),  # srun, bound to its CPUs
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_TASKS_PER_NODE": "2", "LOCAL_WORLD_SIZE": "4"}, 8, 4),
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_STEP_TASKS_PER_NODE": "4"}, 64, 8),
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_STEP_TASKS_PER_NODE": "4(x2),16", "SLURM_NODEID": "2"}, 64, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 64, 16),
        ({"LOCAL_WORLD_SIZE": "many", "SLURM_CPUS_PER_TASK": "-1", "SLURM_NODEID": "x"}, 64, 64),
        ({"LOCAL_WORLD_SIZE": "128"}, 64, 0.5),
    ],
)
def test_slurm_and_ranks(environ: dict[str, str], affinity: int, want: float) -> None:
    assert cpu_budget("/nowhere", environ, affinity).usable == want
    assert cpu_budget("/nowhere", environ, affinity).reason


def test_here_it_is_at_most_the_affinity_mask() -> None:
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))
    assert 0 < res.usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A control group of half a CPU; skips where none can be made."""
    name = f"packer-test-{uuid.uuid4().hex[:8]}"
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (v1 if (v1 / "cpu.cfs_quota_us").exists() or v1.is_dir() else v2) / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text("50000 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text("50000")
        except OSError as error:
            pytest.skip(f"no quota can be set: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_in_a_real_control_group(real_group: Path) -> None:
    program = (
        "import os, sys\n"
        f"open({os.fspath(real_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from packer.limits import cpu_budget\n"
        "print(cpu_budget(environ={}).usable)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 0.5


# ---------------------------------------------------------------- memory, files, disks


def test_memory_is_what_the_tightest_group_leaves_with_its_page_cache(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2, "proc/meminfo": "MemAvailable:  1000 kB\n",
        "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "10",
        "sys/fs/cgroup/a/memory.max": "700", "sys/fs/cgroup/a/memory.current": "600",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50\n",
    })
    assert res.memory_headroom(root) == 150
    (tmp_path / "sys/fs/cgroup/a/memory.max").unlink()
    assert res.memory_headroom(root) == 1000 * 1024


def test_memory_v1(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": "2:memory:/a\n", "proc/self/mountinfo": V1, "proc/meminfo": "MemAvailable:  1000 kB\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "9000",
    })
    assert res.memory_headroom(root) == 0


def test_shared_memory_may_be_missing(tmp_path: Path) -> None:
    assert res.shm_free(str(tmp_path)) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert res.shm_free(str(tmp_path)) is not None


@pytest.mark.parametrize(
    ("filesystem", "rotational", "kind"),
    [("nfs4", None, "network"), ("fuse.gcsfuse", None, "network"), ("tmpfs", None, "memory"),
     ("ext4", "0\n", "solid state"), ("ext4", "1\n", "rotating"), ("overlay", None, "unknown")],
)
def test_disks(tmp_path: Path, filesystem: str, rotational: str | None, kind: str) -> None:
    data = tmp_path / "data dir"
    data.mkdir()
    point = os.fspath(data).replace(" ", "\\040")
    files = {"proc/self/mountinfo": f"1 0 8:1 / / rw - ext3 /dev/x rw\n2 1 8:2 / {point} rw - {filesystem} src rw\n"}
    if rotational is not None:  # of a partition the disk knows
        device = os.stat(data).st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        files[f"sys/devices/disk/part/{numbers}"] = ""
        files["sys/devices/disk/queue/rotational"] = rotational
        (tmp_path / "sys/dev/block").mkdir(parents=True)
        (tmp_path / "sys/dev/block" / numbers).symlink_to(tmp_path / "sys/devices/disk/part")
    found = res.disk_of(data, tree(tmp_path, files))
    assert found is not None and (found.kind, found.filesystem) == (kind, filesystem) and found.free_bytes > 0


def test_no_such_folder_has_no_disk() -> None:
    assert res.disk_of("/no/such/folder") is None


def test_without_nvml_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert res.gpus() == ()
    with res.GpuWatch() as watch:
        assert watch.utilization() is None


class FakeNvml:
    """Two GPUs; the driver may be gone."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, works: bool = True) -> None:
        self.works = works
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return [b"old bytes", "new text"][handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return type("Info", (), {"total": (handle + 1) * 10**9})

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        return type("Rates", (), {"gpu": [20, 60][handle]})


@pytest.mark.parametrize(
    ("visible", "names", "busy"),
    [(None, ["old bytes", "new text"], 0.4), ("1", ["new text"], 0.6), ("1,0", ["new text", "old bytes"], 0.4),
     ("", [], None), ("7", [], None), ("GPU-8f3", ["old bytes", "new text"], 0.4)],
)
def test_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str], busy: float | None
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in res.gpus()] == names
    with res.GpuWatch() as watch:
        assert watch.utilization() == busy
    assert nvml.open == 0


def test_a_driver_that_does_not_run_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(works=False))
    assert res.gpus() == ()


def test_all_of_it_in_words(tmp_path: Path) -> None:
    lines = dict(res.resources(tmp_path).lines())
    assert list(lines) == ["CPUs", "memory free", "shared memory free", "open files", "disk", "GPU"]
    assert all(lines.values())
