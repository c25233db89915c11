"""V-Half."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.families import VShape

_EVERY = 6
"""Passes of a micro-batch on a rank: forward, input's and weights' gradients of two stages."""


class VHalf(VShape):
    """A V that holds half of what 1F1B holds.

    Qi, Wan, Amar and Lin, "Pipeline parallelism with controllable memory", NeurIPS 2024, section 3.3: every micro-batch
    goes the same way, six units behind the one before; two units a stage down, one up, and as many on its way back.

        rank 0   a0  .   .   b0  a1  b0' b0" .   b1  a2  b1' a0' b1" a0" b2  b2' a1' b2" a1" a2' a2"
        rank 1   .   a0  b0  .   .   a1  b0' b1  a0' b0" a0" a2  b1' b2  a1' b1" a1" b2' a2' b2" a2"

    A rank of K holds at most K + 3 halves, and under 1F1B up to 2K. Where the three kinds of pass take the same, ranks
    idle for at most 3K + 2 of them, however many micro-batches there are.
    """

    def words(self, rank: int, count: int) -> Iterator[str]:
        begins = self._begins()[rank]
        every = sorted((at + _EVERY * index, word) for word, at in begins.items() for index in range(count))
        waiting, free = 0, 0
        for at, word in every:
            # Weight passes fill the units between.
            for _ in range(min(waiting, max(0, at - free))):
                waiting, free = waiting - 1, free + 1
                yield "W"
            waiting, free = waiting + (word[0] == "I"), max(free, at) + 1
            yield word
        yield from ["W"] * waiting

    def _begins(self) -> list[dict[str, int]]:
        """Returns when each rank begins the first micro-batch's passes, so that no two passes of a rank meet."""
        ranks, found = range(self.ranks), [dict[str, int]() for _ in range(self.ranks)]
        at = 0
        for word, order, step in (("F0", ranks, 2), ("F1", ranks[::-1], 1), ("I1", ranks, 2), ("I0", ranks[::-1], 1)):
            for rank in order:
                while any((at - other) % _EVERY == 0 for other in found[rank].values()):
                    at += 1
                found[rank][word] = at
                at += step
        return found
