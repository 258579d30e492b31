"""Reading the tar layout: which members a shard holds, and which samples they make.

A header walk by pread, four times faster than `tarfile`, that trusts nothing: every header's
checksum, every length against the file's size, the end-of-archive blocks, and what follows them.
It understands what GNU tar, Python, libarchive and the WebDataset writers produce: USTAR with
prefixes, GNU long names, PAX headers, base-256 sizes, hard links and pre-POSIX (V7) archives.
Sparse and multi-volume archives are refused, since their members are not byte ranges.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar
from zlib import adler32

from packer.errors import DamagedShardError, ShardError
from packer.sample import bad_fields, printable
from packer.storage import open_regular

BLOCK = 512
Kind = Literal["file", "hardlink", "directory", "symlink", "fifo", "device", "other"]

# Names longer than this exist in no file system; a larger claim is an attack on memory.
_MAX_EXTENSION = 1 << 20
_MAX_SIZE = 1 << 62
_MIN_AHEAD, _MAX_AHEAD = 4096, 65536
_ZEROS = bytes(BLOCK)

# name, size, checksum, type, link name, magic and version, prefix
_HEADER = struct.Struct("100s24x12s12x8sc100s8s80x155s12x")
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "device",
    b"4": "device",
    b"5": "directory",
    b"6": "fifo",
}
_REFUSED = {
    b"S": "a sparse file (repack it without --sparse)",
    b"M": "the rest of a file from another volume (join the volumes first)",
    b"N": "an old GNU name table (repack it with a current tar)",
}
_NOT_TAR = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}


class TarError(DamagedShardError):
    """A tar archive is truncated, damaged, or of a kind that cannot be read by byte ranges."""


class Member(NamedTuple):
    """One member of an archive.

    Attributes:
        name: as stored, prefix and long-name headers applied.
        offset: of the first header that belongs to the member (long-name and PAX headers included).
        data_offset: of its content; for a hard link, of the earlier member's content.
        size: of its content in bytes.
        kind: `file`, `hardlink` (content elsewhere in the archive), or something without content.
    """

    name: bytes
    offset: int
    data_offset: int
    size: int
    kind: Kind

    @property
    def has_content(self) -> bool:
        """Whether the member stands for a regular file's bytes."""
        return self.kind == "file" or self.kind == "hardlink"


def iter_members(file: str | os.PathLike[str] | int, *, shard: str | None = None) -> Iterator[Member]:
    """Walk the headers of a tar archive, in order, with bounded memory.

    Args:
        file: path, or an open file descriptor (its position is neither used nor moved).
        shard: what errors call the file; by default the path.

    Raises:
        TarError: truncated anywhere (a cut between two members included, which most readers take
            for the end), damaged header, bytes after the end, sparse or multi-volume archive.

    >>> for member in iter_members("train-000000.tar"):              # doctest: +SKIP
    ...     print(member.name, member.data_offset, member.size)
    """
    if isinstance(file, int):
        yield from _Walk(file, shard or f"file descriptor {file}").members()
        return
    path = os.fspath(file)
    try:
        fd = open_regular(path)
    except OSError as error:
        raise ShardError(f"{printable(path)}: {error.strerror}") from error
    try:
        yield from _Walk(fd, shard or path).members()
    finally:
        os.close(fd)


@dataclass
class _Overrides:
    """What extension headers say about the member that follows them."""

    path: bytes | None = None
    link: bytes | None = None
    size: int | None = None


