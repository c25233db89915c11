"""Whether all workers of a loop of the user's own are at the same verb of the same round, and do the same there.

Workers that went different ways (an evaluation on rank 0 alone, a step twice) would take each other's numbers for
something else. Where they exchange something, each first says where it is. And each sees its own share alone: what a
loop decides by its loss, a factor or a change of parameters, shows in what losses are made of and computed with.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headrace import internals
from headrace.collectives.base import gather_texts
from headrace.collectives.digest import digests
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.spec.events.run import Notice
from headrace.spec.plan import has_stages
from headrace.worker.guards.draws import DrawGuard
from headrace.worker.session import WorkerSession

if TYPE_CHECKING:
    from headrace.training.user_code.loss_graph import Made

_VERBS = ("step", "evaluate")
_MOST = 1 << 20
_FIRST_ROUNDS = 4
"""Whose parameters are read: later, writing to them shows in their versions, but for what is written to `.data`."""
_KEPT = 64
"""Rounds whose losses are compared later, where workers do not meet in each."""


class VerbGuard:
    """Compares the places of this worker and of all others in the user's loop, and what they compute there.

    Attributes:
        draws: looks for random numbers that the loop draws.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        # The usual loop takes every worker the same way.
        self._compares = session.run.train is not None
        self._in_lockstep = session.run.strategy.lock_step and session.replica.sync is None
        # Of workers that take steps of their own, each has a loop of its own, by definition.
        self._in_rounds = not self._in_lockstep and not session.replica.exchange.keeps_writes
        self._round, self._steps = -1, 0
        self._parameters = [each for each in session.replica.compute.module.parameters() if not each.is_meta]
        self._divided = session.replica.compute.divided or has_stages(session.run.plan)
        self._versions: list[int] = []
        self._made: list[Made] = []
        self._written = 0
        self._rounds: dict[int, tuple[list[Made], int]] = {}
        self._searches = 0
        if self._compares:
            from headrace.training.user_code.loss_graph import SEARCHES

            self._searches = SEARCHES
        self._said: set[str] = set()
        self.draws = DrawGuard(session, self._compares and (self._in_lockstep or self._in_rounds))

    def begin_again(self) -> None:
        """Forgets the steps of a round that is repeated: a worker that is new, or was late, has not done them."""
        self._round = -1

    def begin(self) -> None:
        """Notes how the parameters are when a round begins, or a step of it."""
        self._versions = [*map(internals.version, self._parameters)]
        self._made, self._written = [], 0

    def note(self, loss: Any = None) -> None:
        """Notes what a loss is made of, and the parameters that it is computed with."""
        if not self._compares:
            return
        self.draws.end()
        total = loss.total if isinstance(loss, Mean) else loss
        if isinstance(total, Tensor) and total.grad_fn is not None:
            from headrace.training.user_code.loss_graph import made_of

            self._made.append(made_of(total))
            if self._in_rounds:
                progress = self._session.progress
                self._rounds.pop(progress.round - _KEPT, None)
                self._rounds[progress.round] = self._made, progress.share.examples
        written = [*map(internals.version, self._parameters)] != self._versions
        if self._divided:
            if written:
                self._say(_DIVIDED)
        elif written or self._session.progress.done < _FIRST_ROUNDS:
            self._written = zlib.crc32(repr(digests(self._parameters)).encode())

    def require_same(self, verb: str) -> None:
        """Every worker calls it in each verb, "step" or "evaluate"; where all communicate in it, it compares.

        Raises:
            UsageError: a worker is elsewhere; it says where each is.
        """
        group, round_ = self._session.group, max(0, self._session.progress.round)
        if not self._compares or group.world == 1 or (verb == "step" and not self._in_lockstep):
            return
        if verb == "step":
            self._steps = self._steps + 1 if round_ == self._round else 1
            self._round = round_
        steps = min(self._steps, _MOST - 1) if verb == "step" else 0
        place = float((round_ * _MOST + steps) * len(_VERBS) + _VERBS.index(verb) + 1)
        made = zlib.crc32(repr(self._made).encode())
        own = (place, float(self._session.progress.share.examples), float(made), float(self._written))
        row = [own if rank == group.rank else (0.0,) * len(own) for rank in range(group.world)]
        values = group.sum([value for each in row for value in each])
        places, examples, losses, written = (values[start :: len(own)] for start in range(len(own)))
        if len({*places}) > 1:
            where = "; ".join(f"rank {rank} {_words(at)}" for rank, at in zip(group.members, places, strict=True))
            raise UsageError(
                f"the workers' loops went different ways: {where}; every worker calls the same verbs in every round: "
                "step once, and evaluate where all do (if worker.evaluation_due: ...), not on one rank alone"
            )
        if verb == "evaluate":
            self.compare_rounds()
        else:
            if len({*written}) > 1:
                self._say(_WRITTEN)
            if len({*losses}) > 1 and min(examples) > 1 and self._searches:
                self._compare_losses({round_: (self._made, int(examples[group.rank]))})
            self.begin()

    def compare_rounds(self) -> None:
        """Compares the losses of rounds in which workers did not meet; every worker calls it, where all do."""
        if self._compares and self._in_rounds and self._session.group.world > 1:
            self._compare_losses(self._rounds)

    def _compare_losses(self, rounds: Mapping[int, tuple[list[Made], int]]) -> None:
        """Says where workers have made the losses of a round otherwise, of those that they have done."""
        from headrace.training.user_code.loss_graph import otherwise_made

        members = self._session.group.members
        self._searches -= 1
        of_ranks = [json.loads(text) for text in gather_texts(self._session.group, json.dumps(rounds))]
        for round_ in {key: None for each in of_ranks for key in each}:
            done = [(rank, *each[round_]) for rank, each in zip(members, of_ranks, strict=True) if round_ in each]
            # A single example's numbers are no means.
            if min(examples for *_, examples in done) > 1 and (said := otherwise_made(done)):
                self._searches = 0
                self._say(f"{said} (round {round_})")
                break

    def _say(self, line: str) -> None:
        session = self._session
        if session.group.rank == 0 and line not in self._said:
            self._said.add(line)
            session.events.write(Notice(session.rank, session.events.now(), line))


_WRITTEN = (
    "workers compute their losses with parameters that the loop has changed otherwise on each, by what its share gives "
    "(sharpness-aware steps, adversarial weights); the result is not that of one process, whose change is by the whole "
    "batch"
)
_DIVIDED = (
    "the loop writes to parameters, of which each worker has parts: what looks at more than an element (a norm) is not "
    "what one process does; use mirrored or central_storage"
)


def _words(place: float) -> str:
    if place != int(place) or place < 1:
        return "is elsewhere"
    rest, verb = divmod(int(place) - 1, len(_VERBS))
    round_, steps = divmod(rest, _MOST)
    again = f" {steps} of that round" if steps > 1 else ""
    return f"is in round {round_}, {_VERBS[verb]}{again}"
