"""The `.npy` reader that trusts nothing, against numpy's own."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from packer import npy
from packer.errors import BadArrayError, MissingExtraError

NUMBERS = st.sampled_from(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, np.dtype[Any]]:
    kind = draw(NUMBERS)
    dtype = np.dtype(draw(st.sampled_from("<>")) + kind)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
    array = np.ascontiguousarray(raw).view(dtype)[..., 0].reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) else array


def saved(array: np.ndarray[Any, np.dtype[Any]], version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version, allow_pickle=False)
    return stream.getvalue()


@given(arrays(), st.sampled_from([(1, 0), (2, 0), None]))
def test_reads_what_numpy_writes(array: np.ndarray[Any, np.dtype[Any]], version: tuple[int, int] | None) -> None:
    data = saved(array, version)
    read = npy.decode(data)
    expected = np.load(io.BytesIO(data))
    assert read.shape == expected.shape
    assert read.dtype == expected.dtype.newbyteorder("=")
    assert read.dtype.isnative
    assert read.flags.c_contiguous
    assert read.tobytes() == np.ascontiguousarray(expected.astype(read.dtype)).tobytes()


@given(arrays())
def test_what_it_writes_numpy_reads(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    read = np.load(io.BytesIO(npy.encode(array)))
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == np.ascontiguousarray(array).tobytes()


@given(st.data())
def test_damage_is_an_error_or_another_array_of_the_same_size(data: st.DataObject) -> None:
    good = saved(np.arange(60, dtype=np.int16).reshape(3, 4, 5))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    for place in range(at, min(len(good), at + data.draw(st.integers(1, 4)))):
        bad[place] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.integers(0, len(bad)))] if data.draw(st.booleans()) else bad
    try:
        array = npy.decode(bytes(bad))
    except BadArrayError:
        return
    assert array.nbytes <= len(bad)
    assert np.array_equal(array, npy.native(np.load(io.BytesIO(bad))), equal_nan=array.dtype.kind in "fc")


@given(st.binary(max_size=300))
def test_noise_is_an_error(noise: bytes) -> None:
    for data in (noise, b"\x93NUMPY" + noise, b"\x93NUMPY\1\0" + noise, b"\x28\xb5\x2f\xfd" + noise):
        with pytest.raises((BadArrayError, MissingExtraError)):
            npy.decode(data)


def header(text: str, payload: bytes = b"") -> bytes:
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode("latin-1") + payload


def test_keys_may_come_in_any_order() -> None:
    data = header("{'shape': (2,), 'descr': '<i2','fortran_order': False}\n", b"\1\0\2\0")
    assert npy.decode(data).tolist() == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<i2')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<U4', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i3', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (1), }",
        "{'descr': '<i2', 'fortran_order': 0, 'shape': (1,), }",
        "{'descr': '<i2', 'descr': '<i2', 'shape': (1,), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (1,), 'more': 1}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (999999999, 999999999), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (999999999999999999, 0), }",
        "__import__('os').system('true')",
    ],
)
def test_refuses_all_but_plain_numbers(text: str) -> None:
    with pytest.raises(BadArrayError):
        npy.decode(header(text, b"\0\0"))


def test_never_unpickles() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{}], object), allow_pickle=True)
    with pytest.raises(BadArrayError, match="objects"):
        npy.decode(stream.getvalue())
    with pytest.raises(BadArrayError):
        npy.decode(pickle.dumps(1))


@pytest.mark.parametrize("change", [-1, 1])
def test_the_payload_is_as_long_as_the_shape_says(change: int) -> None:
    data = saved(np.zeros((3, 4), np.int16))
    data = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(BadArrayError, match=r"shape \(3, 4\) of int16 needs 24"):
        npy.decode(data)


def test_a_header_longer_than_any_that_numpy_writes_is_refused() -> None:
    with pytest.raises(BadArrayError, match="limit"):
        npy.decode(header("{" + " " * 60_000 + "}"))


def test_zstd_round_trip() -> None:
    pytest.importorskip("zstandard", reason="the extra [codecs]")
    array = np.arange(1000, dtype=">i2").reshape(10, 100)
    data = npy.encode(array, zstd_level=3)
    assert npy.is_zstd(data)
    assert np.array_equal(npy.decode(data), array)
    assert npy.decode(data).dtype == np.int16


def test_damaged_zstd_is_an_error() -> None:
    zstandard = pytest.importorskip("zstandard", reason="the extra [codecs]")
    data = npy.encode(np.arange(1000, dtype=np.int16), zstd_level=3)
    for bad in (data[:-5], data[:30] + b"\xff" * 8 + data[38:], data + b"\0", data[:4]):
        with pytest.raises(BadArrayError):
            npy.decode(bad)
    endless = zstandard.ZstdCompressor(write_content_size=False).compress(npy.encode(np.zeros(9, np.int16)))
    with pytest.raises(BadArrayError, match="does not say"):
        npy.decode(endless)


def test_a_zstd_bomb_is_refused_before_it_is_unpacked() -> None:
    zstandard = pytest.importorskip("zstandard", reason="the extra [codecs]")
    claims = b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") + b"\1\0\0"
    assert zstandard.frame_content_size(claims) == 1 << 60
    with pytest.raises(BadArrayError, match="at most"):
        npy.decode(claims)


def test_a_missing_zstandard_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"packer-loaders\[codecs\]"):
        npy.decode(b"\x28\xb5\x2f\xfd" + bytes(20))


@pytest.mark.parametrize("field", ["npy", "ct.npy", "ct.npy.zst", "npy.zst"])
def test_array_fields(field: str) -> None:
    assert npy.is_array_field(field)


@pytest.mark.parametrize("field", ["npz", "zst", "xnpy", "npy.gz", "npy.json"])
def test_other_fields(field: str) -> None:
    assert not npy.is_array_field(field)
