"""What a rank does where a worker on another host is lost: `lost_workers_script.py DEED STRATEGY`; prints facts."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from engine.networks import cut_link, go_there
from engine.ranks import errors_said, say, until

DEED = sys.argv[1]
RANK, VICTIM = int(os.environ["RANK"]), 1
EXAMPLES, EPOCHS = 48, 12
STRATEGIES = {
    "parameter_server": hr.ParameterServer(),
    "in_step": hr.ParameterServer(staleness_bound=0),
    "downpour": hr.Downpour(fetch_every=1, push_every=1),
    "hybrid": hr.Hybrid(hr.ParameterServer(workers=2), hr.TensorParallel(devices=2)),
}


class Counter(nn.Module):
    """Each example adds 1 to its own parameter, whenever its gradient is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(EXAMPLES))

    def forward(self, inputs: Tensor) -> Tensor:
        return -inputs @ self.count


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def cut() -> None:
    cut_link(VICTIM)
    # Lives on, until the test ends it.
    signal.pause()


DEEDS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "cut": cut,
    "return": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "twice": bool,
}


def is_back() -> bool:
    """Returns whether another process has begun in the victim's place."""
    return Path(f"run/events/rank-{VICTIM}.jsonl").read_text().count('"worker_started"') == 2


def train(worker: hr.Worker) -> None:
    for taken, batch in enumerate(worker.batches()):
        if worker.rank == VICTIM and taken == 4 and not worker._session.is_replacement:
            # With a lease whose gradient is not pushed yet.
            say(struck=True)
            DEEDS[DEED]()
        if worker.rank == 0 and taken == 8 and DEED == "return":
            assert until(is_back, 30)
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()


def main() -> None:
    go_there()
    if DEED == "twice" and RANK == VICTIM:
        os.fork()
    if DEED == "return" and RANK == VICTIM and (first := os.fork()):
        # Comes back as soon as the first process has ended.
        _, status = os.waitpid(first, 0)
        say(ended=os.waitstatus_to_exitcode(status))
    inputs, targets = torch.eye(EXAMPLES), torch.zeros(EXAMPLES)
    job = hr.Job(
        model=Counter,
        loss=mean,
        optimizer=functools.partial(torch.optim.SGD, lr=24.0),
        data=(inputs, targets),
        eval_data=(inputs, targets),
        global_batch_size=24,
        epochs=EPOCHS,
    )
    with errors_said():
        run = hr.launch(train, job, STRATEGIES[sys.argv[2]], timeout_s=1, run_dir="run")
    counts = run.model.get_parameter("count").tolist()
    own = [event.kind for event in run.events if event.rank == VICTIM]
    steps = own[::-1].index("worker_started") if "worker_started" in own else 0
    say(counts=sorted(set(counts)), steps=steps, lost=[event.line for event in run.events if event.kind == "lost"])


main()