class _Walk:
    """The state of one pass over the headers."""

    def __init__(self, fd: int, shard: str) -> None:
        self._fd = fd
        self._shard = shard
        self._end = os.fstat(fd).st_size
        self._buffer = b""
        self._start = 0  # offset of the buffer in the file
        self._ahead = _MIN_AHEAD
        self._served = 0  # headers that the buffer held
        self._global = _Overrides()
        self._seen: dict[bytes, Member] | None = None  # by name; only once a hard link asks

    def members(self, stop: int = _MAX_SIZE) -> Iterator[Member]:
        at = 0
        while at < stop and (found := self._next(at)) is not None:
            member, at = found
            if self._seen is not None:
                self._seen[_normal(member.name)] = member
            yield member

    def _next(self, first: int) -> tuple[Member, int] | None:
        """The member whose headers begin at `first`, and where the next one's begin; None at the end."""
        at = first
        said = _Overrides()
        extended = False
        while True:
            block = self._block(at)
            if block == _ZEROS:
                if extended:
                    raise self._error(first, "the archive ends after an extension header, before its member")
                self._check_end(at)
                return None
            name, size_field, checksum, kind, link, magic, prefix = _HEADER.unpack(block)
            self._check_sum(block, checksum, at)
            size = self._number(size_field, at)
            if kind not in b"LKxXg":
                break
            extended = extended or kind != b"g"
            self._extension(kind, at, size, said)
            at += BLOCK + _padded(size)
        if magic[:6] != b"ustar\0":
            prefix = b""  # GNU keeps times there, V7 nothing
        name = _cut(name)
        if prefix[:1] > b"\0":
            name = _cut(prefix) + b"/" + name
        if extended or self._global != _NOTHING:
            name = _first(said.path, self._global.path, name)
            link = _first(said.link, self._global.link, link)
            size = _first(said.size, self._global.size, size)
        return self._member(name, kind, size, _cut(link), first, at + BLOCK)

    def _member(self, name: bytes, kind: bytes, size: int, link: bytes, first: int, data: int) -> tuple[Member, int]:
        what = _KINDS.get(kind, "other")
        if what == "file" and name[-1:] == b"/":
            what = "directory"
        if what == "file" or what == "other":
            if kind in _REFUSED:
                raise self._error(first, f"{printable(name)!r} is {_REFUSED[kind]}")
            after = data + _padded(size)
            if after > self._end:
                raise self._error(
                    first, f"truncated: {printable(name)!r} reaches to offset {after}, the file ends at {self._end}"
                )
            return Member(name, first, data, size, what), after
        if what == "hardlink":  # a size given here describes the target; no content follows
            target = self._target(link, first)
            return Member(
                name, first, target.data_offset, target.size, "hardlink" if target.has_content else target.kind
            ), data
        if size:
            raise self._error(
                first, f"{printable(name)!r} is a {what} and claims {size} bytes; readers disagree on what follows"
            )
        return Member(name, first, data, 0, what), data

    def _target(self, link: bytes, at: int) -> Member:
        """The latest earlier member of this name. The table of names is made when first asked for."""
        if self._seen is None:
            earlier = _Walk(self._fd, self._shard).members(stop=at)
            self._seen = {_normal(member.name): member for member in earlier}
        try:
            return self._seen[_normal(link)]
        except KeyError:
            raise self._error(at, f"a hard link to {printable(link)!r}, which no earlier member is") from None

    def _extension(self, kind: bytes, at: int, size: int, said: _Overrides) -> None:
        """Take in a long name (L), long link (K), or PAX header (x, X, g)."""
        if size > _MAX_EXTENSION:
            raise self._error(at, f"an extension header of {size} bytes; the limit is {_MAX_EXTENSION}")
        body = os.pread(self._fd, size, at + BLOCK)
        if len(body) < size or at + BLOCK + _padded(size) > self._end:
            raise self._error(at, f"truncated inside an extension header; the file ends at {self._end}")
        if kind == b"L":
            said.path = _cut(body)
        elif kind == b"K":
            said.link = _cut(body)
        else:
            self._pax(body, at, self._global if kind == b"g" else said)

    def _pax(self, body: bytes, at: int, into: _Overrides) -> None:
        """Records `<length> <keyword>=<value>`, each with its newline; values are raw bytes here."""
        start = 0
        while start < len(body) and body[start]:
            length = _PAX_LENGTH.match(body, start)
            stop = start + int(length[1]) if length else 0
            if length is None or not length.end() < stop <= len(body) or body[stop - 1 : stop] != b"\n":
                raise self._error(at, "a damaged PAX header")
            keyword, equals, value = body[length.end() : stop - 1].partition(b"=")
            if not equals:
                raise self._error(at, "a damaged PAX header")
            start = stop
            if keyword == b"path" or keyword == b"linkpath":
                if b"\0" in value:
                    raise self._error(at, f"a PAX {keyword.decode()} with a zero byte")
                # An empty value takes back what was said before (POSIX pax, 'pax Extended Header').
                setattr(into, "path" if keyword == b"path" else "link", value or None)
            elif keyword == b"size":
                if value and not _DECIMAL.fullmatch(value):
                    raise self._error(at, f"a PAX size of {printable(value[:40])!r}")
                into.size = int(value) if value else None
            elif keyword.startswith(b"GNU.sparse."):
                raise self._error(at, f"the member is {_REFUSED[b'S']}")
        if body.count(0, start) != len(body) - start:
            raise self._error(at, "a damaged PAX header")

    def _block(self, at: int) -> bytes:
        """The header block at this offset, from a buffer that grows where headers lie close together."""
        inside = at - self._start
        if not 0 <= inside <= len(self._buffer) - BLOCK:
            self._ahead = min(2 * self._ahead, _MAX_AHEAD) if self._served > 2 else _MIN_AHEAD
            self._buffer = os.pread(self._fd, self._ahead, at)
            self._start, self._served, inside = at, 0, 0
            if len(self._buffer) < BLOCK:
                raise self._error(at, self._why_short(at))
        self._served += 1
        return self._buffer[inside : inside + BLOCK]

    def _why_short(self, at: int) -> str:
        if self._end == 0:
            return "an empty file, not a tar archive"
        if at == self._end:
            return "truncated: the file ends here without the end-of-archive blocks"
        return f"truncated inside a header; the file ends at {self._end}"

    def _check_sum(self, block: bytes, field: bytes, at: int) -> None:
        if _sum_fits(block, field):
            return
        if at == 0:
            for magic, by in _NOT_TAR.items():
                if block.startswith(magic):
                    raise self._error(0, f"compressed with {by}; uncompress it: byte ranges need a plain tar")
            raise self._error(0, "not a tar archive (or its first header is damaged)")
        raise self._error(at, "damaged: what should be a header does not match its checksum")

    def _number(self, field: bytes, at: int) -> int:
        """A size: octal digits, or binary (base 256) with the top bit set."""
        octal = _OCTAL.fullmatch(field)
        if octal:
            return int(octal[1] or b"0", 8)
        if field[0] == 0x80:
            value = int.from_bytes(field[1:], "big")
            if value < _MAX_SIZE:
                return value
        raise self._error(at, f"a size of {printable(field)!r}")

    def _check_end(self, at: int) -> None:
        """Nothing but zeros may follow the end: readers stop here, and would lose what comes after.

        One block of zeros already proves the end, as no header is all zeros; but a file that ends inside a
        block was cut, since archives are written in whole blocks.
        """
        while data := os.pread(self._fd, 1 << 20, at):
            if data.count(0) != len(data):
                first = at + len(data) - len(data.lstrip(b"\0"))
                raise self._error(
                    first,
                    "bytes after the end of the archive, which readers ignore "
                    "(archives joined end to end? join them with 'tar --concatenate')",
                )
            at += len(data)
        if self._end % BLOCK:
            raise self._error(at - at % BLOCK, f"truncated inside the end of the archive; the file ends at {self._end}")

    def _error(self, at: int, what: str) -> TarError:
        return TarError(self._shard, at, what)


