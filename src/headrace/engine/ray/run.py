"""One run on a Ray cluster: what each rank is told, and what of its files comes back."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.util.metrics import Gauge

from headrace.devices import DEVICES, GPU
from headrace.engine.base import RunProgress, Stoppable
from headrace.engine.ray.connection import answers
from headrace.engine.ray.mirror import FolderMirror
from headrace.engine.ray.nodes import RankPlace, device_of
from headrace.engine.ray.watch import RankWatch
from headrace.engine.schedulers.environment import LAUNCHER
from headrace.engine.shipping import pack
from headrace.engine.torchrun.address import START_TIMEOUT
from headrace.engine.torchrun.elastic_workers.leader_file import STORE
from headrace.engine.torchrun.secret import SECRET
from headrace.errors import UsageError
from headrace.machine.identity import machine_identity
from headrace.worker.run_spec import RunSpec

_ANSWER_S = 30.0
_TAGS = ("run", "strategy")


class RunGauges:
    """Steps, examples and the loss of one run, as gauges of Ray's metrics with the run's directory and strategy."""

    def __init__(self, spec: RunSpec) -> None:
        tags = {"run": spec.run_dir.name, "strategy": spec.plan.strategy}
        self._step = Gauge("headrace_step", "Steps that are done.", _TAGS)
        self._examples = Gauge("headrace_examples", "Examples that all workers have done.", _TAGS)
        self._loss = Gauge("headrace_loss", "The last loss of the first worker that has one.", _TAGS)
        for gauge in (self._step, self._examples, self._loss):
            gauge.set_default_tags(tags)

    def show(self, progress: RunProgress) -> None:
        """Sets the gauges."""
        self._step.set(progress.step)
        self._examples.set(progress.examples)
        if progress.loss is not None:
            self._loss.set(progress.loss)


class RayRun:
    """Starts the processes of one run by their agents, which are by rank, and follows them.

    Attributes:
        mirror: brings the files of nodes that do not see the run's directory.
    """

    def __init__(self, spec: RunSpec, agents: Sequence[Any], places: Sequence[RankPlace], encrypt: bool) -> None:
        self._spec, self._agents, self._places = spec, agents, places
        self._encrypt = encrypt
        self._hosts = {place.node: place.host for place in places}
        code, memory, _ = pack(spec)
        with os.fdopen(memory, "rb") if memory >= 0 else tempfile.TemporaryFile() as data:
            self._shipped = ray.put(code), ray.put(data.read())
        # By it a node sees whether it has the run's directory.
        self._mark = tempfile.NamedTemporaryFile(dir=spec.run_dir, prefix="seen-")  # noqa: SIM115  (as long as the run)
        self._wanted = str(spec.run_dir), Path(self._mark.name).name
        folders = answers([agent.folder.remote(*self._wanted) for agent in agents], _ANSWER_S)
        unseen = {place.host for place, folder in zip(places, folders, strict=True) if folder != str(spec.run_dir)}
        if unseen and (spec.checkpoints or spec.resume):
            raise UsageError(
                f"{spec.run_dir} is not there on {', '.join(sorted(unseen))}, and checkpoints are saved to a directory "
                "that all nodes see; name a run_dir on a file system of all nodes, or save nothing "
                "(checkpoints=False, --checkpoint-every 0)"
            )
        self.mirror = FolderMirror(spec.run_dir)
        first = places[0]
        port = answers(agents[0].free_port.remote(first.address), _ANSWER_S)
        self._launched = {
            # Where srun has started Ray's nodes, its variables are not of this run.
            LAUNCHER: "ray",
            "WORLD_SIZE": str(len(agents)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(port),
            SECRET: secrets.token_hex(32),
            # What their errors name as the remedy.
            **{name: os.environ[name] for name in (START_TIMEOUT,) if name in os.environ},
        }

    def follow(self, flag: Stoppable, progress: Callable[[RunProgress], None]) -> str:
        """Returns how the run has ended; raises for the first process that failed."""

        def write_to(rank: int, folder: str) -> None:
            self.mirror.follow(rank, self._agents[rank], folder)

        watch = RankWatch(self._spec, self._agents, flag, self._start, progress, write_to, self._hosts)
        try:
            watch.follow()
            return watch.status
        finally:
            self.mirror.finish(_ANSWER_S)
            self._mark.close()

    def _start(self, rank: int, store: str, node: str, gpus: str = "") -> Any:
        """Has a rank's process begin, which joins the others at a `store` other than rank 0's where one is named.

        `node` is where it is; "" for the one of the plan. `gpus` are those that Ray has given to an agent that it has
        started again. Returns what its agent will tell.
        """
        place, spec = self._places[rank], self._spec
        environment = {**self._launched, "RANK": str(rank), "HEADRACE_HOST": place.host}
        if place.gpus:
            environment[DEVICES[GPU].visible] = gpus or place.gpus
        if store:
            environment[STORE] = store
        request = {
            "environment": environment,
            "directory": os.getcwd(),
            "path": [path for path in sys.path if path],
            "machine": machine_identity().partition(" ")[0],
            "passed_s": monotonic() - spec.started,
            "node": node,
            "device": device_of([*gpus.split(",")], gpus.split(",")) if gpus else (),
            "run_dir": self._wanted[0],
            "mark": self._wanted[1],
            "encrypt": self._encrypt,
            "threads": spec.plan.role(rank).threads,
        }
        return self._agents[rank].begin.remote(request, *self._shipped)
