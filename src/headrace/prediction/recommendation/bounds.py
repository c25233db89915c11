"""A time that a candidate cannot beat, from sums alone: one that is too slow even so need not be simulated.

    rank 0   F0 F1 F2 .  .  .  .  .  B0 B1 B2       a step is at least: the first micro-batch's way to the slowest
    rank 1   .  F0 F1 F2 B0 B1 B2 .  .  .  .        stage, all that this stage does, and the last one's way back

With servers it is at least the time of the steps alone, and of all messages through one server's card.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.pipeline.schedules.schedule import PassKind, PipelineSchedule
from headrace.policies.behaviour import ParameterMean, ServerTerms, Stages
from headrace.prediction.simulation.scene import Scene, Seconds
from headrace.prediction.simulation.served import ServedRun
from headrace.prediction.simulation.slices.steps import device_steps
from headrace.prediction.simulation.staged import (
    between_replicas,
    gradient_bytes,
    pass_factors,
    stages_of,
    update_seconds,
)
from headrace.prediction.simulation.sweep import StageTimes

_ROUNDING = 1 - 1e-9


def least_step_s(scene: Scene) -> float:
    """Returns a time of a round that a simulation of the same scene does not go below; 0 where it has no bound."""
    exchange, division = scene.behaviour.exchange, scene.behaviour.division
    if isinstance(exchange, ServerTerms) and not division:
        leases = -(-scene.assumptions.steps // exchange.span)
        return _ROUNDING * ServedRun(scene, device_steps(scene), exchange).least_s() / (leases * exchange.span)
    if not isinstance(division, Stages) or division.slices > 1:
        return 0.0
    every_round = not isinstance(exchange, ParameterMean | ServerTerms)
    return _ROUNDING * _least_staged_s(scene, every_round) / scene.assumptions.steps


def _least_staged_s(scene: Scene, every_round: bool) -> float:
    """Returns that of all rounds together."""
    schedule, replicas, rounds = scene.schedule, scene.replicas, scene.assumptions.steps
    ranks, count = schedule.ranks, schedule.micro_batches
    stages, needed, _ = stages_of(scene)
    factors = pass_factors(scene)
    passes = np.zeros(ranks)
    for stage, each in enumerate(stages):
        passes[schedule.rank_of(stage)] += count * (each.forward_s + each.input_s + each.weight_s)
    # Of each rank in each round, (rounds, replicas, ranks).
    busy = factors * passes
    if schedule.stages() == ranks:
        busy[:, :, 0] = np.maximum(busy[:, :, 0], _through_s(schedule, stages, factors))
    sizes = gradient_bytes(scene, needed)
    update_s = update_seconds(scene, sizes)
    if not every_round or replicas == 1:
        return float((busy.sum(axis=0) + rounds * update_s).max())
    synced_s = [between_replicas(scene, rank).seconds(sizes[rank]) for rank in range(ranks)]
    return float((busy.max(axis=1) + synced_s + update_s.min(axis=0)).sum(axis=0).max())


def _through_s(schedule: PipelineSchedule, stages: Sequence[StageTimes], factors: Seconds) -> Seconds:
    """Returns what a round takes rank 0 at least, whose last input gradient comes through all stages."""
    forward, input_, weight, transfer = np.array(
        [(each.forward_s, each.input_s, each.weight_s, each.transfer_s) for each in stages]
    ).T
    # Where a schedule does both parts of backward together, the gradient waits for both.
    apart = any(action.kind is PassKind.BACKWARD_INPUT for action in schedule.actions(0))
    back = input_ if apart else input_ + weight
    ways = (forward + back) * factors + 2 * transfer
    before = np.cumsum(ways, axis=2) - ways
    longest: Seconds = (before + schedule.micro_batches * (forward + back) * factors).max(axis=2)
    return longest
