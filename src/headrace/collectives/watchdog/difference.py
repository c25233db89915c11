"""From which call on two ranks have called different things."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.collectives.watchdog.boards import call_of, digest_of
from headrace.shared_memory.calls import APART, REMEMBERED, CollectiveCall, GroupCalls


@dataclass(frozen=True)
class CallDifference:
    """A call by which two ranks have not called the same; `is_first` tells that they had before it."""

    number: int
    is_first: bool

    @staticmethod
    def between(here: GroupCalls, there: GroupCalls) -> CallDifference | None:
        """Returns the first that both remember; None while nothing that both remember differs."""
        last = min(here.number, there.number)
        # A digest is one of all calls before, too.
        if not (both := _both(here, there, last)) or both[0].digest == both[1].digest:
            kept = last // APART * APART
            one, other = digest_of(here, kept), digest_of(there, kept)
            differs = kept > 0 and one.number == other.number == kept and one.digest != other.digest
            return CallDifference(last, False) if differs else None
        first = both[0].number
        while (both := _both(here, there, first - 1)) and both[0].digest != both[1].digest:
            first = both[0].number
        return CallDifference(first, first == 1 or (both is not None and both[0].number == first - 1))


def _both(here: GroupCalls, there: GroupCalls, number: int) -> tuple[CollectiveCall, CollectiveCall] | None:
    """Returns the last call up to a number that two ranks remember, of each of them; None where there is none."""
    for each in range(number, max(0, number - REMEMBERED), -1):
        if (other := call_of(there, each)) and (one := call_of(here, each)):
            return one, other
    return None
