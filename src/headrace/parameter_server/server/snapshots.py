"""Servers' snapshots as files, taken now and then while workers go on; and a set of them that a run can go on from.

    snapshots/server-0-00000007      the first server's: its shards, and who has done which lease
    snapshots/server-1-00000009      the second one's, of another moment
    snapshots/server-1-00000010.part being written

Each server takes its own, without asking the others. A lease that is in some shards and not in others does no harm: it
is given out again, and refused where it is. What must not be is a lease that the first server counts as done and that
some shard has not; so a set is consistent if every shard's snapshot holds all leases that the first server's says are
done, and all are of the same stretch between two fences. That is read from the files themselves.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch
from torch import Tensor

from headrace.checkpoint.header import NAMES, PREFIX, TensorEntry, encode, length, parse
from headrace.checkpoint.storage import LocalStorage, Storage
from headrace.checkpoint.tensors import views
from headrace.errors import CorruptCheckpoint
from headrace.parameter_server.core.leases import numbers_in, spans_of
from headrace.parameter_server.core.shard import ShardState
from headrace.parameter_server.server.coordinator import CoordinatorState, MembershipState
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


_NAME = re.compile(r"server-([0-9]{1,5})-([0-9]{8,18})(\.part)?")
_DIGEST = 32
_CHUNK = 4 << 20
_MOST_ENTRIES = 100_000


class Snapshots:
    """One server's files. What the disk does not do is told, and hurts nobody: the older ones are still there.

    Args:
        folder: of all servers of the run.
        server: which, from 0 in the order of their ranks.
        every_s: seconds from one to the next.
        keep: how many.
        storage: what writes them; the operating system, if not given.

    Attributes:
        folder: see there.
        taken: how many have been written.
        bytes: of the last one.
        pause_s: how long the server stood still for it.
        error: why the last one could not be written; None if it could.
    """

    def __init__(
        self, folder: Path, server: int, every_s: float, keep: int = 3, storage: Storage | None = None
    ) -> None:
        self.folder = folder
        self.taken = 0
        self.bytes = 0
        self.pause_s = 0.0
        self.error: OSError | None = None
        self._storage = storage or LocalStorage(folder)
        self._server = server
        self._every_s = every_s
        self._keep = keep
        self._last = monotonic()
        self._thread: threading.Thread | None = None

    def look(self, snapshot: Callable[[], memoryview]) -> None:
        """Takes a snapshot if it is time for one, and the one before is written."""
        if self._thread is not None and self._thread.is_alive():
            return
        began = monotonic()
        if began - self._last < self._every_s:
            return
        self._last, content = began, snapshot()
        self.bytes, self.pause_s = len(content), monotonic() - began
        self._thread = threading.Thread(target=self._write, args=(content,), name="headrace-snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until what is being written is."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, content: memoryview) -> None:
        try:
            self.write(content)
        except OSError as error:
            self.error = error
        else:
            self.error = None
            self.taken += 1

    def write(self, content: memoryview) -> None:
        """Writes a snapshot aside, renames it when it is on the disk, and deletes what is older than those to keep.

        Raises:
            OSError: the disk does not do it.
        """
        self._storage.prepare()
        found = [(int(match[2]), name) for match, name in _files(self._storage) if int(match[1]) == self._server]
        number = max((number for number, _ in found), default=-1) + 1
        name = f"server-{self._server}-{number:08}"
        digest = hashlib.blake2b(digest_size=_DIGEST)
        with self._storage.create(f"{name}.part") as file:
            for start in range(0, len(content), _CHUNK):
                piece = content[start : start + _CHUNK]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]
            last = memoryview(digest.digest())
            while last:
                last = last[file.write(last) :]
            file.sync()
        self._storage.rename(f"{name}.part", name)
        self._storage.sync("")
        whole = sorted((other for other in found if not other[1].endswith(".part")), reverse=True)
        doomed = [old for _, old in whole[self._keep - 1 :]] + [old for _, old in found if old.endswith(".part")]
        for old in doomed:
            self._storage.delete_file(old)


@dataclass(frozen=True)
class SnapshotSet:
    """A snapshot of each server; together what a run can go on from.

    Attributes:
        names: of the files, by server.
        done: rounds that were done at the last fence, or where the run began.
        until: rounds in front of the next fence.
        clocks: rounds since the last fence that each worker has done, where each has portions of its own.
        committed: leases since the last fence that are done everywhere, from each to before another.
        applied: by server and shard, the leases since then that are in its parameters.
    """

    names: tuple[str, ...]
    done: int
    until: int
    clocks: tuple[int, ...]
    committed: tuple[tuple[int, int], ...]
    applied: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


def forget(folder: Path, but: Container[str] = (), storage: Storage | None = None) -> None:
    """Deletes the snapshots of a history that is left.

    Args:
        folder: as of `Snapshots`.
        but: names of those that the run goes on from.
        storage: what deletes them; the operating system, if not given.
    """
    storage = storage or LocalStorage(folder)
    for name in [name for _, name in _files(storage) if name not in but]:
        storage.delete_file(name)


def newest(
    folder: Path, servers: int, storage: Storage | None = None
) -> tuple[SnapshotSet | None, tuple[CorruptCheckpoint, ...]]:
    """Returns the newest set that is sound and consistent, and what is wrong with files that were looked at for it.

    Args:
        folder: as of `Snapshots`.
        servers: how many there are.
        storage: what reads them; the operating system, if not given.
    """
    storage = storage or LocalStorage(folder)
    wrong: list[CorruptCheckpoint] = []
    every: list[list[tuple[str, ServerState]]] = []
    for server in range(servers):
        found = sorted(
            ((int(match[2]), name) for match, name in _files(storage) if int(match[1]) == server), reverse=True
        )
        states = []
        for name in [name for _, name in found if not name.endswith(".part")]:
            try:
                states.append((name, unpack(read(folder, name, storage))[0]))
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


def read(folder: Path, name: str, storage: Storage | None = None) -> memoryview:
    """Returns a snapshot, for `Server.restore`.

    Raises:
        CorruptCheckpoint: it is not what was written.
    """
    try:
        with (storage or LocalStorage(folder)).open(name) as file:
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
    if coordinator is None:
        return None
    committed = coordinator.leases.committed()
    chosen = []
    for candidates in ([book], *others):
        fitting = [each for each in candidates if _fits(each[1], book[1].settled, committed)]
        if not fitting:
            return None
        chosen.append(fitting[0])
    return SnapshotSet(
        names=tuple(name for name, _ in chosen),
        done=coordinator.stretch[0],
        until=coordinator.leases.until,
        clocks=coordinator.leases.clocks(),
        committed=spans_of(committed),
        applied=tuple(tuple(shard.done for shard in state.shards) for _, state in chosen),
    )


def _fits(state: ServerState, settled: int, committed: set[int]) -> bool:
    return state.settled == settled and all(committed <= numbers_in(shard.done) for shard in state.shards)


def _files(storage: Storage) -> Iterator[tuple[re.Match[str], str]]:
    """Yields the files of all servers, whole or not."""
    try:
        for count, name in enumerate(storage.entries("")):
            if count == _MOST_ENTRIES:
                raise OSError(errno.E2BIG, f"the folder of snapshots holds more than {_MOST_ENTRIES:,} entries")
            match = _NAME.fullmatch(name)
            if match:
                yield match, name
    except FileNotFoundError:
        return
