"""ZB-H1."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.families import with_late_weights
from headrace.pipeline.schedules.schedule import Action, PipelineSchedule


class ZeroBubbleH1(PipelineSchedule):
    """1F1B whose rank r makes the weights' gradients r micro-batches late, so that they fill the bubble at the end.

    ZB-H1 (Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", ICLR 2024, section 2.1 and figure 3); 2' is the
    gradient of the input, for which the stage before waits, 2" that of the weights, for which no stage waits:

        rank 0   0  1  2  .  .  0' 0" 3  1' 1" 2' 2" 3' 3"
        rank 1   .  0  1  .  0' 2  1' 0" 3  2' 1" 3' 2" 3"
        rank 2   .  .  0  0' 1  1' 2  2' 0" 3  3' 1" 2" 3"

    Where the three take F, B and W, and W is no longer than F, K ranks idle (K - 1)(F + B - W) at most, and
    (K - 1)(F + B + W) under 1F1B. Rank r of K holds the activations of at most K - r micro-batches, as under 1F1B, and
    what the weight passes of r more need: K in all, as many as the first rank of 1F1B. A weight pass needs the input of
    each linear layer and the gradient of its output: less than a block of a transformer saves, and more than linear
    layers alone.
    """

    def actions(self, rank: int) -> Iterator[Action]:
        yield from with_late_weights(self, rank, self.ranks - rank - 1, rank)
