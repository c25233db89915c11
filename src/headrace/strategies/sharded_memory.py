"""Whether the parts of a sharded model fit into the memory of devices and hosts."""

from __future__ import annotations

from headrace.devices import GPU, HOST
from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan


def require_accelerators(offload: bool, cluster: Cluster) -> bool:
    """Returns `offload`; refuses to keep parts in host memory where all else is there, too, with a UsageError."""
    if offload and cluster.device == HOST:
        raise UsageError(
            "offload=True keeps parts of parameters, gradients and optimizer state in host memory, where workers on "
            f"CPUs have them anyway; leave it out, or give an accelerator: device='{GPU}'"
        )
    return offload


def require_parts_fit(
    plan: Plan, workers: int, replicas: int, model: ModelSpec, host: Host, on_device: bool, kept_there: bool
) -> None:
    """Refuses what does not fit into a host that has some of the workers: says what is short, and what would do.

    `on_device` says that workers compute on accelerators, `kept_there` that their parts are there, too.
    """
    # What is not trained is divided, too, and has no gradients.
    whole = model.parameter_bytes
    state = replicas * (whole + (model.copies - 1) * model.trainable_bytes)
    there = f"bytes of host memory, and {host.name} has {host.memory_bytes:,} left"
    held, part, room = state * workers // plan.workers, state // plan.workers, host.device_memory_bytes
    if model.in_parts:
        whole = part
    if kept_there and room and part > room:
        raise InfeasiblePlan(
            f"{plan.strategy} needs {part:,} bytes on each device, and those of {host.name} have {room:,}, "
            f"{part - room:,} too few: so large is a worker's part of parameters, gradients and optimizer state, "
            f"{state:,} bytes in all; {_enough(state, room)} workers would do, or offload=True, which keeps it in host "
            "memory"
        )
    if on_device and room and whole > room:
        raise InfeasiblePlan(
            f"{plan.strategy} needs {whole:,} bytes on each device, and those of {host.name} have {room:,}: each holds "
            "the whole model before it keeps its part; use deferred=True, devices with more memory, or device='cpu'"
        )
    if not kept_there and held > host.memory_bytes:
        hosts = _enough(state, host.memory_bytes)
        among = f" in {replicas} replicas" if replicas > 1 else ""
        raise InfeasiblePlan(
            f"{plan.strategy} needs {held:,} {there}, {held - host.memory_bytes:,} too few: so large are its workers' "
            f"parts of parameters, gradients and optimizer state, {state:,} bytes in all; start as many workers on "
            f"each of {hosts} such hosts or more, {workers * hosts} processes{among}"
        )
    if whole > host.memory_bytes:
        raise InfeasiblePlan(
            f"{plan.strategy} needs {whole:,} {there}, {whole - host.memory_bytes:,} too few: each worker builds the "
            "whole model before it keeps its part; use hosts with so much memory"
        )
    if workers * whole > host.memory_bytes:
        fewer = host.memory_bytes // whole
        raise InfeasiblePlan(
            f"{plan.strategy} needs {workers * whole:,} {there}: each of {workers} workers builds the whole model, "
            f"{whole:,} bytes, before it keeps its part; {fewer} worker{'s' * (fewer > 1)} a host would do"
        )


def _enough(state: int, room: int) -> int:
    """Returns how many parts of a state fit into such room each."""
    return -(-state // max(1, room))
