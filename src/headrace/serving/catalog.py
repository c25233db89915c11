"""The models of a server: each has one or several versions, and new ones are loaded while the server runs."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import DataError, HeadraceError, UsageError
from headrace.export.signature import NAME, Signature, read
from headrace.export.tensors import Array, check_lengths, not_finite
from headrace.machine import disk
from headrace.serving.batcher import Batcher, Compute
from headrace.serving.metrics import ServerMetrics
from headrace.serving.programs import open_program
from headrace.serving.settings import RequestError, ServeSettings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_log = logging.getLogger("headrace.serve")


class LoadedVersion:
    """One version of a model that answers.

    Attributes:
        name, number: of the model, and the version's.
        facts: its signature.
    """

    def __init__(
        self,
        name: str,
        number: int,
        facts: Signature,
        compute: Compute,
        settings: ServeSettings,
        metrics: ServerMetrics,
    ) -> None:
        self.name, self.number, self.facts = name, number, facts
        self.batched = facts.batched
        labels = (name, str(number))
        batch, compute_s = metrics.batch.labels(*labels), metrics.compute.labels(*labels)

        def computed(rows: int, seconds: float) -> None:
            batch.observe(rows)
            compute_s.observe(seconds)

        self._not_finite = metrics.not_finite.labels(*labels)
        self._batcher = Batcher(compute, settings, self.batched, computed)
        self._metrics = metrics
        # Read when it is asked for.
        metrics.queue.labels(*labels).set_function(self._batcher.__len__)
        metrics.loaded.labels(*labels).set(1)

    async def predict(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Returns the outputs in the signature's order.

        Args:
            inputs: every one, in the signature's order, of its type and shape.

        Raises:
            RequestError: 400 for inputs of different lengths or without an example; 422 where the model cannot compute
                them, or returns NaN or infinity; 429 where too many wait.
        """
        try:
            rows = check_lengths(inputs, self.facts.inputs)
        except DataError as error:
            raise RequestError(400, str(error)) from None
        if rows == 0:
            raise RequestError(400, "there is no example; give one at least")
        waiting = self._batcher.submit(inputs, rows)
        try:
            outputs = await waiting
        except MemoryError:
            raise RequestError(422, f"{rows} examples of this size do not fit into memory; send fewer") from None
        except Exception as error:  # of the runtime, which has a class for each status
            _log.info("%s version %s cannot compute a request: %s", self.name, self.number, error)
            reason = str(error).rpartition("Status Message: ")[2] or type(error).__name__
            raise RequestError(422, f"the model cannot compute this input: {reason:.300}") from None
        for form, output in zip(self.facts.outputs, outputs, strict=True):
            if reason := not_finite(form.name, output, self.batched):
                self._not_finite.inc()
                raise RequestError(422, reason)
        return outputs

    def require_room(self) -> None:
        """Raises RequestError 429 where too many requests wait: before the body of another one is read."""
        self._batcher.require_room()

    async def close(self) -> None:
        """Answers what waits, and gives the memory back."""
        await self._batcher.close()
        self._metrics.forget(self.name, str(self.number))


@dataclass
class ServedModel:
    """A folder that `headrace export` has written, or one with such folders named 1, 2, ...

    Attributes:
        name: in the addresses.
        folder: where it lies.
        numbered: whether it has versions.
        versions: that answer, by number.
    """

    name: str
    folder: Path
    numbered: bool
    versions: dict[int, LoadedVersion] = field(default_factory=dict)
    _refused: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    def newest(self) -> LoadedVersion:
        """Returns the version that answers requests that name none."""
        if not self.versions:
            raise RequestError(503, f"no version of {self.name} is loaded", {"Retry-After": "1"})
        return self.versions[max(self.versions)]

    def version(self, number: str | None) -> LoadedVersion:
        """Returns a version; raises RequestError 404 where it is not loaded."""
        if number is None:
            return self.newest()
        version = self.versions.get(int(number)) if _NUMBER.fullmatch(number) else None
        if version is None:
            loaded = ", ".join(map(str, sorted(self.versions))) or "none"
            raise RequestError(404, f"{self.name} has no version {number[:20]!r}; loaded: {loaded}")
        return version

    def due(self, keep: int) -> list[int]:
        """Returns the numbers of the versions that should answer, the newest last; what was refused counts not."""
        if not self.numbered:
            return [1]
        numbers = sorted(int(path.name) for path in self.folder.iterdir() if _is_version(path))
        return [number for number in numbers if not self.refused(number)][-keep:]

    def path(self, number: int) -> Path:
        """Returns the folder of a version."""
        return self.folder / str(number) if self.numbered else self.folder

    def refused(self, number: int) -> bool:
        """Whether a version's folder is as it was when it was refused."""
        return number in self._refused and self._refused[number][0] == self.state(number)

    def reasons(self) -> dict[int, str]:
        """Returns why versions that are newer than all that answer are not loaded, by number."""
        newest = max(self.versions, default=0)
        return {
            number: reason for number, (_, reason) in self._refused.items() if number > newest and self.refused(number)
        }

    def state(self, number: int) -> tuple[int, ...]:
        """Returns what changes when the files of a version's folder do."""
        folder = self.path(number)
        try:
            return tuple(
                number
                for path in sorted(folder.iterdir())
                for number in (path.lstat().st_mtime_ns, path.lstat().st_size)
            )
        except OSError:
            return ()

    def refuse(self, number: int, state: tuple[int, ...], reason: str) -> None:
        """Remembers that, and why, a version's folder cannot be used as it was in some `state`."""
        self._refused[number] = state, reason


