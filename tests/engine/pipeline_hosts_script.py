"""What a rank of a pipeline over hosts does: `pipeline_hosts_script.py DEED ARGUMENTS`; prints facts as JSON lines.

"train" takes runs, each a directory, a case of the contract and a strategy; any other deed is done in the fourth round
by the rank that follows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

import headrace as hr
from engine.networks import go_there, part
from engine.ranks import errors_said, say
from headrace.spec.events import WorkerEnded
from strategies.hosts_models import BEGUN, CASES, MICRO_BATCH, job, sent_bytes, watched

RANK = int(os.environ["RANK"])


def train(directory: str, case: str, strategy: str, **changes: object) -> None:
    resume = bool(changes.pop("resume", False))
    wanted = dataclasses.replace(job(CASES[case]), **changes)
    run = hr.fit(wanted, strategy, device="cpu", run_dir=directory, resume=resume)
    moved = [event.moved_bytes for event in run.events if isinstance(event, WorkerEnded) and event.rank == RANK]
    say(hosts=[role.host for role in run.plan.roles], partition=run.plan.partition, metrics=run.metrics, moved=moved)


def leave() -> None:
    """Ends the loop early, and lives on."""
    raise StopIteration


DEEDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "leave": leave,
    "part": lambda: part(1, 2),
}


def loop(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 3 and worker.rank == int(sys.argv[2]):
            time.sleep(0.1)  # the others wait for its activations
            say(deed=sys.argv[1])
            sys.stdout.flush()
            try:
                DEEDS[sys.argv[1]]()
            except StopIteration:
                return
        worker.step(batch)


def count() -> None:
    """Counts what is sent in the second of two rounds of four micro-batches."""

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            BEGUN.clear()
            before = sent_bytes()
            worker.step(batch)
            sent = sent_bytes() - before
        say(sent=sent)
        say(begun=[each - before for each in BEGUN])

    inputs = torch.randn(8 * MICRO_BATCH, 64)
    data = inputs, inputs[:, :4].contiguous()
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    task = hr.tasks.regression()
    wanted = hr.Job(model=watched, task=task, optimizer=sgd, data=data, global_batch_size=4 * MICRO_BATCH, epochs=1)
    hr.launch(train, wanted, hr.Pipeline(micro_batches=4, partition=[1, 1]), device="cpu")


def main() -> None:
    go_there()
    if sys.argv[1] == "count":
        count()
        return
    if sys.argv[1] == "train":
        for directory, case, strategy, changes in json.loads(sys.argv[2]):
            train(directory, case, strategy, **changes)
        return
    long = dataclasses.replace(job(CASES["mlp"]), epochs=10**6)
    run = hr.launch(loop, long, sys.argv[3], device="cpu", timeout_s=1.5, run_dir="run")
    say(status=run.status)


with errors_said():
    main()
