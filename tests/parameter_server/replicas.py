"""Servers and backups without bytes: processes that hear of views late, links that deliver late, an authority.

A `Group` knows at every moment which steps are possible; its driver chooses one after the other, and what must
hold is looked at after each:

    receive P    a worker's mail comes to a process that takes itself for the primary
    deliver a b  the next message from a comes to b
    hear P       a process hears the newest view
    news         the authority hears what was told first
    kill P       a process ends; what it has sent may still come
    suspect P    the authority takes a process for dead that is not, and goes on
    spawn        a new process is there
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headrace.parameter_server.replication import machine as module
from headrace.parameter_server.replication.machine import (
    Called,
    Deal,
    Down,
    Fill,
    Filled,
    Follow,
    Forward,
    Held,
    Hold,
    LogEntryReceived,
    PrimaryLost,
    Ready,
    Received,
    RefuseOldEpoch,
    Up,
    View,
)

Step = tuple[str, ...]


@dataclass
class Process:
    """One process: its machine, the mail that it knows by number, and what it has dealt with, in order."""

    machine: Any
    alive: bool = True
    mail: dict[int, int] = field(default_factory=dict)
    dealt: list[int] = field(default_factory=list)
    view: View | None = None
    primary: int = -1
    ready: int = 0
    filled: int = 0

    @property
    def heard(self) -> int:
        """The newest epoch that it has heard of."""
        return self.view.epoch if self.view else 0


class Group:
    """Processes, what is on its way between them, and their authority."""

    def __init__(self, machine: Any = module.Replication, authority: Any = module.Authority) -> None:
        self._machine = machine
        self.authority = authority()
        self.processes: list[Process] = []
        self.links: dict[tuple[int, int], deque[tuple[Any, Any]]] = {}
        self.told: deque[Any] = deque()
        self.mails = 0
        self.over = False
        self.promotions = 0

    def __repr__(self) -> str:
        nodes = [
            (vars(each.machine), each.alive, each.mail, each.dealt, each.view, each.primary, each.ready)
            for each in self.processes
        ]
        return f"{nodes} {self.links} {self.told} {vars(self.authority)} {self.mails} {self.over}"

    def steps(self) -> list[Step]:
        """Returns what may happen next, but for new mail, kills and spawns, which always may."""
        if self.over:
            return []
        found: list[Step] = [("news",)] if self.told else []
        for (sender, to), queue in self.links.items():
            if queue and self.processes[to].alive:
                found.append(("deliver", str(sender), str(to)))
        view = self.authority.view
        for number, process in enumerate(self.processes):
            if process.alive and view is not None and process.heard < view.epoch:
                found.append(("hear", str(number)))
        return found

    def leaders(self) -> list[int]:
        """Returns who takes itself for the primary."""
        return [number for number, each in enumerate(self.processes) if each.alive and each.machine.leads]

    def do(self, step: Step) -> None:
        """Lets something happen, and looks at everything."""
        name, *who = step
        numbers = [int(each) for each in who]
        getattr(self, f"_{name}")(*numbers)
        self._look()

    def rest(self) -> None:
        """Lets everything that is on its way come to its end."""
        for _ in range(10_000):
            possible = self.steps()
            if not possible:
                break
            self.do(possible[0])
        else:
            raise AssertionError("it never comes to rest")
        view = self.authority.view
        if self.over or view is None:
            return
        primary = self.processes[view.primary]
        backup = None if view.backup is None else self.processes[view.backup]
        if primary.alive and (backup is None or backup.alive):
            assert len(primary.dealt) == primary.machine.last, "what has come is dealt with"
            if backup is not None:
                assert self.authority.ready, "the backup can be promoted"
                assert backup.dealt == primary.dealt

    def _spawn(self) -> None:
        self.processes.append(Process(self._machine(len(self.processes))))
        self.told.append(Up(len(self.processes) - 1))

    def _kill(self, number: int) -> None:
        self.processes[number].alive = False
        self.told.append(Down(number))

    def _suspect(self, number: int) -> None:
        self.told.append(Down(number))

    def _lose(self, sender: int, to: int) -> None:
        """What is on its way from a dead process is lost."""
        self.links[sender, to].clear()

    def _news(self) -> None:
        before = self.authority.view
        try:
            self.authority.handle(self.told.popleft())
        except PrimaryLost:
            self.over = True
        after = self.authority.view
        if before is not None and after is not None and after.primary != before.primary:
            self.promotions += 1

    def _hear(self, number: int) -> None:
        process, view = self.processes[number], self.authority.view
        process.view = view
        self._act(number, process.machine.handle(view))

    def _receive(self, number: int) -> None:
        process = self.processes[number]
        self.mails += 1
        process.mail[process.machine.last + 1] = self.mails
        self._act(number, process.machine.handle(Received()))

    def _deliver(self, sender: int, to: int) -> None:
        event, content = self.links[sender, to].popleft()
        process = self.processes[to]
        actions = process.machine.handle(event)
        if any(isinstance(action, RefuseOldEpoch) for action in actions):
            # The link ends: nothing more comes over it, either way.
            self.links[sender, to].clear()
            self.links.get((to, sender), deque()).clear()
            return
        if isinstance(event, Filled):
            process.dealt, process.mail = list(content), dict(enumerate(content, 1))
        elif isinstance(event, LogEntryReceived):
            process.mail[event.number] = content
        self._act(to, actions)

    def _act(self, number: int, actions: list[Any]) -> None:
        process = self.processes[number]
        epoch = process.machine.epoch
        for action in actions:
            if isinstance(action, Deal):
                assert action.number == len(process.dealt) + 1, "no piece is dealt with twice, none is left out"
                assert process.filled < epoch or process.ready == epoch, (
                    "nothing is dealt with while the backup is filled"
                )
                process.dealt.append(process.mail[action.number])
            elif isinstance(action, Forward):
                self._send(
                    number, self._backup_of(number), LogEntryReceived(epoch, action.number), process.mail[action.number]
                )
            elif isinstance(action, Fill):
                assert action.number == len(process.dealt)
                process.filled = epoch
                self._send(number, self._backup_of(number), Filled(epoch, action.number), tuple(process.dealt))
            elif isinstance(action, Hold):
                self._send(number, process.primary, Held(epoch, action.number), None)
            elif isinstance(action, Follow):
                process.primary, process.dealt, process.mail = action.primary, [], {}
                self._send(number, action.primary, Called(action.epoch, number), None)
            elif isinstance(action, Ready):
                process.ready = action.epoch
                self.told.append(action)

    def _backup_of(self, number: int) -> int:
        view = self.processes[number].view
        assert view is not None
        assert view.backup is not None
        return view.backup

    def _send(self, sender: int, to: int, event: Any, content: Any) -> None:
        self.links.setdefault((sender, to), deque()).append((event, content))

    def _look(self) -> None:
        history = max((each.dealt for each in self.processes), key=len, default=[])
        for number, process in enumerate(self.processes):
            assert process.dealt == history[: len(process.dealt)], f"process {number} has a history of its own"
            if process.alive and process.machine.leads and process.ready == process.machine.epoch:
                backup = self.processes[self._backup_of(number)]
                assert len(process.dealt) <= len(backup.dealt), "what is dealt with is held by the backup"
        view = self.authority.view
        if view is None or self.over or self.processes[view.primary].heard < view.epoch:
            return
        last = self.processes[view.primary].machine.last
        assert len(history) <= last, "the primary's log begins with all that any replica has dealt with"
