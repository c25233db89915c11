"""What a profile belongs to, and what is said of one that belongs to something else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headrace.devices import GPU, HOST, device_names, kind_of
from headrace.errors import UsageError
from headrace.machine.identity import versions
from headrace.machine.resources import cores, processor_name
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec
from headrace.trees import map_tensors

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAMES = {"digest": "the model, its optimizer or the form of its examples"}
"""What a reader knows a fact by, where it is not its name."""


def origin_here(device: str) -> dict[str, str]:
    """Returns the versions and the machine; `device` is a kind of device."""
    facts = dict(versions())
    facts["machine"] = f"{processor_name()}, {cores()} cores"
    facts["device"] = HOST if device == HOST else device_names(kind_of(device))[0]
    return facts


def digest_of(module: nn.Module, optimizer: str, sample: Any) -> str:
    """Returns a digest that is the same in every process.

    It covers the modules with their settings, the forms of parameters and buffers, the code of `forward`, the
    optimizer's class and the form of two examples: not the values, which training changes.
    """
    hashed = hashlib.sha256(_ADDRESS.sub("", repr(module)).encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
    for kind in sorted({type(part) for part in module.modules()}, key=lambda kind: kind.__qualname__):
        code = getattr(kind.forward, "__code__", None)
        # Of what is installed the version is known.
        if code is not None and not kind.__module__.startswith("torch."):
            constants = [each for each in code.co_consts if isinstance(each, int | float | str)]
            hashed.update(repr((kind.__qualname__, code.co_code, code.co_names, constants)).encode())
    forms: list[str] = []

    def add(tensor: Tensor) -> Tensor:
        forms.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    map_tensors(add, sample)
    hashed.update(f"{optimizer} {forms}".encode())
    return hashed.hexdigest()[:16]


def require_origin(model: ModelSpec, expected: Mapping[str, str], force: bool = False) -> tuple[str, ...]:
    """Checks that a profile belongs to what it is used for; returns what differs, for notices.

    A file that a person has written belongs to nothing, and is not refused.

    Args:
        expected: as of `origin_here`, and "digest" where the job is there; only what both say is compared.
        force: differences are returned, and nothing is raised.

    Raises:
        UsageError: something differs.
    """
    differ = tuple(
        f"{_NAMES.get(name, name)}: {model.origin[name]}, and here {value}"
        for name, value in expected.items()
        if name in model.origin and model.origin[name] != value
    )
    if differ and not force:
        raise UsageError(
            f"the profile of {model.name or 'the model'} was measured with something else: {'; '.join(differ)}. "
            "Profile the job again here, or give --force to use it as it is"
        )
    return differ


def require_usable(model: ModelSpec, cluster: Cluster, force: bool = False) -> tuple[str, ...]:
    """Checks that a profile may stand for the devices of a cluster; returns what differs, for notices.

    The versions must be those that are here. A profile of a processor does not stand for GPUs, nor the other way round,
    unless every host says the `speed` of its devices relative to the profile's, or their `device_flops`.

    Raises:
        UsageError: something differs, and `force` is not given.
    """
    here = {name: value for name, value in versions().items() if name != "python"}
    told = all(host.speed != Host.speed or host.device_flops for host in cluster.hosts)
    measured_on = HOST if model.origin.get("device", HOST) == HOST else GPU
    if measured_on != cluster.device and not told:
        here["device"] = f"{cluster.device} (each host may say the speed of its devices relative to the profile's)"
    return require_origin(model, here, force)
