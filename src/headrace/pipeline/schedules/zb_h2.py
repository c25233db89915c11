"""ZB-H2."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule


class ZeroBubbleH2(PipelineSchedule):
    """ZB-H1 with twice as many forward passes ahead, so that the bubble at the beginning is filled, too.

    ZB-H2 (Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", ICLR 2024, section 2.2 and figure 3); 2' is the
    gradient of the input, 2" that of the weights:

        rank 0   0  1  2  3  .  0' 0" 1' 1" 2' 2" 3' 3" .
        rank 1   .  0  1  2  0' 3  1' .  2' 0" 3' 1" 2" 3"
        rank 2   .  .  0  0' 1  1' 2  2' 3  3' 0" 1" 2" 3"

    Where the three take F, B and W, each of K ranks idles (K - 1)(F + B - 2W) at most between its first pass and its
    last. The last rank ends as much later than the first as it began later: a step that waits for all ranks, as an
    update with a common norm does, waits for that, too. Rank r of K holds the activations of at most 2(K - r) - 1
    micro-batches, and what the weight passes of 2r more need.
    """

    def actions(self, rank: int) -> Iterator[Action]:
        count = self.micro_batches
        ahead = min(2 * (self.ranks - rank - 1), count)
        late = 2 * rank
        for micro_batch in range(ahead):
            yield Action(rank, micro_batch)
        for micro_batch in range(count):
            if micro_batch + ahead < count:
                yield Action(rank, micro_batch + ahead)
            yield Action(rank, micro_batch, PassKind.BACKWARD_INPUT)
            if micro_batch >= late:
                yield Action(rank, micro_batch - late, PassKind.BACKWARD_WEIGHT)
        for micro_batch in range(max(0, count - late), count):
            yield Action(rank, micro_batch, PassKind.BACKWARD_WEIGHT)
