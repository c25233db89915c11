"""Replicas that several ranks hold together: slices of layers, or stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from headrace.collectives.base import ProcessGroup
from headrace.spec.model import ModelSpec
from headrace.training.compute import Compute
from headrace.training.exchange import Replica
from headrace.training.gradients import GradientSink
from headrace.training.whole_model import WholeModel


class ModelParallelGroup(ABC):
    """How the ranks that hold one replica together compute: this rank's part of it.

    Attributes:
        group: the ranks of this replica.
        everyone: the ranks of all replicas.
        repeated: names of the parameters that every rank of a replica holds.
        model: what this rank holds.
        piecewise: whether a parameter's gradient is added up from micro-batch to micro-batch.
    """

    piecewise: ClassVar[bool] = False
    group: ProcessGroup
    everyone: ProcessGroup
    repeated: frozenset[str]
    model: ModelSpec

    @abstractmethod
    def compute(self, whole: WholeModel, sink: GradientSink | None) -> Compute:
        """Returns what computes this rank's part.

        Args:
            whole: how one rank would compute all.
            sink: takes the gradients; None leaves them in `.grad`.
        """

    def spread(self) -> None:
        """Gives each rank of the replica the values of what it holds and another one owns; all ranks call it."""
        raise NotImplementedError("no rank owns what several ranks of this replica hold")

    @abstractmethod
    def finish(self, replica: Replica) -> Replica:
        """Returns a replica of which whole tensors are saved and loaded, of one of what this rank holds."""
