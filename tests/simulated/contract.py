"""What every strategy promises, on simulated devices: the program that trains the cells of the contract, one by one.

A cell is a strategy and a case. What came out is said as a line of JSON, by rank 0 how far it is from its reference.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import headrace as hr
from engine.ranks import say
from headrace.testing.strategies import StrategyContract as Row
from simulated.accelerator import on_device
from simulated.cells import CASES, CELLS, as_on_cpus
from strategies import references
from strategies.contract_models import COUNTS
from strategies.contract_runs import Outcome, by_hand, distance, outcome_of
from strategies.contract_runs import train as in_threads

__all__ = ["main"]


def job_of(row: Row, case: str, size: str) -> hr.Job:
    job = row.takes(CASES[case].job(COUNTS[size]))
    return dataclasses.replace(job, loss=partial(on_device, job.loss))


def train(name: str, case: str, size: str, workers: int, encrypt: bool) -> dict[str, Any]:
    """Returns how far a run is from its reference: its model, its losses, its metrics."""
    row = CELLS[name]
    job = job_of(row, case, size)
    run = hr.fit(job, row.make(workers), device="fake", check=False, encrypt=encrypt)
    if int(os.environ.get("RANK", "0")):
        return {}
    outcome, job = outcome_of(run), CASES[case].job(COUNTS[size])
    if as_on_cpus(name, case):
        reference = in_threads(row.takes(job), row.make(workers))
    else:
        reference = reference_of(row, job, workers)
    far = max((abs(one - other) for one, other in zip(outcome.losses, reference.losses, strict=True)), default=0.0)
    apart = {key: abs(outcome.metrics[key] - value) for key, value in reference.metrics.items()}
    return {
        "apart": distance({name: tensor.cpu() for name, tensor in outcome.tensors.items()}, reference.tensors),
        # Of several hosts, each has the events of its own workers.
        "losses": far if len({role.host for role in run.plan.roles}) == 1 else 0.0,
        # Of workers with models of their own they are means.
        "metrics": max(apart.values()) if row.make(workers).one_model else 0.0,
        "devices": [role.device for role in run.plan.roles],
    }


def reference_of(row: Row, job: hr.Job, workers: int) -> Outcome:
    """Returns what a plain loop trains on the CPU."""
    job = row.takes(job)
    if row.reference is not references.one_device:
        return row.reference(job, workers)
    outcome = by_hand(job)
    model = copy.deepcopy(job.model)
    assert isinstance(model, torch.nn.Module)
    assert job.loss is not None
    model.load_state_dict(dict(outcome.tensors))
    inputs, target = job.eval_data
    with torch.no_grad():
        loss = job.loss(model.eval()(inputs), target)
    mean = loss.total / loss.weight if isinstance(loss, hr.Mean) else loss
    return dataclasses.replace(outcome, metrics={"loss": float(mean)})


def main(cells: Sequence[Sequence[str]], workers: int, encrypt: bool = True, alarm_s: int = 0) -> None:
    """Trains cells, each a strategy, a case and a size."""
    torch.set_num_threads(1)
    for name, case, size in cells:
        signal.alarm(alarm_s)
        _say_what(partial(train, name, case, size, workers, encrypt), cell=name, case=case, size=size)
    signal.alarm(0)


def _say_what(act: Callable[[], dict[str, Any]], **key: str) -> None:
    try:
        said = act()
    except Exception as error:
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    say(**key, **said)
