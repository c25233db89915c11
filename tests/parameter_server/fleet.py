"""One server, its backup and spares as processes, and a launcher that says who is what: for tests that kill them."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from headrace.engine.local.fork_server import ForkServer
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.replication.machine import Authority, Down, Ready, Up
from headrace.transport.base import ClientTransport
from parameter_server.fleet_form import fleet_form
from transport.ways import DEADLINE_S, open_link

TESTS = Path(__file__).resolve().parent.parent
SCRIPT = TESTS / "parameter_server" / "fleet_script.py"


class Fleet:
    """Args:
    fork_server: that processes come from.
    way: of their bytes.
    leases: that there are.
    folder: for logs.
    """

    def __init__(self, fork_server: ForkServer, way: str, leases: int, folder: Path) -> None:
        self.way, self.leases = way, leases
        self.authority = Authority()
        self.addresses: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self.promoted_at = 0.0
        self._nursery, self._folder = fork_server, folder
        self._name = f"headrace-test-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(64)
        self._lines: dict[socket.socket, int] = {}
        self._spawned = 0
        self._held, self._lifeline = os.pipe()
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._launch)
        self._thread.start()

    def spawn(self) -> None:
        """Starts another process."""
        number, self._spawned = self._spawned, self._spawned + 1
        order = {
            "script": str(SCRIPT),
            "arguments": [self._name, str(number), self.way, str(self.leases)],
            "environment": {},
            "threads": 1,
            "directory": str(self._folder),
            "path": [str(TESTS), *sys.path],
            "log": str(self._folder / f"server-{number}.log"),
        }
        self._nursery.spawn(number, order, [self._held])

    def ready(self) -> bool:
        """Whether the backup can be promoted."""
        if self.error is not None:
            raise self.error
        return self.authority.ready

    def kill(self, number: int, how: int = signal.SIGKILL) -> float:
        """Ends a process; returns when."""
        at = monotonic()
        os.kill(self.pids[number], how)
        return at

    def link(self) -> ClientTransport:
        """Opens a link to the primary."""
        view, layout = self.authority.view, fleet_form(self.leases)
        if view is None or view.primary not in self.addresses:
            raise ConnectionRefusedError("there is no primary yet")
        address = self.addresses[view.primary]
        return open_link(self.way, address, layout.slots, layout.push_slots, layout.reply_slots)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        # First: a process that sees its line closed ends by itself.
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for line in (*self._lines, self._listener):
            line.close()
        os.close(self._held)
        os.close(self._lifeline)

    def _launch(self) -> None:
        try:
            while not self._stop.is_set():
                heard, _, _ = select.select([self._listener, *self._lines], [], [], 0.02)
                for line in heard:
                    if line is self._listener:
                        self._lines[line.accept()[0]] = -1
                    else:
                        self._hear(line)
        except BaseException as error:
            self.error = error

    def _hear(self, line: socket.socket) -> None:
        try:
            message = line.recv(65536)
        except ConnectionResetError:
            message = b""
        if not message:
            number = self._lines.pop(line)
            line.close()
            # It has ended: only the process has this line.
            del self.pids[number]
            self._tell(Down(number))
            return
        said = json.loads(message)
        if "up" in said:
            self._lines[line] = said["up"]
            self.pids[said["up"]], self.addresses[said["up"]] = said["pid"], said["address"]
            self._tell(Up(said["up"]))
        else:
            self._tell(Ready(said["ready"]))

    def _tell(self, news: Any) -> None:
        view = self.authority.handle(news)
        if view is None:
            return
        self.promoted_at = monotonic()
        told = {"view": [view.epoch, view.primary, view.backup], "address": self.addresses[view.primary]}
        for line, number in self._lines.items():
            if number in (view.primary, view.backup):
                line.send(json.dumps(told).encode())


class Pusher:
    """A worker, in a thread, that pushes lease after lease.

    Args:
        fleet: whose.

    Attributes:
        acknowledged: when, by lease.
    """

    def __init__(self, fleet: Fleet, worker: int = 0, step: int = 1) -> None:
        self.acknowledged: dict[int, float] = {}
        self.error: BaseException | None = None
        self._fleet, self._worker, self._step = fleet, worker, step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def after(self, moment: float) -> float | None:
        """Returns when the first push was acknowledged after a moment."""
        if self.error is not None:
            raise self.error
        return next((at for at in list(self.acknowledged.values()) if at > moment), None)

    def finish(self) -> list[torch.Tensor]:
        """Ends it; returns what the servers hold."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self._places

    def _run(self) -> None:
        try:
            self._push()
        except BaseException as error:
            self.error = error

    def _push(self) -> None:
        layout = fleet_form(self._fleet.leases)
        self._places = [torch.zeros(piece.shape) for piece in layout.pieces]
        link = self._fleet.link()
        connection = ServerConnection(link, layout, self._places, reopen=self._fleet.link, patience_s=DEADLINE_S)
        client = Client([connection], self._worker)
        gradients = [torch.zeros(piece.shape) for piece in layout.pieces]
        client.pull()
        for lease in range(self._worker, self._fleet.leases, self._step):
            if self._stop.is_set():
                break
            for gradient in gradients:
                gradient[lease] = -1.0
            client.push([gradients], lease)
            self.acknowledged[lease] = monotonic()
            for gradient in gradients:
                gradient[lease] = 0.0
        client.pull()
        client.close()
