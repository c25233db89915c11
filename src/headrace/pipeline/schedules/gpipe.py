"""GPipe."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule


class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes (Huang et al., "GPipe", 2019, section 2.3 and figure 2c).

        rank 0   0  1  2  3  .  .  .  .  3' 2' 1' 0'
        rank 1   .  0  1  2  3  .  .  3' 2' 1' 0' .
        rank 2   .  .  0  1  2  3  3' 2' 1' 0' .  .

    Of K stages each idles (K - 1) / (M + K - 1) of the time, and holds the activations of all M micro-batches. Backward
    begins with the last one, whose activations are the newest: with recomputation they need not be made again.
    """

    def actions(self, rank: int) -> Iterator[Action]:
        for micro_batch in range(self.micro_batches):
            yield Action(rank, micro_batch)
        for micro_batch in reversed(range(self.micro_batches)):
            yield Action(rank, micro_batch, PassKind.BACKWARD)
