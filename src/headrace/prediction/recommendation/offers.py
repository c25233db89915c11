"""What a candidate brings: its time and money to the goal, or why it cannot be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import HeadraceError, UsageError
from headrace.prediction.recommendation.candidates import Candidate
from headrace.prediction.simulation.behaviour import behave
from headrace.prediction.simulation.memory import device_bytes, require_fit
from headrace.prediction.simulation.scene import Assumptions, Scene
from headrace.prediction.simulation.simulate import Prediction, predicted, scene_of
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.strategies import Hybrid, Pipeline

_MOST_MICRO_BATCHES = 1024
_ACTIONS = 2000
"""Steps of workers that a candidate is simulated for."""
_STAGED_STEPS = 2
"""Of pipelines, whose passes are many."""
SLOWER_NETWORK = 0.6
"""The part of its rate that a network attains at the slow end of the band."""


@dataclass(frozen=True)
class Goal:
    """What is to be trained: examples in all, and in a global batch."""

    examples: int
    global_batch_size: int


@dataclass(frozen=True)
class Offer:
    """A candidate that fits.

    Attributes:
        accumulate: micro-batches of a worker's share, so that its activations fit (`Options.accumulate`).
        seconds: to the goal, after what failures cost.
        money: of all hosts that it uses, whole; 0 without prices.
        refused: why headrace cannot run it on this cluster today; "" if it can.
        slow_s: the same time with a slower network; `seconds` where it was not asked for.
    """

    candidate: Candidate
    accumulate: int
    prediction: Prediction
    seconds: float
    money: float
    hosts: int
    refused: str = ""
    slow_s: float = 0.0

    @property
    def text(self) -> str:
        """The strategy as the command line takes it."""
        return self.candidate.text


@dataclass(frozen=True)
class Misfit:
    """A candidate that does not fit, and why."""

    candidate: Candidate
    why: str


def evaluate(
    candidate: Candidate, model: ModelSpec, cluster: Cluster, goal: Goal, assumptions: Assumptions
) -> Offer | Misfit:
    """Simulates a candidate."""
    staged = isinstance(candidate.strategy, Pipeline | Hybrid)
    # A staleness bound lets some workers be ahead: it takes some rounds until they wait.
    steps = _STAGED_STEPS if staged else max(4, min(12, _ACTIONS // candidate.devices))
    try:
        scene, replicas = scene_of(
            model, cluster, candidate.strategy, goal.global_batch_size, replace(assumptions, steps=steps)
        )
        scene, needed = _accumulating(candidate, replace(scene, drawn=False))
        prediction = predicted(candidate.strategy, scene, behave(candidate.strategy, scene), replicas, needed)
    except UsageError as error:
        return Misfit(candidate, str(error))
    seconds = goal.examples / prediction.useful_examples_per_s
    used = {host.name: host for host in (*scene.hosts, *scene.servers)}
    money = seconds / 3600 * sum(host.price_per_hour for host in used.values())
    refused = _refused(candidate, model, scene)
    return Offer(candidate, scene.accumulate, prediction, seconds, money, len(used), refused, seconds)


def with_band(offer: Offer, model: ModelSpec, cluster: Cluster, goal: Goal, assumptions: Assumptions) -> Offer:
    """Returns an offer with its time on a slower network."""
    share = assumptions.share_of_link(cluster.device)
    slower = replace(assumptions, network_share=share * SLOWER_NETWORK)
    again = evaluate(offer.candidate, model, cluster, goal, slower)
    return replace(offer, slow_s=again.seconds) if isinstance(again, Offer) else offer


def _accumulating(candidate: Candidate, scene: Scene) -> tuple[Scene, int]:
    """Returns the scene with as few micro-batches a worker as fit, and the bytes; raises InfeasiblePlan if none do."""
    count = 1
    while True:
        tried = replace(scene, accumulate=count)
        needed = device_bytes(candidate.strategy, tried)
        try:
            require_fit(candidate.strategy, tried, needed)
            return tried, needed
        except UsageError:
            enough = count * scene.workers >= min(scene.examples, _MOST_MICRO_BATCHES)
            if enough or needed == device_bytes(candidate.strategy, replace(scene, accumulate=2 * count)):
                raise
        count *= 2


def _refused(candidate: Candidate, model: ModelSpec, scene: Scene) -> str:
    """Returns why headrace does not run a candidate on these hosts; "" if it does."""
    try:
        candidate.strategy.plan(model, launched(scene))
    except HeadraceError as error:
        return str(error)
    return ""


def launched(scene: Scene) -> Cluster:
    """Returns the hosts of a scene as a launcher would have started its processes: servers last."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate((*scene.hosts, *scene.servers)):
        ranks.setdefault(host.name, []).append(rank)
    if len(ranks) == 1:
        return replace(scene.cluster, hosts=(scene.hosts[0],), links=())
    used = {host.name: host for host in (*scene.hosts, *scene.servers)}
    hosts = tuple(replace(used[name], ranks=tuple(own)) for name, own in ranks.items())
    return replace(scene.cluster, hosts=hosts, ranks=len(scene.hosts) + len(scene.servers))


def main_reasons(misfits: Sequence[Misfit]) -> list[tuple[str, str, int]]:
    """Returns family, reason and number of the candidates that do not fit, a line a family: that of the largest."""
    number = Counter(misfit.candidate.family for misfit in misfits)
    largest = {misfit.candidate.family: misfit for misfit in misfits}
    return [(family, misfit.why, number[family]) for family, misfit in largest.items()]
