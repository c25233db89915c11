"""The exchange of accelerators of workers that may be lost, join and leave: connected anew in each view.

    view 1: ranks 0, 1, 2   all-reduce ─ all-reduce ─ rank 1 is lost: what is under way is aborted
    view 2: ranks 0, 2      connect ─ all-reduce ─ ...

A call is done when the device has done it, and until then a lost member ends it. So who comes to the barrier that
ends a round has the sums, and a round that has ended needs nothing more of a member that is lost after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.collectives.accelerators.through_host import ThroughHost
from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.collectives.base import Collective
from headrace.collectives.compression import PLAIN, Compression
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.collectives.views.group import ViewGroup
from headrace.devices import runtime_of, synchronize

_LOOK_EVERY_S = 1e-4
"""How often a rank that waits for its device looks whether a member is lost."""


class ElasticDevices(Collective):
    """What the members of the present view exchange between their devices.

    Args:
        group: the processes.
        device: of this one.
        device_of: returns the device of a rank of the run; where two members have the same, host memory is between.
        connect: returns the exchange of a view, by its number, this member's place and how many there are.
    """

    def __init__(
        self,
        group: ViewGroup,
        device: torch.device,
        device_of: Callable[[int], str],
        connect: Callable[[int, int, int], TorchDistributed],
    ) -> None:
        self._group, self._device, self._device_of, self._connect = group, device, device_of, connect
        self._inner: Collective = ThreadCollective(ThreadGroup(1), 0)
        self.abort()

    def barrier(self) -> None:
        self._group.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values)

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        inner, view = self._now(), self._view
        wait = inner.start_all_reduce(tensor, compression)

        def done() -> None:
            assert view == self._view
            wait()
            self._finish()

        return done

    def broadcast(self, tensor: Tensor) -> None:
        self._now().broadcast(tensor)
        self._finish()

    def gather(self, tensor: Tensor) -> Tensor:
        every = self._now().gather(tensor)
        self._finish()
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        given = self._now().all_to_all(pieces)
        self._finish()
        return given

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        """Ends what is under way, so that nothing writes to its tensors any more; goes on with the group's members."""
        if isinstance(self._inner, TorchDistributed):
            self._inner.abort()
            synchronize(self._device)
        self.moved_bytes += self._inner.moved_bytes
        self._inner, self._view = ThreadCollective(ThreadGroup(1), 0), -1
        self.rank, self.world = self._group.rank, self._group.world

    def _now(self) -> Collective:
        """Returns the exchange of the present view."""
        number = self._group.views.view.number
        if number != self._view:
            self.abort()
            self._inner, self._view = self._of_view(number), number
        return self._inner

    def _of_view(self, number: int) -> Collective:
        devices = [self._device_of(member) for member in self._group.members]
        if len(devices) == 1:
            return ThreadCollective(ThreadGroup(1), 0)
        if len(set(devices)) < len(devices):
            return ThroughHost(self._group)
        made: list[TorchDistributed] = []
        failed: list[BaseException] = []

        def connect(rank: int, world: int) -> None:
            try:
                made.append(self._connect(number, rank, world))
            except BaseException as error:
                failed.append(error)

        # Aside, because a member that is lost meanwhile would be waited for; then this thread is left behind.
        thread = threading.Thread(target=connect, args=(self.rank, self.world), name="headrace-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            self._group.now.check()
            thread.join(_LOOK_EVERY_S)
        if failed:
            raise failed[0]
        return made[0]

    def _finish(self) -> None:
        """Waits until the device has done what it was asked; raises a MemberLost where it does not, for one is lost."""
        if not isinstance(self._inner, TorchDistributed):
            return
        runtime = runtime_of(self._device.type)
        event = runtime.Event()
        event.record(runtime.current_stream(self._device))
        pause = threading.Event()
        try:
            while not event.query():
                self._group.now.check()
                pause.wait(_LOOK_EVERY_S)
        except BaseException:
            self.abort()
            raise
