"""The collectives of the devices of a run, and the watchdog beside them."""

from __future__ import annotations

from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from headrace.collectives.accelerators.elastic import ElasticDevices
from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.collectives.base import ProcessGroup
from headrace.collectives.views.group import ViewGroup
from headrace.collectives.watchdog.flight_record import FlightRecord
from headrace.collectives.watchdog.watchdog import Watchdog
from headrace.devices import kind_of, synchronize
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Notice
from headrace.spec.plan import Role
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import RENDEZVOUS, RunSpec

FLIGHT_RECORDER = "flight-recorder"
"""Below a run's directory: what its ranks have called when a collective of accelerators has failed."""


class ConnectedDevices:
    """The collectives of the devices of a run's workers; the others meet this one in `connect`."""

    def __init__(self, run: RunSpec, role: Role, group: ProcessGroup, page: ControlPage) -> None:
        self._run, self._role, self._group, self._page = run, role, group, page
        self._limit_s = run.timeouts.collective_s
        self._store: Any = None
        self._watchdog: Watchdog | None = None
        self._made: TorchDistributed | ElasticDevices | None = None

    @property
    def problem(self) -> Exception | None:
        """Why the collectives have failed; None while they have not."""
        return self._watchdog.problem if self._watchdog else None

    def connect(self) -> TorchDistributed | ElasticDevices:
        """Returns the collectives when all ranks have come; where members may be lost, each of their views connects."""
        run, role, group = self._run, self._role, self._group
        if isinstance(group, ViewGroup):
            # These look for lost members in every call.
            device, device_of = torch.device(role.device), lambda rank: run.plan.role(rank).device
            self._made = ElasticDevices(group, device, device_of, self._connect_view)
            return self._made
        records = self._page.ranks[: group.world]
        record = FlightRecord(run.run_dir / FLIGHT_RECORDER, role.rank, kind_of(role.device).backend)
        self._watchdog = Watchdog(
            *(records, role.rank, group.check, group.ends, self._limit_s, self._say),
            record if run.attempt.lasting else None,
        )
        self._store = group.store() if group.store else FileStore(str(run.run_dir / RENDEZVOUS), group.world)
        self._store.set_timeout(timedelta(seconds=self._limit_s))
        place = role.rank, group.world
        self._made = TorchDistributed(self._store, *place, role.device, self._limit_s, watchdog=self._watchdog)
        return self._made

    def renew(self) -> None:
        """Ends what is under way with members that were; those that are connect when it is needed."""
        if self._made:
            self._made.abort()

    def close(self, failed: bool) -> None:
        """Leaves the others; where this worker has `failed`, without them."""
        if self._made:
            self._made.abort() if failed else self._made.close()
        if self._made and failed:
            # A step that was cut off may have left copies on other streams, whose memory is about to be freed. Where
            # the device has failed itself, the error that ends the run says so.
            with suppress(RuntimeError):
                synchronize(torch.device(self._role.device))
        if self._watchdog:
            self._watchdog.close()
        if self._group.store and self._store:
            self._store.close()

    def _connect_view(self, view: int, rank: int, world: int) -> TorchDistributed:
        store = FileStore(f"{self._run.run_dir / RENDEZVOUS}-{view}", world)
        return TorchDistributed(store, rank, world, self._role.device, self._limit_s)

    def _say(self, line: str) -> None:
        # Not by the worker's own writer, which is of its thread.
        run, rank = self._run, self._role.rank
        with closing(EventWriter(run.run_dir, rank, run.started)) as events:
            events.write(Notice(rank, events.now(), line))
