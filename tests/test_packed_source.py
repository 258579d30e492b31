"""Packed datasets as sources: the same bytes again, other shards, merging, choosing, withdrawing."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from crc32c import crc32c
from PIL import Image

import packer.shard
from packer.errors import ManifestError, OutputError, ShardError, SourceError, UsageError
from packer.finish import finish
from packer.index import Names, empty_rows
from packer.manifest import FILE, Shard, Split
from packer.pack import PackOptions, PackResult, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.sources.base import Source
from packer.sources.folder import FolderSource
from packer.sources.packed import PackedSource
from packer.strings import Strings
from packer.withdraw import check_withdrawn, selection

Folders = Callable[..., Path]
Samples = dict[tuple[str, str], dict[str, bytes]]

PLAN = PlanOptions(shard_samples=3)


def packed(source: Source, out: Path, plan: PlanOptions = PLAN, **chosen: object) -> PackResult:
    choose = selection(seed=plan.seed, **chosen) if chosen else None  # type: ignore[arg-type]
    return pack(source, out, PackOptions(plan=plan, workers=1), choose=choose)


def repacked(out: Path, *sources: Path, plan: PlanOptions = PLAN, **chosen: object) -> PackResult:
    return packed(PackedSource(tuple(map(str, sources))), out, plan, **chosen)


def contents(out: Path) -> Samples:
    """Every sample by split and key: its fields, its label's class, its original paths."""
    found: Samples = {}
    data = Packed(out)
    for name, split in data.items():
        for i in range(len(split)):
            key = split.key(i)
            assert (name, key) not in found
            sample = split.sample(i, check=True)
            label = int(split.rows[i]["label"])
            if label >= 0 and data.manifest.classes:
                sample["class"] = data.manifest.classes[label].encode()
            for number, field in enumerate(split.fields):
                sample[f"path of {field}"] = split.names.paths[number][i]
            found[name, key] = sample
    return found


def shard_bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.tar")}


def beside(out: Path) -> dict[str, bytes]:
    """Index, names and wids index."""
    return {path.name: path.read_bytes() for path in out.glob("*.*") if path.suffix in (".npy", ".names", ".wids")}


@pytest.fixture
def folder(image_folder: Folders) -> Path:
    return image_folder("src", splits=("train", "val"), per_class=5)


@pytest.fixture
def sidecars(tmp_path: Path) -> Path:
    root = tmp_path / "sidecars"
    root.mkdir()
    for i in range(7):
        Image.fromarray(np.full((8 + i, 9, 3), i, np.uint8)).save(root / f"s{i}.png")
        (root / f"s{i}.cls").write_bytes(b"%d \n" % i)  # not as packing would write it
        (root / f"s{i}.json").write_bytes(b'{"i":%d}' % i)
        if i % 2:
            Image.fromarray(np.full((8 + i, 9), i, np.uint8)).save(root / f"s{i}.mask.png")
    return root


# ---------------------------------------------------------------- the same bytes again


