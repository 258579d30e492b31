r"""Reading a packed dataset by its index: one pread per field, no container parsed.

    >>> dataset = Packed("out/")                          # doctest: +SKIP
    >>> train = dataset["train"]                          # doctest: +SKIP
    >>> train.read(17, "jpg")[:2]                         # doctest: +SKIP
    b'\xff\xd8'

pread keeps no file position, so threads and forked workers share descriptors safely; and a
truncated file is an error here, where a memory map would kill the process with SIGBUS.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property

from crc32c import crc32c

from packer.errors import ManifestError, ShardError, UsageError
from packer.index import Names, Rows, load_rows
from packer.manifest import Manifest, Shard, Split
from packer.sample import printable

_LARGE = 1 << 26  # from here on a length is looked at before memory is taken for it
_PIECE = 1 << 20


class Packed(Mapping[str, "PackedSplit"]):
    """A packed dataset: its manifest, and its splits by name.

    Args:
        folder: the folder that `packer shard` or `packer index` wrote `dataset.json` into.

    Raises:
        ManifestError: no manifest, or one that is not complete.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.manifest = Manifest.load(self.folder)
        self._splits = {
            name: PackedSplit(self.folder, split, self.manifest.fields, self.manifest.sidecars)
            for name, split in self.manifest.splits.items()
        }

    def __getitem__(self, name: str) -> PackedSplit:
        try:
            return self._splits[name]
        except KeyError:
            raise ManifestError(
                f"{self.folder} has no split {name!r}; it has: {', '.join(self._splits) or 'none'}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._splits

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits)

    def only(self, split: str | None) -> dict[str, PackedSplit]:
        """The split of this name alone, or all where it is None. Raises UsageError where there is no such split."""
        if split is not None and split not in self:
            raise UsageError(f"{self.folder} has no split {split!r}; it has: {', '.join(self) or 'none'}")
        return {name: packed for name, packed in self.items() if split in (None, name)}

    def __len__(self) -> int:
        return len(self._splits)

    def check_sidecars(self) -> None:
        """Compare all index and names files with their checksums; see `PackedSplit.check_sidecars`."""
        for split in self.values():
            split.check_sidecars()


