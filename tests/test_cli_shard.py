"""`packer shard` as a user types it: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from conftest import PATIENCE_S

from packer.cli.options import Bytes, Fold, SplitFractions, counted, human_bytes
from packer.manifest import FILE, Manifest
from packer.packed import Packed

ROOT = Path(__file__).resolve().parent.parent

Run = Callable[..., Result]
Folders = Callable[..., Path]


@pytest.fixture
def src(image_folder: Folders) -> Path:
    return image_folder("src", splits=("train", "val"), per_class=4)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------- what is said


def test_the_rule_and_the_summary_go_to_stderr_and_nothing_to_stdout(
    src: Path, tmp_path: Path, run_packer: Run
) -> None:
    (src / "train" / "notes.txt").write_text("x")
    result = run_packer("shard", src, tmp_path / "out", "--shard-samples", "4")
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("layout: splits (the top-level folders are train, val")
    assert lines[1].startswith("packed 16 samples in 2 classes into 4 shards, ")
    assert lines[1].endswith("/s)")
    assert "samples/s" in lines[1]
    assert lines[2:] == [
        "  skipped 1 × not an image by its extension",
        f"  all of them are listed in {tmp_path / 'out' / 'report.json'}",
        f"next: packer verify {tmp_path / 'out'}",
    ]


def test_the_next_command_can_be_pasted_whatever_the_folder_s_name(src: Path, tmp_path: Path, run_packer: Run) -> None:
    result = run_packer("shard", src, tmp_path / "my out; rm -rf")
    assert result.stderr.splitlines()[-1] == f"next: packer verify '{tmp_path}/my out; rm -rf'"


def test_quiet_says_nothing(src: Path, tmp_path: Path, run_packer: Run) -> None:
    assert run_packer("shard", src, tmp_path / "out", "--quiet").output == ""
    assert run_packer("shard", src, tmp_path / "out", "-q").output == ""


def test_json_on_stdout_is_pure(src: Path, tmp_path: Path, run_packer: Run) -> None:
    (src / "train" / "notes.txt").write_text("x")
    (src / "val/cat/bad.jpg").write_bytes(b"bad")
    arguments = ("shard", src, tmp_path / "out", "--json", "--on-error", "skip", "--shard-samples", "4")
    value = json.loads(run_packer(*arguments).stdout)
    manifest = Manifest.load(str(tmp_path / "out"))
    assert value["samples"] == manifest.samples == 16
    assert value["bytes"] == manifest.bytes
    assert value["shards"] == len(list((tmp_path / "out").glob("*.tar")))
    assert value["splits"] == {"train": 8, "val": 8}
    assert (value["classes"], value["broken"], value["already_complete"]) == (2, 1, False)
    assert value["skipped"] == {"not an image by its extension": 1}
    again = json.loads(run_packer(*arguments).stdout)
    assert again["already_complete"] is True
    assert {k: again[k] for k in ("samples", "skipped", "broken")} == {
        k: value[k] for k in ("samples", "skipped", "broken")
    }


def test_already_complete_is_a_success(src: Path, tmp_path: Path, run_packer: Run) -> None:
    run_packer("shard", src, tmp_path / "out")
    result = run_packer("shard", src, tmp_path / "out", "-j", "2")
    assert f"already complete: {tmp_path / 'out'} holds these 16 samples" in result.stderr


def test_broken_pictures_are_one_line_with_the_first_and_all_are_in_the_report(
    src: Path, tmp_path: Path, run_packer: Run
) -> None:
    for i in range(5):
        (src / "train/cat" / f"zz-{i}.jpg").write_bytes(b"bad %d" % i)
    refused = run_packer("shard", src, tmp_path / "out", exit_code=1)
    assert "not packed" in refused.stderr
    assert "begins with b'bad " in refused.stderr
    result = run_packer("shard", src, tmp_path / "out", "--on-error", "skip")
    (line,) = [line for line in result.stderr.splitlines() if "left out" in line]
    assert line.startswith("  left out 5 broken files, first train/cat/zz-")
    report = json.loads((tmp_path / "out" / "report.json").read_text())["skipped"]
    assert {entry["path"] for entry in report if entry["kind"] == "broken"} == {
        f"train/cat/zz-{i}.jpg" for i in range(5)
    }


def test_every_file_that_cannot_become_a_sample_is_listed_before_a_byte_is_written(
    src: Path, tmp_path: Path, run_packer: Run
) -> None:
    for i in range(25):
        (src / "train/cat" / f"empty-{i:02}.jpg").touch()
    result = run_packer("shard", src, tmp_path / "out", exit_code=1)
    assert "25 file(s) cannot become samples; nothing was written" in result.stderr
    assert "empty-00.jpg: empty file (0 bytes)" in result.stderr
    assert "… and 5 more" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_warning_is_said_once(src: Path, tmp_path: Path, run_packer: Run) -> None:
    result = run_packer("shard", src, tmp_path / "out", "--shard-size", "2kB")
    assert result.stderr.count("larger than --shard-size; each gets a shard of its own") == 1


def test_a_new_split_of_what_has_splits_is_said(src: Path, tmp_path: Path, run_packer: Run) -> None:
    words = "warning: --split divides all samples anew: the source's own splits train, val are given up"
    assert words not in run_packer("shard", src, tmp_path / "kept").stderr
    for source in (src, tmp_path / "kept"):
        result = run_packer("shard", source, tmp_path / f"new-{source.name}", "--split", "0.5,0.5")
        assert result.stderr.count(words) == 1
    one = run_packer("shard", src / "train", tmp_path / "one", "--split", "0.5,0.5")
    assert "given up" not in one.stderr


def test_what_resizing_did_is_stated_and_counted(src: Path, tmp_path: Path, run_packer: Run) -> None:
    result = run_packer("shard", src, tmp_path / "out", "--resize", "32", "--jpeg-quality", "80")
    assert "  8 × kept as they were: short side at most 32" in result.stderr
    assert "  8 × scaled down to a short side of 32 (PNG)" in result.stderr
    result = run_packer("shard", src, tmp_path / "small", "--resize", "16", "--jpeg-quality", "80")
    assert "  8 × scaled down to a short side of 16 (JPEG, quality 80, 4:2:0)" in result.stderr


# ---------------------------------------------------------------- dry run


def test_a_dry_run_prints_the_plan_and_writes_nothing(src: Path, tmp_path: Path, run_packer: Run) -> None:
    (src / "val/cat/empty.jpg").touch()
    (src / "train" / "notes.txt").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    result = run_packer("shard", src, tmp_path / "out", "--dry-run", "--shard-samples", "4", exit_code=1)
    assert sorted(tmp_path.rglob("*")) == before
    assert "samples  16 in 2 classes" in result.stdout
    assert "fields   jpg, png, cls" in result.stdout
    assert "split    train: 8 samples, 2 shards, " in result.stdout
    assert "skipped  1 × not an image by its extension" in result.stdout
    assert "problem  val/cat/empty.jpg: empty file (0 bytes)" in result.stdout
    assert (
        "1 problem found by name and size (--check header looks into every picture); nothing was written"
        in result.stdout
    )


@pytest.mark.parametrize("check", ["header", "decode"])
def test_a_dry_run_looks_into_every_picture_when_asked(src: Path, tmp_path: Path, run_packer: Run, check: str) -> None:
    pictures = sorted(p for p in (src / "train").rglob("*.*") if p.is_file())
    cut, text = pictures[0], pictures[-1]
    cut.write_bytes(cut.read_bytes()[:-20])
    text.write_bytes(b"no picture")
    assert "0 problems" in run_packer("shard", src, tmp_path / "out", "--dry-run").stdout
    result = run_packer("shard", src, tmp_path / "out", "--dry-run", "--check", check, "--json", exit_code=1)
    named = [path for path, _ in json.loads(result.stdout)["problems"]]
    assert named == sorted([str(cut.relative_to(src)), str(text.relative_to(src))])
    assert (
        run_packer("shard", src, tmp_path / "out", "--dry-run", "--check", check, "--on-error", "skip").exit_code == 0
    )
    assert not (tmp_path / "out").exists()


def test_a_dry_run_foretells_the_very_sizes(src: Path, tmp_path: Path, run_packer: Run) -> None:
    plan = json.loads(run_packer("shard", src, tmp_path / "out", "--dry-run", "--json", "--shard-size", "9kB").stdout)
    run_packer("shard", src, tmp_path / "out", "--shard-size", "9kB")
    manifest = Manifest.load(str(tmp_path / "out"))
    shards = [(split.name, s.samples, s.bytes) for split in manifest.splits.values() for s in split.shards]
    assert [(s["split"], s["samples"], s["bytes"]) for s in plan["shards"]] == shards
    assert all(size <= 9000 for _, _, size in shards)
    assert (plan["samples"], plan["bytes"]) == (manifest.samples, manifest.bytes)


# ---------------------------------------------------------------- refusals


def test_out_inside_src_is_refused_also_through_links(src: Path, tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "link").symlink_to(src)
    for out in (src / "out", src, tmp_path / "link" / "out"):
        result = run_packer("shard", src, out, exit_code=2)
        assert "lies inside SRC" in result.stderr
    assert not (src / "out").exists()


def test_src_inside_out_is_refused_because_out_is_not_empty(src: Path, tmp_path: Path, run_packer: Run) -> None:
    result = run_packer("shard", src, tmp_path, exit_code=1)
    assert "is not empty (src)" in result.stderr
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{src}",), "Missing argument"),
        (("nowhere", "{out}"), "does not exist"),
        (("{src}", "{file}"), "is a file"),
        (("{src}", "{src}", "{out}"), "several sources are merged when each is a packed dataset"),
        (("{src}", "{out}", "--format", "zip"), "'zip' is not"),
        (("{src}", "{out}", "--shard-size", "lots"), "is no size"),
        (("{src}", "{out}", "--shard-size", "0"), "--shard-size must be positive"),
        (("{src}", "{out}", "--fold", "0/5"), "is no fold"),
        (("{src}", "{out}", "--fold", "6/5"), "is no fold"),
        (("{src}", "{out}", "--split", "0.5,0.6"), "add up to 1"),
        (("{src}", "{out}", "--split", "half,half"), "name=fraction"),
        (("{src}", "{out}", "--split-exact"), "give --split as well"),
        (("{src}", "{out}", "--limit", "0"), "0 is not in the range"),
        (("{src}", "{out}", "--workers", "0"), "0 is not in the range"),
        (("{src}", "{out}", "--jpeg-quality", "80"), "give --resize as well"),
        (("{src}", "{out}", "--resize", "0"), "0 is not in the range"),
        (("{src}", "{out}", "--keys", "{file}"), "lists no key"),
        (("{src}", "{out}", "--on-error", "ignore"), "is not one of"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    src: Path, tmp_path: Path, run_packer: Run, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").touch()
    places = {"src": str(src), "out": str(tmp_path / "out"), "file": str(tmp_path / "file")}
    result = run_packer("shard", *(argument.format(**places) for argument in arguments), exit_code=2)
    assert words in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_file_as_source_is_an_error(tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in run_packer("shard", tmp_path / "file", tmp_path / "out", exit_code=1).stderr


@pytest.mark.parametrize("option", ["--layout=flat", "--include=*.jpg", "--exclude=*.jpg", "--follow-symlinks"])
def test_options_about_files_are_refused_for_packed_datasets(
    src: Path, tmp_path: Path, run_packer: Run, option: str
) -> None:
    run_packer("shard", src, tmp_path / "out")
    result = run_packer("shard", tmp_path / "out", tmp_path / "again", option, exit_code=2)
    assert "is about folders of files" in result.stderr


# ---------------------------------------------------------------- sources that are packed, keys


def test_packing_merging_and_repacking_are_the_same_verb(src: Path, tmp_path: Path, run_packer: Run) -> None:
    run_packer("shard", src, tmp_path / "whole")
    for k in (1, 2):
        run_packer("shard", src, tmp_path / f"part-{k}", "--fold", f"{k}/2")
    run_packer("shard", tmp_path / "part-1", tmp_path / "part-2", tmp_path / "all")
    names = [shard.name for split in Manifest.load(str(tmp_path / "whole")).splits.values() for shard in split.shards]
    for name in [*names, "train.index.npy", "val.names"]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()


def test_a_list_of_keys_may_come_from_any_editor(src: Path, tmp_path: Path, run_packer: Run) -> None:
    (tmp_path / "keys.txt").write_bytes(b"train/cat/cat-0\r\n\r\nval/dog/dog-1.png\r\n")
    run_packer("shard", src, tmp_path / "out", "--keys", tmp_path / "keys.txt")
    keys = {split.key(i) for split in Packed(tmp_path / "out").values() for i in range(len(split))}
    assert keys == {"train/cat/cat-0", "val/dog/dog-1"}


def test_one_is_not_many() -> None:
    assert [counted(n, "class") for n in (0, 1, 2, 1000)] == ["0 classes", "1 class", "2 classes", "1,000 classes"]
    assert [counted(n, "broken file") for n in (1, 2)] == ["1 broken file", "2 broken files"]


def test_a_list_of_keys_may_come_from_find(src: Path, tmp_path: Path, run_packer: Run) -> None:
    listed = subprocess.run(["find", ".", "-name", "cat-*"], cwd=src, capture_output=True, check=True).stdout
    assert listed.startswith(b"./")
    (tmp_path / "gone.txt").write_bytes(listed)
    result = run_packer("shard", src, tmp_path / "out", "--drop-keys", tmp_path / "gone.txt")
    assert f"none of the {len(listed.splitlines())} withdrawn samples" in result.stderr
    keys = [split.key(i) for split in Packed(tmp_path / "out").values() for i in range(len(split))]
    assert keys
    assert not any("cat-" in key for key in keys)


def test_withdrawal_says_what_was_checked(src: Path, tmp_path: Path, run_packer: Run) -> None:
    run_packer("shard", src, tmp_path / "out")
    (tmp_path / "gone.txt").write_text("train/cat/cat-0\nval/dog/dog-1.png\n")
    result = run_packer("shard", tmp_path / "out", tmp_path / "new", "--drop-keys", tmp_path / "gone.txt")
    assert f"  none of the 2 withdrawn samples is in {tmp_path / 'new'}" in result.stderr
    assert Manifest.load(str(tmp_path / "new")).samples == 14
    value = json.loads(
        run_packer("shard", tmp_path / "out", tmp_path / "new", "--drop-keys", tmp_path / "gone.txt", "--json").stdout
    )
    assert (value["already_complete"], value["withdrawn"]) == (True, 2)


def test_a_copy_of_a_withdrawn_picture_is_a_warning_even_with_quiet(src: Path, tmp_path: Path, run_packer: Run) -> None:
    (src / "val/dog/copy.jpg").write_bytes((src / "train/cat/cat-0.jpg").read_bytes())
    run_packer("shard", src, tmp_path / "out")
    (tmp_path / "gone.txt").write_text("train/cat/cat-0\n")
    result = run_packer("shard", tmp_path / "out", tmp_path / "new", "--drop-keys", tmp_path / "gone.txt", "--quiet")
    assert result.stderr.strip() == "warning: 1 kept sample has the same bytes as a withdrawn one: val/dog/copy"


def test_a_withdrawn_key_with_a_slip_stops_everything(src: Path, tmp_path: Path, run_packer: Run) -> None:
    run_packer("shard", src, tmp_path / "out")
    (tmp_path / "gone.txt").write_text("train/cat/cat-0\ntrain/cat/cat-99\n")
    arguments = ("shard", tmp_path / "out", tmp_path / "new", "--drop-keys", tmp_path / "gone.txt")
    assert "train/cat/cat-99" in run_packer(*arguments, exit_code=2).stderr
    assert not (tmp_path / "new").exists()


def test_limit_and_seed_choose_and_repeat(src: Path, tmp_path: Path, run_packer: Run) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_packer("shard", src, tmp_path / name, "--limit", "5", "--seed", str(seed))
    assert Manifest.load(str(tmp_path / "a")).samples == 5
    assert tree(tmp_path / "a") == tree(tmp_path / "b") != tree(tmp_path / "c")
    assert (tmp_path / "a" / FILE).exists()


# ---------------------------------------------------------------- option types


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("1GiB", 2**30),
        ("1.5k", 1500),
        ("7", 7),
        ("3B", 3),
        ("2Ti", 2**41),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert Bytes().convert(text, None, None) == size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1.5e6, "1.5 MB"), (2e12, "2 TB")]
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert human_bytes(size) == text


def test_folds_and_fractions() -> None:
    assert Fold().convert("2/5", None, None) == (2, 5)
    convert = SplitFractions().convert
    assert convert("0.9,0.1", None, None) == (("train", 0.9), ("val", 0.1))
    assert convert("0.8, 0.1, 0.1", None, None) == (("train", 0.8), ("val", 0.1), ("test", 0.1))
    assert convert("a=0.25,b=0.75", None, None) == (("a", 0.25), ("b", 0.75))


# ---------------------------------------------------------------- the process itself


def test_the_locale_does_not_show(src: Path, tmp_path: Path) -> None:
    (src / "train/cat").rename(src / "train/vögel")
    (src / "train/dog/dog-0.jpg").rename(src / "train/dog/d\udce9j\u0301.jpg")  # not UTF-8 as a whole
    trees = []
    for name, settings in (("utf-8", {"LC_ALL": "C.UTF-8"}), ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0"})):
        environment = {**os.environ, **settings, "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-m", "packer", "shard", os.fsencode(src), tmp_path / name]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        trees.append(tree(tmp_path / name))
    assert trees[0] == trees[1]


def test_memory_does_not_grow_with_a_field(src: Path, tmp_path: Path) -> None:
    (src / "train/cat/cat-0.npy").touch()
    os.truncate(src / "train/cat/cat-0.npy", 300_000_000)  # sparse: takes no room
    for source, out in ((src, tmp_path / "out"), (tmp_path / "out", tmp_path / "again")):
        # Not ru_maxrss: that starts from what the parent had when it forked.
        run = (
            "import re; from packer.cli import cli; cli(standalone_mode=False);"
            "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
        )
        command = [sys.executable, "-c", run, "shard", source, out, "-q", "-j", "1"]
        if source == src:
            command += ["--layout", "sidecars"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        assert int(done.stdout) < 250_000, f"{done.stdout} KiB"
    assert Manifest.load(str(tmp_path / "again")).bytes > 300_000_000


def packer(*arguments: object, shell: str = '"$@"', **how: Any) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, run by a shell that may redirect its streams."""
    command = ["bash", "-c", f"set -o pipefail; {shell}", "bash", sys.executable, "-m", "packer", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **how
    )


