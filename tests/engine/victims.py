"""Jobs, and what goes wrong in them. Workers import this module by its name, so that its globals are theirs."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import headrace as hr

NOTICED_S = 8.0
"""A process that ends is noticed by its end after 0.1 s, or seconds on a busy machine. By its silence it would be
after 10 s, if nothing else is said."""

EXAMPLES = 64
INPUTS = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True) + 0.1


def make_job(**changes: Any) -> hr.Job:
    """A job of 8 rounds an epoch that takes milliseconds."""
    plain: dict[str, Any] = {
        "model": functools.partial(nn.Linear, 4, 1),
        "task": hr.tasks.regression(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "data": (INPUTS, TARGETS),
        "global_batch_size": 8,
        "epochs": 1,
    }
    return hr.Job(**{**plain, **changes})


def lbfgs_job() -> hr.Job:
    """Three rounds of two iterations over one large batch, in double precision."""

    def model() -> nn.Module:
        return two_layers().double()

    search = functools.partial(torch.optim.LBFGS, max_iter=2, max_eval=8, line_search_fn="strong_wolfe")
    data = INPUTS.double(), TARGETS.double()
    return make_job(model=model, optimizer=search, data=data, eval_data=data, global_batch_size=EXAMPLES, epochs=3)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make_job_in_turns(last: str = "1", **changes: object) -> hr.Job:
    """One whose first layer and whose last take turns, two rounds and one."""
    sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    sets = {
        "first": hr.ParameterSet(sgd, ["0.*"], rounds=2, clip_norm=0.5),
        "last": hr.ParameterSet(sgd, [f"{last}.*"]),
    }
    losses = dict.fromkeys(sets, squared_error)
    return make_job(**{"model": split_model, "task": None, "optimizer": sets, "loss": losses, **changes})


def split_model() -> nn.Module:
    """Two layers that four devices can share."""
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def long_job(**changes: Any) -> hr.Job:
    """The same for hours, with evaluations."""
    return make_job(**{"epochs": 10**6, "eval_data": (INPUTS, TARGETS), **changes})


def rank() -> int:
    """This process's rank by the name of its log; -1 in the launcher."""
    found = re.search(r"/rank-(\d+)\.log$", os.readlink("/proc/self/fd/1"))
    return int(found[1]) if found else -1


class Faulty(nn.Linear):
    """Does `deed` in the `when`-th training step of rank `victim` (of every rank if that is None)."""

    def __init__(self, deed: Callable[[], object], victim: int | None = 1, when: int = 3) -> None:
        super().__init__(4, 1)
        self.deed, self.victim, self.when = deed, victim, when
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps == self.when and self.victim in (None, rank()):
                self.deed()
        return super().forward(inputs)


def faulty(deed: Callable[[], object], victim: int | None = 1, when: int = 3) -> Callable[[], nn.Module]:
    """Builds a `Faulty`."""
    return functools.partial(Faulty, deed, victim, when)


def fail() -> None:
    raise ValueError(f"planted at {time.monotonic()}")


def planted_at(text: str) -> float:
    """When `fail` was called, on the clock of all processes."""
    found = re.search(r"planted at ([\d.]+)", text)
    assert found, text
    return float(found[1])


def send(number: int) -> None:
    """Sends a signal to this process, and leaves the time of it beside its log."""
    mark = Path(os.readlink("/proc/self/fd/1")).with_suffix(".sent")
    mark.write_text(str(time.monotonic()))
    os.kill(os.getpid(), number)


class BadExample(Dataset[tuple[Tensor, Tensor]]):
    """Cannot read one example in training; the launcher's look at the first ones meets no harm."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == EXAMPLES - 1:
            fail()
        return INPUTS[index], TARGETS[index]


class BadStep(torch.optim.SGD):
    """Fails in its eighth step, the last of an epoch of `make_job`: where an optimizer is tried it makes fewer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps_left = 7

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.steps_left:
            fail()
        self.steps_left -= 1
        super().step(closure)


def bad_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.requires_grad:
        fail()
    return (output - target).square().mean()


def bad_loop(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == 1 and worker.round == 3:
            fail()
        worker.step(batch)


def killed_between_meetings(worker: hr.Worker) -> None:
    """Rank 1 dies when rank 0 has come to the exchange alone."""
    for batch in worker.batches():
        if worker.rank == 1 and worker.round == 3:
            time.sleep(0.2)
            send(9)
        worker.step(batch)


def killed_beside_an_error(worker: hr.Worker) -> None:
    """Rank 1 dies, when rank 0 has just had an error."""
    for batch in worker.batches():
        if worker.round == 3 and worker.rank == 1:
            time.sleep(0.2)
            send(9)
        if worker.round == 3:
            fail()
        worker.step(batch)


class Detached(nn.Linear):
    """Breaks the graph off."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).detach()


class DiesWhenEvaluated(nn.Linear):
    """Dies in rank 1's first evaluation."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and rank() == 1:
            send(9)
        return super().forward(inputs)


def dies_when_built(number: int) -> nn.Module:
    if rank() == 1:
        send(number)
    return nn.Linear(4, 1)
