"""Processes that read for one worker: forks of it, which send batches back through shared memory.

worker ── epoch, places ──────────────────────────────────────────────► reading process
       ◄── structure as JSON, and the descriptor of the tensors' memory ──

A fork has the pipeline, its data and the user's functions already. It computes on one thread and without gradients: a
fork that uses the thread pool of its parent waits forever. It ends when its worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from headrace.data.encoding import ENCODED, Unencodable, ValueEncoder, decoder
from headrace.data.loading.reader import ReadResult
from headrace.data.pipeline.order import derived
from headrace.errors import DataError, HeadraceError, RunFailed, UnfitMachine, UsageError
from headrace.shared_memory.descriptors import CutMessage, receive_descriptors
from headrace.shared_memory.segment import SharedSegment
from headrace.trees import map_tensors

_REQUEST = struct.Struct("<qq")
_REPLY = struct.Struct("<qq")
_COUNTS = ("skipped", "seconds", "waiting", "notices")
_SET_PARENT_DEATH_SIGNAL = 1
_LOOKS = 8
"""How often a process that does not answer is looked at until it is given up."""
_FORKS = itertools.count(1)
_FORKING = threading.Lock()
"""One fork at a time: another thread's fork would hold this reader's end of the channel open, and no loss of the reader
would be seen. filelock 3.30 to 4.2, which torch and transformers import, also refuses two forks at once."""
_ERRORS: dict[str, type[HeadraceError]] = {error.__name__: error for error in (DataError, UnfitMachine, UsageError)}


class ReaderStalled(Exception):
    """A reading process neither answers nor computes."""


class ReaderProcesses:
    """Reading processes, for any number of threads that read by them; each must make progress within `patience_s`.

    `seed` is that of these processes together; no others have it.
    """

    def __init__(self, read: Callable[[int, Tensor], ReadResult], count: int, patience_s: float, seed: int = 0) -> None:
        self._seed = seed
        self._patience_s = patience_s
        self._processes: dict[int, socket.socket] = {}
        self._idle: SimpleQueue[int] = SimpleQueue()
        self._running = True
        try:
            for _ in range(count):
                pid, channel = self._fork(read)
                self._processes[pid] = channel
                self._idle.put(pid)
        except BaseException:
            self.close()
            raise

    def read(self, epoch: int, places: Tensor) -> ReadResult:
        """Reads a batch by a process; raises the errors of `read` with the process's traceback as their cause.

        RunFailed if the process was lost, ReaderStalled if it stalls, UsageError if the batch cannot be sent.
        """
        pid = self._idle.get()
        try:
            channel = self._processes[pid]
            channel.sendall(_REQUEST.pack(epoch, len(places)) + places.numpy().tobytes())
            self._await(pid, channel)
            return _answer(channel)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RunFailed(
                f"a process that reads the data (pid {pid}) was lost; if the machine ran out of memory, use fewer: "
                "map(..., parallel='threads'), or prefetch(memory_limit=...)"
            ) from error
        finally:
            self._idle.put(pid)

    def end(self) -> None:
        """Kills the processes; a thread that waits for one gets RunFailed."""
        if not self._running:
            return
        self._running = False
        # Where a script ignores SIGCHLD, the system has no exit code of a child, and none of one that has ended.
        for pid in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def close(self) -> None:
        """Kills the processes and closes their channels; no thread may wait for an answer."""
        self.end()
        for channel in self._processes.values():
            channel.close()
        self._processes.clear()

    def _await(self, pid: int, channel: socket.socket) -> None:
        """Waits for an answer as long as the process computes."""
        before, since = [""], monotonic()
        # Not select, which is limited to 1,024 descriptors.
        answer = select.poll()
        answer.register(channel, select.POLLIN)
        while not answer.poll(1000 * self._patience_s / _LOOKS):
            # The CPU time of the process, in user and in system mode.
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            if ticks != before:
                before, since = ticks, monotonic()
            elif monotonic() - since >= self._patience_s * (1 - 1 / _LOOKS):
                raise ReaderStalled(
                    f"a process that reads the data (pid {pid}) has neither answered nor computed for "
                    f"{self._patience_s:g} s; it may wait for threads that a library had before the fork, tokenizers "
                    "where TOKENIZERS_PARALLELISM is true: let it have none, or say map(..., parallel='threads')"
                )

    def _fork(self, read: Callable[[int, Tensor], ReadResult]) -> tuple[int, socket.socket]:
        worker = os.getpid()
        # Else both processes would write what is still buffered.
        sys.stdout.flush()
        sys.stderr.flush()
        number = next(_FORKS)
        with _FORKING:
            ours, theirs = socket.socketpair()
            try:
                pid = os.fork()
            except BaseException:
                ours.close()
                theirs.close()
                raise
            if pid != 0:
                theirs.close()
                return pid, ours
        seed_reader(self._seed, number)
        _become_reader(worker, theirs, [ours, *self._processes.values()], read)


def _become_reader(
    worker: int, channel: socket.socket, others: list[socket.socket], read: Callable[[int, Tensor], ReadResult]
) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == worker:
            for other in others:
                other.close()
            # Not the worker's signal handlers.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # The fork must not free the worker's objects.
            gc.freeze()
            torch.set_num_threads(1)
            torch.set_grad_enabled(False)
            _serve(channel, read)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the worker has closed the channel
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Without returning into the worker's frames.
        os._exit(0)


def seed_reader(seed: int, number: int) -> None:
    """Seeds the fork with a number, for functions that draw random numbers not from `rng`."""
    seed = derived(seed, number)
    # Not torch.manual_seed: it takes a lock of torch.cuda that another thread may have held at the fork.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(divmod(seed, 2**32))


def _serve(channel: socket.socket, read: Callable[[int, Tensor], ReadResult]) -> None:
    while True:
        epoch, count = _REQUEST.unpack(_receive(channel, _REQUEST.size))
        places = torch.from_numpy(np.frombuffer(bytearray(_receive(channel, 8 * count)), dtype=np.int64))
        segment = None
        try:
            result = read(epoch, places)
            reply, segment = _packed(result)
            del result
        except Exception as error:  # sent to the worker
            kind = type(error).__name__ if type(error).__name__ in _ERRORS else "DataError"
            said = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error.__cause__ or error))
            reply = {"error": kind, "message": said, "traceback": trace}
        text = json.dumps(reply).encode()
        head = _REPLY.pack(len(text), segment.nbytes if segment else 0)
        if segment:
            socket.send_fds(channel, [head], [segment.descriptor])
            segment.close()
        else:
            channel.sendall(head)
        channel.sendall(text)


def _answer(channel: socket.socket) -> ReadResult:
    try:
        head, descriptors = receive_descriptors(channel, _REPLY.size, 1)
    except CutMessage as error:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a batch's memory") from error
    if not head:
        raise EOFError
    try:
        head += _receive(channel, _REPLY.size - len(head))
        length, size = _REPLY.unpack(head)
        reply = json.loads(_receive(channel, length))
    except (EOFError, ConnectionResetError):
        # It was killed in the middle of its answer.
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    segment = SharedSegment.received(descriptors[0], size) if descriptors else None
    if "error" in reply:
        raise _ERRORS[reply["error"]](reply["message"]) from _InReader(reply["traceback"])
    memory = segment.tensor().numpy() if segment else np.empty(0, dtype=np.uint8)
    batch = decoder(reply["batch"].encode()).build(memory)
    if segment:
        segment.close()
    return ReadResult(batch, reply["examples"], *(tuple(reply[name]) for name in _COUNTS))


def _receive(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = channel.recv(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class _InReader(Exception):
    """The traceback of an error in a reading process."""


def _packed(read: ReadResult) -> tuple[dict[str, Any], SharedSegment | None]:
    """Returns a reply's JSON values, and the shared memory with the batch's numbers."""
    encoder = ValueEncoder()
    try:
        # A subclass arrives as a plain tensor.
        batch = map_tensors(lambda tensor: tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor), read.batch)
        header = encoder.header(batch, "a batch")
    except Unencodable as error:
        raise UsageError(
            f"{error}, which cannot come from a reading process: {ENCODED} can; return those, or say "
            "map(..., parallel='threads')"
        ) from None
    reply = {"batch": header.decode(), "examples": read.examples} | {name: getattr(read, name) for name in _COUNTS}
    if not encoder.end:
        return reply, None
    segment = SharedSegment.create(encoder.end, "batch")
    memory = segment.tensor().numpy()
    for place, leaf in encoder.leaves:
        memory[place : place + len(leaf)] = leaf
    return reply, segment
