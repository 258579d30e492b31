"""Files appear whole or not at all, and errors say what to do."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from packer.errors import OutputError
from packer.storage import exclusive, fsync_folder, output_error, write_atomic, write_json


def test_a_file_is_written_in_parts_and_its_facts_are_told(tmp_path: Path) -> None:
    facts = write_atomic(str(tmp_path / "file"), [b"one ", memoryview(b"two "), b"", b"three"])
    assert (tmp_path / "file").read_bytes() == b"one two three"
    assert facts == (13, crc32c(b"one two three"))
    assert os.listdir(tmp_path) == ["file"]


def test_until_the_last_part_the_old_file_stands(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"new"
        assert path.read_bytes() == b"old"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomic(str(path), parts())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*nowhere/file"):
        write_atomic(str(tmp_path / "nowhere" / "file"), [b""])


def test_json_is_ascii_and_ends_its_line(tmp_path: Path) -> None:
    write_json(str(tmp_path / "file"), {"é": "\udce9"})
    assert (tmp_path / "file").read_bytes().endswith(b"}\n")
    assert (tmp_path / "file").read_bytes().isascii()
    assert json.loads((tmp_path / "file").read_text()) == {"é": "\udce9"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_who_writes_one_file_hears_nothing_of_shards(tmp_path: Path, number: int) -> None:
    def parts() -> Iterator[bytes]:
        yield b"begun"
        raise OSError(number, os.strerror(number))

    with pytest.raises(OutputError, match=os.strerror(number)) as caught:
        write_atomic(str(tmp_path / "page.html"), parts())
    assert "shard" not in str(caught.value).replace(str(tmp_path), "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "may write to"),
        (errno.EROFS, "read-only"),
        (errno.EFBIG, "lower --shard-size"),
        (errno.EIO, "once this is mended, run the same command again"),
    ],
)
def test_an_error_says_what_to_do(number: int, advice: str) -> None:
    text = str(output_error("out/x.tar", OSError(number, os.strerror(number))))
    assert text.startswith(f"cannot write out/x.tar: {os.strerror(number)}; ")
    assert advice in text


def test_one_holds_a_lock_and_the_next_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "lock", tmp_path):  # a file, made if need be, or a folder
        refused = pytest.raises(OutputError, match="out/ is being written by another packer process")
        with exclusive(str(path), "out/"), refused, exclusive(str(path), "out/"):
            pytest.fail("two hold it")
        with exclusive(str(path), "out/"):
            pass


def test_a_file_system_without_locks_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with exclusive(str(tmp_path / "lock"), "out/"):
        assert (tmp_path / "lock").exists()


def test_a_file_system_that_cannot_sync_folders_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> None:
        def fsync(fd: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fails(errno.EINVAL)
    fsync_folder(str(tmp_path))
    fails(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        fsync_folder(str(tmp_path))
