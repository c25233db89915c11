"""What a script asks of its processes: which one it is, a barrier, numbers of all, its part of what all have."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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

    Attributes:
        is_first: whether this is rank 0, which writes files and prints.

    Examples:
        >>> here = hr.processes()
        >>> here.gather({"loss": 0.5}), here.sum(2)
        ([{'loss': 0.5}], 2.0)
    """

    def __init__(self, rank: int, world: int, meet: Callable[[], Meeting]) -> None:
        self.rank, self.world, self.is_first = rank, world, rank == 0
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
        return float(sum(self.gather(_number(value))))

    def mean(self, value: float, count: float = 1.0) -> float:
        """Returns the mean of all processes' numbers, each of which stands for `count` examples; 0 for none at all."""
        total = self.sum(count)
        # The mean over no examples is not a number.
        return self.sum(_number(value) * count if count else 0.0) / total if total else 0.0

    def on_first(self, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
        """Calls a function on rank 0 alone, and returns in every process when it has: what it wrote may be read then.

        Examples:
            >>> hr.processes().on_first(print, "saved")
            saved
        """
        if self.is_first:
            call(*arguments, **named)
        self.barrier()

    def common(self) -> AbstractContextManager[None]:
        """Lets what runs inside draw the random numbers of the script alone, the same in every process.

        Examples:
            >>> with hr.processes().common():
            ...     noise = torch.randn(64, 100)
        """
        return self._meet().begin_common() if self.world > 1 else nullcontext()

    def share(self, values: Any, dim: int = 0) -> Any:
        """Returns this process's part of a batch that all have, of tensors in tuples, lists and dicts, cut along `dim`.

        The next backward pass is weighted by it, as one of a divided loader.

        Raises:
            UsageError: there is no tensor, or they differ in length.

        Examples:
            >>> inputs, targets = hr.processes().share((torch.zeros(6, 4), torch.zeros(6)))
            >>> len(inputs)
            6
        """
        # Here, because rank and world need no torch.
        from headrace.api.plain_script.given.parts import share_of

        return share_of(values, dim, self._meet() if self.world > 1 else None)

    def whole(self, values: Any, dim: int = 0) -> Any:
        """Returns the tensors of all processes' shares, joined along `dim` in the order of the script alone.

        Shares have no example twice, so a metric of them is exact, on a last batch of unequal shares, too. Gradients
        do not go through it.

        Raises:
            UsageError: there is no tensor, a tensor has no such dim, or the processes give different trees.

        Examples:
            >>> hr.processes().whole(torch.zeros(6, 4)).shape
            torch.Size([6, 4])
        """
        from headrace.api.plain_script.given.parts import whole_of

        return whole_of(values, dim, self._meet() if self.world > 1 else None)


def _number(value: Any) -> float:
    # torch warns where a loss with a graph is made a float.
    item = getattr(value, "item", None)
    return float(item() if item else value)
