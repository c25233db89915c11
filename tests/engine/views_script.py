"""What a rank of elastic workers on several hosts does: `views_script.py TRAINS DEED VICTIM LEAST`.

It prints facts. The victim is struck in round 7, and the others go on. TRAINS is "counts" for a model whose
parameters count how often each example was used, "bits" for one in which every trace of a spoilt round shows.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch

import headrace as hr
from engine.elastic_loops import ROUND, job, plant
from engine.networks import cut_link, go_there
from engine.ranks import errors_said, say, total
from engine.test_elastic import EXAMPLES, counting_job

COUNTS, DEED = sys.argv[1] == "counts", sys.argv[2]
VICTIM, LEAST = int(sys.argv[3]), int(sys.argv[4])
RANK = int(os.environ["RANK"])


def fail() -> None:
    raise RuntimeError("an error of the user's")


DEEDS: dict[str, Callable[[hr.Worker], object]] = {
    "none": lambda _: None,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    # Between two rounds.
    "leave": lambda _: os._exit(0),
    "return": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "cut": lambda _: cut_link(int(os.environ["HEADRACE_HOST"].removeprefix("host-"))),
    "sum": lambda worker: plant("while it sums", worker),
    "update": lambda worker: plant("in its update", worker),
    "fail": lambda _: fail(),
}


def train(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == VICTIM and worker.round == ROUND and not worker._session.is_replacement:
            say(struck=True)
            DEEDS.get(DEED, DEEDS["none"])(worker)
        if DEED == "return" and worker.round > ROUND and worker.world < 3:
            # So that one that comes back finds the others at work.
            time.sleep(0.2)
        worker.step(batch)
        if worker.rank == VICTIM and worker.round == ROUND and DEED == "leave after":
            os._exit(0)
        if worker.evaluation_due:
            worker.evaluate()


def main() -> None:
    go_there()
    if DEED == "return" and RANK == VICTIM and (first := os.fork()):
        # Comes back as soon as the first process has ended.
        _, status = os.waitpid(first, 0)
        say(ended=os.waitstatus_to_exitcode(status))
    data = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    with errors_said():
        run = hr.launch(
            train,
            counting_job(10, eval_data=data) if COUNTS else job(),
            hr.Mirrored(min_workers=LEAST),
            timeout_s=2,
            run_dir="run",
            checkpoints=hr.Checkpoints(every_steps=5, every_s=None),
        )
    said = [event.text for event in run.events if event.kind == "notice"]
    lost = [event.line for event in run.events if event.kind == "lost"]
    off = (run.model.count - 10).abs().max().item() if COUNTS else 0.0  # type: ignore[operator]
    say(total=total(run.model), off=off, said=said, lost=lost)


main()
