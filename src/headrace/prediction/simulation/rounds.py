"""Workers that each have the whole model and exchange gradients in every round, or parameters every few rounds.

forward  backward          update
────────█████████░░░░░░░░░░▓▓       a bucket of gradients leaves when the slowest worker has it,
           └ bucket 0 ──┐           and when the bucket before it is through
             └ bucket 1 ┴──┐
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.collectives.base import Collective
from headrace.collectives.multi_host import MultiHostGroup
from headrace.devices import HOST
from headrace.policies.behaviour import GradientSum
from headrace.policies.period import AutoPeriod, Measured, first_period, next_period
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.scene import DeviceStep, Scene, Seconds
from headrace.prediction.simulation.timeline import Timeline, of_rounds
from headrace.spec.events import ParametersAveraged
from headrace.spec.model import ModelSpec
from headrace.training.buckets import buckets as runs_of


@dataclass(frozen=True)
class ReplicaSteps:
    """What the steps of all replicas take, by round and replica."""

    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds


def replica_steps(scene: Scene, steps: Sequence[DeviceStep]) -> ReplicaSteps:
    """Returns the times of all rounds, given what a step of each replica takes on average."""
    factors = scene.variation(scene.assumptions.steps, len(steps))
    columns = np.array([(s.forward_s + s.fixed_s, s.backward_s, s.optimizer_s) for s in steps]).T
    return ReplicaSteps(columns[0] * factors, columns[1] * factors, np.broadcast_to(columns[2], factors.shape))


def synchronous(scene: Scene, steps: Sequence[DeviceStep], way: Way, overlap: bool, parts: int = 1) -> Timeline:
    """Simulates rounds that end with an all-reduce of the gradients.

    `parts` is the number of workers that share the update of the parameters (central storage), or that hold a replica
    together and each exchange their part.
    """
    times = replica_steps(scene, steps)
    computed = times.forward_s + times.backward_s
    size = scene.model.trainable_bytes
    slowest, sent_s = computed.max(axis=1), way.seconds(size)
    done = slowest + sent_s
    if overlap and way.moved:
        # Gradients leave while backward of the last micro-batch runs.
        last = 1 / max(1, scene.accumulate)
        done, sent_s = np.zeros(len(computed)), 0.0
        for share, part_bytes in buckets(scene.model, *_bucket_bytes(scene)):
            ready = (computed - (1 - share) * last * times.backward_s).max(axis=1)
            done = np.maximum(done, ready) + way.seconds(part_bytes)
            sent_s += way.seconds(part_bytes)
        done = np.maximum(done, slowest)
    if way.moved and scene.cluster.device != HOST:
        done = done + _memory_s(scene, way, size, np.maximum(0.0, slowest + sent_s - done))
    update_s = times.update_s / parts
    ended = np.cumsum(done + update_s.max(axis=1))
    exchange_s = done[:, None] - computed
    timeline = of_rounds(np.broadcast_to(ended[:, None], computed.shape), computed, exchange_s, update_s)
    return replace(timeline, moved_bytes=2 * way.moved * size)


def by_units(scene: Scene, steps: Sequence[DeviceStep], way: Way, overlap: bool) -> Timeline:
    """Simulates rounds in which a unit is gathered before it runs, and its gradients are summed after it has run.

    With `overlap` all but the first and the last unit's are under way while others run; a layer is taken for a unit.
    """
    times = replica_steps(scene, steps)
    computed, size = times.forward_s + times.backward_s, scene.model.parameter_bytes
    units = max(1, len(scene.model.layers))
    # Each gather and each sum is a message of its own.
    sent_s = units * way.seconds(size / units)
    slowest = computed.max(axis=1)
    done = slowest + sent_s
    if overlap:
        done = np.maximum(slowest, sent_s) + sent_s / units
    if scene.cluster.device != HOST:
        done = done + _memory_s(scene, way, size, np.maximum(0.0, slowest + sent_s - done))
    parts = scene.behaviour.exchange.parts if isinstance(scene.behaviour.exchange, GradientSum) else 1
    update_s = times.update_s / parts
    ended = np.cumsum(done + update_s.max(axis=1))
    timeline = of_rounds(np.broadcast_to(ended[:, None], computed.shape), computed, done[:, None] - computed, update_s)
    return without_rest(scene, replace(timeline, moved_bytes=2 * way.moved * size))


def without_rest(scene: Scene, timeline: Timeline) -> Timeline:
    """Returns a timeline without the bytes of gathers of what belongs to no unit, but for the first in a round."""
    exchange, known = scene.behaviour.exchange, scene.model.traffic
    if not isinstance(exchange, GradientSum) or exchange.parts < 2 or known is None:
        return timeline
    again = exchange.sent * (exchange.gathers - 1) * scene.network.gathered(scene.hosts, exchange.parts)
    return replace(timeline, moved_bytes=timeline.moved_bytes - 2 * again * known.rest_bytes)


def _memory_s(scene: Scene, way: Way, size: int, hidden_s: Seconds) -> Seconds:
    """Returns what gradients cost a device beside their way: its memory carries them, too.

    They are copied to buckets, read once and written once. What is sent while backward runs is read, added to what is
    there and written, and backward waits for the memory meanwhile.
    """
    rate = scene.assumptions.memory_bytes_per_s
    taken = min(1.0, 3 * way.moved / way.s_per_byte / rate) if way.s_per_byte else 0.0
    return 2 * size / rate + taken * hidden_s


def buckets(model: ModelSpec, first_bytes: int, most_bytes: int) -> list[tuple[float, int]]:
    """Returns the part of backward after which each bucket of gradients is complete, and its bytes.

    They are the runtime's, where layers say which parameters they have; gradients come from the last layer on. Without
    that they are assumed to come evenly.
    """
    whole_s = sum(layer.backward_s for layer in model.layers)
    ready: dict[str, float] = {}
    spent_s = 0.0
    for layer in reversed(model.layers):
        spent_s += layer.backward_s
        # A tied weight has its gradient when the first layer that uses it has.
        ready |= dict.fromkeys(layer.parameters, min(spent_s / whole_s, 1.0) if whole_s else 1.0)
    trained = model.trainable
    if not whole_s or any(each.name not in ready for each in trained):
        size = model.trainable_bytes
        count = max(1, -(-size // most_bytes))
        return [((place + 1) / count, size // count) for place in range(count)]
    sizes = [each.bytes for each in trained]
    return [
        (max(ready[each.name] for each in trained[start:stop]), sum(sizes[start:stop]))
        for start, stop in runs_of(sizes, first_bytes, most_bytes)
    ]


def _bucket_bytes(scene: Scene) -> tuple[int, int]:
    """Returns the bytes of gradients that are exchanged together: of the first bucket, and of a later one at most."""
    assumed = scene.assumptions.bucket_bytes
    if assumed:
        return assumed, assumed
    return MultiHostGroup.bucket_bytes if scene.cluster.device == HOST else Collective.bucket_bytes


def averaging(
    scene: Scene, steps: Sequence[DeviceStep], way: Way, target: int | AutoPeriod, post_local: int
) -> Timeline:
    """Simulates workers that step on their own, and average their parameters as the runtime's period says."""
    times = replica_steps(scene, steps)
    local_s = times.forward_s + times.backward_s + times.update_s
    rounds, workers = local_s.shape
    size = scene.model.trainable_bytes
    ended, exchange_s = np.zeros((rounds, workers)), np.zeros((rounds, workers))
    period, now, since, spent, last_s = first_period(target), np.zeros(workers), 0, np.zeros(workers), 0.0
    averaged: list[ParametersAveraged] = []
    for step in range(rounds):
        now = now + local_s[step]
        spent = spent + local_s[step]
        since += 1
        if since >= (1 if step < post_local else period.rounds) or step + 1 == rounds:
            last_s = way.seconds(size)
            together = float(now.max()) + last_s
            exchange_s[step] = together - now
            now = np.full(workers, together)
            period = next_period(period, Measured(since, float(spent.max()), last_s, 0.0), target)
            span = 1 if step + 1 < post_local else period.rounds
            why = period.why if span == period.rounds else f"post_local={post_local}"
            if way.moved:
                waited_s = float(exchange_s[step][0])
                averaged.append(ParametersAveraged(0, together, step + 1, since, span, why, 0.0, waited_s))
            since, spent = 0, np.zeros(workers)
        ended[step] = now
    timeline = of_rounds(ended, times.forward_s + times.backward_s, exchange_s, times.update_s)
    moved = 2 * way.moved * size * len(averaged) / rounds
    return replace(timeline, moved_bytes=moved, averaged=tuple(averaged))


