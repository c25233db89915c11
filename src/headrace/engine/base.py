"""The interface of every engine: it runs what a `RunSpec` says, on processes or threads that it starts or has met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    # For the type alone: it imports torch, and an engine starts before that.
    from headrace.shared_memory.control_page import ControlPage


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        step: rounds that the foremost rank has done.
        loss: the last of the first rank that has one; 0 before there is one.
        examples: of all workers so far.
    """

    step: int
    loss: float
    examples: int

    @classmethod
    def read(cls, page: ControlPage) -> RunProgress:
        """Returns the progress that the ranks' heartbeats tell."""
        heartbeats = [record.heartbeat for record in page.ranks]
        loss = next((heartbeat.loss for heartbeat in heartbeats if heartbeat.loss), 0.0)
        return cls(max(each.step for each in heartbeats), loss, sum(each.examples for each in heartbeats))


class Engine(ABC):
    """Starts the processes of a run and watches them."""

    @abstractmethod
    def run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        """Runs to the end; returns "ok" or "interrupted".

        Args:
            order: what to run.
            progress: called a few times a second in the caller's thread.

        Raises:
            WorkerFailed: a worker raised; the first that did.
            PeerLost: a worker was killed, or froze.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every process of this engine."""