class Catalog:
    """All models of a server.

    Args:
        folders: of models; names must differ.

    Raises:
        UsageError: a folder does not exist, or two models have one name.
        DataError: a folder holds no model.
    """

    def __init__(self, folders: Sequence[Path], settings: ServeSettings, metrics: ServerMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.models: dict[str, ServedModel] = {}
        self._looking = asyncio.Lock()
        self._retired: set[asyncio.Task[None]] = set()
        for folder in folders:
            model = _served_model(folder)
            if model.name in self.models:
                raise UsageError(
                    f"{folder} and {self.models[model.name].folder} are both called {model.name}; put them as 1/ and "
                    "2/ into one folder if they are versions of one model, or one of them as 1/ into a folder of its "
                    "own, whose name it then has"
                )
            self.models[model.name] = model

    def model(self, name: str) -> ServedModel:
        """Returns a model; raises RequestError 404 where there is none of that name."""
        served = self.models.get(name)
        if served is None:
            raise RequestError(404, f"there is no model {name[:40]!r}; there are {', '.join(sorted(self.models))}")
        return served

    def find(self, names: Mapping[str, str]) -> tuple[ServedModel, LoadedVersion]:
        """Returns the model and the version that an address names; raises RequestError 404 or 503."""
        model = self.model(names["model"])
        return model, model.version(names.get("version"))

    async def load(self) -> None:
        """Loads the versions that are due; raises what is wrong with one."""
        for model in self.models.values():
            for number in await asyncio.to_thread(model.due, self._settings.keep):
                await self._load(model, number)

    async def watch(self) -> None:
        """Looks for versions that have come or gone, until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.poll_s)
            for model in self.models.values():
                await self.look(model)

    async def look(self, model: ServedModel) -> None:
        """Loads a model's new versions, and lets go of those that have gone."""
        async with self._looking:
            if model.numbered:
                await self._update(model)

    async def close(self) -> None:
        """Answers what waits, of every version."""
        for model in self.models.values():
            for version in model.versions.values():
                self._retire(version)
            model.versions = {}
        if self._retired:
            await asyncio.gather(*self._retired)

    async def _update(self, model: ServedModel) -> None:
        try:
            due = await asyncio.to_thread(model.due, self._settings.keep)
        except OSError as error:
            _log.warning("%s cannot be read, its versions stay: %s", model.folder, error)
            return
        for number in due:
            if number in model.versions:
                continue
            # Before it is read, which may be before it has been copied to its end.
            state = await asyncio.to_thread(model.state, number)
            try:
                await self._load(model, number)
            except (HeadraceError, OSError) as error:
                _log.warning("version %d of %s is not loaded: %s", number, model.name, error)
                model.refuse(number, state, f"{error!s:.500}")
                # An older one stays in its place, or is loaded at the next look.
                return
        # The last one stays, even where its folder is gone.
        for number in [number for number in model.versions if number not in due] if due else []:
            _log.info("version %d of %s goes", number, model.name)
            self._retire(model.versions.pop(number))

    async def _load(self, model: ServedModel, number: int) -> None:
        settings = self._settings
        path = model.path(number)
        facts, compute = await asyncio.to_thread(open_program, path, settings.threads, settings.trust_pt2)
        _log.info("version %d of %s is loaded", number, model.name)
        model.versions[number] = LoadedVersion(model.name, number, facts, compute, settings, self._metrics)

    def _retire(self, version: LoadedVersion) -> None:
        task = asyncio.create_task(version.close())
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)


def _served_model(folder: Path) -> ServedModel:
    if not disk.is_folder(folder):
        raise UsageError(
            f"{folder} {'is no folder' if disk.exists(folder) else 'does not exist'}; name exported models"
        )
    folder = folder.resolve()
    if disk.exists(folder / NAME):
        name, numbered = read(folder).name, False
    elif any(_is_version(path) for path in folder.iterdir()):
        name, numbered = folder.name, True
    else:
        raise DataError(
            f"{folder} holds no {NAME}, nor folders 1, 2, ... with one; name a folder that `headrace export` has "
            "written"
        )
    if not _NAME.fullmatch(name):
        raise DataError(f"{name[:100]!r} cannot be a model's name in an address: letters, digits, '_', '.', '-'")
    return ServedModel(name, folder, numbered)


def _is_version(path: Path) -> bool:
    return bool(_NUMBER.fullmatch(path.name)) and not path.is_symlink() and disk.exists(path / NAME)
