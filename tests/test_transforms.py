"""Transforms: torchvision's distributions, reproducible crops, masks and boxes that follow, foreign callables."""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageOps

from loaders.decode import affine, decode_image
from loaders.transforms import (
    Crop,
    EvalCrop,
    Identity,
    Resize,
    SampleRng,
    TrainCrop,
    adapt,
    apply_to_boxes,
    apply_to_mask,
    sample_rng,
)
from packer.errors import BadImageError, UsageError

OURS = [TrainCrop(32), TrainCrop(7, scale=(0.5, 0.5), flip=1.0, orient=True), EvalCrop(32), EvalCrop(20, resize=20),
        Resize(20, 30), Identity(), Identity(orient=True)]


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def gradient(width: int = 96, height: int = 64) -> Image.Image:
    across = Image.linear_gradient("L").rotate(90).resize((width, height))
    down = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", (across, down, ImageOps.invert(across)))


@pytest.fixture(scope="module")
def picture() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(gradient(), exif=exif, quality=95)


# --- the generator ----------------------------------------------------------------------------


GOLDEN = [6555911209906109020, 10588121005554781281]  # of the generators of (1, 2, 3) and (−1, 0, 2⁴⁰)


def test_the_generator_s_numbers_never_change() -> None:
    """SplitMix64's published first outputs for the seed 1234567."""
    rng = SampleRng(1234567)
    assert [rng.getrandbits(64) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert SampleRng(1234567).random() == (6457827717110365317 >> 11) / 2**53
    assert [sample_rng(*key).getrandbits(64) for key in ((1, 2, 3), (-1, 0, 2**40))] == GOLDEN


def test_generators_of_neighbouring_samples_epochs_and_seeds_are_unrelated() -> None:
    first = {(seed, epoch, sample): sample_rng(seed, epoch, sample).random()
             for seed in range(10) for epoch in range(10) for sample in range(100)}
    assert len(set(first.values())) == len(first)
    values = np.array(list(first.values())).reshape(10, 10, 100)
    for axis in range(3):
        along = np.moveaxis(values, axis, 0)
        assert abs(np.corrcoef(along[:-1].ravel(), along[1:].ravel())[0, 1]) < 0.05
    assert abs(values.mean() - 0.5) < 0.01


def test_the_generator_is_uniform() -> None:
    rng = sample_rng(0, 0, 0)
    draws = np.array([rng.random() for _ in range(20000)])
    assert kolmogorov_smirnov(draws, np.linspace(0, 1, 200000)) < 0.0115  # 1 in 100 by chance
    assert np.bincount([rng.randrange(7) for _ in range(7000)], minlength=7).min() > 850
    assert {rng.randint(3, 5) for _ in range(100)} == {3, 4, 5}
    assert all(2 <= rng.uniform(2, 4) < 4 for _ in range(100))
    assert max(rng.getrandbits(3) for _ in range(200)) == 7


def kolmogorov_smirnov(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The largest distance between two empirical distribution functions."""
    both = np.sort(np.concatenate([a, b]))
    steps = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (a, b)]
    return float(np.abs(steps[0] - steps[1]).max())


# --- crops ------------------------------------------------------------------------------------


def reference_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """RandomResizedCrop as its paper and torchvision's documentation describe it: (top, left, height, width)."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def check_distribution(height: int, width: int, theirs: list[tuple[int, int, int, int]]) -> None:
    crops = [TrainCrop(224).box(height, width, sample_rng(7, 0, i)) for i in range(len(theirs))]
    mine = np.array([(crop.top, crop.left, crop.height, crop.width) for crop in crops], float)
    other = np.array(theirs, float)
    bound = 1.95 * math.sqrt(2 / len(theirs))  # exceeded once in 1,000 by chance
    measures: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
        "top": lambda c: c[:, 0], "left": lambda c: c[:, 1], "height": lambda c: c[:, 2], "width": lambda c: c[:, 3],
        "area": lambda c: c[:, 2] * c[:, 3], "aspect": lambda c: c[:, 3] / c[:, 2],
    }
    for name, measure in measures.items():
        assert kolmogorov_smirnov(measure(mine), measure(other)) < bound, name
    assert abs(np.mean([crop.flip for crop in crops]) - 0.5) < 0.04


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (100, 1000), (30, 30)])
def test_train_crop_has_the_distribution_of_random_resized_crop(height: int, width: int) -> None:
    rng = np.random.default_rng(0)
    check_distribution(height, width, [reference_crop(height, width, rng) for _ in range(4000)])


