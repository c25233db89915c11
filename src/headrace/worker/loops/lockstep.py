"""Workers in lockstep: every worker synchronizes with the others in every step."""

from __future__ import annotations

from typing import Any

from torch import nn

from headrace.collectives.base import ProcessGroup
from headrace.spec.job import Share
from headrace.training.batch_norm import averaged_buffers
from headrace.worker.loops.rounds import RoundLoop, count_examples


class LockstepLoop(RoundLoop):
    """The loop of synchronous strategies, and of workers that never synchronize."""

    @property
    def meets(self) -> bool:
        return self._session.run.strategy.synchronous

    def next_meeting(self) -> int:
        return self._session.progress.done

    def count(self, share: Share) -> Share:
        session = self._session
        return count_examples(share, session.loader.drops, session.group, session.replica.compute.counts)

    def part(self, batch: Any) -> Share:
        share = self._session.progress.share
        return Share(batch, share.examples, share.of, share.epoch)

    def synchronize(self) -> float:
        if self.meets and self._session.progress.share.of < self._session.mates.world:
            _broadcast_buffers(self._session.replica.compute.module, self._session.mates)
        return 0.0


def _broadcast_buffers(module: nn.Module, group: ProcessGroup) -> None:
    """Gives rank 0's buffers to workers that had no example, whose forward has not moved theirs."""
    averaged = {id(buffer) for buffer in averaged_buffers(module)}
    for buffer in module.buffers():
        if id(buffer) not in averaged:
            near = buffer.cpu()
            group.broadcast(near)
            buffer.copy_(near)
