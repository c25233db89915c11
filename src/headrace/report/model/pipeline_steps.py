"""A step of a pipeline as its stages did it, and as its schedule would have them: who worked on what, who idled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, cast

from headrace.pipeline.schedules import Action, ActionSpan, PassKind, bubble, timed
from headrace.report.model.events import Attempt, of_kind
from headrace.spec.events import PipelineStepTimed, StagePass


@dataclass(frozen=True)
class PipelineStep:
    """One step of one replica: the passes of each rank, in order; at least one rank has some.

    `in_flight` is the most micro-batches of a rank whose activations waited for their backward at a time; `expected_s`
    is the profiled time of each stage for a micro-batch, () without a profile.
    """

    step: int
    passes: Mapping[int, tuple[StagePass, ...]]
    in_flight: Mapping[int, int]
    expected_s: tuple[float, ...] = ()

    @property
    def stage_s(self) -> dict[int, float]:
        """The mean time of each stage for a micro-batch, forward and backward."""
        worked: dict[int, float] = defaultdict(float)
        for passes in self.passes.values():
            for each in passes:
                worked[each.stage] += _worked_s(each) / self.micro_batches
        return dict(sorted(worked.items()))

    @property
    def began_s(self) -> float:
        """When the first pass began, on the run's clock."""
        return min(each.began_s for passes in self.passes.values() for each in passes)

    @property
    def seconds(self) -> float:
        """From the begin of the first pass to the end of the last."""
        return max(each.ended_s for passes in self.passes.values() for each in passes) - self.began_s

    @property
    def micro_batches(self) -> int:
        return len({each.micro_batch for passes in self.passes.values() for each in passes})

    @property
    def bubble(self) -> float:
        """The mean part of the time in which the ranks worked on no micro-batch."""
        busy = sum(_worked_s(each) for passes in self.passes.values() for each in passes)
        return 1.0 - busy / (self.seconds * len(self.passes)) if self.seconds else 0.0

    @cached_property
    def scheduled(self) -> tuple[ActionSpan, ...]:
        """The same passes in the same order if all stages took the same time and transfers none, in seconds.

        Each kind of pass takes its measured mean.
        """
        ranks = sorted(self.passes)
        every = [each for passes in self.passes.values() for each in passes]
        worked = {kind: [_worked_s(each) for each in every if _kind(each) is kind] for kind in PassKind}
        orders = [[Action(each.stage, each.micro_batch, _kind(each)) for each in self.passes[rank]] for rank in ranks]
        return timed(orders, lambda action: fmean(worked[action.kind]))

    @property
    def scheduled_bubble(self) -> float:
        return bubble(self.scheduled)


def passed_of(attempts: Sequence[Attempt]) -> PipelineStep | None:
    """Returns the step of median length among those that the last attempt's first replica has reported, or None."""
    last = attempts[-1]
    roles = cast(Sequence[Mapping[str, Any]], last.started.plan.get("roles", ()))
    ranks = {role["rank"] for role in roles if role["kind"] == "worker" and role["data_rank"] == 0}
    reported: dict[int, dict[int, PipelineStepTimed]] = defaultdict(dict)
    for event in of_kind(PipelineStepTimed, last.events):
        if event.rank in ranks and event.passes:
            reported[event.step][event.rank] = event
    stages = cast(Sequence[Mapping[str, Any]], last.started.plan.get("stages", ()))
    whole = [
        PipelineStep(
            step,
            {rank: by_rank[rank].passes for rank in sorted(by_rank)},
            {rank: by_rank[rank].in_flight for rank in sorted(by_rank)},
            tuple(stage["seconds"] for stage in stages),
        )
        for step, by_rank in sorted(reported.items())
        if by_rank.keys() == ranks
    ]
    return sorted(whole, key=lambda each: each.seconds)[len(whole) // 2] if whole else None


def _kind(each: StagePass) -> PassKind:
    if not each.backward:
        return PassKind.FORWARD
    return {"input": PassKind.BACKWARD_INPUT, "weights": PassKind.BACKWARD_WEIGHT}.get(each.part, PassKind.BACKWARD)


def _worked_s(each: StagePass) -> float:
    return each.ended_s - each.began_s - each.waited_s
