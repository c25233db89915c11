"""What carries bytes between the ranks of a simulated communicator: sockets in a folder that all hosts see.

A message is a header, and its tensors in memory that both processes map, so that no send waits. The folder is in the
file system, and so the same for processes in different network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST = 1 << 16  # of a header


class Closed(RuntimeError):
    """The communicator was aborted, or has failed."""


class TimedOut(RuntimeError):
    """A call was not done in its time."""


def folder() -> Path:
    found = Path(os.environ.get("SIMULATED_WIRES", "") or Path(tempfile.gettempdir()) / f"fakenccl-{os.getuid()}")
    found.mkdir(exist_ok=True, parents=True)
    return found


class Mesh:
    """A socket to each other rank; `stop()` from any thread ends what waits."""

    def __init__(self, unique: str, rank: int, world: int, timeout_s: float) -> None:
        self._rank, self._world, self._timeout_s = rank, world, timeout_s
        self._path = folder() / f"{unique[:16]}.{rank}"
        self._paths = [folder() / f"{unique[:16]}.{peer}" for peer in range(world)]
        self._sockets: dict[int, socket.socket] = {}
        self._data: dict[int, deque[tuple[dict[str, Any], list[Tensor]]]] = {}
        self._taken: dict[int, int] = {}
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = False

    def meet(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Connects with all; returns what each tells of itself, by rank."""
        deadline = time.monotonic() + self._timeout_s
        told = {self._rank: own}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._path))
            try:
                listener.listen(self._world)
                for peer in range(self._rank):
                    self._sockets[peer] = self._reach(peer, deadline)
                    self._sockets[peer].send(json.dumps({"rank": self._rank, **own}).encode())
                for _ in range(self._world - 1 - self._rank):
                    self._wait(listener, deadline)
                    accepted, _ = listener.accept()
                    self._wait(accepted, deadline)
                    other = json.loads(accepted.recv(MOST))
                    self._sockets[other["rank"]] = accepted
                    told[other["rank"]] = other
                    accepted.send(json.dumps(own).encode())
                for peer in range(self._rank):
                    self._wait(self._sockets[peer], deadline)
                    told[peer] = json.loads(self._sockets[peer].recv(MOST))
            except BaseException:
                self.close()
                raise
            finally:
                self._path.unlink(missing_ok=True)
        self._data = {peer: deque() for peer in self._sockets}
        self._taken = dict.fromkeys(self._sockets, 0)
        return [told[rank] for rank in range(self._world)]

    def _reach(self, peer: int, deadline: float) -> socket.socket:
        while True:
            reached = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                reached.connect(str(self._paths[peer]))
                return reached
            except (FileNotFoundError, ConnectionRefusedError):
                reached.close()
            # It has not begun to listen.
            if select.select([self._stopped], [], [], 0.005)[0]:
                raise Closed("the communicator was aborted")
            if time.monotonic() > deadline:
                raise TimedOut(f"rank {peer} did not come within {self._timeout_s:g} s")

    def _wait(self, sock: socket.socket, deadline: float) -> None:
        ready, _, _ = select.select([sock, self._stopped], [], [], max(0.0, deadline - time.monotonic()))
        if self._stopped in ready:
            raise Closed("the communicator was aborted")
        if not ready:
            raise TimedOut

    def send(self, peer: int, header: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        memory = os.memfd_create("fakenccl", os.MFD_CLOEXEC)
        try:
            shapes = []
            with open(memory, "wb", closefd=False) as file:
                for tensor in tensors:
                    shapes.append((list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
                    if tensor.numel():
                        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            self._say(peer, {**header, "shapes": shapes}, [memory])
        finally:
            os.close(memory)

    def say_taken(self, peer: int) -> None:
        self._say(peer, {"taken": True})

    def tell_all(self, said: str) -> None:
        """Lets the other ranks know what is wrong."""
        for peer in self._sockets:
            self._say(peer, {"fault": said})

    def _say(self, peer: int, header: dict[str, Any], memory: Sequence[int] = ()) -> None:
        # A peer that has gone is noticed by who waits for it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sockets[peer], [json.dumps(header).encode()], memory)

    def receive(self, peer: int, deadline: float) -> tuple[dict[str, Any], list[Tensor]]:
        """Returns the next call of a rank, and its tensors."""
        while not self._data[peer]:
            self._read(peer, deadline)
        return self._data[peer].popleft()

    def wait_taken(self, peer: int, deadline: float) -> None:
        """Waits until a rank has received what was sent to it."""
        while not self._taken[peer]:
            self._read(peer, deadline)
        self._taken[peer] -= 1

    def _read(self, peer: int, deadline: float) -> None:
        # Of all ranks, because one of them may say what is wrong.
        waited = [self._stopped, *self._sockets.values()]
        ready, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
        if self._stopped in ready:
            raise Closed("the communicator was aborted")
        if not ready:
            raise TimedOut
        for other, sock in list(self._sockets.items()):
            if sock in ready:
                try:
                    text, descriptors, _, _ = socket.recv_fds(sock, MOST, 1)
                except ConnectionResetError:
                    # It was killed with what it had not read.
                    text, descriptors = b"", []
                if not text:
                    # As with NCCL, who waits for a process that has ended waits until it is told, or its time is over.
                    del self._sockets[other]
                    sock.close()
                    continue
                self._sort(other, json.loads(text), descriptors)

    def _sort(self, peer: int, header: dict[str, Any], descriptors: list[int]) -> None:
        if "fault" in header:
            raise Closed(header["fault"])
        if "taken" in header:
            self._taken[peer] += 1
            return
        (memory,) = descriptors
        with open(memory, "rb") as file:
            # Written by the sender's position, which is shared.
            file.seek(0)
            tensors = [_tensor(file.read, shape, getattr(torch, dtype)) for shape, dtype in header.pop("shapes")]
        self._data[peer].append((header, tensors))

    def stop(self) -> None:
        """Ends what waits, from any thread."""
        if not self._closed:
            os.eventfd_write(self._stopped, 1)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for sock in self._sockets.values():
            sock.close()
        os.close(self._stopped)


def _tensor(read: Any, shape: list[int], dtype: torch.dtype) -> Tensor:
    found = torch.empty(shape, dtype=dtype)
    if found.numel():
        found.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(read(found.nbytes)), dtype=torch.uint8))
    return found
