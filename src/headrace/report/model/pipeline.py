"""A pipeline: the lines on its plan, and a step as its stages did it and as its schedule would have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from headrace.errors import DataError
from headrace.pipeline.schedules.schedule import Action, ActionSpan, PassKind, bubble, timed
from headrace.report.format import byte_count, percent, plural, short
from headrace.report.model.events import Attempt, of_kind
from headrace.spec.events import PipelineStepTimed, StagePass
from headrace.spec.plan import Plan


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

        Each kind of pass takes its measured mean. Raises DataError if the passes are no schedule.
        """
        worked = self._worked(lambda each: _kind(each))
        return self._timed(lambda action: worked[action.kind])

    def _worked(self, key: Callable[[StagePass], object]) -> dict[object, float]:
        """Returns the mean time of the passes that have the same key, seconds."""
        found: dict[object, list[float]] = defaultdict(list)
        for passes in self.passes.values():
            for each in passes:
                found[key(each)].append(_worked_s(each))
        return {each: fmean(times) for each, times in found.items()}

    def _timed(self, duration: Callable[[Action], float]) -> tuple[ActionSpan, ...]:
        orders = [
            [Action(each.stage, each.micro_batch, _kind(each)) for each in self.passes[rank]]
            for rank in sorted(self.passes)
        ]
        try:
            return timed(orders, duration)
        except ValueError as error:
            raise DataError(f"the passes of step {self.step} in the event files are no schedule: {error}") from error

    @property
    def scheduled_bubble(self) -> float:
        return bubble(self.scheduled)

    @property
    def uneven_bubble(self) -> float:
        """The same if transfers took no time, and each stage the time that it takes."""
        worked = self._worked(lambda each: (each.stage, _kind(each)))
        return bubble(self._timed(lambda action: worked[action.stage, action.kind]))


def passed_of(attempts: Sequence[Attempt]) -> PipelineStep | None:
    """Returns the step of median length among those that the last attempt's first replica has reported, or None."""
    last = attempts[-1]
    timed_steps = [event for event in of_kind(PipelineStepTimed, last.events) if event.passes]
    if not timed_steps:
        return None
    plan = last.plan
    ranks = {role.rank for role in plan.roles if role.computes and role.data_rank == 0}
    reported: dict[int, dict[int, PipelineStepTimed]] = defaultdict(dict)
    for event in timed_steps:
        if event.rank in ranks:
            reported[event.step][event.rank] = event
    whole = [
        PipelineStep(
            step,
            {rank: by_rank[rank].passes for rank in sorted(by_rank)},
            {rank: by_rank[rank].in_flight for rank in sorted(by_rank)},
            tuple(stage.seconds for stage in plan.stages),
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


_MOST_NAMED = 8


def replica_lines(plan: Plan) -> list[str]:
    """Returns a line with the ranks of each replica and its servers; none for one replica or one rank each."""
    ranks = plan.workers // max(1, plan.replicas)
    if ranks == 1 or plan.replicas == 1:
        return []
    what = "stage" if plan.partition else "slice"
    each = [f"{first} to {first + ranks - 1}" for first in range(0, plan.workers, ranks)]
    line = f"{plan.replicas} replicas of {ranks} ranks: {', '.join(_some(each))}"
    if plan.servers:
        serve = [f"rank {rank} of {what} {plan.role(rank).stage}" for rank in plan.servers]
        line += f"; servers: {', '.join(_some(serve))}"
    return [line]


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]


def stage_lines(plan: Plan) -> list[str]:
    """Returns a line for each stage of a pipeline: its layers, and its time and memory by the profile."""
    total = sum(stage.seconds for stage in plan.stages)
    lines = []
    for index, (names, stage) in enumerate(zip(plan.partition, plan.stages, strict=True)):
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        took = f"{short(stage.seconds * 1e3)} ms a micro-batch ({percent(stage.seconds / total)}), " if total else ""
        received = f", gets {byte_count(stage.received_bytes)}" if stage.received_bytes else ""
        lines.append(
            f"stage {index}: {plural(stage.layers, 'layer')}, {which}: {took}"
            f"{byte_count(stage.parameter_bytes)} of parameters, {byte_count(stage.bytes)} in all{received}"
        )
    return lines
