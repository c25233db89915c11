"""DualPipeV."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.families import VShape


class DualPipeV(VShape):
    """DualPipe cut in half: a forward pass of one stage stands beside a backward pass of a rank's other stage.

    DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1; Qi et al. 2025, "DualPipe could be better without
    the dual". DualPipe itself sends micro-batches from both ends through two copies of the model; in the V one copy is
    enough.

        rank 0   a0  a1  a2  b0  b0' b0" b1  a3  b1' b2  a0' b2' b3  a1' b3' a2' a2" a3' a3"
        rank 1   .   a0  b0  a1  b1  a2  b0' b2  a0' a3  b1' b3  a1' b2' a2' b3' a3' b3" a3"

    Each of K ranks holds at most 2K + 1 halves. A forward and a backward pass that stand beside each
    other run one after the other here; on devices the paper has them share a kernel's time.
    """

    def words(self, rank: int, count: int) -> Iterator[str]:
        behind = self.ranks - rank - 1
        yield from ["F0"] * (2 * behind)
        yield from ["F0", "F1"] * (rank + 1)
        yield from ["I1", "W", "F1"] * behind
        yield from ["F0", "B1", "F1", "B0"] * (count - 2 * self.ranks + rank + 1)
        yield from ["B1", "F1", "B0"] * behind
        # The last of these leave the weights for later, so that the ranks before wait less.
        yield from ["B1", "B0"] * ((rank + 1) // 2)
        yield from ["B1", "I0"] if rank % 2 == 0 else []
        yield from ["I1", "I0"] * ((rank + 1) // 2)
        yield from ["W", "I0"] * behind
        yield from ["W"] * (rank + 1)
