"""ZB-H2."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.families import with_late_weights
from headrace.pipeline.schedules.schedule import Action, PipelineSchedule


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
        yield from with_late_weights(self, rank, 2 * (self.ranks - rank - 1), 2 * rank)
