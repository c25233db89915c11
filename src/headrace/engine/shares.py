"""How many examples a round has, where some are left out on the way."""

from __future__ import annotations

from dataclasses import replace

from headrace.comm.collective import SharedCollective
from headrace.spec.share import Share

__all__ = ["counted"]


def counted(share: Share, drops: bool, host: SharedCollective) -> Share:
    """Returns a share that knows how many examples all workers have together; all of them call it.

    Args:
        share: of this worker.
        drops: whether its data may leave some out.
        host: the workers, who go in step.
    """
    if not drops:
        return share
    (total,) = host.sum([float(share.examples)])
    return replace(share, of=int(total))
