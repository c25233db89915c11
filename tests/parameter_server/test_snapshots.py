"""Servers' files, and runs that go on from them: whatever is killed when, every lease is applied once."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import sleep

import pytest
import torch

from headrace.errors import CorruptCheckpoint, PeerLost
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.leases import LeaseTable, numbers_in
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.server.snapshots import Snapshots, newest, read
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from headrace.policies.staleness import Admission, Bounded, EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from parameter_server.pairs import until
from transport.ways import DEADLINE_S, open_link, open_port

WORKERS, ROUNDS = 2, 100
FENCES = (33, 66, ROUNDS)
SERVERS = 2
LEASES = WORKERS * ROUNDS


def layout_of(server: int) -> ShardLayout:
    return ShardLayout([ShardSpec(f"count-{server}-{shard}", 0, (LEASES,)) for shard in range(2)])


def server_of(server: int, admission: Admission, until: int) -> Server:
    form = layout_of(server)
    specs = [ParameterSpec(piece.parameter, piece.shape) for piece in form.pieces]
    machines = [Shard(range(WORKERS), admission, EveryPush()) for _ in form.pieces]
    fixed = not isinstance(admission, Unbounded)
    coordinates = (
        (LeaseTable(WORKERS, until, fixed=fixed, workers=range(WORKERS)), 0, until, 1) if server == 0 else None
    )
    applier = ShardOptimizer(form, partial(torch.optim.SGD, lr=1.0), specs)
    return Server(open_port("local", form.slots, form.push_slots), form, applier, machines, coordinates, grace_s=0.2)


class Life:
    """All servers and workers from a start to their end; one that does not end by itself waits at it to be killed."""

    def __init__(self, folder: Path, admission: Admission, ends: bool = True) -> None:
        self.ends = ends
        self.ended = threading.Event()
        self.killed = threading.Event()
        self.errors: list[BaseException] = []
        self.servers = [server_of(server, admission, FENCES[0]) for server in range(SERVERS)]
        self.files = [Snapshots(folder, server, every_s=0.01) for server in range(SERVERS)]
        self.found, wrong = newest(folder, SERVERS)
        assert wrong == ()
        self.until = FENCES[0]
        if self.found is not None:
            self.until = self.found.until
            for server, name in zip(self.servers, self.found.names, strict=True):
                server.restore(read(folder, name), self.found.clocks)
        self._look_at_what_is_in_it()
        self.fence = threading.Barrier(WORKERS)
        self.threads = [threading.Thread(target=self._serve, args=(server,)) for server in range(SERVERS)]
        self.threads += [threading.Thread(target=self._work, args=(worker,)) for worker in range(WORKERS)]
        for thread in self.threads:
            thread.start()

    def _look_at_what_is_in_it(self) -> None:
        """What the set says of itself is what the parameters hold."""
        settled = max(0, self.found.done) * WORKERS if self.found else 0
        for number, server in enumerate(self.servers):
            for shard in range(2):
                said = numbers_in(self.found.applied[number][shard]) if self.found else set()
                there = server._requests._tensors[shard].nonzero().flatten().tolist()
                assert set(there) == said | set(range(settled))

    def _serve(self, number: int) -> None:
        server, files = self.servers[number], self.files[number]
        while not self.killed.is_set() and not self.ended.is_set():
            server.turn(0.01)
            files.look(server.snapshot)
        files.close()
        assert files.error is None
        server.close()

    def _work(self, worker: int) -> None:
        try:
            with ExitStack() as closing:
                self._train(worker, closing)
        except (PeerLost, ConnectionError, threading.BrokenBarrierError):
            self.fence.abort()
        except BaseException as error:
            self.errors.append(error)
            self.fence.abort()

    def _check(self) -> None:
        if self.killed.is_set():
            raise PeerLost(0, "here", "killed")

    def _train(self, worker: int, closing: ExitStack) -> None:
        forms = [layout_of(server) for server in range(SERVERS)]
        places = [[torch.zeros(piece.shape) for piece in form.pieces] for form in forms]
        links = []
        for server, form in zip(self.servers, forms, strict=True):
            links.append(open_link("local", server.address, form.slots, form.push_slots))
            closing.callback(links[-1].close)
        connections = [ServerConnection(*each) for each in zip(links, forms, places, strict=True)]
        client = Client(connections, worker, check=self._check)
        closing.callback(client.close)
        lease, late = -1, False
        while True:
            client.servers[0].tell(Message(Kind.ASK, flag=late, lease=lease))
            answer = client.lease()
            if answer.kind == Kind.SYNC_POINT:
                lease = -1
                if not self._meet(client, worker, answer.numbers[4]):
                    return
                continue
            lease = answer.lease
            client.pull()
            gradients = [[torch.zeros(LEASES) for _ in form.pieces] for form in forms]
            for gradient in (each for own in gradients for each in own):
                gradient[lease] = -1.0
            late = client.push(gradients, lease) == Reason.LATE

    def _meet(self, client: Client, worker: int, done: int) -> bool:
        """Does what is done at a fence; tells whether there is another."""
        following = [fence for fence in FENCES if fence > done]
        if not following and not self.ends:
            assert self.killed.wait(DEADLINE_S)
            self._check()
        self.fence.wait(DEADLINE_S)
        if worker == 0 and following:
            for server in range(SERVERS):
                client.ask(server, Message(Kind.SETTLE, lease=done))
            client.servers[0].tell(Message(Kind.ADVANCE, lease=done, numbers=(following[0], 0, done, following[0], 1)))
        if not following:
            self.fence.wait(DEADLINE_S)
            self.ended.set()
        return bool(following)

    def is_far(self, snapshots: int) -> bool:
        """Whether so many snapshots of each server are written, or all is over."""
        return self.ended.is_set() or bool(self.errors) or all(files.taken >= snapshots for files in self.files)

    def kill(self) -> None:
        self.killed.set()
        self.join()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        for error in self.errors:
            raise error

    def counts(self) -> list[torch.Tensor]:
        return [tensor for server in self.servers for tensor in server._requests._tensors]


@pytest.mark.slow
@pytest.mark.parametrize("admission", [Unbounded(), Bounded(1)], ids=["asynchronous", "bounded"])
def test_whatever_is_killed_when_every_lease_is_applied_once(tmp_path: Path, admission: Admission) -> None:
    chance = random.Random(str(admission))
    resumed = 0
    for _ in range(8):
        life = Life(tmp_path / "snapshots", admission, ends=False)
        enough = chance.randint(1, 4)
        until(partial(life.is_far, enough), "snapshots are taken")
        sleep(chance.uniform(0, 0.01))
        life.kill()
        resumed += life.found is not None and life.found.names != ()
        for count in life.counts():
            assert count.max() <= 1
    life = Life(tmp_path / "snapshots", admission)
    life.join()
    assert resumed
    for count in life.counts():
        assert torch.equal(count, torch.ones(LEASES))


def written(folder: Path, count: int = 1) -> Server:
    server = server_of(0, Unbounded(), 5)
    files = Snapshots(folder, 0, 0.0)
    for _ in range(count):
        files.write(server.snapshot())
    return server


def test_the_newest_few_are_kept_and_what_a_crash_left_is_not(tmp_path: Path) -> None:
    (tmp_path / "server-0-00000006.part").write_bytes(b"half")
    (tmp_path / "server-1-00000002.part").write_bytes(b"of another server, which writes it")
    (tmp_path / "notes").write_text("of a user")
    written(tmp_path, 5).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "notes",
        "server-0-00000009",
        "server-0-00000010",
        "server-0-00000011",
        "server-1-00000002.part",
    ]


def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    written(tmp_path, 3).close()
    newest_file = tmp_path / "server-0-00000002"
    content = bytearray(newest_file.read_bytes())
    chance = random.Random(0)
    for _ in range(20):
        at = chance.randrange(len(content))
        newest_file.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
        found, (wrong,) = newest(tmp_path, 1)
        assert found is not None
        assert found.names == ("server-0-00000001",)
        assert wrong.path == newest_file
    newest_file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptCheckpoint, match="are not those that were written"):
        read(tmp_path, newest_file.name)


def test_a_set_is_of_one_stretch_and_holds_what_is_done(tmp_path: Path) -> None:
    first, second = server_of(0, Unbounded(), 5), server_of(1, Unbounded(), 5)
    files = [Snapshots(tmp_path, server, 0.0) for server in range(SERVERS)]
    files[1].write(second.snapshot())
    assert newest(tmp_path, SERVERS)[0] is None, "there is none of the first"
    files[0].write(first.snapshot())
    found, _ = newest(tmp_path, SERVERS)
    assert found is not None
    # The first says that lease 0 is done, and the second has not heard of it.
    leases = first._coordinator._leases
    leases._next = [1]
    files[0].write(first.snapshot())
    older, _ = newest(tmp_path, SERVERS)
    assert older == found
    for machine in (*first._requests._machines, *second._requests._machines):
        machine._done.add(0)
    files[0].write(first.snapshot())
    files[1].write(second.snapshot())
    fresh, _ = newest(tmp_path, SERVERS)
    assert fresh is not None
    assert (fresh.names, fresh.committed) == (("server-0-00000002", "server-1-00000001"), ((0, 1),))
    assert fresh.applied == (((((0, 1),)),) * 2,) * 2
    # Behind a fence it has forgotten which are done.
    second._settled = 5
    files[1].write(second.snapshot())
    assert newest(tmp_path, SERVERS)[0] == fresh
    for server in (first, second):
        server.close()


class Full(OSError):
    """The disk is full."""


def test_a_full_disk_is_told_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = written(tmp_path, 1)
    files = Snapshots(tmp_path, 0, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.checkpoint.storage.File.sync", lambda _: _raise(Full("full")))
        files.look(server.snapshot)
        files._thread.wait()
        assert isinstance(files.error, Full)
    assert newest(tmp_path, 1)[0] is not None
    files.look(server.snapshot)
    files.close()
    assert (files.error, files.taken) == (None, 1)
    server.close()


def _raise(error: BaseException, *_: object) -> None:
    raise error


@pytest.mark.parametrize("damage", ["shape", "json", "shards", "form"])
def test_what_is_no_snapshot_is_refused(damage: str) -> None:
    server, other = server_of(0, Unbounded(), 5), server_of(1, Unbounded(), 5)
    content = bytearray(server.snapshot())
    if damage == "json":
        at = content.index(b'"settled"')
        content[at : at + 9] = b'"settlet"'
    elif damage == "shape":
        content[:8] = (1 << 40).to_bytes(8, "little")
    elif damage == "shards":
        at = content.index(b'"version": 0')
        content[at + 11 : at + 12] = b"x"
    target = other if damage == "form" else server
    with pytest.raises(ValueError, match="shard 0 is count" if damage == "form" else "no snapshot of a server"):
        target.restore(memoryview(content))
    for each in (server, other):
        each.close()
