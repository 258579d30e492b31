"""`packer info`: what a dataset holds, from its manifest alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from packer.cli.tables import bar, table
from packer.finish import finish
from packer.index import Names, empty_rows
from packer.manifest import Manifest, Shard, Split
from packer.strings import Strings


@pytest.fixture
def out(image_folder: Callable[..., Path], tmp_path: Path, run_packer: Callable[..., Result]) -> Path:
    source = image_folder(splits=("train", "val"), per_class=3)
    (source / "notes.txt").write_text("no picture")
    run_packer("shard", source, tmp_path / "out", "--shard-samples", "4", "--quiet")
    return tmp_path / "out"


def test_json_is_what_was_packed(out: Path, run_packer: Callable[..., Result]) -> None:
    value = json.loads(run_packer("info", out, "--json").stdout)
    for name in ("train", "val"):
        files = list(out.glob(f"{name}-*.tar"))
        assert value["splits"][name] == {
            "samples": 6,
            "shards": len(files) == 2 and 2,
            "bytes": sum(f.stat().st_size for f in files),
        }
    assert value["samples"] == 12
    assert value["bytes"] == sum(f.stat().st_size for f in out.glob("*.tar"))
    assert value["format"] == "webdataset"
    assert value["classes"] == ["cat", "dog"]
    assert sorted(value["fields"]) == ["cls", "jpg", "png"]
    assert value["source"]["layout"] == "splits"
    assert value["options"]["seed"] == 0
    assert value["fingerprint"] == Manifest.load(str(out)).fingerprint


def test_text_says_the_same(out: Path, run_packer: Callable[..., Result]) -> None:
    text = run_packer("info", out).stdout
    rows = [line.split() for line in text.splitlines()]
    assert ["split", "samples", "shards", "size", "a", "sample"] in rows
    assert any(row[:3] == ["train", "6", "2"] for row in rows)
    assert "classes   2 (cat, dog)" in text
    assert "shard_samples 4" in text
    assert "left out" in text
    assert "seed 0" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_broken_files_that_were_left_out_are_counted(
    image_folder: Callable[..., Path], tmp_path: Path, run_packer: Callable[..., Result]
) -> None:
    source = image_folder(per_class=3)
    (source / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    run_packer("shard", source, tmp_path / "out", "--on-error", "skip", "--quiet")
    assert re.search(r"^broken +1 left out", run_packer("info", tmp_path / "out").stdout, re.MULTILINE)
    run_packer("view", tmp_path / "out")
    assert "<dt>Broken</dt><dd>1 left out</dd>" in (tmp_path / "out" / "view.html").read_text()


def test_only_the_manifest_is_needed(out: Path, run_packer: Callable[..., Result]) -> None:
    text = run_packer("info", out).stdout
    for path in out.iterdir():
        if path.name != "dataset.json":
            path.unlink()
    assert run_packer("info", out).stdout == text


def test_no_dataset(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    assert "not a packed dataset" in run_packer("info", tmp_path, exit_code=1).output


@pytest.mark.parametrize("command", ["info", "stats", "unpack", "verify", "view"])
@pytest.mark.parametrize("missing", ["", "nowhere"])
def test_a_dataset_that_is_not_there_is_a_usage_error(
    run_packer: Callable[..., Result], tmp_path: Path, command: str, missing: str
) -> None:
    more = [tmp_path / "dst"] if command == "unpack" else []
    result = run_packer(command, missing and tmp_path / missing, *more, exit_code=2)
    assert f"'{missing and tmp_path / missing}' does not exist" in result.stderr


def test_names_are_printed_safely(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    rows = empty_rows(1, ["jpg"])
    split = Split("train", (Shard("t.tar", 1, 1, 0),))
    names = Names(Strings.of([b"k"]), (Strings.of([b""]),))
    finish(
        str(tmp_path), format="webdataset", splits=[(split, rows, names)], fields=["jpg"],
        classes=["\x1b[31mred", "new\nline", "\udcff"], source={"rule": "\x1b]0;title\x07", "skipped": {"a\nb": 1}},
    )  # fmt: skip
    text = run_packer("info", tmp_path).stdout
    assert "\x1b" not in text
    assert "\\x1b[31mred, new\\nline, \\xff" in text
    json.loads(run_packer("info", tmp_path, "--json").stdout)


def test_tables_align_wide_and_combining_characters() -> None:
    assert table([["日本", "1"], ["e\u0301", "22"]], "<>") == ["日本   1", "e\u0301     22"]


def test_bars_grow_with_their_share() -> None:
    lengths = [len(bar(i / 100, 20)) for i in range(101)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[1], lengths[100]) == (0, 1, 20)
