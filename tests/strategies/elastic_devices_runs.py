"""Elastic runs on simulated devices, in a program of its own: each says how far it is from one device."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from headrace.engine.local.scaling import ask_for_workers
from headrace.spec.events import Event, Notice, Stepped, WorkerStarted
from simulated.accelerator import cross_entropy
from strategies.contract_models import Case, dense, vectors
from strategies.contract_runs import distance

PLAIN = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def many(count: int) -> tuple[Tensor, Tensor]:
    x, _ = vectors(count)
    return x, (x.sum(1) > 0).long()


def doubled() -> nn.Module:
    return dense().double()


def make_job(**changes: Any) -> hr.Job:
    case = Case(dense, many, loss=cross_entropy, optimizer=PLAIN)
    return dataclasses.replace(
        case.job(40, torch.float64), **{"model": doubled, "eval_data": None, "metrics": None, **changes}
    )


class Late(nn.Module):
    """A model whose forward on the second device ends its process in the fifth round, after the others have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rounds = doubled(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.device.index == 1:
            self.rounds += 1
            if self.rounds == 5:
                # By now the others wait on their devices for what this one never sends.
                threading.Event().wait(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


class Killer:
    """Kills a worker when the first has done some steps."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.pids, self.texts = rank, step, dict[int, int](), list[str]()
        self.done = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            self.pids[event.rank] = event.pid
        if isinstance(event, Notice):
            self.texts.append(event.text)
        if isinstance(event, Stepped) and event.step >= self.step and self.rank in self.pids and not self.done:
            self.done = True
            os.kill(self.pids.pop(self.rank), signal.SIGKILL)


def apart(job: hr.Job, strategy: hr.Strategy, see: Callable[[Event], None]) -> dict[str, Any]:
    run = hr.fit(job, strategy, device="fake", check=False, on_event=see)
    one = hr.fit(dataclasses.replace(job, model=doubled), hr.OneDevice(), device="cpu", check=False)
    trained = {name.removeprefix("inner."): each for name, each in run.model.state_dict().items()}
    return {"apart": distance(trained, one.model.state_dict()), "status": run.status}


def in_the_middle() -> None:
    """A worker is lost while the others' devices wait for it."""
    killer = Killer(-1, 0)
    say(**apart(make_job(model=Late), hr.Mirrored(3, min_workers=2), killer), texts=killer.texts)


def first_lost() -> None:
    """The first worker is lost, and one is started in its place."""
    killer = Killer(0, 8)
    job = make_job(epochs=40)
    say(**apart(job, hr.Mirrored(2, min_workers=1, max_workers=2), killer), texts=killer.texts)


def one_more(folder: str) -> None:
    """A worker joins, and has the first one's device: what they exchange goes through host memory from then on."""
    killer, asked = Killer(-1, 0), list[int]()

    def see(event: Event) -> None:
        killer(event)
        if isinstance(event, Stepped) and event.step >= 8 and not asked:
            asked.append(1)
            # Not here, because the thread that calls this gives the answer.
            threading.Thread(target=ask_for_workers, args=(Path(folder), 1)).start()

    job = make_job(epochs=100)
    run = hr.fit(
        job, hr.Mirrored(2, min_workers=1, max_workers=3), device="fake", check=False, on_event=see, run_dir=folder
    )
    one = hr.fit(job, hr.OneDevice(), device="cpu", check=False)
    say(apart=distance(run.model.state_dict(), one.model.state_dict()), texts=killer.texts)
