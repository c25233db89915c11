"""A run's folder of checkpoints: writing one aside, committing it, finding the newest sound one, and reading it."""

from __future__ import annotations

import errno
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint import header, manifest
from headrace.checkpoint.manifest import FileRecord, Manifest
from headrace.checkpoint.storage import CHUNK, Digest, File, Storage
from headrace.errors import CorruptCheckpoint, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"step-([0-9]{8,18})(\.part|\.old)?")
_MOST_ENTRIES = 100_000
_MAPPED_BYTES = 256 << 20
# Errors of the checkpoint; EACCES, EMFILE and the like are not.
_WRONG = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.EINVAL),
    *(errno.ENXIO, errno.ENODEV, errno.EIO, errno.E2BIG),
}


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turns errors of a malformed or unreadable `path` into a `CorruptCheckpoint`."""
    try:
        yield
    except ValueError as error:
        raise CorruptCheckpoint(path, str(error)) from None
    except OSError as error:
        if error.errno not in _WRONG:
            raise
        raise CorruptCheckpoint(path, f"cannot be read: {error.strerror}") from error


class Checkpoint:
    """A committed checkpoint whose manifest is sound and whose files have their sizes; else a `CorruptCheckpoint`.

    `ranks` are those that saved something, ascending. Every length is checked before memory is allocated for it.
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
        self.step, self.description = step, self.manifest.description
        self.ranks = tuple(record.rank for record in self.manifest.files)
        for record in self.manifest.files:
            with self._opened(record.name) as file:
                _check_size(file, record)

    def verify(self) -> None:
        """Reads all files; a `CorruptCheckpoint` names one whose content has changed."""
        for record in self.manifest.files:
            with self._opened(record.name) as file:
                _digest(file, record)

    def read(self, rank: int) -> dict[str, Tensor]:
        """Returns a rank's tensors, on the CPU: views of one buffer, digested while it is filled.

        Those of a large file are views of the file, which was digested just before, and whose pages the system may take
        back: a checkpoint of tables may be larger than this process's memory.
        """
        from headrace.checkpoint import forms, tensors

        record = self._record(rank)
        if record.bytes > _MAPPED_BYTES:
            with self._opened(record.name) as file:
                entries, count = _digest(file, record)
                return forms.decode(tensors.views(tensors.mapped(file.map(), record.bytes - count), entries))
        with self._opened(record.name) as file, Digest(behind_bytes=record.bytes) as digest:
            entries, count = _read_header(file, record, digest)
            buffer, memory = tensors.allocate(count)
            _read_rest(file, record, digest, (memory[at : at + CHUNK] for at in range(0, count, CHUNK)))
            return forms.decode(tensors.views(buffer, entries))

    @contextmanager
    def contents(self) -> Iterator[Sequence[tuple[FileRecord, Iterator[memoryview]]]]:
        """Opens all files at once, so that they can be read while they are deleted; yields each with its content.

        A piece is valid until the next one is asked for. At the end of a file whose content has changed, and where one
        cannot be opened, there is a `CorruptCheckpoint`.
        """
        with ExitStack() as stack:
            files = [(record, stack.enter_context(self._opened(record.name))) for record in self.manifest.files]
            yield [(record, self._pieces(file, record)) for record, file in files]

    def shapes(self, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the shapes and types ("float32") of a rank's tensors, from the header of its file alone."""
        record = self._record(rank)
        with self._opened(record.name) as file, Digest() as digest:
            entries, _ = _read_header(file, record, digest)
        whole = filter(None, map(header.whole, entries))
        return {name: (shape, dtype) for name, shape, dtype in whole}

    def _record(self, rank: int) -> FileRecord:
        if rank not in self.ranks:
            raise CorruptCheckpoint(self.path, f"rank {rank} has no file in it, only ranks {self.ranks}")
        return self.manifest.files[self.ranks.index(rank)]

    def _pieces(self, file: File, record: FileRecord) -> Iterator[memoryview]:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(CHUNK, record.bytes)))
        for at in range(0, record.bytes, CHUNK):
            piece = buffer[: record.bytes - at]
            with blaming(self.path / record.name):
                _fill(file, piece)
            digest.update(piece)
            yield piece
        with blaming(self.path / record.name):
            _check_digest(digest.hexdigest(), record)

    @contextmanager
    def _opened(self, name: str) -> Iterator[File]:
        with blaming(self.path / name), self._storage.open(f"{self.path.name}/{name}") as file:
            yield file


