"""Folders as sources: every layout is recognised, and gives the samples, labels and splits that are meant."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import SourceError, UsageError
from packer.sample import unescape_key
from packer.sources.base import Scan
from packer.sources.folder import LAYOUTS, FolderOptions, FolderSource
from packer.sources.layouts import split_of
from packer.sources.listing import Filter
from tests.strategies import file_names, picture_names, trees

Sample = dict[str, str]  # field → relative path


def make(root: Path, *paths: str | bytes) -> Path:
    """Files of one byte; a path that ends in '/' is a folder. Nothing is ever decoded by a scan."""
    for path in paths:
        full = os.path.join(os.fsencode(root), os.fsencode(path))
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if not full.endswith(b"/"):
            with open(full, "wb") as f:
                f.write(b"x")
    return root


def scan(root: Path, **options: object) -> Scan:
    return FolderSource(str(root), FolderOptions(**options)).scan()  # type: ignore[arg-type]


def samples(found: Scan) -> dict[str, Sample]:
    """Files by field, by key. Checks on the way that columns fit each other."""
    assert len(set(found.keys)) == len(found)
    assert found.first.tolist()[0] == 0
    assert found.first.tolist()[-1] == len(found.paths) == len(found.sizes) == len(found.field)
    assert len(found.label) == len(found.split) == len(found)
    result: dict[str, Sample] = {}
    for i, key in enumerate(found.keys):
        numbers = range(int(found.first[i]), int(found.first[i + 1]))
        sample = {found.fields[found.field[n]]: os.fsdecode(found.paths[n]) for n in numbers}
        assert len(sample) == len(numbers) > 0, f"two files of one field in {key!r}"
        result[key.decode()] = sample
    return result


def labels(found: Scan) -> dict[str, int]:
    return {key.decode(): label for key, label in zip(found.keys, found.label.tolist(), strict=True)}


def splits(found: Scan) -> dict[str, list[str]]:
    return {
        name: [
            key.decode() for key, number in zip(found.keys, found.split, strict=True) if found.splits[number] == name
        ]
        for name in found.splits
    }


def reasons(pairs: object) -> dict[str, str]:
    return {os.fsdecode(path): reason for path, reason in pairs}  # type: ignore[attr-defined]


# ---------------------------------------------------------------- ImageFolder


def test_one_folder_per_class(tmp_path: Path) -> None:
    found = scan(
        make(tmp_path, "cat/1.jpg", "cat/2.PNG", "dog/1.jpeg", "dog/notes.txt", "empty/", "root.jpg", "README")
    )
    assert (found.layout, found.rule) == ("imagefolder", "pictures lie in one folder per class")
    assert found.classes == ("cat", "dog", "empty")
    assert samples(found) == {
        "cat/1": {"jpg": "cat/1.jpg"},
        "cat/2": {"png": "cat/2.PNG"},
        "dog/1": {"jpg": "dog/1.jpeg"},
    }
    assert labels(found) == {"cat/1": 0, "cat/2": 0, "dog/1": 1}
    assert found.made_cls
    assert found.splits == ("train",)
    assert reasons(found.skipped) == {
        "README": "not an image by its extension",
        "dog/notes.txt": "not an image by its extension",
        "root.jpg": "a picture in no class folder",
    }
    assert found.problems == []


def test_nested_classes_are_the_first_folder(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "animals/cats/persian/1.jpg", "animals/dogs/1.jpg", "x.jpg/inner.jpg"))
    assert found.classes == ("animals", "x.jpg")
    assert labels(found) == {"animals/cats/persian/1": 0, "animals/dogs/1": 0, "x.jpg/inner": 1}


def test_empty_files_are_problems(tmp_path: Path) -> None:
    make(tmp_path, "cat/1.jpg", "cat/notes.txt")
    for name in ("cat/0.png", "cat/notes.txt"):
        (tmp_path / name).write_bytes(b"")
    found = scan(tmp_path)
    assert reasons(found.problems) == {"cat/0.png": "empty file (0 bytes)"}
    assert found.fields == ("jpg",)  # no sample has a PNG


def test_a_file_named_as_an_extension_is_no_picture(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "cat/jpg", "cat/1.jpg", "cat/png"))
    assert samples(found) == {"cat/1": {"jpg": "cat/1.jpg"}}
    assert set(reasons(found.skipped)) == {"cat/jpg", "cat/png"}


@given(tree=trees(picture_names, max_size=6))
@settings(max_examples=60)
def test_any_names_become_samples_whose_paths_come_back(
    tmp_path_factory: pytest.TempPathFactory, tree: list[bytes]
) -> None:
    root = make(tmp_path_factory.mktemp("tree"), *tree)
    for layout in ("flat", "imagefolder"):
        try:
            found = scan(root, layout=layout)
        except SourceError:
            found = None
        visible = {path for path in tree if not any(part.startswith(b".") for part in path.split(b"/"))}
        expected = visible if layout == "flat" else {path for path in visible if b"/" in path}
        if found is None:
            assert not expected
            continue
        assert set(found.paths) == expected
        for key, path in zip(found.keys, found.paths, strict=True):
            key.decode("utf-8")
            assert unescape_key(key) in (path, path.rpartition(b".")[0])
        assert len(set(found.keys)) == len(expected)


# ---------------------------------------------------------------- the order of classes


def torchvision_classes(root: Path) -> dict[str, int]:
    """torchvision's rule: the names of folders, sorted as text."""
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return {name: number for number, name in enumerate(names)}


