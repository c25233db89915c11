"""recommend: the strategy to take, the others and why they lost, and when not to distribute."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from headrace.errors import InfeasiblePlan, UsageError
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.cloud import cluster_of
from headrace.prediction.plausibility import doubtful_units
from headrace.prediction.profiling.origin import require_usable
from headrace.prediction.recommendation.candidates import Candidate, candidates
from headrace.prediction.recommendation.offers import (
    SAME,
    Goal,
    Misfit,
    Offer,
    Pruned,
    Question,
    fits,
    main_reasons,
    search,
    with_band,
)
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec

WORTH = 1.1
"""Distribution pays from this speed-up on: predictions are off by as much."""
SHORT_S = 60.0
"""What one host trains in so little time stays there: to start elsewhere takes as long."""
_NO_CURRENCY = 'the prices of hosts have no currency; write currency = "EUR" at the top of the cluster\'s file'
_NO_LAYERS = "pipeline, tensor_parallel and hybrid were not tried: the model's layers are not known"
_MOST_HOSTS = 256
"""The largest cluster that is asked about where a model does not fit on the given one."""
_HALF = 0.5
"""The knee is where further devices bring less than this part of what they would at best."""


@dataclass(frozen=True)
class Recommendation:
    """What to take.

    Attributes:
        offers: what fits and was simulated, the best first; what headrace cannot run is behind the others.
        best: of each family, in the order of rank.
        misfits: family, reason and number of candidates that do not fit.
        knee: devices from which on more bring less than half of what they would at best, in the winner's family.
        alone: one device, if the model fits there.
        tried: number of candidates.
        currency: of `Offer.money`; "" where the cluster does not say it.
        bounded: those that fit, and that were not simulated: even their bound is worse than another one of their
            family on as many devices.
        by_money: whether the cheapest is ranked first, else the quickest.
        deadline_s: within which the goal is to be reached; None for none.
        notes: what was not tried, and why.

    Examples:
        >>> found = hr.recommend("model.toml", "cluster.toml")
        >>> found.winner.candidate.strategy.name
        'mirrored'
    """

    winner: Offer
    goal: Goal
    offers: tuple[Offer, ...]
    best: tuple[Offer, ...]
    misfits: tuple[tuple[str, str, int], ...]
    knee: int
    alone: Offer | None
    tried: int
    by_money: bool = False
    deadline_s: float | None = None
    notes: tuple[str, ...] = ()
    bounded: tuple[Pruned, ...] = ()
    currency: str = ""

    @property
    def speed_up(self) -> float | None:
        """The winner's, over one device with the same global batch; None where the model does not fit on one."""
        return self.alone.seconds / self.winner.seconds if self.alone else None

    @property
    def distribute(self) -> bool:
        """Whether it pays to distribute at all."""
        return self.winner.candidate.devices > 1

    @property
    def curve(self) -> Mapping[str, tuple[Offer, ...]]:
        """Of each family the best on each number of devices, which ascends."""
        found: dict[str, dict[int, Offer]] = {}
        for offer in self.offers:
            found.setdefault(offer.candidate.family, {}).setdefault(offer.candidate.devices, offer)
        return {family: tuple(own[count] for count in sorted(own)) for family, own in found.items()}

    def why_not(self, offer: Offer) -> str:
        """Returns why an offer is not the winner."""
        if offer.refused:
            return f"headrace cannot run it here: {offer.refused}"
        value, least = (offer.money, self.winner.money) if self.by_money else (offer.seconds, self.winner.seconds)
        ratio = value / least if least else 1.0
        what = "money" if self.by_money else "time"
        limit = offer.prediction.bottleneck
        if ratio >= 1:
            return f"{ratio:.2f} x the {what}; its bottleneck: {limit}"
        if self.deadline_s is not None and offer.seconds > self.deadline_s:
            return f"{ratio:.2f} x the {what}, and misses the deadline"
        if not offer.candidate.as_one_device:
            return f"{ratio:.2f} x the {what} an example, of which it may need more: its updates are not one device's"
        return f"{ratio:.2f} x the {what}, too little to distribute for"


