"""Shares of a round that are not what they usually are: examples are left out on the way, or a worker has none."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from headrace.collectives.base import ProcessGroup
from headrace.spec.job import Share
from headrace.training.batch_norm import averaged_buffers


def counted(share: Share, drops: bool, group: ProcessGroup, counts: bool = True) -> Share:
    """Returns a share that knows how many examples all workers have together; all of them call it.

    Args:
        share: of this worker.
        drops: whether its data may leave some out.
        group: the workers, who go in step.
        counts: whether this worker speaks for its replica, whose ranks have the same share.
    """
    if not drops:
        return share
    (total,) = group.sum([float(share.examples * counts)])
    return replace(share, of=int(total))


def catch_up(module: nn.Module, group: ProcessGroup) -> None:
    """Brings rank 0's buffers to workers that had no example, so that what forward moves does not fall behind."""
    own = {id(buffer) for buffer in averaged_buffers(module)}
    for buffer in module.buffers():
        if id(buffer) not in own:
            near = buffer.cpu()
            group.broadcast(near)
            buffer.copy_(near)
