"""Bytes that a process holds, by what they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a process holds at the moment when it holds most of all, by what they are.

    Attributes:
        parameters: its own, whole or a part.
        gradients: in `.grad`, or where it puts them for others.
        state: of the optimizer.
        buffers: of the model.
        activations: what forward keeps for backward, and results that live for a moment.
        gathered: parameters of which it has a part only, while they are whole.
        exchange: what processes of a host share besides, and what is on its way to or from another.
        batch: its share of the batch, once.
        start: the most before the first round, all together.
        end: when the trained model is written, all together.
        host: memory of the host besides, at most, where a choice keeps there what an accelerator does not need.
        routed: whether a router chose, which was taken to choose each expert as often as the others.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    buffers: int = 0
    activations: int = 0
    gathered: int = 0
    exchange: int = 0
    batch: int = 0
    start: int = 0
    end: int = 0
    host: int = 0
    routed: bool = False

    @property
    def peak(self) -> int:
        """All together, at most, without `host`."""
        here: int = sum(getattr(self, name) for name in KINDS)
        return max(self.start, here, self.end)


KINDS = ("parameters", "gradients", "state", "buffers", "activations", "gathered", "exchange", "batch")
"""What bytes are, in the order of a table."""
