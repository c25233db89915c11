"""Workers that exchange tokens in the middle of a step: attention around a ring, and tokens that go to experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb

from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.policies.behaviour import GradientSum
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.rounds import by_units, synchronous
from headrace.prediction.simulation.scene import DeviceStep, Scene
from headrace.prediction.simulation.slices.steps import device_steps
from headrace.prediction.simulation.timeline import Timeline
from headrace.spec.cluster import Host
from headrace.spec.compute import ExpertTraffic, Traffic
from headrace.spec.model import ModelSpec

EXPERTS_NOTE = "tokens that go to each expert as often as to the others"


def traffic(model: ModelSpec, what: str) -> Traffic:
    """Returns what travels; raises a UsageError where the model's file does not say it."""
    if model.traffic is None:
        raise UsageError(f"the model's file does not say what goes to {what}; profile the model: headrace profile")
    return model.traffic


def around_rings(scene: Scene, devices: int) -> tuple[list[DeviceStep], float]:
    """Returns what a step takes each worker, of which so many divide each sequence, and the bytes that go around.

    In backward keys and values go around again, and their gradients, too (`context_parallel/ring.py`).
    """
    hosts = scene.hosts[:devices]
    block = traffic(scene.model, "a ring").attended_bytes * max(scene.shares()) / devices
    if scene.network.one_memory(hosts):
        moved = 3 * (devices - 1) * block
    elif scene.cluster.device == HOST:
        moved = 3 * devices * 2 * scene.network.all_reduce(hosts).moved * block
    else:
        moved = (6 * devices - 4) * block
    sent_s = _seconds(scene, hosts, moved)
    return [
        DeviceStep(
            step.forward_s / devices + sent_s / 3,
            step.backward_s / devices + 2 * sent_s / 3,
            step.optimizer_s,
            step.fixed_s,
        )
        for step in device_steps(scene)
        for _ in range(devices)
    ], moved


def with_experts(scene: Scene, workers: int) -> Timeline:
    """Simulates replicas of so many workers, which divide the experts, and whose tokens go to these and come back.

    Raises:
        UsageError: it is not known what goes to the experts.
    """
    known = traffic(scene.model, "its experts")
    if not known.experts:
        raise UsageError("the model's file has no experts, and expert_parallel divides them; use another strategy")
    model, share = scene.model, max(scene.shares())
    divided = sum(layer.parameter_bytes for layer in known.experts) / max(1, model.trainable_bytes)
    moved = 2 * share * sum(layer.rows * _elsewhere(layer, workers) * layer.row_bytes for layer in known.experts)
    # The router's loss is of all workers' tokens.
    moved += 4 * share * (scene.workers - 1) * known.routed_bytes
    sent_s = _seconds(scene, scene.hosts[:workers], moved)
    steps = [
        DeviceStep(
            step.forward_s + sent_s / 2,
            step.backward_s + sent_s / 2,
            step.optimizer_s * held(scene),
            step.fixed_s,
        )
        for step in device_steps(scene)
    ]
    timeline = _summed(scene, steps, workers, divided)
    return replace(timeline, moved_bytes=timeline.moved_bytes + moved)


def _summed(scene: Scene, steps: Sequence[DeviceStep], workers: int, divided: float) -> Timeline:
    """Simulates how such workers sum gradients: of experts, a part of all bytes, over replicas, and the rest over all.

    Where parts of a replica shard what each of their workers holds, units are gathered among these.
    """
    network, algorithm, exchange = scene.network, scene.assumptions.algorithm, scene.behaviour.exchange
    parts, hosts = exchange.parts if isinstance(exchange, GradientSum) else 1, scene.hosts
    size = workers * parts
    same_part = [host for rank, host in enumerate(hosts) if rank % size < workers]
    rest = network.all_reduce(same_part, algorithm).part((1 - divided) / parts)
    alike = network.all_reduce(hosts[::size], algorithm).part(divided / size)
    if parts == 1:
        return synchronous(scene, steps, rest.then(alike), overlap=False)
    assert isinstance(exchange, GradientSum)
    units = network.divided(hosts[:size:workers], algorithm, parts, exchange.gathers).part(exchange.sent * held(scene))
    several = len({host.name for host in hosts}) > 1
    return by_units(scene, steps, units.then(rest).then(alike), several or scene.cluster.device != HOST)


def held(scene: Scene) -> float:
    """Returns the part of the trained parameters that each worker holds."""
    workers, known = scene.behaviour.experts, scene.model.traffic
    if workers < 2 or known is None:
        return 1.0
    divided = sum(layer.parameter_bytes for layer in known.experts) / max(1, scene.model.trainable_bytes)
    return 1 - divided + divided / workers


def _elsewhere(layer: ExpertTraffic, workers: int) -> float:
    """Returns to how many other workers a row goes, if all choices of experts are as likely."""
    every = comb(layer.count, layer.chosen)
    sizes = [layer.count // workers + (rank < layer.count % workers) for rank in range(workers)]
    some_there = sum(1 - comb(layer.count - size, layer.chosen) / every for size in sizes)
    return some_there * (workers - 1) / workers


def _seconds(scene: Scene, hosts: Sequence[Host], moved: float) -> float:
    """Returns how long bytes take that each rank sends and receives."""
    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    way = scene.network.slowest(pairs) if len(hosts) > 1 else Way()
    return moved / 2 * way.s_per_byte
