"""What a rank does under a launcher whose last rank serves: `served_script.py DEED [VICTIM]`; prints JSON lines."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

import headrace as hr
from engine.victims import BadStep, long_job, make_job, split_model
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.errors import HeadraceError

RANK = int(os.environ["RANK"])
DEED, VICTIM = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
STRATEGY = hr.ParameterServer(servers=1, staleness_bound=0)


def say(**facts: object) -> None:
    print(json.dumps({"at": time.monotonic(), **facts}))  # noqa: T201
    sys.stdout.flush()


def total(model: torch.nn.Module) -> float:
    return float(sum(tensor.double().sum() for tensor in model.state_dict().values()))


def at_round(number: int, deed: Callable[[], None]) -> Callable[[hr.Worker], None]:
    """The usual loop, but that rank 0 does a deed in a round, once: it may take over a lost worker's part of it."""

    def train(worker: hr.Worker) -> None:
        due = worker.rank == 0
        for batch in worker.batches():
            if worker.round == number and due:
                due = False
                say(deed=DEED)
                deed()
            worker.step(batch)
            if worker.evaluation_due:
                worker.evaluate()

    return train


def signal_to(number: int) -> Callable[[], None]:
    """Sends the victim a signal; every rank has left its process's id."""

    def deed() -> None:
        with open(f"pid-{VICTIM}") as file:
            os.kill(int(file.read()), number)

    return deed


def main() -> None:
    with open(f"pid-{RANK}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"pid-{RANK}.part", f"pid-{RANK}")
    if DEED == "fit":
        for strategy in (STRATEGY, hr.ParameterServer(servers=1), "mirrored"):
            run = hr.fit(make_job(), strategy)
            say(status=run.status, workers=run.plan.workers, total=total(run.model), metrics=run.metrics)
    elif DEED == "replicas":
        outer = hr.ParameterServer(servers=2, staleness_bound=0)
        for inner in (hr.Pipeline(stages=2), hr.TensorParallel(devices=2)):
            run = hr.fit(make_job(model=split_model), hr.Hybrid(outer, inner))
            say(status=run.status, workers=run.plan.workers, total=total(run.model), metrics=run.metrics)
    elif DEED == "late":
        if RANK == VICTIM:
            agree = LaunchedGroup.agree
            LaunchedGroup.agree = lambda group, text: (time.sleep(1.0), agree(group, text))[1]  # type: ignore[method-assign]
        say(status=hr.fit(make_job(), STRATEGY).status)
    elif DEED == "contradict":
        hr.fit(make_job(), hr.ParameterServer(workers=3, servers=1))
    elif DEED == "raise":
        say(deed=DEED)
        hr.fit(make_job(optimizer=BadStep), STRATEGY)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}[DEED]
        run = hr.launch(at_round(3, signal_to(number)), long_job(), STRATEGY, timeout_s=1, run_dir="run")
        say(status=run.status, total=total(run.model), steps=run.summary.steps)


try:
    main()
except HeadraceError as error:
    say(error=type(error).__name__, message=str(error))
    raise
