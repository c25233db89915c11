"""Requests of workers about rows: one state machine for all tables of a server, as for a shard.

push of rows ──► machine ──► step over the rows of all tables ──► answer
pull of rows ──► answer, at once: who may proceed is decided with the parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.core import events
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.coordinator import Member
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.server.updater import StepFailed
from headrace.parameter_server.sparse.messages import Rows, decode_pull, decode_push, encode_moved, encode_rows
from headrace.parameter_server.sparse.moves import ServedMoves, to_json
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.wire import Kind, Message, encode
from headrace.spec.events import ShardStats
from headrace.training.clipping import all_finite
from headrace.training.embeddings.layer import combine
from headrace.training.embeddings.pieces import blocks_of, chunks, to_pieces
from headrace.training.optimizer import StatePiece
from headrace.transport.base import ServerTransport


@dataclass
class OpenPush:
    """A push of rows that is not answered yet; `blob` is what was sent, `rows` the gradients by table."""

    peer: int
    message: Message
    blob: memoryview
    rows: Mapping[int, Rows]


class RowRequests:
    """All open pushes of rows, and the state machine that answers them."""

    def __init__(
        self, transport: ServerTransport, tables: ServedTables, machine: Shard, counters: ServerCounters
    ) -> None:
        self.machine = machine
        self.open: dict[int, OpenPush] = {}
        self._counters = counters
        counters.rows = ShardStats(f"rows of {', '.join(spec.name for spec in tables.specs)}", 0, 0, 0, 0, 0.0, 0, 0)
        counters.tables = lambda: tuple(table.stats() for table in tables.tables)
        self._transport = transport
        self._tables = tables
        self.moves: ServedMoves | None = None
        if tables.moving is not None:
            self.moves = ServedMoves(*tables.moving, tables, machine, counters)

    def take(self, member: Member, message: Message, blob: memoryview) -> None:
        """Handles a push; raises ValueError if it is none."""
        # Version, and where rows move the map's; a third number marks the rest of a push.
        parts = (1,) if self.moves is None else (2, 3)
        if member.observes or len(message.numbers) not in parts or member.worker in self.open:
            raise ValueError(f"worker {member.worker} may not push rows now")
        self.add(member.worker, member.peer, message, blob)
        self._counters.moved_rows(pushes=1, pushed_bytes=len(blob))
        worker, incarnation = member.worker, member.incarnation
        request = self.open[worker]
        gradients = [gradient for _, gradient in request.rows.values()]
        finite = bool(message.flag) and (self._transport.trusts_clients or all_finite(gradients))
        knows = self.machine.knows(worker, incarnation)
        if len(message.numbers) == 3:
            if self.moves is not None and knows:
                self._add_rest(message, self.moves.rest(message.lease, request.rows), finite)
            self._answer(self.open.pop(worker), 0)
            return
        push = events.Push(
            worker, incarnation, message.lease, message.numbers[0], message.weight, message.share, finite
        )
        if self.moves is not None and knows:
            was_done, version = self.machine.has(message.lease), message.numbers[1]
            request.rows, owed = self.moves.count(message.lease, version, request.rows, was_done)
            self._add_rest(message, owed, finite)
        self._carry_out(self.machine.handle(push))

    def _add_rest(self, message: Message, rows: Mapping[int, Rows], finite: bool) -> None:
        """Updates rows by a push whose other rows were updated before."""
        if finite and message.weight:
            self._tables.add(rows, message.share)

    def state(self) -> dict[str, Tensor]:
        """Returns what open pushes have sent, and the state of moves."""
        pushed = {f"rows/{worker}": as_tensor(push.blob) for worker, push in self.open.items()}
        return pushed | (self.moves.state() if self.moves is not None else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the state of another server, without its open pushes, which `add` brings."""
        self.open.clear()
        if self.moves is not None:
            self.moves.load(tensors)

    def add(self, worker: int, peer: int, message: Message, blob: memoryview) -> None:
        """Keeps a push that the machine knows, or is about to."""
        rows = decode_push(self._tables.specs, blob)
        self.open[worker] = OpenPush(peer, message, blob, rows)

    def answer(self, member: Member, message: Message, blob: memoryview) -> bytes:
        """Handles a message about rows other than a push, and returns the answer's blob; ValueError if it is wrong."""
        if message.kind == Kind.PULL_ROWS:
            return self._pull(blob, message.lease)
        if message.kind == Kind.MOVE_ROWS:
            if self.moves is None or member.observes:
                raise ValueError("rows do not move on this server")
            return self.moves.answer(member.worker, message, blob)
        if message.kind == Kind.ROWS:
            return self._block(message.first, message.lease)
        if message.number != member.done:
            self._load(message.first, bytes(blob), bool(message.flag))
            member.done = message.number
        return b""

    def _pull(self, blob: memoryview, version: int) -> bytes:
        number, ids = decode_pull(self._tables.specs, blob)
        if self.moves is not None:
            if not self.moves.has(number, ids):
                return encode_moved(to_json(self.moves.map.changed_since(version)))
            self.moves.traffic.count(number, ids)
        answer = encode_rows(self.machine.version, self._tables.tables[number].read(ids))
        self._counters.moved_rows(pulls=1, pushed_bytes=len(blob), pulled_bytes=len(answer))
        return answer

    def _block(self, number: int, start: int) -> bytes:
        """Returns some of the rows that are here, from the `start`-th on, as pieces; none if there are no more."""
        if not (0 <= number < len(self._tables.tables) and start >= 0):
            raise ValueError(f"there is no table {number}, only {len(self._tables.tables)}")
        table = self._tables.tables[number]
        # Of equal length, so that the first one says how long all are.
        every = chunks(len(table), table.row_bytes)
        stop = next((stop for first, stop in every if first == start), start)
        return pack({piece.name: piece.value for piece in to_pieces(table.spec.name, start, table.block(start, stop))})

    def _load(self, number: int, blob: bytes, clears: bool) -> None:
        """Loads rows, or drops all of all tables; raises ValueError if this is no block of rows."""
        if clears:
            self._tables.clear()
        else:
            try:
                table = self._tables.tables[number]
                pieces = [StatePiece.parse(name, value) for name, value in unpack(blob).items()]
                for block in blocks_of(pieces, table.spec.name):
                    table.load(block)
            except Exception as error:
                raise ValueError(f"no rows of a table: {error}") from error
        self.broadcast(events.Renew())

    def broadcast(self, event: events.Event) -> None:
        """Lets the machine handle an event."""
        self._carry_out(self.machine.handle(event))
        if self.moves is not None:
            if isinstance(event, events.Settle):
                self.moves.machine.settle()
            elif isinstance(event, events.Join | events.Leave):
                self.moves.lost(event.worker)

    def drop(self, worker: int) -> None:
        """Drops a worker's open push."""
        self.open.pop(worker, None)

    def _carry_out(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            if isinstance(action, events.ApplyStep):
                began = perf_counter()
                requests = [self.open[worker] for worker in action.workers]
                steps = max(request.message.steps for request in requests)
                try:
                    rows = requests[0].rows if len(requests) == 1 else _mean(requests)
                    self._tables.apply(rows, action.share, action.staleness, steps)
                except Exception as error:
                    raise StepFailed(error) from error
                worker = action.workers[0] if len(action.workers) == 1 else -1
                self._counters.stepped_rows(worker, action.staleness, perf_counter() - began)
            elif isinstance(action, events.Ack | events.Refuse):
                request = self.open.pop(action.worker, None)
                if isinstance(action, events.Refuse) and action.lease >= 0:
                    self._counters.refused(action.reason.name.lower())
                if request is not None:
                    reason = action.reason.value if isinstance(action, events.Refuse) else 0
                    self._answer(request, reason)

    def _answer(self, request: OpenPush, reason: int) -> None:
        asked = request.message
        later = self.moves is not None and self.moves.map.version > asked.numbers[1]
        kind = Kind.MOVED if later else Kind.ANSWER
        message = Message(kind, 0, reason, asked.lease, number=asked.number)
        self._transport.send(request.peer, encode(message))


def _mean(requests: Sequence[OpenPush]) -> dict[int, Rows]:
    """Returns the mean of a round by table, summed in the order of the workers."""
    weight = sum(request.message.weight for request in requests)
    mean: dict[int, Rows] = {}
    for number in sorted({number for request in requests for number in request.rows}):
        those = [request for request in requests if number in request.rows]
        gradients = [request.rows[number][1] * (request.message.weight / weight) for request in those]
        mean[number] = combine([request.rows[number][0] for request in those], gradients)
    return mean


def as_tensor(blob: memoryview) -> Tensor:
    """Returns bytes as `(bytes,)` uint8."""
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
