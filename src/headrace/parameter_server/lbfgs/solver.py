"""L-BFGS without tensors: it tells the servers what to do with their vectors, and gets numbers back.

    commands   ["copy", out, a]  ["scale", out, a, c]  ["axpy", out, a, c]  ["sub", out, a, b]  ["move", out, a]
    numbers    ["dot", a, b]  ["max", a]  ["sum", a]            of absolute values: max and sum
    others     ["gather", out, serial, weight]  ["keep", a, b, ...]  ["settle", settings]

Vectors are `x`, the parameters that are evaluated, `x0`, where the line search began, `g` and `p`, this and the last
gradient, `d`, the direction, pairs `s0`, `y0`, `s1`, ... of the history, and `e1`, `e2`, ..., the gradients of a line
search. Every iteration is that of `torch.optim.LBFGS`, number for number (Nocedal and Wright, "Numerical optimization",
2006, algorithms 7.4 and 3.5).

The servers remember the numbers that they gave in the present iteration. A process that goes on for another therefore
runs the iteration from its beginning, with these numbers, and carries out only what is missing.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace import internals

Command = list[Any]
"""A name, and what it needs: names of vectors, numbers."""

Stage = tuple[int, int]
"""Round and iteration in it."""

_LEAST_CURVATURE = 1e-10
"""A pair of less curvature is no part of the history."""


@dataclass(frozen=True)
class SolverOptions:
    """The options of `torch.optim.LBFGS`; `line_search` is whether it is "strong_wolfe"."""

    lr: float
    max_iter: int
    max_eval: int
    tolerance_grad: float
    tolerance_change: float
    history: int
    line_search: bool


@dataclass(frozen=True)
class SolverState:
    """The numbers of an L-BFGS between two iterations; all vectors are on the servers.

    Attributes:
        iteration, evaluations: that are done in this round.
        total: iterations that are done in the run.
        loss: at `x`.
        t: the last step length.
        scale: of the first inverse Hessian.
        slots: the history's pairs, the oldest first; `rho` of each.
        ended: whether the round is.
    """

    iteration: int = 0
    evaluations: int = 0
    total: int = 0
    loss: float = 0.0
    t: float = 0.0
    scale: float = 1.0
    slots: tuple[int, ...] = ()
    rho: tuple[float, ...] = ()
    ended: bool = False

    @classmethod
    def parse(cls, settings: dict[str, Any]) -> SolverState:
        """Returns the state of settings; {} is that of a new run."""
        return cls(**{**settings, "slots": tuple(settings.get("slots", ())), "rho": tuple(settings.get("rho", ()))})

    def vectors(self) -> list[str]:
        """Returns the names of the vectors that belong to it."""
        history = [f"{kind}{slot}" for slot in self.slots for kind in "sy"]
        return ["g", "p", "d", *history] if self.total else ["g"]


@dataclass(frozen=True)
class CommandLog:
    """What a server remembers: its settings before the stage, and the numbers that it gave in it."""

    stage: Stage = (-1, -1)
    before: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    results: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> CommandLog:
        """Returns the log of JSON values."""
        round_, iteration = described["stage"]
        results = tuple(tuple(numbers) for numbers in described["results"])
        return cls((round_, iteration), described["before"], described["settings"], results)


class VectorServers(ABC):
    """Carries out commands on some servers, of which each has a part of every vector."""

    @abstractmethod
    def logs(self) -> list[CommandLog]:
        """Returns the log of each server."""

    @abstractmethod
    def run(self, stage: Stage, index: int, commands: Sequence[Command], servers: Sequence[int]) -> list[list[float]]:
        """Lets some servers carry out the `index`-th commands of a stage; returns the numbers of each."""


def largest(numbers: Sequence[float]) -> float:
    """Returns the largest number, NaN if one is; 0.0 without any. Python's `max` drops NaN, or not, by their order."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


class NotEvaluated(Exception):
    """The solver needs loss and gradient at `x`, which are not there yet."""


