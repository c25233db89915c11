"""A world of members that are lost, cut off, paused and join, in which every order of events may happen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from headrace.policies.membership import Action, AskToJoin, CommitStep, Depart, End, Enter, Message, Send, ViewAgreement
from headrace.policies.views import Member, MemberView

Step = tuple[int, int]
"""A step of a view: the view's number, and the step's."""

Sum = tuple[int, int, bool]
"""The sum of all gradients of a step: which view's, which step's, and whether one has voted against it."""


class Violation(AssertionError):
    """A history that must not be."""


@dataclass
class Process:
    """A member, what it has applied, and its view's number."""

    machine: ViewAgreement
    applied: list[Sum] = field(default_factory=list)
    refused: Step | None = None
    gave_up: Step | None = None
    suspects: set[Member] = field(default_factory=set)
    number: int = 0
    paused: bool = False
    why: str = ""


@dataclass
class Members:
    """Processes, the network between them, and what they have done together.

    `machine` is the class of the members' machines; each of `chances` is how likely a kind of fault is.
    """

    seed: int
    count: int
    machine: Any = ViewAgreement
    joins: int = 2
    faults: bool = True
    chance: random.Random = field(init=False)
    processes: dict[Member, Process] = field(default_factory=dict)
    mail: list[tuple[Member, Member, Message]] = field(default_factory=list)
    cut: set[tuple[Member, Member]] = field(default_factory=set)
    contributions: dict[tuple[Step, str], set[Member]] = field(default_factory=dict)
    against: dict[Step, Member | None] = field(default_factory=dict)
    views: dict[int, MemberView] = field(default_factory=dict)
    sums: dict[int, Sum] = field(default_factory=dict)
    speed: float = field(init=False)
    patience: int = 3

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.speed = self.chance.choice((0.5, 0.7, 0.9))
        members = tuple((rank, 0) for rank in range(self.count))
        view = self.views[1] = MemberView(1, members)
        if self.faults:
            # Impatient members compete for the next view.
            self.patience = self.chance.choice((0, 0, 1, 3))
        self.processes = {member: Process(self.machine(member, view, self.patience), number=1) for member in members}

    @property
    def live(self) -> list[Member]:
        """The processes that have neither died nor ended."""
        return [member for member, process in self.processes.items() if not process.machine.ended]

    def run(self, events: int) -> None:
        """Lets so many random things happen."""
        for _ in range(events):
            self._one()

    def settle(self, rounds: int = 60) -> None:
        """Repairs the network, tells all who is there, and lets time pass."""
        self.faults = False
        self.cut.clear()
        for process in self.processes.values():
            process.paused = False
        self.pass_time(rounds)

    def pass_time(self, rounds: int) -> None:
        """Lets all messages arrive between two ticks of each member."""
        for _ in range(rounds):
            for member in self.live:
                self._suspect(member)
                self._act(member, self.processes[member].machine.tick())
            for member in self.live:
                self._ask(member)
                self._train(member)
            for _ in range(100_000):
                if not self.mail:
                    break
                self._deliver()

    def kill(self, member: Member) -> None:
        """Ends a process at once."""
        del self.processes[member]

    def partition(self, *halves: list[int]) -> None:
        """Cuts all links between groups of ranks, in both directions."""
        side = {rank: number for number, half in enumerate(halves) for rank in half}
        every = [*self.processes]
        self.cut = {(a, b) for a in every for b in every if side.get(a[0]) != side.get(b[0])}

    def _one(self) -> None:
        if not self.live:
            return
        member = self.chance.choice(self.live)
        process = self.processes[member]
        draw = self.chance.random()
        if self.chance.random() < self.speed:
            self._deliver()
        elif process.paused:
            process.paused = self.chance.random() < 0.7
        elif draw < 0.6:
            self._train(member)
        elif draw < 0.8:
            self._act(member, process.machine.tick())
        elif draw < 0.9:
            self._suspect(member)
        elif self.faults and draw > 0.96:
            self._fault(member)
        else:
            self._ask(member)

    def _deliver(self) -> None:
        if not self.mail:
            return
        sender, receiver, message = self.mail.pop(self.chance.randrange(len(self.mail)))
        process = self.processes.get(receiver)
        lost = (sender, receiver) in self.cut or (self.faults and self.chance.random() < 0.02)
        if process is None or lost:
            return
        if process.paused:
            self.mail.append((sender, receiver, message))
            return
        self._act(receiver, process.machine.receive(sender, message))

    def _train(self, member: Member) -> None:
        """Lets a member get the state, or do some of a step: contribute to it, vote, take its sum."""
        for _ in range(self.chance.choice((1, 2, 3))):
            self._train_on(member)

    def _train_on(self, member: Member) -> None:
        process = self.processes[member]
        view = process.machine.view
        if view is None:
            return
        if process.machine.done < 0:
            giver = self.processes.get(next(each for each in view.members if each not in view.fresh))
            if giver is not None and giver.number == view.number and not giver.paused:
                process.applied = giver.applied[:]
                process.machine.receive_state()
            return
        step = (view.number, process.machine.done)
        if not self._meets(member, step, "sum"):
            return
        if step not in self.against:
            # Each votes once; who votes against it does not hold it.
            self.against[step] = self.chance.choice(view.members) if self.chance.random() < 0.2 else None
        is_against = self.against[step] == member
        if process.refused == step:
            if self._meets(member, step, "refusal"):
                self._act(member, process.machine.hold())
            return
        voted = member in self.contributions.get((step, "vote"), ())
        fails = not voted or not self._meets(member, step, "vote") or self.chance.random() < 0.5
        if process.gave_up == step or (fails and (process.machine.frozen or process.suspects)):
            # Its vote fails, and it takes no further part in the step.
            process.gave_up = step
            if voted and not is_against:
                self._act(member, process.machine.hold())
            return
        if not voted and not is_against:
            self._act(member, process.machine.hold(silently=True))
        if not self._meets(member, step, "vote"):
            return
        if self.against[step] is None:
            self._act(member, process.machine.hold())
        elif is_against or process.machine.release():
            process.refused = step

    def _meets(self, member: Member, step: Step, what: str) -> bool:
        """Notes that a member has come to a collective; returns whether all have."""
        view = self.processes[member].machine.view
        come = self.contributions.setdefault((step, what), set())
        come.add(member)
        return view is not None and come >= set(view.members)

    def _suspect(self, member: Member) -> None:
        machine = self.processes[member].machine
        if machine.view is None:
            return
        silent = {
            other
            for other in machine.view.members
            if other not in self.processes or self.processes[other].machine.ended or (other, member) in self.cut
            or self.processes[other].paused
        }  # fmt: skip
        if self.faults and self.chance.random() < 0.1:
            silent.add(self.chance.choice(machine.view.members))
        process = self.processes[member]
        # Who has given up a step suspects those for whom it did so, until the members change.
        given_up = process.gave_up == (machine.view.number, machine.done)
        process.suspects = process.suspects | silent if given_up else silent
        process.suspects &= set(machine.view.members) - {member}
        self._act(member, machine.suspect(process.suspects))

    def _ask(self, member: Member) -> None:
        machine = self.processes[member].machine
        if machine.view is None:
            self.mail += [(member, other, AskToJoin()) for other in self.processes if other != member]
        elif self.faults and self.chance.random() < 0.3 and machine.view.members[0] == member:
            self._act(member, machine.let_leave(self.chance.sample(machine.view.members, 1)))

    def _fault(self, member: Member) -> None:
        draw, others = self.chance.random(), [other for other in self.processes if other != member]
        if draw < 0.1 and len(self.live) > 1:
            self.kill(member)
        elif draw < 0.3:
            self.processes[member].paused = True
        elif draw < 0.7 and others:
            self.cut.add((member, self.chance.choice(others)))
        elif draw < 0.75:
            self.cut |= {link for other in others for link in ((member, other), (other, member))}
        elif draw < 0.9:
            self.cut.clear()
        elif self.joins:
            self.joins -= 1
            new = (self.count + self.joins, 0) if self.chance.random() < 0.5 else (member[0], self.joins + 10)
            self.processes[new] = Process(self.machine(new, None, self.patience))

    def _act(self, member: Member, actions: list[Action]) -> None:
        process = self.processes[member]
        for action in actions:
            match action:
                case Send(to, message):
                    self.mail.append((member, to, message))
                case CommitStep(step):
                    self._commit(process, step)
                case Enter(view):
                    self._enter(process, view)
                case Depart():
                    process.why = "asked to leave"
                case End(why):
                    process.why = why
                    if "have done" in why:
                        raise Violation(f"{member}: {why}")

    def _commit(self, process: Process, step: int) -> None:
        own = (process.number, step, process.refused == (process.number, step))
        if self.sums.setdefault(step, own) != own:
            raise Violation(f"step {step} was committed in view {self.sums[step][0]} and in view {own[0]}")
        if len(process.applied) != step:
            raise Violation(f"step {step} was committed after {len(process.applied)} steps")
        process.applied.append(own)

    def _enter(self, process: Process, view: MemberView) -> None:
        if self.views.setdefault(view.number, view) != view:
            raise Violation(f"two views have the number {view.number}: {self.views[view.number]} and {view}")
        if view.number <= process.number:
            raise Violation(f"view {view.number} comes after view {process.number}")
        process.number = view.number
        process.suspects = set()
        if process.machine.me not in view.fresh and len(process.applied) != view.done:
            raise Violation(f"view {view.number} begins after {view.done} steps, and one has {len(process.applied)}")


def progress(members: Members) -> int:
    """Returns how many steps the members that went on have done since it was asked for; raises if they do none.

    All who live are members of one view, or have ended.
    """
    members.settle()
    before = max((len(members.processes[each].applied) for each in members.live), default=0)
    members.pass_time(20)
    going = [members.processes[each] for each in members.live if members.processes[each].machine.view is not None]
    if not going:
        return 0
    if len({process.number for process in going}) > 1:
        raise Violation(f"views {[process.number for process in going]} go on beside each other")
    made = min(len(process.applied) for process in going) - before
    if made < 1:
        raise Violation(f"{len(going)} members stand still after {before} steps")
    return made
