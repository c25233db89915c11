"""A piece of a run's state, as checkpoints and messages hold it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state, in a form that any other split of the parameters can take up.

    Attributes:
        parameter: name of the parameter that it belongs to.
        key: the optimizer's own, "momentum_buffer".
        start: first element of the flattened parameter that `value` covers; -1 if `value` belongs to the whole
            parameter (a step count, the statistics of its rows).
        value: flat; in its own shape where it belongs to the whole parameter.
        kind: "tensor"; or "int", "float", "bool" where the optimizer keeps a number of Python's.
    """

    parameter: str
    key: str
    start: int
    value: Tensor
    kind: str = "tensor"

    @property
    def name(self) -> str:
        """How files and messages call it; `parse` reads it."""
        return f"{self.parameter}/{self.key}@{self.start}" + f"#{self.kind}" * (self.kind != "tensor")

    @classmethod
    def parse(cls, name: str, value: Tensor) -> StatePiece:
        """Returns the piece of that name.

        Raises:
            ValueError: no piece is called so.
        """
        head, _, tail = name.rpartition("@")
        start, _, kind = tail.partition("#")
        parameter, _, key = head.rpartition("/")
        if int(start) < -1:
            raise ValueError(f"{name} begins before its parameter")
        return cls(parameter, key, int(start), value, kind or "tensor")

    def copy_to(self, target: Tensor, start: int) -> None:
        """Fills what this piece covers of the elements from `start` on of its parameter.

        Args:
            target: contiguous, in any shape.
            start: the parameter's element that `target` begins with.
        """
        low, high = max(start, self.start), min(start + target.numel(), self.start + self.value.numel())
        if low < high:
            target.view(-1)[low - start : high - start].copy_(self.value[low - self.start : high - self.start])
