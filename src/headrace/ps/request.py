"""A question of a worker that a server has not answered yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from headrace.ps.messages import Message
from headrace.ps.shard import Reason

__all__ = ["Request"]


@dataclass
class Request:
    """What a worker waits for.

    Attributes:
        peer: the link that it came from.
        message: what it said.
        shards: that it is about.
        unsaid: words of shards that are still to come: one about each gradient, one about each pull.
        gradients: by shard, of those that have one.
        refused: the first refusal's reason.
        came: when, seconds.
    """

    peer: int
    message: Message
    shards: range
    unsaid: int
    gradients: dict[int, Tensor]
    refused: Reason | None = None
    came: float = field(default_factory=perf_counter)
