"""The jobs of tests on Ray clusters, and what is done to them while they run."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable

import torch

import headrace as hr
from headrace.spec.events import Event


class Counter(torch.nn.Module):
    """Each example has a parameter of its own, which grows by 1 when its gradient is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -inputs @ self.count


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def counting(epochs: int) -> hr.Job:
    return hr.Job(
        model=Counter,
        loss=mean,
        optimizer=functools.partial(torch.optim.SGD, lr=16.0),
        data=(torch.eye(64), torch.zeros(64)),
        global_batch_size=16,
        epochs=epochs,
    )


def talking() -> torch.nn.Module:
    sys.stderr.write(f"a model is built with niceness {os.getpriority(os.PRIO_PROCESS, 0)}\n")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))


def digits(epochs: int = 2) -> hr.Job:
    images = hr.data.digits()
    return hr.Job(
        model=talking,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=images.train,
        eval_data=images.test,
        global_batch_size=64,
        epochs=epochs,
    )


class Deeds:
    """Does something once, when rank 1 has done so many steps; remembers where ranks are, and what was lost.

    A notice with `until` in it ends the run.
    """

    def __init__(self, deed: Callable[[Deeds], None], after: int = 10, until: str = "") -> None:
        self.hosts: list[str] = []
        self.processes: dict[int, int] = {}
        self.servers: dict[int, int] = {}
        self.lost: list[tuple[int, str]] = []
        self._deed: Callable[[Deeds], None] | None = deed
        self._after = after
        self._until = until

    def __call__(self, event: Event) -> None:
        if event.kind == "run_started":
            self.hosts = [role["host"] for role in event.plan["roles"]]
        if event.kind == "worker_started":
            self.processes[event.rank] = event.pid
        if event.kind == "server_started":
            self.servers[event.rank] = event.pid
        if event.kind == "lost":
            self.lost.append((event.lost, event.host))
        if self._until and event.kind == "notice" and self._until in event.text:
            self._until = ""
            interrupt(self)
        if event.kind == "stepped" and event.rank == 1 and event.step >= self._after and self._deed:
            deed, self._deed = self._deed, None
            deed(self)


def interrupt(deeds: Deeds) -> None:
    os.kill(os.getpid(), signal.SIGINT)