def _read_header(file: File, record: FileRecord, digest: Digest) -> tuple[tuple[header.TensorEntry, ...], int]:
    """Reads the header; returns the tensors and the bytes of their data."""
    _check_size(file, record)
    prefix = memoryview(bytearray(header.PREFIX))
    _fill(file, prefix)
    head = memoryview(bytearray(header.length(bytes(prefix), record.bytes)))
    _fill(file, head)
    digest.feed(prefix)
    digest.feed(head)
    count = record.bytes - len(prefix) - len(head)
    return header.parse(bytes(head), count), count


def _digest(file: File, record: FileRecord) -> tuple[tuple[header.TensorEntry, ...], int]:
    """Reads a file that is not kept; returns the tensors and the bytes of their data."""
    chunk = min(CHUNK, record.bytes)
    # One buffer is digested while the other is filled.
    pair = tuple(memoryview(bytearray(chunk)) for _ in range(2))
    with Digest() as digest:
        entries, count = _read_header(file, record, digest)
        sizes = (min(chunk, count - at) for at in range(0, count, chunk))
        _read_rest(file, record, digest, (half[:size] for half, size in zip(itertools.cycle(pair), sizes)))
    return entries, count


def _read_rest(file: File, record: FileRecord, digest: Digest, buffers: Iterable[memoryview]) -> None:
    """Fills the buffers one after the other, and checks the digest of the whole file."""
    for buffer in buffers:
        _fill(file, buffer)
        digest.feed(buffer)
    _check_digest(digest.hexdigest(), record)


def _check_digest(digest: str, record: FileRecord) -> None:
    if digest != record.sha256:
        raise ValueError(f"its content has changed: SHA-256 {digest[:16]}..., saved as {record.sha256[:16]}...")


def _check_size(file: File, record: FileRecord) -> None:
    if file.size() != record.bytes:
        raise ValueError(f"it has {file.size():,} bytes, saved were {record.bytes:,}")


def _fill(file: File, buffer: memoryview) -> None:
    while buffer:
        count = file.read(buffer)
        if count == 0:
            raise ValueError(f"it ended {len(buffer):,} bytes too early")
        buffer = buffer[count:]


