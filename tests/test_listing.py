"""Walking a tree: every regular file once, everything else by a stated rule, and an end to every loop."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from packer.errors import SourceError, UsageError
from packer.sources.listing import Filter, Listing, list_folder
from tests.strategies import trees

LINK = "symbolic link (--follow-symlinks takes its content)"
FILTERED = "left out by --include or --exclude"


def make(root: Path, *paths: str | bytes) -> Path:
    """Files of as many bytes as their base name has; a path that ends in '/' is a folder."""
    for path in paths:
        full = os.path.join(os.fsencode(root), os.fsencode(path))
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if not full.endswith(b"/"):
            with open(full, "wb") as f:
                f.write(b"x" * len(os.path.basename(full)))
    return root


def files(listing: Listing) -> list[bytes]:
    """Relative paths, in the listing's order; their sizes are checked on the way."""
    found = []
    for folder in listing.folders:
        assert len(folder.names) == len(folder.sizes)
        for name, size in zip(folder.names, folder.sizes, strict=True):
            assert size == len(name)
            found.append(folder.prefix + name)
    return found


def test_every_file_with_its_size(tmp_path: Path) -> None:
    make(tmp_path, "b/2.jpg", "b/1.jpg", "a/x/deep.txt", "a/y.jpg", "root.jpg", "empty/", "a/x.jpg/inner.jpg")
    listing = list_folder(str(tmp_path))
    assert files(listing) == [b"root.jpg", b"a/y.jpg", b"a/x/deep.txt", b"a/x.jpg/inner.jpg", b"b/1.jpg", b"b/2.jpg"]
    assert [folder.path for folder in listing.folders] == [b"", b"a", b"a/x", b"a/x.jpg", b"b", b"empty"]
    assert listing.skipped == listing.problems == []
    extensions = {folder.path: folder.extensions for folder in listing.folders}
    assert extensions[b"a/x"] == {b"txt"}
    assert extensions[b"empty"] == set()


def test_names_that_are_an_extension_have_none(tmp_path: Path) -> None:
    make(tmp_path, "c/jpg", "c/a.png", "c/png")
    assert list_folder(str(tmp_path)).folders[1].extensions == {b"", b"png"}


@given(tree=trees(max_size=6))
@settings(max_examples=60)
def test_any_names_are_listed(tmp_path_factory: pytest.TempPathFactory, tree: list[bytes]) -> None:
    root = make(tmp_path_factory.mktemp("tree"), *tree)
    listing = list_folder(str(root))
    hidden = [path for path in tree if any(part.startswith(b".") for part in path.split(b"/"))]
    listed = files(listing)
    assert len(set(listed)) == len(listed)
    assert set(listed) >= {path for path in tree if path not in hidden and not path.endswith(b"~")}
    assert set(listed) <= set(tree)
    assert not set(listed) & set(hidden)
    for folder in listing.folders:
        assert folder.names == sorted(folder.names)


def test_the_order_of_the_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{c}/{i}.jpg" for c in ("a", "b", "B", "é", "a.b") for i in (10, 9, 1)]
    expected = list_folder(str(make(tmp_path, *names, ".h/x", "x~")))
    real = os.scandir

    class Shuffled:
        def __init__(self, path: bytes) -> None:
            with real(path) as entries:
                self.entries = list(entries)
            random.Random(len(path)).shuffle(self.entries)

        def __enter__(self) -> Iterator[os.DirEntry[bytes]]:
            return iter(self.entries)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Shuffled)
    listing = list_folder(str(tmp_path))
    assert files(listing) == files(expected)
    assert listing.folders == expected.folders
    assert sorted(listing.skipped) == sorted(expected.skipped)


def test_progress_counts_files(tmp_path: Path) -> None:
    seen: list[int] = []
    list_folder(str(make(tmp_path, "a/1.jpg", "a/2.jpg", "b/3.jpg")), progress=seen.append)
    assert seen == [0, 2, 3]


# ---------------------------------------------------------------- what is left out