class_names = file_names.filter(lambda name: not name.startswith(b".") and len(name) < 200)


@given(names=st.sets(class_names, min_size=1, max_size=8), data=st.data())
@settings(max_examples=60)
def test_classes_are_ordered_as_torchvision_does(
    tmp_path_factory: pytest.TempPathFactory, names: set[bytes], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("classes")
    full = data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1))
    make(root, *(name + (b"/1.jpg" if name in full else b"/") for name in names))
    found = scan(root, layout="imagefolder")
    expected = torchvision_classes(root)
    assert found.classes is not None
    assert {name: number for number, name in enumerate(found.classes)} == expected
    for path, label in zip(found.paths, found.label.tolist(), strict=True):
        assert label == expected[os.fsdecode(path.partition(b"/")[0])]


NAMES = (
    *(b"1", b"10", b"2", b"001", b"Cat", b"cat", b"v1.0", b"-dash", b"a b", b"caf\xe9", b"\xff", "café".encode()),
    *("cafe\N{COMBINING ACUTE ACCENT}".encode(), "写真".encode(), "\N{GRINNING FACE}".encode(), "\ufb01".encode()),
)


def test_classes_are_those_of_torchvision_itself(tmp_path: Path) -> None:
    python = os.environ.get("PACKER_TORCHVISION_PYTHON")
    if not python:
        pytest.skip("PACKER_TORCHVISION_PYTHON names no Python with torchvision")
    make(tmp_path, *(name + b"/1.jpg" for name in NAMES), *(name + b"/nested/2.PNG" for name in NAMES[:5]))
    script = (
        "import json, sys; from torchvision.datasets import ImageFolder; d = ImageFolder(sys.argv[1]);"
        "print(json.dumps([d.class_to_idx, [[p[len(sys.argv[1]) + 1:], n] for p, n in d.samples]]))"
    )
    out = subprocess.run(
        [python, "-c", script, str(tmp_path)], check=True, capture_output=True, timeout=PATIENCE_S
    ).stdout
    class_to_idx, expected = json.loads(out)
    found = scan(tmp_path)
    assert {name: number for number, name in enumerate(found.classes or ())} == class_to_idx
    listed = {os.fsdecode(path): label for path, label in zip(found.paths, found.label.tolist(), strict=True)}
    assert listed == dict(expected)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_the_scan_is_the_same_in_every_locale(tmp_path: Path, locale: str) -> None:
    make(tmp_path, *(name + b"/1.jpg" for name in NAMES))
    script = (
        "import sys; from packer.sources.folder import FolderSource; s = FolderSource(sys.argv[1]).scan();"
        "print(list(s.keys), s.label.tolist(), [c.encode('utf-8', 'surrogateescape') for c in s.classes])"
    )
    found = scan(tmp_path)
    expected = f"{list(found.keys)} {found.label.tolist()} {[os.fsencode(name) for name in found.classes or ()]}"
    for utf8 in ("0", "1"):
        environment = {"LC_ALL": locale, "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
        root = Path(__file__).resolve().parent.parent
        command = [sys.executable, "-c", script, str(tmp_path)]
        out = subprocess.run(
            command, check=True, capture_output=True, env=environment, cwd=root, timeout=PATIENCE_S
        ).stdout
        assert out.decode("ascii").strip() == expected


def test_given_classes_fix_the_labels(tmp_path: Path) -> None:
    make(tmp_path / "src", "cat/1.jpg", "dog/1.jpg")
    (tmp_path / "classes.txt").write_text("zebra\ndog\ncat\n")
    found = scan(tmp_path / "src", classes=str(tmp_path / "classes.txt"))
    assert found.classes == ("zebra", "dog", "cat")
    assert labels(found) == {"cat/1": 2, "dog/1": 1}
    (tmp_path / "classes.txt").write_text("dog\n")
    with pytest.raises(SourceError, match=r"lacks 1 of the class folders: cat; .*--exclude"):
        scan(tmp_path / "src", classes=str(tmp_path / "classes.txt"))
    found = scan(tmp_path / "src", classes=str(tmp_path / "classes.txt"), filter=Filter(exclude=("cat",)))
    assert labels(found) == {"dog/1": 0}


def test_what_is_no_class_moves_no_label(tmp_path: Path) -> None:
    make(tmp_path, "b/1.jpg", "__MACOSX/b/1.jpg", ".hidden/1.jpg", "@eaDir/1.jpg", "z/1.jpg", "m/notes.txt")
    (tmp_path / "a").symlink_to("b")
    found = scan(tmp_path)
    assert found.classes == ("b", "m", "z")
    found = scan(tmp_path, follow_symlinks=True)
    assert found.classes == ("a", "b", "m", "z")


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("folder", "split"),
    [
        ("train", "train"),
        ("Train", "train"),
        ("training", "train"),
        ("TEST", "test"),
        ("val2017", "val"),
        ("train2014", "train"),
        ("valid", "valid"),
        ("validation", "validation"),
        ("dev", "dev"),
        ("trains", None),
        ("test-time", None),
        ("train1", None),
        ("", None),
    ],
)
def test_names_of_splits(folder: str, split: str | None) -> None:
    assert split_of(folder.encode()) == split


