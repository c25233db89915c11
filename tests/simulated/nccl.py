"""A stand-in for NCCL among the simulated accelerator's devices, as a backend of torch.distributed called "fakenccl".

It refuses what NCCL refuses: tensors of the host, tensors that are not contiguous, two ranks on one device. Its work is
done on a stream of its own, by a thread, and `wait()` orders streams without waiting. Unlike NCCL, it says at once
where ranks call different things; with SIMULATED_MISMATCH=hang it waits for ever, as NCCL does.

Importing this file adds the backend to PyTorch and to the device table of this process.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.devices import DEVICES
from simulated.accelerator import LIBRARY, NAME, cross_entropy, row
from simulated.calls import Call, Work, near, operation, record, reduced, require_times, shape_of, spoil
from simulated.faults import FAULTS, suffer, timed_out
from simulated.wires import Closed, Mesh, TimedOut

__all__ = ["FAULTS", "FakeNccl", "cross_entropy"]

BACKEND = "fakenccl"
STREAMS = 33  # kStreams of device.hpp

TYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
"""What NCCL carries; torch refuses others, such as int16."""


class Mismatch(RuntimeError):
    """Ranks of a group have called different things."""


class FakeNccl(dist.ProcessGroup):
    """The ranks that find each other in a store; `members` are their numbers in the run."""

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta, members: Sequence[int] = ()) -> None:
        super().__init__(rank, world)
        self.device: torch.device | None = None
        self.members = list(members) or list(range(world))
        self.error = ""
        self._store, self._rank, self._world, self._timeout_s = store, rank, world, timeout.total_seconds()
        self._mesh: Mesh | None = None
        self._queue: queue.SimpleQueue[tuple[Work, int] | None] = queue.SimpleQueue()
        self._batch: list[Call] | None = None
        self._batches = 0
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._stop = threading.Event()
        if rank == 0:
            store.set("0", uuid.uuid4().hex)

    # What torch asks of a backend.
    supports_coalescing = True
    supports_splitting = False

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect(device)

    def shutdown(self) -> None:
        """Waits for what is under way, and closes."""
        if self._thread:
            self._queue.put(None)
            self._thread.join()
        self._close()

    def abort(self) -> None:
        """Ends what is under way: its tensors hold no numbers."""
        self.error = self.error or "the communicator was aborted"
        self._stop.set()
        if self._mesh:
            self._mesh.stop()
        if self._thread:
            self._queue.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._close()

    def _close(self) -> None:
        if self._mesh:
            self._mesh.close()
        self._stop.set()

    # Collectives.
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        op = operation(opts)

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            takes[0].copy_(reduced(op, [each[0] for each in given]))

        sent = 2 * (self._world - 1) * tensor.nbytes / self._world
        return self._start(Call("all_reduce", shape_of(tensor, op=op), [tensor], [tensor], finish), sent)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = operation(opts)

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            for place, take in enumerate(takes):
                take.copy_(reduced(op, [each[place] for each in given]))

        total = sum(tensor.nbytes for tensor in tensors)
        own = {"sizes": [list(tensor.shape) for tensor in tensors], "op": op}
        return self._start(
            Call("all_reduce", own, list(tensors), list(tensors), finish), 2 * (self._world - 1) * total / self._world
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,), root = tensors, int(opts.rootRank)

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            for take in takes:
                take.copy_(given[root][0])

        gives, takes = ([tensor], []) if self._rank == root else ([], [tensor])
        return self._start(Call("broadcast", shape_of(tensor, root=root), gives, takes, finish), tensor.nbytes)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        (every,), (own,) = outputs, inputs

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            for take, (tensor,) in zip(takes, given, strict=True):
                take.copy_(tensor)

        return self._start(Call("all_gather", shape_of(own), [own], every, finish), (self._world - 1) * own.nbytes)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        require_times(output, own, self._world)

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            takes[0].view(self._world, -1).copy_(torch.stack([tensor.view(-1) for (tensor,) in given]))

        call = Call("all_gather_into", shape_of(own), [own], [output], finish)
        return self._start(call, (self._world - 1) * own.nbytes)

    def _reduce_scatter_base(self, output: Tensor, every: Tensor, opts: Any = None) -> Work:
        require_times(every, output, self._world)
        op = operation(opts)

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            parts = [tensor.view(self._world, -1)[self._rank] for (tensor,) in given]
            takes[0].view(-1).copy_(reduced(op, parts))

        call = Call("reduce_scatter", shape_of(every, op=op), [every], [output], finish)
        return self._start(call, (self._world - 1) * every.nbytes / self._world)

    def alltoall_base(
        self, output: Tensor, own: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        world = self._world
        cuts = list(input_sizes) or [len(own) // world] * world
        if sum(cuts) != len(own) or (not output_sizes and len(output) % world):
            raise ValueError(f"all_to_all cuts {len(own)} rows into {cuts}")
        told: dict[str, Any] = {"dtype": str(own.dtype), "row": list(own.shape[1:])}
        told |= {} if input_sizes or output_sizes else {"rows": len(own)}

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            takes[0].copy_(torch.cat([tensors[self._rank] for tensors in given]))

        kept = own.nbytes * cuts[self._rank] / max(1, len(own))
        return self._start(Call("all_to_all", told, list(own.split(cuts)), [output], finish), own.nbytes - kept)

    def barrier(self, opts: Any = None) -> Work:
        device = self.device or torch.device(NAME, torch.accelerator.current_device_index())
        own = torch.zeros(1, device=device)
        return self._start(Call("barrier", {}, [own], [], lambda given, takes: None), 0.0, blocks=True)

    # Between two ranks.
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        call = Call("send", shape_of(tensor), [tensor], [], lambda given, takes: None, peer)
        return self._start(call, tensor.nbytes)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors

        def finish(given: list[list[Tensor]], takes: list[Tensor]) -> None:
            takes[0].copy_(given[0][0])

        return self._start(Call("recv", shape_of(tensor), [], [tensor], finish, peer), 0.0)

    def _start_coalescing(self) -> None:
        self._batch = []
        self._batches += 1

    def _end_coalescing(self) -> Work:
        calls, self._batch = self._batch, None
        assert calls, "no call between the start and the end of a batch"
        return self._enqueue(calls)

    # How they are done.
    def _start(self, call: Call, sent: float, blocks: bool = False) -> Work:
        self._check(call)
        record(self, call, sent, self._batches if self._batch is not None else None)
        if self._batch is not None:
            self._batch.append(call)
            return Work(self, [call], 0, None)
        return self._enqueue([call], blocks)

    def _check(self, call: Call) -> None:
        if self.error:
            raise dist.DistBackendError(self.error)
        for tensor in (*call.gives, *call.takes):
            if tensor.device.type != NAME or tensor.layout != torch.strided:
                raise RuntimeError(f"Tensors must be CUDA and dense: {call.name} takes one on {tensor.device}")
            if not tensor.is_contiguous():
                raise RuntimeError(f"Tensors must be contiguous: {call.name} takes one of strides {tensor.stride()}")
            if tensor.dtype not in TYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if self.device is not None and tensor.device != self.device:
                raise RuntimeError(f"this rank is on {self.device}, and {call.name} takes a tensor on {tensor.device}")
        self._connect((*call.gives, *call.takes)[0].device)

    def _connect(self, device: torch.device) -> None:
        """Meets the other ranks, at the first call: the host waits for them."""
        if self._mesh:
            return
        self.device = device
        identity = str(torch.get_device_module(NAME).get_device_properties(device).uuid)
        version = os.environ.get("SIMULATED_NCCL_VERSION", "2.27.3")
        unique = self._store.get("0").decode()
        self._mesh = Mesh(unique, self._rank, self._world, self._timeout_s)
        told = self._mesh.meet({"uuid": identity, "version": version})
        for rank, (own, other) in enumerate((one["uuid"], one["version"]) for one in told):
            if other != version:
                raise dist.DistBackendError(f"Mismatched NCCL version detected : rank {rank} {other} {version}")
            if own == identity and rank != self._rank:
                first, last = sorted((rank, self._rank))
                self._mesh.close()
                raise dist.DistBackendError(
                    f"NCCL error: invalid usage. Duplicate GPU detected : rank {last} and rank {first} both on "
                    f"CUDA device {identity}"
                )
        self._stream = torch.Stream(device=device)
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"fakenccl {unique[:8]}")
        self._thread.start()

    def _enqueue(self, calls: list[Call], blocks: bool = False) -> Work:
        stream = self._stream
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        gate = int(LIBRARY.fake_gate())
        with torch.no_grad():
            torch.ops.headrace_fake.enqueue(
                f"nccl:{calls[0].name}",
                [tensor.detach() for call in calls for tensor in call.gives],
                [tensor.detach() for call in calls for tensor in call.takes],
                stream.device_index * STREAMS + stream.stream_id,
                gate,
            )
        for call in calls:
            call.timeout_s = self._timeout_s
        work = Work(self, calls, gate, stream.record_event(), blocks)
        self._queue.put((work, gate))
        return work

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, gate = item
            try:
                LIBRARY.fake_wait_before(gate)
                if self.error:
                    raise Closed(self.error)
                self._do(work.calls)
            except Mismatch as error:
                self._fail(work, str(error))
                LIBRARY.fake_fault(f"simulated: {error}".encode())
            except TimedOut:
                self._fail(work, timed_out(self.members, self._rank, work.calls[0]))
            except Closed as error:
                self._fail(work, str(error))
            except Exception as error:  # said where the device is used next, and nobody waits for ever
                self._fail(work, repr(error))
                LIBRARY.fake_fault(f"simulated: {work.calls[0].said()}: {error!r}".encode())
            work.end()
            LIBRARY.fake_open(gate)
        # Nobody may wait for what comes after.
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                self._fail(item[0], self.error)
                item[0].end()
                LIBRARY.fake_open(item[1])

    def _fail(self, work: Work, said: str) -> None:
        self.error = self.error or said
        work.error = said
        for call in work.calls:
            for tensor in call.takes:
                spoil(near(tensor))

    def _do(self, calls: Sequence[Call]) -> None:
        mesh = self._mesh
        assert mesh
        for call in calls:
            suffer(call, self.members[self._rank], self._stop, self._hang)
        deadline = min(call.began + call.timeout_s for call in calls)
        for call in calls:
            if call.name != "recv":
                given = [near(tensor) for tensor in call.gives]
                for peer in range(self._world) if call.peer is None else [call.peer]:
                    if peer != self._rank:
                        mesh.send(peer, {"call": call.name, "own": call.own}, given)
        for call in calls:
            if call.name != "send":
                self._receive(call, deadline)
        for call in calls:
            if call.name == "send":
                assert call.peer is not None
                mesh.wait_taken(call.peer, deadline)

    def _receive(self, call: Call, deadline: float) -> None:
        mesh = self._mesh
        assert mesh
        every: list[list[Tensor]] = []
        for peer in range(self._world) if call.peer is None else [call.peer]:
            if peer == self._rank:
                every.append([near(tensor).clone() for tensor in call.gives])
                continue
            header, tensors = mesh.receive(peer, deadline)
            wanted = "send" if call.name == "recv" else call.name
            if (header["call"], header["own"]) != (wanted, json.loads(json.dumps(call.own))):
                other = Call(header["call"], header["own"], [], [], call.finish)
                said = (
                    f"rank {self.members[self._rank]} calls {call.said()} and rank {self.members[peer]} calls "
                    f"{other.said()}, at the same place among ranks {self.members}"
                )
                if os.environ.get("SIMULATED_MISMATCH") == "hang":
                    self._hang(deadline)
                mesh.tell_all(said)
                raise Mismatch(said)
            if call.peer is not None:
                mesh.say_taken(peer)
            every.append(tensors)
        call.finish(every, [near(tensor) for tensor in call.takes])

    def _hang(self, deadline: float) -> None:
        if not self._stop.wait(max(0.0, deadline - time.monotonic())):
            raise TimedOut
        raise Closed("the communicator was aborted")


def _create(options: Any, _: object) -> FakeNccl:
    return FakeNccl(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[NAME])
DEVICES[NAME] = row(backend=BACKEND)