@pytest.mark.parametrize(("height", "width"), [(375, 500), (100, 1000)])
@pytest.mark.torchvision
def test_train_crop_has_the_distribution_of_torchvision(height: int, width: int) -> None:
    v1 = pytest.importorskip("torchvision.transforms", reason="needs torchvision")
    torch.manual_seed(0)
    blank = torch.empty(3, height, width)
    theirs = [v1.RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    check_distribution(height, width, theirs)


@pytest.mark.torchvision
def test_eval_crop_gives_the_picture_of_torchvision() -> None:
    v1 = pytest.importorskip("torchvision.transforms", reason="needs torchvision")
    theirs = v1.Compose([v1.Resize(256), v1.CenterCrop(224), v1.PILToTensor()])
    for size in ((500, 375), (333, 500), (300, 300), (260, 1000), (640, 239)):
        data = encode(gradient(*size).effect_spread(3), quality=90)
        with Image.open(io.BytesIO(data)) as image:
            expected = theirs(image.convert("RGB"))
        made = EvalCrop(224)(data, sample_rng(0, 0, 0))
        assert (made.float() - expected.float()).abs().mean() < 0.1


@settings(max_examples=300)
@given(height=st.integers(1, 3000), width=st.integers(1, 3000), number=st.integers(0, 10**9),
       scale=st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)),
       ratio=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)))
