"""What shards and leases must do, kept in books of their own and held against what the machines do."""

from __future__ import annotations

from typing import Any

from headrace.parameter_server.core import leases as lease
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
    Settle,
)
from headrace.policies.staleness import Bounded, EveryPush, Unbounded


class ShardBook:
    """One shard and what is known about it."""

    def __init__(self, machine: Any, world: Any, history: Any) -> None:
        self.machine, self.world, self.history = machine, world, history
        self.each = isinstance(world.combination, EveryPush)
        self.version = 0
        self.clocks = dict.fromkeys(range(len(world.paces)), 0)
        self.incarnations = dict.fromkeys(self.clocks, 0)
        self.open: dict[int, Push] = {}
        self.waiting: dict[int, Pull] = {}
        self.given: set[int] = set()
        self.fate: dict[int, str] = {}
        self.settled = 0
        self.ahead: int | None = None
        self.late = False
        self.overdue: set[int] = set()

    def __repr__(self) -> str:
        return f"version {self.version}, clocks {self.clocks}, open {self.open}, {len(self.fate)} leases done"

    def handle(self, event: Event) -> list[Action]:
        """Lets the shard handle an event, and checks what it does."""
        if isinstance(event, Join | Leave):
            self._change(event)
        elif isinstance(event, LeasesAhead):
            self.ahead = event.leases
        elif isinstance(event, Pull):
            self.waiting[event.worker] = event
        elif isinstance(event, Push):
            assert event.worker not in self.open
            self.open[event.worker] = event
        actions: list[Action] = self.machine.handle(event)
        refusals = {action.worker: action.reason for action in actions if isinstance(action, Refuse)}
        if isinstance(event, Push):
            self._note(event, refusals.get(event.worker))
        before, done = self.version, len(self.fate)
        for action in actions:
            self._check(action)
        assert set(self.machine.clocks) == set(self.clocks), "the members are those that have joined and not left"
        if not self.each:
            self._check_round(event, before, done)
        if isinstance(event, Pull) and isinstance(self.world.admission, Unbounded) and self.each:
            assert [type(action) for action in actions] == [Reply], "no worker ever waits"
        self._check_waiting()
        return actions

    def renew(self, times: int) -> None:
        """Replaces the parameters while all workers meet."""
        for _ in range(times):
            assert self.machine.handle(Renew()) == []
        self.version += times

    def settle(self, version: int) -> None:
        """Lets all workers go on after they have met."""
        assert not self.open, "everything is answered when all meet"
        assert self.machine.handle(Settle(version)) == []
        self.settled, self.ahead = len(self.fate), None
        self.version = max(self.version, version)

    def close(self, stop: int) -> None:
        """Checks the end of a history that has had so many leases: each was done once."""
        assert sorted(self.fate) == list(range(stop)), "every lease is done on every shard"

    def _change(self, event: Join | Leave) -> None:
        worker = event.worker
        self.overdue.discard(worker)
        if worker in self.given:
            self.given.discard(worker)
            self.clocks[worker] -= not self.each
        self.waiting.pop(worker, None)
        self.open.pop(worker, None)
        if isinstance(event, Leave):
            self.clocks.pop(worker, None)
            self.incarnations.pop(worker, None)
            return
        if self.incarnations.get(worker) != event.incarnation:
            self.clocks.pop(worker, None)
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
        self.incarnations[worker] = event.incarnation

    def _note(self, push: Push, reason: Reason | None) -> None:
        self.late = False
        if self.incarnations.get(push.worker) != push.incarnation:
            assert reason == Reason.STRANGER
            return
        self.overdue.discard(push.worker)
        if self.each or push.version == self.version:
            assert reason not in (Reason.LATE, Reason.STRANGER), "who has the newest parameters is not late"
            self.clocks[push.worker] += 1
            self.given.add(push.worker)
        else:
            assert push.version < self.version
            self.late = push.lease not in self.fate
            assert reason == (Reason.LATE if self.late else Reason.DUPLICATE), "a round takes no older gradients"

    def _check(self, action: Action) -> None:
        if isinstance(action, ApplyStep):
            self._check_step(action)
        elif isinstance(action, Ack):
            push = self.open.pop(action.worker)
            assert action.lease == push.lease
            assert push.finite
            assert self.fate.setdefault(push.lease, "empty") == ("applied" if push.weight else "empty")
        elif isinstance(action, Refuse) and action.lease >= 0:
            self._check_refusal(action)
        elif isinstance(action, Reply):
            self._check_reply(action)
        elif isinstance(action, Accumulate):
            assert not self.each
            assert action.worker in self.open

    def _check_step(self, step: ApplyStep) -> None:
        assert list(step.workers) == sorted(set(step.workers))
        pushes = [self.open[worker] for worker in step.workers]
        # Of a lease that two have pushed in one round, the first counts.
        first = (
            {self.open[worker].lease: worker for worker in sorted(self.given, reverse=True)} if not self.each else {}
        )
        fresh = [self.open[worker] for lease, worker in first.items() if lease not in self.fate]
        sound = sorted(push.worker for push in fresh if push.finite and push.weight)
        before = set(self.fate)
        for push in pushes:
            assert push.finite
            assert push.weight
            assert push.lease not in self.fate, "a lease is applied once"
            self.fate[push.lease] = "applied"
        if self.each:
            (push,) = pushes
            assert step.share == push.share
            assert step.staleness == self.version - push.version, "staleness is what was applied since the pull"
            self.version += 1
        else:
            assert list(step.workers) == sound
            # Of what was done already, a round has nothing.
            given = sum(self.open[worker].share for worker in first.values() if self.open[worker].lease not in before)
            assert abs(step.share - given) < 1e-9
            assert step.staleness == 0
        self.history.staleness.append(step.staleness)

    def _check_refusal(self, refusal: Refuse) -> None:
        push = self.open.pop(refusal.worker)
        assert refusal.lease == push.lease
        self.history.refused[refusal.reason] = self.history.refused.get(refusal.reason, 0) + 1
        if refusal.reason == Reason.NOT_FINITE:
            assert not push.finite
            assert self.fate.setdefault(push.lease, "not finite") == "not finite"
        elif refusal.reason == Reason.DUPLICATE:
            assert push.lease in self.fate
        elif refusal.reason == Reason.STRANGER:
            assert self.incarnations.get(push.worker) != push.incarnation

    def _check_reply(self, reply: Reply) -> None:
        pull = self.waiting.pop(reply.worker)
        assert pull.least <= reply.version == self.machine.version
        if isinstance(self.world.admission, Bounded):
            lead = self.clocks[reply.worker] - min(self.clocks.values())
            assert lead <= self.world.admission.bound, "no worker begins a round further ahead than the bound"

    def _check_waiting(self) -> None:
        slowest = min(self.clocks.values(), default=0)
        for worker, pull in self.waiting.items():
            free = self.each or worker not in self.given
            admitted = self.world.admission.admits(self.clocks[worker], slowest)
            assert not (free and admitted and pull.least <= self.version), "a worker that may go on does not wait"

    def _check_round(self, event: Event, before: int, done: int) -> None:
        size = self.world.combination.needed(len(self.clocks) - len(self.overdue))
        early = isinstance(event, Close) and event.worker in self.given
        gone = self.machine.version - before
        assert gone in (0, 1)
        if self.ahead is not None:
            size = min(size, self.ahead - (done - self.settled))
        if gone:
            # An early fence may leave an open round with more than it needs.
            more = len(self.given) - max(size, 1)
            early_fence = more > 0 and isinstance(event, LeasesAhead)
            assert more == 0 or early_fence or early, "a round ends with as many as it needs"
            if early:
                self.overdue = self.clocks.keys() - self.given
            self.given.clear()
            self.version += 1
        else:
            assert len(self.given) < max(size, 1), "a round that has all it needs ends"
            assert not early, "who has waited long enough waits no longer"


