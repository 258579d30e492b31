"""The tar reader against GNU tar, Python's tarfile and webdataset, and against damage."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packer.errors import ShardError
from packer.formats.tar_reader import Member, TarError, group_samples, iter_members, split_name

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
quick = settings(max_examples=60)

# Any bytes but NUL and a last slash (which makes a folder), with lengths around the fields' 100 and 155.
names = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.integers(90, 600).map(lambda n: b"n" * n),
    st.lists(st.text("ab.é_", min_size=1, max_size=120), min_size=1, max_size=4).map(
        lambda parts: "/".join(parts).encode()
    ),
).filter(lambda name: b"\0" not in name and not name.endswith(b"/"))
contents = st.one_of(st.binary(max_size=20), st.sampled_from([511, 512, 513, 1024, 5000]).map(bytes))
files = st.lists(st.tuples(names, contents), max_size=12)


def text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def make(entries: list[tuple[bytes, bytes]], layout: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=layout, encoding="utf-8") as archive:
        for name, data in entries:
            info = tarfile.TarInfo(text(name))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def header(
    name: bytes,
    size: bytes = b"00000000000\0",
    kind: bytes = b"0",
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
) -> bytes:
    fields = "100s24x12s12x8sc100s8s80x155s12x"
    block = bytearray(struct.pack(fields, name, size, b" " * 8, kind, link, magic, prefix))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    body = b"".join(records)
    return header(b"pax", b"%011o\0" % len(body), kind) + body.ljust(512, b"\0")


END = bytes(1024)


@pytest.fixture
def shard(tmp_path: Path):
    path = tmp_path / "x.tar"

    def write(*parts: bytes) -> str:
        path.write_bytes(b"".join(parts))
        return str(path)

    return write


def content(path: str, member: Member) -> bytes:
    with open(path, "rb") as f:
        f.seek(member.data_offset)
        return f.read(member.size)


def tar(*arguments: str | Path) -> bytes:
    return subprocess.run(["tar", *arguments], check=True, capture_output=True).stdout


def by_tarfile(path: str) -> list[tuple[bytes, int, int]]:
    with tarfile.open(path, encoding="utf-8") as archive:
        files = [m for m in archive if m.isreg()]
        return [(m.name.encode("utf-8", "surrogateescape"), m.offset_data, m.size) for m in files]


# --- agreement with other readers and writers -----------------------------------------------------


@quick
@given(files, st.sampled_from(sorted(FORMATS)))
def test_reads_what_tarfile_writes(shard, entries, layout):
    try:
        path = shard(make(entries, FORMATS[layout]))
    except ValueError:  # USTAR cannot hold every name
        assume(False)
    members = list(iter_members(path))
    assert [(m.name, content(path, m)) for m in members] == entries
    assert [(m.name, m.data_offset, m.size) for m in members] == by_tarfile(path)
    if members:  # an archive cut before the last member's first header holds exactly the others
        cut = shard(Path(path).read_bytes()[: members[-1].offset], END)
        assert list(iter_members(cut)) == members[:-1]


@pytest.mark.parametrize("layout", ["v7", "oldgnu", "gnu", "ustar", "pax"])
def test_reads_what_gnu_tar_writes(tmp_path, layout):
    source = tmp_path / "source"
    wanted = {
        b"plain.jpg": b"\xff\xd8",
        b"empty.txt": b"",
        b"block.bin": bytes(512),
        b"-dash.jpg": b"1",
        b"a b\nc.jpg": b"newline",
        b"caf\xc3\xa9.jpg": b"utf-8",
        b"caf\xe9.jpg": b"latin-1",
        b"b\\x": b"2",
        b"deep/er/x.seg.png": b"3",
        b"m" * 97: b"99 with ./",
    }
    if layout != "v7":
        wanted[b"m" * 98] = b"100 with ./"
        wanted[b"d" * 80 + b"/" + b"f" * 90] = b"prefix" if layout == "ustar" else b"long name"
    if layout not in ("v7", "ustar"):
        wanted |= {b"l" * 101: b"101", b"n" * 255: b"255", b"/".join([b"p" * 200] * 5): b"1004"}
    for name, data in wanted.items():
        path = os.path.join(os.fsencode(source), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(data)
    os.link(source / "plain.jpg", source / "z-link.jpg")
    os.symlink("plain.jpg", source / "symbolic.jpg")
    if layout != "v7":
        os.mkfifo(source / "pipe")
    archive = str(tmp_path / "x.tar")
    tar("--sort=name", f"--format={layout}", "-cf", archive, "-C", source, ".")

    members = {m.name: m for m in iter_members(archive)}
    found = {n.removeprefix(b"./"): content(archive, m) for n, m in members.items() if m.kind == "file"}
    assert found == wanted
    assert members[b"./"].kind == "directory" and members[b"./symbolic.jpg"].kind == "symlink"
    if layout != "v7":
        assert members[b"./pipe"].kind == "fifo"
    link = members[b"./z-link.jpg"]
    assert link.kind == "hardlink" and link.has_content and content(archive, link) == b"\xff\xd8"
    assert len(tar("--quoting-style=escape", "-tf", archive).splitlines()) == len(members)


def test_global_pax_headers_hold_until_taken_back(shard):
    path = shard(
        pax(b"22 comment=irrelevant\n", b"15 path=global\n", kind=b"g"),
        header(b"a.txt"),
        pax(b"14 path=local\n"),
        header(b"b.txt"),
        header(b"c.txt"),
        pax(b"8 path=\n", kind=b"g"),
        header(b"d.txt"),
        pax(b"21 hdrcharset=BINARY\n", b"13 path=\xff\xfe.x\n", b"9 size=3\n"),
        header(b"e.txt"),
        b"abc".ljust(512, b"\0"),
        END,
    )
    members = list(iter_members(path))
    assert [m.name for m in members] == [b"global", b"local", b"global", b"d.txt", b"\xff\xfe.x"]
    assert content(path, members[-1]) == b"abc"
    assert members[-1].offset == members[-2].data_offset, "a member begins at its extension header"


def test_sizes_in_base_256(tmp_path):
    size = 9 << 30  # over the 8 GiB that eleven octal digits hold; the file is sparse
    path = tmp_path / "huge.tar"
    with open(path, "wb") as f:
        f.write(header(b"huge.bin", b"\x80" + size.to_bytes(11, "big"), magic=b"ustar  \0"))
        f.seek(512 + size)
        f.write(header(b"after.txt") + END)
    assert [(m.name, m.size) for m in iter_members(path)] == [(b"huge.bin", size), (b"after.txt", 0)]
    assert by_tarfile(str(path)) == [(b"huge.bin", 512, size), (b"after.txt", 1024 + size, 0)]


def test_gnu_headers_have_no_prefix(shard):
    path = shard(header(b"x.jpg", magic=b"ustar  \0", prefix=b"15147334071\x0015147334071"), END)
    assert [m.name for m in iter_members(path)] == [b"x.jpg"]  # GNU keeps access times there


def test_signed_checksums_of_old_writers(shard):
    block = bytearray(header(b"\xe9.jpg"))
    signed = sum(b - 256 if b > 127 else b for b in block[:148] + b" " * 8 + block[156:])
    block[148:156] = b"%06o\0 " % signed
    assert [m.name for m in iter_members(shard(bytes(block), END))] == [b"\xe9.jpg"]


def test_hard_links_resolve_to_the_latest_earlier_member(shard):
    def entry(name: bytes, data: bytes) -> bytes:
        return header(name, b"%011o\0" % len(data)) + data.ljust(512, b"\0")

    path = shard(
        entry(b"./a", b"first"),
        entry(b"a", b"second"),
        header(b"b", kind=b"1", link=b"a"),
        header(b"c", kind=b"1", link=b"./b"),
        header(b"s", kind=b"2", link=b"a"),
        header(b"t", kind=b"1", link=b"s"),
        END,
    )
    members = {m.name: m for m in iter_members(path)}
    assert content(path, members[b"b"]) == content(path, members[b"c"]) == b"second"
    assert not members[b"t"].has_content, "a hard link to a symbolic link has no bytes"


def test_reads_from_a_descriptor_without_moving_it(shard):
    path = shard(make([(b"a.txt", b"1"), (b"b.txt", b"2")]))
    with open(path, "rb", buffering=0) as f:
        f.seek(7)
        assert list(iter_members(f.fileno())) == list(iter_members(path))
        assert f.tell() == 7


# --- damage ---------------------------------------------------------------------------------------

SMALL = [(b"a.jpg", b"one"), (b"n" * 120 + b"\xc3\xa9.jpg", bytes(513)), (b"b.cls", b"7")]


@pytest.mark.parametrize("layout", sorted(FORMATS))
def test_every_truncation_is_noticed(shard, layout):
    entries = SMALL if layout != "ustar" else [(b"d" * 90 + b"/a.jpg", b"one"), (b"b.cls", bytes(513))]
    whole = make(entries, FORMATS[layout])
    members = list(iter_members(shard(whole)))
    end = members[-1].data_offset + (members[-1].size + 511) // 512 * 512
    for size in range(min(len(whole), end + 1100)):
        path, seen = shard(whole[:size]), []
        walk = iter_members(path)
        if size >= end + 512 and size % 512 == 0:  # one block of zeros proves that all members are there
            assert list(walk) == members
            continue
        with pytest.raises(TarError, match="offset") as caught:
            seen.extend(walk)
        assert caught.value.shard == path and caught.value.offset <= size
        assert seen == members[: len(seen)] and all(m.data_offset + m.size <= size for m in seen)


@pytest.mark.parametrize("layout", sorted(FORMATS))
def test_every_flipped_bit_of_a_header_is_noticed_or_harmless(tmp_path, layout):
    entries = SMALL if layout != "ustar" else [(b"d" * 90 + b"/a.jpg", b"one"), (b"b.cls", bytes(513))]
    data = bytearray(make(entries, FORMATS[layout]))
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    members = list(iter_members(path))
    headers = {m.offset for m in members} | {m.data_offset - 512 for m in members}
    noticed = 0
    with open(path, "r+b", buffering=0) as f:
        for bit in range(512 * 8):
            for at in headers:
                where = at + bit // 8
                os.pwrite(f.fileno(), bytes([data[where] ^ 1 << bit % 8]), where)
                try:
                    assert list(iter_members(f.fileno())) == members
                except TarError:
                    noticed += 1
                os.pwrite(f.fileno(), data[where : where + 1], where)
    assert noticed > 0.99 * len(headers) * 512 * 8


@quick
@given(st.data())
def test_no_bytes_crash_it(shard, data):
    whole = bytearray(make(SMALL, FORMATS[data.draw(st.sampled_from(["gnu", "pax"]))])[: 12 * 512])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        junk = data.draw(st.binary(min_size=1, max_size=30))
        whole[at : at + len(junk)] = junk
    # Make the checksums right again, so that the fields behind them get their turn.
    for at in range(0, len(whole) - 511, 512):
        if whole[at + 257 : at + 262] == b"ustar":
            whole[at + 148 : at + 156] = b" " * 8
            whole[at + 148 : at + 156] = b"%06o\0 " % sum(whole[at : at + 512])
    path = shard(bytes(whole))
    try:
        for member in iter_members(path):
            assert 0 <= member.data_offset <= member.data_offset + member.size <= len(whole)
    except TarError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b""], "empty file"),
        ([b"not a tar archive".ljust(1024)], "at offset 0: not a tar"),
        ([gzip.compress(bytes(99))], "truncated inside a header"),
        ([gzip.compress(os.urandom(2000))], "compressed with gzip"),
        ([header(b"a.txt"), b"junk".ljust(512), END], "at offset 512: damaged"),
        ([header(b"a.txt"), END, header(b"b.txt"), END], "at offset 1536: bytes after the end"),
        ([header(b"a.txt"), END, bytes(700), b"x"], "at offset 2236: bytes after the end"),
        ([header(b"a", b"00000001000\0"), END[:511]], "at offset 0: truncated: 'a' reaches to offset 1024"),
        ([header(b"a", b"\xff" * 12), END], "a size of"),
        ([header(b"a", b"\x80" + b"\xff" * 11), END], "a size of"),
        ([header(b"a", b"0000000000x\0"), END], "a size of"),
        ([header(b"a", kind=b"S", magic=b"ustar  \0"), END], "'a' is a sparse file"),
        ([header(b"a", kind=b"M"), END], "another volume"),
        ([header(b"d/", b"00000001000\0", kind=b"5"), END], "a directory and claims 512 bytes"),
        ([header(b"a", kind=b"1", link=b"gone"), END], "a hard link to 'gone', which no earlier member is"),
        ([header(b"x", b"77777777777\0", kind=b"x"), END], "extension header of 8589934591 bytes"),
        ([header(b"x", b"00004000001\0", kind=b"L"), END], "extension header of 1048577 bytes"),
        ([pax(b"11 path=abc"), header(b"a"), END], "damaged PAX"),
        ([pax(b"99 path=abc\n"), header(b"a"), END], "damaged PAX"),
        ([pax(b"0 path=abc\n"), header(b"a"), END], "damaged PAX"),
        ([pax(b"12 path=abc\n\0x"), header(b"a"), END], "damaged PAX"),
        ([pax(b"13 path=a\0bc\n"), header(b"a"), END], "zero byte"),
        ([pax(b"11 size=-1\n"), header(b"a"), END], "PAX size of '-1'"),
        ([pax(b"22 GNU.sparse.major=1\n"), header(b"a"), END], "sparse"),
        ([pax(b"27 size=999999999999999999\n"), header(b"a"), END], "truncated: 'a' reaches to"),
        ([pax(b"12 path=abc\n"), END], "before its member"),
        ([header(b"x", b"00000000006\0", kind=b"L"), b"abcde\0".ljust(512, b"\0"), END], "before its member"),
    ],
)
def test_refusals_say_where_and_why(shard, parts, message):
    with pytest.raises(TarError, match=message):
        list(iter_members(shard(*parts)))


def test_sparse_files_of_gnu_tar_are_refused(tmp_path):
    with open(tmp_path / "holes.bin", "wb") as f:
        f.truncate(1 << 20)
    for layout in ("gnu", "pax"):
        tar("--sparse", f"--format={layout}", "-cf", tmp_path / "x.tar", "-C", tmp_path, "holes.bin")
        with pytest.raises(TarError, match="sparse"):
            list(iter_members(tmp_path / "x.tar"))


def test_a_missing_file_is_a_shard_error(tmp_path):
    with pytest.raises(ShardError, match=r"gone\.tar: No such file"):
        list(iter_members(tmp_path / "gone.tar"))


# --- samples --------------------------------------------------------------------------------------


def test_split_name_follows_the_rule():
    assert split_name(b"a/b.c/x.seg.PNG") == (b"a/b.c/x", "seg.png")
    assert split_name(b"./n01/x.JPEG") == (b"./n01/x", "jpeg")
    assert split_name(b"caf\xe9.jpg") == (b"caf\xe9", "jpg")
    for name in (b"README", b".hidden", b"a.b/README"):
        assert split_name(name) == "no extension"
    for name in (b"__info__/x.json", b"__index__"):
        assert split_name(name) == "metadata"
    for unusable in (b"x.", b"x.__key__", b"x.a\n", b"x..jpg"):
        assert split_name(unusable) == (b"x", None)


def test_what_is_no_sample_is_counted_and_ends_no_run(shard):
    path = shard(
        header(b"d/", kind=b"5"),
        header(b"d/a.jpg"),
        header(b"README"),
        header(b"__meta__/x.json"),
        header(b"d/a.s", kind=b"2"),
        header(b"d/a.cls"),
        header(b"d/b.jpg"),
        END,
    )
    skipped: dict[str, int] = {}
    groups = [(key, list(fields)) for key, fields in group_samples(iter_members(path), path, skipped)]
    assert groups == [(b"d/a", ["jpg", "cls"]), (b"d/b", ["jpg"])]
    assert skipped == {"directory": 1, "no extension": 1, "metadata": 1, "symlink": 1}


def test_two_members_of_one_field_are_an_error(shard):
    path = shard(header(b"a.jpg"), header(b"a.JPG"), END)
    with pytest.raises(TarError, match=r"offset 512: a second field 'jpg' of sample 'a'"):
        list(group_samples(iter_members(path), path))


def is_plain(name: str) -> bool:
    """No folder, and no field that webdataset lets through and we count: empty, `.x`, `__`."""
    return not name.endswith(("/", ".")) and ".." not in name and ".__" not in name


sample_names = st.lists(st.text("ab./_C", min_size=1, max_size=9).filter(is_plain), min_size=1, max_size=10)


@quick
@given(sample_names)
def test_groups_as_webdataset_does(shard, listed):
    wds = pytest.importorskip("webdataset.tariterators", reason="webdataset is the oracle")
    path = shard(make([(name.encode(), name.encode()) for name in listed]))
    try:
        with open(path, "rb") as stream:
            files = ({**f, "__url__": path} for f in wds.tar_file_iterator(stream))
            theirs = list(wds.group_by_keys(files))
    except ValueError:  # a field twice in one sample
        with pytest.raises(TarError, match="second field"):
            list(group_samples(iter_members(path), path))
        return
    ours = [
        (key.decode(), {field: content(path, m) for field, m in fields.items()})
        for key, fields in group_samples(iter_members(path), path)
    ]
    assert ours == [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in theirs]
