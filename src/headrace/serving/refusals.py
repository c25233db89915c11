"""Answers 429 leave at a bounded rate, so that clients that ask again at once do not take the time of the others."""

from __future__ import annotations

import asyncio

_A_SECOND = 500
_AT_ONCE = 64
_MOST_S = 4.0


class Refusals:
    """Holds refusals back where too many are due.

    To refuse a request takes the event loop about as long as to read one that is answered. Clients that repeat what was
    refused without a pause would get thousands of refusals a second, and little else would be done. A client that
    waits for its refusal asks nothing meanwhile.

    Args:
        a_second: refusals that leave in a second.
        at_once: how many leave together after a pause.
        most_s: the longest that one is held back.
    """

    def __init__(self, a_second: float = _A_SECOND, at_once: int = _AT_ONCE, most_s: float = _MOST_S) -> None:
        self._apart_s = 1 / a_second
        self._ahead_s = at_once / a_second
        self._most_s = most_s
        self._next = 0.0

    async def turn(self) -> None:
        """Returns when the next refusal may leave."""
        now = asyncio.get_running_loop().time()
        due = max(self._next, now - self._ahead_s) + self._apart_s
        self._next = min(due, now + self._most_s)
        if self._next > now:
            await asyncio.sleep(self._next - now)
