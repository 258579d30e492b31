"""Hypothesis strategies that many test modules share: file names and trees that a file system can hold."""

from __future__ import annotations

from hypothesis import strategies as st

# Pieces that names are made of: what readers split at, what escapes look like, what is no text, what looks alike.
_PIECES = st.sampled_from(
    [
        *(b"a", b"A", b"b", b"1", b"-", b"_", b"__", b".", b"..", b" ", b"%", b"%2E", b"%41", b"\\", b"{0..3}", b"~"),
        *(b".jpg", b".JPG", b".jpeg", b".png", b".cls", b".json", b".txt", b".seg.png"),
        *(b"\t", b"\n", b"\r", b"\x01", b"\x7f", b"\xff", b"\xe9", b"\xed\xa0\x80"),
        *("é".encode(), "e\N{COMBINING ACUTE ACCENT}".encode(), "写真".encode(), "\N{RIGHT-TO-LEFT OVERRIDE}".encode()),
    ]
)
_ANY_BYTE = st.integers(1, 255).filter(lambda byte: byte != 0x2F).map(lambda byte: bytes([byte]))


def _possible(name: bytes) -> bool:
    return 0 < len(name) <= 255 and name not in (b".", b"..")


#: Base names of 1 to 255 bytes.
file_names = st.lists(st.one_of(_PIECES, _PIECES, _ANY_BYTE), min_size=1, max_size=8).map(b"".join).filter(_possible)

#: Base names whose last dot is followed by a picture's extension, and that are not hidden.
picture_names = (
    st.tuples(file_names, st.sampled_from([b".jpg", b".JPEG", b".png", b".Jpg", b".tif"]))
    .map(b"".join)
    .filter(lambda name: len(name) <= 255 and not name.startswith(b"."))
)

#: Relative folders of up to three components; b"" is the root.
folders = st.lists(file_names, max_size=3).map(b"/".join)


def trees(names: st.SearchStrategy[bytes] = file_names, max_size: int = 8) -> st.SearchStrategy[list[bytes]]:
    """Sets of relative paths of files that can lie in one tree together, sorted."""
    paths = st.tuples(folders, names).map(lambda pair: b"/".join(filter(None, pair)))
    return st.sets(paths, min_size=1, max_size=max_size).map(_without_clashes)


def _without_clashes(paths: set[bytes]) -> list[bytes]:
    above = {path[:at] for path in paths for at in range(len(path)) if path[at : at + 1] == b"/"}
    return sorted(paths - above)
