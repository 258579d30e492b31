"""Samples: a key and named fields, and how file names become both.

The rule (documented in docs/format.md, and reversible):

- The **key** is the path relative to the source, without its last extension, with every byte that
  would break a reader written as `%XX`: `%` itself, control bytes, bytes that are not UTF-8, a dot
  in the base name (WebDataset splits key and field at the first one), and a leading `__` of any
  path component (readers skip `__name__`).
- The **field** is the extension in lower case; `.jpeg`, `.JPEG`, `.jpe` and `.jfif` are `jpg`,
  as every WebDataset recipe expects.
- Where two files of one folder would get the same key (`a.jpg` and `a.png`), each keeps its
  extension in the key: `a%2Ejpg`, `a%2Epng`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

IMAGE_EXTENSIONS = frozenset(
    [
        "jpg",
        "jpeg",
        "jpe",
        "jfif",
        "png",
        "bmp",
        "gif",
        "webp",
        "tif",
        "tiff",
        "ppm",
        "pgm",
        "pbm",
        "pnm",
        "avif",
        "heic",
        "heif",
    ]
)
_JPEG_ALIASES = frozenset(("jpeg", "jpe", "jfif"))

#: Names that webdataset, wids and energon use inside a sample dictionary.
RESERVED_FIELDS = frozenset(
    [
        "__key__",
        "__url__",
        "__local_path__",
        "__bad__",
        "__worker__",
        "__rank__",
        "__world_size__",
        "__shard__",
        "__shardindex__",
        "__index__",
        "__dataset__",
        "__sample_index__",
        "__restore_key__",
        "__subflavors__",
    ]
)

# Control bytes, DEL, '%'. Non-UTF-8 bytes are found by decoding; dots by position.
_BAD = re.compile(rb"[\x00-\x1f%\x7f]")
_PLAIN_PATH = re.compile(
    rb"(?:[\x20-\x24\x26-\x2e\x30-\x5e\x60-\x7e][\x20-\x24\x26-\x2e\x30-\x7e]*/)*"
    rb"[\x20-\x24\x26-\x2d\x30-\x5e\x60-\x7e][\x20-\x24\x26-\x2d\x30-\x7e]*"
)
_ESCAPED = {byte: b"%%%02X" % byte for byte in range(256)}

_PLAIN_BYTES = bytes(byte for byte in range(0x20, 0x7F) if byte not in b".%")


def _escape_component(name: bytes, *, dots: bool) -> bytes:
    try:
        name.decode("utf-8")
        out = _BAD.sub(lambda m: _ESCAPED[m[0][0]], name)
    except UnicodeDecodeError:
        # surrogateescape marks exactly the bytes that are not UTF-8; the rest passes as it is.
        text = name.decode("utf-8", "surrogateescape")
        out = b"".join(
            _ESCAPED[ord(c) - 0xDC00]
            if 0xDC80 <= ord(c) <= 0xDCFF
            else _BAD.sub(lambda m: _ESCAPED[m[0][0]], c.encode("utf-8"))
            for c in text
        )
    if dots:
        out = out.replace(b".", b"%2E")
    if out.startswith(b"__"):
        out = b"%5F" + out[1:]
    return out


def escape_key(path: bytes) -> bytes:
    """The key for a path whose extension is already taken off.

    >>> escape_key(b"v1.0/img.v2"), escape_key(b"__a/50%")
    (b'v1.0/img%2Ev2', b'%5F_a/50%25')
    """
    if _PLAIN_PATH.fullmatch(path):
        return path
    *folders, base = path.split(b"/")
    parts = [_escape_component(folder, dots=False) for folder in folders]
    parts.append(_escape_component(base, dots=True))
    return b"/".join(parts)


def unescape_key(key: bytes) -> bytes:
    """The path (without extension) that `escape_key` turned into this key.

    >>> unescape_key(b"v1.0/img%2Ev2")
    b'v1.0/img.v2'
    """
    return unquote_to_bytes(key)


_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


def key_fault(key: bytes) -> str:
    r"""Why a stored key must not become the name of a member again, '' where it may.

    Keys of other writers need not be what `escape_key` gives; they must do no harm.

    >>> key_fault(b"cat/1"), key_fault(b"../1"), key_fault(b"a\n")
    ('', "it climbs out of the folder with '..'", 'it has control bytes')
    """
    if _PLAIN_PATH.fullmatch(key) and b".." not in key:
        return ""
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        return "it is not UTF-8"
    *folders, base = key.split(b"/")
    if not base:
        return "it is empty, or ends with a slash"
    if b"." in base:
        return "its base name has a dot, where readers cut"
    if _CONTROL.search(key):
        return "it has control bytes"
    if folders and not folders[0]:
        return "it is an absolute path"
    return "it climbs out of the folder with '..'" if b".." in folders else ""


def split_extension(name: bytes) -> tuple[bytes, str]:
    """Stem and lower-case extension of a base name; `('name', '')` where there is none.

    >>> split_extension(b"img.v2.JPEG"), split_extension(b".hidden"), split_extension(b"README")
    ((b'img.v2', 'jpeg'), (b'.hidden', ''), (b'README', ''))
    """
    stem, dot, extension = name.rpartition(b".")
    if not dot or not stem:
        return name, ""
    return stem, extension.decode("utf-8", "surrogateescape").lower()


def field_name(extension: str) -> str:
    """The field that a file of this extension becomes.

    >>> field_name("JPEG"), field_name("seg.PNG")
    ('jpg', 'seg.png')
    """
    head, dot, last = extension.lower().rpartition(".")
    return head + dot + ("jpg" if last in _JPEG_ALIASES else last)


def is_image_field(field: str) -> bool:
    """Whether the field's last extension is one that `packer` takes for a picture."""
    return field.rpartition(".")[2] in IMAGE_EXTENSIONS


