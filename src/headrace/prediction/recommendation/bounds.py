"""A time that a candidate cannot beat, from sums alone: one that is too slow even so need not be simulated.

    rank 0   F0 F1 F2 .  .  .  .  .  B0 B1 B2       a step is at least: the first micro-batch's way to the slowest
    rank 1   .  F0 F1 F2 B0 B1 B2 .  .  .  .        stage, all that this stage does, and the last one's way back

With servers it is at least the time of the steps alone, and of all messages through one server's card.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.pipeline.schedules.schedule import PassKind
from headrace.prediction.simulation.behaviour import device_steps, pipeline_terms, server_terms
from headrace.prediction.simulation.scene import Scene, Seconds
from headrace.prediction.simulation.served import ServedRun
from headrace.prediction.simulation.staged import (
    PipelineTerms,
    between_replicas,
    gradient_bytes,
    pass_factors,
    stages_of,
    update_seconds,
)
from headrace.prediction.simulation.sweep import StageTimes
from headrace.strategies import Downpour, Hybrid, Mirrored, ParameterServer, Pipeline, Strategy

_ROUNDING = 1 - 1e-9


def least_step_s(strategy: Strategy, scene: Scene) -> float:
    """Returns a time of a round that a simulation of the same scene does not go below; 0 where it has no bound."""
    if isinstance(strategy, ParameterServer | Downpour):
        terms = server_terms(strategy, scene.workers)
        leases = -(-scene.assumptions.steps // terms.span)
        return _ROUNDING * ServedRun(scene, device_steps(scene), terms).least_s() / (leases * terms.span)
    inner = strategy.inner if isinstance(strategy, Hybrid) else strategy
    if not isinstance(inner, Pipeline):
        return 0.0
    every_round = not isinstance(strategy, Hybrid) or isinstance(strategy.outer, Mirrored)
    replicas = scene.workers // inner.processes().workers
    terms_ = pipeline_terms(inner, scene, replicas)
    return _ROUNDING * _least_staged_s(scene, terms_, replicas, every_round) / scene.assumptions.steps


def _least_staged_s(scene: Scene, terms: PipelineTerms, replicas: int, every_round: bool) -> float:
    """Returns that of all rounds together."""
    schedule = terms.schedule
    ranks, count = schedule.ranks, schedule.micro_batches
    stages, needed, _ = stages_of(scene, terms, replicas)
    rounds = scene.assumptions.steps
    factors = pass_factors(scene, schedule, replicas)
    passes = np.zeros(ranks)
    for stage, each in enumerate(stages):
        passes[schedule.rank_of(stage)] += count * (each.forward_s + each.input_s + each.weight_s)
    # Of each rank in each round, (rounds, replicas, ranks).
    busy = factors * passes
    if schedule.stages() == ranks:
        busy[:, :, 0] = np.maximum(busy[:, :, 0], _through_s(terms, stages, factors))
    sizes = gradient_bytes(scene.model, schedule, needed)
    update_s = update_seconds(scene, replicas, sizes)
    if not every_round or replicas == 1:
        return float((busy.sum(axis=0) + rounds * update_s).max())
    synced_s = [between_replicas(scene, rank, ranks, replicas).seconds(sizes[rank]) for rank in range(ranks)]
    return float((busy.max(axis=1) + synced_s + update_s.min(axis=0)).sum(axis=0).max())


def _through_s(terms: PipelineTerms, stages: Sequence[StageTimes], factors: Seconds) -> Seconds:
    """Returns what a round takes rank 0 at least, whose last input gradient comes through all stages."""
    forward, input_, weight, transfer = np.array(
        [(each.forward_s, each.input_s, each.weight_s, each.transfer_s) for each in stages]
    ).T
    # Where a schedule does both parts of backward together, the gradient waits for both.
    apart = any(action.kind is PassKind.BACKWARD_INPUT for action in terms.schedule.actions(0))
    back = input_ if apart else input_ + weight
    ways = (forward + back) * factors + 2 * transfer
    before = np.cumsum(ways, axis=2) - ways
    longest: Seconds = (before + terms.schedule.micro_batches * (forward + back) * factors).max(axis=2)
    return longest
