"""Members that train together, are lost, join and leave, as a world of which every state is explored."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.policies.membership import AskToJoin, CommitStep, Depart, End, Enter, Send, ViewAgreement
from headrace.policies.views import MemberView
from model_checking.explorer import Step, copied, frozen

__all__ = ["Agreement", "AgreementSetting"]


@dataclass(frozen=True)
class AgreementSetting:
    """What is explored: so many members from the start, the steps that they do together, and faults of which kinds.

    `kinds` are "kill", "lose" (a message), "suspect" (a member that lives), "tick" (a member does not wait for the
    others' answers), "join" (of a new process) and "leave".
    """

    members: int = 3
    steps: int = 1
    faults: int = 2
    kinds: tuple[str, ...] = ("kill",)
    patience: int = 1


@dataclass
class Process:
    """A member: its machine, the views in which it has committed each step, and who it thinks is lost.

    It `errs` if it has entered a view and still thinks that of one that lives; before all else, it looks again.
    """

    machine: Any
    applied: list[int] = field(default_factory=list)
    suspects: set[int] = field(default_factory=set)
    number: int = 0
    errs: bool = False


class Agreement:
    """Members, by number, the last of which joins later; messages between two of them keep their order."""

    def __init__(self, setting: AgreementSetting, machine: Any = ViewAgreement) -> None:
        self.setting, self.left, self.make = setting, setting.faults, machine
        self.said: list[tuple[Any, Any]] = []
        view = MemberView(1, tuple((rank, 0) for rank in range(setting.members)))
        self.processes = {
            rank: Process(machine((rank, 0), view, setting.patience), number=1) for rank in range(setting.members)
        }
        self.mail: dict[tuple[int, int], deque[Any]] = {}
        self.contributed: dict[tuple[int, int], set[int]] = {}
        self.views = {1: view}
        self.sums: dict[int, int] = {}

    def copy(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(vars(self))
        for name in ("processes", "mail", "contributed", "views", "sums"):
            setattr(made, name, copied(getattr(self, name)))
        return made

    def key(self) -> Any:
        mail = {link: queue for link, queue in self.mail.items() if queue}
        return frozen((self.left, self.processes, mail, self.contributed, self.views, self.sums))

    @property
    def live(self) -> list[int]:
        """The processes that have neither died nor ended."""
        return [rank for rank, process in self.processes.items() if not process.machine.ended]

    def ended(self) -> bool:
        """All who live are members of one view, have done all steps, and think the same; or no member is left."""
        if any(self.mail.values()):
            return False
        live = self.live
        machines = [self.processes[rank].machine for rank in live]
        if all(machine.view is None for machine in machines):
            # One that wants to join finds no other any more.
            return True
        members = {(rank, 0) for rank in live}
        return all(
            machine.view is not None
            and set(machine.view.members) == members
            and machine.view == machines[0].view
            and machine.done == self.setting.steps
            and not machine.frozen
            for machine in machines
        )

    def steps(self) -> list[Step]:
        found: list[Step] = [("notice", rank) for rank in self.live if self.processes[rank].errs]
        if found:
            return found
        for (sender, to), queue in self.mail.items():
            if queue:
                found.append(("deliver", sender, to))
                if sender not in self.processes:
                    found.append(("drop", sender, to))
        for rank in self.live:
            found += self._next(rank)
        # The members' patience ends when nothing else happens any more.
        return found or ([] if self.ended() else [("wait",)])

    def _next(self, rank: int) -> list[Step]:
        process = self.processes[rank]
        machine = process.machine
        view = machine.view
        if view is None:
            return []
        found: list[Step] = []
        if process.suspects != self._silent(rank):
            found.append(("notice", rank))
        if machine.done < 0:
            giver = self._giver(view)
            return [*found, ("take state", rank)] if giver is not None else found
        step = (view.number, machine.done)
        if machine.frozen or machine.done >= self.setting.steps:
            return found
        come = self.contributed.get(step, set())
        if rank not in come:
            found.append(("compute", rank))
        elif come >= {member[0] for member in view.members} and not machine._holds:
            found.append(("sum", rank))
        return found

    def _silent(self, rank: int) -> set[int]:
        view, live = self.processes[rank].machine.view, self.live
        return {member[0] for member in view.members} - set(live)

    def _giver(self, view: MemberView) -> Process | None:
        """Returns who gives a fresh member the state: the first of the others, when it is in that view."""
        first = next(member for member in view.members if member not in view.fresh)
        giver = self.processes.get(first[0])
        return giver if giver is not None and giver.number == view.number else None

    def faults(self) -> list[Step]:
        if not self.left:
            return []
        live, kinds, found = self.live, self.setting.kinds, list[Step]()
        if "kill" in kinds and len(live) > 1:
            found += [("kill", rank) for rank in live]
        if "lose" in kinds:
            found += [("lose", *link) for link, queue in self.mail.items() if queue]
        if "join" in kinds and self.setting.members not in self.processes and not any(self.mail.values()):
            found.append(("join", self.setting.members))
        for rank in live:
            view = self.processes[rank].machine.view
            if view is None:
                continue
            others = [member[0] for member in view.members if member[0] != rank]
            if "suspect" in kinds:
                found += [("suspect", rank, other) for other in others if other not in self.processes[rank].suspects]
            if "tick" in kinds:
                found.append(("tick", rank))
            if "leave" in kinds and view.members[0][0] == rank:
                found += [("leave", rank, other) for other in (rank, *others)]
        return found

    def do(self, step: Step) -> None:
        name, *numbers = step
        self.said = []
        self.left -= name in ("kill", "lose", "suspect", "tick", "join", "leave")
        getattr(self, "_" + str(name).replace(" ", "_"))(*numbers)

    def _deliver(self, sender: int, to: int) -> None:
        message = self.mail[sender, to].popleft()
        if to in self.processes:
            self._act(to, self.processes[to].machine.receive((sender, 0), message), message)

    def _lose(self, sender: int, to: int) -> None:
        self.mail[sender, to].popleft()

    def _drop(self, sender: int, to: int) -> None:
        """What a process has sent that is gone may not arrive."""
        self.mail[sender, to].clear()

    def _wait(self) -> None:
        for rank in self.live:
            self._tick(rank)

    def _tick(self, rank: int) -> None:
        machine = self.processes[rank].machine
        if machine.view is None:
            for other in self.live:
                if other != rank:
                    self.mail.setdefault((rank, other), deque()).append(AskToJoin())
        self._act(rank, machine.tick(), "tick")

    def _notice(self, rank: int) -> None:
        self._think(rank, self._silent(rank))

    def _suspect(self, rank: int, other: int) -> None:
        self._think(rank, self.processes[rank].suspects | {other})

    def _think(self, rank: int, suspects: set[int]) -> None:
        process = self.processes[rank]
        process.suspects, process.errs = suspects, False
        self._act(rank, process.machine.suspect({(other, 0) for other in suspects}), f"suspects {suspects or 'none'}")

    def _leave(self, rank: int, other: int) -> None:
        self._act(rank, self.processes[rank].machine.let_leave([(other, 0)]), f"lets {other} leave")

    def _kill(self, rank: int) -> None:
        del self.processes[rank]
        for (_, to), queue in self.mail.items():
            if to == rank:
                queue.clear()

    def _join(self, rank: int) -> None:
        self.processes[rank] = Process(self.make((rank, 0), None, self.setting.patience))

    def _take_state(self, rank: int) -> None:
        process = self.processes[rank]
        giver = self._giver(process.machine.view)
        assert giver is not None
        process.applied = giver.applied[:]
        self._act(rank, process.machine.receive_state(), "state")

    def _compute(self, rank: int) -> None:
        machine = self.processes[rank].machine
        self.contributed.setdefault((machine.view.number, machine.done), set()).add(rank)

    def _sum(self, rank: int) -> None:
        self._act(rank, self.processes[rank].machine.hold(), "sum of all")

    def _act(self, rank: int, actions: list[Any], event: Any) -> None:
        process = self.processes[rank]
        self.said.append((f"{rank}: {event}", actions))
        for action in actions:
            match action:
                case Send(to, message):
                    if to[0] in self.live:
                        self.mail.setdefault((rank, to[0]), deque()).append(message)
                case CommitStep(step):
                    self._commit(process, step)
                case Enter(view):
                    self._enter(process, view)
                case End(why):
                    assert "have done" not in why, why
                case Depart():
                    pass

    def _commit(self, process: Process, step: int) -> None:
        before = self.sums.setdefault(step, process.number)
        assert before == process.number, f"step {step} is committed in view {before} and in view {process.number}"
        assert len(process.applied) == step, f"step {step} is committed after {len(process.applied)} steps"
        process.applied.append(process.number)

    def _enter(self, process: Process, view: MemberView) -> None:
        before = self.views.setdefault(view.number, view)
        assert before == view, f"two views have the number {view.number}: {before} and {view}"
        process.number, process.errs = view.number, bool(process.suspects)
        if process.machine.me not in view.fresh:
            assert len(process.applied) == view.done, f"{view} begins, and one has done {len(process.applied)} steps"