def test_junk_is_left_out_and_counted(tmp_path: Path) -> None:
    junk = [".DS_Store", "._a.jpg", "Thumbs.db", "desktop.ini", "a.jpg~", "a.jpg.part", "a.jpg.tmp", "a.jpg.crdownload"]
    folders = ["__MACOSX", "@eaDir", ".git", "$RECYCLE.BIN", "lost+found", "__pycache__", ".ipynb_checkpoints"]
    make(tmp_path, *(f"c/{name}" for name in junk), *(f"{name}/x.jpg" for name in folders), "c/real.jpg")
    listing = list_folder(str(tmp_path))
    assert files(listing) == [b"c/real.jpg"]
    assert [folder.path for folder in listing.folders] == [b"", b"c"]
    skipped = dict(listing.skipped)
    assert skipped.keys() == {*(f"c/{name}".encode() for name in junk), *(f"{name}/".encode() for name in folders)}
    assert skipped[b"c/.DS_Store"] == "hidden file"
    assert skipped[b"c/a.jpg.part"] == "left behind by another program"
    assert skipped[b"@eaDir/"] == "hidden or system folder"


def test_pipes_and_sockets_are_left_out_unopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "c/a.jpg")
    os.mkfifo(tmp_path / "c/pipe.jpg")
    monkeypatch.chdir(tmp_path / "c")  # a socket's path may have no more than 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        for follow in (False, True):
            listing = list_folder(str(tmp_path), follow_symlinks=follow)
            assert files(listing) == [b"c/a.jpg"]
            reason = "not a regular file (pipe, socket or device)"
            assert sorted(listing.skipped) == [(b"c/pipe.jpg", reason), (b"c/socket.jpg", reason)]


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("include", "exclude", "taken"),
    [
        ((), (), ["cats/a.jpg", "cats/b.png", "cats/sub/c.jpg", "dogs/café.jpg", "dogs/d.txt"]),
        (("*.jpg",), (), ["cats/a.jpg", "cats/sub/c.jpg", "dogs/café.jpg"]),
        (("cats/*",), (), ["cats/a.jpg", "cats/b.png", "cats/sub/c.jpg"]),
        (("*.jpg", "*.txt"), ("*/sub/*",), ["cats/a.jpg", "dogs/café.jpg", "dogs/d.txt"]),
        ((), ("[ab].*",), ["cats/sub/c.jpg", "dogs/café.jpg", "dogs/d.txt"]),
        (("caf?.jpg",), (), ["dogs/café.jpg"]),
        (("caf[é].jpg",), (), ["dogs/café.jpg"]),
        (("*.JPG",), (), []),
        ((), ("cats",), ["dogs/café.jpg", "dogs/d.txt"]),
        ((), ("cats/",), ["dogs/café.jpg", "dogs/d.txt"]),
        ((), ("cats/sub",), ["cats/a.jpg", "cats/b.png", "dogs/café.jpg", "dogs/d.txt"]),
    ],
)
def test_filters(tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], taken: list[str]) -> None:
    everything = ["cats/a.jpg", "cats/b.png", "cats/sub/c.jpg", "dogs/café.jpg", "dogs/d.txt"]
    listing = list_folder(str(make(tmp_path, *everything)), filter=Filter(include, exclude))
    assert files(listing) == [path.encode() for path in taken]
    left_out = dict(listing.skipped)
    assert set(left_out.values()) <= {FILTERED}
    for path in set(everything) - set(taken):
        assert any(
            path.encode() == found or (found.endswith(b"/") and path.encode().startswith(found)) for found in left_out
        )


def test_a_folder_left_out_is_not_there_but_an_emptied_one_is(tmp_path: Path) -> None:
    make(tmp_path, "cats/a.jpg", "dogs/b.jpg", "x.jpg/c.jpg")
    kept = [folder.path for folder in list_folder(str(tmp_path), filter=Filter(exclude=("cats",))).folders]
    assert kept == [b"", b"dogs", b"x.jpg"]
    kept = [folder.path for folder in list_folder(str(tmp_path), filter=Filter(exclude=("cats/*",))).folders]
    assert kept == [b"", b"cats", b"dogs", b"x.jpg"]


