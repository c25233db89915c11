"""One run of the model's own forward for a stage: modules of other stages return what was received from there.

stage 1 of 3      embeddings    block 0    block 1    block 2    head
                  received      received   runs       forward is left
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from headrace.errors import JobError
from headrace.pipeline.replay.recording import Leaf, ModuleCall
from headrace.pipeline.replay.structure import absent_tensor, fill, leaves_of, template


class Left(BaseException):
    """Leaves forward behind a stage's last call; no `except Exception` of the model's stops it."""

    def __init__(self, run: StageRun) -> None:
        super().__init__()
        self.run = run


Follower = Callable[[int, bool], None]
"""Is told the index of a call, and whether it has ended or begins; the check of cuts sets random numbers by it."""


@dataclass
class StageRun:
    """What a stage does with one micro-batch.

    Attributes:
        bounds: its calls [start, stop).
        received: tensors of earlier stages' calls.
        sizes: of tensors of which nothing but the size is needed, an empty one each, `(0, *size)`.
        sent: tensors of its own calls that others need.
        made: those, when they have been made.
        next: the index of the next call.
    """

    calls: Sequence[ModuleCall]
    bounds: tuple[int, int]
    received: Mapping[Leaf, Tensor]
    sizes: Mapping[Leaf, Tensor]
    sent: frozenset[Leaf]
    last: bool
    begun: Callable[[], None]
    follow: Follower | None = None
    made: dict[Leaf, Tensor] = field(default_factory=dict)
    next: int = 0
    _inside: bool = False

    def __call__(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stands for the call of a tracked module."""
        if self._inside:
            # It is called by another tracked module, of which it is a part.
            return original(*args, **kwargs)
        index = self.next
        if index == len(self.calls) or self.calls[index].path != path:
            expected = self.calls[index].path if index < len(self.calls) else "no further module"
            self._differs(f"it calls {path}", expected)
        if not self.bounds[0] <= index < self.bounds[1]:
            self.next += 1
            self._tell(index, True)
            call = self.calls[index]
            return fill(call.template, lambda leaf: self._tensor(index, leaf), call.name, (args, kwargs))
        self._tell(index, False)
        if index == self.bounds[0]:
            self.begun()
        self._inside = True
        try:
            output = original(*args, **kwargs)
        finally:
            self._inside = False
        self.next += 1
        self._keep(index, output, (args, kwargs))
        if self.next == self.bounds[1] and not self.last:
            raise Left(self)
        return output

    def finish(self) -> None:
        """Refuses a forward that has ended without all of its calls."""
        if self.next < len(self.calls):
            self._differs("it ends", self.calls[self.next].path)

    def _differs(self, what: str, expected: str) -> NoReturn:
        raise JobError(
            f"forward does not do what it did for the examples that the model was traced with: {what} where it called "
            f"{expected}; set rates of skipped layers (layerdrop) to 0, give every batch the same form; where the "
            "data decide what is called (experts of a mixture), call all of them, or use mirrored"
        )

    def _tell(self, index: int, ended: bool) -> None:
        if self.follow is not None:
            self.follow(index, ended)

    def _keep(self, index: int, output: Any, arguments: Any) -> None:
        call = self.calls[index]
        made, tensors = template(output, arguments)
        if leaves_of(made) != leaves_of(call.template):
            raise JobError(
                f"{call.name} returns {leaves_of(made)!r:.200}, and for the examples that the model was traced with it "
                f"returned {leaves_of(call.template)!r:.200}; give every batch the same form"
            )
        for leaf, tensor in enumerate(tensors):
            if (index, leaf) in self.sent:
                # What is written to later is sent as it was before.
                self.made[index, leaf] = tensor.clone() if leaf in call.written else tensor

    def _tensor(self, index: int, leaf: int) -> Tensor:
        call = self.calls[index]
        if (index, leaf) in self.received:
            value = self.received[index, leaf]
            return value.clone() if leaf in call.written else value
        if (index, leaf) in self.sizes:
            size = self.sizes[index, leaf]
            zeros = torch.zeros((), dtype=size.dtype, device=size.device).expand(size.shape[1:])
            return zeros.clone() if leaf in call.written else zeros
        return absent_tensor(f"what {call.name} returns")
