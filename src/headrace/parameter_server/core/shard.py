"""A shard's decisions: a state machine without tensors, sockets or clocks.

    Push ──► ApplyStep, Ack                               each push is a step
             Accumulate; with the round's last Step, Ack  a round is a step
             Refuse                                       late, not finite, applied before, or from no member
    Pull ──► Reply, now or when others have pushed

Its driver owns the parameters and the optimizer, and carries out the actions in order: a server, or a test in virtual
time.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.parameter_server.core.events import (
    Accumulate,
    Ack,
    Action,
    ApplyStep,
    Close,
    Event,
    Join,
    LeasesAhead,
    Leave,
    Pull,
    Push,
    Reason,
    Refuse,
    Renew,
    Reply,
    RoundMembers,
    Settle,
)
from headrace.parameter_server.core.leases import IntervalSet, intervals_of, numbers_in
from headrace.policies.staleness import Admission, Combination, DecidedElsewhere

_EXACTLY = 1e-9
"""Tolerance of the sum of a round's shares."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a member was told of its last push; `refused` is the `Reason`, or 0 if it is applied."""

    push: Push
    refused: int


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a shard as JSON values.

    `done` are the leases done since the last `Settle`, as intervals. `overdue` members are not waited for before they
    push again. `awaited` are members whose push of round `among` is missing here; None when it has ended.
    """

    version: int
    ahead: int | None
    members: tuple[tuple[int, ...], ...]
    done: tuple[tuple[int, ...], ...]
    contributed: tuple[Push, ...]
    waiting: tuple[Pull, ...]
    told: tuple[PushResult, ...]
    overdue: tuple[int, ...] = ()
    last: RoundMembers | None = None
    among: int = -1
    awaited: tuple[int, ...] | None = None


class Shard:
    """One piece of the parameters, without its content.

    `workers` are the members at the start; learnt from joins alone, the first round would end too early. `version`
    counts ended rounds if a round is a step, steps otherwise. `last` is the last ended round, as another server is told
    of it; None before the first.
    """

    def __init__(self, workers: range, admission: Admission, combination: Combination) -> None:
        self.version = 0
        self.clocks: dict[int, int] = dict.fromkeys(workers, 0)
        self._incarnations: dict[int, int] = dict.fromkeys(workers, 0)
        self._admission = admission
        self._combination = combination
        self._done = IntervalSet()
        self._last: dict[int, tuple[Push, Ack | Refuse]] = {}
        self._ahead: int | None = None
        self._contributed: dict[int, Push] = {}
        self._waiting: dict[int, Pull] = {}
        self._overdue: set[int] = set()
        self.last: RoundMembers | None = None
        self._among = -1
        self._awaited: set[int] | None = None

    def has(self, lease: int) -> bool:
        """Returns whether a lease is done here since the last `Settle`."""
        return lease in self._done

    @property
    def done(self) -> frozenset[int]:
        """The leases that are done here since the last `Settle`."""
        return frozenset(self._done)

    def knows(self, worker: int, incarnation: int) -> bool:
        """Returns whether a worker is a member, in this incarnation."""
        return self._incarnations.get(worker) == incarnation

    def handle(self, event: Event) -> list[Action]:
        """Returns the actions to carry out, in order."""
        if isinstance(event, Push):
            return self._push(event)
        if isinstance(event, Pull):
            return self._pull(event)
        if isinstance(event, Settle):
            self._done.clear()
            self._last.clear()
            self._ahead = None
            self.version = max(self.version, event.version)
            return []
        if isinstance(event, Renew):
            self.version += 1
            return self._release()
        if isinstance(event, LeasesAhead):
            self._ahead = event.leases
            return self._close() + self._release()
        if isinstance(event, RoundMembers):
            if event.round > self._among:
                self._among = event.round
                self._awaited = {worker for worker, now in event.workers if self._incarnations.get(worker) == now}
            return self._close() + self._release()
        if isinstance(event, Close):
            return self._close(early=event.worker in self._contributed) + self._release()
        return self._change(event)

    def state(self) -> ShardState:
        """Returns the state."""
        return ShardState(
            version=self.version,
            ahead=self._ahead,
            members=tuple((worker, self._incarnations[worker], clock) for worker, clock in self.clocks.items()),
            done=self._done.intervals(),
            contributed=tuple(self._contributed.values()),
            waiting=tuple(self._waiting.values()),
            told=tuple(
                PushResult(push, result.reason.value if isinstance(result, Refuse) else 0)
                for push, result in self._last.values()
            ),
            overdue=tuple(sorted(self._overdue)),
            last=self.last,
            among=self._among,
            awaited=None if self._awaited is None else tuple(sorted(self._awaited)),
        )

    def load(self, state: ShardState) -> None:
        """Takes over the state of a shard with the same policies; raises ValueError if the state is not consistent."""
        clocks = {worker: clock for worker, _, clock in state.members}
        asking = {push.worker for push in state.contributed} | {pull.worker for pull in state.waiting}
        if state.version < 0 or len(clocks) != len(state.members) or not clocks.keys() >= asking:
            raise ValueError(f"{len(state.members)} members of version {state.version}, of which {asking} wait")
        self.version, self._ahead, self.clocks = state.version, state.ahead, clocks
        self._incarnations = {worker: incarnation for worker, incarnation, _ in state.members}
        self._done = IntervalSet(intervals_of(numbers_in(state.done)))
        self._contributed = {push.worker: push for push in state.contributed}
        self._waiting = {pull.worker: pull for pull in state.waiting}
        self._overdue = set(state.overdue)
        self.last, self._among = state.last, state.among
        self._awaited = None if state.awaited is None else set(state.awaited)
        results = ((result.push, Reason(result.refused) if result.refused else None) for result in state.told)
        self._last = {push.worker: (push, _answer_of(push, refused)) for push, refused in results}

    def _push(self, push: Push) -> list[Action]:
        worker = push.worker
        if self._incarnations.get(worker) != push.incarnation:
            return [Refuse(worker, push.lease, Reason.STRANGER)]
        self._overdue.discard(worker)
        last = self._last.get(worker)
        if last is not None and last[0].lease == push.lease and last[0] == push:
            # Its answer was lost. It is not another round, and the result stays the same.
            return [last[1]]
        if self._combination.needed(len(self.clocks)):
            return self._contribute(push)
        self.clocks[worker] += 1
        step: list[Action] = []
        if push.lease not in self._done and push.finite and push.weight:
            step.append(ApplyStep((worker,), push.share, self.version - push.version))
            self.version += 1
        return [*step, self._finish(push), *self._release()]

    def _contribute(self, push: Push) -> list[Action]:
        worker, done = push.worker, push.lease in self._done
        elsewhere = isinstance(self._combination, DecidedElsewhere) and worker not in (self._awaited or ())
        if push.version != self.version or elsewhere or worker in self._contributed:
            refused = Refuse(worker, push.lease, Reason.DUPLICATE if done else Reason.LATE)
            return [refused, *self._without(worker)]
        self.clocks[worker] += 1
        self._contributed[worker] = push
        sums: list[Action] = [Accumulate(worker)] if push.finite and push.weight and not done else []
        return [*sums, *self._close(), *self._release()]

    def _finish(self, push: Push) -> Ack | Refuse:
        """Returns the result of a push at the end of its round.

        A duplicate counts as a round of its worker, too, which has computed it because another push was lost between
        shards. If it did not, two workers could wait for each other, each on another shard.
        """
        refused = None if push.finite else Reason.NOT_FINITE
        result = _answer_of(push, Reason.DUPLICATE if push.lease in self._done else refused)
        self._done.add(push.lease)
        self._last[push.worker] = (push, result)
        return result

    def _close(self, early: bool = False) -> list[Action]:
        """Ends the round if enough workers have contributed; with `early`, if any has."""
        if self._awaited is not None:
            return self._end() if self._awaited <= self._contributed.keys() else []
        needed = self._combination.needed(len(self.clocks) - len(self._overdue))
        if self._ahead is not None:
            needed = min(needed, self._ahead - len(self._done))
        if not self._contributed or (len(self._contributed) < needed and not early):
            return []
        if early:
            # A member that has delayed the others once is not waited for again before it has pushed.
            self._overdue = self.clocks.keys() - self._contributed.keys()
        return self._end()

    def _end(self) -> list[Action]:
        """Ends the round with all who have contributed."""
        pushes = [push for _, push in sorted(self._contributed.items())]
        self.last = RoundMembers(self.version, tuple((push.worker, push.incarnation) for push in pushes))
        self._awaited = None
        answers = [self._finish(push) for push in pushes]
        every = zip(pushes, answers, strict=True)
        counted = [push for push, answer in every if isinstance(answer, Ack) and push.weight]
        self._contributed.clear()
        self.version += 1
        # After a loss, a round may have other data than one global batch; the step is scaled by the shares that it has.
        every = zip(pushes, answers, strict=True)
        share = sum(p.share for p, answer in every if getattr(answer, "reason", None) != Reason.DUPLICATE)
        share = 1.0 if abs(share - 1.0) < _EXACTLY else share
        step: list[Action] = [ApplyStep(tuple(push.worker for push in counted), share, 0)] if counted else []
        return [*step, *answers]

    def _pull(self, pull: Pull) -> list[Action]:
        if self._incarnations.get(pull.worker) != pull.incarnation:
            return [Refuse(pull.worker, -1, Reason.STRANGER)]
        self._waiting.setdefault(pull.worker, pull)
        return self._without(pull.worker) + self._release()

    def _without(self, worker: int) -> list[Action]:
        """Makes a round that has ended elsewhere not wait for a worker that has no push for it here."""
        if self._awaited is None or worker in self._contributed:
            return []
        self._awaited.discard(worker)
        return self._close() + self._release()

    def _release(self) -> list[Action]:
        # While a round that has ended elsewhere is open here, there is no new version.
        if not self._waiting or self._awaited is not None:
            return []
        slowest = min(self.clocks.values()) if self._admission.waits else 0
        ready = [
            worker
            for worker, pull in self._waiting.items()
            if worker not in self._contributed
            and pull.least <= self.version
            and self._admission.admits(self.clocks[worker], slowest)
        ]
        for worker in ready:
            del self._waiting[worker]
        return [Reply(worker, self.version) for worker in ready]

    def _change(self, event: Join | Leave) -> list[Action]:
        worker = event.worker
        self._waiting.pop(worker, None)
        self._overdue.discard(worker)
        # Its push of the open round is dropped with it; the lease is given out again.
        if self._contributed.pop(worker, None) is not None:
            self.clocks[worker] -= 1
        incarnation = event.incarnation if isinstance(event, Join) else None
        if self._incarnations.pop(worker, None) != incarnation:
            self.clocks.pop(worker, None)
            if self._awaited is not None:
                self._awaited.discard(worker)
        if incarnation is not None:
            # A member that joins late, or again, starts with the slowest clock, and delays no other.
            self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
            self._incarnations[worker] = incarnation
        return self._close() + self._release()


def _answer_of(push: Push, refused: Reason | None) -> Ack | Refuse:
    return Refuse(push.worker, push.lease, refused) if refused else Ack(push.worker, push.lease)
