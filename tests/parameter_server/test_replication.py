"""Who may deal with mail: examples by hand, every order of a few events, and bugs that must be found."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace.parameter_server.replication import machine as module
from headrace.parameter_server.replication.machine import (
    Authority,
    Called,
    Deal,
    Down,
    Event,
    Fill,
    Filled,
    Follow,
    Forward,
    Gone,
    Held,
    Hold,
    Lead,
    LogEntryReceived,
    PrimaryLost,
    Ready,
    Received,
    RefuseOldEpoch,
    Replication,
    Stop,
    Up,
    View,
)
from parameter_server.replicas import Group, Step
from parameter_server.worlds import mutated


def told(machine: Replication, *events: Event) -> list[Any]:
    return [action for event in events for action in machine.handle(event)]


def guarded() -> Replication:
    """Returns process 0, the primary of epoch 1, whose backup 1 holds all: a log of one piece."""
    machine = Replication(0)
    told(machine, View(1, 0, 1), Received(), Called(1, 1), Held(1, 1))
    return machine


def test_a_primary_alone_deals_with_what_comes() -> None:
    assert told(Replication(0), View(1, 0), Received(), Received()) == [Lead(1), Deal(1), Deal(2)]


def test_what_comes_while_a_backup_is_filled_waits_and_so_it_can_be_promoted_as_soon_as_it_is_filled() -> None:
    machine = Replication(0)
    assert told(machine, View(1, 0, 1), Received()) == [Lead(1), Deal(1)]
    assert told(machine, Called(1, 1), Received(), Received()) == [Fill(1), Forward(2), Forward(3)]
    assert told(machine, Held(1, 1)) == [Ready(1)]
    assert told(machine, Received(), Held(1, 3)) == [Forward(4), Deal(2), Deal(3)]
    assert told(machine, Held(1, 4)) == [Deal(4)]


def test_what_waits_for_a_backup_that_is_lost_while_it_is_filled_is_handled() -> None:
    machine = Replication(0)
    told(machine, View(1, 0, 1), Received(), Called(1, 1), Received())
    assert told(machine, View(2, 0), Received()) == [Deal(2), Deal(3)]


def test_a_backup_deals_with_the_log_and_says_so() -> None:
    machine = Replication(1)
    assert told(machine, View(1, 0, 1), Filled(1, 7), LogEntryReceived(1, 8)) == [
        Follow(1, 0),
        Hold(7),
        Deal(8),
        Hold(8),
    ]
    assert told(machine, View(2, 1), Received()) == [Lead(2), Deal(9)]


def test_what_waits_is_dealt_with_when_there_is_no_backup_any_more() -> None:
    machine = guarded()
    assert told(machine, Received(), Received(), View(2, 0)) == [Forward(2), Forward(3), Deal(2), Deal(3)]
    assert told(machine, Received()) == [Deal(4)]


def test_the_next_backup_is_filled_when_it_calls_early_or_late() -> None:
    early, late = guarded(), guarded()
    assert told(early, Called(2, 2), Received(), View(2, 0, 2)) == [Forward(2), Deal(2), Fill(2)]
    assert told(late, View(2, 0, 2), Received(), Called(2, 2)) == [Deal(2), Fill(2)]


@pytest.mark.parametrize(
    "event", [Held(1, 2), Called(1, 1), LogEntryReceived(1, 2), Filled(1, 1), View(1, 0, 1), View(1, 1)]
)
def test_what_is_of_an_older_epoch_is_refused(event: Event) -> None:
    machine = guarded()
    told(machine, Received(), View(2, 0, 3))
    assert told(machine, event) == [RefuseOldEpoch(2)]


def test_who_was_replaced_deals_with_nothing_any_more() -> None:
    machine = guarded()
    assert told(machine, Received(), View(2, 1), Received()) == [Forward(2), Stop(2)]
    assert told(machine, Held(1, 2)) == [RefuseOldEpoch(2)]


@pytest.mark.parametrize(
    ("machine", "event", "words"),
    [
        (guarded(), Held(1, 2), "piece 2 is held, of a log of 1"),
        (guarded(), Held(1, 0), "piece 0 is held, of a log of 1, of which 1 are handled"),
        (guarded(), Held(2, 1), "epoch 2 has begun"),
        (guarded(), LogEntryReceived(1, 2), "piece 2 comes after 1"),
    ],
)
def test_what_cannot_be_is_an_error(machine: Replication, event: Event, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        machine.handle(event)


def test_a_backup_that_is_not_filled_is_never_the_primary() -> None:
    machine = Replication(1)
    told(machine, View(1, 0, 1))
    with pytest.raises(ValueError, match="holds nothing"):
        machine.handle(View(2, 1))


def test_the_authority_promotes_the_backup_that_holds_all() -> None:
    authority = Authority()
    assert [authority.handle(Up(process)) for process in (4, 5, 6)] == [View(1, 4), View(2, 4, 5), None]
    authority.handle(Ready(1))
    assert not authority.ready, "of an older view"
    authority.handle(Ready(2))
    assert authority.handle(Down(4)) == View(3, 5, 6)
    assert authority.handle(Down(4)) is None
    assert authority.handle(Down(6)) == View(4, 5)
    with pytest.raises(PrimaryLost, match="process 5 is gone"):
        authority.handle(Down(5))


BEGIN: tuple[Step, ...] = (("spawn",), ("spawn",), ("news",), ("hear", "0"), ("receive", "0"), ("news",))
"""Process 0 leads and has dealt with one piece; process 1 is to be its backup and does not know it."""

EVENTS: tuple[tuple[Step, ...], ...] = (
    (("receive", "0"), ("receive", "0"), ("kill", "0"), ("receive", "1")),
    (("receive", "0"), ("kill", "1"), ("spawn",), ("receive", "0")),
    (("receive", "0"), ("suspect", "0"), ("receive", "0"), ("receive", "1")),
    (("spawn",), ("receive", "0"), ("suspect", "0"), ("receive", "1")),
    (("kill", "1"), ("spawn",), ("kill", "0"), ("receive", "2")),
)
"""What happens from outside, in this order; whatever is on its way may come before or after each."""


def every_order(events: tuple[Step, ...], machine: Any = Replication, authority: Any = Authority) -> int:
    """Goes through all orders; returns how many groups that differ there are on the way, and how many promotions."""
    first = Group(machine, authority)
    for step in BEGIN:
        first.do(step)
    seen: set[str] = set()
    promoted = 0
    waiting = [(first, events)]
    while waiting:
        group, left = waiting.pop()
        key = f"{group} {left}"
        if key in seen:
            continue
        seen.add(key)
        possible = group.steps()
        if left and not group.over:
            possible.append(left[0])
        if not possible:
            group.rest()
            promoted += group.promotions
        for step in possible:
            after = copy.deepcopy(group)
            if step[0] != "receive" or int(step[1]) in after.leaders():
                after.do(step)
            waiting.append((after, left[1:] if left and step is left[0] else left))
    assert promoted or ("kill", "1") in events
    return len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("events", EVENTS, ids=lambda events: " ".join("".join(step) for step in events))
def test_every_order_of_a_few_events(events: tuple[Step, ...]) -> None:
    assert every_order(events) > 100


def at_random(seed: int, machine: Any = Replication, authority: Any = Authority) -> Group:
    """Lives through a random history, to its rest."""
    chance = random.Random(seed)
    group = Group(machine, authority)
    for _ in range(3):
        group.do(("spawn",))
    for _ in range(chance.randint(20, 120)):
        possible = group.steps() * 4
        possible += [("receive", str(each)) for each in group.leaders()] * 2
        if chance.random() < 0.1:
            alive = [number for number, each in enumerate(group.processes) if each.alive]
            possible += [(chance.choice(("kill", "suspect")), str(each)) for each in alive] + [("spawn",)]
        if group.over or not possible:
            break
        group.do(chance.choice(possible))
    group.rest()
    return group


@pytest.mark.slow
def test_random_histories_keep_the_rules() -> None:
    groups = [at_random(seed) for seed in range(400)]
    assert sum(group.promotions for group in groups) > 100
    assert sum(group.over for group in groups) < 400
    assert max(len(process.dealt) for group in groups for process in group.processes) > 20


BUGS = {
    "deals before the backup holds": (
        "return self._deal(self.last) if self._stage == _ALONE else [Forward(self.last)]",
        "return [*([] if self._stage == _ALONE else [Forward(self.last)]), *self._deal(self.last)]",
    ),
    "deals while the backup is filled": (
        "return self._deal(self.last) if self._stage == _ALONE else [Forward(self.last)]",
        "return [*([] if self._stage == _ALONE else [Forward(self.last)]), "
        "*([] if self._stage == _GUARDED else self._deal(self.last))]",
    ),
    "takes word of an older epoch": ("if event.epoch < self.epoch:", "if event.epoch < self.epoch - 1:"),
    "says too early that a backup is ready": (
        "return [Fill(self.dealt)]",
        "return [Fill(self.dealt), Ready(self.epoch)]",
    ),
    "forgets what waits when the backup goes": ("[*actions, *self._deal(self.last),", "[*actions,"),
    "goes on when it was replaced": (
        "            self._stage = _IDLE\n            return [Stop",
        "            return [Stop",
    ),
    "fills from the end of the log": ("return [Fill(self.dealt)]", "return [Fill(self.last + 1)]"),
    "does not forward while it fills": ("if self._stage == _ALONE else [F", "if self._stage < _GUARDED else [F"),
    "deals with all that is held again": ("range(self.dealt + 1, until + 1)", "range(self.dealt, until + 1)"),
    "does not tell that it is filled": ("return [Hold(event.number)]\n        if", "return []\n        if"),
    "begins a new log when it is promoted": (
        "        self._stage = _ALONE\n        # T",
        "        self._stage, self.last = _ALONE, 0\n        # T",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert fails(mutated(module, "Replication", *BUGS[bug]), Authority)


CARELESS = {
    "promotes a backup that is not ready": ("if view.backup is None or not self.ready:", "if view.backup is None:"),
    "believes what was said of an older view": ("and news.epoch == view.epoch", "and news.epoch <= view.epoch"),
    "keeps the word for the next view": (
        "        self.ready = False\n        return self.view",
        "        return self.view",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", CARELESS)
def test_a_careless_authority_is_found(bug: str) -> None:
    assert fails(Replication, mutated(module, "Authority", *CARELESS[bug]))


def fails(machine: Any, authority: Any) -> bool:
    """Tells whether any history shows that a machine is wrong."""
    histories = [partial(at_random, seed) for seed in range(400)] + [partial(every_order, events) for events in EVENTS]
    return any(map(partial(_fails, machine, authority), histories))


def _fails(machine: Any, authority: Any, history: Callable[[Any, Any], object]) -> bool:
    try:
        history(machine, authority)
    except (AssertionError, LookupError, ValueError):
        return True
    return False


def test_a_backup_whose_connection_has_ended_is_not_filled() -> None:
    """Nothing would be held, and the primary would wait for it for ever."""
    machine = Replication(0)
    told(machine, View(1, 0), Called(2, 1), Gone(2, 1))
    assert told(machine, View(2, 0, 1), Received()) == [Deal(1)]
    assert told(machine, Called(2, 1)) == [Fill(1)]
