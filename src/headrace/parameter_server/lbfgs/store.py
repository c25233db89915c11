"""A server that sums gradients by portion and computes with vectors, in place of the job's optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headrace.parameter_server.lbfgs.solver import CommandLog, Stage
from headrace.parameter_server.lbfgs.vectors import Vectors, X
from headrace.parameter_server.server.updater import PushedStep, ShardOptimizerState, ShardUpdater
from headrace.parameter_server.wire import Message, ShardLayout, like
from headrace.training.optimizer import StatePiece
from headrace.training.update import PARAMETER


class VectorStore(ShardUpdater):
    """The vectors of one server's shards; `portions` of a batch are pushed one by one, see `PortionTable`."""

    sums = True

    def __init__(self, layout: ShardLayout, portions: int) -> None:
        super().__init__(layout)
        self.vectors = Vectors()
        self.log = CommandLog()
        self._portions = portions

    def bind(self, tensors: Sequence[Tensor]) -> None:
        self.vectors.bind([tensor.view(-1) for tensor in tensors])

    def apply(self, gradients: Sequence[tuple[int, Tensor]], shards: Sequence[int], step: PushedStep) -> None:
        serial, part = divmod(step.lease, self._portions + 1)
        for shard, gradient in gradients:
            self.vectors.add(shard, serial, part, gradient, step.weight)

    def _settings(self) -> dict[str, Any]:
        return self.log.settings or {}

    def _load_settings(self, settings: dict[str, Any] | None) -> None:
        self.log = CommandLog(settings=settings)
        self.vectors.bind(self.vectors.named[X])

    def _pieces(self, shard: int) -> Iterable[StatePiece]:
        spec = self._layout.pieces[shard]
        vectors = self.vectors.pieces(shard)
        return [StatePiece(spec.parameter, name, spec.start, value) for name, value in vectors.items()]

    def _load_pieces(self, pieces: Sequence[StatePiece], shard: int) -> None:
        for piece in pieces:
            name = X if piece.key == PARAMETER else piece.key
            piece.copy_to(self._piece(name, shard), self._layout.pieces[shard].start)

    def all_state(self) -> tuple[ShardOptimizerState, dict[str, Tensor]]:
        tensors = {
            f"vector/{shard}/{name}": value
            for shard in range(len(self._layout))
            for name, value in self.vectors.pieces(shard).items()
        }
        for shard, sums in enumerate(self.vectors.sums):
            tensors |= {f"sum/{shard}/{level}/{part}": node for (level, part), node in sums.nodes.items()}
        settings = json.dumps({"log": asdict(self.log), "serial": self.vectors.serial})
        return ShardOptimizerState(0, (), settings, shows_average=False), tensors

    def load_all(self, state: ShardOptimizerState, tensors: Mapping[str, Tensor]) -> None:
        known = json.loads(state.settings)
        self.vectors.bind(self.vectors.named[X])
        self.vectors.serial = known["serial"]
        self.log = CommandLog.parse(known["log"])
        for name in tensors:
            kind, _, rest = name.partition("/")
            if kind == "vector":
                shard, _, vector = rest.partition("/")
                piece = self._piece(vector, int(shard))
                piece.copy_(like(tensors, name, piece))
            elif kind == "sum":
                shard, level, part = rest.split("/")
                parameter = self.vectors.named[X][int(shard)]
                self.vectors.sums[int(shard)].nodes[int(level), int(part)] = like(tensors, name, parameter).clone()

    def memory(self) -> tuple[int, int]:
        return sum(self._layout.slots.lengths), self.vectors.state_bytes()

    def answer(self, message: Message, blob: memoryview, writing: AbstractContextManager[None]) -> tuple[bytes, bool]:
        """Answers a VECTORS message; raises ValueError if it is wrong.

        It has round, iteration and the index in them as numbers, and commands in JSON as its blob: they are carried out
        once, while `writing`, and the answer is their numbers. With `flag`, it asks for the log. Returns also whether
        the parameters may be others now.
        """
        if message.flag:
            return json.dumps(asdict(self.log)).encode(), False
        if len(message.numbers) != 3:
            raise ValueError(f"commands have 3 numbers, not {len(message.numbers)}")
        round_, iteration, index = message.numbers
        before = self.log
        with writing:
            numbers = self.carry_out((round_, iteration), index, bytes(blob))
        return json.dumps(numbers).encode(), self.log is not before

    def carry_out(self, stage: Stage, index: int, described: bytes) -> list[float]:
        """Carries out the `index`-th commands of a stage, or returns the numbers that they gave before.

        Raises ValueError if they are none, or the stage is over, or commands before them are missing.
        """
        log = self.log
        if stage > log.stage and index == 0:
            log = CommandLog(stage, log.settings, log.settings)
        if stage != log.stage or index > len(log.results):
            raise ValueError(f"commands {index} of stage {stage}, and {len(log.results)} of stage {log.stage} are next")
        if index < len(log.results):
            return list(log.results[index])
        numbers, settings = [], log.settings
        for command in self.vectors.check(json.loads(described)):
            if command[0] == "settle":
                settings = command[1]
                continue
            number = self.vectors.run(command)
            if number is not None:
                numbers.append(number)
        self.log = CommandLog(log.stage, log.before, settings, (*log.results, tuple(numbers)))
        return numbers

    def _piece(self, name: str, shard: int) -> Tensor:
        """Returns a shard's piece of a vector; of a new vector, zeros."""
        named = self.vectors.named
        if name not in named:
            self.vectors.check([["copy", name, X]])
            named[name] = [torch.zeros_like(value) for value in named[X]]
        return named[name][shard]