def test_splits_have_one_list_of_classes(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "val/dog/2.jpg", "val/emu/1.jpg", "test/void/", "readme.txt")
    found = scan(tmp_path)
    assert found.layout == "splits"
    assert found.rule == (
        "the top-level folders are train, val; in them, imagefolder: pictures lie in one folder per class"
    )
    assert found.classes == ("cat", "dog", "emu", "void")
    assert labels(found) == {"train/cat/1": 0, "train/dog/1": 1, "val/dog/2": 1, "val/emu/1": 2}
    assert splits(found) == {"train": ["train/cat/1", "train/dog/1"], "val": ["val/dog/2", "val/emu/1"]}
    assert reasons(found.skipped) == {"readme.txt": "outside the split folders"}


def test_splits_are_packed_in_their_usual_order(tmp_path: Path) -> None:
    found = scan(make(tmp_path, *(f"{name}/c/1.jpg" for name in ("test", "val", "train", "dev", "valid"))))
    assert found.splits == ("train", "val", "valid", "dev", "test")


def test_folders_beside_splits_are_left_out_by_name(tmp_path: Path) -> None:
    make(tmp_path, "train2017/1.jpg", "Test/2.jpg", "annotations/instances.json", "extra/3.jpg")
    found = scan(tmp_path)
    assert found.layout == "splits"
    assert found.rule.startswith("the top-level folders are Test, train2017; left out: extra; in them, flat:")
    assert splits(found) == {"train": ["train2017/1"], "test": ["Test/2"]}
    assert reasons(found.skipped) == dict.fromkeys(
        ("annotations/instances.json", "extra/3.jpg"), "outside the split folders"
    )


