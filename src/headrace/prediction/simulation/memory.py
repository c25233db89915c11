"""What a device or a process holds at most: parameters, gradients, optimizer state, activations, what is on its way.

The runtime's own part (code, threads, a CUDA context) is not in it.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.errors import InfeasiblePlan
from headrace.policies.behaviour import GradientSum, ParameterMean, RingOfTokens, ServerTerms, Stages
from headrace.prediction.simulation.scene import Scene
from headrace.prediction.simulation.slices.steps import sliced
from headrace.prediction.simulation.slices.tokens import held
from headrace.prediction.simulation.staged import micro_batch, stages_of
from headrace.spec.cluster import Host


def device_bytes(scene: Scene) -> int:
    """Returns the bytes of the fullest worker."""
    model, division = scene.model, scene.behaviour.division
    if isinstance(division, RingOfTokens):
        # A worker has some tokens of its replica's examples: as much as of so many examples less.
        return device_bytes(replace(scene, behaviour=replace(scene.behaviour, division=None)))
    trained = model.trainable_bytes
    frozen = model.parameter_bytes - trained
    if isinstance(division, Stages):
        _, needed, _ = stages_of(scene)
        ranks = [0] * division.devices
        for stage, cost in enumerate(needed):
            ranks[scene.schedule.rank_of(stage)] += cost.bytes // division.slices
        if not any(cost.parameter_bytes for cost in needed):
            ranks = [held + model.copies * trained // len(ranks) for held in ranks]
        return max(ranks) + _workspace(scene, micro_batch(scene))
    activations = _saved(scene, max(scene.shares()))
    exchange = scene.behaviour.exchange
    if isinstance(exchange, GradientSum) and exchange.parts > 1:
        # Besides its parts, a worker has the largest unit and its gradient, whole.
        sizes = [layer.parameter_bytes for layer in model.layers]
        slices = division.devices if division else 1
        whole = round(2 * held(scene) * max(sizes, default=model.parameter_bytes)) // slices
        state = frozen + round(model.copies * trained * held(scene))
        return state // (exchange.parts * slices) + whole + activations // slices
    if division:
        return (
            round(model.copies * trained * sliced(model, division.devices).held)
            + activations // division.devices
            + frozen
        )
    return frozen + activations + round(trained * _copies(scene) * held(scene))


def server_bytes(scene: Scene) -> int:
    """Returns the bytes of a server: its shards, the optimizer's state, and a gradient on its way."""
    return scene.model.copies * scene.model.trainable_bytes // max(1, len(scene.servers))


def _copies(scene: Scene) -> float:
    """Returns the memory of the trained parameters on a worker, as a multiple of their size.

    What processes share counts for each that reads or writes it, as the system counts it.
    """
    state, workers = scene.model.copies - 2, scene.workers
    # Where the gradients are put for others, besides those of autograd; and the parts of the others that are added up.
    shared = 1 + (workers - 1) / workers if len(scene.crowds) == 1 and scene.cluster.device == "cpu" else 0
    sent = len(scene.crowds) > 1 and scene.cluster.device == "cpu"
    match scene.behaviour.exchange:
        case GradientSum(central=True):
            # One copy of the parameters, and each owns a part of the sum and of the optimizer's state.
            return 2 + shared + (1 + state) / workers
        case GradientSum():
            # And the sum.
            return 2 + state + (1 + shared if workers > 1 else 0)
        case ServerTerms(local=False):
            # And what is on its way; where it is on the servers' host, their parameters, which are mapped.
            return 3 - sent
        case ServerTerms(overlap=overlap):
            return (5 if overlap else 3) - sent + state
        case ParameterMean():
            return 3 + state
        case _:
            return 2 + state


def _workspace(scene: Scene, examples: int) -> int:
    """Returns what training on so many examples was measured to hold besides."""
    return scene.model.compute.at(examples).workspace_bytes if scene.model.compute and examples else 0


def _saved(scene: Scene, examples: int) -> int:
    """Returns what a batch holds: what autograd keeps, and what was measured besides."""
    examples = -(-examples // scene.accumulate)
    if not scene.model.compute or not examples:
        return 0
    return scene.model.compute.at(examples).saved_bytes + _workspace(scene, examples)


def limit_bytes(host: Host, scene: Scene) -> int:
    """Returns what a worker of a host may hold: the device's memory, or its part of the host's; 0 where not known."""
    return host.device_memory_bytes if scene.cluster.device != "cpu" else host.memory_bytes // scene.crowds[host.name]


def require_fit(name: str, scene: Scene, needed: int) -> None:
    """Raises InfeasiblePlan where a worker does not fit: what is short, by how much, where, and what would do.

    `name` is the strategy's.
    """
    known = [host for host in scene.hosts if limit_bytes(host, scene)]
    host = min(known, key=lambda each: limit_bytes(each, scene), default=None)
    if host is None or needed <= (limit := limit_bytes(host, scene)):
        return
    kind = "device" if scene.cluster.device != "cpu" else "worker"
    state = scene.model.copies * scene.model.trainable_bytes
    stages = -(-state // limit)
    remedy = (
        f"a pipeline of {stages} stages or more divides the {state:,} bytes of parameters, gradients and optimizer "
        f"state over {stages} such {kind}s"
        if stages > 1
        else "the activations are too many: use a smaller batch, more workers, or a pipeline with recompute='always'"
    )
    raise InfeasiblePlan(
        f"{name} needs {needed:,} bytes on each {kind}, and a {kind} of host {host.name} has {limit:,}: "
        f"{needed - limit:,} too few; {remedy}"
    )
