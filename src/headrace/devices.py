"""The device table, and what headrace asks torch of a device. No other file names an accelerator.

To add a device, add its row to `DEVICES` and a test. Importing this module does not import torch.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import UnfitMachine, UnknownName, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HOST = "cpu"
"""The device whose memory processes share."""

GPU = "cuda"
"""What Ray, the price lists of clouds and `headrace bench` call a GPU."""


@dataclass(frozen=True)
class DeviceKind:
    """A row of the device table.

    Attributes:
        name: torch's, of the type of device: "cuda", of which the first device is "cuda:0".
        title: of one of them, in messages.
        backend: of torch.distributed, which carries its tensors between processes; "" if there is none.
        remedy: where torch sees none.
        package: the distribution that adds the device to torch; "" if torch itself has it.
        driver: a file that is there if the hardware has a driver; "" if none is known.
        environment: set, where it is not yet, before devices are counted.
        compiler: of `torch.compile`.
        streams: whether a batch can be copied to it while it computes.
        binds: whether its backend takes the device when it connects.
        registers: whether host memory that processes share can be registered for its copies.
        fixed_shapes: whether it compiles a program for every new shape, so that all steps must have the same shapes.
        launched: whether each process must know its rank before it imports torch, as under torchrun.
        visible: the variable that says which of them a process sees; "" if there is none.
        part: how a part of one is called there, of which a process uses one alone; "" if it has none.
        interface: the variable that says by which network interface its backend connects; "" if there is none.
    """

    name: str
    title: str
    backend: str = ""
    remedy: str = ""
    package: str = ""
    driver: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    compiler: str = "inductor"
    streams: bool = False
    binds: bool = False
    registers: bool = False
    fixed_shapes: bool = False
    launched: bool = False
    visible: str = ""
    part: str = ""
    interface: str = ""

    def row(self) -> str:
        """Returns the row as a message says it: "mps (collectives: none)"."""
        more = f"; package: {self.package}" * bool(self.package)
        more += "; a program compiled for every new shape" * self.fixed_shapes
        return f"{self.name} (collectives: {self.backend or 'none'}{more})"


_ROWS = (
    DeviceKind(HOST, "CPU", backend="gloo"),
    DeviceKind(
        GPU,
        "CUDA device",
        backend="nccl",
        remedy="a CUDA build of torch",
        driver="/proc/driver/nvidia/version",
        environment=(
            # Counting by NVML leaves CUDA uninitialised, so that the workers may still be forked.
            ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
            # Where a collective fails headrace ends the run, with names; torch would end the process before that.
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
            ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ),
        streams=True,
        binds=True,
        registers=True,
        visible="CUDA_VISIBLE_DEVICES",
        part="MIG-",
        interface="NCCL_SOCKET_IFNAME",
    ),
    DeviceKind(
        "tpu",
        "TPU",
        backend="tpu_dist",
        remedy="a host with TPUs",
        package="torch_tpu",
        compiler="tpu",
        fixed_shapes=True,
        launched=True,
    ),
    DeviceKind("xpu", "XPU", "xccl", remedy="an XPU build of torch", streams=True, visible="ZE_AFFINITY_MASK"),
    DeviceKind("mps", "MPS device", remedy="a Mac, on which headrace does not run"),
)

DEVICES: dict[str, DeviceKind] = {each.name: each for each in _ROWS}
"""The device table, by name; device="auto" takes the first accelerator of which there is one, in this order."""

_NONE = ("", "-1", "NoDevFiles")
"""Values by which a launcher, or a user, lets a process see no device."""

AUTO = "auto"

EXAMPLE = (f"{GPU}:0", HOST)
"""Devices that are named one for each worker, as messages write them."""

NAMED = f"device={list(EXAMPLE)}"


def accelerators() -> tuple[DeviceKind, ...]:
    """Returns the rows of all devices but the CPU."""
    return tuple(each for each in DEVICES.values() if each.name != HOST)


def float32_backends() -> tuple[Any, ...]:
    """Returns what has a precision of float32 of its own."""
    import torch.backends as backends

    cuda, cudnn, mkldnn = (getattr(backends, name) for name in (GPU, "cudnn", "mkldnn"))
    return backends, cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn


def kind_of(device: str) -> DeviceKind:
    """Returns the row of a device, "cuda" or "cuda:0"; raises UnknownName."""
    name = device.partition(":")[0]
    if name not in DEVICES:
        raise UnknownName("device", name, DEVICES)
    return DEVICES[name]


def captures(device: str) -> bool:
    """Whether the kernels of a step can be captured, and launched as one."""
    return kind_of(device).name == GPU


def asks_capture(device: str) -> Callable[[], bool]:
    """Returns what tells whether this thread's kernels are being captured, instead of run."""
    if not captures(device):
        return lambda: False
    import torch

    return torch.cuda.is_current_stream_capturing


def check_name(device: str, *more: str) -> None:
    """Raises a `UsageError` unless a device has a row, or is one of `more` names."""
    names = [*more, *DEVICES]
    if device not in names:
        raise UsageError(f"device is {', '.join(map(repr, names[:-1]))} or {names[-1]!r}, got {device!r}")


def one_each(device: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the devices that are named one for each worker, ["cuda:0", "cpu"] or "cuda:0,cpu"; () for a kind of them.

    Raises:
        UsageError: it is neither a name nor a list of names.
    """
    if isinstance(device, str):
        return tuple(name.strip() for name in device.split(",")) if {",", ":"} & set(device) else ()
    if not isinstance(device, Sequence) or not device or not all(isinstance(name, str) for name in device):
        raise UsageError(
            f"device is the name of a kind of device, or a list with the device of each worker, {NAMED}, got "
            f"{device!r:.60}"
        )
    return tuple(device)


def found(kind: DeviceKind) -> tuple[str, ...]:
    """Returns the devices of a kind that torch sees here, by name; () of the CPU, which is not counted."""
    if kind.name == HOST or package_problem(kind):
        return ()
    for name, value in kind.environment:
        os.environ.setdefault(name, value)
    import torch

    # By torch.accelerator, because some packages refuse to be asked by others than torch.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind.name:
        return ()
    # Of parts torch counts one, and the first question binds the process to it.
    count = len(parts_of_devices(kind)) or torch.accelerator.device_count()
    # A process that a launcher has given a device sees that one alone, as its current one.
    return tuple(kind.name if kind.launched else f"{kind.name}:{index}" for index in range(count))


def parts_of_devices(kind: DeviceKind) -> tuple[str, ...]:
    """Returns the parts of devices that this process was given, by their UUIDs."""
    given = os.environ.get(kind.visible, "").split(",") if kind.part else []
    return tuple(each.strip() for each in given if each.strip().startswith(kind.part))


def choose(device: str, fixed_shapes: bool = True) -> tuple[str, tuple[str, ...]]:
    """Returns which kind of device a name means here, and the devices; "auto" takes the first there is, else the CPU.

    `fixed_shapes` says whether all steps have the same shapes; "auto" leaves out devices that need it otherwise.

    Raises:
        UsageError: an unknown device.
        UnfitMachine: there is none of that kind here.
    """
    check_name(device, AUTO)
    if device == HOST:
        return HOST, ()
    kinds = accelerators() if device == AUTO else (DEVICES[device],)
    for kind in kinds:
        if device == AUTO and kind.fixed_shapes and not fixed_shapes:
            continue
        if devices := found(kind):
            return kind.name, devices
    if device != AUTO:
        kind = DEVICES[device]
        raise UnfitMachine(f"device={device!r} and {_why_not(kind)}; {_remedy(kind)}")
    return HOST, ()


def choose_each(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Returns the kind of the first accelerator among devices that were named one by one, and those that are here.

    Where there is no accelerator among them, that is the CPU, and ().

    Raises:
        UsageError: an unknown device, or one without its number.
        UnfitMachine: it is not here.
    """
    for name in names:
        kind_name = name.partition(":")[0]
        check_name(kind_name)
        if name == HOST:
            continue
        if kind_name == HOST:
            raise UsageError(f"device {name!r} has a number, and all workers on CPUs share the cores; use 'cpu'")
        _, there = choose(kind_name)
        if name not in there:
            seen = f"torch sees {', '.join(there)}; use one of them, or 'cpu'"
            if ":" in name:
                raise UnfitMachine(f"device {name!r} is not here: {seen}")
            raise UsageError(f"device {name!r} has no number: {seen}")
    distinct = tuple(dict.fromkeys(name for name in names if name != HOST))
    return (distinct[0].partition(":")[0] if distinct else HOST), distinct


def explain_auto(chosen: str) -> str:
    """Returns one line that says why device="auto" takes a kind of device here."""
    reasons = []
    for kind in accelerators():
        if kind.name == chosen:
            count = len(found(kind))
            reasons.append(f"torch sees {count} {kind.title}{'s' * (count != 1)} here")
            break
        reasons.append(_why_not(kind))
    return f"device='auto' takes {chosen}: {'; '.join(reasons)}"


def notice_of_auto(chosen: str) -> str:
    """Returns `explain_auto`'s line where a user may wonder; "" for the CPU of a machine that has nothing else."""
    signs = [kind for kind in accelerators() if _installed(kind) or (kind.driver and Path(kind.driver).exists())]
    return explain_auto(chosen) if chosen != HOST or signs else ""


def package_problem(kind: DeviceKind) -> str:
    """Returns what is wrong with the package that adds a device to torch, with the remedy; "" if nothing is."""
    if not kind.package:
        return ""
    # Here, because it takes some milliseconds.
    from packaging.requirements import InvalidRequirement, Requirement

    version = _installed(kind)
    if not version:
        return f"{kind.package} is not installed: pip install {kind.package}"
    here = importlib.metadata.version("torch")
    for text in importlib.metadata.requires(kind.package) or ():
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            return f"{kind.package} {version} requires {text!r}, which cannot be read: install it again"
        applies = needed.marker is None or needed.marker.evaluate()
        if needed.name.lower() == "torch" and applies and not needed.specifier.contains(here, prereleases=True):
            wanted = f"torch{needed.specifier}"
            return (
                f"{kind.package} {version} takes {wanted}, and torch {here} is installed: pip install '{wanted}', or a "
                f"version of {kind.package} that takes this one"
            )
    return ""


def device_names(kind: DeviceKind) -> list[str]:
    """Returns what the devices of a kind are called by their makers, where torch can use them."""
    import torch

    devices = found(kind)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind.name or not torch.accelerator.is_available():
        return []
    return [runtime_of(kind.name).get_device_name(index) for index in range(len(devices))]


def use(device: str, identity: str = "") -> None:
    """Makes a device the current one of this process; a part of one, whose `identity` is its UUID, the only one.

    Raises an `UnfitMachine` where this process has begun to use another part.
    """
    import torch

    kind = kind_of(device)
    if kind.part and identity.startswith(kind.part):
        # A runtime that has begun is bound to the first of those that it was given.
        if parts_of_devices(kind)[:1] != (identity,) and runtime_of(kind.name).is_initialized():
            raise UnfitMachine(
                f"this process has begun to use a {kind.title}, and the run gives it {identity}: a process uses one "
                f"part of a device alone; set {kind.visible} to one of them in each process, or use it later"
            )
        os.environ[kind.visible] = identity
    if (index := torch.device(device).index) is not None:
        torch.accelerator.set_device_index(index)


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all that was asked; the CPU has."""
    if device.type != HOST:
        import torch

        torch.accelerator.synchronize(device)


def autocast_states() -> list[bool]:
    """Returns whether autocast is on: on the CPU, and on this process's accelerator if it has one."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return [torch.is_autocast_enabled(name) for name in (HOST, *([accelerator.type] if accelerator else []))]


def register_host_memory(region: Tensor, device: torch.device) -> None:
    """Lets a device copy to and from host memory directly, where it can."""
    if not region.numel() or not kind_of(device.type).registers:
        return
    import torch

    code = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of {region.numel():,} bytes failed with code {int(code)}")


def runtime_of(device: str) -> Any:
    """Returns torch's module for a kind of device, torch.cuda; raises an `UnfitMachine` if torch has none."""
    kind = kind_of(device)
    runtime = _runtime(kind.name)
    if runtime is None:
        raise UnfitMachine(f"{_why_not(kind)}; {_remedy(kind)}")
    return runtime


def _runtime(name: str) -> Any:
    import torch

    return getattr(torch, name, None)


def _installed(kind: DeviceKind) -> str:
    """Returns the version of a device's package; "" if it has none, or it is not installed."""
    try:
        return importlib.metadata.version(kind.package) if kind.package else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def hidden(kind: DeviceKind) -> str:
    """Returns in a clause that the environment hides all devices of a kind from this process; "" if it does not."""
    if not kind.visible or os.environ.get(kind.visible, "0").strip() not in _NONE:
        return ""
    return f"{kind.visible}={os.environ[kind.visible]!r} hides every {kind.title} from this process"


def _why_not(kind: DeviceKind) -> str:
    if said := hidden(kind):
        return said
    return package_problem(kind) or f"torch sees no {kind.title} here" + f", with {kind.package}" * bool(kind.package)


def _remedy(kind: DeviceKind) -> str:
    if hidden(kind):
        return f"unset it, or use device={HOST!r}"
    # What is wrong with a package says its remedy.
    return "or use device='cpu'" if package_problem(kind) else f"use device='cpu', or {kind.remedy}"
