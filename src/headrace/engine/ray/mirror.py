"""Brings what processes write on nodes that do not see the run's directory to the process that shows the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

MODEL = "model.safetensors"
_ASK_EVERY_S = 1.0


class FolderMirror:
    """Copies events and logs from folders of other nodes to the run's directory, as they grow.

    Args:
        run_dir: to which they come.
        folders: by node, an agent there and the folder that its processes write to.
    """

    def __init__(self, run_dir: Path, folders: Mapping[str, tuple[Any, str]]) -> None:
        self._run_dir = run_dir
        self._folders = folders
        self._read: dict[str, dict[str, int]] = {host: {} for host in folders}
        self._asked: dict[str, Any] = {}
        self._asked_at = 0.0

    def look(self) -> None:
        """Copies what has come since the last call, and asks for more; waits for no node."""
        import ray

        if monotonic() - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = monotonic()
        for host, (agent, folder) in self._folders.items():
            asked = self._asked.get(host)
            if asked is None or ray.wait([asked], timeout=0)[0]:
                self._take(host)
                self._asked[host] = agent.files.remote(folder, self._read[host])

    def finish(self, within_s: float) -> None:
        """Copies the rest, and the model."""
        import ray

        for host, (agent, folder) in self._folders.items():
            self._take(host)
            try:
                self._asked[host] = agent.files.remote(folder, self._read[host])
                ray.wait([self._asked[host]], timeout=within_s)
                self._take(host)
                model = ray.get(agent.file.remote(f"{folder}/{MODEL}"), timeout=within_s)
            except ray.exceptions.RayError:
                continue  # the node is lost, and its files with it
            if model is not None and not (self._run_dir / MODEL).exists():
                (self._run_dir / MODEL).write_bytes(model)

    def _take(self, host: str) -> None:
        import ray

        asked = self._asked.pop(host, None)
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
            self._read[host][name] = self._read[host].get(name, 0) + len(content)
