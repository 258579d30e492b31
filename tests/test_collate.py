"""pad_collate: anything of any size into one batch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from loaders import Padded, pad_collate
from packer.errors import CollateError

DTYPES = [
    torch.uint8, torch.int16, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex128,
]


def by_hand(tensors: list[torch.Tensor], value: float) -> torch.Tensor:
    """The obvious way: pad each to the largest, then stack."""
    largest = [max(lengths) for lengths in zip(*(t.shape for t in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        out = torch.full(largest, value, dtype=tensor.dtype)
        out[tuple(slice(0, n) for n in tensor.shape)] = tensor
        padded.append(out)
    return torch.stack(padded)


@st.composite
def ragged(draw: st.DrawFn) -> list[torch.Tensor]:
    rank = draw(st.integers(0, 4))
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.tuples(*[st.integers(0, 5)] * rank), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 99)))
    return [(torch.rand(shape) * 200).to(dtype) for shape in shapes]


@settings(deadline=None)
@given(ragged(), st.sampled_from([0, 1]))
def test_any_rank_and_dtype(tensors: list[torch.Tensor], value: int) -> None:
    batch = pad_collate(tensors, pad_value=value)
    want = by_hand(tensors, value)
    if len({t.shape for t in tensors}) == 1:
        assert isinstance(batch, torch.Tensor) and torch.equal(batch, want)
        return
    assert isinstance(batch, Padded)
    assert batch.data.dtype == tensors[0].dtype and torch.equal(batch.data, want)
    assert batch.sizes.tolist() == [list(t.shape) for t in tensors]
    assert batch.mask.shape == batch.data.shape and batch.mask.dtype == torch.bool
    for tensor, data, mask in zip(tensors, batch.data, batch.mask, strict=True):
        assert torch.equal(data[mask], tensor.flatten()), "what the mask shows is the sample"
        assert (data[~mask] == value).all()


@settings(deadline=None)
@given(ragged(), st.integers(1, 8))
def test_multiples(tensors: list[torch.Tensor], multiple: int) -> None:
    batch = pad_collate(tensors, multiple_of=multiple)
    data, rank = batch.data if isinstance(batch, Padded) else batch, tensors[0].ndim
    for axis in range(rank):
        lengths = {t.shape[axis] for t in tensors}
        got, longest = data.shape[1 + axis], max(lengths)
        if len(lengths) > 1 or (rank >= 3 and axis >= rank - 2):
            assert got % multiple == 0 and longest <= got < longest + multiple
        else:
            assert got == longest
    for tensor, out in zip(tensors, data, strict=True):
        assert torch.equal(out[tuple(slice(0, n) for n in tensor.shape)], tensor)


def test_images_of_equal_size_are_rounded_up_too() -> None:
    batch = pad_collate([torch.ones(3, 33, 64)] * 2, multiple_of=32)
    assert batch.data.shape == (2, 3, 64, 64)
    assert batch.mask[:, 0].sum((1, 2)).tolist() == [33 * 64] * 2
    assert isinstance(pad_collate([torch.ones(3, 32, 64)] * 2, multiple_of=32), torch.Tensor)


def test_what_torch_collates_comes_out_the_same() -> None:
    samples = [
        {"image": torch.full((3, 4, 4), i), "label": i, "score": i / 3, "key": f"k{i}", "pair": (i, np.float32(i)),
         "flag": i > 1, "list": [torch.tensor(i), torch.tensor([i])]}
        for i in range(3)
    ]
    ours, theirs = pad_collate(samples), default_collate(samples)
    assert ours.keys() == theirs.keys()
    for name in ("image", "label", "score", "flag"):
        assert torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype
    assert ours["key"] == theirs["key"]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours["pair"], theirs["pair"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours["list"], theirs["list"], strict=True))


def test_a_detection_batch() -> None:
    """Images of several sizes, boxes with class ids, masks, names: nested in dicts and tuples."""
    sizes, counts = [(5, 7), (6, 4)], [2, 0]
    samples = [
        (torch.ones(3, *size, dtype=torch.uint8),
         {"boxes": np.full((n, 5), n, np.float32), "mask": np.ones(size, np.int16), "tokens": list(range(n)),
          "name": str(n)})
        for size, n in zip(sizes, counts, strict=True)
    ]
    images, target = pad_collate(samples, pad_value=0)
    assert images.data.shape == (2, 3, 6, 7) and images.data.dtype == torch.uint8
    assert target["boxes"].data.shape == (2, 2, 5)
    assert target["boxes"].mask[..., 0].tolist() == [[True] * 2, [False] * 2]
    assert target["mask"].data.dtype == torch.int16 and target["mask"].sizes.tolist() == [[5, 7], [6, 4]]
    assert target["tokens"].data.tolist() == [[0, 1], [0, 0]] and target["tokens"].sizes.tolist() == [[2], [0]]
    assert target["name"] == ["2", "0"]


def test_named_tuples_stay() -> None:
    pair = namedtuple("pair", "image label")
    batch = pad_collate([pair(torch.ones(2), 1), pair(torch.ones(2), 2)])
    assert type(batch) is pair and batch.label.tolist() == [1, 2]


def test_arrays_of_every_layout() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    frozen = np.arange(12, dtype=np.int32).reshape(3, 4)
    frozen.flags.writeable = False
    batch = pad_collate([array[:, ::-1], frozen, np.asfortranarray(frozen)])
    assert batch.dtype == torch.int32
    assert batch[0].tolist() == array[:, ::-1].tolist() and batch[1].tolist() == batch[2].tolist() == frozen.tolist()


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([], "empty batch"),
        ([{"x": torch.ones(2)}, {"x": torch.ones(2, 2)}], r"sample\['x'\] has shape \(2, 2\) in .*equal ranks"),
        ([(torch.ones(2),), (torch.ones(2).half(),)], r"sample\[0\] is torch.float16 in sample 1 .*one dtype"),
        ([np.ones(3, np.uint8), np.ones(4, np.uint16)], "torch.uint16 in sample 1"),
        ([{"a": 1}, {"b": 1}], r"sample 1 of the batch has \['b'\], sample 0 has \['a'\]"),
        ([(1, 2), (1, 2, 3)], "3 items, sample 0 has 2"),
        ([1, 1.5], "a int in one sample of the batch and a float"),
        ([torch.ones(2), None], "a NoneType in one sample"),
        ([np.array(["a"]), np.array(["b"])], "cannot become a tensor"),
    ],
)
def test_what_does_not_fit_together_says_where(samples: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        pad_collate(samples)


@pytest.mark.parametrize(("dtype", "value", "fits"), [
    (torch.uint8, -1, False), (torch.uint8, 256, False), (torch.uint8, 0.5, False),
    (torch.uint8, float("nan"), False), (torch.uint8, 255, True), (torch.int64, -100, True),
    (torch.bool, 2, False), (torch.float16, float("nan"), True),
])
def test_the_padding_must_be_a_value_of_the_dtype(dtype: torch.dtype, value: float, fits: bool) -> None:
    samples = [torch.ones(2).to(dtype), torch.ones(3).to(dtype)]
    if fits:
        last = pad_collate(samples, pad_value=value).data[0, 2]
        assert last.isnan() if value != value else last == value
    else:
        with pytest.raises(CollateError, match="is not a value of"):
            pad_collate(samples, pad_value=value)


def test_padded_moves_as_one() -> None:
    batch = pad_collate([torch.ones(2), torch.ones(3)]).to("meta")
    assert isinstance(batch, Padded) and {part.device.type for part in batch} == {"meta"}


def test_nothing_is_shared_with_the_samples() -> None:
    sample = torch.zeros(3)
    batch = pad_collate([sample])
    batch += 1
    assert sample.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ([2**70, 1], "sample holds a number too large for torch.int64"),
        ([{"ids": [2**70]}, {"ids": [1, 2]}], r"sample\['ids'\] holds a number too large"),
        ([torch.eye(3).to_sparse()] * 2, "sample is a torch.sparse_coo tensor"),
    ],
)
def test_what_has_no_dense_tensor_is_refused_in_words(batch: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        pad_collate(batch)


@pytest.mark.parametrize("multiple_of", [0, 1.5, "8"])
def test_multiples_that_cannot_be_meant(multiple_of: Any) -> None:
    with pytest.raises(CollateError, match="multiple_of must be an integer"):
        pad_collate([torch.zeros(2), torch.zeros(3)], multiple_of=multiple_of)
