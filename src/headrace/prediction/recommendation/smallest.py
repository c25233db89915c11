"""The smallest cluster that a model fits on, where it does not fit on the given one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.prediction.recommendation.candidates import Candidate, candidates
from headrace.prediction.recommendation.offers import Goal, Misfit, fits
from headrace.prediction.simulation.scene import Assumptions
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec

_MOST_HOSTS = 256


def what_would_do(
    misfits: Sequence[Misfit], model: ModelSpec, cluster: Cluster, goal: Goal, assumptions: Assumptions
) -> str:
    """Returns a sentence that names the fewest hosts like the cluster's that would do; "" if memory is not what lacks.

    It assumes that what fits on some hosts fits on more.
    """
    if not any(each.short for each in misfits):
        return ""
    too_few = enough = len(cluster.hosts)
    found: Candidate | None = None
    while found is None:
        if enough >= _MOST_HOSTS:
            return f"not even {enough} hosts like {cluster.hosts[0].name} would do"
        too_few, enough = enough, min(2 * enough, _MOST_HOSTS)
        found = _fitting(model, _of(cluster, enough), goal, assumptions)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fitting = _fitting(model, _of(cluster, middle), goal, assumptions)
        if fitting is None:
            too_few = middle
        else:
            enough, found = middle, fitting
    return f"the smallest cluster that would do has {enough} hosts like {cluster.hosts[0].name}, with {found.text}"


def _of(cluster: Cluster, count: int) -> Cluster:
    """Returns so many hosts like the cluster's, in turn; links do not matter for memory."""
    own = cluster.hosts
    hosts = tuple(replace(own[index % len(own)], name=f"host-{index}", ranks=()) for index in range(count))
    return replace(cluster, hosts=hosts, ranks=None, links=())


def _fitting(model: ModelSpec, cluster: Cluster, goal: Goal, assumptions: Assumptions) -> Candidate | None:
    tried = candidates(model, cluster, goal.global_batch_size)
    return next((each for each in tried if fits(each, model, cluster, goal, assumptions)), None)
