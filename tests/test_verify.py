"""`packer verify`: whatever is damaged, wherever, is found and named; nothing that is whole is complained of."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import Result
from conftest import PATIENCE_S, picture
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ManifestError
from packer.finish import finish
from packer.index import Names, Rows
from packer.indexing import index_folder
from packer.manifest import FILE, Manifest, Split, checksum
from packer.pack import PackOptions, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.shard_check import MAX_PROBLEMS, Problem
from packer.sources.folder import FolderSource
from packer.strings import Strings
from packer.verify import verify

LONG = "a-name-that-does-not-fit-into-the-hundred-bytes-of-a-ustar-header-" * 2


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits, several shards, PNG and JPEG, a PAX header, an escaped key."""
    root = tmp_path_factory.mktemp("verify")
    for number, name in enumerate(
        ["train/cat/a.jpg", "train/cat/b.png", f"train/cat/{LONG}.jpg", "train/dog/a.v2.jpg", "train/dog/c.jpg",
         "train/dog/d.png", "val/cat/a.jpg", "val/dog/b.jpg", "val/dog/e.jpg"]
    ):  # fmt: skip
        path = root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, (9 + number, 12)).save(path)
    options = PackOptions(plan=PlanOptions(shard_samples=2))
    pack(FolderSource(str(root / "src")), root / "out", options)
    return root / "out"


@pytest.fixture
def out(intact: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(intact, tmp_path / "out"))


class Place(NamedTuple):
    """A member's bytes in a shard, by Python's own tar reader, and the sample it should be reported under."""

    begin: int
    end: int
    header: int
    sample: int
    key: str
    field: str


def places(out: Path, shard: str) -> list[Place]:
    dataset = Packed(out)
    number = {split.key(i): i for split in dataset.values() for i in range(len(split))}
    found = []
    with tarfile.open(out / shard) as tar:
        for member in tar:
            key, _, field = member.name.rpartition(".")
            found.append(
                Place(member.offset_data, member.offset_data + member.size, member.offset, number[key], key, field)
            )
    return found


def shards(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.tar"))


def flip(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def lines(out: Path, **options: Any) -> list[str]:
    return [str(problem) for problem in verify(out, workers=1, **options).problems]


# ---------------------------------------------------------------- whole


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("deep", [False, True])
def test_nothing_is_wrong_with_an_intact_dataset(intact: Path, workers: int, deep: bool) -> None:
    done = np.zeros(2, np.int64)

    def progress(samples: int, size: int) -> None:
        done[:] += (samples, size)

    result = verify(intact, deep=deep, workers=workers, progress=progress)
    assert result.problems == []
    assert (result.samples, result.shards) == (9, 5)
    assert result.bytes == sum((intact / name).stat().st_size for name in shards(intact))
    assert done.tolist() == [result.samples, result.bytes]


def test_command_says_ok(intact: Path, run_packer: Callable[..., Result]) -> None:
    result = run_packer("verify", intact)
    assert result.stdout.startswith("ok: checked 9 samples in 5 shards")
    assert result.stdout.count("\n") == 1
    assert run_packer("verify", intact, "--quiet").output == ""
    assert json.loads(run_packer("verify", intact, "--json").stdout) == []


def test_shards_of_strangers(tmp_path: Path) -> None:
    for kind, name in ((tarfile.GNU_FORMAT, "a.tar"), (tarfile.PAX_FORMAT, "b.tar")):
        with tarfile.open(tmp_path / name, "w", format=kind) as tar:
            for i in range(3):
                path = tmp_path / f"{i}.JPEG"
                picture(i, (20, 10)).save(path)
                tar.add(path, f"{name}/{'x' * 130}/{i}.JPEG")
                (tmp_path / "label").write_text(f"{i}\n")
                tar.add(tmp_path / "label", f"{name}/{'x' * 130}/{i}.cls")
            link = tarfile.TarInfo(f"{name}/linked.jpg")
            link.type, link.linkname = tarfile.LNKTYPE, f"{name}/{'x' * 130}/0.JPEG"
            tar.addfile(link)
            tar.addfile(tarfile.TarInfo("README"))
    index_folder(tmp_path)
    assert lines(tmp_path, deep=True) == []
    place = Packed(tmp_path)["train"].rows["jpg:offset"][1]
    flip(tmp_path / "a.tar", int(place) + 5, 3)
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.sample, problem.field, problem.offset) == ("a.tar", 1, "jpg", place)


# ---------------------------------------------------------------- flipped bits


def test_every_flip_in_a_payload_is_traced_to_its_sample(out: Path) -> None:
    draw = random.Random(0)
    for shard in shards(out):
        for place in places(out, shard):
            for offset in {place.begin, place.end - 1, draw.randrange(place.begin, place.end)}:
                bit = draw.randrange(8)
                flip(out / shard, offset, bit)
                assert [(p.file, p.sample, p.key, p.field, p.offset) for p in verify(out, workers=1).problems] == [
                    (shard, place.sample, place.key, place.field, place.begin)
                ]
                flip(out / shard, offset, bit)
    assert lines(out) == []


def test_every_flip_in_a_header_is_found_at_its_offset(out: Path) -> None:
    shard = next(s for s in shards(out) if any(len(p.key) > 100 for p in places(out, s)))
    headers = [place.header for place in places(out, shard)]
    for place in places(out, shard)[:2]:
        for offset in range(place.header, place.begin, 3):
            flip(out / shard, offset, offset % 8)
            first = verify(out, workers=1).problems[0]
            assert first.file == shard
            assert first.offset in headers or first.offset is None
            flip(out / shard, offset, offset % 8)


@settings(max_examples=400)
@given(data=st.data())
def test_any_flip_in_any_file_is_found(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(set(os.listdir(intact)) - {"report.json"})))
    whole = (intact / name).read_bytes()
    offset, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    broken = bytearray(whole)
    broken[offset] ^= 1 << bit
    if name.endswith(".json") and same_json(broken, whole):
        return
    try:
        (intact / name).write_bytes(broken)
        found = verify(intact, workers=1).problems
    finally:
        (intact / name).write_bytes(whole)
    assert [problem for problem in found if problem.file == name or name == FILE]
    assert all(str(problem).isprintable() for problem in found)


