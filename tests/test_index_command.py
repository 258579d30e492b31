"""`packer index`: datasets that GNU tar, Python, webdataset and img2dataset wrote, and what is wrong with some."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S
from crc32c import crc32c
from PIL import Image

from packer import indexing
from packer.errors import OutputError, ProblemsError, ShardError, SourceError, UsageError
from packer.finish import finish
from packer.formats.tar_reader import iter_members
from packer.imaging import ImageInfo
from packer.index import Names, empty_rows
from packer.indexing import index_folder
from packer.manifest import FILE, Manifest, Shard, Split
from packer.packed import Packed
from packer.patterns import expand_braces, find_shards, group_by_split
from packer.strings import Strings

Samples = dict[str, dict[str, bytes]]


def image(number: int, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20 + number, 30), (number * 9 % 256, 0, 0)).save(out, kind)
    return out.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes], layout: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=layout) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def labelled(first: int, count: int) -> dict[str, bytes]:
    return {
        name: data
        for i in range(first, first + count)
        for name, data in ((f"{i:06d}.jpg", image(i)), (f"{i:06d}.cls", b"%d" % (i % 3)))
    }


def read(folder: Path, split: str = "train") -> Samples:
    """Everything that the index leads to, each byte checked against its checksum."""
    part = Packed(folder)[split]
    try:
        return {part.key(i): part.sample(i, check=True) for i in range(len(part))}
    finally:
        part.close()


def by_webdataset(*paths: Path) -> Samples:
    """The oracle, fields named as packing names them."""
    wds = pytest.importorskip("webdataset.tariterators", reason="webdataset is the oracle")
    found: Samples = {}
    for path in paths:
        with open(path, "rb") as stream:
            for sample in wds.group_by_keys({**f, "__url__": ""} for f in wds.tar_file_iterator(stream)):
                found[sample.pop("__key__")] = sample
                del sample["__url__"]
    return found


def fingerprint(*paths: Path) -> list[tuple[str, int]]:
    return [(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in paths]


# --- datasets made by others ----------------------------------------------------------------------


def gnu_tar(layout: str):
    def make(tmp_path: Path, folder: Path) -> list[Path]:
        source = tmp_path / "source" / ("deep" * 20) / ("er" * 30)
        source.mkdir(parents=True)
        for name, data in labelled(0, 6).items():
            (source / name).write_bytes(data)
        shard = folder / "train-000000.tar"
        subprocess.run(
            ["tar", "--sort=name", f"--format={layout}", "-cf", shard, "-C", tmp_path / "source", "."], check=True
        )
        return [shard]

    return make


def webdataset_writer(tmp_path: Path, folder: Path) -> list[Path]:
    wds = pytest.importorskip("webdataset", reason="its ShardWriter is the subject")
    with wds.ShardWriter(str(folder / "train-%06d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(10):
            writer.write({"__key__": f"{i:06d}", "jpg": image(i), "cls": i % 3, "json": {"number": i}})
    return sorted(folder.glob("*.tar"))


def img2dataset(tmp_path: Path, folder: Path) -> list[Path]:
    """Its layout: numbered shards, keys that count through, PAX headers; and a table beside each."""
    shards = []
    for shard in range(2):
        files = {}
        for i in range(3):
            key = f"{shard:05d}{i:04d}"
            files |= {f"{key}.jpg": image(i), f"{key}.txt": b"a caption", f"{key}.json": b"{}"}
        shards.append(write_tar(folder / f"{shard:05d}.tar", files, tarfile.PAX_FORMAT))
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    return shards


WRITERS = {
    "gnu": gnu_tar("gnu"),
    "pax": gnu_tar("pax"),
    "ustar": gnu_tar("ustar"),
    "webdataset": webdataset_writer,
    "img2dataset": img2dataset,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_indexes_what_others_wrote(tmp_path, run_packer, writer):
    folder = tmp_path / "shards"
    folder.mkdir()
    shards = WRITERS[writer](tmp_path, folder)
    before = fingerprint(*shards)
    run_packer("index", folder, "--workers", "1")

    expected = by_webdataset(*shards)
    assert read(folder) == expected and len(expected) > 5
    assert fingerprint(*shards) == before, "the shards are not to be touched"
    rows = Packed(folder)["train"].rows
    pictures = [Image.open(io.BytesIO(sample["jpg"])) for sample in expected.values()]
    assert [(p.height, p.width) for p in pictures] == list(zip(rows["height"], rows["width"], strict=True))
    assert [int(s.get("cls", b"-1")) for s in expected.values()] == rows["label"].tolist()
    facts = Manifest.load(str(folder)).splits["train"].shards
    assert [s.name for s in facts] == [p.name for p in shards]
    assert [(s.bytes, s.crc32c) for s in facts] == [(len(d := p.read_bytes()), crc32c(d)) for p in shards]
    listed = json.loads((folder / "train.wids.json").read_text())["shardlist"]
    assert [(s["url"], s["nsamples"]) for s in listed] == [(s.name, s.samples) for s in facts]


def test_hard_links_count_as_the_file_they_stand_for(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jpg").write_bytes(image(1))
    os.link(source / "a.jpg", source / "b.jpg")
    (source / "b.cls").write_bytes(b"5")
    shards = tmp_path / "shards"
    shards.mkdir()
    command = ["tar", "-cf", shards / "0.tar", "-C", source, "a.jpg", "b.cls", "b.jpg"]
    subprocess.run(command, check=True)
    index_folder(shards, workers=1)
    assert read(shards) == {"a": {"jpg": image(1)}, "b": {"jpg": image(1), "cls": b"5"}}
    assert Packed(shards)["train"].rows["width"].tolist() == [21, 21]


def test_names_of_the_members_are_kept(tmp_path):
    write_tar(
        tmp_path / "0.tar", {"./n01/x.JPEG": image(1), "./n01/x.seg.PNG": image(2, "PNG"), "./n01/y.JPEG": image(3)}
    )
    manifest = index_folder(tmp_path, workers=1)
    assert manifest.fields == ("jpg", "seg.png")
    names = Packed(tmp_path)["train"].names
    assert list(names.keys) == [b"./n01/x", b"./n01/y"], "keys as every reader of the shard sees them"
    assert [list(column) for column in names.paths] == [
        [b"./n01/x.JPEG", b"./n01/y.JPEG"],
        [b"./n01/x.seg.PNG", b""],
    ]


def test_jpeg_is_jpg_unless_a_sample_has_both(tmp_path):
    write_tar(tmp_path / "0.tar", {"a.jpeg": b"1", "a.jpg": b"2", "b.jpeg": b"3", "c.jpg": b"4"})
    index_folder(tmp_path, workers=1)
    assert read(tmp_path) == {"a": {"jpeg": b"1", "jpg": b"2"}, "b": {"jpg": b"3"}, "c": {"jpg": b"4"}}


def test_what_is_left_out_or_unknown_is_counted(tmp_path, run_packer):
    write_tar(
        tmp_path / "0.tar",
        {
            "README": b"hello",
            "__info__/a.json": b"{}",
            "a.jpg": b"no picture",
            "a.cls": b"cat",
            "b.jpg": image(1)[:-9],
            "b.cls": b" 7\n",
        },
    )
    result = run_packer("index", tmp_path)
    source = Manifest.load(str(tmp_path)).source
    assert source["skipped"] == {"no extension": 1, "metadata": 1}
    assert sorted(source["unknown"].values()) == [1, 2]
    assert Packed(tmp_path)["train"].rows["label"].tolist() == [-1, 7]
    assert Packed(tmp_path)["train"].rows["height"].tolist() == [-1, -1]
    assert "skipped 1 × metadata" in result.stderr and "next: packer verify" in result.stderr


def test_the_result_does_not_depend_on_workers_or_read_sizes(tmp_path, monkeypatch):
    made = []
    for workers in (1, 2):
        folder = tmp_path / f"with-{workers}"
        for shard in range(3):
            write_tar(folder / f"train-{shard}.tar", labelled(10 * shard, 8))
        index_folder(folder, workers=workers)
        made.append(folder)
    write_tar(tmp_path / "small" / "x", {})
    monkeypatch.setattr(indexing, "_PIECE", 700)
    monkeypatch.setattr(indexing, "_MAX_IN_MEMORY", 1 << 20)
    for shard in range(3):
        write_tar(tmp_path / "small" / f"train-{shard}.tar", labelled(10 * shard, 8))
    index_folder(tmp_path / "small", workers=1)
    made.append(tmp_path / "small")
    for name in (FILE, "train.index.npy", "train.names", "train.wids.json"):
        assert len({(folder / name).read_bytes() for folder in made}) == 1, name


def test_contents_too_large_for_memory_are_checksummed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "_PIECE", 1000)
    monkeypatch.setattr(indexing, "_MAX_IN_MEMORY", 1500)
    big = os.urandom(4321)
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for name, data in {"a.bin": big, "README": bytes(5000), "b.bin": b"1", "c.png": big}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("d.bin")
        link.type, link.linkname = tarfile.LNKTYPE, "a.bin"
        archive.addfile(link)
    manifest = index_folder(tmp_path, workers=1)
    assert read(tmp_path) == {"a": {"bin": big}, "b": {"bin": b"1"}, "c": {"png": big}, "d": {"bin": big}}
    assert manifest.splits["train"].shards[0].crc32c == crc32c((tmp_path / "0.tar").read_bytes())


# --- which shards, which splits -------------------------------------------------------------------


def test_patterns():
    assert list(expand_braces("x-{000009..000011}.tar")) == ["x-000009.tar", "x-000010.tar", "x-000011.tar"]
    assert list(expand_braces("{a,b}{8..10}")) == ["a8", "a9", "a10", "b8", "b9", "b10"]
    assert list(expand_braces("{3..1}{}".replace("{}", ""))) == ["3", "2", "1"]
    assert list(expand_braces("plain.tar")) == ["plain.tar"]
    for bad in ("{0..99999999}", "{a}", "{0..999}{0..9999}", "{}"):
        with pytest.raises(UsageError):
            expand_braces(bad)


def test_braces_agree_with_the_reader_that_expands_them():
    braceexpand = pytest.importorskip("braceexpand", reason="what webdataset expands its patterns with")
    for pattern in ("x-{000000..000012}.tar", "{0..3}{a,b}", "{9..11}", "{08..10}", "{1..010}", "{a,}x"):
        assert list(expand_braces(pattern)) == list(braceexpand.braceexpand(pattern))


def test_finds_shards_by_folder_and_by_pattern(tmp_path):
    for name in ("t-2.tar", "t-10.tar", "t-1.tar", "u.tar", "notes.txt", ".hidden.tar"):
        write_tar(tmp_path / name, {"a.txt": b""})
    assert find_shards(str(tmp_path))[1] == ["t-1.tar", "t-2.tar", "t-10.tar", "u.tar"]
    folder, names, format_ = find_shards(f"{tmp_path}/t-{{2,10}}.tar::{tmp_path}/u*")
    assert (folder, names, format_.name) == (str(tmp_path), ["t-2.tar", "t-10.tar", "u.tar"], "webdataset")
    assert find_shards(f"{tmp_path}/t*.tar")[1] == ["t-1.tar", "t-2.tar", "t-10.tar"]


def test_no_shard_of_a_folder_is_left_out_silently(tmp_path, run_packer):
    for name in ("ok.tar", "UPP.TAR", "Mixed.Tar"):
        write_tar(tmp_path / name, {f"{name[0]}.txt": b""})
    assert find_shards(str(tmp_path))[1] == ["Mixed.Tar", "UPP.TAR", "ok.tar"]
    assert index_folder(tmp_path, workers=1).samples == 3
    odd = ["-x.tar", "--x.tar", "é.tar", "+.TAR", "a\\b.tar"]
    for name in odd:
        write_tar(tmp_path / name, {"a.txt": b""})
    (tmp_path / FILE).unlink()
    message = run_packer("index", tmp_path, exit_code=2).stderr
    assert all(repr(name) in message for name in odd)
    assert "ok.tar" not in message and "rename them" in message
    assert not (tmp_path / FILE).exists()


def test_splits_come_from_names_or_from_the_folder(tmp_path):
    names = ["imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar", "test_0.tar", "trainer-1.tar"]
    assert group_by_split("shards", names) == {
        "train": ["imagenet1k-train-0000.tar", "trainer-1.tar"],
        "validation": ["imagenet1k-validation-00.tar"],
        "test": ["test_0.tar"],
    }
    assert group_by_split(str(tmp_path / "val"), ["00000.tar"]) == {"val": ["00000.tar"]}
    assert group_by_split("/data/test_sets", ["00000.tar"]) == {"train": ["00000.tar"]}
    chosen = {"a": "x-0*", "b": "x-1*"}
    assert group_by_split(".", ["x-10.tar", "x-00.tar"], chosen) == {"a": ["x-00.tar"], "b": ["x-10.tar"]}
    with pytest.raises(UsageError, match=r"'y\.tar' matches none"):
        group_by_split(".", ["y.tar"], chosen)


def test_splits_on_the_command_line(tmp_path, run_packer):
    for i in range(4):
        write_tar(tmp_path / f"s-{i}.tar", labelled(i, 1))
    result = run_packer("index", tmp_path, "--split", "one=s-[01]*", "--split", "two=s-[23]*", "--json")
    splits = json.loads(result.stdout)["splits"]
    assert {name: [s["name"] for s in split["shards"]] for name, split in splits.items()} == {
        "one": ["s-0.tar", "s-1.tar"],
        "two": ["s-2.tar", "s-3.tar"],
    }
    assert "write NAME=GLOB" in run_packer("index", tmp_path, "--split", "one", exit_code=2).stderr


@pytest.mark.parametrize("name", ["../PWN", "/tmp/x", ".", "..", "a/b", "-x", ".hidden", "a\0b"])
def test_a_split_writes_nowhere_else(tmp_path, run_packer, name):
    write_tar(tmp_path / "v2" / "sub" / "a.tar", labelled(0, 1))
    before = sorted(tmp_path.rglob("*"))
    result = run_packer("index", tmp_path / "v2" / "sub", "--split", f"{name}=*", exit_code=2)
    assert "a split cannot be called" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_split_given_twice_is_refused(tmp_path, run_packer):
    write_tar(tmp_path / "a.tar", labelled(0, 1))
    assert "twice" in run_packer("index", tmp_path, "--split", "a=x*", "--split", "a=*", exit_code=2).stderr


@pytest.mark.parametrize("name", ["train.names", "train.index.npy", "train.wids.json", FILE])
def test_a_shard_called_like_the_index_is_not_overwritten(tmp_path, name):
    before = write_tar(tmp_path / name, labelled(0, 1)).read_bytes()
    with pytest.raises(UsageError, match="like a file of the index"):
        index_folder(str(tmp_path / name), workers=1)
    assert (tmp_path / name).read_bytes() == before


def test_each_folder_of_a_nested_tree_is_a_dataset(tmp_path, run_packer):
    for split in ("train", "validation"):
        write_tar(tmp_path / split / "00000.tar", labelled(0, 3))
    result = run_packer("index", tmp_path, exit_code=1)
    commands = [line.split() for line in result.stderr.splitlines() if line.startswith("  packer index")]
    assert [command[-1] for command in commands] == [str(tmp_path / "train"), str(tmp_path / "validation")]
    for command in commands:
        run_packer(*command[1:])
    assert list(Packed(tmp_path / "validation")) == ["validation"]
    with pytest.raises(UsageError, match="the shards lie in 2 folders"):
        index_folder(tmp_path / "*" / "00000.tar")


def test_nothing_to_index_is_explained(tmp_path):
    with pytest.raises(SourceError, match=r"holds no shards \(\.tar"):
        index_folder(tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(SourceError, match="compressed shards only"):
        index_folder(tmp_path)
    with pytest.raises(UsageError, match="copy them here first"):
        index_folder("s3://bucket/{000..012}.tar")
    with pytest.raises(ProblemsError, match=r"3 shard\(s\).*\n.*x-0.tar: no such file"):
        index_folder(str(tmp_path / "x-{0..2}.tar"))
    write_tar(tmp_path / "-odd.tar", {})
    with pytest.raises(UsageError, match="begin with a letter"):
        index_folder(str(tmp_path / "-odd.tar"))
    write_tar(tmp_path / "a.tar", {"a.txt": b""})
    with pytest.raises(UsageError, match="twice"):
        index_folder(f"{tmp_path}/a.tar::{tmp_path}/a*.tar")


# --- refusals -------------------------------------------------------------------------------------


def test_every_truncated_shard_is_named_with_its_offset(tmp_path, run_packer):
    for i in range(4):
        write_tar(tmp_path / f"train-{i}.tar", labelled(4 * i, 4))
    os.truncate(tmp_path / "train-1.tar", 2500)  # inside the padding of a member
    os.truncate(tmp_path / "train-2.tar", 1536)  # between two: other readers take this for the end
    os.truncate(tmp_path / "train-3.tar", 0)
    before = sorted(os.listdir(tmp_path))
    result = run_packer("index", tmp_path, exit_code=1)
    assert "3 of 4 shards cannot be indexed; nothing was written" in result.stderr
    assert "train-1.tar: at offset 1536: truncated: '000004.cls'" in result.stderr
    assert "train-2.tar: at offset 1536: truncated: the file ends here" in result.stderr
    assert "train-3.tar: at offset 0: an empty file" in result.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_a_shard_cut_inside_its_end_is_refused(tmp_path):
    path = write_tar(tmp_path / "0.tar", {"a.txt": b"1"})
    for size in (2048 - 100, 2048 - 1, 1536 + 1, path.stat().st_size - 1):
        os.truncate(path, size)
        with pytest.raises(ProblemsError, match=f"truncated inside the end of the archive; the file ends at {size}"):
            index_folder(tmp_path, workers=1)
        write_tar(path, {"a.txt": b"1"})
    os.truncate(path, 1536)  # one block of zeros is an end
    assert index_folder(tmp_path, workers=1).samples == 1


def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "zero.tar").symlink_to("/dev/zero")
    (tmp_path / "folder.tar").mkdir()
    write_tar(tmp_path / "ok.tar", labelled(0, 1))
    run = subprocess.run(
        [sys.executable, "-m", "packer", "index", str(tmp_path), "-j", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 1
    for name in ("pipe.tar", "zero.tar", "folder.tar"):
        assert f"{name}: not a regular file" in run.stderr
        with pytest.raises(ShardError, match="not a regular file"):
            next(iter_members(tmp_path / name))


def test_keys_used_twice_are_listed(tmp_path):
    write_tar(tmp_path / "train-0.tar", {"a.jpg": b"1", "b.jpg": b"2", "a.txt": b"3", "c.jpg": b"4"})
    write_tar(tmp_path / "train-1.tar", {"c.jpg": b"5"})
    write_tar(tmp_path / "val-0.tar", {"b.jpg": b"6"})  # another split may use a key again
    with pytest.raises(ProblemsError) as caught:
        index_folder(tmp_path, workers=1)
    assert caught.value.problems == [
        ("a", "train: in train-0.tar and train-0.tar"),
        ("c", "train: in train-0.tar and train-1.tar"),
    ]
    assert not (tmp_path / FILE).exists()


def test_two_members_of_one_field_are_refused(tmp_path):
    write_tar(tmp_path / "0.tar", {"a.jpg": b"", "a.JPG": b""})
    with pytest.raises(ProblemsError, match="second field 'jpg' of sample 'a'"):
        index_folder(tmp_path, workers=1)


def test_members_that_are_no_samples_do_not_make_a_column_each(tmp_path):
    write_tar(tmp_path / "0.tar", {f"a.{i}": b"" for i in range(300)})
    with pytest.raises(ProblemsError, match="more than 256 different fields"):
        index_folder(tmp_path, workers=1)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "0.tar", labelled(0, 3))

    def probe_and_grow(view: memoryview) -> ImageInfo:
        os.truncate(path, 20480)
        return ImageInfo("jpeg", 1, 1)

    monkeypatch.setattr(indexing, "probe", probe_and_grow)
    with pytest.raises(ProblemsError, match="changed while it was read"):
        index_folder(tmp_path, workers=1)


# --- what stands there already --------------------------------------------------------------------


def test_indexing_again_replaces_an_index_but_no_packed_dataset(tmp_path, run_packer, image_folder):
    shards = tmp_path / "shards"
    write_tar(shards / "0.tar", labelled(0, 2))
    index_folder(shards)
    write_tar(shards / "1.tar", labelled(2, 2))
    assert index_folder(shards).samples == 4

    packed = tmp_path / "packed"
    run_packer("shard", image_folder(), packed)
    assert "--force makes it again" in run_packer("index", packed, exit_code=1).stderr


def test_force_restores_an_index_without_losing_what_shards_do_not_tell(tmp_path, run_packer, image_folder):
    packed = tmp_path / "packed"
    run_packer("shard", image_folder(suffixes=(".JPEG", ".png")), packed)
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    damaged = bytearray(before["train.index.npy"])
    damaged[-1] ^= 1
    (packed / "train.index.npy").write_bytes(damaged)
    run_packer("index", packed, "--force")
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before

    # Other shards are another dataset: nothing of the old one's story holds.
    (packed / "train-000000.tar").rename(packed / "train-000001.tar")
    assert index_folder(packed, force=True).classes is None


def test_a_folder_at_work_is_left_alone(tmp_path):
    write_tar(tmp_path / "0.tar", labelled(0, 2))
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another packer process"):
            index_folder(tmp_path)
    finally:
        os.close(fd)
    (tmp_path / ".packer").mkdir()
    with pytest.raises(OutputError, match="unfinished job"):
        index_folder(tmp_path)


def test_an_interrupted_end_does_not_look_complete(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", labelled(0, 2))
    index_folder(tmp_path, workers=1)
    monkeypatch.setattr(indexing, "finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        index_folder(tmp_path, workers=1)
    assert not (tmp_path / FILE).exists()


def test_a_foreign_dataset_json_is_not_overwritten(tmp_path):
    write_tar(tmp_path / "0.tar", labelled(0, 2))
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(OutputError, match="--force replaces it"):
        index_folder(tmp_path)
    assert index_folder(tmp_path, force=True).samples == 2


# --- opening --------------------------------------------------------------------------------------

OPEN = """
import sys
from packer.packed import Packed
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
before = resident()
train = Packed(sys.argv[1])["train"]
assert len(train.rows) == len(train) and int(train.rows[len(train) // 2]["label"]) == len(train) // 2
print(resident() - before)
"""


def test_opening_a_large_index_reads_next_to_nothing_of_it(tmp_path):
    count, fields = 300_000, ["jpg", "cls"]
    rows = empty_rows(count, fields)
    rows["label"] = np.arange(count)
    rows["shard"] = 0
    keys = Strings.of([b"n%08d/image_%08d" % (i // 1300, i) for i in range(count)])
    split = Split("train", (Shard("train-000000.tar", count, 1, 1),))
    finish(str(tmp_path), format="webdataset", splits=[(split, rows, Names(keys, (keys, keys)))], fields=fields)
    done = subprocess.run([sys.executable, "-c", OPEN, tmp_path], check=True, capture_output=True, text=True)
    assert (tmp_path / "train.index.npy").stat().st_size > 16 << 20
    assert int(done.stdout) < 4 << 20


def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path, run_packer, image_folder, monkeypatch):
    out = tmp_path / "out"
    run_packer("shard", image_folder(), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def deny(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:  # root may write everywhere
        patch.setattr(os, "access", lambda path, mode: False)
        patch.setattr(indexing, "_read_all", deny)
        assert "cannot write into" in run_packer("index", out, "--force", exit_code=1).stderr
    monkeypatch.setattr(os, "unlink", deny)
    assert "cannot write" in run_packer("index", out, "--force", exit_code=1).stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("broken", ["missing", "damaged", "other shards"])
def test_what_is_lost_of_a_packed_dataset_is_said_and_not_made_up(tmp_path, run_packer, image_folder, broken):
    out = tmp_path / "out"
    run_packer("shard", image_folder(), out)
    before = Manifest.load(str(out))
    names = out / "train.names"
    if broken == "missing":
        names.unlink()
        assert "index --force" in run_packer("unpack", out, tmp_path / "back", exit_code=1).output
    elif broken == "damaged":
        names.write_bytes(names.read_bytes()[:-1] + b"x")
    else:
        (out / "train-000000.tar").rename(out / "train-0.tar")
    result = run_packer("index", out, "--force", "--quiet")
    assert f"warning: lost of {before.samples} samples" in result.stderr and "original paths" in result.stderr
    after = Manifest.load(str(out))
    assert after.classes == (None if broken == "other shards" else before.classes)
    assert list(after.source["lost"].values()) == [before.samples]
    run_packer("unpack", out, tmp_path / "back")
    files = [path for path in (tmp_path / "back").rglob("*") if path.is_file()]
    assert len(files) == before.samples and not [path for path in files if path.suffix == ".cls"]
    assert "lost" in run_packer("info", out).output
    assert run_packer("verify", out, "--quiet").output == ""


def test_nothing_is_lost_where_the_names_are_whole(tmp_path, run_packer, image_folder):
    out = tmp_path / "out"
    run_packer("shard", image_folder(), out)
    before = (out / "train.names").read_bytes()
    assert "warning" not in run_packer("index", out, "--force").output
    assert (out / "train.names").read_bytes() == before


def test_label_files_of_the_source_are_still_restored(tmp_path, run_packer, image_folder):
    source = image_folder(per_class=1)
    for number, path in enumerate(sorted(source.rglob("*.*"))):
        path.with_suffix(".cls").write_text(f"{number}\n")
    run_packer("shard", source, tmp_path / "out")
    (tmp_path / "out" / "train.names").unlink()
    run_packer("index", tmp_path / "out", "--force")
    run_packer("unpack", tmp_path / "out", tmp_path / "back")
    assert len(list((tmp_path / "back").rglob("*.cls"))) == Manifest.load(str(tmp_path / "out")).samples
