"""Labels from files: which row is whose, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import SourceError, UsageError
from packer.sources.labels import Labels, _columns, class_numbers, read_classes

PICTURES = [b"cats/a.jpg", b"dogs/b.png"]


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "labels.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def read(
    folder: Path, text: str | bytes, pictures: list[bytes] = PICTURES, fixed: tuple[str, ...] | None = None
) -> tuple[dict[bytes, int | str], Labels]:
    """The label of each picture, or why it has none."""
    labels = Labels.read(write(folder, text), fixed)
    labels.match(pictures)
    found: dict[bytes, int | str] = {}
    for path in pictures:
        try:
            found[path] = labels.of(path)
        except SourceError as error:
            found[path] = str(error)
    return found, labels


# ---------------------------------------------------------------- which row is whose


@pytest.mark.parametrize("name", ["cats/a.jpg", "cats/a", "a.jpg", "a", "./cats/a.jpg", " a.jpg", "cats/a "])
@pytest.mark.parametrize("header", ["", "filename,label\n", "Image,Class\n", "path,y\n", "photo,breed\n"])
def test_a_row_names_its_picture(tmp_path: Path, name: str, header: str) -> None:
    found, labels = read(tmp_path, f"{header}{name},cat\nb,dog\n")
    assert found == {b"cats/a.jpg": 0, b"dogs/b.png": 1}
    assert labels.classes == ("cat", "dog")
    assert labels.unused() == []


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters(tmp_path: Path, delimiter: str) -> None:
    found, _ = read(tmp_path, f"a.jpg{delimiter}3\nb{delimiter}0\n")
    assert found == {b"cats/a.jpg": 3, b"dogs/b.png": 0}


@pytest.mark.parametrize(
    "text",
    [
        "id,filename,label\n7,a.jpg,cat\n8,b.png,dog\n",
        "label,path\ncat,cats/a.jpg\ndog,dogs/b.png\n",
        "class_name,label,File Name\ncat,cat,a.jpg\ndog,dog,b.png\n",
        "width,image-id,breed,target\n5,a,x,cat\n5,b,x,dog\n",
        "name,what it is\na,cat\nb,dog\n",
        "what it is,name\ncat,a\ndog,b\n",
        "\n\nfilename,label\n\n a.jpg , cat \n,\nb.png,dog\n\n",
        b"\xef\xbb\xbffilename,label\r\na.jpg,cat\r\nb.png,dog\r\n",
        '"filename","label"\n"a.jpg","cat"\n"b.png","dog"\n',
    ],
)
def test_headers_say_which_columns(tmp_path: Path, text: str | bytes) -> None:
    found, labels = read(tmp_path, text)
    assert found == {b"cats/a.jpg": 0, b"dogs/b.png": 1}
    assert labels.classes == ("cat", "dog")


def test_a_header_in_unknown_words_is_no_class(tmp_path: Path) -> None:
    """Taken for data, it would make all integers names of classes, in the order of text: 0, 1, 10, 2."""
    pictures = [b"%d.jpg" % i for i in range(12)]
    rows = "".join(f"{i},{i}\n" for i in range(12))
    found, labels = read(tmp_path, "photo,grade\n" + rows, pictures)
    assert found == {path: i for i, path in enumerate(pictures)}
    assert labels.classes is None
    assert labels.unused() == []


def test_a_first_row_for_a_missing_picture_is_data_if_its_label_is_known(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "gone.jpg,cat\na,cat\nb,dog\n")
    assert found == {b"cats/a.jpg": 0, b"dogs/b.png": 1}
    assert labels.unused() == [(b"gone.jpg", "row in labels.csv without a picture")]


def test_the_nearest_name_wins(tmp_path: Path) -> None:
    pictures = [b"x/a.jpg", b"y/a.jpg"]
    found, labels = read(tmp_path, "x/a.jpg,1\ny/a,2\na.jpg,3\na,4\n", pictures)
    assert found == {b"x/a.jpg": 1, b"y/a.jpg": 2}
    assert [name for name, _ in labels.unused()] == [b"a", b"a.jpg"]


@pytest.mark.parametrize(
    ("pictures", "row"),
    [([b"x/a.jpg", b"y/a.jpg"], "a"), ([b"x/a.jpg", b"y/a.jpg"], "a.jpg"), ([b"x/a.jpg", b"x/a.png"], "x/a")],
)
def test_a_row_that_names_two_pictures_labels_neither(tmp_path: Path, pictures: list[bytes], row: str) -> None:
    found, _ = read(tmp_path, f"{row},1\n", pictures)
    assert set(found.values()) == {f"2 pictures share the row {row!r}; name them by path"}


def test_names_are_bytes(tmp_path: Path) -> None:
    pictures = ["é.jpg".encode(), "e\N{COMBINING ACUTE ACCENT}.jpg".encode(), b"caf\xe9.jpg", b"a, b.jpg", b" x .jpg"]
    text = b"\n".join(
        b'"%s",%d' % (name, i) if b"," in name else b"%s,%d" % (name, i) for i, name in enumerate(pictures)
    )
    found, _ = read(tmp_path, text, pictures)
    assert found == {name: i for i, name in enumerate(pictures)}


@given(st.dictionaries(st.text("ab./ é", min_size=1, max_size=6).filter(str.strip), st.integers(0, 99), min_size=1))
def test_full_paths_are_always_found(rows: dict[str, int]) -> None:
    labels = Labels("labels.csv", None, _text={name.encode(): str(label) for name, label in rows.items()})
    labels.match(name.encode() for name in rows)
    assert {name: labels.of(name.encode()) for name in rows} == rows


# ---------------------------------------------------------------- what labels are


def test_integers_are_taken_as_they_are(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "a,1000\nb,-1\n")
    assert found == {b"cats/a.jpg": 1000, b"dogs/b.png": -1}
    assert labels.classes is None


def test_names_are_numbered_in_the_order_of_text(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "a,zebra\nb,Zebra\nc,ärger\nd,10th\n")
    assert labels.classes == ("10th", "Zebra", "zebra", "ärger")
    assert found == {b"cats/a.jpg": 2, b"dogs/b.png": 1}


def test_leading_zeros_make_a_name(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "a,001\nb,1\n")
    assert labels.classes == ("001", "1")
    assert found == {b"cats/a.jpg": 0, b"dogs/b.png": 1}


@pytest.mark.parametrize("label", ["--5", "-", "+5", "1_000", "٣", "1" * 30, "0x1", "-01", "1e3"])
def test_other_numerals_are_names(tmp_path: Path, label: str) -> None:
    found, labels = read(tmp_path, f"a,{label}\nb,5\n")
    assert labels.classes == tuple(sorted((label, "5")))
    assert set(found.values()) == {0, 1}


@pytest.mark.parametrize("label", ["1.0", ".5", "2.5e-3", "NaN"])
def test_decimals_are_no_classes(tmp_path: Path, label: str) -> None:
    with pytest.raises(UsageError, match="neither an integer nor a name"):
        read(tmp_path, f"a,{label}\nb,5\n")


def test_decimals_among_names_are_names(tmp_path: Path) -> None:
    assert read(tmp_path, "a,v1.0\nb,2.0\n")[1].classes == ("2.0", "v1.0")


def test_no_label_is_said_of_the_picture(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "a,\nb,5\n")
    assert str(found[b"cats/a.jpg"]).endswith("labels.csv has no label")
    assert found[b"dogs/b.png"] == 5
    assert labels.classes is None


def test_a_missing_row_is_said_of_the_picture_and_an_unused_row_is_listed(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "a,5\nz,6\n")
    assert str(found[b"dogs/b.png"]).startswith("no row in ")
    assert labels.unused() == [(b"z", "row in labels.csv without a picture")]


def test_impossible_integers(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "a,-2\nb,5\n")
    assert str(found[b"cats/a.jpg"]).startswith("label -2 is not possible")


# ---------------------------------------------------------------- given classes


def test_names_among_given_classes(tmp_path: Path) -> None:
    found, labels = read(tmp_path, "a,dog\nb,bird\n", fixed=("dog", "cat"))
    assert found == {b"cats/a.jpg": 0, b"dogs/b.png": "class 'bird' is not in the list of classes"}
    assert labels.classes == ("dog", "cat")


def test_integers_with_given_classes_are_positions_unless_they_are_names(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "a,1\nb,2\n", fixed=("dog", "cat"))
    assert found[b"cats/a.jpg"] == 1
    assert "below 2" in str(found[b"dogs/b.png"])
    found, _ = read(tmp_path, "a,1\nb,2\n", fixed=("2", "1"))
    assert found == {b"cats/a.jpg": 1, b"dogs/b.png": 0}
    assert read(tmp_path, "a,0.5\nb,1\n", fixed=("1", "0.5"))[0] == {b"cats/a.jpg": 1, b"dogs/b.png": 0}


# ---------------------------------------------------------------- files that cannot be meant


def test_rows_that_contradict_each_other_are_all_listed(tmp_path: Path) -> None:
    rows = "".join(f"{i % 25},{i}\n" for i in range(50)) + "z,1\nz,1\n"
    with pytest.raises(UsageError) as caught:
        Labels.read(write(tmp_path, rows))
    assert "line 26: '0' has two labels, '0' and '25'" in str(caught.value)
    assert str(caught.value).endswith("and 5 more")


@pytest.mark.parametrize("rows", ["{},1\n{},2\n", "{},2\nz,3\n{},1\n", "path,label\n{},1\n{},2\n"])
@pytest.mark.parametrize("names", [("a", "a.jpg"), ("cats/a", "a.jpg"), ("cats/a.jpg", "a"), ("a", " a")])
def test_two_rows_of_one_picture_must_agree(tmp_path: Path, rows: str, names: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, rows.format(*names))
    assert all(f"'{name}' has " in str(caught.value) for name in names)
    found, _ = read(tmp_path, rows.replace("2", "1").format(*names))
    assert found[b"cats/a.jpg"] == 1


def test_a_row_of_another_picture_is_no_contradiction(tmp_path: Path) -> None:
    pictures = [b"a.jpg", b"x/a.jpg", b"a.png"]
    found, _ = read(tmp_path, "a.jpg,1\nx/a.jpg,2\na,3\n", pictures)
    assert found == {b"a.jpg": 1, b"x/a.jpg": 2, b"a.png": 3}


@pytest.mark.parametrize("odd", ["1O", "NA", "cat", "1.5", "1_0"])
def test_a_few_words_among_integers_are_refused(tmp_path: Path, odd: str) -> None:
    """Taken for names, they would make names of all the integers, and so other labels."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, f"a,5\nb,10\nc,{odd}\nd,007\n")
    assert str(caught.value).endswith(f"list them with --classes:\n  'c' has '{odd}'")
    assert read(tmp_path, f"a,5\nb,10\nc,{odd}\n", fixed=("10", "5", odd))[0] == {PICTURES[0]: 1, PICTURES[1]: 0}


