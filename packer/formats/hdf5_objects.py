"""The HDF5 structures that a shard ends with, as bytes: object headers, attributes, links, and the superblock.

After the HDF5 File Format Specification, version 3: superblock 2, object headers 2, contiguous and chunked layouts
of version 3 (B-tree of version 1), as HDF5 1.8 and everything later reads them. Written by hand, a shard can be
appended to as payloads come and described in the end, its bytes depend on no library's version, and its payloads
lie where the index says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from packer.formats.hdf5_hash import lookup3

SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUPERBLOCK_BYTES = 48
MAX_ATTRIBUTE_BYTES = 60_000  # a message holds 64 KiB less its own head
UNDEFINED = 2**64 - 1

_CHUNKS_OF_NODE = 64  # twice the rank of chunk B-trees that a file has unless it says otherwise

# Types of header messages.
_DATASPACE, _LINK_INFO, _DATATYPE, _FILL, _LINK, _LAYOUT, _GROUP_INFO, _ATTRIBUTE = 1, 2, 3, 5, 6, 8, 10, 12

Attribute = str | int | Sequence[str]


def superblock(root: int, end: int) -> bytes:
    """What the file begins with, given the root group's address and the file's size."""
    head = SIGNATURE + struct.pack("<BBBBQQQQ", 2, 8, 8, 0, 0, UNDEFINED, end, root)
    return head + struct.pack("<I", lookup3(head))


def group(links: Mapping[str, int], attributes: Mapping[str, Attribute] | None = None) -> bytes:
    """The header of a group: names and addresses of what is in it."""
    messages = [
        _message(_LINK_INFO, struct.pack("<BBQQ", 0, 0, UNDEFINED, UNDEFINED)),
        _message(_GROUP_INFO, b"\0\0"),
        *(_attribute(name, value) for name, value in (attributes or {}).items()),
        *(_link(name, address) for name, address in links.items()),
    ]
    return _header(messages)


def contiguous(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], address: int, attributes: Mapping[str, Attribute] | None = None
) -> bytes:
    """The header of a dataset whose bytes lie in one piece at this address."""
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    layout = struct.pack("<BBQQ", 3, 1, address if size else UNDEFINED, size)
    return _dataset(dtype, shape, layout, 0x09, attributes)


def chunked(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], tree: int, attributes: Mapping[str, Attribute] | None = None
) -> bytes:
    """The header of a dataset of chunks of one sample each, found by the B-tree at this address."""
    dims = struct.pack(f"<{len(shape) + 1}I", 1, *shape[1:], dtype.itemsize)
    layout = struct.pack("<BBBQ", 3, 2, len(shape) + 1, tree) + dims
    return _dataset(dtype, shape, layout, 0x0B, attributes)


def chunk_tree(addresses: npt.NDArray[np.int64], chunk_bytes: int, rank: int, at: int) -> tuple[bytes, int]:
    """A B-tree over chunks of one sample each.

    Args:
        addresses: int64 (n,), n > 0: where each chunk lies.
        chunk_bytes: size of each.
        rank: number of the dataset's dimensions.
        at: where the tree will lie in the file.

    Returns:
        Its nodes, one after the other, and the address of the topmost.
    """
    key = np.dtype([("size", "<u4"), ("mask", "<u4"), ("offset", "<u8", rank + 1)])
    entry = np.dtype([("key", key), ("child", "<u8")])
    node = np.dtype(
        [("sign", "S4"), ("type", "u1"), ("level", "u1"), ("used", "<u2"), ("left", "<u8"), ("right", "<u8"),
         ("entries", entry, _CHUNKS_OF_NODE), ("last", key)]
    )  # fmt: skip
    firsts, children = np.arange(len(addresses) + 1), addresses
    parts: list[bytes] = []
    level = 0
    while True:
        count = -(-len(children) // _CHUNKS_OF_NODE)
        nodes = np.zeros(count, node)
        nodes["sign"], nodes["type"], nodes["level"] = b"TREE", 1, level
        here = at + node.itemsize * np.arange(count, dtype=np.uint64)
        nodes["left"], nodes["right"] = np.append(UNDEFINED, here[:-1]), np.append(here[1:], UNDEFINED)
        ends = np.minimum(_CHUNKS_OF_NODE * np.arange(1, count + 1), len(children))
        nodes["used"] = np.diff(ends, prepend=0)
        flat = nodes["entries"].reshape(-1)
        flat["key"]["offset"][: len(children), 0], flat["key"]["size"][: len(children)] = firsts[:-1], chunk_bytes
        flat["child"][: len(children)] = children
        nodes["entries"] = flat.reshape(count, _CHUNKS_OF_NODE)
        nodes["last"]["offset"][:, 0] = firsts[ends]
        if count and nodes["used"][-1] < _CHUNKS_OF_NODE:  # the key after the last child stands right behind it
            nodes["entries"][-1]["key"]["offset"][nodes["used"][-1], 0] = firsts[-1]
        parts.append(nodes.tobytes())
        at += len(parts[-1])
        if count == 1:
            return b"".join(parts), int(here[0])
        firsts = np.append(firsts[: len(children) : _CHUNKS_OF_NODE], firsts[-1])
        children = here.astype(np.int64)
        level += 1


def tree_bytes(chunks: int, rank: int) -> int:
    """How many bytes `chunk_tree` takes up at most."""
    node = 24 + _CHUNKS_OF_NODE * (8 + 8 + 8 * (rank + 1)) + 8 + 8 * (rank + 1)
    total = 0
    while True:
        chunks = -(-chunks // _CHUNKS_OF_NODE)
        total += node * chunks
        if chunks <= 1:
            return total


def has_type(dtype: np.dtype[np.generic]) -> bool:
    """Whether `datatype` knows it."""
    return dtype.kind in "iu" or (dtype.kind == "f" and dtype.itemsize in _FLOATS)


# (sign's bit, exponent's bit, its size, mantissa's size, bias), by bytes: IEEE 754
_FLOATS = {2: (15, 10, 5, 10, 15), 4: (31, 23, 8, 23, 127), 8: (63, 52, 11, 52, 1023)}


def _datatype(dtype: np.dtype[np.generic]) -> bytes:
    big = dtype.byteorder == ">"
    if dtype.kind == "S":  # padded with zeros, UTF-8
        return struct.pack("<BBBBI", 0x13, 0x11, 0, 0, dtype.itemsize)
    if dtype.kind == "f":
        sign, exponent, exponent_bits, mantissa_bits, bias = _FLOATS[dtype.itemsize]
        head = struct.pack("<BBBBI", 0x11, 0x20 | big, sign, 0, dtype.itemsize)
        return head + struct.pack("<HHBBBBI", 0, 8 * dtype.itemsize, exponent, exponent_bits, 0, mantissa_bits, bias)
    signed = 0x08 if dtype.kind == "i" else 0
    return struct.pack("<BBBBIHH", 0x10, signed | big, 0, 0, dtype.itemsize, 0, 8 * dtype.itemsize)


def _dataspace(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<BBBB{len(shape)}Q", 2, len(shape), 0, 1 if shape else 0, *shape)


def _dataset(
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    layout: bytes,
    fill: int,
    attributes: Mapping[str, Attribute] | None,
) -> bytes:
    messages = [
        _message(_DATASPACE, _dataspace(shape)),
        _message(_DATATYPE, _datatype(dtype), constant=True),
        _message(_FILL, bytes([3, fill])),  # when space is allotted, and that nothing is filled in
        _message(_LAYOUT, layout),
        *(_attribute(name, value) for name, value in (attributes or {}).items()),
    ]
    return _header(messages)


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, int):
        array: npt.NDArray[np.generic] = np.array(value, "<i8")
    else:
        texts = [value] if isinstance(value, str) else list(value)
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        array = np.array(encoded, f"S{max(1, *map(len, encoded))}" if encoded else "S1")
        array = array.reshape(()) if isinstance(value, str) else array
    encoded_name, datatype, dataspace = name.encode() + b"\0", _datatype(array.dtype), _dataspace(array.shape)
    head = struct.pack("<BBHHHB", 3, 0, len(encoded_name), len(datatype), len(dataspace), 1)
    return _message(_ATTRIBUTE, head + encoded_name + datatype + dataspace + array.tobytes())


def _link(name: str, address: int) -> bytes:
    encoded = name.encode("utf-8", "surrogateescape")
    return _message(_LINK, struct.pack("<BBBH", 1, 0x11, 1, len(encoded)) + encoded + struct.pack("<Q", address))


def _message(kind: int, body: bytes, *, constant: bool = False) -> bytes:
    return struct.pack("<BHB", kind, len(body), constant) + body


def _header(messages: Iterable[bytes]) -> bytes:
    body = b"".join(messages)
    head = b"OHDR" + struct.pack("<BBI", 2, 0x02, len(body)) + body
    return head + struct.pack("<I", lookup3(head))