def is_picture_array(field: str) -> bool:
    """Whether the field is a CT slice or volume: `ct.npy`, `vol.npy`, or either as `.npy.zst`."""
    return field in ("ct.npy", "vol.npy", "ct.npy.zst", "vol.npy.zst")


def unique_keys(folder: bytes, names: Sequence[bytes]) -> list[bytes]:
    """Keys for the files of one folder, one sample each, unique whatever the names are.

    A file whose stem is not its own keeps its extension in the key. That name may in turn be
    another file's stem (`a.jpg` beside `a.jpg.jpg`), so the rule is applied until nothing changes;
    full names are unique, so it ends.

    >>> unique_keys(b"c", [b"a.jpg", b"a.png", b"b.jpg"])
    [b'c/a%2Ejpg', b'c/a%2Epng', b'c/b']
    """
    prefix = folder + b"/" if folder else b""
    stems = [name.rpartition(b".")[0] or name for name in names]
    if len(set(stems)) < len(stems):
        while True:
            seen: dict[bytes, int] = {}
            for stem in stems:
                seen[stem] = seen.get(stem, 0) + 1
            longer = [name if seen[stem] > 1 else stem for name, stem in zip(names, stems, strict=True)]
            if longer == stems:
                break
            stems = longer
    joined = b"/" + b"/".join(stems)
    if joined.translate(None, _PLAIN_BYTES) or b"/_" in joined or not _PLAIN_PATH.fullmatch(prefix + b"x"):
        return [escape_key(prefix + stem) for stem in stems]
    return [prefix + stem for stem in stems]


_LABEL = re.compile(rb"\s*([0-9]{1,18})\s*")


def label_of(text: bytes | memoryview) -> int:
    r"""The class number that a `cls` file holds, −1 where it holds something else.

    >>> label_of(b"17\n"), label_of(b"cat"), label_of(b"-1")
    (17, -1, -1)
    """
    match = _LABEL.fullmatch(text)
    return int(match[1]) if match else -1


def bad_fields(fields: Iterable[str]) -> list[str]:
    """Those field names that a reader would misunderstand: reserved, empty, or with bytes that break a name."""
    return [
        field
        for field in fields
        if field in RESERVED_FIELDS
        or not field
        or not field.isprintable()
        or "/" in field
        or any(not part for part in field.split("."))
        or (field.startswith("__") and field.endswith("__"))
    ]


def printable(path: bytes | str) -> str:
    r"""A path as one line of safe text: undecodable bytes, controls and direction marks as escapes.

    >>> printable(b"new\nline\xe9.jpg")
    'new\\nline\\xe9.jpg'
    """
    text = path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else path
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable()
        else f"\\x{ord(c) - 0xDC00:02x}"
        if 0xDC80 <= ord(c) <= 0xDCFF
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )
