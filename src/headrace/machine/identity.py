"""What this machine is: its name, its devices, its programs and their versions."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from headrace.devices import HOST, choose, choose_each, kind_of, one_each, parts_of_devices, runtime_of
from headrace.errors import UnfitMachine
from headrace.machine.resources import cores, most_threads, spare_memory_bytes
from headrace.spec.cluster import Cluster, Host


def host_name() -> str:
    """Returns what this host is called: as HEADRACE_HOST says, else as the system does."""
    return os.environ.get("HEADRACE_HOST") or socket.gethostname()


def machine_identity() -> str:
    """Returns what differs between machines, and between containers that do not see each other's processes."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def process_numbers() -> frozenset[int]:
    """Returns numbers that are another one in each process by their nature: its id, its parent's, its rank."""
    ranks = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK"))
    return frozenset({os.getpid(), os.getppid(), *(int(rank) for rank in ranks if rank.isdecimal())})


def require_working_directory() -> None:
    """Raises:
    UnfitMachine: the directory that this process works in was deleted; libraries below torch end a process there.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UnfitMachine(
            "the working directory of this process was deleted; change to one that exists (cd, os.chdir), or, where a "
            "new one has its path, to that path once more"
        ) from None


def require_linux() -> None:
    """Raises:
    UnfitMachine: this is no Linux, whose anonymous shared memory and futex the exchange is built on.
    """
    if platform.system() != "Linux":
        raise UnfitMachine(
            f"headrace exchanges through Linux's memfd and futex, and this is {platform.system()}; "
            "use Linux, or a Linux container"
        )


def detect(device: str | Sequence[str], ranks: int | None = None, fixed_shapes: bool = True) -> Cluster:
    """Describes this machine, with the devices that `devices.choose` takes of it, or those that are named one by one.

    Raises what `devices.choose`, `one_each` and `choose_each` raise.
    """
    require_linux()
    named = one_each(device)
    kind, devices = choose_each(named) if named else choose(str(device), fixed_shapes)
    parts = parts_of_devices(kind_of(kind))
    identities: Sequence[str] = ()
    if parts or (ranks or 1) > 1:
        identities = [identity_of(device, parts) for device in named or devices]
    if parts:
        # A process sees the one that it is given alone.
        devices, named = (tuple(HOST if name == HOST else f"{kind}:0" for name in names) for names in (devices, named))
    room = 0
    if devices:
        # Here, because a run on CPUs needs none of it.
        from headrace.machine.accelerators import memories

        room = max(memories(kind_of(kind)), default=0)
    host = Host(
        *(host_name(), cores(), spare_memory_bytes(), devices),
        worker_devices=named,
        identities=tuple(identities),
        device_memory_bytes=room,
        threads=most_threads(),
    )
    return Cluster((host,), ranks, kind)


def identity_of(device: str, parts: Sequence[str] = ()) -> str:
    """Returns the UUID of a device of this process, or of this host's `parts` of devices; "" where it has none."""
    name, _, index = device.partition(":")
    if name == HOST or not index:
        return ""
    if parts:
        return parts[int(index)]
    # This initialises the device's runtime: a process that a launcher has started computes on it anyway.
    return str(getattr(runtime_of(name).get_device_properties(int(index)), "uuid", ""))


@cache
def own_version() -> str:
    """Returns the version of headrace that is installed; finding it reads files, for milliseconds."""
    return version("headrace")


def installed_versions() -> dict[str, str]:
    """Returns what `versions` does, without an import of torch: its version is that of the installed package."""
    return {"headrace": own_version(), "torch": version("torch"), "python": platform.python_version()}


@cache
def versions() -> Mapping[str, str]:
    """Returns the versions of "headrace", "torch" and "python"."""
    import torch

    return {"headrace": own_version(), "torch": torch.__version__, "python": platform.python_version()}


def can_paint(stream: TextIO) -> bool:
    """Whether a moving bar may be painted: on a terminal that can, and not in CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return os.environ.get("TERM") != "dumb" and stream.isatty()


STEPS_FOLDER, STEPS = "HEADRACE_VERIFY_FOLDER", "HEADRACE_VERIFY_STEPS"
"""Variables with which `headrace verify` runs a plain script."""


def end_verified_steps() -> None:
    """Lets what follows in this process train as usual."""
    for name in (STEPS_FOLDER, STEPS):
        del os.environ[name]


def verified_steps() -> tuple[Path, int] | None:
    """Returns where this process of a script is to write its models, and after how many steps to end.

    None where `headrace verify` does not run it.
    """
    folder = os.environ.get(STEPS_FOLDER)
    return (Path(folder) / f"rank-{os.environ.get('RANK', 0)}", int(os.environ[STEPS])) if folder else None
