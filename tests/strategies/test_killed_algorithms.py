"""A worker is killed in the middle, and the resumed run is, bit for bit, one without an interruption."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError
from strategies.contract_models import ADAM, Case, dense
from strategies.test_parameter_averaging import MOMENTUM

STRATEGIES = {
    "power_sgd": hr.Aggregated(2, by=hr.PowerSGD(1)),
    "top_k": hr.Aggregated(2, by=hr.TopK(0.2)),
    "sign_sgd": hr.Aggregated(2, by=hr.SignSGD(0.9)),
    "int8": hr.Aggregated(2, by="int8"),
    "slow_mo": hr.LocalSGD(2, period=3, outer=hr.SlowMo()),
    "fed_prox": hr.FedProx(2, period=3, outer=hr.FedAdam(0.05)),
    "local_adam": hr.LocalAdam(2, period=3),
    "median": hr.ParameterAveraging(2, period=3, mean="trimmed_mean"),
    "gossip after": hr.Gossip(2, mix="after"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_a_kill_interrupts_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    case = Case(dense, optimizer=ADAM if name == "local_adam" else MOMENTUM)
    job = dataclasses.replace(case.job(60), global_batch_size=10, epochs=6, eval_data=None)
    pids: dict[int, int] = {}

    def kill(event: Any) -> None:
        if event.kind == "worker_started":
            pids[event.rank] = event.pid
        # Each worker that steps alone says it.
        if event.kind == "stepped" and event.step == 20 and 1 in pids:
            os.kill(pids.pop(1), signal.SIGKILL)

    often: Any = {"checkpoints": hr.Checkpoints(every_steps=1, every_s=None)}
    with LocalEngine() as engine:
        with pytest.raises(HeadraceError, match="rank 1"):
            hr.fit(job, STRATEGIES[name], engine=engine, run_dir=tmp_path / "killed", on_event=kill, **often)
        resumed = hr.fit(job, STRATEGIES[name], engine=engine, run_dir=tmp_path / "killed", resume=True, **often)
        whole = hr.fit(job, STRATEGIES[name], engine=engine, run_dir=tmp_path / "whole", **often)
    assert resumed.summary.steps == 36
    assert all(torch.equal(each, whole.model.state_dict()[key]) for key, each in resumed.model.state_dict().items())
