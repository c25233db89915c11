"""What several schedules have in common: a V of stages, and weights' gradients that are made late."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator

from headrace.errors import UsageError
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule

_KINDS = {"F": PassKind.FORWARD, "B": PassKind.BACKWARD, "I": PassKind.BACKWARD_INPUT}


class VShape(PipelineSchedule):
    """K ranks with stages r and 2K - 1 - r, so that the way back begins on the rank where it ends.

    A schedule says what a rank does in words: F0 the next forward pass of its first stage, I1 the next pass for the
    input's gradient of its second, W the weight pass that has waited longest, B0 a whole backward pass. It says them
    for at least `least` micro-batches, and what there are not of these is left out.
    """

    def stages(self) -> int:
        if self.chunks not in (1, 2):
            raise UsageError(f"each rank has 2 stages under {type(self).__name__}, got chunks={self.chunks}; use 2")
        return 2 * self.ranks

    def rank_of(self, stage: int) -> int:
        return min(stage, 2 * self.ranks - 1 - stage)

    @abstractmethod
    def words(self, rank: int, count: int) -> Iterator[str]:
        """Yields what a rank does with `count` micro-batches."""

    def least(self) -> int:
        """Returns for how many micro-batches at least the words are said."""
        return 2 * self.ranks

    def actions(self, rank: int) -> Iterator[Action]:
        stages, waiting = (rank, 2 * self.ranks - 1 - rank), deque[Action]()
        said: dict[tuple[int, bool], int] = {}
        for word in self.words(rank, max(self.micro_batches, self.least())):
            if word == "W":
                action = waiting.popleft()
            else:
                stage, kind = stages[int(word[1])], _KINDS[word[0]]
                index = said.setdefault((stage, kind is PassKind.FORWARD), 0)
                said[stage, kind is PassKind.FORWARD] += 1
                action = Action(stage, index, kind)
                if kind is PassKind.BACKWARD_INPUT:
                    waiting.append(Action(stage, index, PassKind.BACKWARD_WEIGHT))
            if action.micro_batch < self.micro_batches:
                yield action


def with_late_weights(schedule: PipelineSchedule, rank: int, ahead: int, late: int) -> Iterator[Action]:
    """Yields a rank's passes of 1F1B whose weights' gradients are made later than the inputs': of ZB-H1 and ZB-H2.

    Args:
        ahead: forward passes before the first backward, if there are so many micro-batches.
        late: by so many micro-batches a weight pass comes after the pass of the input's gradient.
    """
    count = schedule.micro_batches
    ahead = min(ahead, count)
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
