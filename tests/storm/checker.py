"""What is wrong with a run, from what it has left alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import CorruptCheckpoint
from headrace.spec.events import PushesApplied, RunEnded, RunStarted, Stepped
from storm.evidence import Attempt, Evidence
from storm.hosts import STILL
from storm.jobs import ACCOUNTED, BATCH, ELASTIC, EXACT, ROUNDS, TIMEOUT_S
from storm.schedule import CUTS, DAMAGES, MOUNTED

__all__ = ["problems"]

SLACK_S = 15.0
"""Over what is documented: the machine may be busy with other work."""

NAMING = ("kill", "freeze", *CUTS)
"""Faults of one process or of two hosts whose error names a rank of them."""

UNWRITTEN = {"small files", *MOUNTED}
"""Faults under which training goes on and event files take no more, as documented."""

LOST = "the run's last events are lost"
"""What the command says then, where its own events are among them."""

OUT_OF_MEMORY, HALF_WRITTEN = "memory allocation of", "/.tmp"
"""What a process says that a library of Rust ends for want of memory, and the file that it then leaves half written."""

UNDELETED = "few descriptors"
"""Without a descriptor a process deletes no folder; the next checkpoint of the run directory does, as documented."""

ENDED_BY_US = (-9, -15, 143)
"""By SIGKILL and SIGTERM."""


def problems(evidence: Evidence) -> list[str]:
    """Returns a line for each; [] for a sound run."""
    found, damaged = list[str](), False
    for number, attempt in enumerate(evidence.attempts):
        if not (damaged and attempt.code == CorruptCheckpoint.exit_code):
            found += _of_attempt(number, attempt)
        damaged |= any(strike.fault.kind in DAMAGES for strike in attempt.strikes)
    if not evidence.attempts or evidence.attempts[-1].code != 0:
        return [*found, "the run has not come to its end"]
    return [*found, *_of_end(evidence), *_of_examples(evidence), *_of_groups(evidence), *_of_pushes(evidence)]


def _of_attempt(number: int, attempt: Attempt) -> Iterator[str]:
    say = f"attempt {number} ({', '.join(str(strike.fault) for strike in attempt.strikes) or 'no fault'})"
    if math.isinf(attempt.ended):
        yield f"{say}: stood still"
        return
    if STILL in attempt.said:
        yield f"{say}: a rank stood still"
    if "Traceback (most recent call last)" in attempt.said:
        yield f"{say}: a traceback: {attempt.said.strip().splitlines()[-1]}"
    if attempt.processes:
        yield f"{say}: processes are left: {attempt.processes}"
    # Where the run directory took no model, the error says where else it was put.
    kept = re.findall(r"it is kept in (\S+)", attempt.said)
    left = tuple(name for name in attempt.files if not any(name in path for path in kept))
    aborted = {Path(name).parts[0] for name in left if HALF_WRITTEN in name and OUT_OF_MEMORY in attempt.said}
    left = tuple(name for name in left if Path(name).parts[0] not in aborted)
    if left and attempt.code != -9:
        yield f"{say}: files are left: {left}"
    if attempt.code == 0:
        return
    if not attempt.strikes:
        yield f"{say}: ended with code {attempt.code}: {attempt.said.strip()[-200:]}"
        return
    last = attempt.strikes[-1]
    if attempt.code not in ENDED_BY_US and not attempt.said.strip():
        yield f"{say}: no error"
    if last.fault.kind in NAMING and attempt.code not in ENDED_BY_US:
        struck = {rank for strike in attempt.strikes for rank in strike.ranks}
        named = {int(rank) for rank in re.findall(r"\brank (\d+)", attempt.said)}
        if not named & struck:
            which = " and ".join(map(str, last.ranks))
            yield f"{say}: rank {which} was struck, the error names {sorted(named)}: {attempt.said.strip()[-200:]}"
    within = 2.0 if last.fault.kind == "kill" else TIMEOUT_S
    if last.fault.kind in NAMING and attempt.ended - last.at > within + SLACK_S:
        yield f"{say}: ended {attempt.ended - last.at:.1f} s after the fault"


def _of_end(evidence: Evidence) -> Iterator[str]:
    ends = [event for event in evidence.events if isinstance(event, RunEnded)]
    if (not ends or ends[-1].status != "ok") and LOST not in evidence.attempts[-1].said:
        yield "the command ended well, but its last event does not say so"
    if evidence.unfinished and all(strike.fault.kind != UNDELETED for strike in evidence.attempts[-1].strikes):
        yield f"checkpoints are half done: {evidence.unfinished}"
    if not evidence.parameters:
        yield "there is no model"
    elif evidence.strategy in EXACT and evidence.parameters != evidence.undisturbed:
        yield "the parameters are not those of the run without faults"


def _of_examples(evidence: Evidence) -> Iterator[str]:
    """Every round once: what an attempt has done beyond its last checkpoint, the next one does again."""
    struck = {strike.fault.kind for attempt in evidence.attempts for strike in attempt.strikes}
    if evidence.strategy not in ACCOUNTED or struck & UNWRITTEN:
        return
    rounds: dict[int, dict[int, int]] = {}
    for event in evidence.events:
        if isinstance(event, RunStarted):
            rounds = {step: ranks for step, ranks in rounds.items() if step < event.resumed_step}
        elif isinstance(event, Stepped):
            ranks = rounds.setdefault(event.step, {})
            if event.rank in ranks:
                yield f"rank {event.rank} counted round {event.step} twice"
            ranks[event.rank] = event.examples
    wrong = {step: sum(ranks.values()) for step, ranks in rounds.items() if sum(ranks.values()) != BATCH}
    if wrong or len(rounds) != ROUNDS:
        yield f"{len(rounds)} of {ROUNDS} rounds; not of {BATCH} examples: {wrong}"


def _of_groups(evidence: Evidence) -> Iterator[str]:
    """Where workers go on without others, one group does: a worker that was lost after a round may count it, too.

    Of the group that did the round first at least one goes on, and does not do it again; so one group and those that
    were lost count less than the batch twice.
    """
    if evidence.strategy not in ELASTIC:
        return
    rounds: Counter[int] = Counter()
    for event in evidence.events:
        if isinstance(event, RunStarted):
            rounds = Counter({step: count for step, count in rounds.items() if step < event.resumed_step})
        elif isinstance(event, Stepped):
            rounds[event.step] += event.examples
    twice = {step: count for step, count in rounds.items() if count >= 2 * BATCH}
    if twice:
        yield f"two groups of workers did rounds of {BATCH} examples: {twice}"


def _of_pushes(evidence: Evidence) -> Iterator[str]:
    """In each attempt a lease is applied once, by those that the servers list.

    A server and its backup apply the same push to a version: where they do not, each took itself for the leader.
    """
    applied: Counter[tuple[int, int, int]] = Counter()
    made: dict[tuple[int, int], int] = {}
    for event in evidence.events:
        if isinstance(event, RunStarted):
            applied.clear()
            made.clear()
        elif isinstance(event, PushesApplied):
            firsts = event.firsts or (0,) * len(event.leases)
            for lease, first, version in zip(event.leases, firsts, event.versions, strict=True):
                other = made.setdefault((first, version), lease)
                if other != lease:
                    yield f"two leaders: version {version} is of lease {other}, by rank {event.rank} of {lease}"
                applied[event.rank, lease, first] += 1
                if applied[event.rank, lease, first] == 2:
                    yield f"rank {event.rank} applied lease {lease} twice"