def test_patterns_reach_names_that_are_not_text(tmp_path: Path) -> None:
    make(tmp_path, b"c/caf\xe9.jpg", b"c/cafe.jpg")
    listing = list_folder(str(tmp_path), filter=Filter(exclude=("caf\udce9.*",)))
    assert files(listing) == [b"c/cafe.jpg"]
    assert files(list_folder(str(tmp_path), filter=Filter(include=("caf?.jpg",)))) == [b"c/cafe.jpg", b"c/caf\xe9.jpg"]


def test_one_pattern_is_not_a_sequence_of_patterns() -> None:
    with pytest.raises(UsageError, match="sequences"):
        Filter(include="*.jpg")


# ---------------------------------------------------------------- links


def test_links_are_left_out_and_counted(tmp_path: Path) -> None:
    make(tmp_path, "c/a.jpg")
    (tmp_path / "c/link.jpg").symlink_to("a.jpg")
    (tmp_path / "linked").symlink_to("c")
    (tmp_path / "c/broken.jpg").symlink_to("gone")
    (tmp_path / "c/self.jpg").symlink_to("self.jpg")
    listing = list_folder(str(tmp_path))
    assert files(listing) == [b"c/a.jpg"]
    assert sorted(listing.skipped) == [
        (path, LINK) for path in (b"c/broken.jpg", b"c/link.jpg", b"c/self.jpg", b"linked")
    ]
    assert listing.problems == []


def test_followed_links_give_their_content_wherever_it_lies(tmp_path: Path) -> None:
    make(tmp_path, "root/c/a.jpg", "store/12.jpg", "store/deep/345.jpg")
    (tmp_path / "root/c/b.jpg").symlink_to("../../store/12.jpg")
    (tmp_path / "root/d").symlink_to("../store")
    listing = list_folder(str(tmp_path / "root"), follow_symlinks=True)
    sizes = {
        folder.prefix + n: s for folder in listing.folders for n, s in zip(folder.names, folder.sizes, strict=True)
    }
    assert sizes == {b"c/a.jpg": 5, b"c/b.jpg": 6, b"d/12.jpg": 6, b"d/deep/345.jpg": 7}
    assert listing.problems == listing.skipped == []


def test_links_that_lead_nowhere_are_problems(tmp_path: Path) -> None:
    make(tmp_path, "c/a.jpg")
    for name, target in (("broken", "gone"), ("self", "self"), ("ring_a", "ring_b"), ("ring_b", "ring_a")):
        (tmp_path / "c" / name).symlink_to(target)
    listing = list_folder(str(tmp_path), follow_symlinks=True)
    assert files(listing) == [b"c/a.jpg"]
    assert sorted(path for path, _ in listing.problems) == [b"c/broken", b"c/ring_a", b"c/ring_b", b"c/self"]
    assert {reason.split(":")[0] for _, reason in listing.problems} == {"broken link"}


def test_junk_and_what_is_left_out_are_no_problems(tmp_path: Path) -> None:
    make(tmp_path, "c/a.jpg")
    (tmp_path / "c/.#lock.jpg").symlink_to("someone@host")
    (tmp_path / "c/broken.jpg").symlink_to("gone")
    listing = list_folder(str(tmp_path), follow_symlinks=True, filter=Filter(exclude=("broken.*",)))
    assert listing.problems == []
    assert sorted(listing.skipped) == [(b"c/.#lock.jpg", "hidden file"), (b"c/broken.jpg", FILTERED)]


