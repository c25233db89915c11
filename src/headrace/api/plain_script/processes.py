"""What a script asks of its processes: which one it is, a barrier, numbers of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from headrace.api.plain_script.meeting import BARRIER, GATHER, Meeting
from headrace.collectives.base import gather_texts
from headrace.errors import UsageError


class ScriptProcesses:
    """The processes that run a script: all of them call the same methods, in the same order. Alone, it is one.

    `hr.processes()` returns them.

    Args:
        rank: this one's number.
        world: how many there are.
        meet: returns what they meet by.

    Examples:
        >>> here = hr.processes()
        >>> here.gather({"loss": 0.5}), here.sum(2)
        ([{'loss': 0.5}], 2.0)
    """

    def __init__(self, rank: int, world: int, meet: Callable[[], Meeting]) -> None:
        self.rank, self.world = rank, world
        self._meet = meet

    @property
    def device(self) -> str:
        """Where this process computes: "cuda:1", of several the one of its number on the host; "cpu" without any.

        Raises:
            UsageError: the host has more processes than devices.
        """
        # Here, because it imports what scripts on CPUs need not.
        from headrace.api.plain_script.script_devices import own_device

        return own_device()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when every process has called it."""
        if self.world > 1:
            self._meet().meet(BARRIER)

    def gather(self, value: Any) -> list[Any]:
        """Returns every process's value, by rank: numbers, texts, and lists and dicts of them."""
        if self.world == 1:
            return [value]
        try:
            text = json.dumps(value)
        except TypeError as error:
            raise UsageError(
                f"gather takes numbers, texts, lists and dicts ({error}); use value.item() or value.tolist()"
            ) from error
        meeting = self._meet()
        meeting.meet(GATHER)
        return [json.loads(each) for each in gather_texts(meeting.group, text)]

    def sum(self, value: float) -> float:
        """Returns the sum of all processes' numbers, or tensors of one element, in the order of ranks."""
        return float(sum(self.gather(float(value))))

    def mean(self, value: float, count: float = 1.0) -> float:
        """Returns the mean of all processes' numbers, each of which stands for `count` examples; 0 for none at all."""
        total = self.sum(count)
        # The mean over no examples is not a number.
        return self.sum(float(value) * count if count else 0.0) / total if total else 0.0
