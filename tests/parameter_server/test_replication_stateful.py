"""Servers and backups as hypothesis drives them: it looks for the shortest history that breaks a rule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.parameter_server.replication import machine as module
from parameter_server.replicas import Group
from parameter_server.worlds import mutated


class Histories(RuleBasedStateMachine):
    """Every step that a group knows, in any order; `Group.do` looks at the rules after each."""

    def __init__(self, machine: Any = module.Replication) -> None:
        super().__init__()
        self.group = Group(machine)

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.group.do(("spawn",))

    @precondition(lambda self: self.group.steps())
    @rule(choice=st.integers(0, 99))
    def go_on(self, choice: int) -> None:
        possible = self.group.steps()
        self.group.do(possible[choice % len(possible)])

    @precondition(lambda self: self.group.leaders())
    @rule(choice=st.integers(0, 9))
    def receive(self, choice: int) -> None:
        leaders = self.group.leaders()
        self.group.do(("receive", str(leaders[choice % len(leaders)])))

    @precondition(lambda self: any(process.alive for process in self.group.processes))
    @rule(choice=st.integers(0, 9), really=st.booleans())
    def lose(self, choice: int, really: bool) -> None:
        alive = [number for number, process in enumerate(self.group.processes) if process.alive]
        self.group.do(("kill" if really else "suspect", str(alive[choice % len(alive)])))

    @rule()
    def spawn(self) -> None:
        self.group.do(("spawn",))

    @rule()
    def rest(self) -> None:
        self.group.rest()

    @invariant()
    def only_one_leads_in_an_epoch(self) -> None:
        leading = [self.group.processes[number].machine.epoch for number in self.group.leaders()]
        assert len(set(leading)) == len(leading)

    def teardown(self) -> None:
        self.group.rest()


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestHistories = Histories.TestCase

SEEKING = settings(
    max_examples=300,
    stateful_step_count=60,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
BUGS = {
    "deals before the backup holds": (
        "return self._deal(self.last) if self._stage == _ALONE else [Forward(self.last)]",
        "return [*([] if self._stage == _ALONE else [Forward(self.last)]), *self._deal(self.last)]",
    ),
    "forgets what waits when the backup goes": ("[*actions, *self._deal(self.last),", "[*actions,"),
    "goes on when it was replaced": (
        "            self._stage = _IDLE\n            return [Stop",
        "            return [Stop",
    ),
    "deals with all that is held again": ("range(self.dealt + 1, until + 1)", "range(self.dealt, until + 1)"),
    "does not forward while it fills": ("if self._stage == _ALONE else [F", "if self._stage < _GUARDED else [F"),
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_it_finds_what_is_planted(bug: str) -> None:
    wrong = mutated(module, "Replication", *BUGS[bug])
    with pytest.raises((AssertionError, LookupError, ValueError)):
        run_state_machine_as_test(partial(Histories, wrong), settings=SEEKING)  # type: ignore[arg-type]
