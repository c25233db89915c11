"""Explores every state that a small world of processes can come to, breadth first, with the faults that it allows.

A world is a few state machines and what happens between them. What it has to hold is checked in each step; besides,
from every state the end must be within reach without another fault, so that no process waits for ever. What is wrong is
told as the shortest way to it.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import itemgetter
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol, Self

__all__ = ["Counterexample", "Explored", "Step", "TooMany", "Twin", "World", "copied", "explore", "frozen"]

Step = tuple[str | int, ...]
"""A name and numbers, for example ("push", worker, shard)."""


class World(Protocol):
    """Processes, and what may happen to them.

    `said` are the events that machines have handled in the last step, each with what they have answered; it is no part
    of the state.
    """

    said: list[tuple[Any, Any]]

    def steps(self) -> list[Step]:
        """Returns what may happen next."""

    def faults(self) -> list[Step]:
        """Returns which faults may happen next."""

    def do(self, step: Step) -> None:
        """Lets it happen; raises AssertionError, LookupError or ValueError if a machine does wrong."""

    def copy(self) -> Self:
        """Returns another world in the same state."""

    def key(self) -> Any:
        """Returns the state as values that do not change; two worlds with one key have the same future."""

    def ended(self) -> bool:
        """Returns whether nothing is left to do."""


class Counterexample(AssertionError):
    """The shortest way to what must not be.

    Attributes:
        wrong: what is wrong.
        steps: the way, in words.
    """

    def __init__(self, wrong: str, steps: list[str]) -> None:
        lines = [f"{number:3}. {text}" for number, text in enumerate(steps, 1)]
        super().__init__("\n".join([f"{wrong}; the shortest way to it has {len(steps)} steps:", *lines]))
        self.wrong, self.steps = wrong, steps


@dataclass(frozen=True)
class Explored:
    """How much was explored, and how long the longest of the shortest ways to a state is."""

    states: int
    transitions: int
    depth: int
    seconds: float


class TooMany(RuntimeError):
    """The world has more states than were to be explored."""


_WRONG = (AssertionError, LookupError, ValueError)


def explore(start: World, most: int = 1_000_000) -> Explored:
    """Explores all states; raises Counterexample, or TooMany if there are more than `most`."""
    began = perf_counter()
    graph = _Graph()
    graph.add(start, -1, ())
    level, depth = [(0, start)], 0
    while level:
        following: list[tuple[int, World]] = []
        for number, world in level:
            if world.ended():
                graph.ends.append(number)
            harmless, faults = world.steps(), world.faults()
            for place, step in enumerate((*harmless, *faults)):
                after = world.copy()
                try:
                    after.do(step)
                except _WRONG as error:
                    raise Counterexample(str(error) or repr(error), graph.way(start, number, step)) from error
                to, new = graph.add(after, number, step)
                graph.transitions += 1
                if place < len(harmless):
                    graph.edges.extend((number, to))
                if new:
                    following.append((to, after))
            if len(graph.before) > most:
                raise TooMany(f"more than {most:,} states, {depth} steps from the start")
        level, depth = following, depth + bool(following)
    stuck = graph.first_stuck()
    if stuck is not None:
        raise Counterexample("from here the end is out of reach without a fault", graph.way(start, stuck))
    return Explored(len(graph.before), graph.transitions, depth, perf_counter() - began)


class _Graph:
    """The states that were found, by number, each with the one before it and the step from that to it."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.before = array("i")
        self.steps: list[Step] = []
        self.edges = array("i")
        self.ends: list[int] = []
        self.transitions = 0

    def add(self, world: World, before: int, step: Step) -> tuple[int, bool]:
        """Returns the number of a world's state, and whether it is new."""
        number = self.numbers.setdefault(world.key(), len(self.before))
        new = number == len(self.before)
        if new:
            self.before.append(before)
            self.steps.append(step)
        return number, new

    def first_stuck(self) -> int | None:
        """Returns the first state from which no end can be reached, by steps that are no faults."""
        sources: list[list[int]] = [[] for _ in self.before]
        for place in range(0, len(self.edges), 2):
            sources[self.edges[place + 1]].append(self.edges[place])
        reaches = bytearray(len(self.before))
        todo = self.ends[:]
        while todo:
            number = todo.pop()
            if not reaches[number]:
                reaches[number] = 1
                todo += sources[number]
        found = reaches.find(0)
        return None if found < 0 else found

    def way(self, start: World, number: int, *more: Step) -> list[str]:
        """Returns the steps to a state and on, in words, by going there once more."""
        steps = list(reversed(more))
        while self.before[number] >= 0:
            steps.append(self.steps[number])
            number = self.before[number]
        world, told = start.copy(), []
        for step in reversed(steps):
            wrong = ""
            try:
                world.do(step)
            except _WRONG as error:
                wrong = f"\n       ✗ {error or repr(error)}"
            said = "".join(f"\n       {event} → {_words(answers)}" for event, answers in world.said)
            told.append(" ".join(map(str, step)) + said + wrong)
        return told


def _words(answers: Any) -> str:
    return ", ".join(map(str, answers)) if isinstance(answers, list) and answers else "nothing"


class Twin:
    """A machine that is compared, at each event, with another one that has loaded its state."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.machine = make, make()

    def handle(self, event: Any) -> Any:
        state, again = self.machine.state(), self.make()
        again.load(state)
        assert again.state() == state, "a loaded state is the state that was saved"
        actions = self.machine.handle(event)
        assert again.handle(event) == actions, f"a machine with a loaded state answers the same to {event}"
        assert again.state() == self.machine.state(), f"a machine with a loaded state does the same with {event}"
        return actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)


_first = itemgetter(0)
_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})
_SHARED = (Enum, FunctionType, type, partial, frozenset, tuple)


def copied(value: Any) -> Any:
    """Returns a copy of what may change; values that cannot change are shared, tuples among them."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _SHARED):
        return value
    if kind is dict or kind is Counter:
        return kind({key: own if type(own) in _ATOMS else copied(own) for key, own in value.items()})
    if kind is set:
        return value.copy()
    if kind is list or kind is deque:
        return kind(own if type(own) in _ATOMS else copied(own) for own in value)
    if _is_frozen(kind):
        return value
    made = object.__new__(kind)
    made.__dict__.update({name: own if type(own) in _ATOMS else copied(own) for name, own in vars(value).items()})
    return made


@cache
def _is_frozen(kind: type) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined,no-any-return]


def frozen(value: Any) -> Any:
    """Returns a value as tuples, which can be compared and hashed; of dicts and sets, the order does not count."""
    kind = type(value)
    if kind in _ATOMS or _is_frozen(kind):
        return value
    if kind is dict or kind is Counter:
        every = [(key, own if type(own) in _ATOMS else frozen(own)) for key, own in value.items()]
        return tuple(sorted(every, key=_first))
    if kind is set:
        return frozenset(value)
    if kind is list or kind is tuple or kind is deque:
        return tuple(own if type(own) in _ATOMS else frozen(own) for own in value)
    if isinstance(value, frozenset | Enum):
        return value
    return tuple(own if type(own) in _ATOMS else frozen(own) for own in vars(value).values())
