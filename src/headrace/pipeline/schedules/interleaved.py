"""Interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule


class Interleaved(PipelineSchedule):
    """1F1B over `chunks` stages a rank, group by group of as many micro-batches as there are ranks.

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.2, figure 4. Two
    ranks with two stages each, 0 and 2 on rank 0, 1 and 3 on rank 1; a2 is the forward of micro-batch 2 through a
    rank's first stage, b2' its backward through its second:

        rank 0   a0  a1  b0  b1  a2  b0' a3  b1' b2  a0' b3  a1' .   b2' .   b3' a2' a3'
        rank 1   .   a0  a1  b0  b0' b1  b1' a2  a0' a3  a1' b2  b2' b3  b3' a2' a3' .

    The bubble is that of one stage a rank, (K - 1) / M of the work, divided by the stages a rank; values cross between
    ranks as many times more often. The last group of micro-batches may be smaller.
    """

    def stages(self) -> int:
        return self.ranks * self.chunks

    def actions(self, rank: int) -> Iterator[Action]:
        # Of the last group those micro-batches are left out that there are not.
        return (action for action in self._in_groups(rank) if action.micro_batch < self.micro_batches)

    def _in_groups(self, rank: int) -> Iterator[Action]:
        ranks, chunks = self.ranks, self.chunks
        every = -(-self.micro_batches // ranks) * ranks * chunks

        def action(index: int, kind: PassKind) -> Action:
            group, place = divmod(index, ranks * chunks)
            chunk, member = divmod(place, ranks)
            chunk = chunk if kind is PassKind.FORWARD else chunks - 1 - chunk
            return Action(rank + chunk * ranks, group * ranks + member, kind)

        ahead = min(every, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        for index in range(ahead):
            yield action(index, PassKind.FORWARD)
        for index in range(ahead, every):
            yield action(index, PassKind.FORWARD)
            yield action(index - ahead, PassKind.BACKWARD)
        for index in range(every - ahead, every):
            yield action(index, PassKind.BACKWARD)
