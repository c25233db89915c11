"""What a rank does on one of several hosts: `hosts_script.py DEED [VICTIM]`; prints facts as JSON lines."""

from __future__ import annotations

import dataclasses
import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import headrace as hr
from engine.networks import go_there
from engine.ranks import TESTS, errors_said, say, total
from engine.victims import INPUTS, TARGETS, make_job, make_job_in_turns, split_model
from headrace.spec.events import Stepped

RANK, HOST = int(os.environ["RANK"]), os.environ["HEADRACE_HOST"]


def tell(run: hr.Run) -> None:
    say(
        hosts=[role.host for role in run.plan.roles],
        total=total(run.model),
        status=run.status,
        of=run.summary.started.examples_per_epoch,
        files=sorted(os.listdir(run.run_dir)),
        examples=sum(event.examples for event in run.events if isinstance(event, Stepped) and event.rank == RANK),
    )


def fit() -> None:
    """With a directory for all, then one for each."""
    tell(hr.fit(make_job(epochs=2, eval_data=(INPUTS, TARGETS)), "mirrored", run_dir="run"))
    tell(hr.fit(make_job(epochs=2), hr.Mirrored(overlap=False)))


def average() -> None:
    """Every round, which with plain SGD is what one device does; then a run that goes on in the middle of a period."""
    tell(hr.fit(make_job(epochs=2), hr.ParameterAveraging(period=1)))
    tell(hr.fit(make_job(epochs=2), hr.DiLoCo(period=5)))
    job = make_job(epochs=1, eval_data=(INPUTS, TARGETS))
    tell(hr.fit(job, hr.DiLoCo(period=5, codec="int8"), run_dir="run"))


def gossip() -> None:
    """With neighbours that are drawn in each round, and on a ring, from a checkpoint."""
    job = functools.partial(make_job, eval_data=(INPUTS, TARGETS))
    tell(hr.fit(job(epochs=2), hr.Gossip(topology="random")))
    hr.fit(job(epochs=1), hr.Gossip(), run_dir="run")
    tell(hr.fit(job(epochs=2), hr.Gossip(), run_dir="run", resume=True))


def hybrid() -> None:
    """Two replicas of two hosts each, with what is checked and saved; then it goes on with one of each."""
    job = make_job(model=split_model, epochs=1, eval_data=(INPUTS, TARGETS), options=hr.Options(clip_norm=0.1))
    slices = hr.TensorParallel(devices=2, rules={"0": "column", "1": "row"})
    tell(hr.fit(job, hr.Hybrid(hr.Mirrored(), slices), run_dir="run"))
    again = dataclasses.replace(job, epochs=2)
    tell(hr.fit(again, hr.TensorParallel(rules={"0": "column"}), run_dir="run", resume=True))


def fully_sharded() -> None:
    """Two hosts of two, with shares that are empty at times; then as replicas that are divided, staged, mirrored."""
    job = functools.partial(make_job, model=split_model, eval_data=(INPUTS[:9], TARGETS[:9]), global_batch_size=7)
    tell(hr.fit(job(epochs=1), hr.FullySharded(), run_dir="run"))
    replicas = hr.Hybrid(hr.Mirrored(workers=2), hr.FullySharded())
    tell(hr.fit(job(epochs=2), replicas, run_dir="run", resume=True))
    stages = hr.Hybrid(hr.FullySharded(), hr.Pipeline(stages=2, micro_batches=2))
    tell(hr.fit(job(epochs=3), stages, run_dir="run", resume=True))
    tell(hr.fit(job(epochs=4), "mirrored", run_dir="run", resume=True))


def wide_model() -> nn.Module:
    """Its gradients are too large to be gathered, so they go by a codec."""
    return nn.Sequential(nn.Linear(4, 8192), nn.Tanh(), nn.Linear(8192, 1))


def resume() -> None:
    tell(hr.fit(make_job(epochs=1), "mirrored", run_dir="run"))
    tell(hr.fit(make_job(epochs=2), "mirrored", run_dir="run", resume=True))
    slow = functools.partial(torch.optim.SGD, lr=1e-4)
    coded, wide = hr.Mirrored(codec="int8"), functools.partial(make_job, model=wide_model, optimizer=slow)
    tell(hr.fit(wide(epochs=2), coded, run_dir="whole"))
    hr.fit(wide(epochs=1), coded, run_dir="coded")
    tell(hr.fit(wide(epochs=2), coded, run_dir="coded", resume=True))


def turns() -> None:
    """With gradients that leave while backward runs, and after it; then a run that goes on, by a codec."""
    tell(hr.fit(make_job_in_turns(epochs=2), "mirrored"))
    tell(hr.fit(make_job_in_turns(epochs=2), hr.Mirrored(overlap=False)))
    wide = functools.partial(make_job_in_turns, "2", model=wide_model)
    coded = hr.Mirrored(codec="int8")
    tell(hr.fit(wide(epochs=2), coded, run_dir="whole"))
    hr.fit(wide(epochs=1), coded, run_dir="coded")
    tell(hr.fit(wide(epochs=2), coded, run_dir="coded", resume=True))


def own_data() -> None:
    """Host 0 has three quarters of it."""
    mine = slice(0, 48) if HOST == "host-0" else slice(48, None)
    data = hr.data.local(hr.data.from_arrays(INPUTS[mine], TARGETS[mine]).shuffle())
    tell(hr.fit(make_job(data=data, global_batch_size=64, epochs=5), "mirrored"))
    tell(hr.fit(make_job(data=data, global_batch_size=8, epochs=1), "mirrored"))


def apart() -> None:
    hr.fit(make_job(), "mirrored", run_dir=Path(HOST) / "run")


def one_memory() -> None:
    hr.fit(make_job(), "central_storage")


def plain_script() -> None:
    torch.manual_seed(RANK)
    model = torch.nn.Linear(4, 1)
    if RANK == 0:
        torch.nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(INPUTS, TARGETS)
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = hr.setup(model, optimizer, loader, "mirrored", encrypt=sys.argv[2:] != ["open"])
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    say(total=total(model), bias=model.bias.item())


DEEDS: dict[str, Callable[[], None]] = {
    "fit": fit,
    "average": average,
    "gossip": gossip,
    "resume": resume,
    "turns": turns,
    "hybrid": hybrid,
    "fully sharded": fully_sharded,
    "own data": own_data,
    "apart": apart,
    "one memory": one_memory,
    "plain script": plain_script,
}


def main() -> None:
    go_there()
    if sys.argv[1] not in DEEDS:
        runpy.run_path(str(TESTS / "engine" / "launched_script.py"))
        return
    with errors_said():
        DEEDS[sys.argv[1]]()


main()
