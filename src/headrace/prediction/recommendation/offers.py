"""What a candidate brings: its time and money to the goal, or why it cannot be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.devices import HOST
from headrace.errors import HeadraceError, InfeasiblePlan, UsageError
from headrace.policies.behaviour import ServerTerms, Stages
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.recommendation.bounds import least_step_s
from headrace.prediction.recommendation.candidates import Candidate
from headrace.prediction.simulation.behaviour import behave
from headrace.prediction.simulation.failures import reliability
from headrace.prediction.simulation.memory import device_bytes, require_fit
from headrace.prediction.simulation.scene import Scene
from headrace.prediction.simulation.simulate import Prediction, predicted, scene_of
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec

SAME = 1.01
"""What takes so many times as long takes the same: runs of one program differ by more."""
_MOST_MICRO_BATCHES = 1024
_ACTIONS = 2000
"""Steps of workers that a candidate is simulated for."""
_EXCHANGES = 8
"""Of each worker with servers, at least."""
_START_S, _FAR_START_S = 2.0, 10.0
"""From the command to the first step: on one host's CPUs (benchmarks/start-up), and with devices or several hosts."""
_DIVIDED_STEPS = 2
"""Of pipelines, whose passes are many, and of replicas that several devices hold."""
SLOWER_NETWORK = 0.6
"""The part of its rate that a network attains at the slow end of the band."""


@dataclass(frozen=True)
class Goal:
    """What is to be trained: examples in all, and in a global batch."""

    examples: int
    global_batch_size: int


@dataclass(frozen=True)
class Question:
    """How is a model to be trained to a goal on a cluster? `memo` is what was computed before for the first two."""

    model: ModelSpec
    cluster: Cluster
    goal: Goal
    assumptions: Assumptions
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Offer:
    """A candidate that fits.

    Attributes:
        accumulate: micro-batches of a worker's share, so that its activations fit (`Options.accumulate`).
        seconds: to the goal, from the command on, after what failures cost; `start_s` of these before the first step.
        money: of all hosts that it uses, whole; 0 without prices.
        kilowatt_hours: that they take; 0 where the power of one is not known.
        hosts: that it uses, by name, those of workers first.
        refused: why headrace cannot run it on this cluster today; "" if it can.
        slow_s: the same time with a slower network; `seconds` where it was not asked for.
    """

    candidate: Candidate
    accumulate: int
    prediction: Prediction
    seconds: float
    money: float
    hosts: tuple[str, ...]
    refused: str = ""
    slow_s: float = 0.0
    start_s: float = 0.0
    kilowatt_hours: float = 0.0

    @property
    def text(self) -> str:
        """The strategy as the command line takes it."""
        return self.candidate.text

    @property
    def expected_s(self) -> tuple[float, float]:
        """Between which seconds it is expected to take, by the band of the prediction."""
        training, band = self.seconds - self.start_s, self.prediction.band
        return self.start_s + training / band.high, self.start_s + training / band.low


@dataclass(frozen=True)
class Misfit:
    """A candidate that does not fit, and why; `short` if devices or their memory do not suffice."""

    candidate: Candidate
    why: str
    short: bool = False


@dataclass(frozen=True)
class Pruned:
    """A candidate that fits, and was not simulated: it cannot be better than another one of its family.

    Attributes:
        least_s: that it takes to the goal at least.
        better: the other one, of the same family on as many devices.
    """

    candidate: Candidate
    least_s: float
    better: str


@dataclass(frozen=True)
class _Prepared:
    """A candidate that fits, before it is simulated; `least_s` to the goal and `least_money` at least."""

    candidate: Candidate
    scene: Scene
    needed: int
    least_s: float
    least_money: float


def search(tried: Iterable[Candidate], question: Question, *, bounds: bool = True) -> list[Offer | Misfit | Pruned]:
    """Evaluates candidates, and returns what they bring, in their order.

    Of one family on as many devices the one with the least bound is simulated first. One whose bound is worse than what
    another one takes is not simulated: it is neither the winner nor the best of its family on so many devices.
    Without `bounds` all are simulated.
    """
    found: dict[int, Offer | Misfit | Pruned] = {}
    groups: dict[tuple[str, int], list[tuple[int, _Prepared]]] = {}
    for place, candidate in enumerate(tried):
        prepared = _prepare(candidate, question)
        if isinstance(prepared, Misfit):
            found[place] = prepared
        else:
            groups.setdefault((candidate.family, candidate.devices), []).append((place, prepared))
    for group in groups.values():
        known: list[Offer] = []
        for place, prepared in sorted(group, key=lambda each: each[1].least_s):
            better = _better(prepared, known, question.model) if bounds else None
            if better is not None:
                found[place] = Pruned(prepared.candidate, prepared.least_s, better.text)
                continue
            offer = found[place] = _simulate(prepared, question)
            if isinstance(offer, Offer):
                known.append(offer)
    return [found[place] for place in sorted(found)]


