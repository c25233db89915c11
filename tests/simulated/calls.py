"""What ranks ask of each other on simulated devices, and what they get for it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated.accelerator import LIBRARY

if TYPE_CHECKING:
    from simulated.nccl import FakeNccl

SILENT = os.environ.get("SIMULATED_ABORTED") == "silent"
RECORDS = os.environ.get("SIMULATED_RECORDS", "")


@dataclass
class Call:
    """What a rank asks of the others.

    Attributes:
        name: of the call.
        own: what of it must be equal on all ranks.
        gives, takes: this rank's tensors, which lie on the device.
        finish: writes what comes out, given what each rank has given, as tensors of the host.
        peer: of a call between two ranks alone; else None.
    """

    name: str
    own: dict[str, Any]
    gives: list[Tensor]
    takes: list[Tensor]
    finish: Callable[[list[list[Tensor]], list[Tensor]], None]
    peer: int | None = None
    timeout_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def said(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.own.items())})"


class Work(dist._Work):  # type: ignore[misc]
    """What a call returns: `wait()` lets the current stream wait, and not the host."""

    def __init__(self, group: FakeNccl, calls: Sequence[Call], gate: int, event: Any, blocks: bool = False) -> None:
        super().__init__()
        self.error = ""
        self.calls = calls
        self.ended = threading.Event()
        self._result: torch.futures.Future[int] = torch.futures.Future()
        self._group, self._gate, self._event, self._blocks = group, gate, event, blocks

    @property
    def open(self) -> bool:
        return bool(LIBRARY.fake_is_open(self._gate))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._raise()
        self._event.wait(torch.accelerator.current_stream(self._group.device))
        if timeout and timeout.total_seconds() > 0 and not self.ended.wait(timeout.total_seconds()):
            raise dist.DistBackendError(f"{self.calls[0].said()} is not done after {timeout.total_seconds():g} s")
        if self._blocks:
            self._event.synchronize()
            self._raise()
        return True

    synchronize = wait

    def _raise(self) -> None:
        # With real NCCL nothing is raised here: what was aborted holds no numbers, and the program goes on.
        if self.error and not SILENT:
            raise dist.DistBackendError(self.error)

    def end(self) -> None:
        """Says that it is done, or has failed."""
        self.ended.set()
        self._result.set_result(2 if self.error else 0)

    def get_future_result(self) -> torch.futures.Future[int]:
        """Torch's WorkResult: 2 of a communicator that has failed."""
        return self._result

    def is_completed(self) -> bool:
        return self.open

    def is_success(self) -> bool:
        return self.open and not self.error

    def exception(self) -> Exception | None:
        return dist.DistBackendError(self.error) if self.error else None

    def result(self) -> list[Tensor]:
        return [tensor for call in self.calls for tensor in call.takes]

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


def near(tensor: Tensor) -> Tensor:
    """A view of a device's memory for the host, which no stream sees."""
    with torch.no_grad():
        return torch.ops.headrace_fake.view_of(tensor.detach())


def spoil(tensor: Tensor) -> None:
    """What a collective that did not end leaves."""
    tensor.view(-1).view(torch.uint8).fill_(0xFF)


def shape_of(tensor: Tensor, **more: object) -> dict[str, Any]:
    return {"sizes": list(tensor.shape), "dtype": str(tensor.dtype), **more}


def operation(opts: Any) -> str:
    kind = dist.ReduceOp.RedOpType
    op = getattr(opts, "reduceOp", None)
    named = {kind.SUM: "sum", kind.AVG: "avg", kind.MAX: "max", kind.MIN: "min", kind.PRODUCT: "product"}
    return "sum" if op is None else next(name for each, name in named.items() if op == each)


def reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks, so that all have the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in ("sum", "avg"):
            total += tensor
        elif op == "product":
            total *= tensor
        else:
            total = torch.maximum(total, tensor) if op == "max" else torch.minimum(total, tensor)
    return total / len(tensors) if op == "avg" else total


def require_times(whole: Tensor, part: Tensor, world: int) -> None:
    if whole.numel() != world * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{world} ranks of {part.numel()} elements of {part.dtype} are no {whole.numel()} of {whole.dtype}"
        )


def record(group: FakeNccl, call: Call, sent: float, batch: int | None) -> None:
    """Writes a call down: one line of JSON, in a file a process."""
    if not RECORDS:
        return
    tensors = call.gives or call.takes
    told = {
        "at": time.monotonic(), "call": call.name, "rank": group.members[group.rank()], "members": group.members,
        "sent": sent, "batch": batch,
        "bytes": sum(tensor.nbytes for tensor in tensors), "dtype": str(tensors[0].dtype), **call.own,
    }  # fmt: skip
    if call.peer is not None:
        told["peer"] = group.members[call.peer]
    with open(os.path.join(RECORDS, f"calls.{os.getpid()}"), "a") as file:
        file.write(json.dumps(told) + "\n")
