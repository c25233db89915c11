"""Which of a host's processes takes which device, where a launcher has started them, and each says what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.devices import HOST, kind_of
from headrace.errors import InfeasiblePlan
from headrace.spec.cluster import Host
from headrace.spec.plan import Plan, Role, place_of

_Device = tuple[str, str]
"""What its process calls it, and its UUID."""


def with_own_devices(seen: Sequence[Host], local: Sequence[str]) -> Host:
    """Returns a host whose devices are those of its processes, in the order of their ranks.

    Args:
        seen: the host, as each of its processes sees it.
        local: their numbers on it, as the launcher says; () if it does not. Where all see the same devices, a process
            takes that of its number; where each sees devices of its own, the first that no other process takes.
    """
    first, every = seen[0], [_devices(host) for host in seen]
    if all(devices == every[0] for devices in every):
        if first.accelerators and not first.worker_devices and kind_of(first.accelerators[0]).launched:
            # Each process sees its own, and all have one name.
            return replace(first, accelerators=first.accelerators[:1] * len(seen))
        return first if first.worker_devices else _in_order_of(first, every[0], local)
    if len(first.worker_devices) == len(seen):
        chosen = [devices[place] for place, devices in enumerate(every)]
    else:
        chosen = _one_each(every)
    names, identities = zip(*chosen, strict=True)
    shared = len(set(chosen)) < len(chosen)
    named = names if first.worker_devices and (shared or HOST in names) else ()
    return replace(first, accelerators=names, identities=identities, worker_devices=named)


def _devices(host: Host) -> list[_Device]:
    names = host.worker_devices or host.accelerators
    return list(zip(names, host.identities or ("",) * len(names), strict=True))


def _in_order_of(host: Host, devices: Sequence[_Device], local: Sequence[str]) -> Host:
    """Returns the host with the devices in the order of its processes' numbers, before those that are left."""
    places = [int(text) for text in local if text.isdecimal()]
    if len(places) < max(1, len(local)) or len(set(places)) < len(places) or max(places) >= len(devices):
        return host
    order = [*places, *(place for place in range(len(devices)) if place not in places)]
    names, identities = zip(*(devices[place] for place in order), strict=True)
    return replace(host, accelerators=names, identities=identities if host.identities else ())


def _one_each(every: Sequence[Sequence[_Device]]) -> list[_Device]:
    """Returns a device for each process; HOST for one that sees none, and one that others have, where there is none."""
    chosen: dict[int, _Device] = {}
    # Those that see few first, since the others can take another one.
    for place in sorted(range(len(every)), key=lambda place: len(every[place])):
        free = [device for device in every[place] if device not in chosen.values()]
        chosen[place] = next(iter(free or every[place]), (HOST, ""))
    return [chosen[place] for place in range(len(every))]


def shared_devices(plan: Plan) -> list[str]:
    """Returns a line for each device that several workers compute on."""
    takers: dict[tuple[str, str], list[Role]] = {}
    for role in plan.roles:
        if role.computes and role.device != HOST:
            takers.setdefault(place_of(role), []).append(role)
    return [
        f"ranks {', '.join(str(role.rank) for role in roles)} share {roles[0].device} on {roles[0].host}: what they "
        "exchange goes through host memory; give each a device of its own, where there are as many"
        for roles in takers.values()
        if len(roles) > 1
    ]


def require_own_devices(strategy: str, roles: Sequence[Role], device: str) -> None:
    """Refuses workers without a device, and two that a launcher has given one device.

    `device` is the kind that they were to have. Raises an `InfeasiblePlan` with host, rank and device.
    """
    kind, takers = kind_of(device), dict[tuple[str, str], Role]()
    for role in roles:
        if role.device == HOST:
            hides = f" (is {kind.visible} set there to none?)" if kind.visible else ""
            raise InfeasiblePlan(
                f"rank {role.rank} on {role.host} sees no {kind.title}, and {strategy} computes on {device}{hides}; "
                "let the launcher give each process one (srun --gpus-per-task=1, a limit in the pod), or use "
                "device='cpu'"
            )
        other = takers.setdefault(place_of(role), role)
        if other is not role:
            name = f"{role.device} ({role.identity})" if role.identity else role.device
            raise InfeasiblePlan(
                f"rank {other.rank} on {other.host} and rank {role.rank} on {role.host} have one {kind.title}, {name}; "
                f"start one process for each device, or name it, device={[role.device]}, and they share it, through "
                "host memory"
            )
