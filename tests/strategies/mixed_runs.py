"""Runs with workers on a fake accelerator and on CPUs, in a program of its own: `main` prints what came out as JSON.

What came out is, by the name of a case, its numbers: for example how far the model is from that of one device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headrace as hr
from engine.networks import go_there
from engine.ranks import say
from headrace.engine.local.scaling import ask_for_workers
from headrace.report.model.training import StepTimes
from headrace.report.views.answers import workers_answer
from headrace.report.views.table import run_rows
from headrace.spec.events import Event, SharesBalanced, Stepped, WorkerStarted
from headrace.strategies import Strategy
from simulated.accelerator import cross_entropy
from strategies.contract_models import ADAM, Case, Tied, dense, normalised, text, vectors
from strategies.contract_runs import distance

HOST, FAKE = "cpu", "fake:0"
BOTH = (FAKE, HOST)
THREADS = hr.ThreadEngine()
SYNC = hr.Options(batch_norm="sync", clip_norm=0.3)
CLIPPED = hr.Options(clip_norm=0.3)
PLAIN = partial(torch.optim.SGD, lr=0.05)


def many(count: int) -> tuple[Tensor, Tensor]:
    x, _ = vectors(count)
    return x, (x.sum(1) > 0).long()


def make_job(
    case: Case = Case(dense),  # noqa: B008  (frozen)
    count: int = 11,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> hr.Job:
    return dataclasses.replace(dataclasses.replace(case, loss=cross_entropy).job(count, dtype), **changes)


def apart(
    job: hr.Job,
    strategy: Strategy,
    devices: Sequence[str],
    like: Strategy | None = None,
    engine: hr.Engine | None = THREADS,
) -> dict[str, Any]:
    """Returns how far a run's model is from the one of another strategy on CPUs; of one device, if there is none."""
    run = hr.fit(job, strategy, device=devices, check=False, engine=engine)
    reference = hr.fit(job, like or hr.OneDevice(), device=HOST, engine=THREADS, check=False)
    return {**facts(run), "apart": distance(run.model.state_dict(), reference.model.state_dict())}


def alike(job: hr.Job, make: Callable[[int], Strategy], devices: Sequence[str] = BOTH) -> dict[str, Any]:
    """Returns how far a run's model is from that of the same strategy on CPUs."""
    return apart(job, make(len(devices)), devices, make(len(devices)), engine=None)


def facts(run: hr.Run) -> dict[str, Any]:
    events, summary = list(run.events), run.summary
    # As if the second worker had computed for twice as long as the others.
    slow = dataclasses.replace(
        summary, times_by_rank={rank: StepTimes(0.0, 0.1 * (rank + 1), 0.0, 0.0, 0.0) for rank in summary.times_by_rank}
    )
    return {
        "report": dict(run_rows(summary))["processes"],
        "answer": workers_answer([slow]),
        "devices": [
            event.device for event in sorted(events, key=lambda each: each.rank) if isinstance(event, WorkerStarted)
        ],
        "kinds": run.summary.started.device,
        "stepped": sorted({event.rank for event in events if isinstance(event, Stepped) and event.examples}),
        "accuracy": run.metrics.get("accuracy"),
    }


def balanced() -> dict[str, Any]:
    job = make_job(count=64, global_batch_size=16, epochs=12)
    strategy = hr.Mirrored(balance="speed")
    run = hr.fit(job, strategy, device=BOTH, check=False)
    one = hr.fit(job, hr.OneDevice(), device=HOST, engine=THREADS, check=False)
    shares = [event.sizes for event in run.events if isinstance(event, SharesBalanced)]
    return {**facts(run), "apart": distance(run.model.state_dict(), one.model.state_dict()), "shares": shares}