def test_one_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "car/1.jpg", "train/1.jpg", "tram/1.jpg"))
    assert found.layout == "imagefolder"
    assert found.classes == ("car", "train", "tram")


def test_a_test_split_without_labels(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "train/stray.jpg", "test/1.jpg", "test/2.jpg"))
    assert found.rule.endswith("pictures lie in one folder per class; test has no class folders, so no labels")
    assert labels(found) == {"train/cat/1": 0, "train/dog/1": 1, "test/1": -1, "test/2": -1}
    assert reasons(found.skipped) == {"train/stray.jpg": "a picture in no class folder"}


def test_one_split_alone(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "val/cat/1.jpg"))
    assert splits(found) == {"val": ["val/cat/1"]}


# ---------------------------------------------------------------- flat, with and without labels


def test_a_flat_folder_without_labels(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "1.jpg", "2.png", "notes.txt"))
    assert (found.layout, found.rule) == ("flat", "pictures lie in one folder, without classes")
    assert (found.classes, found.made_cls) == (None, False)
    assert labels(found) == {"1": -1, "2": -1}


def test_pictures_in_a_folder_of_that_name_have_no_class(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "images/1.jpg", "images/2.jpg", "labels.csv"))
    assert (found.layout, found.rule) == ("flat", "pictures lie in images/, without classes")
    assert found.classes is None
    assert scan(make(tmp_path, "images/cat/3.jpg")).layout == "imagefolder"


def test_a_flat_folder_with_labels(tmp_path: Path) -> None:
    make(tmp_path / "src", "1.jpg", "2.jpg", "sub/3.png", "sub/2.png", "9.jpg")
    (tmp_path / "labels.csv").write_text("file,label\n1,cat\n2.jpg,dog\nsub/3,cat\nsub/2.png,emu\ngone,yak\n")
    found = scan(tmp_path / "src", labels=str(tmp_path / "labels.csv"))
    assert (found.layout, found.rule) == ("flat", "--labels was given")
    assert found.classes == ("cat", "dog", "emu", "yak")
    assert labels(found) == {"1": 0, "2": 1, "sub/3": 0, "sub/2": 2}
    assert found.made_cls
    assert reasons(found.problems) == {"9.jpg": "no row in labels.csv"}
    assert reasons(found.skipped) == {"gone": "row in labels.csv without a picture"}


def test_labels_that_are_missing_change_no_other_key(tmp_path: Path) -> None:
    make(tmp_path / "src", "a.jpg", "a.png")
    (tmp_path / "labels.csv").write_text("a.jpg,1\n")
    found = scan(tmp_path / "src", labels=str(tmp_path / "labels.csv"))
    assert labels(found) == {"a%2Ejpg": 1}
    assert set(reasons(found.problems)) == {"a.png"}


def test_a_row_for_two_pictures_is_a_problem_of_both(tmp_path: Path) -> None:
    make(tmp_path / "src", "x/a.jpg", "y/a.jpg", "y/b.jpg")
    (tmp_path / "labels.csv").write_text("a,1\nb,2\n")
    found = scan(tmp_path / "src", labels=str(tmp_path / "labels.csv"))
    assert labels(found) == {"y/b": 2}
    assert set(reasons(found.problems)) == {"x/a.jpg", "y/a.jpg"}
    assert found.classes is None