def test_codes_of_equal_width_are_names(tmp_path: Path) -> None:
    assert read(tmp_path, "a,09\nb,10\nc,11\nd,12\n")[1].classes == ("09", "10", "11", "12")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rows"),
        ("\n , \n", "has no rows"),
        ("a.jpg\n", "line 1: 1 column(s)"),
        ("filename,label\na.jpg,cat\n\nb.jpg\n", "line 4: 1 column(s) ['b.jpg']"),
        ("a,b\0c\n" + "d" * 200_000 + ",e\n", "--labels"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Labels.read(write(tmp_path, text))
    assert says in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for function, option in ((Labels.read, "--labels"), (read_classes, "--classes")):
        with pytest.raises(UsageError, match=f"{option} .*: No such file"):
            function(str(tmp_path / "gone"))
        with pytest.raises(UsageError, match=f"{option} .*: Is a directory"):
            function(str(tmp_path))


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        (["a.jpg", "cat"], (0, 1, False)),
        (["filename", "label"], (0, 1, True)),
        (["label"], (1, 0, True)),
        (["x", "label"], (0, 1, True)),
        (["x", "path"], (1, 0, True)),
        (["id", "x", "path", "class_id", "label"], (2, 4, True)),
    ],
)
def test_columns(header: list[str], columns: tuple[int, int, bool]) -> None:
    assert _columns(header) == columns


# ---------------------------------------------------------------- lists of classes


def test_classes_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_bytes("\ufeffzebra\r\n\nnaïve classe\n10\ncaf".encode() + b"\xe9\n")
    assert read_classes(str(path)) == ("zebra", "naïve classe", "10", "caf\udce9")
    assert class_numbers(read_classes(str(path)))["10"] == 2


def test_a_class_twice_or_none(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("a\nb\na\n")
    with pytest.raises(UsageError, match="names a class twice: a"):
        read_classes(str(path))
    path.write_text("\n\n")
    with pytest.raises(UsageError, match="names no class"):
        read_classes(str(path))