def steer(
    servers: VectorServers, options: SolverOptions, round_: int, serial: int, results: Sequence[tuple[float, float]]
) -> bool:
    """Runs one step of L-BFGS as far as possible; returns whether another evaluation follows, at the new `x`.

    Args:
        serial: of the last evaluation.
        results: loss and weight of each evaluation of the round so far.
    """
    logs = servers.logs()
    newest = max(logs, key=lambda log: log.stage)
    stage = newest.stage
    if stage[0] < round_:
        state = replace(SolverState.parse(newest.settings or {}), iteration=0, evaluations=0, ended=False)
        stage = (round_, 0)
    else:
        before = SolverState.parse(newest.before or {})
        state = before if stage[1] else replace(before, iteration=0, evaluations=0, ended=False)
    while not state.ended:
        tape = _Tape(servers, stage, [log.results if log.stage == stage else () for log in logs])
        try:
            state = _Iteration(tape, options, state, serial, results).run()
        except NotEvaluated:
            return True
        stage = (round_, state.iteration)
    return False


class _Tape:
    """Sends the commands of one stage, together as far as no number is needed; numbers that are known are not asked."""

    def __init__(self, servers: VectorServers, stage: Stage, known: Sequence[Sequence[Sequence[float]]]) -> None:
        self._servers = servers
        self._stage = stage
        self._known = known
        self._index = 0
        self._queue: list[Command] = []

    def run(self, *command: Any) -> None:
        """Carries out a command before the next number is asked for."""
        self._queue.append(list(command))

    def ask(self, *command: Any) -> float:
        """Returns the number of a command, over all servers."""
        self.run(*command)
        parts = [numbers[-1] for numbers in self.flush()]
        return largest(parts) if command[0] == "max" else sum(parts)

    def flush(self) -> list[Sequence[float]]:
        """Carries out what was asked for; returns the numbers of each server."""
        queue, index, self._queue, self._index = self._queue, self._index, [], self._index + 1
        given: list[Sequence[float]] = [known[index] if index < len(known) else () for known in self._known]
        missing = [server for server, known in enumerate(self._known) if index >= len(known)]
        for server, numbers in zip(missing, self._servers.run(self._stage, index, queue, missing), strict=True):
            given[server] = numbers
        return given


class _Vector:
    """A vector as torch's line search sees one; it is not changed while the line search runs."""

    def __init__(self, tape: _Tape, name: str) -> None:
        self.name = name
        self._tape = tape

    def dot(self, other: _Vector) -> Tensor:
        return torch.tensor(self._tape.ask("dot", self.name, other.name), dtype=torch.float64)

    def abs(self) -> _Vector:
        """Returns itself: the servers know the largest of absolute values."""
        return self

    def max(self) -> float:
        return self._tape.ask("max", self.name)

    def clone(self, **_: Any) -> _Vector:
        return self