@pytest.mark.parametrize("kind", ["folder", "sidecars"])
def test_folder_to_shards_to_shards_gives_the_same_bytes(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    packed(FolderSource(str(request.getfixturevalue(kind))), tmp_path / "once")
    repacked(tmp_path / "twice", tmp_path / "once")
    repacked(tmp_path / "thrice", tmp_path / "twice")
    assert shard_bytes(tmp_path / "once") == shard_bytes(tmp_path / "twice") == shard_bytes(tmp_path / "thrice")
    assert beside(tmp_path / "once") == beside(tmp_path / "twice")
    assert contents(tmp_path / "once") == contents(tmp_path / "twice")
    assert Packed(tmp_path / "once").manifest.classes == Packed(tmp_path / "twice").manifest.classes


def test_where_the_dataset_lies_does_not_show(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "here")
    repacked(tmp_path / "one", tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    repacked(tmp_path / "two", tmp_path / "there")
    assert (tmp_path / "one" / FILE).read_bytes() == (tmp_path / "two" / FILE).read_bytes()


def test_large_fields_are_copied_piece_by_piece(
    sidecars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sidecars / "s3.json").write_bytes(os.urandom(9_000_000))
    monkeypatch.setattr(packer.shard, "BATCH_BYTES", 1000)
    packed(FolderSource(str(sidecars)), tmp_path / "once")
    monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1)
    repacked(tmp_path / "twice", tmp_path / "once")
    assert shard_bytes(tmp_path / "once") == shard_bytes(tmp_path / "twice")


# ---------------------------------------------------------------- other shards


def test_resharding_and_reshuffling_keep_every_sample(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    plans = [PlanOptions(shard_samples=4), PlanOptions(shuffle=False), PlanOptions(shard_samples=2, seed=7)]
    for number, plan in enumerate(plans):
        again = tmp_path / f"again-{number}"
        repacked(again, tmp_path / "out", plan=plan)
        assert contents(again) == contents(tmp_path / "out")
        packed(FolderSource(str(folder)), tmp_path / f"direct-{number}", plan)
        if plan.shuffle:  # a shuffle depends on keys alone, whatever the source
            assert shard_bytes(again) == shard_bytes(tmp_path / f"direct-{number}")


def test_a_new_split_replaces_the_old_one_and_is_what_the_folder_would_have_got(folder: Path, tmp_path: Path) -> None:
    plan = PlanOptions(split=(("a", 0.5), ("b", 0.5)))
    packed(FolderSource(str(folder)), tmp_path / "out")
    repacked(tmp_path / "again", tmp_path / "out", plan=plan)
    packed(FolderSource(str(folder)), tmp_path / "direct", plan)
    assert set(Packed(tmp_path / "again")) == {"a", "b"}
    assert shard_bytes(tmp_path / "again") == shard_bytes(tmp_path / "direct")


# ---------------------------------------------------------------- merging


def test_parts_merged_are_the_whole(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "whole")
    for part in (1, 2, 3):
        packed(FolderSource(str(folder)), tmp_path / f"part-{part}", fold=(part, 3))
    repacked(tmp_path / "merged", *(tmp_path / f"part-{part}" for part in (3, 1, 2)))
    assert shard_bytes(tmp_path / "merged") == shard_bytes(tmp_path / "whole")
    assert beside(tmp_path / "merged") == beside(tmp_path / "whole")
    assert Packed(tmp_path / "merged").manifest.classes == Packed(tmp_path / "whole").manifest.classes


def test_class_lists_are_joined_and_labels_follow_their_names(image_folder: Folders, tmp_path: Path) -> None:
    for name, classes in (("a", ("cat", "dog")), ("b", ("ant", "dog")), ("c", ("cat", "bee"))):
        root = image_folder(name, classes=classes)
        for path in list(root.rglob("*.*")):
            path.rename(path.with_name(f"{name}-{path.name}"))
        packed(FolderSource(str(root)), tmp_path / f"out-{name}")
    repacked(tmp_path / "all", *(tmp_path / f"out-{name}" for name in "abc"))
    merged = Packed(tmp_path / "all")
    assert merged.manifest.classes == ("ant", "bee", "cat", "dog")
    for (_, key), sample in contents(tmp_path / "all").items():
        assert sample["class"].decode() == key.split("/")[0]
        assert sample["cls"] == b"%d" % merged.manifest.classes.index(key.split("/")[0])
    assert {k: v for k, v in contents(tmp_path / "all").items() if "/a-" in k[1]}.keys() == contents(
        tmp_path / "out-a"
    ).keys()


def test_fields_that_only_one_part_has_are_absent_in_the_others(
    sidecars: Path, image_folder: Folders, tmp_path: Path
) -> None:
    for path in sidecars.glob("*.cls"):
        path.unlink()
    packed(FolderSource(str(sidecars)), tmp_path / "a")
    packed(FolderSource(str(image_folder("flat", classes=("",)))), tmp_path / "b")
    repacked(tmp_path / "all", tmp_path / "a", tmp_path / "b")
    assert set(Packed(tmp_path / "all").manifest.fields) == {"jpg", "json", "mask.png", "png"}
    assert {key: {f: v for f, v in s.items() if "path" not in f} for key, s in contents(tmp_path / "all").items()} == {
        key: {f: v for f, v in s.items() if "path" not in f}
        for part in "ab"
        for key, s in contents(tmp_path / part).items()
    }


def test_labels_that_are_files_cannot_be_renumbered(sidecars: Path, folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(sidecars)), tmp_path / "a")
    packed(FolderSource(str(folder)), tmp_path / "b")
    with pytest.raises(SourceError, match="different class lists"):
        repacked(tmp_path / "all", tmp_path / "a", tmp_path / "b")


def test_equal_keys_are_refused_with_examples(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "a")
    packed(FolderSource(str(folder)), tmp_path / "b", fold=(1, 2))
    count = Packed(tmp_path / "b").manifest.samples
    with pytest.raises(SourceError, match=rf"{count} key\(s\) are in more than one of the datasets, for example"):
        repacked(tmp_path / "all", tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "all").exists()


def test_a_folder_without_manifest_is_no_packed_source(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"dataset\.json is missing"):
        repacked(tmp_path / "out", folder)


# ---------------------------------------------------------------- damage


def damage(shard: Path, offset: int) -> None:
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("what", ["flipped", "cut", "gone"])
def test_a_damaged_shard_is_found_while_it_is_copied(
    sidecars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, large: bool
) -> None:
    packed(FolderSource(str(sidecars)), tmp_path / "out")
    split = Packed(tmp_path / "out")["train"]
    shard = Path(split.shard_path(1))
    victim = next(i for i in range(len(split)) if split.rows[i]["shard"] == 1)
    if what == "flipped":
        damage(shard, int(split.rows[victim]["json:offset"]) + 3)
    elif what == "cut":
        os.truncate(shard, int(split.rows[victim]["json:offset"]) + 3)
    else:
        shard.unlink()
    if large:
        monkeypatch.setattr(packer.shard, "LARGE_BYTES", 1)
    with pytest.raises(ShardError, match=r"train-000001\.tar"):
        repacked(tmp_path / "again", tmp_path / "out")
    assert not (tmp_path / "again" / FILE).exists()


# ---------------------------------------------------------------- choosing and withdrawing


def test_keys_and_original_paths_choose_and_drop(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    listed = frozenset([b"train/cat/cat-0", b"val/dog/dog-1.png"])
    repacked(tmp_path / "only", tmp_path / "out", keys=listed)
    assert {key for _, key in contents(tmp_path / "only")} == {"train/cat/cat-0", "val/dog/dog-1"}
    repacked(tmp_path / "without", tmp_path / "out", drop=listed)
    everything = contents(tmp_path / "out")
    assert contents(tmp_path / "without") == {
        k: v for k, v in everything.items() if k[1] not in ("train/cat/cat-0", "val/dog/dog-1")
    }
    packed(FolderSource(str(folder)), tmp_path / "direct", drop=listed)
    assert shard_bytes(tmp_path / "direct") == shard_bytes(tmp_path / "without")


def test_a_key_that_is_nowhere_is_an_error(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    with pytest.raises(UsageError, match="1 of the 2 listed keys are in no sample: train/cat/cat-O"):
        repacked(tmp_path / "without", tmp_path / "out", drop=frozenset([b"train/cat/cat-O", b"train/cat/cat-1"]))


def test_withdrawn_bytes_are_nowhere_in_the_new_shards(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    secret = (folder / "train/cat/cat-3.png").read_bytes()
    assert any(secret in data for data in shard_bytes(tmp_path / "out").values())
    dropped = frozenset([b"train/cat/cat-3.png"])
    repacked(tmp_path / "new", tmp_path / "out", drop=dropped)
    assert not any(secret in data for data in shard_bytes(tmp_path / "new").values())
    assert not any(b"cat-3" in path.read_bytes() for path in (tmp_path / "new").iterdir() if "val" not in path.name)
    found = check_withdrawn(PackedSource((str(tmp_path / "out"),)), str(tmp_path / "new"), dropped)
    assert found == (1, ())
    assert found.lines("new/") == ["none of the 1 withdrawn samples is in new/"]


def test_a_copy_of_a_withdrawn_picture_under_another_name_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "train/cat/cat-3.png", folder / "val/dog/again.png")
    packed(FolderSource(str(folder)), tmp_path / "out")
    dropped = frozenset([b"train/cat/cat-3"])
    repacked(tmp_path / "new", tmp_path / "out", drop=dropped)
    found = check_withdrawn(PackedSource((str(tmp_path / "out"),)), str(tmp_path / "new"), dropped)
    assert found.twins == ("val/dog/again",)
    assert "val/dog/again" in found.warnings[0]


def test_a_dataset_that_still_holds_a_withdrawn_sample_is_called_out(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    source = PackedSource((str(tmp_path / "out"),))
    for name in (b"train/cat/cat-3", b"train/cat/cat-3.png"):
        with pytest.raises(OutputError, match="still holds 1 of the withdrawn samples"):
            check_withdrawn(source, str(tmp_path / "out"), frozenset([name]))


def test_dropping_everything_is_refused(folder: Path, tmp_path: Path) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    every = frozenset(key.encode() for _, key in contents(tmp_path / "out"))
    with pytest.raises(UsageError, match="empty"):
        repacked(tmp_path / "new", tmp_path / "out", drop=every)


def test_a_dataset_made_by_index_is_a_source_too(
    folder: Path, tmp_path: Path, run_packer: Callable[..., object]
) -> None:
    packed(FolderSource(str(folder)), tmp_path / "out")
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in (tmp_path / "out").glob("*.tar"):
        shutil.copy(path, shards)
    run_packer("index", shards)
    repacked(tmp_path / "again", shards)
    # Their labels are files: the bytes are the same, the names of classes are not known.
    assert shard_bytes(tmp_path / "again") == shard_bytes(tmp_path / "out")


# ---------------------------------------------------------------- datasets that are not as packing leaves them


def made_by_hand(out: Path, keys: dict[str, list[bytes]]) -> Path:
    """A dataset of samples of one byte with these keys, by split, whatever they are."""
    out.mkdir()
    parts = []
    for name, listed in keys.items():
        (out / f"{name}-000000.tar").write_bytes(b"x" * len(listed))
        rows = empty_rows(len(listed), ["bin"])
        rows["shard"], rows["label"] = 0, -1
        rows["bin:offset"], rows["bin:length"], rows["bin:crc32c"] = np.arange(len(listed)), 1, crc32c(b"x")
        shards = (Shard(f"{name}-000000.tar", len(listed), len(listed), crc32c(b"x" * len(listed))),)
        stored = Names(Strings.of(listed), (Strings.of([b""] * len(listed)),))
        parts.append((Split(name, shards if listed else ()), rows, stored))
    finish(str(out), format="webdataset", splits=parts, fields=["bin"])
    return out


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (b"\xff\x1b[31m\n../../x", "not UTF-8"),
        (b"a\nb", "control bytes"),
        (b"../x", "climbs out"),
        (b"a/../../x", "climbs out"),
        (b"/etc/x", "absolute"),
        (b"a/b.c", "has a dot"),
        (b"a/", "empty, or ends with a slash"),
        (b"", "empty"),
        (b"good", "more than one sample"),
    ],
)
def test_keys_that_would_do_harm_are_refused(tmp_path: Path, key: bytes, words: str) -> None:
    made_by_hand(tmp_path / "in", {"train": [b"good", key, "ä/v1.0/50%".encode()]})
    with pytest.raises(SourceError, match=words):
        repacked(tmp_path / "out", tmp_path / "in")
    assert not (tmp_path / "out").exists()


def test_keys_of_others_that_do_no_harm_are_kept(tmp_path: Path) -> None:
    keys = ["ä/v1.0/50%".encode(), b"./cat/1", b"a b/c"]
    made_by_hand(tmp_path / "in", {"train": keys})
    repacked(tmp_path / "out", tmp_path / "in")
    assert {key.encode() for _, key in contents(tmp_path / "out")} == set(keys)


def test_one_key_in_two_splits_stays_two_samples_or_is_refused(tmp_path: Path) -> None:
    made_by_hand(tmp_path / "in", {"train": [b"0", b"1"], "val": [b"0"]})
    repacked(tmp_path / "out", tmp_path / "in")
    assert contents(tmp_path / "out").keys() == {("train", "0"), ("train", "1"), ("val", "0")}
    with pytest.raises(SourceError, match="would meet in split"):
        repacked(tmp_path / "one", tmp_path / "in", plan=PlanOptions(split=(("all", 1.0),)))


def test_a_dataset_of_no_sample_is_no_source_but_may_be_merged(tmp_path: Path) -> None:
    made_by_hand(tmp_path / "empty", {"train": [], "val": []})
    made_by_hand(tmp_path / "full", {"train": [b"0"]})
    with pytest.raises(SourceError, match="no sample"):
        repacked(tmp_path / "out", tmp_path / "empty")
    repacked(tmp_path / "out", tmp_path / "empty", tmp_path / "full")
    assert contents(tmp_path / "out").keys() == {("train", "0")}


def test_an_index_over_no_member_is_no_source(tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "train-0.tar", "w"):
        pass
    run_packer("index", tmp_path / "in")
    assert "no sample" in run_packer("shard", tmp_path / "in", tmp_path / "out", exit_code=1).stderr
