"""The sentences above the pictures of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.report.format import byte_count, duration, fixed, percent
from headrace.report.model.servers import ServerSummary, to_mean
from headrace.report.views.answers import about_the_same, listed
from headrace.spec.events import ShardStats

Named = Sequence[tuple[str, ServerSummary]]
"""Runs with servers, by the name before their processes: "" where there is one run."""


def _of(prefix: str) -> str:
    return prefix.removesuffix(", ")


def staleness_answer(runs: Named) -> str:
    """Returns how many updates behind gradients were."""
    told = []
    for prefix, servers in runs:
        staleness = servers.staleness_of_all
        if staleness is not None:
            behind = f"{fixed(staleness.mean)} updates behind on average, at most {staleness.largest}"
            told.append(f"{behind} in {_of(prefix)}" if prefix else behind)
    return f"Gradients were {listed(told)}." if told else ""


def over_time_answer(runs: Named) -> str:
    """Returns how the mean staleness changed from the first to the last point."""
    told = []
    for prefix, servers in runs:
        if len(servers.over_time) > 1:
            first, last = (servers.over_time[place].staleness.mean for place in (0, -1))
            told.append(f"from {fixed(first)} to {fixed(last)}{f' in {_of(prefix)}' if prefix else ''}")
    return f"The mean staleness went {listed(told)}." if told else ""


def waiting_answer(runs: Named) -> str:
    """Returns which worker spent the largest part of its steps on the exchange."""
    told = []
    for prefix, servers in runs:
        shares = {
            worker: each.exchange_s / total
            for worker, each in servers.waiting.items()
            if (total := each.wait_s + each.compute_s + each.exchange_s + each.update_s) > 0
        }
        if not shares:
            continue
        most, least = (choose(shares, key=lambda worker: shares[worker]) for choose in (max, min))
        if len(shares) > 1 and about_the_same(list(shares.values())):
            told.append(f"{prefix}each about {percent(shares[most])}")
            continue
        named = f"{prefix}worker {most} {percent(shares[most])}"
        told.append(named if len(shares) == 1 else f"{named}, worker {least} {percent(shares[least])}")
    return f"Of their steps' time, workers spent on the exchange: {'; '.join(told)}." if told else ""


def work_answer(runs: Named) -> str:
    """Returns how busy servers were."""
    told = []
    for prefix, servers in runs:
        busy = {rank: work.busy_share for rank, work in servers.by_rank.items()}
        most, least = (choose(busy, key=lambda rank: busy[rank]) for choose in (max, min))
        if len(busy) > 1 and about_the_same(list(busy.values())):
            told.append(f"{prefix}servers were all busy for about {percent(busy[most])} of the time")
            continue
        named = f"{prefix}server {most} was busy for {percent(busy[most])} of the time"
        told.append(named if len(busy) == 1 else f"{named}, the least busy, {least}, for {percent(busy[least])}")
    return _sentence(told)


def traffic_answer(runs: Named) -> str:
    """Returns which server moved the most bytes."""
    told = []
    for prefix, servers in runs:
        ranks, moved = list(servers.by_rank), [work.moved_bytes for work in servers.by_rank.values()]
        factor, which = to_mean([float(each) for each in moved])
        named = f"{prefix}server {ranks[which]} moved {byte_count(moved[which])}"
        if len(moved) > 1:
            same = about_the_same([float(each) for each in moved])
            named += ", as did the others" if same else f", {fixed(factor)} × the servers' mean"
        told.append(named)
    return _sentence(told)


def shards_answer(
    runs: Named, verb: str, load: Callable[[ShardStats], float], text: Callable[[ShardStats], str]
) -> str:
    """Returns which shard has the most of a load."""
    told = []
    for prefix, servers in runs:
        if not servers.shards:
            continue
        factor, which = to_mean([load(shard) for _, shard in servers.shards])
        rank, shard = servers.shards[which]
        times = f", {fixed(factor)} × the shards' mean" if len(servers.shards) > 1 and load(shard) > 0 else ""
        told.append(f"{prefix}shard {shard.name} on server {rank} {verb} {text(shard)}{times}")
    return _sentence(told)


def applied_text(shard: ShardStats) -> str:
    """Returns how long a shard's updates took."""
    return duration(shard.apply_s)


def _sentence(told: Sequence[str]) -> str:
    text = "; ".join(told)
    if text.startswith(("server", "shard ")):
        text = f"S{text[1:]}"  # the name of a run stays as it is
    return f"{text}." if text else ""
