"""Connects the collectives of a backend of torch.distributed without its table of groups.

torch's default group, which a process has once, is left to the user.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace import internals
from headrace.devices import HOST, DeviceKind
from headrace.errors import UnfitMachine


def connect(
    kind: DeviceKind,
    store: internals.Store,
    place: tuple[int, int],
    timeout_s: float,
    device: torch.device,
    ranks: Sequence[int] = (),
) -> Any:
    """Returns the collectives of a kind of devices, as an object of torch.

    Args:
        place: this rank, and how many there are; they find each other in `store`.
        timeout_s: a call that is not done after it fails.
        ranks: of each of them in the whole run, by which torch's records call them; () for the same.

    Raises:
        UnfitMachine: this build of torch does not have the backend.
    """
    rank, world = place
    timeout = timedelta(seconds=timeout_s)
    if plugin := internals.backend_plugins.get(kind.backend.upper()):
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, world, timeout)
        given = internals.backend_options()
        given.store, given.group_rank, given.group_size, given.timeout = store, rank, world, timeout
        given.group_id, given.global_ranks_in_group = "", list(ranks)
        return plugin.creator_fn(given, None)
    named = f"processgroup{kind.backend}"
    make: Any = next((getattr(dist, name) for name in dir(dist) if name.lower() == named), None)
    if make is None:
        raise UnfitMachine(
            f"torch {importlib.metadata.version('torch')} here has no {kind.backend}, which carries tensors between "
            f"the devices of workers; install {kind.remedy} that has it, or use workers=1"
        )
    if kind.name == HOST:
        return make(store, rank, world, timeout)
    options = make.Options()
    setattr(options, internals.group_timeout.name_in(options), timeout)
    options.global_ranks_in_group = list(ranks)
    backend = make(store, rank, world, options)
    if kind.binds:
        backend.eager_connect_single_device(device)
    return backend