def recommend(
    model: ModelSpec | Path | str,
    cluster: Cluster | Path | str,
    *,
    global_batch_size: int | None = None,
    examples: int = 1_000_000,
    by_money: bool = False,
    deadline_s: float | None = None,
    any_updates: bool = False,
    assumptions: Assumptions | None = None,
    force: bool = False,
) -> Recommendation:
    """Simulates every strategy that fits and may win, and ranks them. No process is started.

    Args:
        model: a profile, or a file of one, or one that a person has written.
        cluster: as for `simulate`.
        global_batch_size: examples of a step, the same for all candidates, so that an example counts the same in all;
            None for the largest batch of the model's file.
        examples: to train in all.
        by_money: ranks by the price of the hosts that are used, whole, instead of by time.
        deadline_s: in which the goal is to be reached; the cheapest that does is the winner where hosts have prices.
        any_updates: whether a strategy may win whose updates are not those of one device: asynchronous ones, and those
            that average parameters. How many more examples they need to the same loss is not predicted.
        assumptions, force: as for `simulate`.

    Raises:
        UsageError: something that is needed is missing, or impossible.
        InfeasiblePlan: the model fits nowhere, with what is short, and the smallest cluster that would do.

    Examples:
        >>> hr.recommend("model.toml", "cluster.toml").distribute
        True
    """
    model = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    cluster = cluster_of(cluster)
    differ = require_usable(model, cluster, force)
    question = Question(model, cluster, _goal(model, global_batch_size, examples), assumptions or Assumptions())
    by_money = _priced(cluster, by_money, deadline_s) and (by_money or deadline_s is not None)
    results = search(candidates(model, cluster, question.goal.global_batch_size), question)
    misfits = _misfits(results, question)
    ranked = _ranked([each for each in results if isinstance(each, Offer)], by_money, deadline_s)
    winner, best = _winner(ranked, any_updates), _firsts(ranked)
    named = {id(offer): offer for offer in (winner, *best)}
    banded = {name: with_band(offer, question) for name, offer in named.items()}
    return Recommendation(
        winner=banded[id(winner)],
        goal=question.goal,
        offers=tuple(banded.get(id(offer), offer) for offer in ranked),
        best=tuple(banded[id(offer)] for offer in best),
        misfits=tuple(main_reasons(misfits)),
        knee=knee([each for each in ranked if each.candidate.family == winner.candidate.family and not each.refused]),
        alone=next((offer for offer in ranked if offer.candidate.devices == 1), None),
        tried=len(results),
        by_money=by_money,
        deadline_s=deadline_s,
        notes=(*differ, *_notes(model, cluster)),
        bounded=tuple(each for each in results if isinstance(each, Pruned)),
        currency=cluster.currency,
    )


def _notes(model: ModelSpec, cluster: Cluster) -> list[str]:
    notes = list(doubtful_units(model, cluster))
    if not model.layers:
        notes.append(_NO_LAYERS)
    if cluster.price_per_hour and not cluster.currency:
        notes.append(_NO_CURRENCY)
    return notes


def knee(offers: Sequence[Offer]) -> int:
    """Returns the devices of a family from which on more bring less than half of what they would at best."""
    rates: dict[int, float] = {}
    for offer in offers:
        count = offer.candidate.devices
        rates[count] = max(rates.get(count, 0.0), offer.prediction.examples_per_s)
    sizes = sorted(rates)
    for size, larger in pairwise(sizes):
        if rates[larger] / rates[size] - 1 < _HALF * (larger / size - 1):
            return size
    return sizes[-1]


def _priced(cluster: Cluster, by_money: bool, deadline_s: float | None) -> bool:
    """Returns whether hosts have prices; raises UsageError where they are needed, or for a deadline that is past."""
    priced = any(host.price_per_hour for host in cluster.hosts)
    if by_money and not priced:
        raise UsageError("no host of the cluster has a price_per_hour, so that nothing can be ranked by money")
    if deadline_s is not None and not deadline_s > 0:
        raise UsageError(f"deadline must be above 0 s, got {deadline_s!r}")
    return priced


