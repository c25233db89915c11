"""The generators of random numbers that accelerators have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.devices import GPU, HOST, accelerators, kind_of, runtime_of
from headrace.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def random_state(device: torch.device) -> Tensor:
    """Returns the state of an accelerator's generator, in host memory."""
    if kind_of(device.type).package:
        import torch
        from torch.utils.checkpoint import get_device_states

        _, (state,) = get_device_states(torch.empty(1, device=device))
        return state
    values: Tensor = runtime_of(device.type).get_rng_state(device)
    return values


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Sets the state of an accelerator's generator."""
    if kind_of(device.type).package:
        from torch.utils.checkpoint import set_device_states

        set_device_states([device.index or 0], [state], device_type=device.type)
        return
    runtime_of(device.type).set_rng_state(state, device)


def random_states() -> Mapping[str, Tensor]:
    """Returns the states of the generators of the accelerators that this process has begun to use, by kind."""
    import torch

    kinds = [kind.name for kind in accelerators() if not kind.package]
    runtimes: dict[str, Any] = {name: getattr(torch, name, None) for name in kinds}
    # A runtime that cannot be asked has nothing to begin.
    begun = {name: runtime for name, runtime in runtimes.items() if getattr(runtime, "is_initialized", bool)()}
    return {name: runtime.get_rng_state() for name, runtime in begun.items()}


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Sets what `random_states` returned."""
    for name, state in states.items():
        runtime_of(name).set_rng_state(state)


@contextmanager
def forked_generators(module: nn.Module) -> Iterator[None]:
    """Gives random numbers back as they were: the CPU's, and those of the accelerators that hold the parameters."""
    import torch

    devices = {parameter.device for parameter in module.parameters() if parameter.device.type not in (HOST, "meta")}
    kind = {device.type for device in devices}
    if len(kind) > 1:
        raise UsageError(f"the model lies on devices of several kinds, {', '.join(sorted(kind))}; move it to one")
    indices = sorted(device.index or 0 for device in devices)
    with torch.random.fork_rng(devices=indices, device_type=kind.pop() if kind else GPU):
        yield
