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
        unpushed: shards that have not said yet what becomes of the gradient.
        unpulled: shards that have not given their parameters yet.
        refused: the first refusal's reason.
        came: when, seconds.
        gradients: by shard, as far as they have been looked at.
    """

    peer: int
    message: Message
    unpushed: set[int]
    unpulled: set[int]
    refused: Reason | None = None
    came: float = field(default_factory=perf_counter)
    gradients: dict[int, Tensor] = field(default_factory=dict)
