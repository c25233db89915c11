"""What every strategy promises, on simulated devices: the program that trains the cells of the contract, one by one.

A cell is a strategy and a case. What came out is said as a line of JSON, by rank 0 how far it is from its reference.
"""

from __future__ import annotations

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
from simulated.accelerator import on_device
from strategies.contract_checks import DOUBLE, Row
from strategies.contract_models import COUNTS, MODELS, VARIANTS, Case
from strategies.contract_runs import distance, outcome_of
from strategies.test_contract import KINDS

__all__ = ["CASES", "CELLS", "DOUBLE", "main"]

PLAIN = partial(torch.optim.SGD, lr=0.05)

ALONE = ("one_device", "downpour", "sandblaster", "parameter_server-asynchronous")
"""Of one worker, or of numbers that no two runs share: test_mixed_devices.py has them."""

CELLS: dict[str, Row] = {
    **{name: row for name, row in KINDS.items() if name not in ALONE},
    "mirrored without overlap": Row(partial(hr.Mirrored, overlap=False)),
    "pipeline-1f1b": Row(partial(hr.Pipeline, micro_batches=2, schedule="1f1b"), whole=False),
    "pipeline-gpipe": Row(partial(hr.Pipeline, micro_batches=2, schedule="gpipe"), whole=False),
    "hybrid of stages": Row(lambda workers: hr.Hybrid(hr.Mirrored(workers // 2), hr.Pipeline(2, micro_batches=1))),
    "local_sgd": Row(partial(hr.LocalSGD, period=3), KINDS["parameter_averaging"].reference),
}
"""The rows of the contract, and what else there is on accelerators, by the number of workers."""

CASES: dict[str, Case] = {**MODELS, **VARIANTS}


def job_of(row: Row, case: str, size: str) -> hr.Job:
    job = CASES[case].job(COUNTS[size])
    return row.takes(dataclasses.replace(job, loss=partial(on_device, job.loss)))


def train(name: str, case: str, size: str, workers: int, encrypt: bool) -> dict[str, Any]:
    """Returns how far a run is from its reference: its model, its losses, its metrics."""
    row = CELLS[name]
    job = job_of(row, case, size)
    run = hr.fit(job, row.make(workers), device="fake", check=False, encrypt=encrypt)
    if int(os.environ.get("RANK", "0")):
        return {}
    outcome, reference = outcome_of(run), row.reference(row.takes(CASES[case].job(COUNTS[size])), workers)
    far = max((abs(one - other) for one, other in zip(outcome.losses, reference.losses, strict=True)), default=0.0)
    apart = {key: abs(outcome.metrics[key] - value) for key, value in reference.metrics.items()}
    return {
        "apart": distance({name: tensor.cpu() for name, tensor in outcome.tensors.items()}, reference.tensors),
        "losses": far,
        # Of workers with models of their own they are means.
        "metrics": max(apart.values()) if row.make(workers).one_model else 0.0,
        "devices": [role.device for role in run.plan.roles],
    }


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
