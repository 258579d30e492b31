"""The tar layout, byte by byte, and as GNU tar and Python read it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from contracts import FormatContract, Sample, batch_of, folder, members, payload, samples_of, seen_of
from hypothesis import given, settings

from packer.errors import ShardError
from packer.formats import FORMATS, get_format
from packer.formats.tar import FORMAT


class TestTarFormat(FormatContract):
    format = FORMAT

    def uncuttable(self, whole: bytes) -> int:
        return 1023  # of the two blocks of zeros that end an archive


write = TestTarFormat().write


def test_every_format_in_the_table_has_what_a_format_must_have() -> None:
    for name in FORMATS:
        format_ = get_format(name)
        assert format_.name == name
        assert format_.suffix.startswith(".")
        assert format_.suffix in format_.suffixes


@settings(max_examples=40)
@given(samples=samples_of())
def test_tarfile_reads_the_same_names_and_contents(samples: list[Sample]) -> None:
    with folder() as tmp:
        write(tmp / "shard.tar", [samples])
        with tarfile.open(tmp / "shard.tar", "r:", encoding="utf-8", errors="surrogateescape") as tar:
            got = [(os.fsencode(m.name), tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
        assert got == list(members(samples))


@settings(max_examples=25)
@given(samples=samples_of())
def test_gnu_tar_lists_the_same_names_and_sizes_and_has_no_complaint(samples: list[Sample]) -> None:
    with folder() as tmp:
        write(tmp / "shard.tar", [samples])
        command = ["tar", "--list", "--verbose", "--quoting-style=literal", "--file", str(tmp / "shard.tar")]
        done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"LC_ALL": "C", "TZ": "UTC"})
        expected = [b"-rw-r--r-- 0/0 %15d 1970-01-01 00:00 %s" % (len(data), name) for name, data in members(samples)]
        columns = [b" ".join(line.split(b" ", 2)[:2]) for line in done.stdout.splitlines()]
        assert done.stderr == b""
        assert columns == [b"-rw-r--r-- 0/0"] * len(expected)
        assert [line.rsplit(b" 1970-01-01 00:00 ", 1)[1] for line in done.stdout.splitlines()] == [
            name for name, _ in members(samples)
        ]


def test_gnu_tar_extracts_the_very_files(tmp_path: Path) -> None:
    long = b"d" * 120 + b"/" + b"n" * 140
    samples = [
        Sample(b"plain", (("jpg", payload(5000, 0)), ("cls", b"3"))),
        Sample(b"-dash/ spaces \xc3\xa9", (("jpg", payload(512, 1)), ("seg.png", b""))),
        Sample(long, (("jpg", payload(511, 2)), ("json", b"{}"))),
        Sample(b"e" * 96, (("jpg", payload(3, 3)),)),  # 100 bytes: the last name without a PAX header
        Sample(b"f" * 97, (("jpg", payload(3, 4)),)),
    ]
    write(tmp_path / "shard.tar", [samples])
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "shard.tar", "-C", tmp_path / "out"], check=True, capture_output=True)
    found = {}
    for root, _, files in os.walk(os.fsencode(tmp_path / "out")):
        for name in files:
            path = os.path.join(root, name)
            found[os.path.relpath(path, os.fsencode(tmp_path / "out"))] = Path(os.fsdecode(path)).read_bytes()
    assert found == dict(members(samples))


def test_the_bytes_of_a_small_shard_stay_the_same_for_ever(tmp_path: Path) -> None:
    samples = [
        Sample(b"n01440764/cat 1", (("jpg", bytes(range(256)) * 3), ("cls", b"17"))),
        Sample(b"x" * 200 + "é".encode(), (("seg.png", b"abc"), ("json", b""))),
    ]
    wrote = write(tmp_path / "shard.tar", [samples])
    shard = (tmp_path / "shard.tar").read_bytes()
    header = shard[:512]
    assert header[:100] == b"n01440764/cat 1.jpg".ljust(100, b"\0")
    assert header[100:148] == b"0000644\x000000000\x000000000\x0000000001400\x0000000000000\x00"
    assert header[148:156] == b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    assert header[156:263] == b"0" + bytes(100) + b"ustar\0"
    assert header[263:265] == b"00"
    assert header[265:329] == bytes(64), "no owner's name: it would differ between machines"
    assert header[329:345] == b"0000000\x000000000\x00"
    assert header[345:] == bytes(167)
    assert shard[-1024:] == bytes(1024)
    assert wrote.offsets == [[512, 2048], [4096, 6144]]
    assert hashlib.sha256(shard).hexdigest() == "5159fa8b70276e60e1a95113da99953a76d593c691eb349aeb84ce170bdede76"


@pytest.mark.parametrize("name_bytes", [1, 99, 100, 101, 104, 105, 480, 486, 487, 500, 990, 998, 999, 1000, 1010, 9000])
def test_pax_lengths_are_right_where_their_digits_roll_over(tmp_path: Path, name_bytes: int) -> None:
    key = b"k" * (name_bytes - 2) if name_bytes > 2 else b"k"
    samples = [Sample(key, (("a", b"data"),))]
    wrote = write(tmp_path / "shard.tar", [samples])
    with tarfile.open(tmp_path / "shard.tar") as tar:
        assert tar.getnames() == [(key + b".a").decode()]
        assert tar.extractfile(tar.next() or tar.getmembers()[0]).read() == b"data"  # type: ignore[union-attr]
    assert wrote.shard.bytes == len((tmp_path / "shard.tar").read_bytes())


def test_a_field_beyond_eleven_octal_digits_is_refused_not_cut(tmp_path: Path) -> None:
    writer = FORMAT.writer(str(tmp_path / "shard.tar"))
    batch = batch_of([Sample(b"a", (("npy", b""),))])
    batch.sizes[0] = FORMAT.max_field_bytes + 1
    with pytest.raises(ShardError, match="8 GiB"):
        writer.stream(batch, seen_of([Sample(b"a", ())]), lambda *_: None)
    writer.abort()


def test_a_reused_buffer_leaves_nothing_of_earlier_payloads(tmp_path: Path) -> None:
    """The padding after each payload is zero, whatever lay in the buffer before."""
    dirty = [Sample(b"d%d" % i, (("bin", b"\xff" * 5000),)) for i in range(10)]
    clean = [Sample(b"c%d" % i, (("bin", b"\1" * size),)) for i, size in enumerate([1, 0, 511, 512, 513, 1500])]
    write(tmp_path / "shard.tar", [dirty, dirty, dirty, clean, clean[::-1]])
    shard = np.frombuffer((tmp_path / "shard.tar").read_bytes(), np.uint8)
    with tarfile.open(tmp_path / "shard.tar") as tar:
        for member in tar:
            end = member.offset_data + member.size
            assert not shard[end : -(-end // 512) * 512].any()