def same_json(a: bytes | bytearray, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def test_padding_and_end_belong_to_the_file(out: Path) -> None:
    shard = shards(out)[0]
    padding = next(place.end for place in places(out, shard) if place.end % 512)
    flip(out / shard, padding, 0)
    (problem,) = verify(out).problems
    assert problem.file == shard
    assert "outside the samples" in problem.what


# ---------------------------------------------------------------- cut, swapped, lost, added


def test_truncation_names_the_first_sample_that_is_hit(out: Path) -> None:
    shard = shards(out)[0]
    whole = (out / shard).read_bytes()
    for size in sorted({*range(0, len(whole), 512), 1, 511, 513, len(whole) - 1}):
        (out / shard).write_bytes(whole[:size])
        problems = verify(out, workers=1).problems
        hit = [place.sample for place in places_of(whole, out, shard) if place.end > size]
        assert problems[0].file == shard
        assert problems[0].what == f"truncated: {size} bytes, dataset.json says {len(whole)}"
        assert (problems[0].sample, problems[0].offset) == (hit[0] if hit else None, size)
    (out / shard).write_bytes(whole + bytes(512))
    assert [p.offset for p in verify(out).problems] == [len(whole)]


def places_of(whole: bytes, out: Path, shard: str) -> list[Place]:
    copy = out.parent / "whole"
    copy.mkdir(exist_ok=True)
    for name in os.listdir(out):
        if not name.endswith(".tar") and not (copy / name).exists():
            shutil.copy(out / name, copy / name)
    (copy / shard).write_bytes(whole)
    return places(copy, shard)


def test_swapped_shards(out: Path) -> None:
    names = shards(out)
    for a, b in [(0, 1), (1, 2), (0, len(names) - 1)]:
        one, other = out / names[a], out / names[b]
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        assert {p.file for p in verify(out, workers=1).problems} == {names[a], names[b]}
        one.write_bytes(contents[0])
        other.write_bytes(contents[1])


def test_swapped_samples_of_equal_size_within_a_shard(tmp_path: Path) -> None:
    for name in "ab":
        path = tmp_path / "src" / "c" / f"{name}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(ord(name), (8, 8)).save(path)
    out = tmp_path / "out"
    pack(FolderSource(str(tmp_path / "src")), out)
    (shard,) = shards(out)
    data = bytearray((out / shard).read_bytes())
    half = (len(data) - 1024) // 2
    data[:half], data[half : 2 * half] = data[half : 2 * half], data[:half]
    (out / shard).write_bytes(data)
    assert any("in its place" in line for line in lines(out))


def test_missing_and_foreign_files(out: Path) -> None:
    shard, sidecar = shards(out)[0], "val.names"
    (out / shard).rename(out / "train-999999.tar")
    (out / sidecar).unlink()
    (out / "train.wids.json").unlink()
    (out / "test.index.npy").write_bytes(b"")
    (out / "train-000007.tar.partial").write_bytes(b"")
    (out / "notes.txt").write_text("the user's own")
    found = {(p.file, p.what.split(";")[0]) for p in verify(out).problems}
    assert found >= {
        (shard, "missing"),
        ("train-999999.tar", "a shard that dataset.json does not know"),
        ("train.wids.json", "missing"),
        ("test.index.npy", "belongs to no split of dataset.json"),
        ("train-000007.tar.partial", "left over from an interrupted run"),
    }
    assert {file for file, _ in found} == {shard, sidecar, "train-999999.tar", "train.wids.json", "test.index.npy",
                                          "train-000007.tar.partial"}  # fmt: skip


def test_a_pipe_or_folder_in_place_of_a_file_does_not_block(out: Path) -> None:
    for name in (shards(out)[0], "train.index.npy", "val.names", "val.wids.json"):
        (out / name).unlink()
        os.mkfifo(out / name)
    (out / shards(out)[1]).unlink()
    (out / "train-000001.tar").mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "packer", "verify", str(out), "-j", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 1
    assert run.stdout.count("not a regular file") == 3
    assert "Traceback" not in run.stderr
    (out / FILE).unlink()
    os.mkfifo(out / FILE)
    assert lines(out) == [f"dataset.json: {out}/dataset.json cannot be read: not a regular file"]


# ---------------------------------------------------------------- an index that lies, with checksums that fit


Change = Callable[[Rows, Names], tuple[Rows, Names]]


def rewrite(out: Path, change: Change) -> None:
    """Change rows and names of the split `train`, and write everything that stands beside the shards anew."""
    dataset = Packed(out)
    manifest = dataset.manifest
    parts: list[tuple[Split, Rows, Names]] = []
    for name, split in dataset.items():
        rows, names = np.array(split.rows), split.names
        names = Names(Strings.of(list(names.keys)), tuple(Strings.of(list(column)) for column in names.paths))
        parts.append((split.split, *(change(rows, names) if name == "train" else (rows, names))))
    finish(str(out), format=manifest.format, splits=parts, fields=manifest.fields, classes=manifest.classes,
           source=manifest.source, options=manifest.options, fingerprint=manifest.fingerprint)  # fmt: skip


def set_column(name: str, sample: int, value: int) -> Change:
    def change(rows: Rows, names: Names) -> tuple[Rows, Names]:
        rows[name][sample] = value
        return rows, names

    return change


def swap_rows(rows: Rows, names: Names) -> tuple[Rows, Names]:
    rows[[0, 1]] = rows[[1, 0]]
    return rows, names


def rename_key(key: bytes) -> Change:
    def change(rows: Rows, names: Names) -> tuple[Rows, Names]:
        return rows, replace(names, keys=Strings.of([key, *list(names.keys)[1:]]))

    return change


def field_of(out: Path, sample: int) -> str:
    row = Packed(out)["train"].rows[sample]
    return "jpg" if row["jpg:length"] >= 0 else "png"


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("label", 77, "has a label that is no class"),
        ("label", -9, "has a label that is no class"),
        ("label", -1, "the index says label -1"),
        ("shard", 2, "is in another shard by the index"),
        ("shard", -1, "is in another shard by the index"),
        ("*:offset", 0, "bytes in the shard, the index says"),
        ("*:offset", -512, "beyond the end of the file"),
        ("*:offset", 2**62, "beyond the end of the file"),
        ("*:length", 3, "crc32c mismatch"),
        ("*:length", 2**62, "beyond the end of the file"),
        ("*:length", -1, "the index does not know this field"),
        ("*:length", -5, "has a negative length"),
        ("cls:length", -1, "the index does not know this field"),
        ("*:crc32c", 12345, "the index says 0x00003039"),
    ],
)
def test_one_wrong_value_in_the_index(out: Path, column: str, value: int, says: str) -> None:
    sample = 2
    column = column.replace("*", field_of(out, sample))
    assert Packed(out)["train"].rows[column][sample] != value
    rewrite(out, set_column(column, sample, value))
    problems = verify(out, workers=1).problems
    assert any(says in p.what and p.sample == sample for p in problems), problems