class _Iteration:
    """One iteration, the first one of a round with the evaluation at its begin; names and order are those of torch."""

    def __init__(
        self,
        tape: _Tape,
        options: SolverOptions,
        state: SolverState,
        serial: int,
        results: Sequence[tuple[float, float]],
    ) -> None:
        self._tape = tape
        self._options = options
        self._state = state
        self._serial = serial
        self._results = results
        self._evaluations = state.evaluations
        self._searched: weakref.WeakSet[_Vector] = weakref.WeakSet()

    def run(self) -> SolverState:
        """Returns the state after it; raises NotEvaluated if another evaluation is needed before."""
        options, state, tape = self._options, self._state, self._tape
        if not self._evaluations:
            loss = self._gather("g")
            state = replace(state, loss=loss)
            if tape.ask("max", "g") <= options.tolerance_grad:
                return self._settle(replace(state, ended=True))
        state = self._direct(replace(state, total=state.total + 1, iteration=state.iteration + 1))
        tape.run("copy", "p", "g")
        t = options.lr
        if state.total == 1:
            t *= min(1.0, 1.0 / tape.ask("sum", "g"))
        slope = tape.ask("dot", "g", "d")
        if slope > -options.tolerance_change:
            return self._settle(replace(state, t=t, ended=True))
        before = state.loss
        flat = self._search(state, t, slope) if options.line_search else self._move(state, t)
        return self._settle(self._ended(flat, before))

    def _direct(self, state: SolverState) -> SolverState:
        """Computes the direction `d`."""
        tape = self._tape
        if state.total == 1:
            tape.run("scale", "d", "g", -1.0)
            return state
        tape.run("sub", "y", "g", "p")
        tape.run("scale", "s", "d", state.t)
        curvature = tape.ask("dot", "y", "s")
        if curvature > _LEAST_CURVATURE:
            slots, rho = state.slots, state.rho
            slot = len(slots)
            if slot >= self._options.history:
                slot, slots, rho = slots[0], slots[1:], rho[1:]
            scale = curvature / tape.ask("dot", "y", "y")
            tape.run("move", f"s{slot}", "s")
            tape.run("move", f"y{slot}", "y")
            state = replace(state, slots=(*slots, slot), rho=(*rho, 1.0 / curvature), scale=scale)
        tape.run("scale", "d", "g", -1.0)
        alphas = []
        for slot, rho_of in zip(reversed(state.slots), reversed(state.rho), strict=True):
            alphas.append(tape.ask("dot", f"s{slot}", "d") * rho_of)
            tape.run("axpy", "d", f"y{slot}", -alphas[-1])
        tape.run("scale", "d", "d", state.scale)
        for slot, rho_of, alpha in zip(state.slots, state.rho, reversed(alphas), strict=True):
            beta = tape.ask("dot", f"y{slot}", "d") * rho_of
            tape.run("axpy", "d", f"s{slot}", alpha - beta)
        return state

    def _search(self, state: SolverState, t: float, slope: float) -> SolverState:
        """Moves to where the strong Wolfe conditions hold."""
        tape = self._tape
        tape.run("copy", "x0", "x")
        gradient, direction = _Vector(tape, "g"), _Vector(tape, "d")
        most = self._options.max_eval - self._evaluations
        slope_tensor = torch.tensor(slope, dtype=torch.float64)
        search: Callable[..., Any] = internals.strong_wolfe
        loss, point, t_found, _ = search(self._try, None, t, direction, state.loss, gradient, slope_tensor, max_ls=most)
        self._go(float(t_found))
        if point.name != "g":
            tape.run("move", "g", point.name)
        return replace(state, loss=float(loss), t=float(t_found), evaluations=self._evaluations)

    def _try(self, _: None, t: float | Tensor, __: _Vector) -> tuple[float, _Vector]:
        """Returns loss and gradient at a step length."""
        self._go(float(t))
        vector = _Vector(self._tape, f"e{self._evaluations}")
        loss = self._gather(vector.name)
        self._searched.add(vector)
        return loss, vector

    def _go(self, t: float) -> None:
        self._tape.run("copy", "x", "x0")
        self._tape.run("axpy", "x", "d", t)

    def _move(self, state: SolverState, t: float) -> SolverState:
        """Moves by a fixed step; there is no use in an evaluation after the round's last."""
        self._tape.run("axpy", "x", "d", t)
        if state.iteration == self._options.max_iter:
            return replace(state, t=t, evaluations=self._evaluations)
        loss = self._gather("g")
        return replace(state, t=t, loss=loss, evaluations=self._evaluations)

    def _ended(self, state: SolverState, before: float) -> SolverState:
        """Notes whether the round ends."""
        options, tape = self._options, self._tape
        if state.iteration == options.max_iter or state.evaluations >= options.max_eval:
            return replace(state, ended=True)
        ended = tape.ask("max", "g") <= options.tolerance_grad
        ended = ended or abs(state.t) * tape.ask("max", "d") <= options.tolerance_change
        return replace(state, ended=ended or abs(state.loss - before) < options.tolerance_change)

    def _gather(self, name: str) -> float:
        """Makes the gradient of the next evaluation a vector; returns the loss."""
        tape, number = self._tape, self._evaluations
        if number:
            # Of the vectors of a line search, those that it may still return.
            searched = [vector.name for vector in self._searched]
            tape.run("keep", *self._state_vectors(), "x0", *sorted(searched))
            tape.flush()
        if number >= len(self._results):
            raise NotEvaluated
        self._evaluations += 1
        loss, weight = self._results[number]
        tape.run("gather", name, self._serial, weight)
        return loss

    def _state_vectors(self) -> list[str]:
        # The oldest pair may have been replaced in this iteration, or another one be new.
        history = [f"{kind}{slot}" for slot in range(self._options.history) for kind in "sy"]
        return ["g", "p", "d", *history]

    def _settle(self, state: SolverState) -> SolverState:
        state = replace(state, evaluations=self._evaluations)
        self._tape.run("keep", *state.vectors())
        self._tape.run("settle", asdict(state))
        self._tape.flush()
        return state
