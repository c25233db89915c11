"""Pipelines on simulated devices, in programs of their own: each function prints a line of JSON a run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import headrace as hr
from engine.ranks import say
from headrace.errors import PeerLost
from headrace.pipeline.schedules import SCHEDULES
from headrace.strategies import Strategy
from headrace.worker import losses
from simulated.accelerator import counted, cross_entropy
from strategies.contract_models import MODELS, VARIANTS, Case
from strategies.contract_runs import distance
from strategies.hosts_models import Deep

BATCH, EPOCHS = 8, 2
COUNT = 19
"""The last batch of an epoch has three examples."""
READS = ("items", "reads", "pinned_reads")
"""Copies from a device to the host."""


def make_job(case: Case = Case(Deep), dtype: torch.dtype = torch.float64, **changes: Any) -> hr.Job:  # noqa: B008
    job = dataclasses.replace(case, loss=cross_entropy).job(COUNT, dtype)
    return dataclasses.replace(job, global_batch_size=BATCH, epochs=EPOCHS, **changes)


def watched(folder: Path, worker: hr.Worker) -> None:
    """A loop that writes down what each step has counted; losses are read at the end."""
    losses._READ_EVERY_S = math.inf
    steps = []
    for batch in worker.batches():
        with counted() as rise:
            worker.step(batch)
        steps.append(rise)
    (folder / str(worker.rank)).write_text(json.dumps(steps))


def on_devices(
    name: str, job: hr.Job, strategy: Strategy, like: Mapping[str, torch.Tensor], encrypt: bool = True
) -> None:
    """Prints how far a run is from one device, and what its steps have read from devices, each of every rank."""
    folder = Path.cwd() / f"steps {name}"
    folder.mkdir(exist_ok=True)
    run = hr.launch(partial(watched, folder), job, strategy, device="fake", encrypt=encrypt)
    if int(os.environ.get("RANK", "0")):
        return
    steps = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    reads = [[sum(step[each] for each in READS) for step in own] for own in steps]
    waits = [[step["waits"] for step in own] for own in steps]
    apart = distance(run.model.state_dict(), like)
    say(name=name, apart=apart, reads=reads, waits=waits)


def one_device(job: hr.Job) -> Mapping[str, torch.Tensor]:
    run = hr.fit(job, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine(), check=False)
    tensors: Mapping[str, torch.Tensor] = run.model.state_dict()
    return tensors


def schedules(stages: int) -> None:
    job = make_job()
    like = one_device(job)
    for name in sorted(SCHEDULES):
        on_devices(name, job, hr.Pipeline(stages, 4, name), like)


def models(stages: int = 2) -> None:
    """What there is to sum, to weigh and to recompute."""
    for name, case, how in (
        ("tied", MODELS["tied"], hr.Pipeline(stages, 4, "1f1b")),
        ("idle", MODELS["idle"], hr.Pipeline(stages, 4, "zb_h1")),
        ("clipped", VARIANTS["clipped"], hr.Pipeline(stages, 4, recompute="always")),
        ("except last", Case(Deep), hr.Pipeline(stages, 4, "1f1b", "except_last")),
    ):
        job = make_job(case)
        on_devices(name, job, how, one_device(job))


def hybrids(encrypt: bool = True) -> None:
    """Replicas that are pipelines, on four devices."""
    job = make_job()
    like = one_device(job)
    inner = hr.Pipeline(2, 2, "1f1b")
    for outer in (hr.Mirrored(2), hr.FullySharded(2)):
        on_devices(outer.name, job, hr.Hybrid(outer, inner), like, encrypt)


def over_hosts(stages: int, encrypt: bool) -> None:
    job = make_job()
    on_devices("1f1b", job, hr.Pipeline(stages, 4, "1f1b"), one_device(job), encrypt)


def evaluated() -> None:
    """The metrics of an evaluation beside those of one device."""
    plain = make_job()
    job = dataclasses.replace(plain, eval_data=plain.data)
    one = hr.fit(job, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine(), check=False)
    run = hr.fit(job, hr.Pipeline(2, 4, "interleaved"), device="fake")
    apart = max(abs(run.metrics[name] - one.metrics[name]) for name in one.metrics)
    say(name="metrics", apart=apart, counted=len(one.metrics))


def halved() -> None:
    """Half precision beside that of one device with the same micro-batches, and beside full precision."""
    half = hr.Options(precision="fp16", clip_norm=0.3)
    job = make_job(Case(Deep, options=half), torch.float32)
    pieces = dataclasses.replace(job, options=dataclasses.replace(half, accumulate=4))
    one = hr.fit(pieces, hr.OneDevice(), device="fake").model.state_dict()
    whole = one_device(dataclasses.replace(job, options=hr.Options(clip_norm=0.3)))
    for name in ("1f1b", "zb_h1"):
        model = hr.fit(job, hr.Pipeline(2, 4, name), device="fake").model.state_dict()
        say(name=name, apart=distance(model, one), from_whole=distance(model, whole))


def die_in_the_third_round(worker: hr.Worker) -> None:
    """A loop whose last stage is killed while the others wait for it."""
    for batch in worker.batches():
        if worker.round == 2 and worker.rank == worker.world - 1:
            Path("told").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


def killed() -> None:
    """A lost stage ends the run, which goes on with fewer."""
    job, folder = make_job(), Path.cwd() / "run"
    checkpoints = hr.Checkpoints(every_steps=1)
    try:
        hr.launch(
            die_in_the_third_round, job, hr.Pipeline(3, 4), device="fake", run_dir=folder, checkpoints=checkpoints
        )
    except PeerLost as error:
        say(name="lost", after_s=time.monotonic() - float(Path("told").read_text()), error=str(error))
    run = hr.fit(job, hr.Pipeline(2, 4, "1f1b"), device="fake", run_dir=folder, resume=True)
    say(name="resumed", apart=distance(run.model.state_dict(), one_device(job)))