def test_crops_lie_in_the_picture(
    height: int, width: int, number: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    train = TrainCrop(8, scale=(min(scale), max(scale)), ratio=(min(ratio), max(ratio)))
    crop = train.box(height, width, sample_rng(0, 0, number))
    assert all(isinstance(value, int) for value in (crop.top, crop.left, crop.height, crop.width))
    assert 0 <= crop.top < crop.top + crop.height <= height
    assert 0 <= crop.left < crop.left + crop.width <= width
    centre = EvalCrop(8, resize=9).box(height, width, sample_rng(0, 0, number))
    assert centre.height > 0 < centre.width
    assert centre.top >= 0 <= centre.left
    assert centre.top + centre.height <= height + 1e-6
    assert centre.left + centre.width <= width + 1e-6


@pytest.mark.parametrize("transform", OURS, ids=repr)
def test_a_transform_is_a_pure_function(transform: Any, picture: bytes) -> None:
    copy = pickle.loads(pickle.dumps(transform))
    assert copy == transform
    assert hash(copy) == hash(transform)
    first = transform(picture, sample_rng(1, 2, 3))
    assert first.dtype == torch.uint8
    assert torch.equal(first, copy(memoryview(picture), sample_rng(1, 2, 3)))
    shape = transform.output_shape or tuple(first.shape)
    assert tuple(first.shape) == shape
    out = torch.empty(shape, dtype=torch.uint8)
    crop = transform.into(picture, out, sample_rng(1, 2, 3))
    assert torch.equal(out, first)
    height, width = decode_image(picture, orient=transform.orient).shape[:2]
    assert crop == transform.box(height, width, sample_rng(1, 2, 3))
    floats = torch.empty(shape)
    identity = affine((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    transform.into(picture, floats, sample_rng(1, 2, 3), normalize=identity)
    assert torch.allclose(floats, first / 127.5 - 1, atol=1e-5)


def test_train_crops_differ_between_samples_and_epochs(picture: bytes) -> None:
    made = [TrainCrop(16)(picture, sample_rng(0, epoch, sample)) for epoch in range(3) for sample in range(3)]
    assert len({tensor.numpy().tobytes() for tensor in made}) == 9


def test_identity_and_resize_are_the_whole_picture(picture: bytes) -> None:
    for orient in (False, True):
        pixels = decode_image(picture, orient=orient)
        whole = Identity(orient=orient)(picture, sample_rng(0, 0, 0))
        assert np.array_equal(whole.permute(1, 2, 0).numpy(), pixels)
        resized = Resize(20, 30, orient=orient)(picture, sample_rng(0, 0, 0)).permute(1, 2, 0).numpy()
        expected = np.asarray(Image.fromarray(pixels).resize((30, 20), Image.Resampling.BILINEAR))
        assert np.abs(resized.astype(int) - expected).mean() < 0.6


def test_flip_mirrors() -> None:
    data = encode(gradient(64, 64), "PNG")
    whole = functools.partial(TrainCrop, 32, scale=(1, 1), ratio=(1, 1))
    plain, mirrored = (whole(flip=flip)(data, sample_rng(0, 0, 0)) for flip in (0, 1))
    assert torch.equal(plain.flip(-1), mirrored)


@pytest.mark.parametrize("make", [
    lambda: TrainCrop(0), lambda: TrainCrop(-3), lambda: TrainCrop(2.5),  # type: ignore[arg-type]
    lambda: TrainCrop(8, scale=(0, 1)), lambda: TrainCrop(8, scale=(0.5, 0.2)), lambda: TrainCrop(8, scale=(0.5, 1.2)),
    lambda: TrainCrop(8, ratio=(0, 1)), lambda: TrainCrop(8, ratio=(2, 1)), lambda: TrainCrop(8, flip=1.5),
    lambda: TrainCrop(8, scale=2), lambda: TrainCrop(8, scale=(0.1, 0.2, 0.3)),  # type: ignore[arg-type]
    lambda: TrainCrop(8, flip="no"), lambda: EvalCrop(8, resize="9"), lambda: TrainCrop(True),  # type: ignore[arg-type]
    lambda: EvalCrop(0), lambda: EvalCrop(224, resize=200), lambda: Resize(0, 5), lambda: Resize(5, 0),
])
def test_options_that_cannot_be_meant_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        make()


def test_a_broken_picture_is_an_error(picture: bytes) -> None:
    with pytest.raises(BadImageError):
        TrainCrop(8)(picture[:500], sample_rng(0, 0, 0))


# --- masks and boxes --------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_a_mask_is_cropped_as_pillow_crops_it(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    mask = np.random.default_rng(height * 41 + width).integers(0, 256, (height, width), np.uint8)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    rows, columns = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    size = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 50))
    flip = data.draw(st.booleans())
    image = Image.fromarray(mask).crop((left, top, left + columns, top + rows))
    image = image.resize(size[::-1], Image.Resampling.NEAREST)
    expected = np.asarray(ImageOps.mirror(image) if flip else image)
    made = apply_to_mask(mask, Crop(top, left, rows, columns, flip), size)
    # Where a centre falls between two pixels, either is right.
    assert (made != expected).mean() < 0.1 or _same_up_to_ties(rows, columns, size)
    assert made.dtype == np.uint8
    assert set(np.unique(made)) <= set(np.unique(mask))


def _same_up_to_ties(rows: int, columns: int, size: tuple[int, int]) -> bool:
    axes = ((rows, size[0]), (columns, size[1]))
    return any(((np.arange(n) + 0.5) * extent / n % 1 == 0).any() for extent, n in axes)


def test_masks_keep_type_and_channels() -> None:
    mask = np.arange(4 * 6 * 2, dtype=np.int32).reshape(4, 6, 2) * 100000
    made = apply_to_mask(mask, Crop(1, 2, 2, 3, flip=True), (2, 3))
    assert made.dtype == np.int32
    assert np.array_equal(made, mask[1:3, 2:5][:, ::-1])
    made[:] = 0
    assert mask[1, 2, 0] != 0


@pytest.mark.parametrize(
    "transform", [TrainCrop(48), TrainCrop(48, orient=True), EvalCrop(48), Resize(48, 48)], ids=repr)
def test_mask_and_boxes_stay_on_the_object(transform: Any) -> None:
    """A red rectangle in a picture, the same in its mask and as a box: after the transform all three agree."""
    checked = 0
    for number in range(60):
        image = Image.new("RGB", (160, 120))
        left, top, right, bottom = 30 + number, 20, 75 + number, 80
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), fill=(255, 0, 0))
        mask = np.asarray(image)[..., 0] // 255
        boxes = np.array([[3, left, top, right, bottom]], np.float32)
        out = torch.empty(transform.output_shape, dtype=torch.uint8)
        crop = transform.into(encode(image, "PNG"), out, sample_rng(0, 0, number))
        moved = apply_to_mask(mask, crop, (48, 48))
        assert ((out[0].numpy() > 127) != moved).mean() < 0.06
        kept, keep = apply_to_boxes(boxes, crop, image_size=(120, 160), size=(48, 48), layout="xyxy", min_visible=0.2)
        share = moved.sum() * crop.height * crop.width / 48**2 / ((right - left) * (bottom - top))
        assert len(kept) == keep.sum()
        if abs(share - 0.2) > 0.1:
            assert bool(keep[0]) == (share > 0.2)
        if len(kept):
            rows, columns = np.nonzero(moved)
            found = [3, columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(kept[0] - found).max() <= 1
            checked += 1
    assert checked > 20


def test_yolo_and_pixel_boxes_agree() -> None:
    rng = np.random.default_rng(0)
    corners = np.sort(rng.uniform(0, 1, (200, 2, 2)), axis=1) * (640, 480)
    xyxy = np.concatenate([np.arange(200)[:, None], corners.reshape(200, 4)], 1)
    low, high = corners[:, 0], corners[:, 1]
    yolo = np.concatenate([xyxy[:, :1], (low + high) / 2 / (640, 480), (high - low) / (640, 480)], 1)
    crop = Crop(100, 50, 300, 400, flip=True)
    made, keep = apply_to_boxes(xyxy, crop, image_size=(480, 640), size=(224, 200), layout="xyxy")
    other, keep_other = apply_to_boxes(yolo, crop, image_size=(480, 640), size=(224, 200))
    assert np.array_equal(keep, keep_other)
    assert 50 < keep.sum() < 200
    assert np.allclose((other[:, 1:3] - other[:, 3:5] / 2) * (200, 224), made[:, 1:3], atol=1e-3)
    assert np.allclose((other[:, 1:3] + other[:, 3:5] / 2) * (200, 224), made[:, 3:5], atol=1e-3)
    assert (made[:, 1:3] >= 0).all()
    assert (made[:, 3:5] <= (200, 224)).all()


def test_the_whole_picture_leaves_yolo_boxes_as_they_are() -> None:
    boxes = np.array([[1, 0.5, 0.5, 0.2, 0.4], [0, 0.25, 0.75, 0.5, 0.5]], np.float32)
    made, _ = apply_to_boxes(boxes, Crop(0, 0, 480, 640), image_size=(480, 640), size=(100, 100))
    assert np.allclose(made, boxes)
    flipped, _ = apply_to_boxes(boxes, Crop(0, 0, 480, 640, flip=True), image_size=(480, 640), size=(100, 100))
    assert np.allclose(flipped[:, 1], 1 - boxes[:, 1])
    assert np.allclose(flipped[:, 2:], boxes[:, 2:])


def test_which_boxes_are_dropped() -> None:
    boxes = np.array([
        [0, 0, 0, 100, 100, 7],  # all of it
        [1, 90, 0, 190, 100, 8],  # a tenth of it
        [2, 91, 0, 191, 100, 9],  # a little less
        [3, 200, 200, 300, 300, 0],  # none
        [4, 50, 50, 50, 60, 0],  # no area
        [5, 10, 10, 11, 90, 0],  # half a pixel wide in the output
        [6, np.nan, 0, 9, 9, 0],
    ])
    made, keep = apply_to_boxes(boxes, Crop(0, 0, 100, 100), image_size=(400, 400), size=(50, 50), layout="xyxy")
    assert made.tolist() == [[0, 0, 0, 50, 50, 7], [1, 45, 0, 50, 50, 8]]
    assert keep.tolist() == [True, True, False, False, False, False, False]
    assert made.dtype == np.float32


def test_no_boxes_are_no_error_and_too_few_columns_are() -> None:
    for none in (np.empty((0, 5)), np.empty(0), []):
        made, keep = apply_to_boxes(none, Crop(0, 0, 9, 9), image_size=(9, 9), size=(9, 9))  # type: ignore[arg-type]
        assert made.shape == (0, 5)
        assert keep.shape == (0,)
    with pytest.raises(UsageError, match="5 columns"):
        apply_to_boxes(np.zeros((2, 4)), Crop(0, 0, 9, 9), image_size=(9, 9), size=(9, 9))
    with pytest.raises(UsageError, match="'coco'"):
        apply_to_boxes(np.zeros((2, 5)), Crop(0, 0, 9, 9), image_size=(9, 9), size=(9, 9), layout="coco")  # type: ignore[arg-type]


# --- foreign callables ------------------------------------------------------------------------


def wants_pil(image: Image.Image) -> Any:
    return image.mode, image.size


def wants_tensor(image: torch.Tensor) -> Any:
    return image.dtype, tuple(image.shape)


def wants_array(image: np.ndarray[Any, Any]) -> Any:
    return image.dtype.name, image.shape


def wants_bytes(data: bytes) -> Any:
    return len(data)


def wants_anything(image):  # type: ignore[no-untyped-def]
    return type(image)


def wants_keyword(*, image: Any) -> dict[str, Any]:
    return {"image": image[:4, :6] // 2}


def test_a_callable_is_given_what_its_annotation_says(picture: bytes) -> None:
    assert adapt(wants_pil)(picture) == ("RGB", (96, 64))
    assert adapt(wants_tensor)(picture) == (torch.uint8, (3, 64, 96))
    assert adapt(wants_array)(picture) == ("uint8", (64, 96, 3))
    assert adapt(wants_bytes)(memoryview(picture)) == len(picture)
    assert adapt(wants_anything)(picture) is Image.Image
    assert adapt(lambda x: x.size)(picture) == (96, 64)
    assert adapt(torch.nn.Identity())(picture).shape == (3, 64, 96)
    made = adapt(wants_keyword)(picture)
    assert np.array_equal(made.permute(1, 2, 0).numpy(), decode_image(picture)[:4, :6] // 2)


def test_what_it_is_given_can_be_said(picture: bytes) -> None:
    assert adapt(wants_anything, wants="tensor")(picture) is torch.Tensor
    assert adapt(wants_anything, wants="array")(picture) is np.ndarray
    assert adapt(wants_pil, orient=True)(picture) == ("RGB", (64, 96))
    with pytest.raises(UsageError, match="'numpy'"):
        adapt(wants_pil, wants="numpy")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="callable"):
        adapt(3)  # type: ignore[arg-type]


def test_pictures_that_come_back_are_tensors(picture: bytes) -> None:
    pixels = decode_image(picture)
    for transform in (lambda image: image, lambda image: np.asarray(image)):
        made = adapt(transform)(picture)
        assert np.array_equal(made.permute(1, 2, 0).numpy(), pixels)
    assert adapt(lambda image: image.convert("L"))(picture).shape == (1, 64, 96)


def test_an_adapted_callable_can_be_pickled(picture: bytes) -> None:
    for transform in (wants_pil, functools.partial(wants_array), ImageOps.mirror):
        assert str(pickle.loads(pickle.dumps(adapt(transform)))(picture)) == str(adapt(transform)(picture))


def test_albumentations_are_known_by_their_module(picture: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("albumentations.core.composition")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Compose:
        def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
            return {**data, "image": data["image"][:5]}

    Compose.__module__ = module.__name__
    assert adapt(Compose())(picture).shape == (3, 5, 96)


@pytest.mark.torchvision
def test_torchvision_v1_gets_pil_and_v2_a_tensor(picture: bytes) -> None:
    v1 = pytest.importorskip("torchvision.transforms", reason="needs torchvision")
    from torchvision.transforms import v2

    seen: list[type] = []
    spy = functools.partial(_spy, seen)
    normalized = v1.Normalize((0.5,) * 3, (0.5,) * 3)
    with Image.open(io.BytesIO(picture)) as image:
        expected = v1.Compose([v1.Resize(20), v1.ToTensor(), normalized])(image.convert("RGB"))
    assert torch.equal(adapt(v1.Compose([spy, v1.Resize(20), v1.ToTensor(), normalized]))(picture), expected)
    made = adapt(v2.Compose([v2.Lambda(spy), v2.Resize(20), v2.ToDtype(torch.float32, scale=True), normalized]))
    assert made(picture).shape == (3, 20, 30)
    mixed = adapt(v2.Compose([v2.Lambda(spy), v2.PILToTensor()]))
    assert mixed(picture).dtype == torch.uint8
    tensors = adapt(v2.Compose([v2.Lambda(spy), v2.ToImage(), v2.RandomHorizontalFlip(0.0)]))
    assert np.array_equal(tensors(picture).permute(1, 2, 0).numpy(), decode_image(picture))
    assert seen == [Image.Image, torch.Tensor, Image.Image, torch.Tensor]
    on_tensors = adapt(v1.Compose([v1.Lambda(spy), v1.Resize(20), v1.ConvertImageDtype(torch.float32), normalized]))
    assert on_tensors(picture).shape == (3, 20, 30)
    assert isinstance(adapt(v1.RandomHorizontalFlip(0.0))(picture), torch.Tensor)


def _spy(seen: list[type], value: Any) -> Any:
    seen.append(type(value))
    return value