def test_the_other_class_in_the_index(out: Path) -> None:
    label = int(Packed(out)["train"].rows["label"][0])
    rewrite(out, set_column("label", 0, 1 - label))
    (problem,) = verify(out).problems
    assert (problem.sample, problem.field) == (0, "cls")
    assert problem.what == f"it holds b'{label}', the index says label {1 - label}"


def test_wrong_order_and_wrong_keys(out: Path) -> None:
    rewrite(out, swap_rows)
    assert {p.sample for p in verify(out).problems} == {0, 1}
    rewrite(out, swap_rows)
    assert lines(out) == []
    keys = list(Packed(out)["train"].names.keys)
    rewrite(out, rename_key(b"somebody/else"))
    (problem,) = verify(out).problems
    assert (problem.sample, problem.key) == (0, "somebody/else")
    assert problem.what == f"the shard holds '{keys[0].decode()}' in its place"
    rewrite(out, rename_key(keys[3]))
    assert any(p.file == "train.names" and p.what == "has the same key as sample 0" and p.sample == 3
               for p in verify(out).problems)  # fmt: skip


def test_deep_looks_at_pixels_and_sizes(tmp_path: Path) -> None:
    source = tmp_path / "src" / "c"
    source.mkdir(parents=True)
    picture(1, (64, 48)).save(source / "good.jpg")
    whole = (source / "good.jpg").read_bytes()
    (source / "half.jpg").write_bytes(whole[: len(whole) // 2] + b"\xff\xd9")
    out = tmp_path / "out"
    pack(FolderSource(str(tmp_path / "src")), out)
    assert lines(out) == []
    (problem,) = verify(out, deep=True).problems
    assert problem.key == "c/half"
    assert "does not decode" in problem.what
    good = Packed(out)["train"].names.keys[0] != b"c/good"
    rewrite(out, set_column("width", int(good), 65))
    assert "the picture is 64×48, the index says 65×48" in [p.what for p in verify(out, deep=True).problems]


# ---------------------------------------------------------------- manifests


def test_an_edit_of_the_manifest_is_noticed(out: Path) -> None:
    value = json.loads((out / FILE).read_text())
    value["classes"] = ["cow", "dog"]
    (out / FILE).write_text(json.dumps(value))
    assert Manifest.load(str(out)).classes == ("cow", "dog")
    assert lines(out) == ["dataset.json: changed since it was written: its own crc32c does not fit"]


def test_no_manifest_is_an_error_of_the_caller(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    with pytest.raises(ManifestError, match="not a packed dataset"):
        verify(tmp_path)
    assert "not a packed dataset" in run_packer("verify", tmp_path, exit_code=1).output


HUGE = 10**30
VALUES = st.sampled_from([HUGE, -HUGE, 2**63, -1, 0, 1, 1e308, float("inf"), float("nan"), "", "../../etc/passwd",
                          "/etc", "a\x00b", "\ud800", "9" * 5000, None, True, [], {}, [[]], [None]])  # fmt: skip


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [path, *(spot for key, inner in value.items() for spot in spots(inner, (*path, key)))]
    if isinstance(value, list):
        return [path, *(spot for i, inner in enumerate(value) for spot in spots(inner, (*path, i)))]
    return [path]


@settings(max_examples=300)
@given(data=st.data())
def test_hostile_manifests_end_in_words(intact: Path, data: st.DataObject) -> None:
    whole = (intact / FILE).read_bytes()
    value = json.loads(whole)
    spot = data.draw(st.sampled_from(spots(value)[1:]))
    inner = value
    for step in spot[:-1]:
        inner = inner[step]
    before, inner[spot[-1]] = inner[spot[-1]], data.draw(VALUES)
    if inner[spot[-1]] == before:
        return
    value["crc32c"] = checksum(value) if spot != ("crc32c",) else value["crc32c"]
    try:
        (intact / FILE).write_text(json.dumps(value))
        problems = verify(intact, workers=1).problems
    finally:
        (intact / FILE).write_bytes(whole)
    harmless = ("source", "options", "fingerprint", "classes", "index", "names")
    about_split = len(spot) == 3 and spot[0] == "splits" and spot[2] in ("bytes", "index", "names")
    assert problems or spot[0] in harmless or about_split
    assert all(str(problem).isprintable() for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"packer": 1}',
        b'{"packer": 2}',
        b'{"packer": 1' + b"}" * 9,
    ],
)
def test_what_is_no_manifest(out: Path, text: bytes, run_packer: Callable[..., Result]) -> None:
    (out / FILE).write_bytes(text)
    result = run_packer("verify", out, exit_code=1)
    assert result.stdout.startswith("dataset.json: ")
    assert result.stdout.count("\n") == 1


def test_claims_take_no_memory(out: Path) -> None:
    """A manifest and an index that claim 10¹² samples, in a process that may not have more than 2 GiB."""
    value = json.loads((out / FILE).read_text())
    split = value["splits"]["train"]
    split["shards"][0]["samples"] = split["shards"][0]["bytes"] = 10**12
    split["samples"] = sum(shard["samples"] for shard in split["shards"])
    (out / FILE).write_text(json.dumps(value | {"crc32c": checksum(value)}))
    index = bytearray((out / "train.index.npy").read_bytes())
    header = index[10:].split(b"\n")[0]
    claimed = header.replace(b"(6,)", b"(%d,)" % split["samples"]).rstrip()
    index[10 : 10 + len(header)] = claimed.ljust(len(header))
    (out / "train.index.npy").write_bytes(index)
    names = bytearray((out / "train.names").read_bytes())
    names[8:16] = struct.pack("<Q", split["samples"])
    (out / "train.names").write_bytes(names)
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from packer.cli import main; import sys; sys.argv[1:] = ['verify', %r, '-j', '1']; main()"
    )
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each would take address space, on many cores all of it
    run = subprocess.run(
        [sys.executable, "-c", limited % str(out)], env=one_thread, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "Traceback" not in run.stderr
    assert run.returncode == 1
    assert "train.index.npy" in run.stdout
    assert "train.names" in run.stdout


@pytest.mark.parametrize(
    "descr",
    [
        b"(" * 5000, b"{'descr': " + b"[" * 2000, b"{'descr': '|O', 'fortran_order': False, 'shape': (6,)}",
        b"{'descr': [('label', '<i8')], 'fortran_order': False, 'shape': (6,)}", b"{'descr': 7}", b"1", b"\xff\xfe",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d,)}" % HUGE,
        b"{'descr': '<f8', 'fortran_order': 3, 'shape': 7}",
        b"{'descr': [('label', 'S8')] * 3, 'fortran_order': False, 'shape': (6,)}",
    ],
)  # fmt: skip
def test_hostile_index_headers(out: Path, descr: bytes) -> None:
    (out / "train.index.npy").write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", len(descr)) + descr + bytes(4096))
    found = [p for p in verify(out, workers=1).problems if p.file == "train.index.npy"]
    assert len(found) == 2
    assert all("\n" not in str(p) for p in found)


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(100), b"\x80\x04N.", b"\x93NUMPY"])
def test_other_files_in_place_of_the_index(out: Path, data: bytes) -> None:
    (out / "train.index.npy").write_bytes(data)
    assert len([p for p in verify(out, workers=1).problems if p.file == "train.index.npy"]) == 2


