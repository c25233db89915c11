"""Who trains on when workers are lost, cut off or join, and which step was the last: one member's part of the decision.

    member 0   step 7 ─ holds ─┐ promises ─┐ accepts ─┐ view 2: 0, 2; 7 steps are done ─ step 7 again
    member 1   step 7 ─ ✗      │           │          │
    member 2   step 7 ─────────┘ promises ─┘ accepts ─┘ view 2: 0, 2; 7 steps are done ─ step 7 again

All members of a *view* do each step together: a member *holds* a step when it has the sum of all gradients, and commits
it when it knows that all hold it. When one is lost, the others agree on the next view, by Paxos with the old view's
members as acceptors (Lamport, "Paxos made simple", 2001). A member that has promised commits nothing more in the old
view, so what it has told of itself stays true. Of two halves only one can decide: the one with more than half of the
old view's members, or with just half of them and the lowest rank.

A step that some member may have committed is held by all members, so the next view counts it if all who have answered
hold it; otherwise no member has committed it, and it is done again.

What holding a step says of it must be the same on all, because a member may commit it on the others' word alone. A
member may hold a step *silently* while all vote on it, and `release` it if one of them has voted against.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.policies.views import Member, MemberState, MemberView, may_go_on, next_view

Ballot = tuple[int, Member]
"""Attempts are numbered, and of one number the higher member's counts."""


@dataclass(frozen=True)
class HoldsStep:
    """The sender holds a step. If it `asks`, it does not know whether the receiver does."""

    number: int
    step: int
    asks: bool = False


@dataclass(frozen=True)
class Prepare:
    """Asks for a promise, for the view after `base`."""

    base: MemberView
    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """The sender takes part in no lower ballot, and commits nothing more in the view."""

    number: int
    ballot: Ballot
    state: MemberState
    accepted: tuple[Ballot, MemberView] | None


@dataclass(frozen=True)
class Accept:
    """Proposes the view after `base`."""

    base: MemberView
    ballot: Ballot
    view: MemberView


@dataclass(frozen=True)
class Accepted:
    """The sender has accepted a proposal for the view after that number."""

    number: int
    ballot: Ballot


@dataclass(frozen=True)
class Decided:
    """A view that is decided."""

    view: MemberView


@dataclass(frozen=True)
class At:
    """The sender is at this view."""

    number: int


@dataclass(frozen=True)
class AskToJoin:
    """The sender wants to be a member."""


Message = HoldsStep | Prepare | Promise | Accept | Accepted | Decided | At | AskToJoin


@dataclass(frozen=True)
class Send:
    """An action: send a message."""

    to: Member
    message: Message


@dataclass(frozen=True)
class CommitStep:
    """An action: apply the sum of a step."""

    step: int


@dataclass(frozen=True)
class Enter:
    """An action: go on as a member of a view. What was begun of its step `done` is dropped, and begun again."""

    view: MemberView


@dataclass(frozen=True)
class Depart:
    """An action: end this process in order, as it was asked to."""


@dataclass(frozen=True)
class End:
    """An action: end this process, because the others go on without it."""

    why: str


Action = Send | CommitStep | Enter | Depart | End


@dataclass
class _Proposal:
    """An attempt of this member to decide the next view."""

    base: MemberView
    ballot: Ballot
    promises: dict[Member, Promise] = field(default_factory=dict)
    view: MemberView | None = None
    accepted: set[Member] = field(default_factory=set)


