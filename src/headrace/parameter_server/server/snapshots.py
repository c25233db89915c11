"""Snapshots of servers: the whole state as bytes, as files, and sets of files that fit together.

The bytes are safetensors, one of which is JSON for what is no tensor:

parameter/3                      a shard's parameters
state/3/weight/exp_avg@0         its optimizer's state
sent/1/3, residual/pull/1/3      what worker 1 was sent, and the encoding error that is corrected next time
gradient/1/3                     worker 1's gradient in a round that is open
random                           the state of torch's generator
server                           the rest, as JSON
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch
from torch import Tensor

from headrace.checkpoint import forms
from headrace.checkpoint.header import NAMES, PREFIX, TensorEntry, encode, length, parse
from headrace.checkpoint.storage import Storage
from headrace.checkpoint.tensors import views
from headrace.errors import CorruptCheckpoint
from headrace.machine.background import BackgroundThread
from headrace.parameter_server.core.leases import intervals_of, numbers_in
from headrace.parameter_server.core.shard import ShardState
from headrace.parameter_server.server.coordinator import CoordinatorState, MembershipState
from headrace.parameter_server.server.requests import RequestState
from headrace.parameter_server.server.updater import ShardOptimizerState
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import Plan

_VERSION = 1
_REST = "server"
_NAMES = {getattr(torch, word): name for name, word in NAMES.items()}


@dataclass(frozen=True)
class ServerState:
    """The state of a server without tensors.

    `form` describes the shards, `applier` is the optimizer's state, `settled` the rounds done at the last sync point
    (-1 before), `begun` whether parameters were loaded. Only the first server has a coordinator.
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
        """Returns the state without clients, whose processes have ended.

        Leases that they hold are free, and open requests are dropped. A round that a worker has done here but not on
        all servers is done again. `clocks` are the rounds that each worker has done; 0 for all others.
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
    """Copies a server's state into bytes at the place that `allocate` returns, `(bytes,)` uint8."""
    rest = torch.frombuffer(bytearray(json.dumps(to_plain(state)).encode()), dtype=torch.uint8)
    # The widest elements first, so that every tensor is aligned.
    ordered = sorted([*forms.encode(tensors).items(), (_REST, rest)], key=lambda item: -item[1].element_size())
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
    """Returns a server's state, and its tensors as views of `packed`; raises ValueError if this is no snapshot."""
    try:
        begin = PREFIX + length(bytes(packed[:PREFIX]), len(packed))
        entries = parse(bytes(packed[PREFIX:begin]), len(packed) - begin)
        tensors = views(torch.frombuffer(packed, dtype=torch.uint8, offset=begin), entries)
        rest = bytes(tensors.pop(_REST).numpy())
        tensors = forms.decode(tensors)
        state = from_plain(ServerState, json.loads(rest, parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise ValueError(f"no snapshot of a server: {error}") from error
    if state.version != _VERSION:
        raise ValueError(f"a snapshot of form {state.version}, and this version of headrace reads {_VERSION}")
    return state, tensors


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


_NAME = re.compile(r"server-([0-9]{1,5})-([0-9]{8,18})(\.part)?")
_DIGEST = 32
_CHUNK = 4 << 20
_MOST_ENTRIES = 100_000
_KEPT = 3
_PART = ".part"


class Snapshots:
    """Writes one server's snapshots; if the disk fails, `error` says why, and the older snapshots stay.

    `bytes` are those of the last one, for which the server paused for `pause_s`.
    """

    def __init__(self, folder: Path, server: int, every_s: float) -> None:
        self.folder = folder
        self.taken = 0
        self.bytes = 0
        self.pause_s = 0.0
        self.error: OSError | None = None
        self._storage = Storage(folder)
        self._server = server
        self._every_s = every_s
        self._last = monotonic()
        self._thread = BackgroundThread("snapshot")

    def look(self, snapshot: Callable[[], memoryview]) -> None:
        """Takes a snapshot if it is due and the one before is written."""
        if self._thread.busy:
            return
        began = monotonic()
        if began - self._last < self._every_s:
            return
        self._last, content = began, snapshot()
        self.bytes, self.pause_s = len(content), monotonic() - began
        self._thread.start(functools.partial(self._write, content))

    def close(self) -> None:
        """Waits until the snapshot that is being written is complete."""
        self._thread.wait()
        self._thread.close()

    def _write(self, content: memoryview) -> None:
        try:
            self.write(content)
        except OSError as error:
            self.error = error
        else:
            self.error = None
            self.taken += 1

    def write(self, content: memoryview) -> None:
        """Writes a snapshot to a temporary file, renames it, and deletes old ones; raises OSError if the disk fails."""
        self._storage.prepare()
        files = _files(self._storage, self._server)
        number = files[0][0] + 1 if files else 0
        name = f"server-{self._server}-{number:08}"
        digest = hashlib.blake2b(digest_size=_DIGEST)
        with self._storage.create(f"{name}.part") as file:
            for start in range(0, len(content), _CHUNK):
                piece = content[start : start + _CHUNK]
                digest.update(piece)
                file.write_all(piece)
            file.write_all(memoryview(digest.digest()))
            file.sync()
        self._storage.rename(f"{name}.part", name)
        self._storage.sync("")
        whole = [old for _, old in files if not old.endswith(_PART)]
        for old in [*whole[_KEPT - 1 :], *(old for _, old in files if old.endswith(_PART))]:
            self._storage.delete_file(old)


@dataclass(frozen=True)
class SnapshotSet:
    """One snapshot of each server, from which a run can resume.

    Attributes:
        done: rounds done at the last sync point, or at the run's start.
        clocks: rounds since the last sync point that each worker has done, if leases are fixed.
        committed: leases since the last sync point that all servers have, as intervals.
        applied: by server and shard, the leases since then that are in its parameters.
    """

    names: tuple[str, ...]
    done: int
    until: int
    clocks: tuple[int, ...]
    committed: tuple[tuple[int, int], ...]
    applied: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


def forget(folder: Path, but: Container[str] = ()) -> None:
    """Deletes the snapshots of a history that is left."""
    storage = Storage(folder)
    for _, name in _files(storage):
        if name not in but:
            storage.delete_file(name)


def newest_of(plan: Plan, folder: Path) -> tuple[SnapshotSet | None, tuple[CorruptCheckpoint, ...]]:
    """Returns `newest` for the servers of a plan."""
    return newest(folder, len(plan.servers))


def newest(folder: Path, servers: int) -> tuple[SnapshotSet | None, tuple[CorruptCheckpoint, ...]]:
    """Returns the newest set that is sound and consistent, and what is wrong with files that were looked at for it."""
    storage = Storage(folder)
    wrong: list[CorruptCheckpoint] = []
    every: list[list[tuple[str, ServerState]]] = []
    for server in range(servers):
        states = []
        for name in [name for _, name in _files(storage, server) if not name.endswith(_PART)]:
            try:
                states.append((name, unpack(read(folder, name))[0]))
            except CorruptCheckpoint as error:
                wrong.append(error)
            except ValueError as error:
                wrong.append(CorruptCheckpoint(folder / name, str(error)))
        every.append(states)
    for book in every[0]:
        chosen = _around(book, every[1:])
        if chosen is not None:
            return chosen, tuple(wrong)
    return None, tuple(wrong)


def read(folder: Path, name: str) -> memoryview:
    """Returns a snapshot, for `Server.restore`; raises CorruptCheckpoint if it is not what was written."""
    try:
        with Storage(folder).open(name) as file:
            size = file.size()
            content = torch.empty(max(size, _DIGEST), dtype=torch.uint8).numpy().data
            filled = 0
            while filled < size and (count := file.read(content[filled : filled + _CHUNK])):
                filled += count
    except (OSError, RuntimeError) as error:
        raise CorruptCheckpoint(folder / name, f"it cannot be read: {error}") from error
    whole, digest = content[: size - _DIGEST], bytes(content[size - _DIGEST : size])
    if filled != size or size < _DIGEST or hashlib.blake2b(whole, digest_size=_DIGEST).digest() != digest:
        raise CorruptCheckpoint(folder / name, f"its {size:,} bytes are not those that were written")
    return whole


def _around(book: tuple[str, ServerState], others: list[list[tuple[str, ServerState]]]) -> SnapshotSet | None:
    """Returns the newest set with this snapshot of the first server, if there is one."""
    coordinator = book[1].coordinator
    if coordinator is None or coordinator.leases is None:
        return None
    committed = coordinator.leases.committed()
    chosen = []
    for candidates in ([book], *others):
        settled = [other for other in candidates if other[1].settled == book[1].settled]
        fitting = [other for other in settled if all(committed <= numbers_in(shard.done) for shard in other[1].shards)]
        if not fitting:
            return None
        chosen.append(fitting[0])
    return SnapshotSet(
        names=tuple(name for name, _ in chosen),
        done=coordinator.stretch[0],
        until=coordinator.leases.until,
        clocks=coordinator.leases.clocks(),
        committed=intervals_of(committed),
        applied=tuple(tuple(shard.done for shard in state.shards) for _, state in chosen),
    )


def _files(storage: Storage, server: int | None = None) -> list[tuple[int, str]]:
    """Returns numbers and names of the files of one server, or of all, whole or not; the newest first."""
    files = []
    with suppress(FileNotFoundError):
        for count, name in enumerate(storage.entries("")):
            if count == _MOST_ENTRIES:
                raise OSError(errno.E2BIG, f"the folder of snapshots holds more than {_MOST_ENTRIES:,} entries")
            match = _NAME.fullmatch(name)
            if match and server in (None, int(match[1])):
                files.append((int(match[2]), name))
    return sorted(files, reverse=True)
