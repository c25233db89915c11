"""One server's part of all vectors, and the sums of the gradients that are pushed to it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.internals import foreach_add_, foreach_copy_, foreach_mul, foreach_sub
from headrace.parameter_server.lbfgs.solver import Command, largest

X = "x"
_NAME = re.compile(r"x0|[gpd]|[sye][0-9]{0,7}")
_NEEDS = {
    "copy": (str, str), "move": (str, str), "scale": (str, str, float), "axpy": (str, str, float),
    "sub": (str, str, str), "dot": (str, str), "max": (str,), "sum": (str,), "gather": (str, int, float),
    "settle": (dict,),
}  # fmt: skip
"""What each command needs; `keep` needs any number of names."""


class PortionSums:
    """The sum of one shard's gradients over the portions of an evaluation, in an order that only the portions decide.

    Two neighbours are added as soon as both are there, and so on upwards, like the nodes of a binary tree.
    """

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, int], Tensor] = {}

    def add(self, part: int, gradient: Tensor) -> None:
        """Adds a portion's gradient, times its weight."""
        level = 0
        while (level, part ^ 1) in self.nodes:
            other = self.nodes.pop((level, part ^ 1))
            gradient = other.add_(gradient) if part & 1 else gradient.add_(other)
            level, part = level + 1, part >> 1
        self.nodes[level, part] = gradient

    def take(self) -> Tensor | None:
        """Returns the sum of all, and forgets them; None without any."""
        total: Tensor | None = None
        for _, node in sorted(self.nodes.items(), key=lambda item: item[0][1] << item[0][0]):
            total = node if total is None else total.add_(node)
        self.nodes.clear()
        return total


class Vectors:
    """Vectors by name, each in one flat piece a shard; `x` is the parameters."""

    def __init__(self) -> None:
        self.named: dict[str, list[Tensor]] = {}
        self.sums: list[PortionSums] = []
        self.serial = -1

    def bind(self, parameters: Sequence[Tensor]) -> None:
        """Makes these flat tensors, one for each shard, the parameters."""
        self.named = {X: list(parameters)}
        self.sums = [PortionSums() for _ in parameters]

    def add(self, shard: int, serial: int, part: int, gradient: Tensor, weight: float) -> None:
        """Adds the mean gradient over a portion of an evaluation."""
        if serial > self.serial:
            self.serial = serial
            for tree in self.sums:
                tree.nodes.clear()
        if serial == self.serial:
            self.sums[shard].add(part, gradient.reshape(-1) * weight)

    def check(self, commands: object) -> list[Command]:
        """Returns what can be carried out; raises ValueError if these are no commands."""
        if not isinstance(commands, list):
            raise ValueError(f"commands are a list, got {type(commands).__name__}")
        known = set(self.named)
        for command in commands:
            if not isinstance(command, list) or not command or not isinstance(command[0], str):
                raise ValueError(f"no command: {command!r:.80}")
            name, *given = command
            wanted = (str,) * len(given) if name == "keep" else _NEEDS.get(name)
            if wanted is None or len(given) != len(wanted):
                raise ValueError(f"there is no command {name!r:.20} with {len(given)} values")
            for value, kind in zip(given, wanted, strict=True):
                whole = isinstance(value, int) and not isinstance(value, bool)
                if not (isinstance(value, kind) or (kind is float and whole)) or isinstance(value, bool):
                    raise ValueError(f"{name} takes no {value!r:.40}")
            self._check_names(name, given, known)
        return commands

    def run(self, command: Command) -> float | None:
        """Carries out a checked command other than `settle`; returns its number, if it has one."""
        name, *given = command
        if name == "keep":
            self.named = {vector: pieces for vector, pieces in self.named.items() if vector == X or vector in given}
        elif name == "gather":
            self._gather(*given)
        elif name in ("dot", "max", "sum"):
            return self._number(name, *(self.named[vector] for vector in given))
        elif name == "move":
            self.named[given[0]] = self.named.pop(given[1])
        elif name == "axpy":
            foreach_add_(self.named[given[0]], self.named[given[1]], alpha=given[2])
        else:
            self._assign(name, given[0], self.named[given[1]], given[2:])
        return None

    def state_bytes(self) -> int:
        """Returns the bytes of all vectors but the parameters, and of the sums."""
        tensors = [piece for name, pieces in self.named.items() if name != X for piece in pieces]
        tensors += [node for tree in self.sums for node in tree.nodes.values()]
        return sum(piece.numel() * piece.element_size() for piece in tensors)

    def _check_names(self, command: str, given: Sequence[Any], known: set[str]) -> None:
        names = [name for name in given if isinstance(name, str)]
        writes = command in ("copy", "move", "scale", "sub", "gather")
        out, reads = (names[:1], names[1:]) if writes else ([], names)
        # A vector that is kept need not be there.
        missing = [] if command == "keep" else [name for name in reads if name not in known]
        strange = [name for name in names if name != X and not _NAME.fullmatch(name)]
        wrong = strange or missing or (command in ("move", "gather") and X in names and [X])
        if wrong:
            raise ValueError(f"{command} of {names!r:.80}: {wrong[0]!r:.40} is none of the vectors that it can be of")
        known.update(out)
        if command == "move" and names[0] != names[1]:
            known.discard(names[1])

    def _assign(self, command: str, out: str, pieces: Sequence[Tensor], more: Sequence[Any]) -> None:
        if command == "copy":
            made = [piece.clone() for piece in pieces] if out != X else list(pieces)
        elif command == "scale":
            made = list(foreach_mul(list(pieces), more[0]))
        else:
            made = list(foreach_sub(list(pieces), self.named[more[0]]))
        if out == X:
            foreach_copy_(self.named[X], made)
        else:
            self.named[out] = made

    def _gather(self, out: str, serial: int, weight: float) -> None:
        # Without any weight there is no gradient.
        totals = [tree.take() if serial == self.serial else None for tree in self.sums]
        of = zip(totals, self.named[X], strict=True)
        self.named[out] = [torch.zeros_like(value) if total is None else total.div_(weight) for total, value in of]

    @staticmethod
    def _number(command: str, pieces: Sequence[Tensor], others: Sequence[Tensor] = ()) -> float:
        if command == "dot":
            return math.fsum(float(torch.dot(a, b)) for a, b in zip(pieces, others, strict=True))
        if command == "max":
            return largest([float(piece.abs().max()) for piece in pieces if piece.numel()])
        return math.fsum(float(piece.abs().sum()) for piece in pieces)

    def pieces(self, shard: int) -> Mapping[str, Tensor]:
        """Returns all vectors of a shard but the parameters."""
        return {name: pieces[shard] for name, pieces in self.named.items() if name != X}