# ---------------------------------------------------------------- what is said


def test_one_line_each_and_json(out: Path, run_packer: Callable[..., Result]) -> None:
    shard = shards(out)[0]
    place = places(out, shard)[0]
    flip(out / shard, place.begin, 1)
    result = run_packer("verify", out, exit_code=1)
    assert result.stdout.splitlines() == lines(out)
    assert result.stdout.startswith(
        f"{shard}, sample {place.sample} '{place.key}', field '{place.field}', offset {place.begin}: "
    )
    (problem,) = json.loads(run_packer("verify", out, "--json", exit_code=1).stdout)
    assert Problem(**problem) == verify(out).problems[0]


def test_a_foreign_index_does_not_give_a_line_for_every_sample(tmp_path: Path) -> None:
    source = tmp_path / "src" / "c"
    source.mkdir(parents=True)
    for i in range(3 * MAX_PROBLEMS):
        picture(i, (2, 2)).save(source / f"{i}.png")
    out = tmp_path / "out"
    pack(FolderSource(str(tmp_path / "src")), out)

    def change(rows: Rows, names: Names) -> tuple[Rows, Names]:
        rows["png:crc32c"] ^= 1
        rows["label"] = 5
        return rows, names

    rewrite(out, change)
    said = lines(out)
    assert len(said) == 2 * (MAX_PROBLEMS + 1)
    assert said[-1] == f"train-000000.tar: … and {3 * MAX_PROBLEMS * 2 - MAX_PROBLEMS} more problems"


def test_names_in_problems_are_one_safe_line() -> None:
    problem = Problem("a\nb.tar", "x", 1, "k", "f\u202e")
    assert str(problem) == "a\\nb.tar, sample 1 'k', field 'f\\u202e': x"
