"""Shares of a round that are not what they usually are: examples are left out on the way, or a worker has none."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from headrace.comm.collective import ProcessGroup
from headrace.replica.batch_norm import averaged_buffers
from headrace.spec.share import Share

__all__ = ["catch_up", "counted"]


def counted(share: Share, drops: bool, host: ProcessGroup, counts: bool = True) -> Share:
    """Returns a share that knows how many examples all workers have together; all of them call it.

    Args:
        share: of this worker.
        drops: whether its data may leave some out.
        host: the workers, who go in step.
        counts: whether this worker speaks for its replica, whose ranks have the same share.
    """
    if not drops:
        return share
    (total,) = host.sum([float(share.examples * counts)])
    return replace(share, of=int(total))


def catch_up(module: nn.Module, host: ProcessGroup) -> None:
    """Brings rank 0's buffers to workers that had no example, so that what forward moves does not fall behind."""
    own = {id(buffer) for buffer in averaged_buffers(module)}
    for buffer in module.buffers():
        if id(buffer) not in own:
            near = buffer.cpu()
            host.broadcast(near)
            buffer.copy_(near)
