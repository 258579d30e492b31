"""The tuning benchmark runs, and its table says what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_tune.py"), *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_a_case_is_tuned_measured_and_diagnosed(tmp_path: Path) -> None:
    options = ("--seconds", "0.05", "--most", "1", "--json", "tune.json", "--markdown", "tuning.md")
    done = run("--cases", "sleep-bound reads", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [found] = json.loads((tmp_path / "tune.json").read_text())["cases"].values()
    assert found["chosen"] == 1 and found["true_limit"] == "storage" and set(found["grid"]) == {"None 1"}
    text = (tmp_path / "tuning.md").read_text()
    assert "| sleep-bound reads | 1 | 1 | 100% |" in text and "| sleep-bound reads | 1 | 1 | 100% |" in done.stdout


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    assert "no such case: nonsense" in run("--cases", "nonsense", cwd=tmp_path).stderr
    assert "data without --data" in run("--cases", "data", cwd=tmp_path).stderr
