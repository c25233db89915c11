"""A server, its backup and a spare process, as a world of which every state is explored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from headrace.parameter_server.replication.machine import Authority, Replication
from model_checking.explorer import Step, copied, frozen
from parameter_server.replicas import Group

__all__ = ["Failover", "FailoverSetting"]


@dataclass(frozen=True)
class FailoverSetting:
    """What is explored: so many processes from the start, messages of workers, and faults.

    A fault is the end of a process, the word that one has ended that has not, or one process more.
    """

    processes: int = 3
    mails: int = 2
    faults: int = 2


class Failover:
    """A `Group` of the random histories, which looks at what must hold after each step."""

    def __init__(self, setting: FailoverSetting, machine: Any = Replication, authority: Any = Authority) -> None:
        self.setting, self.left = setting, setting.faults
        self.said: list[tuple[Any, Any]] = []
        self.group = Group(machine, authority)
        for _ in range(setting.processes):
            self.group.do(("spawn",))

    def copy(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(vars(self))
        made.group = copied(self.group)
        return made

    def key(self) -> Any:
        group = self.group
        links = {link: queue for link, queue in group.links.items() if queue}
        nodes = [(vars(each.machine), each.alive, each.mail, each.dealt, each.view, each.primary, each.ready)
                 for each in group.processes]  # fmt: skip
        return frozen((self.left, nodes, links, group.told, vars(group.authority), group.mails, group.over))

    def ended(self) -> bool:
        return not self.group.steps()

    def steps(self) -> list[Step]:
        group = self.group
        if group.over:
            return []
        leaders = group.leaders() if group.mails < self.setting.mails else []
        return [*group.steps(), *(("receive", str(number)) for number in leaders)]

    def faults(self) -> list[Step]:
        if self.group.over or not self.left:
            return []
        alive = [str(number) for number, process in enumerate(self.group.processes) if process.alive]
        return [*((name, number) for number in alive for name in ("kill", "suspect")), ("spawn",)]

    def do(self, step: Step) -> None:
        self.left -= step[0] in ("kill", "suspect", "spawn")
        self.group.do(tuple(map(str, step)))
        leading = [self.group.processes[number].machine.epoch for number in self.group.leaders()]
        assert len(set(leading)) == len(leading), f"two processes lead in epoch {max(leading)}"
        if self.ended():
            # Nothing is on its way any more; what must hold then is looked at there.
            self.group.rest()