class CheckpointFolder:
    """The checkpoints of one run. One process begins, commits and abandons; in between, every rank writes its file."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path = path
        self._storage = storage or Storage(path)

    def begin(self, step: int) -> None:
        """Deletes what a crash has left, and creates the folder to write a checkpoint in."""
        self._storage.prepare()
        self.clear()
        self._storage.make_folder(folder_name(step, ".part"))

    def clear(self) -> None:
        """Deletes what a crash has left half written or half deleted."""
        if leftovers := [*self._named(".part"), *self._named(".old")]:
            # A rename that the disk may still lose must not bring back a half-deleted checkpoint.
            self._storage.sync("")
            for name in leftovers:
                self._delete(name)

    def write(self, step: int, rank: int, tensors: Mapping[str, Tensor]) -> FileRecord:
        """Writes and syncs a rank's file; returns the record for `commit`."""
        from headrace.checkpoint.forms import encode
        from headrace.checkpoint.tensors import write

        name = manifest.file_name(rank)
        with self._storage.create(f"{folder_name(step, '.part')}/{name}") as file:
            return write(file, name, encode(tensors))

    def write_copy(self, step: int, record: FileRecord, chunks: Iterable[bytes]) -> None:
        """Writes and syncs a rank's file of which there is a record; a ValueError if its content is another."""
        digest = hashlib.sha256()
        with self._storage.create(f"{folder_name(step, '.part')}/{record.name}") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write_all(memoryview(chunk))
            file.sync()
        _check_digest(digest.hexdigest(), record)

    def commit(self, step: int, files: Sequence[FileRecord], description: Mapping[str, Any], keep: int) -> bool:
        """Makes what was written the newest checkpoint, durably, and deletes all but the last `keep`.

        Newer ones are deleted, too: they belong to a history that the run has left by resuming from an older one. A
        checkpoint of the same step stays if it is sound and the same, and `commit` returns False; else it is replaced,
        and only then may a crash in between leave neither. After an OSError, the checkpoints before are still there.
        """
        if keep < 1:
            raise UsageError(f"cannot keep the last {keep} checkpoints; keep 1 or more")
        content = manifest.encode(Manifest(step, tuple(files), description))
        part, final = folder_name(step, ".part"), folder_name(step)
        fresh = not self._holds(step, content)
        if fresh:
            with self._storage.create(f"{part}/{manifest.NAME}") as file:
                file.write_all(memoryview(content))
                file.sync()
            self._storage.sync(part)
            if step in self._steps():
                self._storage.rename(final, folder_name(step, ".old"))
            self._storage.rename(part, final)
            self._storage.sync("")
        else:
            self._delete(part)
        steps = self._steps()
        recent = [older for older in steps if older <= step][-keep:]
        doomed = [other for other in steps if other not in recent]
        for other in doomed:
            self._storage.rename(folder_name(other), folder_name(other, ".old"))
        if doomed:
            self._storage.sync("")
        for name in self._named(".old"):
            self._delete(name)
        return fresh

    def abandon(self, step: int) -> None:
        """Deletes what was written aside, as far as the disk allows; `begin` deletes the rest."""
        with suppress(OSError):
            self._delete(folder_name(step, ".part"))

    def discard(self, step: int) -> None:
        """Deletes a committed checkpoint."""
        self._storage.rename(folder_name(step), folder_name(step, ".old"))
        self._storage.sync("")
        self._delete(folder_name(step, ".old"))

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the committed checkpoints, ascending. It does not check them."""
        with blaming(self.path):
            return self._steps()

    def open(self, step: int, verify: bool = False) -> Checkpoint:
        """Returns a checkpoint; a `CorruptCheckpoint` if it is not sound, with `verify` in its content, too."""
        checkpoint = Checkpoint(self.path / folder_name(step), self._storage, step)
        if verify:
            checkpoint.verify()
        return checkpoint

    def latest(self) -> tuple[Checkpoint | None, tuple[CorruptCheckpoint, ...]]:
        """Returns the newest checkpoint that is wholly sound, and what is wrong with the newer ones."""
        wrong: list[CorruptCheckpoint] = []
        for step in reversed(self.steps()):
            try:
                return self.open(step, verify=True), tuple(wrong)
            except CorruptCheckpoint as error:
                wrong.append(error)
        return None, tuple(wrong)

    def _holds(self, step: int, content: bytes) -> bool:
        """Whether a sound checkpoint of this step with this manifest is there."""
        with suppress(CorruptCheckpoint):
            return step in self._steps() and manifest.encode(self.open(step, verify=True).manifest) == content
        return False

    def _steps(self) -> tuple[int, ...]:
        return tuple(sorted(step for name in self._named("") if (step := step_of(name)) is not None))

    def _named(self, ending: str) -> list[str]:
        """Returns the names of steps with this ending."""
        names = []
        with suppress(FileNotFoundError):
            for count, name in enumerate(self._storage.entries("")):
                if count == _MOST_ENTRIES:
                    raise OSError(errno.E2BIG, f"it holds more than {_MOST_ENTRIES:,} entries", str(self.path))
                if step_of(name, ending) is not None:
                    names.append(name)
        return names

    def _delete(self, place: str) -> None:
        """Deletes a folder with all that is in it; of links, only the links."""
        try:
            entries = list(self._storage.entries(place))
        except NotADirectoryError:
            self._storage.delete_file(place)
            return
        for entry in entries:
            try:
                self._storage.delete_file(f"{place}/{entry}")
            except IsADirectoryError:
                self._delete(f"{place}/{entry}")
        self._storage.delete_folder(place)


def folder_name(step: int, ending: str = "") -> str:
    """Returns the name of a checkpoint's folder; with an ending, of one that is being written or deleted."""
    return f"step-{step:08d}{ending}"


def step_of(name: str, ending: str = "") -> int | None:
    """Returns the step of the folder with a name; None if no folder with this ending is called so."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and name == folder_name(int(match[1]), ending) else None
