"""`packer view`: the right pictures under the right names, in a page that can do nothing else."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from conftest import picture
from PIL import Image

from packer.errors import OutputError
from packer.indexing import index_folder
from packer.pack import PackOptions, pack
from packer.sources.folder import FolderSource
from packer.verify import verify
from packer.view import MAX_CLASSES, MAX_PICTURES, WITHOUT_CLASSES, view

TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "h1", "h2", "h3", "p",
    "dl", "dt", "dd", "div", "span", "i", "img", "figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td",
    "details", "summary",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "name", "content", "http-equiv", "class", "src", "width", "height", "loading", "decoding", "alt",
    "title", "style", "data-most",
}  # fmt: skip
VOID = frozenset(("meta", "img"))


class Page(HTMLParser):
    """The page taken apart; fails on whatever a browser would have to mend, fetch or run."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tiles: dict[str, list[dict[str, str]]] = {}
        self._open: list[str] = []
        self._class = ""
        self.source = path.read_bytes().decode("utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        values = {name: value or "" for name, value in attrs}
        assert values.keys() <= ATTRIBUTES
        assert len(values) == len(attrs)
        assert re.fullmatch(
            r"data:image/(jpeg|png);base64,[A-Za-z0-9+/=]+", values.get("src", "data:image/png;base64,AA==")
        )
        assert re.fullmatch(r"(width|height):[0-9.]+%", values.get("style", "width:1%"))
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        if values.get("class") == "class":
            self._class = ""
        if tag == "img" or values.get("class") in ("bad", "none"):
            self.tiles.setdefault(self._class, []).append(values | {"tag": tag})

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self._open[-1] if self._open else ""
        self.texts.setdefault(tag, []).append(data)
        if tag == "h3":
            self._class = data

    def images(self, name: str) -> list[Image.Image]:
        """The thumbnails below a class's name, decoded."""
        found = [Image.open(io.BytesIO(base64.b64decode(tile["src"].partition(",")[2]))) for tile in self.tiles[name]]
        for image, tile in zip(found, self.tiles[name], strict=True):
            assert image.size == (int(tile["width"]), int(tile["height"]))
        return found


COLOURS = {"blue": (20, 30, 200), "green": (10, 180, 40), "red": (220, 20, 30)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Three classes, each of pictures of its own colour; 3, 20 and 15 of them in two splits."""
    for (name, colour), counts in zip(COLOURS.items(), ((2, 1), (12, 8), (15, 0)), strict=True):
        for split, count in zip(("train", "val"), counts, strict=True):
            (tmp_path / "src" / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (300 + i, 200), colour).save(tmp_path / "src" / split / name / f"{name}{i}.jpg")
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    return tmp_path / "out"


def test_each_class_shows_its_own_pictures(out: Path, tmp_path: Path) -> None:
    result = view(out, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert {name: len(tiles) for name, tiles in page.tiles.items()} == {"blue": 3, "green": 12, "red": 12}
    for name, colour in COLOURS.items():
        for image, tile in zip(page.images(name), page.tiles[name], strict=True):
            assert np.abs(np.asarray(image, int).mean(axis=(0, 1)) - colour).max() < 4
            assert min(image.size) == 144
            assert tile["alt"].startswith(("train/", "val/"))
            assert f"/{name}/{name}" in tile["title"]
            assert "×200 jpeg" in tile["title"]
    assert len({tile["title"] for tiles in page.tiles.values() for tile in tiles}) == 27
    assert (result.pictures, result.classes, result.bytes) == (27, 3, (tmp_path / "page.html").stat().st_size)
    assert "38 samples · 3 classes · 2 shards" in "".join(page.texts["p"])


def test_one_split_and_fewer_pictures(out: Path, tmp_path: Path, run_packer: Callable[..., Result]) -> None:
    run_packer("view", out, "--split", "val", "--samples", "2", "-o", tmp_path / "val.html")
    page = Page(tmp_path / "val.html")
    assert {name: len(tiles) for name, tiles in page.tiles.items()} == {"blue": 1, "green": 2}
    assert all(tile["alt"].startswith("val/") for tiles in page.tiles.values() for tile in tiles)
    assert "it has: train, val" in run_packer("view", out, "--split", "x", exit_code=2).output


def test_the_same_call_gives_the_same_bytes(out: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        view(out, tmp_path / f"{workers}.html", workers=workers)
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_the_page_lies_in_the_dataset_and_harms_nothing(out: Path, run_packer: Callable[..., Result]) -> None:
    value = json.loads(run_packer("view", out, "--json").stdout)
    assert value == {
        "path": str(out / "view.html"),
        "pictures": 27,
        "classes": 3,
        "bytes": (out / "view.html").stat().st_size,
    }
    assert verify(out).problems == []
    assert "cannot write" in run_packer("view", out, "-o", out / "no" / "x.html", exit_code=1).output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("spelled", ["{}", "../out/{}", "./{}"])
def test_the_page_replaces_no_file_of_the_dataset(out: Path, run_packer: Callable[..., Result], spelled: str) -> None:
    before = contents(out.parent)
    for name in sorted(path.name for path in out.iterdir()):
        run_packer("view", out, "-o", f"{out}/{spelled.format(name)}", exit_code=1)
    assert contents(out.parent) == before


def test_not_even_one_that_is_missing(out: Path, tmp_path: Path) -> None:
    (out / "train.names").unlink()
    (tmp_path / "link").symlink_to(out)
    for name in ("train.names", "train-000000.tar.partial"):
        for folder in (out, tmp_path / "link"):
            with pytest.raises(OutputError, match="a file of the dataset"):
                view(out, folder / name)


def test_the_page_replaces_an_earlier_page_and_nothing_else(out: Path, tmp_path: Path) -> None:
    view(out, tmp_path / "page.html")
    view(out, tmp_path / "page.html", per_class=1)
    assert len(Page(tmp_path / "page.html").tiles["red"]) == 1
    (tmp_path / "thesis.html").write_text("<!doctype html>\nyears of work")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = contents(tmp_path)
    for name, says in {
        "thesis.html": "no page that packer wrote",
        "empty": "no page that packer wrote",
        "link": "is a link",
        "dangling": "is a link",
        "pipe": "not a regular file",
        "src": "not a regular file",
    }.items():
        with pytest.raises(OutputError, match=says):
            view(out, tmp_path / name)
    assert contents(tmp_path) == before
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "nowhere").exists()


def test_an_empty_name_is_refused(out: Path, run_packer: Callable[..., Result]) -> None:
    run_packer("view", out, "-o", "", exit_code=2)
    assert not (out / "view.html").exists()


EVIL = [
    "<script>alert(1)<", "\"><img src=x onerror=alert(1)>", "'onmouseover='alert(1)", "&lt;b&gt;", "</h3><style>*{}",
    "a&b;", "$title ${key} $$", "--><!--", "]]>", "javascript:alert(1)", "\u202egnp.exe", "日本語", "{{7*7}}",
    "%3Cscript%3E",
]  # fmt: skip


def test_hostile_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    names = [name.replace("/", "⁄") for name in EVIL]
    for name in names:
        folder = tmp_path / "src" / name
        folder.mkdir(parents=True)
        picture(1, (9, 9)).save(folder / f"{name}.jpg", "JPEG")
        (folder / f"broken{name}.jpg").write_bytes(b"\xff\xd8\xff\xe0<script>\xff\xd9")
    out = tmp_path / "<i>$title&amp;"
    pack(FolderSource(str(tmp_path / "src")), out, PackOptions(check="none"))
    view(out, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    shown = [name.replace("\u202e", "\\u202e") for name in sorted(names)]
    assert sorted(page.texts["h3"]) == sorted(shown)
    assert set(shown) <= set(page.texts["span"])
    assert page.texts["h1"] == ["<i>$title&amp;"]
    assert page.tags.count("style") == 1
    assert "\u202e" not in page.source
    assert {tile["tag"] for tile in page.tiles["a&b;"]} == {"img", "div"}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.source)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    import os

    folder = os.fsencode(tmp_path / "src") + b"/cl\xffass"
    os.makedirs(folder)
    with open(folder + b"/\xfe.png", "wb") as f:
        picture(1, (5, 5)).save(f, "PNG")
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    view(tmp_path / "out", tmp_path / "page.html")
    assert Page(tmp_path / "page.html").texts["h3"] == ["cl\\xffass"]


def test_pictures_are_upright(tmp_path: Path) -> None:
    """Whatever the orientation tag says, Pillow's own transposition and ours agree."""
    (tmp_path / "src").mkdir()
    plain = Image.new("RGB", (400, 200), "white")
    plain.paste((200, 0, 0), (0, 0, 200, 100))
    plain.paste((0, 0, 200), (0, 100, 200, 200))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        plain.save(tmp_path / "src" / f"{orientation}.jpg", exif=exif, quality=95)
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    view(tmp_path / "out", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    from PIL import ImageOps

    for tile, image in zip(page.tiles[""], page.images(""), strict=True):
        with Image.open(tmp_path / "src" / f"{tile['alt']}.jpg") as stored:
            upright = ImageOps.exif_transpose(stored)
        assert (image.width > image.height) == (upright.width > upright.height)
        assert np.abs(np.asarray(upright.resize(image.size), int) - np.asarray(image, int)).mean() < 6


def test_small_pictures_keep_their_pixels(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    digit = picture(3, (28, 28)).convert("L")
    digit.save(tmp_path / "src" / "a.png")
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    view(tmp_path / "out", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    (image,) = page.images("")
    assert np.array_equal(np.asarray(image), np.asarray(digit.convert("RGB")))
    assert page.tiles[""][0]["class"] == "px"


def test_extreme_shapes(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for size in ((1, 1), (3000, 1), (1, 3000), (2000, 20)):
        Image.new("RGB", size).save(tmp_path / "src" / f"{size[0]}x{size[1]}.png")
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    view(tmp_path / "out", tmp_path / "page.html")
    assert all(max(image.size) <= 320 for image in Page(tmp_path / "page.html").images(""))


def test_samples_without_pictures_or_classes(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for i in range(WITHOUT_CLASSES + 30):
            path = tmp_path / "text"
            path.write_text("x" * i)
            tar.add(path, f"{i:03}.txt")
    index_folder(tmp_path)
    view(tmp_path, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert len(page.tiles[""]) == WITHOUT_CLASSES
    assert "txt 1 B" in page.texts["div"]
    assert "img" not in page.tags


def test_many_classes_and_many_pictures(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    count = MAX_CLASSES + 15
    for name in range(count):
        folder = tmp_path / "src" / f"c{name:03}"
        folder.mkdir(parents=True)
        for i in range(1 + (name % 3) * 7):
            (folder / f"{i}.png").write_bytes(buffer.getvalue())
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    view(tmp_path / "out", tmp_path / "page.html", per_class=5)
    page = Page(tmp_path / "page.html")
    assert len(page.tiles) == MAX_CLASSES
    assert {"c000", "c064"} <= page.tiles.keys()
    assert f"of {MAX_CLASSES} of the {count} classes" in "".join(page.texts["p"])
    assert f"All {count} classes" in page.texts["summary"]
    assert page.texts["td"].count("c001") == 1
    view(tmp_path / "out", tmp_path / "page.html", per_class=10_000)
    assert sum(map(len, Page(tmp_path / "page.html").tiles.values())) <= MAX_PICTURES


def test_an_empty_class_has_a_bar_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "src" / "none").mkdir(parents=True)
    (tmp_path / "src" / "some").mkdir()
    picture(1, (60, 60)).save(tmp_path / "src" / "some" / "a.jpg")
    pack(FolderSource(str(tmp_path / "src")), tmp_path / "out")
    view(tmp_path / "out", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.texts["span"][:4] == ["none", "0", "some", "1"]
    assert list(page.tiles) == ["some"]
