"""Loaders to be measured side by side: ours and our peers', one small module each.

A module of this package knows one loader. It has

    pack(tree, store, variant)          turn an ImageFolder tree into the loader's own format, once
    load(store, task, variant)          batches: an iterable, each `iter()` of which is an epoch
    read(store, variant)                (encoded bytes, label) one by one, where that is measured too

and imports its library at the top, for only the process that runs it ever imports it. Where a library leaves the
decoding to the user, it gets torchvision's fastest recipe (`decode_jpeg`, then v2 on uint8 tensors), and
where the recipe with Pillow is the common one, that too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Peer:
    """One loader as it stands in a table.

    Attributes:
        title: what it is called there.
        module: the module of this package that knows it.
        variant: which of the module's ways.
        store: name of the packed form, which loaders may share; "tree" is the ImageFolder tree itself.
        distributions: whose versions the result depends on.
        env: environment variables that it needs, set before its process starts.
    """

    title: str
    module: str
    variant: str = ""
    store: str = "tree"
    distributions: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


#: Against which equal output and all ratios are measured: torchvision's own recipe on Pillow.
REFERENCE = "imagefolder-pillow"

_OURS = ("packer-loaders", "simplejpeg", "pillow")
_TORCHVISION = ("torchvision", "pillow")
_GRAIN = MappingProxyType({"OMP_NUM_THREADS": "1"})  # else torch starts threads for each of grain's own

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "packer-thread": Peer("packer, threads", "ours", "thread", "packer", _OURS),
        "packer-process": Peer("packer, processes", "ours", "process", "packer", _OURS),
        "packer-seekable": Peer("packer, threads, seekable JPEG", "ours", "thread", "packer-seekable", _OURS),
        "folder": Peer("folder_loader (ours, not packed)", "ours", "folder", "tree", _OURS),
        "imagefolder-pillow": Peer("torchvision ImageFolder, Pillow", "imagefolder", "pillow", "tree", _TORCHVISION),
        "imagefolder-v2": Peer("torchvision ImageFolder, v2", "imagefolder", "v2", "tree", _TORCHVISION),
        "webdataset-pillow": Peer(
            "webdataset, Pillow", "webdataset", "pillow", "webdataset", ("webdataset", *_TORCHVISION)
        ),
        "webdataset-v2": Peer("webdataset, v2", "webdataset", "v2", "webdataset", ("webdataset", *_TORCHVISION)),
        "litdata": Peer("litdata, v2", "litdata", "", "litdata", ("litdata", "torchvision")),
        "mds": Peer("mosaicml-streaming, v2", "mds", "", "mds", ("mosaicml-streaming", "torchvision")),
        "hf": Peer("HF datasets (Arrow), v2", "hf", "", "hf", ("datasets", "pyarrow", "torchvision")),
        "grain": Peer(
            "grain + array_record, v2", "grain", "", "grain", ("grain", "array_record", "torchvision"), _GRAIN
        ),
        "spdl": Peer("SPDL, ffmpeg", "spdl", "ffmpeg", "tree", ("spdl",)),
        "spdl-v2": Peer("SPDL, v2", "spdl", "v2", "tree", ("spdl", "torchvision")),
        "dali": Peer("DALI, CPU", "dali", "", "tree", ("nvidia-dali-cuda130",)),
        "ffcv": Peer("ffcv", "ffcv", "", "ffcv", ("ffcv", "numba")),
        "decode-limit": Peer("limit: decode alone", "limit", "", "packer", _OURS),
        "decode-limit-seekable": Peer("limit: decode alone, seekable", "limit", "", "packer-seekable", _OURS),
        "files": Peer("files, in order of the tree", "files"),
        "packer-random": Peer("packer, random order", "ours", "random", "packer", _OURS),
        "packer-in-order": Peer("packer, in order", "ours", "in-order", "packer", _OURS),
        "webdataset": Peer("webdataset", "webdataset", "", "webdataset", ("webdataset",)),
    }
)

#: Those that only run the decode function: they have no batches to check.
LIMITS = ("decode-limit", "decode-limit-seekable")
