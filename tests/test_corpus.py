"""A corpus of files that break image pipelines: every one is handled as its table of answers says.

`PACKER_CASES` names another archive. Its `EXPECT.tsv` says per path what must become of it: `ok` a sample with
these very bytes, `error` reported and no sample, `skip` counted and no sample, `policy` one of these, as stated
here. Each folder of the archive is a source of its own; all of it together is another.
"""

from __future__ import annotations

import csv
import os
import stat
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from conftest import PATIENCE_S

from packer.pack import PackOptions, PackResult, pack
from packer.packed import Packed
from packer.sample import printable, unescape_key
from packer.sources.folder import FolderOptions, FolderSource

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = Path(os.environ.get("PACKER_CASES") or ROOT / "tests" / "data" / "tricky.tar.gz")
FOLDERS = ("broken", "exif", "formats", "junk", "names", "order", "pairs", "size", "tree")

# What the project does where more than one answer is right: `packed`, `broken` (reported, left out), `skipped`,
# or `class` (an empty folder that keeps its place among the classes).
POLICY = {
    "formats/jpeg/arithmetic.jpg": "packed",
    "formats/jpeg/mjpeg_no_dht.jpg": "packed",
    "formats/jpeg/lossless_sof3.jpg": "packed",
    "formats/avif/rgb.avif": "packed",
    "formats/heif/photo.heic": "packed",
    "formats/jxl/photo.jxl": "skipped",
    "broken/truncated/no_iend.png": "packed",
    "broken/corrupt/zero_hole.jpg": "packed",
    "broken/corrupt/early_eoi.jpg": "packed",
    "names/bytes/latin1_caf\udce9.jpg": "packed",
    "names/bytes/sjis_\udc8eʐ^.jpg": "packed",
    "tree/links/good.jpg": "skipped",
    "tree/dirs/x.jpg/inner.jpg": "packed",
    "tree/perm/mode000.jpg": "packed",
    "tree/void": "class",
    "tree/emptynest/inner": "class",
    "pairs/0005.jpg": "broken",
    "pairs/0005.json": "broken",
    "pairs/0006.json": "broken",
    "pairs/0006.cls": "broken",
    "pairs/0013.jpg": "packed",
    "pairs/0013.json": "packed",
    "pairs/0013.cls": "packed",
}
# Packed as one source, `pairs` is a class of pictures like the others, and so is `junk`.
POLICY_WHOLE = {**POLICY, "pairs/0005.jpg": "packed", "junk/README.jpg": "packed"}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    path: str
    status: str
    size: tuple[int, int] | None  # (height, width) as Pillow opens it

    @property
    def is_picture(self) -> bool:
        return self.size is not None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    subprocess.run(["tar", "-xzf", str(ARCHIVE), "-C", str(folder)], check=True, timeout=PATIENCE_S)
    return folder / "tricky"


@pytest.fixture(scope="module")
def rows(corpus: Path) -> list[Row]:
    with open(corpus / "EXPECT.tsv", encoding="utf-8", newline="") as f:
        table = list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Row(
            os.fsdecode(unquote_to_bytes(line["path"])),
            line["status"],
            (int(line["height"]), int(line["width"])) if line["width"] else None,
        )
        for line in table
    ]


class Outcome:
    """What became of every file of a source."""

    def __init__(self, source: Path, out: Path, **options: object) -> None:
        folder_options = FolderOptions(follow_symlinks=bool(options.pop("follow_symlinks", False)))
        self.source = source
        self.result: PackResult = pack(
            FolderSource(str(source), folder_options),
            out,
            PackOptions(on_error="skip", workers=1, **options),  # type: ignore[arg-type]
        )
        self.left_out = dict([*self.result.skipped, *self.result.broken])
        self.broken = {path for path, _ in self.result.broken}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        self.keys: dict[str, str] = {}
        self._read(Packed(out))

    def _read(self, packed: Packed) -> None:
        """Every packed field, held against its file."""
        for split in packed.values():
            assert len(set(split.names.keys)) == len(split)
            for i in range(len(split)):
                for number, field in enumerate(split.fields):
                    path = os.fsdecode(split.names.paths[number][i])
                    data = split.read(i, field, check=True)
                    assert (data is None) == (split.rows[i][f"{field}:length"] < 0)
                    if not path:  # absent, or a label that packing made
                        assert data is None or data == b"%d" % split.rows[i]["label"]
                        continue
                    assert path not in self.sizes, f"{path!r} was packed twice"
                    assert data == (self.source / path).read_bytes(), path
                    self.sizes[path] = (int(split.rows[i]["height"]), int(split.rows[i]["width"]))
                    self.labels[path] = int(split.rows[i]["label"])
                    self.keys[path] = split.key(i)

    def of(self, path: str) -> str:
        """`packed`, `broken`, `skipped` or `class`; fails the test for a path of which nothing is known."""
        if path in self.sizes:
            assert printable(path) not in self.left_out
            return "packed"
        for above in (path, *(path[: at + 1] for at in range(len(path)) if path[at] == "/")):
            if printable(above) in self.left_out:
                assert self.left_out[printable(above)]
                return "broken" if printable(above) in self.broken else "skipped"
        assert path.split("/")[0] in (self.result.manifest.classes or ()), f"nothing is known of {path!r}"
        return "class"