def _better(prepared: _Prepared, known: Sequence[Offer], model: ModelSpec) -> Offer | None:
    """Returns an offer that is at least as good in all that the ranking looks at; None if there is none."""
    refused: str | None = None
    for offer in known:
        if offer.seconds * SAME > prepared.least_s or offer.money * SAME > prepared.least_money:
            continue
        if prepared.candidate.as_one_device and not offer.candidate.as_one_device:
            continue
        if offer.refused:
            # It is behind all that headrace can run.
            refused = _refused(prepared.candidate, model, prepared.scene) if refused is None else refused
            if not refused:
                continue
        return offer
    return None


def fits(candidate: Candidate, question: Question) -> bool:
    """Whether a candidate fits and headrace can run it there; it is not simulated."""
    prepared = _prepare(candidate, question)
    return not isinstance(prepared, Misfit) and not _refused(candidate, question.model, prepared.scene)


def _prepare(candidate: Candidate, question: Question) -> _Prepared | Misfit:
    examples, assumptions = question.goal.global_batch_size, question.assumptions
    try:
        scene = scene_of(question.model, question.cluster, candidate.strategy, examples, assumptions, question.memo)
        division = scene.behaviour.division
        if isinstance(division, Stages) or (division and scene.replicas > 1):
            steps = _DIVIDED_STEPS
        else:
            # A staleness bound lets some workers be ahead: it takes some rounds until they wait.
            steps = max(4, min(12, _ACTIONS // candidate.devices))
        terms = scene.behaviour.exchange
        if isinstance(terms, ServerTerms):
            # The first exchanges of workers that compute meanwhile are waited for later.
            steps = max(steps, _EXCHANGES * terms.span)
        scene = replace(scene, assumptions=replace(assumptions, steps=steps), drawn=False)
        scene, needed = _accumulating(candidate, scene)
        step_s = least_step_s(scene)
        hosts = _used(scene)
        failing = reliability(hosts, assumptions.checkpoint_s, assumptions.restart_s)
    except UsageError as error:
        return Misfit(candidate, str(error), isinstance(error, InfeasiblePlan))
    seconds = question.goal.examples / scene.examples * step_s / (failing.useful if failing else 1.0)
    seconds += _start_s(question, hosts)
    return _Prepared(candidate, scene, needed, seconds, _money(hosts, seconds))


def _simulate(prepared: _Prepared, question: Question) -> Offer | Misfit:
    candidate, scene = prepared.candidate, prepared.scene
    try:
        timeline = behave(scene)
    except UsageError as error:
        return Misfit(candidate, str(error))
    prediction = predicted(candidate.strategy, scene, timeline, prepared.needed)
    hosts = _used(scene)
    start_s = _start_s(question, hosts)
    seconds = start_s + question.goal.examples / prediction.useful_examples_per_s
    refused = _refused(candidate, question.model, scene)
    money = _money(hosts, seconds)
    names = tuple(host.name for host in hosts)
    return Offer(
        candidate,
        scene.accumulate,
        prediction,
        seconds,
        money,
        names,
        refused,
        seconds,
        start_s,
        _energy(hosts, seconds),
    )


def _used(scene: Scene) -> list[Host]:
    return list({host.name: host for host in (*scene.hosts, *scene.servers)}.values())


def _start_s(question: Question, hosts: Sequence[Host]) -> float:
    return _START_S if question.cluster.device == HOST and len(hosts) == 1 else _FAR_START_S


def _money(hosts: Sequence[Host], seconds: float) -> float:
    return seconds / 3600 * sum(host.price_per_hour for host in hosts)


def _energy(hosts: Sequence[Host], seconds: float) -> float:
    return seconds / 3600 * sum(host.watts for host in hosts) / 1000 if all(host.watts for host in hosts) else 0.0


def with_band(offer: Offer, question: Question) -> Offer:
    """Returns an offer with its time on a slower network."""
    share = question.assumptions.share_of_link(question.cluster.device)
    slower = replace(question, assumptions=replace(question.assumptions, network_share=share * SLOWER_NETWORK))
    prepared = _prepare(offer.candidate, slower)
    again = prepared if isinstance(prepared, Misfit) else _simulate(prepared, slower)
    return replace(offer, slow_s=again.seconds) if isinstance(again, Offer) else offer


def _accumulating(candidate: Candidate, scene: Scene) -> tuple[Scene, int]:
    """Returns the scene with as few micro-batches a worker as fit, and the bytes; raises InfeasiblePlan if none do.

    A pipeline has micro-batches of its own, and takes no others.
    """
    staged = isinstance(scene.behaviour.division, Stages)
    count = 1
    while True:
        tried = replace(scene, accumulate=count)
        needed = device_bytes(tried)
        try:
            require_fit(candidate.strategy.name, tried, needed)
            return tried, needed
        except UsageError:
            enough = staged or count * scene.workers >= min(scene.examples, _MOST_MICRO_BATCHES)
            if enough or needed == device_bytes(replace(scene, accumulate=2 * count)):
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