@pytest.mark.parametrize("arguments", [("info",), ("stats", "--json"), ("info", "--help"), ("--help",), ("--version",)])
def test_a_full_disk_behind_stdout_is_a_message(
    src: Path, tmp_path: Path, run_packer: Run, arguments: tuple[str, ...]
) -> None:
    run_packer("shard", src, tmp_path / "out")
    folder = (tmp_path / "out",) if arguments[0] in ("info", "stats") else ()
    done = packer(*arguments, *folder, shell='"$@" >/dev/full')
    assert done.returncode == 1
    assert "Error: cannot write to standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_reader_that_leaves_is_no_error_of_the_data(src: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "packer", "shard", src, tmp_path / "out", "--dry-run"]
    cut = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    os.close(write)
    assert (cut.returncode, cut.stderr) == (141, b"")


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(src: Path, tmp_path: Path, closed: str) -> None:
    assert packer("shard", src, tmp_path / "out", "-j", "2", shell=f'"$@" {closed}').returncode == 0
    assert Manifest.load(str(tmp_path / "out")).samples == 16
    assert packer("verify", tmp_path / "out", shell=f'"$@" {closed}').returncode == 0


def test_a_working_directory_that_is_gone_is_a_message(src: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone = 'cd gone && rmdir "$PWD" && "$@"'
    for arguments in (("shard", src, "out"), ("shard", ".", tmp_path / "out")):
        (tmp_path / "gone").mkdir(exist_ok=True)
        done = packer(*arguments, shell=gone, cwd=tmp_path)
        assert done.returncode in (1, 2)
        assert "Error: " in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "gone").mkdir(exist_ok=True)
    assert "working directory does not exist any more" in packer("shard", src, "out", shell=gone, cwd=tmp_path).stderr


@pytest.mark.parametrize("command", ["info", "verify", "stats", "view", "unpack", "index", "shard"])
def test_ctrl_c_is_130_and_one_line_in_every_command(
    src: Path, tmp_path: Path, run_packer: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    module = import_module(f"packer.cli.{command}")
    monkeypatch.setattr(module.command, "callback", interrupted)
    folders = [src, tmp_path / "out"] if command in ("shard", "unpack") else [src]
    result = run_packer(command, *folders, exit_code=130)
    assert (result.stdout, result.stderr) == ("", "\ninterrupted\n")


def test_a_usage_error_met_inside_a_command_shows_that_command(src: Path, run_packer: Run) -> None:
    result = run_packer("shard", src, src / "out", exit_code=2)
    assert "shard [OPTIONS] SRC... OUT" in result.stderr
    assert "shard -h' for help" in result.stderr or "shard --help' for help" in result.stderr