def check(row: Row, found: str, policy: dict[str, str]) -> None:
    """Whether the outcome is the one that the table asks for."""
    if row.path in policy:
        assert found == policy[row.path], row
    elif row.status == "ok":
        assert found == "packed", row
    elif row.status == "error":
        assert found in ("broken", "skipped"), row
    else:
        assert row.status == "skip", f"what is the policy for {row}?"
        assert found == "skipped", row


# ---------------------------------------------------------------- the table, line by line


def test_each_folder_as_a_source(corpus: Path, rows: list[Row], tmp_path: Path) -> None:
    checked = Counter[str]()
    for folder in FOLDERS:
        outcome = Outcome(corpus / folder, tmp_path / folder)
        for row in rows:
            top, _, path = row.path.partition("/")
            if top != folder:
                continue
            found = outcome.of(path)
            check(row, found, POLICY)
            if found == "packed" and row.is_picture and folder != "pairs":
                assert outcome.sizes[path] == row.size, row
            checked[found] += 1
    assert checked.total() == len(rows) == 160
    assert checked == {"packed": 121, "broken": 18, "skipped": 19, "class": 2}


def test_all_of_it_as_one_source(corpus: Path, rows: list[Row], tmp_path: Path) -> None:
    outcome = Outcome(corpus, tmp_path / "out")
    assert outcome.result.manifest.classes == FOLDERS
    pairs_fields = {row.path for row in rows if row.path.startswith("pairs/") and not row.is_picture}
    checked = Counter[str]()
    for row in rows:
        found = outcome.of(row.path)
        checked[found] += 1
        if row.path in pairs_fields:  # labels and metadata of the sidecar layout are no pictures of a class
            assert found == "skipped", row
        else:
            check(row, found, POLICY_WHOLE)
        if found == "packed":
            assert outcome.sizes[row.path] == row.size or not row.is_picture, row
            assert outcome.labels[row.path] == FOLDERS.index(row.path.split("/")[0])
    assert checked.total() == 160
    assert outcome.of("EXPECT.tsv") == "skipped"


def test_following_links(corpus: Path, rows: list[Row], tmp_path: Path) -> None:
    outcome = Outcome(corpus / "tree", tmp_path / "out", follow_symlinks=True)
    for row in rows:
        top, _, path = row.path.partition("/")
        if top == "tree":
            check(row, outcome.of(path), {**POLICY, "tree/links/good.jpg": "packed"})
    assert outcome.of("loop/up") == outcome.of("loop2/here") == "skipped"
    assert {outcome.of(f"links/{name}.jpg") for name in ("self", "ring_a", "ring_b", "outside")} == {"broken"}


def test_decoding_every_pixel_keeps_all_that_is_whole(corpus: Path, rows: list[Row], tmp_path: Path) -> None:
    for folder in FOLDERS:
        outcome = Outcome(corpus / folder, tmp_path / folder, check="decode")
        for row in rows:
            top, _, path = row.path.partition("/")
            if top == folder and row.path not in POLICY:
                check(row, outcome.of(path), POLICY)


# ---------------------------------------------------------------- more than one line says


def test_names_come_back(corpus: Path, rows: list[Row], tmp_path: Path) -> None:
    outcome = Outcome(corpus / "names", tmp_path / "out")
    assert len(set(outcome.keys.values())) == len(outcome.keys) == sum(row.path.startswith("names/") for row in rows)
    for path, key in outcome.keys.items():
        assert unescape_key(key.encode()) == os.fsencode(path.rpartition(".")[0])
        assert "." not in key.rpartition("/")[2]
    assert outcome.keys["dots/img.v2.final.jpg"] == "dots/img%2Ev2%2Efinal"


def test_classes_and_labels(corpus: Path, tmp_path: Path) -> None:
    digits = Outcome(corpus / "order/digits", tmp_path / "digits")
    assert digits.labels == {"1/a.jpg": 0, "10/a.jpg": 1, "2/a.jpg": 2}
    pad = Outcome(corpus / "order/pad", tmp_path / "pad")
    assert pad.labels == {"001/a.jpg": 0, "1/a.jpg": 1}
    tree = Outcome(corpus / "tree", tmp_path / "tree")
    classes = tree.result.manifest.classes
    assert classes == tuple(sorted(entry.name for entry in os.scandir(corpus / "tree") if entry.is_dir()))
    assert classes is not None
    assert tree.labels["animals/cats/persian/1.jpg"] == tree.labels["animals/dogs/1.jpg"] == classes.index("animals")
    assert Outcome(corpus / "junk", tmp_path / "junk").result.manifest.classes == ("cats",)


def test_pairs_are_samples(corpus: Path, tmp_path: Path) -> None:
    Outcome(corpus / "pairs", tmp_path / "out")
    packed = Packed(tmp_path / "out")["train"]
    fields = {packed.key(i): set(packed.sample(i)) for i in range(len(packed))}
    whole = {"jpg", "json", "cls"}
    assert fields == {
        **dict.fromkeys(("0001", "0003", "0008", "0011", "0013"), whole),
        "0009": {"left.jpg", "right.jpg", "cls"},
    }
    assert np.all(packed.rows["shard"] == 0)


def test_special_files_are_there_and_not_opened(corpus: Path, tmp_path: Path) -> None:
    assert stat.S_ISFIFO((corpus / "tree/special/pipe.jpg").lstat().st_mode)
    outcome = Outcome(corpus / "tree", tmp_path / "out")
    assert outcome.left_out["special/pipe.jpg"] == "not a regular file (pipe, socket or device)"