def learns(strategy: Strategy) -> dict[str, Any]:
    """Returns what an asynchronous run, of which no two are alike, has learnt."""
    job = make_job(
        Case(dense, many), count=256, eval_data=None, metrics=None, global_batch_size=16, epochs=16, optimizer=PLAIN
    )
    x, y = job.data
    job = dataclasses.replace(job, eval_data=(x, y), metrics={"accuracy": hr.metrics.accuracy})
    return facts(hr.fit(job, strategy, device=BOTH, check=False))


class Hand:
    """Kills the worker on the accelerator, asks for another one when that is replaced, and ends the run with all."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._pids: dict[int, int] = {}
        self.started: list[tuple[int, str]] = []
        self._killed = self._ended = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            self._pids[event.rank] = event.pid
            self.started.append((event.rank, event.device))
            if [rank for rank, _ in self.started].count(0) == 2 and event.rank == 0:
                # Not here, because the thread that calls this gives the answer.
                threading.Thread(target=ask_for_workers, args=(self._run_dir, 1), daemon=True).start()
        elif isinstance(event, Stepped) and len(self.started) == 2 and not self._killed:
            self._killed = True
            os.kill(self._pids[0], signal.SIGKILL)
        elif isinstance(event, Stepped) and event.rank == 3 and not self._ended:
            self._ended = True
            signal.raise_signal(signal.SIGINT)


def lost_and_joined() -> dict[str, Any]:
    """A worker on the accelerator is lost and replaced, and one joins, which has rank 0's device."""
    job = make_job(Case(dense, many), count=256, eval_data=None, global_batch_size=16, epochs=10**6, optimizer=PLAIN)
    with tempfile.TemporaryDirectory() as folder:
        hand = Hand(Path(folder) / "run")
        run = hr.fit(job, hr.ParameterServer(), device=BOTH, check=False, run_dir=Path(folder) / "run", on_event=hand)
        return {"started": hand.started, "status": run.status}


def resumed() -> dict[str, Any]:
    """Saves, and goes on with the devices exchanged, then on one CPU."""
    case = Case(normalised, optimizer=ADAM, options=SYNC)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "run"
        go = partial(hr.fit, run_dir=at, check=False)
        go(make_job(case, epochs=1), hr.Mirrored(), device=BOTH, engine=THREADS)
        go(make_job(case, epochs=2), hr.Mirrored(), device=[HOST, FAKE], resume=True)
        run = go(make_job(case, epochs=3), hr.OneDevice(), device=HOST, resume=True, engine=THREADS)
        one = hr.fit(make_job(case, epochs=3), hr.OneDevice(), device=HOST, engine=THREADS, check=False)
        return {"apart": distance(run.model.state_dict(), one.model.state_dict())}


def sharded_and_resumed() -> dict[str, Any]:
    """Saves parts that lie on an accelerator, and goes on with a worker more, and on CPUs."""
    case = Case(dense, optimizer=ADAM, options=CLIPPED)
    with tempfile.TemporaryDirectory() as folder:
        go = partial(hr.fit, run_dir=Path(folder) / "run", check=False)
        go(make_job(case, epochs=1), hr.FullySharded(), device=[FAKE, FAKE])
        go(make_job(case, epochs=2), hr.FullySharded(), device=[FAKE, FAKE, FAKE], resume=True)
        run = go(make_job(case, epochs=3), hr.FullySharded(2), device=HOST, resume=True, engine=THREADS)
        one = hr.fit(make_job(case, epochs=3), hr.OneDevice(), device=HOST, engine=THREADS, check=False)
        return {"apart": distance(run.model.state_dict(), one.model.state_dict())}


def refused(strategy: Strategy, devices: Any = BOTH, engine: hr.Engine | None = None, **changes: Any) -> str:
    try:
        hr.fit(make_job(**changes), strategy, device=devices, check=False, engine=engine)
    except hr.errors.HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


