"""1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule


class OneForwardOneBackward(PipelineSchedule):
    """One forward, one backward by turns, after as many forward passes as there are ranks behind.

    It is PipeDream-Flush (Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.2,
    figure 3).

        rank 0   0  1  2  .  .  0' 3  1' .  2' .  3'
        rank 1   .  0  1  .  0' 2  1' 3  2' .  3' .
        rank 2   .  .  0  0' 1  1' 2  2' 3  3' .  .

    It idles as long as GPipe does, and rank r of K holds the activations of at most K - r micro-batches, however many
    there are.
    """

    def actions(self, rank: int) -> Iterator[Action]:
        ahead = min(self.ranks - rank - 1, self.micro_batches)
        for micro_batch in range(ahead):
            yield Action(rank, micro_batch)
        for micro_batch in range(ahead, self.micro_batches):
            yield Action(rank, micro_batch)
            yield Action(rank, micro_batch - ahead, PassKind.BACKWARD)
        for micro_batch in range(self.micro_batches - ahead, self.micro_batches):
            yield Action(rank, micro_batch, PassKind.BACKWARD)