def test_labels_for_splits(tmp_path: Path) -> None:
    make(tmp_path / "src", "train/1.jpg", "test/2.jpg")
    (tmp_path / "labels.csv").write_text("1,7\n2,8\n")
    found = scan(tmp_path / "src", labels=str(tmp_path / "labels.csv"))
    assert (found.layout, found.splits) == ("splits", ("train", "test"))
    assert labels(found) == {"train/1": 7, "test/2": 8}


def test_labels_and_classes(tmp_path: Path) -> None:
    make(tmp_path / "src", "1.jpg", "2.jpg")
    (tmp_path / "labels.csv").write_text("1,dog\n2,bird\n")
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    found = scan(tmp_path / "src", labels=str(tmp_path / "labels.csv"), classes=str(tmp_path / "classes.txt"))
    assert found.classes == ("dog", "cat")
    assert labels(found) == {"1": 0}
    assert reasons(found.problems) == {"2.jpg": "class 'bird' is not in the list of classes"}


# ---------------------------------------------------------------- sidecars


def test_sidecars_of_one_stem_are_one_sample(tmp_path: Path) -> None:
    names = ["1.jpg", "1.json", "1.cls", "2.JPG", "2.json", "2.cls", "3.left.jpg", "3.right.jpg", "3.cls"]
    found = scan(make(tmp_path, *names, "4.jpg", "4.cls", "4.seg.png", "README.md", "LICENSE"))
    assert (found.layout, found.rule) == ("sidecars", "3 of 6 pictures have a file of the same stem beside them")
    assert samples(found) == {
        "1": {"jpg": "1.jpg", "json": "1.json", "cls": "1.cls"},
        "2": {"jpg": "2.JPG", "json": "2.json", "cls": "2.cls"},
        "3": {"left.jpg": "3.left.jpg", "right.jpg": "3.right.jpg", "cls": "3.cls"},
        "4": {"jpg": "4.jpg", "cls": "4.cls", "seg.png": "4.seg.png"},
    }
    assert found.fields == ("jpg", "cls", "json", "left.jpg", "right.jpg", "seg.png")
    assert not found.made_cls
    assert set(reasons(found.skipped)) == {"README.md", "LICENSE"}
    assert found.problems == []


def test_incomplete_sidecar_samples_are_problems(tmp_path: Path) -> None:
    make(tmp_path, "1.jpg", "1.json", "1.cls", "2.jpg", "2.json", "3.json", "3.cls", "4.jpg", "4.cls", "5.jpg", "5.cls")
    (tmp_path / "4.jpg").write_bytes(b"")
    (tmp_path / "5.cls").write_bytes(b"")  # an empty label file keeps its very bytes: none
    found = scan(tmp_path)
    assert set(samples(found)) == {"1", "5"}
    missing, orphan = (
        "no .cls file beside it, though other samples have one",
        "sidecar without a picture of the same stem",
    )
    assert reasons(found.problems) == {
        "2.jpg": missing,
        "2.json": missing,
        "3.cls": orphan,
        "3.json": orphan,
        "4.cls": "empty file (0 bytes)",
        "4.jpg": "empty file (0 bytes)",
    }


def test_sidecars_in_class_folders_have_their_class(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "cat/1.jpg", "cat/1.txt", "dog/1.jpg", "dog/1.txt", "void/", "README.md"))
    assert found.layout == "sidecars"
    assert found.classes == ("cat", "dog", "void")
    assert labels(found) == {"cat/1": 0, "dog/1": 1}
    assert found.made_cls