def is_header(block: bytes) -> bool:
    """Whether these 512 bytes are a tar header, or the blocks that end an archive without members."""
    return len(block) == BLOCK and (block == _ZEROS or _sum_fits(block, block[148:156]))


def _sum_fits(block: bytes, field: bytes) -> bool:
    stored = _OCTAL.fullmatch(field)
    if stored is None or not stored[1]:
        return False
    claim = int(stored[1], 8)
    # The checksum is the sum of all bytes, its own eight counted as spaces. The low half of
    # Adler-32 is one more than the sum modulo 65,521, at a fifteenth of the cost of sum().
    total = (adler32(block) & 0xFFFF) - (adler32(field) & 0xFFFF) + 8 * 32
    if (total - claim) % 65521 == 0:
        return True
    signed = sum(memoryview(block).cast("b")) - sum(memoryview(field).cast("b")) + 8 * 32
    return signed == claim  # some old writers summed signed bytes


_NOTHING = _Overrides()
T = TypeVar("T")


def _padded(size: int) -> int:
    return (size + BLOCK - 1) & -BLOCK


def _cut(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _normal(name: bytes) -> bytes:
    return os.path.normpath(name)


def _first(local: T | None, everywhere: T | None, header: T) -> T:
    if local is not None:
        return local
    return header if everywhere is None else everywhere


# --- samples -----------------------------------------------------------------------------------

# Key: folders and the base name up to its first dot. Field: the rest.
_SAMPLE_NAME = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
BAD_FIELD = "extension unusable as a field name"
_METADATA = re.compile(rb"__[^/]*__(?:/|$)")


def split_name(name: bytes) -> tuple[bytes, str | None] | str:
    """Key and field of a member's name by WebDataset's rule, or why it belongs to no sample.

    The field is None where the extension cannot be a field's name (empty, reserved, unprintable).

    >>> split_name(b"a/b.c/x.seg.PNG"), split_name(b"README"), split_name(b"__meta__/x.json")
    ((b'a/b.c/x', 'seg.png'), 'no extension', 'metadata')
    """
    if _METADATA.match(name):
        return "metadata"
    parts = _SAMPLE_NAME.fullmatch(name)
    if parts is None:
        return "no extension"
    return parts[1], _field(parts[2])


@lru_cache(maxsize=1024)
def _field(suffix: bytes) -> str | None:
    field = suffix.decode("utf-8", "surrogateescape").lower()
    return None if bad_fields([field]) else field


def group_samples(
    members: Iterable[Member], shard: str, skipped: MutableMapping[str, int] | None = None
) -> Iterator[tuple[bytes, dict[str, Member]]]:
    """Put members together to samples: runs of consecutive members with one key.

    Members that are no part of a sample (folders, links, metadata, names without an extension)
    neither end a run nor are lost silently: they are counted.

    Args:
        members: in archive order, from `iter_members`.
        shard: what errors call the archive.
        skipped: counts by reason, added to.

    Yields:
        `(key, {field: member})`; fields in lower case, in archive order. A key that comes back later
        is yielded again, as readers do; whoever needs unique keys compares them.

    Raises:
        TarError: a sample has two members of one field.
    """
    key = b""
    fields: dict[str, Member] = {}
    skipped = {} if skipped is None else skipped
    for member in members:
        found = split_name(member.name) if member.has_content else member.kind
        if isinstance(found, str):
            skipped[found] = skipped.get(found, 0) + 1
            continue
        if found[0] != key:
            if fields:
                yield key, fields
            key, fields = found[0], {}
        field = found[1]
        if field is None:
            skipped[BAD_FIELD] = skipped.get(BAD_FIELD, 0) + 1
            continue
        if field in fields:
            raise TarError(
                shard,
                member.offset,
                f"a second field {field!r} of sample {printable(key)!r}; the first is at offset {fields[field].offset}",
            )
        fields[field] = member
    if fields:
        yield key, fields
