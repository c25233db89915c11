"""A server that sums gradients by portion and computes with vectors, in place of the job's optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.core.events import Renew
from headrace.parameter_server.lbfgs.solver import CommandLog, Stage
from headrace.parameter_server.lbfgs.vectors import Vectors, X
from headrace.parameter_server.server.updater import ShardOptimizerState, ShardUpdater
from headrace.parameter_server.wire import Message, ShardLayout, like
from headrace.training.optimizer import StatePiece
from headrace.training.update import PARAMETER
from headrace.transport.base import ServerTransport


class VectorStore(ShardUpdater):
    """The vectors of one server's shards; `portions` of a batch are pushed one by one, see `PortionTable`."""

    sums = True

    def __init__(self, layout: ShardLayout, portions: int) -> None:
        self.vectors = Vectors()
        self.log = CommandLog()
        self._layout = layout
        self._portions = portions

    def bind(self, tensors: Sequence[Tensor]) -> None:
        self.vectors.bind([tensor.view(-1) for tensor in tensors])

    def apply(
        self,
        gradients: Sequence[tuple[int, Tensor]],
        shards: Sequence[int],
        worker: int,
        share: float,
        staleness: int,
        steps: int = 1,
        lease: int = -1,
        weight: float = 0.0,
    ) -> None:
        serial, part = divmod(lease, self._portions + 1)
        for shard, gradient in gradients:
            self.vectors.add(shard, serial, part, gradient, weight)

    def settle(self, done: int) -> None:
        """A round is done when the solver says so."""

    def sent(self, worker: int, shards: Sequence[int] | None) -> None:
        """No gradient is corrected by what a worker had."""

    def state(self, shard: int | None = None) -> bytes:
        if shard is None:
            return json.dumps(self.log.settings or {}).encode()
        self._require(shard)
        spec = self._layout.pieces[shard]
        pieces = [StatePiece(spec.parameter, name, spec.start, own) for name, own in self.vectors.pieces(shard).items()]
        return pack({piece.name: piece.value for piece in pieces})

    def load(self, state: bytes, shard: int | None = None) -> None:
        try:
            if shard is None:
                settings = json.loads(state) if state else None
                self.log = CommandLog(settings=settings)
                self.vectors.bind(self.vectors.named[X])
                return
            self._require(shard)
            pieces = [StatePiece.parse(name, value) for name, value in unpack(state).items()]
        except Exception as error:
            raise ValueError(f"no state of a shard: {error}") from error
        for piece in pieces:
            name = X if piece.key == PARAMETER else piece.key
            piece.copy_to(self._piece(name, shard), self._layout.pieces[shard].start)

    def all_state(self) -> tuple[ShardOptimizerState, dict[str, Tensor]]:
        tensors = {
            f"vector/{shard}/{name}": own
            for shard in range(len(self._layout))
            for name, own in self.vectors.pieces(shard).items()
        }
        for shard, sums in enumerate(self.vectors.sums):
            tensors |= {f"sum/{shard}/{level}/{part}": node for (level, part), node in sums.nodes.items()}
        settings = json.dumps({"log": asdict(self.log), "serial": self.vectors.serial})
        return ShardOptimizerState(0, (), settings, shows_average=False), tensors

    def load_all(self, state: ShardOptimizerState, tensors: Mapping[str, Tensor]) -> None:
        known = json.loads(state.settings)
        self.vectors.bind(self.vectors.named[X])
        self.vectors.serial = known["serial"]
        self.log = log_of(known["log"])
        for name in tensors:
            kind, _, rest = name.partition("/")
            if kind == "vector":
                shard, _, vector = rest.partition("/")
                own = self._piece(vector, int(shard))
                own.copy_(like(tensors, name, own))
            elif kind == "sum":
                shard, level, part = rest.split("/")
                parameter = self.vectors.named[X][int(shard)]
                self.vectors.sums[int(shard)].nodes[int(level), int(part)] = like(tensors, name, parameter).clone()

    def swap_weights(self, averaged: bool) -> None:
        """There are no averages."""

    def memory(self) -> tuple[int, int]:
        return sum(self._layout.slots.lengths), self.vectors.state_bytes()

    def _piece(self, name: str, shard: int) -> Tensor:
        """Returns a shard's piece of a vector; of a new vector, zeros."""
        named = self.vectors.named
        if name not in named:
            self.vectors.check([["copy", name, X]])
            named[name] = [torch.zeros_like(own) for own in named[X]]
        return named[name][shard]

    def _require(self, shard: int) -> None:
        if not 0 <= shard < len(self._layout):
            raise ValueError(f"there is no shard {shard}, only {len(self._layout)}")


def log_of(described: Mapping[str, Any]) -> CommandLog:
    """Returns the log of JSON values."""
    stage, results = described["stage"], described["results"]
    return CommandLog(
        (stage[0], stage[1]), described["before"], described["settings"], tuple(tuple(each) for each in results)
    )


def carry_out(store: VectorStore, stage: Stage, index: int, described: bytes) -> list[float]:
    """Carries out the `index`-th commands of a stage, or returns the numbers that they gave before.

    Raises ValueError if they are none, or the stage is over, or commands before them are missing.
    """
    log = store.log
    if stage > log.stage and index == 0:
        log = CommandLog(stage, log.settings, log.settings)
    if stage != log.stage or index > len(log.results):
        raise ValueError(f"commands {index} of stage {stage}, and {len(log.results)} of stage {log.stage} are next")
    if index < len(log.results):
        return list(log.results[index])
    commands = store.vectors.check(json.loads(described))
    numbers, settings = [], log.settings
    for command in commands:
        if command[0] == "settle":
            settings = command[1]
            continue
        number = store.vectors.run(command)
        if number is not None:
            numbers.append(number)
    store.log = CommandLog(log.stage, log.before, settings, (*log.results, tuple(numbers)))
    return numbers


class VectorRequests:
    """Requests of workers about vectors.

    A message has round, iteration and the index in them as numbers, and commands in JSON as its blob; with `flag`, it
    asks for the log.
    """

    def __init__(
        self, transport: ServerTransport, store: VectorStore, broadcast: Callable[[Renew], None], shards: int
    ) -> None:
        self._transport = transport
        self._store = store
        self._broadcast = broadcast
        self._shards = range(shards)

    def answer(self, message: Message, blob: memoryview) -> bytes:
        """Carries commands out, once, and returns their numbers; raises ValueError if the message is wrong."""
        if message.flag:
            return json.dumps(asdict(self._store.log)).encode()
        if len(message.numbers) != 3:
            raise ValueError(f"commands have 3 numbers, not {len(message.numbers)}")
        round_, iteration, index = message.numbers
        before = self._store.log
        with self._transport.writing(self._shards):
            numbers = carry_out(self._store, (round_, iteration), index, bytes(blob))
        if self._store.log is not before:
            # The parameters may be others.
            self._broadcast(Renew())
        return json.dumps(numbers).encode()