def gossip(scene: Scene, steps: Sequence[DeviceStep], topology: str, period: int) -> Timeline:
    """Simulates workers that exchange parameters with their neighbours, and wait for these alone."""
    times = replica_steps(scene, steps)
    local_s = times.forward_s + times.backward_s + times.update_s
    rounds, workers = local_s.shape
    random = np.random.default_rng([scene.assumptions.seed, 7])
    hosts, size, now = scene.hosts, scene.model.trainable_bytes, np.zeros(workers)
    ended, exchange_s, sent = np.zeros((rounds, workers)), np.zeros((rounds, workers)), 0
    shared = scene.network.one_memory(hosts)
    for step in range(rounds):
        now = now + local_s[step]
        if (step + 1) % period == 0 and workers > 1:
            before = now
            pairs = _neighbours(topology, workers, random)
            # In memory that all share one copy is for all neighbours.
            sent += pairs.shape[0] + (1 if shared else pairs.shape[0])
            for others in pairs:
                ways = [scene.network.between(hosts[other], host) for host, other in zip(hosts, others, strict=True)]
                # One after the other: they come through one card.
                now = np.maximum(now, before[others]) + [way.seconds(size) for way in ways]
            exchange_s[step] = now - before
        ended[step] = now
    timeline = of_rounds(ended, times.forward_s + times.backward_s, exchange_s, times.update_s)
    return replace(timeline, moved_bytes=size * sent / rounds)


def _neighbours(topology: str, workers: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Returns each neighbour of each worker, (neighbours, workers)."""
    own = np.arange(workers)
    if topology == "ring":
        return np.stack([(own - 1) % workers, (own + 1) % workers][: min(2, workers - 1)])
    if topology == "hypercube":
        return np.stack([own ^ (1 << bit) for bit in range(max(1, workers.bit_length() - 1))])
    partners = np.arange(workers)
    shuffled = random.permutation(workers)
    for one, other in zip(shuffled[::2], shuffled[1::2], strict=False):
        partners[one], partners[other] = other, one
    return partners[None, :]