@pytest.mark.parametrize("target", [".", "..", "../..", "../other"])
def test_a_loop_ends(tmp_path: Path, target: str) -> None:
    make(tmp_path, "root/c/a.jpg", "root/other/b.jpg")
    (tmp_path / "root/c/loop").symlink_to(target)
    (tmp_path / "root/other/back").symlink_to("../c")
    root = str(tmp_path / "root") if target != "../.." else str(tmp_path)
    listing = list_folder(root, follow_symlinks=True)
    assert len(set(files(listing))) == len(files(listing))
    assert any("loop" in reason for _, reason in listing.skipped)


def test_a_folder_reached_twice_is_taken_twice(tmp_path: Path) -> None:
    make(tmp_path, "store/cats/a.jpg", "root/")
    for split in ("train", "val"):
        (tmp_path / "root" / split).symlink_to("../store")
    listing = list_folder(str(tmp_path / "root"), follow_symlinks=True)
    assert files(listing) == [b"train/cats/a.jpg", b"val/cats/a.jpg"]


def test_links_that_multiply_are_refused(tmp_path: Path) -> None:
    """Two links a level make 2^40 paths; folders that link to each other make more."""
    for level in range(40):
        make(tmp_path, f"{level}/a.jpg")
        for name in ("left", "right"):
            (tmp_path / f"{level}/{name}").symlink_to(f"../{level + 1}")
    with pytest.raises(SourceError, match="more than 100 paths"):
        list_folder(str(tmp_path / "0"), follow_symlinks=True)
    assert len(files(list_folder(str(tmp_path)))) == 40


# ---------------------------------------------------------------- what cannot be read


def failing(call: Callable[..., object], error: int, end: bytes) -> Callable[..., object]:
    """The call, but for paths that end so: those fail."""

    def wrapped(path: bytes, *args: object, **kwargs: object) -> object:
        if path.endswith(end):
            raise OSError(error, os.strerror(error))
        return call(path, *args, **kwargs)

    return wrapped


def test_a_folder_that_may_not_be_read_stays_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it left out, the labels of all later classes would move."""
    make(tmp_path, "a/1.jpg", "b/2.jpg", "c/3.jpg")
    monkeypatch.setattr(os, "scandir", failing(os.scandir, errno.EACCES, b"/b"))
    listing = list_folder(str(tmp_path))
    assert [folder.path for folder in listing.folders] == [b"", b"a", b"b", b"c"]
    assert files(listing) == [b"a/1.jpg", b"c/3.jpg"]
    assert listing.problems == [(b"b", "folder cannot be read: Permission denied")]


def test_a_file_that_may_not_be_read_is_a_problem_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "a/1.jpg", "a/2.jpg")
    (tmp_path / "a/2.jpg").chmod(0)
    if os.geteuid() == 0:  # root may read everything
        assert files(list_folder(str(tmp_path))) == [b"a/1.jpg", b"a/2.jpg"]
        monkeypatch.setattr(os, "access", lambda path, *_, **__: not path.endswith(b"2.jpg"))
    listing = list_folder(str(tmp_path))
    assert files(listing) == [b"a/1.jpg"]
    assert listing.problems == [(b"a/2.jpg", "cannot be read: Permission denied")]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_a_failing_disk_is_not_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    make(tmp_path, "a/1.jpg", "b/2.jpg")
    monkeypatch.setattr(os, "scandir", failing(os.scandir, error, b"/b"))
    with pytest.raises(SourceError, match=os.strerror(error)):
        list_folder(str(tmp_path))


def test_a_root_that_is_missing_or_no_folder(tmp_path: Path) -> None:
    make(tmp_path, "file")
    for name, reason in (("gone\n", "No such file"), ("file", "Not a directory")):
        with pytest.raises(SourceError, match=reason) as caught:
            list_folder(str(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_names_up_to_the_limits_of_the_file_system(tmp_path: Path) -> None:
    deep = "/".join(["d" * 200] * 5)
    make(tmp_path, f"{deep}/{'n' * 251}.jpg", "e/" + "é" * 127 + "x")
    assert files(list_folder(str(tmp_path))) == [
        f"{deep}/{'n' * 251}.jpg".encode(),
        ("e/" + "é" * 127 + "x").encode(),
    ]