def _goal(model: ModelSpec, global_batch_size: int | None, examples: int) -> Goal:
    if global_batch_size is None:
        if model.compute is None:
            raise UsageError("the model has no measured batch; give global_batch_size (--global-batch-size)")
        global_batch_size = model.compute.batches[-1].examples
    for name, value in (("global_batch_size", global_batch_size), ("examples", examples)):
        if value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
    return Goal(examples, global_batch_size)


def _ranked(offers: Sequence[Offer], by_money: bool, deadline_s: float | None) -> list[Offer]:
    """Returns offers, the best first; of those that take the same the one with fewer devices, or tried before."""

    def key(offer: Offer) -> tuple[bool, bool, float]:
        late = deadline_s is not None and offer.seconds > deadline_s
        return bool(offer.refused), late, offer.money if by_money and not late else offer.seconds

    ranked, place = sorted(offers, key=key), {id(offer): number for number, offer in enumerate(offers)}
    keys, first = [key(offer) for offer in ranked], 0
    while first < len(ranked):
        refused, late, least = keys[first]
        end = bisect_right(keys, (refused, late, least * SAME))
        same = sorted(ranked[first:end], key=lambda offer: (offer.candidate.devices, place[id(offer)]))
        ranked[first:end], first = same, end
    return ranked


def _firsts(ranked: Sequence[Offer]) -> list[Offer]:
    """Returns the best of each family, in the order of rank."""
    firsts = {offer.candidate.family: offer for offer in reversed(ranked)}
    return [offer for offer in ranked if firsts[offer.candidate.family] is offer]


def _misfits(results: Sequence[Offer | Pruned | Misfit], question: Question) -> list[Misfit]:
    """Returns what does not fit; raises InfeasiblePlan, with what would do, if nothing does."""
    misfits = [each for each in results if isinstance(each, Misfit)]
    if len(misfits) < len(results):
        return misfits
    remedy = _what_would_do(misfits, question)
    closest = misfits[-1]
    raise InfeasiblePlan(
        f"none of {len(misfits)} candidates fits on this cluster; the largest, {closest.candidate.text}: "
        f"{closest.why}" + (f"; {remedy}" if remedy else "")
    )


def _what_would_do(misfits: Sequence[Misfit], question: Question) -> str:
    """Returns a sentence that names the fewest hosts like the cluster's that would do; "" if memory is not what lacks.

    It assumes that what fits on some hosts fits on more.
    """
    if not any(each.short for each in misfits):
        return ""
    like = question.cluster.hosts[0].name
    too_few = enough = len(question.cluster.hosts)
    found: Candidate | None = None
    while found is None:
        if enough >= _MOST_HOSTS:
            return f"not even {enough} hosts like {like} would do"
        too_few, enough = enough, min(2 * enough, _MOST_HOSTS)
        found = _fitting(question, enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fitting = _fitting(question, middle)
        if fitting is None:
            too_few = middle
        else:
            enough, found = middle, fitting
    return f"the smallest cluster that would do has {enough} hosts like {like}, with {found.text}"


def _fitting(question: Question, count: int) -> Candidate | None:
    """Returns what fits on so many hosts like the cluster's, in turn; links do not matter for memory."""
    known = question.cluster.hosts
    hosts = tuple(replace(known[index % len(known)], name=f"host-{index}", ranks=()) for index in range(count))
    cluster = replace(question.cluster, hosts=hosts, ranks=None, links=())
    larger = replace(question, cluster=cluster, memo={})
    tried = candidates(question.model, cluster, question.goal.global_batch_size)
    return next((candidate for candidate in tried if fits(candidate, larger)), None)


def _winner(ranked: Sequence[Offer], any_updates: bool) -> Offer:
    able = [offer for offer in ranked if not offer.refused]
    same = [offer for offer in able if any_updates or offer.candidate.as_one_device]
    if not same:
        raise InfeasiblePlan(f"headrace can run none of the {len(ranked)} candidates that fit: {ranked[0].refused}")
    near = [offer for offer in same if len(offer.hosts) == 1]
    same = near if near and near[0].seconds < SHORT_S else same
    winner = same[0]
    alone = next((offer for offer in same if offer.candidate.devices == 1), None)
    little = alone is not None and alone.seconds < WORTH * winner.seconds
    return alone if alone is not None and little else winner
