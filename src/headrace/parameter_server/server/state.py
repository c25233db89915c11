"""All that a server is, at one moment, as bytes: safetensors, one of which is JSON for what is no tensor.

parameter/3                      a shard's parameters
state/3/weight/exp_avg@0         its optimizer's state
sent/1/3, residual/pull/1/3      what worker 1 was sent, and what a codec has lost on the way to it
gradient/1/3                     worker 1's part of a round that is open
random                           the state of torch's generator
server                           the rest, as JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from headrace.checkpoint.header import NAMES, PREFIX, TensorEntry, encode, length, parse
from headrace.checkpoint.tensors import views
from headrace.parameter_server.core.membership import MembershipState
from headrace.parameter_server.core.shard import ShardState
from headrace.parameter_server.server.coordinator import CoordinatorState
from headrace.parameter_server.server.optimizer import ShardOptimizerState
from headrace.parameter_server.server.requests import RequestState
from headrace.spec.plain import from_plain, to_plain

_VERSION = 1
_REST = "server"
_NAMES = {getattr(torch, word): name for name, word in NAMES.items()}


@dataclass(frozen=True)
class ServerState:
    """What of a server is no tensor.

    Attributes:
        form: describes the shards.
        settled: rounds that were done at the last fence; -1 before.
        begun: whether somebody has brought parameters to begin with.
        ended: whether the run has.
        members: the clients.
        requests: that are open.
        shards, applier: the machines, and what moves the parameters.
        coordinator: of the first server; None elsewhere.
        version: of this form.
    """

    form: str
    settled: int
    begun: bool
    ended: bool
    members: MembershipState
    requests: tuple[RequestState, ...]
    shards: tuple[ShardState, ...]
    applier: ShardOptimizerState
    coordinator: CoordinatorState | None
    version: int = _VERSION

    def detached(self, clocks: Sequence[int]) -> ServerState:
        """Returns it without its clients: the processes are gone, and others come.

        What they hold is free, what they have asked or given to a round that is open is forgotten. What a worker has
        done here and not everywhere it does again, so it has not done it.

        Args:
            clocks: rounds that each worker has done; 0 for all others.
        """
        known = dict(enumerate(clocks))
        return replace(
            self,
            members=MembershipState((), (), ()),
            requests=(),
            shards=tuple(
                replace(
                    shard,
                    members=tuple((worker, count, known.get(worker, 0)) for worker, count, _ in shard.members),
                    contributed=(),
                    waiting=(),
                    told=(),
                    last=None,
                    among=-1,
                    awaited=None,
                )
                for shard in self.shards
            ),
            coordinator=self.coordinator.detached() if self.coordinator else None,
        )


def pack(state: ServerState, tensors: Mapping[str, Tensor], allocate: Callable[[int], Tensor]) -> Tensor:
    """Copies a server into bytes, and returns those.

    Args:
        state, tensors: what it is.
        allocate: returns a place for so many bytes, `(bytes,)` uint8.
    """
    rest = torch.frombuffer(bytearray(json.dumps(to_plain(state)).encode()), dtype=torch.uint8)
    # The widest elements first, so that every tensor is aligned.
    ordered = sorted([*tensors.items(), (_REST, rest)], key=lambda item: -item[1].element_size())
    entries: list[TensorEntry] = []
    for name, tensor in ordered:
        entries.append(TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape), entries[-1].end if entries else 0))
    front = encode(entries)
    place = allocate(len(front) + entries[-1].end)
    place[: len(front)].copy_(torch.frombuffer(bytearray(front), dtype=torch.uint8))
    for (_, tensor), target in zip(ordered, views(place[len(front) :], entries).values(), strict=True):
        target.copy_(tensor)
    return place


def unpack(packed: memoryview) -> tuple[ServerState, dict[str, Tensor]]:
    """Returns a server's state and its tensors, which lie in `packed`.

    Raises:
        ValueError: these bytes are no snapshot.
    """
    try:
        begin = PREFIX + length(bytes(packed[:PREFIX]), len(packed))
        entries = parse(bytes(packed[PREFIX:begin]), len(packed) - begin)
        tensors = views(torch.frombuffer(packed, dtype=torch.uint8, offset=begin), entries)
        rest = bytes(tensors.pop(_REST).numpy())
        state = from_plain(ServerState, json.loads(rest, parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise ValueError(f"no snapshot of a server: {error}") from error
    if state.version != _VERSION:
        raise ValueError(f"a snapshot of form {state.version}, and this version of headrace reads {_VERSION}")
    return state, tensors


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