class LeaseBook:
    """The leases and what is known about them."""

    def __init__(self, machine: Any, world: Any, until: int) -> None:
        self.machine, self.world, self.until = machine, world, until
        self.begin = 0
        self.held: dict[int, int] = {}
        self.committed: set[int] = set()
        self.fences: list[int] = []
        self.asking: set[int] = set()
        self.lost: set[int] = set()
        self.present: set[int] = set()
        self.met: set[int] = set()
        self.loose = False

    def __repr__(self) -> str:
        return f"until {self.until}, held {self.held}, {len(self.committed)} committed, asking {self.asking}"

    @property
    def stop(self) -> int:
        """The first lease behind the fence."""
        return self.until * self.world.portions

    def handle(self, event: lease.Event) -> list[lease.Answer]:
        """Lets the leases handle an event, and checks what they answer."""
        if isinstance(event, lease.Ask):
            self.asking.add(event.worker)
            self.present.add(event.worker)
            self.lost.discard(event.worker)
            self.loose |= event.worker >= self.world.portions
        elif isinstance(event, lease.Commit):
            if self.held.pop(event.lease, None) is not None:
                self.committed.add(event.lease)
        elif isinstance(event, lease.Return):
            self.held.pop(event.lease, None)
        elif isinstance(event, lease.WorkerLost):
            self.held = {number: worker for number, worker in self.held.items() if worker != event.worker}
            self.asking.discard(event.worker)
            self.present.discard(event.worker)
            self.met.discard(event.worker)
            self.lost.add(event.worker)
            self.loose = True
        elif isinstance(event, lease.Halt):
            begun = max([-1, *self.held, *self.committed]) // self.world.portions + 1
            assert begun <= self.until
        elif isinstance(event, lease.Advance) and event.done == self.until:
            self.until = event.until
            self.loose = bool(self.lost) or any(worker >= self.world.portions for worker in self.present)
            self.met.clear()
        answers: list[lease.Answer] = self.machine.handle(event)
        self._check_until(event)
        self._check_meeting([answer for answer in answers if isinstance(answer, lease.MeetAtSyncPoint)])
        for answer in answers:
            assert answer.worker in self.asking, "who has not asked is told nothing"
            self.asking.remove(answer.worker)
            if isinstance(answer, lease.Grant):
                self._check_grant(answer)
            else:
                assert answer.round == self.until
                assert self.committed == set(range(self.stop)), "all in front of a fence is committed"
                assert not self.held
                self.fences.append(answer.round)
        self._check_waiting()
        return answers

    def _check_until(self, event: lease.Event) -> None:
        if isinstance(event, lease.Halt):
            assert self.machine.until <= self.until, "a fence comes early, never late"
            assert self.machine.until >= self.begin
            self.until = self.machine.until
        assert self.machine.until == self.until

    def _check_meeting(self, fences: list[lease.MeetAtSyncPoint]) -> None:
        if fences:
            assert not self.met, "one meeting at a time"
            self.met = {fence.worker for fence in fences}
            assert self.met == self.present, "all who are there meet"
            assert {fence.members for fence in fences} == {fences[0].members}, "all know who meets"
            assert sorted(fences[0].members) == sorted(self.met)

    def _check_grant(self, grant: lease.Grant) -> None:
        assert grant.lease == grant.round * self.world.portions + grant.part
        assert 0 <= grant.part < self.world.portions
        assert grant.lease < self.stop, "no worker gets a lease behind the sync point"
        assert grant.lease not in self.held, "no worker gets the lease of another"
        assert grant.lease not in self.committed, "what is done does not come again"
        if self.world.fixed:
            assert self.loose or grant.part == grant.worker
        self.held[grant.lease] = grant.worker

    def _check_waiting(self) -> None:
        """A worker that waits has nothing to get."""
        known = self.committed | set(self.held)
        free = {number for number in range(self.begin * self.world.portions, self.stop) if number not in known}
        if self.loose or not self.world.fixed:
            assert not (free and self.asking), "no worker waits while there are leases"
        assert not {number % self.world.portions for number in free} & self.asking, "no worker waits while it has some"
        over = not free and not self.held and not self.met
        assert not (over and self.present and self.asking >= self.present), "no worker waits when all are done"