def test_label_files_in_one_split_are_label_files_in_all(tmp_path: Path) -> None:
    """Packing would make a second field 'cls' otherwise."""
    make(tmp_path / "src", "train/cat/1.jpg", "train/cat/1.cls", "val/cat/2.jpg", "val/cat/2.json")
    (tmp_path / "classes.txt").write_text("cat\n")
    found = scan(tmp_path / "src", classes=str(tmp_path / "classes.txt"))
    assert not found.made_cls
    assert set(samples(found)) == {"train/cat/1"}
    assert set(reasons(found.problems)) == {"val/cat/2.jpg", "val/cat/2.json"}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (
            ["1.2.840.1.jpg", "1.2.840.1.json", "1.2.840.2.jpg", "1.2.840.2.json"],
            ["1%2E2%2E840%2E1", "1%2E2%2E840%2E2"],
        ),
        (["a.jpg", "a.json", "a.v2.jpg", "a.v2.json"], ["a", "a%2Ev2"]),
        (["a.jpg", "a.json", "a.v2.jpg"], ["a"]),
        (["a.jpg", "a.json", "a.seg.png", "a.seg.json"], ["a"]),
        (["a.jpg", "a.JPEG", "a.json"], ["a", "a%2Ejpg"]),
        (["a.jpg", "a.png", "a.json"], ["a"]),
        (["a.jpg", "a.json", "A.jpg", "A.json"], ["A", "a"]),
        (["a.jpg", "a.json", "a..json"], ["a"]),
        (["a.jpg", "a.json", "a.b.png", "a.b.c.jpg", "a.b.c.json"], ["a", "a%2Eb%2Ec"]),
    ],
)
def test_dotted_names(tmp_path: Path, names: list[str], groups: list[str]) -> None:
    found = scan(make(tmp_path, *names), layout="sidecars")
    assert sorted(samples(found)) == groups
    left = set(reasons(found.problems)) | set(reasons(found.skipped))
    assert set(names) == left | {path for sample in samples(found).values() for path in sample.values()}


@given(names=st.sets(file_names, min_size=1, max_size=10))
@settings(max_examples=100)
def test_no_sidecar_is_lost_or_doubled(tmp_path_factory: pytest.TempPathFactory, names: set[bytes]) -> None:
    root = make(tmp_path_factory.mktemp("tree"), *names)
    make(root, "real.jpg")
    found = scan(root, layout="sidecars")
    samples(found)
    listed = [*found.paths, *(path for path, _ in found.skipped), *(path for path, _ in found.problems)]
    assert sorted(listed) == sorted({*names, b"real.jpg"})


def test_a_name_that_is_no_field_is_a_problem_of_its_sample(tmp_path: Path) -> None:
    found = scan(
        make(tmp_path, "1.jpg", "1.json", "2.jpg", "2.a\nb", "3.jpg", "3.__key__", b"4.jpg", b"4.\xff", "5.jpg")
    )
    assert set(samples(found)) == {"1", "5"}
    assert {os.fsdecode(path) for path, _ in found.problems} >= {"2.a\nb", "3.__key__", "4.\udcff"}
    assert all("no field name that every reader understands" in reason for _, reason in found.problems)


def test_too_many_fields_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "1.jpg", *(f"1.{i:04d}.json" for i in range(100)))
    with pytest.raises(SourceError, match=r"would make 101 fields \(0000.json"):
        scan(tmp_path, layout="sidecars")


def test_few_sidecars_do_not_make_a_sidecar_layout(tmp_path: Path) -> None:
    found = scan(make(tmp_path, *(f"cat/{i}.jpg" for i in range(5)), "cat/1.txt"))
    assert found.layout == "imagefolder"
    assert reasons(found.skipped) == {"cat/1.txt": "not an image by its extension"}


# ---------------------------------------------------------------- parallel trees


def test_yolo(tmp_path: Path) -> None:
    make(tmp_path, "images/train/1.jpg", "images/train/bg.jpg", "labels/train/1.txt", "images/val/2.jpg")
    make(tmp_path, "labels/val/2.txt", "labels/val/gone.txt", "labels/train.cache", "data.yaml", "images/test/3.jpg")
    found = scan(tmp_path)
    assert (found.layout, found.rule) == ("parallel", "parallel trees of the same names: images, labels")
    assert samples(found) == {
        "images/train/1": {"jpg": "images/train/1.jpg", "txt": "labels/train/1.txt"},
        "images/train/bg": {"jpg": "images/train/bg.jpg"},
        "images/val/2": {"jpg": "images/val/2.jpg", "txt": "labels/val/2.txt"},
        "images/test/3": {"jpg": "images/test/3.jpg"},
    }
    assert found.splits == ("train", "val", "test")
    assert {name: len(keys) for name, keys in splits(found).items()} == {"train": 2, "val": 1, "test": 1}
    assert reasons(found.skipped) == {
        "data.yaml": "outside the parallel trees",
        "labels/train.cache": "no picture of the same name in the image tree",
        "labels/val/gone.txt": "no picture of the same name in the image tree",
    }