CASES: Mapping[str, Callable[[], Any]] = {
    "mirrored": lambda: apart(
        make_job(Case(normalised, optimizer=ADAM, options=SYNC)), hr.Mirrored(), BOTH, engine=None
    ),
    "mirrored from the CPU": lambda: apart(make_job(Case(Tied, text)), hr.Mirrored(), [HOST, "fake:1"]),
    "two on one": lambda: apart(make_job(), hr.Mirrored(), [FAKE, FAKE, HOST]),
    "on_nonfinite": lambda: apart(make_job(Case(dense, options=hr.Options(on_nonfinite="skip"))), hr.Mirrored(), BOTH),
    "balanced": balanced,
    "synchronous servers": lambda: apart(make_job(), hr.ParameterServer(staleness_bound=0), BOTH, engine=None),
    "servers over tcp": lambda: apart(make_job(), hr.ParameterServer(staleness_bound=0, transport="tcp"), BOTH),
    "asynchronous servers": lambda: learns(hr.ParameterServer()),
    "downpour": lambda: learns(hr.Downpour(fetch_every=2, push_every=2)),
    "own steps": lambda: learns(hr.Downpour(fetch_every=2, push_every=2, overlap=False, local="optimizer")),
    "averaging": lambda: apart(make_job(optimizer=PLAIN), hr.ParameterAveraging(period=1), BOTH),
    "diloco": lambda: alike(make_job(), partial(hr.DiLoCo, period=2)),
    "easgd": lambda: alike(make_job(), partial(hr.EASGD, period=2)),
    "averaged state": lambda: alike(
        make_job(Case(normalised, optimizer=ADAM)), partial(hr.LocalSGD, period=2, average_optimizer_state=True)
    ),
    "averaging through servers": lambda: alike(make_job(), partial(hr.LocalSGD, period=2, via="server")),
    "resumed": resumed,
    "lost and joined": lost_and_joined,
    "gossip": lambda: refused(hr.Gossip()),
    "a pipeline": lambda: refused(hr.Pipeline()),
    "sharded on one": lambda: apart(make_job(Case(dense, optimizer=ADAM, options=CLIPPED)), hr.FullySharded(), [FAKE]),
    "sharded over two": lambda: apart(
        make_job(Case(normalised, optimizer=ADAM, options=SYNC)), hr.FullySharded(), [FAKE, FAKE], engine=None
    ),
    "sharded and resumed": sharded_and_resumed,
    "sharded threads": lambda: refused(hr.FullySharded(), [FAKE, FAKE], engine=THREADS),
    "fully sharded": lambda: refused(hr.FullySharded()),
    "sharded apart": lambda: refused(hr.FullySharded(), [FAKE, "fake:1"]),
    "central storage": lambda: refused(hr.CentralStorage()),
    "tensor parallel": lambda: refused(hr.TensorParallel()),
    "hybrid": lambda: refused(hr.Hybrid(hr.Mirrored(1), hr.Pipeline(2))),
    "tpu": lambda: refused(hr.TPU(compiler="eager")),
    "half precision": lambda: refused(hr.Mirrored(), dtype=torch.float32, options=hr.Options(precision="fp16")),
    "more workers": lambda: refused(hr.Mirrored(3)),
    "not here": lambda: refused(hr.Mirrored(), ["fake:7", HOST]),
    "no number": lambda: refused(hr.Mirrored(), ["fake", HOST]),
}


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, run in CASES.items():
        try:
            found[name] = run()
        except hr.errors.HeadraceError as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))  # noqa: T201


def on_a_host(devices: str) -> None:
    """What a rank does on one of two hosts, of which each names the device of its worker."""
    go_there()
    torch.set_num_threads(1)
    fit: Callable[..., hr.Run] = partial(hr.fit, device=devices, check=False)
    wide = partial(make_job, eval_data=None)
    for strategy in (
        hr.Mirrored(),
        hr.Mirrored(overlap=False),
        hr.Mirrored(codec="int8"),
        hr.LocalSGD(period=2),
        hr.LocalSGD(period=2, codec="bf16"),
    ):
        run = fit(wide(), strategy)
        say(devices=[role.device for role in run.plan.roles], model=[each.tolist() for each in run.model.parameters()])
