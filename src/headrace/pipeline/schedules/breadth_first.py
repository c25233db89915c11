"""Looped breadth-first."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule


class BreadthFirst(PipelineSchedule):
    """All micro-batches through a rank's first stage, then all through its second, and back in the same way.

    Lamy-Poirier 2023, "Breadth-first pipeline parallelism", section 4, figure 4. Two ranks with two stages each, 0 and
    2 on rank 0; a2 is the forward of micro-batch 2 through a rank's first stage, b2' its backward through its second:

        rank 0   a0  a1  a2  a3  b0  b1  b2  b3  .   .   b0' b1' b2' b3' a0' a1' a2' a3'
        rank 1   .   a0  a1  a2  a3  b0  b1  b2  b3  b0' b1' b2' b3' a0' a1' a2' a3' .

    The bubble is that of `interleaved`, and every stage's parameters are used once forward and once backward a batch.
    All micro-batches are held; messages wait in channels of as many places as the order needs.
    """

    def stages(self) -> int:
        return self.ranks * self.chunks

    def actions(self, rank: int) -> Iterator[Action]:
        own = range(rank, self.stages(), self.ranks)
        yield from (Action(stage, index) for stage in own for index in range(self.micro_batches))
        back = PassKind.BACKWARD
        yield from (Action(stage, index, back) for stage in reversed(own) for index in range(self.micro_batches))
