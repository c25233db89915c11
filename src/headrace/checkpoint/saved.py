"""A committed checkpoint, and reading it: everything is bounded before it is believed."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint import header, manifest
from headrace.checkpoint.digest import CHUNK, Digest
from headrace.checkpoint.manifest import FileRecord, Manifest
from headrace.checkpoint.storage import File, Storage
from headrace.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

# Not EACCES, EMFILE and their like: what is wrong there is not the checkpoint.
_WRONG = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.EINVAL),
    *(errno.ENXIO, errno.ENODEV, errno.EIO, errno.E2BIG),
}


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Makes of a malformed or unreadable `path` a `CorruptCheckpoint` that names it."""
    try:
        yield
    except ValueError as error:
        raise CorruptCheckpoint(path, str(error)) from None
    except OSError as error:
        if error.errno not in _WRONG:
            raise
        raise CorruptCheckpoint(path, f"cannot be read: {error.strerror}") from error


class Checkpoint:
    """What was saved at one step; its files are read when asked for.

    Args:
        path: its folder.
        storage: of the folder's parent.
        step: that the folder is named for.

    Raises:
        CorruptCheckpoint: the manifest is damaged, or a file is missing or of another size.
    """

    def __init__(self, path: Path, storage: Storage, step: int) -> None:
        self.path = path
        self._storage = storage
        with self._opened(manifest.NAME) as file:
            # One byte more than allowed, for `decode` to see.
            content = memoryview(bytearray(min(file.size(), manifest.MOST_BYTES + 1)))
            _fill(file, content)
            self.manifest: Manifest = manifest.decode(bytes(content))
            if self.manifest.step != step:
                raise ValueError(f"it is of step {self.manifest.step}, its folder of step {step}: they were exchanged")
        for record in self.manifest.files:
            with self._opened(record.name) as file:
                _match(file, record)

    @property
    def step(self) -> int:
        """Steps done when it was made."""
        return self.manifest.step

    @property
    def description(self) -> Mapping[str, Any]:
        """What the caller said of it, JSON values."""
        return self.manifest.description

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that saved something, ascending."""
        return tuple(record.rank for record in self.manifest.files)

    def verify(self) -> None:
        """Reads everything once.

        Raises:
            CorruptCheckpoint: a file is not what was saved; names it.
        """
        chunk = min(CHUNK, max((record.bytes for record in self.manifest.files), default=1))
        # By turns, because the one is digested while the other is filled.
        pair = tuple(memoryview(bytearray(chunk)) for _ in range(2))
        for record in self.manifest.files:
            with self._opened(record.name) as file, Digest() as digest:
                _, count = _front(file, record, digest)
                sizes = (min(chunk, count - at) for at in range(0, count, chunk))
                _pass(file, record, digest, (half[:size] for half, size in zip(itertools.cycle(pair), sizes)))

    def read(self, rank: int) -> dict[str, Tensor]:
        """Returns a rank's tensors, on the CPU: views of one buffer, digested while it is filled.

        Raises:
            CorruptCheckpoint: the file is not what was saved, or the rank saved none.
        """
        from headrace.checkpoint import tensors

        record = self._record(rank)
        with self._opened(record.name) as file, Digest(behind_bytes=record.bytes) as digest:
            entries, count = _front(file, record, digest)
            buffer, memory = tensors.allocate(count)
            _pass(file, record, digest, (memory[at : at + CHUNK] for at in range(0, count, CHUNK)))
        return tensors.views(buffer, entries)

    def shapes(self, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the shapes and types ("float32") of a rank's tensors, from the front of its file alone.

        Raises:
            CorruptCheckpoint: the front is damaged, or the rank saved none.
        """
        record = self._record(rank)
        with self._opened(record.name) as file, Digest() as digest:
            entries, _ = _front(file, record, digest)
        return {entry.name: (entry.shape, header.NAMES[entry.dtype]) for entry in entries}

    def _record(self, rank: int) -> FileRecord:
        found = [record for record in self.manifest.files if record.rank == rank]
        if not found:
            raise CorruptCheckpoint(self.path, f"rank {rank} has no file in it, only ranks {self.ranks}")
        return found[0]

    @contextmanager
    def _opened(self, name: str) -> Iterator[File]:
        with blaming(self.path / name), self._storage.open(f"{self.path.name}/{name}") as file:
            yield file


def _front(file: File, record: FileRecord, digest: Digest) -> tuple[tuple[header.TensorEntry, ...], int]:
    """Reads the header; returns the tensors and how many bytes their data have."""
    _match(file, record)
    prefix = memoryview(bytearray(header.PREFIX))
    _fill(file, prefix)
    front = memoryview(bytearray(header.length(bytes(prefix), record.bytes)))
    _fill(file, front)
    digest.feed(prefix)
    digest.feed(front)
    count = record.bytes - len(prefix) - len(front)
    return header.parse(bytes(front), count), count


def _pass(file: File, record: FileRecord, digest: Digest, buffers: Iterable[memoryview]) -> None:
    """Fills the buffers one after the other and compares the digest of everything."""
    for buffer in buffers:
        _fill(file, buffer)
        digest.feed(buffer)
    found = digest.hexdigest()
    if found != record.sha256:
        raise ValueError(f"its content has changed: SHA-256 {found[:16]}..., saved as {record.sha256[:16]}...")


def _match(file: File, record: FileRecord) -> None:
    if file.size() != record.bytes:
        raise ValueError(f"it has {file.size():,} bytes, saved were {record.bytes:,}")


def _fill(file: File, buffer: memoryview) -> None:
    rest = buffer
    while rest:
        count = file.read(rest)
        if count == 0:
            raise ValueError(f"it ended {len(rest):,} bytes too early")
        rest = rest[count:]
