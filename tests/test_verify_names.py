"""`packer verify`: original paths that cannot be restored, and the report of what was left out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from packer.finish import finish
from packer.index import Names
from packer.packed import Packed
from packer.strings import Strings
from packer.verify import SHOWN, verify


@pytest.fixture
def out(image_folder: Callable[..., Path], tmp_path: Path, run_packer: Callable[..., Result]) -> Path:
    source = image_folder(per_class=3)
    (source / "notes.txt").write_text("no picture")
    (source / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    run_packer("shard", source, tmp_path / "out", "--on-error", "skip", "--quiet")
    return tmp_path / "out"


def lines(out: Path) -> list[str]:
    return [str(problem) for problem in verify(out, workers=1).problems]


def forge(out: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the original paths of the field `jpg`, with checksums that fit."""
    dataset = Packed(out)
    manifest, split = dataset.manifest, dataset["train"]
    at = manifest.fields.index("jpg")
    columns = [Strings.of(list(column)) for column in split.names.paths]
    columns[at] = Strings.of(change(list(columns[at])))
    names = replace(Names(Strings.of(list(split.names.keys)), ()), paths=tuple(columns))
    finish(str(out), format=manifest.format, splits=[(split.split, np.array(split.rows), names)],
           fields=manifest.fields, classes=manifest.classes, source=manifest.source, options=manifest.options,
           fingerprint=manifest.fingerprint)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (b"../evil", "climbs out of its folder"),
        (b"/etc/passwd", "is an absolute path"),
        (b"a//b", "has an empty component"),
        (b"a\0b", "contains a zero byte"),
        (b"\x1b[31m\n/../x", "climbs out of its folder"),
    ],
)
def test_original_paths_that_climb_are_found(out: Path, path: bytes, says: str) -> None:
    assert lines(out) == []
    forge(out, lambda paths: [path if one else one for one in paths[:3]] + paths[3:])
    found = lines(out)
    assert all(line.startswith("train.names, sample ") for line in found)
    assert any(says in line for line in found)
    assert all(line.isprintable() for line in found)


def test_two_files_of_one_original_path_are_found(out: Path) -> None:
    forge(out, lambda paths: [b"cat/same.jpg" if one else one for one in paths])
    found = lines(out)
    assert len(found) == sum(1 for one in Packed(out)["train"].names.paths[0] if one) - 1 > 0
    assert all("the original path 'cat/same.jpg' is that of sample" in line for line in found)


def test_many_bad_paths_do_not_give_a_line_each(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(out, lambda paths: [b"/%d" % i if one else one for i, one in enumerate(paths)])
    monkeypatch.setattr("packer.verify.SHOWN", 1)
    assert SHOWN == 100 and len(lines(out)) == 2 and "more original paths" in lines(out)[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "missing"),
        ("garbage", "cannot be read"),
        ("[]", "is not the list"),
        ('{"skipped": [1]}', "is not the list"),
        ('{"skipped": []}', "as many files left out"),
    ],
)
def test_the_report_is_there_and_whole(out: Path, text: str | None, says: str) -> None:
    assert lines(out) == []
    assert len(json.loads((out / "report.json").read_text())["skipped"]) == 2
    (out / "report.json").unlink()
    if text is not None:
        (out / "report.json").write_text(text)
    (line,) = lines(out)
    assert line.startswith("report.json: ") and says in line


def test_a_pipe_in_place_of_the_report_does_not_block(out: Path) -> None:
    (out / "report.json").unlink()
    os.mkfifo(out / "report.json")
    assert lines(out) == ["report.json: cannot be read: not a regular file"]
