"""Other tools on our shards: the same keys, fields and bytes from every reader.

Readers that cannot be installed beside ours run in a process of their own, where they are:

- `PACKER_OLD_WEBDATASET`: folder made by `pip install --no-deps --target FOLDER webdataset==0.2.86`
  (it holds wids as well);
- `PACKER_HF_PYTHON`: a Python with Hugging Face `datasets` and Pillow;
- `PACKER_TORCHVISION_PYTHON`: a Python with torchvision.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE_S
from PIL import Image

from packer.pack import PackOptions, pack
from packer.packed import Packed
from packer.plan import PlanOptions
from packer.sources.folder import FolderSource

Samples = dict[str, dict[str, bytes]]

# Class names in the order of their labels; file names that have broken one reader or another.
CLASSES = ("a class", "n01440764", "vögel")
LONG = "n" * 120 + ".JPEG"
NAMES = ("x.JPEG", "y.jpeg", "1.2.840.1.jpg", "1.2.840.2.jpg", "50% off.jpg", "-dash.jpg", "ä.jpg", "__a__.jpg")


@dataclass
class Case:
    """A packed dataset, and what must be in it by the files that it was made of."""

    folder: Path
    source: Path
    expected: Mapping[str, Samples]  # by split, then key

    def shards(self, split: str) -> list[Path]:
        return [self.folder / shard.name for shard in Packed(self.folder)[split].shards]


def packed_dataset(root: Path, names: tuple[str, ...]) -> Case:
    source = root / "source"
    number = 0
    for split in ("train", "val"):
        for class_name in CLASSES:
            folder = source / split / class_name
            folder.mkdir(parents=True)
            for name in names:
                pixels = np.random.default_rng(number).integers(0, 255, (4, 3, 3), np.uint8)
                Image.fromarray(pixels).resize((40 + number % 7, 30)).save(folder / name, "JPEG", quality=90)
                number += 1
    options = PackOptions(plan=PlanOptions(shard_samples=7), workers=1)
    pack(FolderSource(str(source)), root / "out", options)
    expected: dict[str, Samples] = {}
    for split, part in Packed(root / "out").items():
        paths = [os.fsdecode(path) for path in part.names.paths[part.fields.index("jpg")]]
        files = {part.key(i): source / path for i, path in enumerate(paths)}
        assert sorted(files.values()) == sorted((source / split).rglob("*.*")), "each file is in the dataset, once"
        expected[split] = {
            key: {"jpg": path.read_bytes(), "cls": b"%d" % CLASSES.index(path.parent.name)}
            for key, path in files.items()
        }
    return Case(root / "out", source, expected)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return packed_dataset(tmp_path_factory.mktemp("interop"), (*NAMES, LONG))


@pytest.fixture(scope="module")
def short_names(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """For readers that know no member names over 100 bytes, in any tar dialect."""
    return packed_dataset(tmp_path_factory.mktemp("interop-short"), NAMES)


SPLITS = pytest.mark.parametrize("split", ["train", "val"])


def grouped(files: Mapping[str, bytes]) -> Samples:
    samples: Samples = {}
    for name, data in files.items():
        folder, _, base = name.rpartition("/")
        stem, _, field = base.partition(".")
        samples.setdefault(f"{folder}/{stem}", {})[field] = data
    return samples


def digests(samples: Samples) -> dict[str, dict[str, str]]:
    return {
        key: {field: hashlib.sha256(data).hexdigest() for field, data in fields.items()}
        for key, fields in samples.items()
    }


def run(python: str, script: str, *arguments: str | Path, **environment: str | Path) -> Any:
    """Run a script elsewhere; its last line is JSON."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    extra = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [python, "-c", script, *arguments],
        env=clean | extra,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def elsewhere(variable: str, what: str) -> str:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no {what}")
    return path


# --- tar ------------------------------------------------------------------------------------------


@SPLITS
def test_gnu_tar_extracts_them(case, split, tmp_path):
    for shard in case.shards(split):
        done = subprocess.run(["tar", "-xf", shard, "-C", tmp_path], check=True, capture_output=True)
        assert done.stderr == b""
    files = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert grouped(files) == case.expected[split]


