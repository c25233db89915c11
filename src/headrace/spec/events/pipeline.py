"""The evidence of a pipeline: when each stage worked on which micro-batch, and how long it waited."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec.events.base import Event


@dataclass(frozen=True)
class StagePass:
    """One micro-batch through one stage, forward or backward.

    Attributes:
        stage, micro_batch: which.
        backward: in which direction.
        began_s, ended_s: on the clock of the run, or of the host where nobody has told it.
        waited_s: of that, for what other stages make.
    """

    stage: int
    micro_batch: int
    backward: bool
    began_s: float
    ended_s: float
    waited_s: float


@dataclass(frozen=True)
class PipelineStepTimed(Event):
    """By a worker of a pipeline, after some of its steps.

    Attributes:
        step: counted from 0 over the whole run.
        in_flight: most micro-batches so far whose activations waited for their backward at a time.
        passes: of this worker in this step, in order.
    """

    kind = "passed"
    step: int
    in_flight: int
    passes: tuple[StagePass, ...]
