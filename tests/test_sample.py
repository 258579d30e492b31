"""Names: any path becomes a key that every reader splits as meant, and comes back byte for byte."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

import packer.sample
from packer.sample import (
    RESERVED_FIELDS,
    bad_fields,
    escape_key,
    field_name,
    is_image_field,
    printable,
    split_extension,
    unescape_key,
    unique_keys,
)
from tests.strategies import file_names, folders, picture_names, trees

# What webdataset and its relatives leave out as metadata.
METADATA = re.compile(r"__[^/]*__($|/)")


def assert_readable(key: bytes) -> None:
    """The key is text, and with a field it comes apart as meant in every reader."""
    text = key.decode("utf-8")
    assert not re.search(r"[\x00-\x1f\x7f]", text)
    for field in ("jpg", "seg.png", "cls"):
        assert base_plus_ext(f"{text}.{field}") == (text, field)
    assert not METADATA.match(f"{text}.jpg")
    assert not any(part.startswith("__") for part in text.split("/"))


# ---------------------------------------------------------------- escaping


@given(folders, file_names)
def test_a_key_comes_back_as_the_path(folder: bytes, name: bytes) -> None:
    path = b"/".join(filter(None, (folder, name)))
    key = escape_key(path)
    assert unescape_key(key) == path
    assert_readable(key)


@given(st.binary(min_size=1))
def test_any_bytes_come_back(path: bytes) -> None:
    assert unescape_key(escape_key(path)) == path


@given(st.sets(st.tuples(folders, file_names).map(lambda pair: b"/".join(filter(None, pair))), max_size=6))
def test_different_paths_have_different_keys(paths: set[bytes]) -> None:
    assert len({escape_key(path) for path in paths}) == len(paths)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (b"n01440764/n01440764_10026", b"n01440764/n01440764_10026"),
        (b"v1.0/img.v2", b"v1.0/img%2Ev2"),
        (b"a/%41", b"a/%2541"),
        (b"a/50%", b"a/50%25"),
        (b"__MACOSX__/a", b"%5F_MACOSX__/a"),
        (b"a/__key__", b"a/%5F_key__"),
        (b"_a/_b", b"_a/_b"),
        (b"a/x\ty\n", b"a/x%09y%0A"),
        (b"a/caf\xe9", b"a/caf%E9"),
        ("a/café 写".encode(), "a/café 写".encode()),
        ("a/é".encode() + b"\xff.", "a/é".encode() + b"%FF%2E"),
        (b"a/\xed\xa0\x80", b"a/%ED%A0%80"),  # a surrogate is no UTF-8
        (b"a/-rf {0..3}"[:-1], b"a/-rf {0%2E%2E3"),
        (b"a./b", b"a./b"),
        (b"...", b"%2E%2E%2E"),
    ],
)
def test_keys_that_must_never_change(path: bytes, key: bytes) -> None:
    """Datasets on disk hold them: another key for the same file would be another sample."""
    assert escape_key(path) == key


def test_normal_forms_and_cases_stay_apart() -> None:
    composed, decomposed = "c/é".encode(), "c/e\N{COMBINING ACUTE ACCENT}".encode()
    assert escape_key(composed) == composed
    assert escape_key(decomposed) == decomposed
    assert unique_keys(b"c", [b"Cat.jpg", b"cat.jpg"]) == [b"c/Cat", b"c/cat"]


# ---------------------------------------------------------------- one folder, many names


@given(folders, st.lists(st.one_of(file_names, picture_names), min_size=1, max_size=10, unique=True))
def test_keys_of_a_folder_are_unique_and_readable(folder: bytes, names: list[bytes]) -> None:
    keys = unique_keys(folder, names)
    assert len(set(keys)) == len(names) == len(keys)
    prefix = folder + b"/" if folder else b""
    for key, name in zip(keys, names, strict=True):
        assert_readable(key)
        path = unescape_key(key)
        assert path in (prefix + name, prefix + (name.rpartition(b".")[0] or name))


@given(trees(picture_names))
def test_keys_of_a_tree_are_unique(paths: list[bytes]) -> None:
    by_folder: dict[bytes, list[bytes]] = {}
    for path in paths:
        folder, _, name = path.rpartition(b"/")
        by_folder.setdefault(folder, []).append(name)
    keys = [key for folder, names in by_folder.items() for key in unique_keys(folder, names)]
    assert len(set(keys)) == len(paths)


@given(st.lists(picture_names, min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_matter(names: list[bytes], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert dict(zip(shuffled, unique_keys(b"c", shuffled), strict=True)) == dict(
        zip(names, unique_keys(b"c", names), strict=True)
    )


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ([b"a.jpg", b"b.jpg"], [b"a", b"b"]),
        ([b"a.jpg", b"a.png"], [b"a%2Ejpg", b"a%2Epng"]),
        ([b"a.jpg", b"a.JPG", b"a.jpeg"], [b"a%2Ejpg", b"a%2EJPG", b"a%2Ejpeg"]),
        ([b"a.jpg.jpg"], [b"a%2Ejpg"]),
        ([b"a.jpg", b"a.jpg.jpg"], [b"a", b"a%2Ejpg"]),
        ([b"a.jpg", b"a.jpg.jpg", b"a.png"], [b"a%2Ejpg", b"a%2Ejpg%2Ejpg", b"a%2Epng"]),
        ([b"img.v2.final.jpg", b"img.jpg"], [b"img%2Ev2%2Efinal", b"img"]),
        ([b"trailing. .jpg"], [b"trailing%2E "]),
        ([b"..jpg"], [b"%2E"]),
        ([b"x" * 251 + b".jpg", b"x" * 250 + b"y.jpg"], [b"x" * 251, b"x" * 250 + b"y"]),
    ],
)
def test_equal_stems_keep_their_extension(names: list[bytes], keys: list[bytes]) -> None:
    assert unique_keys(b"", names) == keys
    assert unique_keys(b"c/d", names) == [b"c/d/" + key for key in keys]


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("name", "stem", "extension"),
    [
        (b"a.JPEG", b"a", "jpeg"),
        (b"a.b.Png", b"a.b", "png"),
        (b"README", b"README", ""),
        (b".hidden", b".hidden", ""),
        (b"a.", b"a", ""),
        (b"a.\xe9", b"a", "\udce9"),
    ],
)
def test_extensions(name: bytes, stem: bytes, extension: str) -> None:
    assert split_extension(name) == (stem, extension)


@pytest.mark.parametrize("extension", ["jpg", "JPG", "jpeg", "JPEG", "jpe", "jfif", "Jpeg"])
def test_all_spellings_of_jpeg_are_one_field(extension: str) -> None:
    assert field_name(extension) == "jpg"
    assert field_name(f"left.{extension}") == "left.jpg"
    assert is_image_field(field_name(extension))


def test_other_fields_keep_their_name() -> None:
    assert [field_name(name) for name in ("PNG", "seg.png", "jpeg.json", "cls")] == [
        "png",
        "seg.png",
        "jpeg.json",
        "cls",
    ]
    assert is_image_field("mask.png")
    assert not is_image_field("png.json")


@pytest.mark.parametrize(
    "field",
    [
        *sorted(RESERVED_FIELDS),
        "__new__",
        "",
        "a..b",
        ".a",
        "a.",
        "a/b",
        "a\nb",
        "\udce9",
        "a\N{RIGHT-TO-LEFT OVERRIDE}",
    ],
)
def test_fields_that_a_reader_would_misunderstand(field: str) -> None:
    assert bad_fields(["jpg", field, "seg.png"]) == [field]


def test_fields_that_all_readers_understand() -> None:
    assert bad_fields(["jpg", "seg.png", "cls", "input.pyd", "写", "a b", "_a"]) == []


# ---------------------------------------------------------------- messages


@given(st.one_of(st.binary(), st.text()))
def test_messages_stay_on_one_line(path: bytes | str) -> None:
    shown = printable(path)
    assert shown.isprintable()
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("path", "shown"),
    [(b"a b/\xc3\xa9.jpg", "a b/é.jpg"), (b"x\ny\xff", r"x\ny\xff"), ("a\N{RIGHT-TO-LEFT OVERRIDE}b", r"a\u202eb")],
)
def test_what_messages_show(path: bytes | str, shown: str) -> None:
    assert printable(path) == shown


def test_the_examples_in_the_documentation() -> None:
    result = doctest.testmod(packer.sample)
    assert result.attempted > 5
    assert result.failed == 0


@pytest.mark.parametrize("name", ["a/b.c/x.seg.png", "x.jpg", "a b/é.x.y.z"])
def test_where_readers_end_a_key(name: str) -> None:
    """The expression that the documentation gives is the one that webdataset uses."""
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    assert match is not None
    assert match.groups() == base_plus_ext(name)