@SPLITS
def test_tarfile_reads_them(case, split):
    files = {}
    for shard in case.shards(split):
        with tarfile.open(shard) as archive:
            for member in archive:
                assert member.isreg() and (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
                files[member.name] = archive.extractfile(member).read()
    assert grouped(files) == case.expected[split]


# --- webdataset -----------------------------------------------------------------------------------

# In processes of their own: they leave files open, which is an error in ours.

WEBDATASET = """
import sys, json, hashlib
import webdataset
read = [
    {
        s["__key__"]: {k: hashlib.sha256(v).hexdigest() for k, v in s.items() if k[:2] != "__"}
        for s in webdataset.WebDataset(urls.split("::"), shardshuffle=False)
    }
    for urls in sys.argv[1:]
]
print(json.dumps([webdataset.__version__, *read]))
"""


def joined(case: Case) -> list[str]:
    return ["::".join(map(str, case.shards(split))) for split in case.expected]


def test_webdataset_reads_them(case):
    pytest.importorskip("webdataset", reason="webdataset is the reader")
    _, *read = run(sys.executable, WEBDATASET, *joined(case))
    assert read == [digests(samples) for samples in case.expected.values()]


def test_old_webdataset_reads_them(case):
    folder = elsewhere("PACKER_OLD_WEBDATASET", "folder with webdataset 0.2.86")
    version, *read = run(sys.executable, WEBDATASET, *joined(case), PYTHONPATH=folder)
    assert version.startswith("0.")
    assert read == [digests(samples) for samples in case.expected.values()]


EVERYDAY = """
import sys, json, hashlib
import numpy as np
import webdataset as wds
tuples = wds.WebDataset(sys.argv[1], shardshuffle=False).decode("rgb").to_tuple("jpg", "cls")
read = [(hashlib.sha256(np.rint(pixels * 255).astype(np.uint8)).hexdigest(), label) for pixels, label in tuples]
print(json.dumps(read))
"""


def test_the_everyday_line_gives_pixels_and_labels(case):
    pytest.importorskip("webdataset", reason="webdataset is the reader")
    last = len(case.shards("train")) - 1
    read = run(sys.executable, EVERYDAY, str(case.folder / f"train-{{000000..{last:06d}}}.tar"))
    pictures = [(Image.open(io.BytesIO(s["jpg"])).convert("RGB"), s["cls"]) for s in case.expected["train"].values()]
    assert read == [[hashlib.sha256(picture.tobytes()).hexdigest(), int(label)] for picture, label in pictures]
    assert len(read) == len(CLASSES) * (len(NAMES) + 1)


WIDS = """
import sys, json, hashlib
import wids
read = []
for index in sys.argv[1:]:
    dataset = wids.ShardListDataset(index, transformations=[], keep=True)
    samples = [dataset[i] for i in range(len(dataset))]
    read.append([
        (s["__key__"], {k[1:]: hashlib.sha256(v.read()).hexdigest() for k, v in s.items() if k[0] == "."})
        for s in samples
    ])
print(json.dumps(read))
"""


def test_wids_reads_them_by_its_index(short_names, tmp_path):
    environment = {"WIDS_CACHE": tmp_path / "cache"}
    if importlib.util.find_spec("wids") is None:
        environment["PYTHONPATH"] = Path(elsewhere("PACKER_OLD_WEBDATASET", "folder with wids"))
    indexes = [short_names.folder / f"{split}.wids.json" for split in short_names.expected]
    read = run(sys.executable, WIDS, *indexes, **environment)
    expected = [digests(samples) for samples in short_names.expected.values()]
    assert read == [[[key, fields] for key, fields in samples.items()] for samples in expected]


# --- Hugging Face datasets, torchvision -----------------------------------------------------------

HUGGING_FACE = """
import sys, json, hashlib
from datasets import Image, load_dataset
read = []
for urls in sys.argv[1:]:
    data = load_dataset("webdataset", data_files={"train": urls.split("::")}, split="train", streaming=True)
    rows = data.cast_column("jpg", Image(decode=False))
    read.append({
        row["__key__"]: {
            "jpg": hashlib.sha256(row["jpg"]["bytes"]).hexdigest(),
            "cls": hashlib.sha256(str(row["cls"]).encode()).hexdigest(),
        }
        for row in rows
    })
print(json.dumps(read))
"""


def test_hugging_face_datasets_reads_them(case, tmp_path):
    python = elsewhere("PACKER_HF_PYTHON", "Python with Hugging Face datasets")
    read = run(python, HUGGING_FACE, *joined(case), HF_HOME=tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    assert read == [digests(samples) for samples in case.expected.values()]


TORCHVISION = """
import sys, json, hashlib
from torchvision.datasets import ImageFolder
def read(root):
    folder = ImageFolder(root)
    samples = [
        (hashlib.sha256(open(path, "rb").read()).hexdigest(), hashlib.sha256(image.tobytes()).hexdigest(), label)
        for (path, _), (image, label) in zip(folder.samples, folder)
    ]
    return folder.classes, sorted(samples)
print(json.dumps([read(root) for root in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def by_torchvision(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ImageFolder on the source, and on the tree that GNU tar extracts from the shards."""
    python = elsewhere("PACKER_TORCHVISION_PYTHON", "Python with torchvision")
    extracted = tmp_path_factory.mktemp("extracted")
    for shard in case.shards("train"):
        subprocess.run(["tar", "-xf", shard, "-C", extracted], check=True)
    (root,) = {path.parent.parent for path in extracted.rglob("*.jpg")}
    return run(python, TORCHVISION, case.source / "train", root)


def test_torchvision_sees_the_same_classes_labels_and_pixels(case, by_torchvision):
    (classes, samples), extracted = by_torchvision
    assert extracted == [classes, samples]
    assert tuple(classes) == CLASSES == Packed(case.folder).manifest.classes
    labels = {hashlib.sha256(s["jpg"]).hexdigest(): int(s["cls"]) for s in case.expected["train"].values()}
    assert labels == {file: label for file, _, label in samples}


def test_our_loader_gives_the_pixels_and_labels_of_torchvision(case, by_torchvision):
    from loaders.webds_loader import make_loader

    (_, samples), _ = by_torchvision
    with make_loader(case.folder, split="train", batch_size=1, shuffle=False) as loader:
        read = [
            (hashlib.sha256(image.permute(1, 2, 0).numpy().tobytes()).hexdigest(), int(label))
            for images, labels in loader
            for image, label in zip(images, labels, strict=True)
        ]
    assert sorted(read) == sorted((pixels, label) for _, pixels, label in samples)
