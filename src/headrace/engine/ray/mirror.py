"""Brings what processes write on nodes that do not see the run's directory to the process that shows the run."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

from headrace.machine import disk
from headrace.worker.run_spec import model_path

_ASK_EVERY_S = 1.0

_Source = tuple[int, str]
"""A rank, and the folder of its node that its process writes to."""


class FolderMirror:
    """Copies events and logs from folders of other nodes to the run's directory, as they grow.

    Args:
        run_dir: to which they come.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sources: dict[_Source, Any] = {}
        self._read: dict[_Source, dict[str, int]] = {}
        self._asked: dict[_Source, Any] = {}
        self._asked_at = 0.0

    def follow(self, rank: int, agent: Any, folder: str) -> None:
        """Begins to copy from a folder of a rank's node, beside those of the rank's earlier processes."""
        if folder != str(self._run_dir) and (rank, folder) not in self._sources:
            self._sources[rank, folder], self._read[rank, folder] = agent, {}

    def look(self) -> None:
        """Copies what has come since the last call, and asks for more; waits for no node."""
        import ray

        if monotonic() - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = monotonic()
        for source, agent in self._sources.items():
            asked = self._asked.get(source)
            if asked is None or ray.wait([asked], timeout=0)[0]:
                self._take(source)
                self._asked[source] = agent.files.remote(source[1], self._read[source])

    def finish(self, within_s: float) -> None:
        """Copies the rest, and the model."""
        import ray

        if not self._sources:
            return
        models = []
        for source, agent in self._sources.items():
            self._take(source)
            self._asked[source] = agent.files.remote(source[1], self._read[source], True)
            models.append(agent.file.remote(str(model_path(Path(source[1])))))
        # Together, because an agent whose node is lost may not answer.
        asked = [*self._asked.values(), *models]
        ray.wait(asked, num_returns=len(asked), timeout=within_s)
        for source in self._sources:
            self._take(source)
        for each in models:
            try:
                model = ray.get(each, timeout=0)
            except ray.exceptions.RayError:
                continue  # the node is lost, and its files with it
            if model is not None and not disk.exists(model_path(self._run_dir)):
                model_path(self._run_dir).write_bytes(model)

    def _take(self, source: _Source) -> None:
        import ray

        asked = self._asked.pop(source, None)
        if asked is None:
            return
        try:
            found = ray.get(asked, timeout=0)
        except ray.exceptions.RayError:
            return  # the node is lost
        for name, content in found.items():
            path = self._run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as stream:
                stream.write(content)
            self._read[source][name] = self._read[source].get(name, 0) + len(content)