def test_roboflow(tmp_path: Path) -> None:
    make(tmp_path, *(f"{s}/images/{i}.jpg" for s in ("train", "valid") for i in "12"), "data.yaml")
    make(tmp_path, *(f"{s}/labels/{i}.txt" for s in ("train", "valid") for i in "12"))
    found = scan(tmp_path)
    assert found.layout == "splits"
    assert "in them, parallel: parallel trees of the same names: images, labels" in found.rule
    assert samples(found)["valid/images/2"] == {"jpg": "valid/images/2.jpg", "txt": "valid/labels/2.txt"}
    assert found.splits == ("train", "valid")


def test_voc(tmp_path: Path) -> None:
    make(tmp_path, "JPEGImages/1.jpg", "JPEGImages/2.jpg", "Annotations/1.xml", "Annotations/2.xml")
    make(tmp_path, "SegmentationClass/1.png", "SegmentationObject/1.png", "ImageSets/Main/train.txt")
    found = scan(tmp_path)
    assert found.layout == "parallel"
    assert samples(found)["JPEGImages/1"] == {
        "jpg": "JPEGImages/1.jpg",
        "xml": "Annotations/1.xml",
        "segmentation.png": "SegmentationClass/1.png",
        "object.png": "SegmentationObject/1.png",
    }
    assert samples(found)["JPEGImages/2"] == {"jpg": "JPEGImages/2.jpg", "xml": "Annotations/2.xml"}


def test_masks_and_two_trees_of_one_extension(tmp_path: Path) -> None:
    make(tmp_path, "train/images/c/1.png", "train/masks/c/1.png", "train/labels/c/1.txt", "train/captions/c/1.txt")
    make(tmp_path, "val/images/2.png", "val/labels/2.txt")
    found = scan(tmp_path)
    # A field has the same name in every split, whatever a split has.
    assert samples(found) == {
        "train/images/c/1": {
            "png": "train/images/c/1.png",
            "mask.png": "train/masks/c/1.png",
            "label.txt": "train/labels/c/1.txt",
            "caption.txt": "train/captions/c/1.txt",
        },
        "val/images/2": {"png": "val/images/2.png", "label.txt": "val/labels/2.txt"},
    }


def test_companions_that_clash_are_problems(tmp_path: Path) -> None:
    make(tmp_path, "images/1.jpg", "images/1.png", "labels/1.txt")  # whose is it?
    make(tmp_path, "images/2.jpg", "labels/2.txt", "labels/2.TXT")  # two of one field
    make(tmp_path, "images/3.jpg", "masks/3.png", "images/4.jpg", "labels/4.txt", "images/5.jpg", "images/5.JPG")
    (tmp_path / "masks/3.png").write_bytes(b"")
    (tmp_path / "labels/4.txt").write_bytes(b"")  # a picture without boxes
    found = scan(tmp_path)
    assert set(samples(found)) == {"images/4", "images/5%2Ejpg", "images/5%2EJPG"}
    problems = reasons(found.problems)
    assert problems["images/1.jpg"] == problems["images/1.png"] == "several pictures have the stem of labels/1.txt"
    assert problems["labels/2.TXT"] == "two of its files would be the field 'txt'"
    assert problems["masks/3.png"] == "empty file (0 bytes)"


def test_trees_whose_names_follow_another_rule_are_named(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "images/1.jpg", "masks/1_mask.png", "masks/jpg", "labels/1.txt"))
    assert found.rule.endswith("; no file in masks/ has the name of a picture")
    assert samples(found) == {"images/1": {"jpg": "images/1.jpg", "txt": "labels/1.txt"}}
    assert set(reasons(found.skipped)) == {"masks/1_mask.png", "masks/jpg"}