class PackedSplit:
    """Random access to one split. Cheap to open, picklable, safe in threads and forked workers.

    Attributes:
        rows: the memory-mapped index, one row per sample (see `packer.index`).
        fields: field names.
    """

    def __init__(
        self, folder: str, split: Split, fields: tuple[str, ...], sidecars: Mapping[str, Mapping[str, int]]
    ) -> None:
        self.folder = folder
        self.split = split
        self.fields = fields
        names = (split.index_file, split.names_file)
        self._sidecars = {name: dict(sidecars[name]) for name in names if name in sidecars}
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (PackedSplit, (self.folder, self.split, self.fields, self._sidecars))

    def __len__(self) -> int:
        return self.split.samples

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The split's shards, in order."""
        return self.split.shards

    @cached_property
    def rows(self) -> Rows:
        """The index, memory-mapped on first use."""
        rows = load_rows(os.path.join(self.folder, self.split.index_file), self.split.samples, self.fields)
        self._check_size(self.split.index_file)
        return rows

    @cached_property
    def names(self) -> Names:
        """Keys and original paths, memory-mapped on first use."""
        names = Names.load(os.path.join(self.folder, self.split.names_file), self.split.samples, self.fields)
        self._check_size(self.split.names_file)
        return names

    def _check_size(self, name: str) -> None:
        """One stat, so that opening stays as cheap as it is."""
        size = os.stat(os.path.join(self.folder, name)).st_size
        if name in self._sidecars and size != self._sidecars[name]["bytes"]:
            raise self._damaged(name, f"{size} bytes, not {self._sidecars[name]['bytes']} as written")

    def check_sidecars(self) -> None:
        """Compare index and names file with the checksums in the manifest.

        Reads both files whole: for who copies what they say, not for who opens a dataset to train.

        Raises:
            ManifestError: one of them is damaged, or missing.
        """
        _ = self.rows, self.names  # says more exactly what is wrong with many a damaged file
        for name, facts in self._sidecars.items():
            checksum = 0
            try:
                with open(os.path.join(self.folder, name), "rb") as f:
                    while piece := f.read(_PIECE):
                        checksum = crc32c(piece, checksum)
            except OSError as error:
                raise self._damaged(name, error.strerror or str(error)) from error
            if checksum != facts["crc32c"]:
                raise self._damaged(name, "crc32c mismatch")

    def _damaged(self, name: str, what: str) -> ManifestError:
        return ManifestError(
            f"{os.path.join(self.folder, name)} is damaged: {what}; restore it from a copy, or run "
            f"'packer index {self.folder} --force' to rebuild it"
        )

    def key(self, i: int) -> str:
        """The key of sample i."""
        return self.names.keys[i].decode("utf-8", "surrogateescape")

    def shard_path(self, shard: int) -> str:
        """Where shard number `shard` lies."""
        if not 0 <= shard < len(self.split.shards):
            raise ShardError(
                f"{os.path.join(self.folder, self.split.index_file)} names shard {shard}, dataset.json has "
                f"{len(self.split.shards)}; run: packer verify {self.folder}"
            )
        return os.path.join(self.folder, self.split.shards[shard].name)

    def descriptor(self, shard: int) -> int:
        """An open file descriptor of the shard, for pread; it stays open until `close`.

        Never evicted while in use: a number closed by one thread and reused by another would
        read the wrong shard. With more shards than open files are allowed, the soft limit is
        raised to the hard one.
        """
        fd = self._fds.get(shard)
        if fd is not None:
            return fd
        with self._lock:
            fd = self._fds.get(shard)
            if fd is None:
                fd = self._fds[shard] = _open(self.shard_path(shard))
            return fd

    def read(self, i: int, field: str, *, check: bool = False) -> bytes | None:
        """The bytes of one field of sample i, or None where the sample lacks it.

        Args:
            i: sample number, 0 ≤ i < len(self).
            field: a name from `fields`.
            check: compare the bytes with the stored crc32c.

        Raises:
            ShardError: the shard is missing, truncated, or (with `check`) damaged.
        """
        row = self.rows[i]
        length = int(row[f"{field}:length"])
        if length < 0:
            return None
        shard, offset = int(row["shard"]), int(row[f"{field}:offset"])
        fd = self.descriptor(shard)
        if length > _LARGE and (end := os.fstat(fd).st_size) < offset + length:
            raise ShardError(self.complain(i, field, f"{length} bytes at offset {offset}, but the shard ends at {end}"))
        try:
            data = os.pread(fd, length, offset)
            # Linux gives at most 2 GiB at a time.
            while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise ShardError(self.complain(i, field, f"cannot be read at offset {offset}: {error.strerror}")) from error
        if len(data) < length:
            raise ShardError(self.complain(i, field, f"truncated: {len(data)} of {length} bytes at offset {offset}"))
        if check and crc32c(data) != int(row[f"{field}:crc32c"]):
            raise ShardError(self.complain(i, field, f"crc32c mismatch at offset {offset}"))
        return data

    def read_into(self, shard: int, offset: int, view: memoryview) -> None:
        """Fill the view with the bytes at this offset of a shard.

        Raises:
            ShardError: the shard is missing or ends before.
        """
        fd = self.descriptor(shard)
        done = 0
        try:
            while done < len(view) and (got := os.preadv(fd, (view[done:],), offset + done)):
                done += got
        except OSError as error:
            raise ShardError(
                f"{self.shard_path(shard)} cannot be read at offset {offset}: {error.strerror}; "
                f"run: packer verify {self.folder}"
            ) from error
        if done < len(view):
            raise ShardError(
                f"{self.shard_path(shard)} is truncated: it ends before offset {offset + len(view)}; "
                f"run: packer verify {self.folder}"
            )

    def sample(self, i: int, *, check: bool = False) -> dict[str, bytes]:
        """All fields that sample i has."""
        values = ((field, self.read(i, field, check=check)) for field in self.fields)
        return {field: value for field, value in values if value is not None}

    def complain(self, i: int, field: str, what: str, *, damaged: bool = True) -> str:
        """An error text that leads back to the sample and, if its bytes are to blame, on to what checks them all."""
        shard = self.split.shards[int(self.rows[i]["shard"])].name
        text = f"{shard}, sample {i} {printable(self.names.keys[i])!r}, field {field!r}: {what}"
        return f"{text}; run: packer verify {self.folder}" if damaged else text

    def close(self) -> None:
        """Close the shard files. They open again when next read."""
        with self._lock:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            self.close()


def _open(path: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would block
    try:
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft == hard:
                raise
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            fd = os.open(path, flags)
    except OSError as error:
        advice = "; raise the limit with 'ulimit -n' or pack into fewer shards" if error.errno == errno.EMFILE else ""
        raise ShardError(f"{path}: {error.strerror}{advice}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardError(f"{path} is not a regular file; run: packer verify {os.path.dirname(path) or '.'}")
    return fd
