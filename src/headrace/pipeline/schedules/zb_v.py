"""ZB-V."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.families import VShape


class ZeroBubbleV(VShape):
    """A V without a bubble, which holds what 1F1B holds (ZB-V).

    Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", ICLR 2024, section 6 and figure 6.

        rank 0   a0  a1  a2  b0  b0' b0" b1  b1' b1" a3  a0' a0" b2  b2' b2" a1' a1" b3  b3' b3" a2' a2" a3' a3" .
        rank 1   .   a0  b0  a1  b1  b0' b0" a2  a0' a0" b2  b1' b1" a3  a1' a1" b3  b2' b2" a2' b3' a3' a2" b3" a3"

    Where forward, input's gradient and weights' gradient take the same, a rank idles only before its first pass and
    behind its last. Each of K ranks holds at most 2K halves, as the first rank
    of 1F1B.
    """

    def words(self, rank: int, count: int) -> Iterator[str]:
        behind, ahead = self.ranks - rank, 2 * self.ranks - rank - 1
        yield from ["F0"] * (2 * behind - 1)
        yield from ["F1", "F0"] * rank
        yield from ["F1", "I1", "W"] * behind
        yield from ["F0", "I0", "W", "F1", "I1", "W"] * (count - ahead)
        yield from ["I0", "W", "F1", "I1", "W"] * (ahead - self.ranks)
        yield from ["I0", "I1"] * rank
        yield from ["I0", "W"] * behind
        yield from ["W"] * (2 * rank)