@given(data=st.data())
@settings(max_examples=60)
def test_no_file_of_parallel_trees_is_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = st.sampled_from(["1.jpg", "1.png", "1.txt", "1.TXT", "1", "2.jpg", "2.txt", "a.b.jpg", "a.b.json", "jpg"])
    tops = st.sampled_from(["images", "labels", "label", "masks", "other"])
    inside = st.sampled_from(["", "train/", "val/", "c/"])
    paths = data.draw(st.sets(st.tuples(tops, inside, names).map(lambda t: f"{t[0]}/{t[1]}{t[2]}"), max_size=14))
    root = make(tmp_path_factory.mktemp("tree"), "images/real.jpg", *paths)
    found = scan(root, layout="parallel")
    samples(found)
    listed = [*found.paths, *(path for path, _ in found.skipped), *(path for path, _ in found.problems)]
    assert set(listed) == {os.fsencode(path) for path in {*paths, "images/real.jpg"}}
    packed = list(found.paths)
    assert len(packed) == len(set(packed))
    assert not set(packed) & {path for path, _ in (*found.skipped, *found.problems)}


# ---------------------------------------------------------------- asked for, refused, repeated


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_is_asked_for_is_taken(tmp_path: Path, layout: str) -> None:
    make(tmp_path, "train/images/1.jpg", "train/labels/1.txt", "images/1.jpg", "images/1.json", "labels/1.txt")
    found = scan(tmp_path, layout=layout)
    assert found.layout == layout
    assert found.rule.startswith("asked for by --layout")
    assert len(found) > 0


def test_nothing_to_pack_says_why(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no sample \(layout flat: .*\)\. The folder is empty"):
        scan(tmp_path)
    make(tmp_path, "a/1.txt", "a/2.txt", "b/.hidden.jpg")
    with pytest.raises(SourceError, match=r"Left out: 2 × not an image by its extension; 1 × hidden file"):
        scan(tmp_path)
    with pytest.raises(SourceError, match="No such file"):
        scan(tmp_path / "gone")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": "yolo"}, "choose one of: imagefolder, splits"),
        ({"layout": "sidecars", "labels": "x.csv"}, "--labels gives labels to a flat folder"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        FolderOptions(**options)  # type: ignore[arg-type]


def test_a_scan_is_the_same_whatever_the_order_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, *(f"{c}/{i}.{e}" for c in "ab" for i in range(5) for e in ("jpg", "png", "json")))
    make(tmp_path, "a/1.seg.png", "a/README", ".x/y.jpg")
    expected = scan(tmp_path)
    real = os.scandir

    class Shuffled:
        def __init__(self, path: bytes) -> None:
            with real(path) as entries:
                self.entries = list(entries)
            random.Random(3).shuffle(self.entries)

        def __enter__(self) -> object:
            return iter(self.entries)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Shuffled)
    found = scan(tmp_path)
    assert samples(found) == samples(expected)
    for name in ("sizes", "field", "first", "label", "split"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert (found.fields, found.classes, found.skipped) == (expected.fields, expected.classes, expected.skipped)


def test_a_source_and_its_scan_travel_to_other_processes(tmp_path: Path) -> None:
    source = FolderSource(str(make(tmp_path, "cat/1.jpg")), FolderOptions(filter=Filter(exclude=("x",))))
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert copy.describe() == str(tmp_path)
    assert samples(pickle.loads(pickle.dumps(copy.scan()))) == samples(source.scan())


def test_part_of_a_scan(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "1.jpg", "1.json", "2.jpg", "3.jpg", "3.json", "3.txt"))
    part = found.take(np.array([2, 0]))
    assert samples(part) == {key: samples(found)[key] for key in ("3", "1")}
    assert len(found.take(np.array([], np.int64))) == 0
