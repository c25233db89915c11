"""Copies of a run's checkpoints on any file system that fsspec knows, s3://bucket/runs/a.

The layout is that of the run's own folder. A copy counts by its manifest, which is written last and deleted first, so
that one that was cut off is never taken; and by the digests in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headrace.checkpoint import manifest
from headrace.checkpoint.folder import Checkpoint, CheckpointFolder, folder_name, step_of
from headrace.checkpoint.manifest import FileRecord
from headrace.checkpoint.storage import CHUNK
from headrace.errors import CorruptCheckpoint, HeadraceError, UnfitMachine, UsageError
from headrace.machine.extras import remedy
from headrace.spec.options import require_url

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
"""They have no folders; to make one there would make a bucket where its name is misspelt."""
_PROBE = "headrace-can-write"
_MOST_WORDS = 300


class RemoteFolder:
    """The copies of one run's checkpoints at a URL.

    Credentials and the service's address are those that the client of the file system finds by itself. A service that
    fails is an UnfitMachine, from every method.

    Raises:
        UsageError: it is no URL.
        UnfitMachine: a package for it is missing.
    """

    def __init__(self, url: str) -> None:
        require_url("the address of checkpoints", url)
        self.url = url.rstrip("/")
        try:
            core = importlib.import_module("fsspec.core")
            self._system, self._root = core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UnfitMachine(
                f"checkpoints at {url} need a package that is missing here: {error}; "
                f"{remedy('remote')} brings what s3:// and https:// need"
            ) from error
        protocols = self._system.protocol
        self._has_folders = not _OBJECT_STORES & {*([protocols] if isinstance(protocols, str) else protocols)}

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of which something is there, ascending."""
        with self._serving("listed"):
            return self._steps()

    def require_writable(self) -> None:
        """Writes a small file and deletes it."""
        with self._serving("written"):
            self._make_folder(self._root)
            place = f"{self._root}/{_PROBE}"
            self._system.pipe_file(place, b"")
            self._system.rm_file(place)

    def send(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint, unless the same is there; one of another history with this step is deleted first.

        Raises:
            CorruptCheckpoint: it is not sound, or was deleted; no copy of it counts.
        """
        content, step = manifest.encode(checkpoint.manifest), checkpoint.step
        # What fails inside is the service's fault, unless it is a CorruptCheckpoint already.
        with checkpoint.contents() as files, self._serving("written"):
            if self._manifest(step) == content:
                return
            self._delete(step)
            self._make_folder(self._place(step))
            for record, chunks in files:
                self._write(self._place(step, record.name), chunks, record.bytes)
            self._write(self._place(step, manifest.NAME), [memoryview(content)], len(content))

    def prune(self, step: int, keep: int) -> None:
        """Deletes all but the last `keep` to this step, with newer ones and what was cut off, as a commit does."""
        with self._serving("written"):
            steps = self._steps()
            whole = [saved for saved in steps if saved <= step and self._counts(saved)]
            for doomed in sorted({*steps} - {*whole[-keep:]}):
                self._delete(doomed)

    def receive(self, folder: CheckpointFolder, step: int | None = None) -> tuple[int, tuple[CorruptCheckpoint, ...]]:
        """Brings the newest copy that is whole, or that of `step`, into a folder without checkpoints.

        Returns:
            Its step, and what is wrong with newer ones.

        Raises:
            UsageError: there is none.
            CorruptCheckpoint: there are some, and none is whole.
            OSError: of the folder's disk.
        """
        steps, wrong = self.steps(), list[CorruptCheckpoint]()
        for number in reversed(steps if step is None else [other for other in steps if other == step]):
            try:
                self._bring(folder, number)
                return number, tuple(wrong)
            except ValueError as error:
                folder.abandon(number)
                wrong.append(CorruptCheckpoint(f"{self.url}/{folder_name(number)}", str(error)))
        if wrong:
            raise wrong[0]
        there = f"; there are steps {', '.join(map(str, steps))}" if steps else ""
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UsageError(f"there is {which} at {self.url}{there}; begin without resume, or name another address")

    def _bring(self, folder: CheckpointFolder, step: int) -> None:
        """Raises a ValueError that says what is wrong with the copy."""
        with self._serving("read"):
            content = self._manifest(step)
        if content is None:
            raise ValueError(f"it has no {manifest.NAME}: it was not copied to its end")
        listed = manifest.decode(content)
        if listed.step != step:
            raise ValueError(f"it is of step {listed.step}, its folder of step {step}: they were exchanged")
        folder.begin(step)
        for record in listed.files:
            folder.write_copy(step, record, self._chunks(step, record))
        folder.commit(step, listed.files, listed.description, keep=1)

    def _manifest(self, step: int) -> bytes | None:
        """Returns the content of a copy's manifest, or its beginning if it is too long; None if there is none."""
        try:
            with self._system.open(self._place(step, manifest.NAME), "rb") as file:
                # One byte more than allowed, for `decode` to see.
                return bytes(file.read(manifest.MOST_BYTES + 1))
        except FileNotFoundError:
            return None

    def _chunks(self, step: int, record: FileRecord) -> Iterator[bytes]:
        """Yields a file's content, of the length that is recorded; else a ValueError."""
        place = self._place(step, record.name)
        with self._serving("read"):
            try:
                size = self._system.info(place)["size"]
            except FileNotFoundError:
                size = None
        if size is None:
            raise ValueError(f"{record.name} is missing: it was not copied to its end")
        if size != record.bytes:
            raise ValueError(f"{record.name} has {size:,} bytes, saved were {record.bytes:,}")
        left = record.bytes
        with self._serving("read"), self._system.open(place, "rb") as file:
            while left and (chunk := file.read(min(left, CHUNK))):
                left -= len(chunk)
                yield chunk

    def _write(self, place: str, chunks: Iterable[memoryview], size: int) -> None:
        with self._system.open(place, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        nbytes = self._system.info(place)["size"]
        if nbytes != size:
            raise OSError(f"{place} has {nbytes:,} bytes after {size:,} were written")

    def _steps(self) -> tuple[int, ...]:
        # Clients keep what they have listed, and other processes write there, too.
        self._system.invalidate_cache()
        try:
            names = self._system.ls(self._root, detail=False)
        except FileNotFoundError:
            return ()
        numbers = (step_of(name.rstrip("/").rpartition("/")[2]) for name in names)
        return tuple(sorted(step for step in numbers if step is not None))

    def _counts(self, step: int) -> bool:
        return bool(self._system.exists(self._place(step, manifest.NAME)))

    def _delete(self, step: int) -> None:
        if step not in self._steps():
            return
        # First of all, so that what a crash leaves does not count.
        if self._counts(step):
            self._system.rm_file(self._place(step, manifest.NAME))
        if step in self._steps():
            self._system.rm(self._place(step), recursive=True)

    def _make_folder(self, place: str) -> None:
        if self._has_folders:
            self._system.makedirs(place, exist_ok=True)

    def _place(self, step: int, name: str = "") -> str:
        return f"{self._root}/{folder_name(step)}/{name}".rstrip("/")

    @contextmanager
    def _serving(self, what: str) -> Iterator[None]:
        try:
            yield
        except HeadraceError:
            raise
        except Exception as error:  # clients of file systems have their own errors
            said = " ".join((str(error) or repr(error)).split())[:_MOST_WORDS]
            raise UnfitMachine(
                f"{self.url} cannot be {what}: {said}; check the address, the credentials and the network"
            ) from error