class ViewAgreement:
    """One member's part. Each method returns the actions to take, in order.

    Args:
        me: this member.
        view: the first one, the same on all its members; None for a process that joins.
        patience: ticks to wait for answers before a member acts without them.

    Attributes:
        view: the present one; None before it has joined.
        done: steps that are committed here; -1 without the state.
        frozen: whether this member has promised, so that it waits for the next view.
        ended: whether it has ended.
    """

    _held: set[Member]
    _promised: Ballot
    _accepted: tuple[Ballot, MemberView] | None
    _proposal: _Proposal | None

    def __init__(self, me: Member, view: MemberView | None, patience: int = 3) -> None:
        self.me = me
        self.view = view
        self.done = -1 if view is None or me in view.fresh else view.done
        self.frozen = False
        self.ended = False
        self._patience = patience
        self._suspects: frozenset[Member] = frozenset()
        self._joining: set[Member] = set()
        self._leaving: set[Member] = set()
        self._attempt = 0
        self._alone = 0
        self._reset()

    def hold(self, silently: bool = False) -> list[Action]:
        """Notes that this member has the sum of the current step; the others learn it later if `silently`."""
        if self.ended or self.frozen or self.view is None:
            return []
        self._holds, self._told = True, not silently
        return [] if silently else [*self._tell(HoldsStep(self.view.number, self.done)), *self._commit()]

    def release(self) -> bool:
        """Takes back that this member holds the current step, silently; False where another may know it already."""
        if self.frozen or self._told or not self._holds:
            return False
        self._holds = False
        return True

    def let_leave(self, members: Iterable[Member]) -> list[Action]:
        """Begins to change the members to those without some who are asked to leave."""
        self._leaving.update(members)
        return self._begin() if self._wants_change() else []

    def receive_state(self) -> list[Action]:
        """Notes that a fresh member has the state of the view's beginning."""
        if self.view is not None and self.done < 0:
            self.done = self.view.done
        return []

    def suspect(self, suspects: Iterable[Member]) -> list[Action]:
        """Takes the members that cannot be reached now, all of them at each call."""
        self._suspects = frozenset(suspects) - {self.me}
        return self._begin() if self._wants_change() else []

    def tick(self) -> list[Action]:
        """Notes that time has passed: repeats messages that may be lost, and acts without answers that are late."""
        if self.ended or self.view is None:
            return []
        # Others that are further answer with their view.
        actions = self._tell(At(self.view.number))
        if self._holds and self._told and not self.frozen:
            actions += self._tell(HoldsStep(self.view.number, self.done, asks=True))
        self._alone = 0 if may_go_on(self.view.members, self._reachable()) else self._alone + 1
        if self._alone > self._patience:
            return self._end(self._alone_text())
        if not (self.frozen or self._wants_change()):
            return actions
        self._waited += 1
        proposal = self._proposal
        if proposal is not None and proposal.view is None and self._waited > self._patience:
            actions += self._propose(proposal, late=True)
        # Not all at once: the first that can, then the next.
        turn = self._reachable().index(self.me) + 2
        if self._waited > turn * self._patience:
            actions += self._attempt_change()
        return actions

    def receive(self, sender: Member, message: Message) -> list[Action]:
        """Takes a message."""
        if self.ended:
            return []
        if isinstance(message, Decided):
            return self._install(message.view)
        if self.view is None:
            return []
        if isinstance(message, AskToJoin):
            assert self.view is not None
            if sender in self.view.members:
                return [Send(sender, Decided(self.view))]
            self._joining.add(sender)
            return self._begin()
        if isinstance(message, Prepare | Accept):
            number = message.base.number
            actions = self._install(message.base) if number > self.view.number else []
        else:
            number, actions = message.number, []
        if number < self.view.number:
            return [Send(sender, Decided(self.view))]
        # What comes from a later view is told again when this member has said where it is.
        return actions if self.ended or number > self.view.number else [*actions, *self._take(sender, message)]

    def _take(self, sender: Member, message: Message) -> list[Action]:
        """Takes a message of the present view."""
        match message:
            case HoldsStep(number, step, asks):
                if step == self.done:
                    self._held.add(sender)
                answers: list[Action] = [Send(sender, HoldsStep(number, step))] if asks and step < self.done else []
                return [*answers, *self._commit()]
            case Prepare(_, ballot) if ballot > self._promised:
                self._promised, self.frozen = ballot, True
                return self._to(
                    sender, Promise(self._number, ballot, MemberState(self.done, self._holds), self._accepted)
                )
            case Promise(_, ballot) if self._proposal and self._proposal.ballot == ballot:
                self._proposal.promises[sender] = message
                return self._propose(self._proposal)
            case Accept(_, ballot, view) if ballot >= self._promised:
                self._promised, self.frozen, self._accepted = ballot, True, (ballot, view)
                return self._to(sender, Accepted(self._number, ballot))
            case Accepted(_, ballot) if self._proposal and self._proposal.ballot == ballot:
                self._proposal.accepted.add(sender)
                return self._decide(self._proposal)
        return []

    def _reset(self) -> None:
        """Forgets what belongs to the last view."""
        self.frozen = self._holds = self._told = False
        self._held = set()
        self._promised = (0, self.me)
        self._accepted = None
        self._proposal = None
        self._attempt = self._waited = 0

    @property
    def _number(self) -> int:
        assert self.view is not None
        return self.view.number

    def _reachable(self) -> list[Member]:
        assert self.view is not None
        return [member for member in self.view.members if member not in self._suspects]

    def _alone_text(self) -> str:
        assert self.view is not None
        here, there = len(self._reachable()), len(self.view.members)
        return f"only {here} of the {there} workers are reached from here, and the others may go on without them"

    def _wants_change(self) -> bool:
        if self.ended or self.view is None:
            return False
        unwanted = self._suspects | self._leaving
        return bool(unwanted.intersection(self.view.members) or self._joining)

    def _tell(self, message: Message) -> list[Action]:
        assert self.view is not None
        return [Send(member, message) for member in self.view.members if member != self.me]

    def _to(self, member: Member, message: Message) -> list[Action]:
        return self._take(self.me, message) if member == self.me else [Send(member, message)]

    def _commit(self) -> list[Action]:
        """Commits the step if all hold it."""
        assert self.view is not None
        if not self._holds or not self._held.issuperset(set(self.view.members) - {self.me}):
            return []
        self._holds, self._told, self._held = False, False, set()
        self.done += 1
        return [CommitStep(self.done - 1)]

    def _begin(self) -> list[Action]:
        """Lets the first member that can be reached begin the change."""
        first = self._reachable()[:1] == [self.me]
        return self._attempt_change() if first and self._proposal is None and not self.frozen else []

    def _attempt_change(self) -> list[Action]:
        assert self.view is not None
        self._waited = 0
        self._attempt = max(self._attempt, self._promised[0]) + 1
        self._proposal = _Proposal(self.view, (self._attempt, self.me))
        prepare = Prepare(self.view, self._proposal.ballot)
        return [*self._tell(prepare), *self._take(self.me, prepare)]

    def _propose(self, proposal: _Proposal, late: bool = False) -> list[Action]:
        """Proposes a view, when all have answered who can be reached, or enough of them have and it is `late`."""
        base = proposal.base
        answers = proposal.promises
        complete = late or answers.keys() >= set(self._reachable())
        if proposal.view is not None or not complete or not may_go_on(base.members, answers):
            return []
        accepted = [promise.accepted for promise in answers.values() if promise.accepted]
        states = {member: promise.state for member, promise in answers.items()}
        view = max(accepted)[1] if accepted else next_view(base, states, self._joining, self._leaving)
        if view is None:
            return []
        proposal.view, self._waited = view, 0
        accept = Accept(base, proposal.ballot, view)
        return [*self._tell(accept), *self._take(self.me, accept)]

    def _decide(self, proposal: _Proposal) -> list[Action]:
        if proposal.view is None or not may_go_on(proposal.base.members, proposal.accepted):
            return []
        members = dict.fromkeys([*proposal.base.members, *proposal.view.members])
        messages = [Send(member, Decided(proposal.view)) for member in members if member != self.me]
        return [*messages, *self._install(proposal.view)]

    def _install(self, view: MemberView) -> list[Action]:
        """Enters a view that is decided; ends if this member is none of it."""
        if self.view is not None and view.number <= self.view.number:
            return []
        if self.view is not None and self.me in view.left:
            counts = self._holds and view.number == self.view.number + 1 and view.done == self.done + 1
            self.done += counts
            self.view, self.ended = view, True
            return [*([CommitStep(self.done - 1)] if counts else []), Depart()]
        if self.me not in view.members:
            # One that joins has not been heard yet.
            return (
                self._end("the other workers went on without this one, which they could not reach") if self.view else []
            )
        actions: list[Action] = []
        if self.me in view.fresh:
            self.done = -1
        elif view.done == self.done + 1 and self._holds:
            self.done = view.done
            actions.append(CommitStep(view.done - 1))
        elif view.done != self.done:
            return self._end(f"the other workers have done {view.done} steps, and this one {self.done}")
        self.view = view
        self._joining.difference_update(view.members)
        # Where they stay, because no other has the state, they are asked again.
        self._leaving.clear()
        self._reset()
        actions.append(Enter(view))
        return actions + (self._begin() if self._wants_change() else [])

    def _end(self, why: str) -> list[Action]:
        self.ended = True
        return [End(why)]
