"""Whether all workers of a loop of the user's own are at the same verb of the same round.

Workers that went different ways (an evaluation on rank 0 alone, a step twice) would take each other's numbers for
something else. Where they exchange something, each first says where it is.
"""

from __future__ import annotations

from headrace.errors import UsageError
from headrace.worker.session import WorkerSession

_VERBS = ("step", "evaluate")
_MOST = 1 << 20


class VerbGuard:
    """Compares the places of this worker and of all others in the user's loop."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        # The usual loop takes every worker the same way.
        self._compares = session.run.train is not None
        self._in_lockstep = session.run.strategy.lock_step and session.replica.sync is None
        self._round, self._steps = -1, 0

    def begin_again(self) -> None:
        """Forgets the steps of a round that is repeated: a worker that is new, or was late, has not done them."""
        self._round = -1

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
        places = group.sum([place if rank == group.rank else 0.0 for rank in range(group.world)])
        if len({*places}) == 1:
            return
        where = "; ".join(f"rank {rank} {_words(place)}" for rank, place in zip(group.members, places, strict=True))
        raise UsageError(
            f"the workers' loops went different ways: {where}; every worker calls the same verbs in every round: step "
            "once, and evaluate where all do (if worker.evaluation_due: ...), not on one rank alone"
        )


def _words(place: float) -> str:
    if place != int(place) or place < 1:
        return "is elsewhere"
    rest, verb = divmod(int(place) - 1, len(_VERBS))
    round_, steps = divmod(rest, _MOST)
    again = f" {steps} of that round" if steps > 1 else ""
    return f"is in round {round_}, {_VERBS[verb]}{again}"
