"""The devices on which a script's models lie, and what carries their tensors between its processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.api.plain_script.meeting import Meeting
from headrace.collectives.accelerators.through_host import ThroughHost
from headrace.collectives.base import Collective, gather_texts
from headrace.devices import AUTO, HOST, choose, kind_of, parts_of_devices, use
from headrace.engine.base import FASTER
from headrace.engine.torchrun.address import local_rank
from headrace.engine.torchrun.engine import device_store
from headrace.errors import UsageError
from headrace.machine.identity import identity_of

_PREFIX = "headrace/script"
_COLLECTIVE_S = 600.0
"""How long devices wait for each other; a process that is lost is noticed by its heartbeat."""


def own_device() -> str:
    """Returns the device of this process of a launcher: "cuda:1" by LOCAL_RANK, "cuda:0" where it sees one, or "cpu".

    Raises a `UsageError` where this host has more processes than devices.
    """
    kind, found = choose(AUTO)
    place = local_rank()
    if not found:
        return HOST
    parts = parts_of_devices(kind_of(kind))
    if len(found) > 1 and place >= len(found):
        raise UsageError(
            f"process {place} of this host has no {kind_of(kind).title} of its own: there are {len(found)}; start as "
            f"many processes, or name a device that they share, {found[0]!r}"
        )
    if parts:
        # Before anything else uses one: a process sees the part that it is given alone.
        use(f"{kind}:0", parts[place if len(parts) > 1 else 0])
        return f"{kind}:0"
    return found[place if len(found) > 1 else 0]


class ScriptDevices:
    """Connects the processes of a script by what carries the tensors of the devices that its models lie on."""

    def __init__(self, meeting: Meeting, hosts: list[str], encrypt: bool) -> None:
        self._meeting, self._hosts, self._encrypt = meeting, hosts, encrypt
        self._device: torch.device | None = None
        self._collective: Collective = meeting.group
        self._closing: list[Callable[[], None]] = []

    def collective_of(self, model: nn.Module) -> tuple[Collective, torch.device]:
        """Returns what carries a model's tensors, and where they lie; all processes call it together.

        Raises:
            UsageError: it lies on several devices, or on another one than the models before it.
        """
        devices = list({parameter.device for parameter in model.parameters()}) or [torch.device(HOST)]
        if len(devices) > 1 or (self._device is not None and devices != [self._device]):
            named = ", ".join(sorted({str(each) for each in (*devices, *([self._device] if self._device else []))}))
            raise UsageError(
                f"the models of a script lie on {named}, and hr.setup takes those of one device in each process; move "
                "them to one, or use hr.fit"
            )
        if self._device is None:
            self._device = devices[0]
            self._connect(self._device)
        return self._collective, self._device

    def close(self) -> None:
        """Leaves the collective; where the script has failed, without the others, which may not come."""
        for close in self._closing:
            close()

    def _connect(self, device: torch.device) -> None:
        meeting, name = self._meeting, str(device)
        identity = identity_of(name) if device.type != HOST else ""
        own = [self._hosts[meeting.rank], name, identity]
        told = [json.loads(text) for text in gather_texts(meeting.group, json.dumps(own))]
        kinds = {each.partition(":")[0] for _, each, _ in told}
        if kinds == {HOST}:
            return
        why = self._why_through_host(told, kinds)
        if why or not kind_of(device.type).backend:
            meeting.say(f"gradients go through host memory: {why or f'torch has no exchange for {name}'}")
            self._collective = ThroughHost(meeting.group) if device.type != HOST else meeting.group
            return
        # Here, because importing torch.distributed costs what a CPU run need not pay.
        from headrace.collectives.accelerators.torch_distributed import TorchDistributed

        store: Any = device_store(_PREFIX)
        made = TorchDistributed(store, meeting.rank, meeting.world, name, _COLLECTIVE_S)
        self._collective = made
        # An exception that ends a script is kept there.
        self._closing += [lambda: made.abort() if "last_value" in vars(sys) else made.close(), store.close]

    def _why_through_host(self, told: list[list[str]], kinds: set[str]) -> str:
        if len(kinds) > 1:
            return f"the models of processes lie on devices of several kinds, {', '.join(sorted(kinds))}"
        takers: dict[tuple[str, str], list[int]] = {}
        for rank, (host, name, identity) in enumerate(told):
            takers.setdefault(("", identity) if identity else (host, name), []).append(rank)
        for ranks in takers.values():
            if len(ranks) > 1:
                host, name, _ = told[ranks[0]]
                return (
                    f"ranks {', '.join(map(str, ranks))} share {name} on {host}; where there are more devices, move "
                    "each process's model and batches to its own, hr.processes().device"
                )
        backend = kind_of(kinds.pop()).backend
        if len(set(self._hosts)) > 1 and self._encrypt:
            return f"there are several hosts; {FASTER} {backend or 'themselves'}"
        return ""
