"""What a rank of an elastic run on several hosts does: `views_script.py DEED RANK [MORE]`; prints facts as JSON lines."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import headrace as hr
from engine.elastic_loops import ROUND, job, plant
from engine.networks import cut_link, go_there
from engine.ranks import errors_said, say, total

RANK = int(os.environ["RANK"])
DEED, VICTIM = sys.argv[1], int(sys.argv[2])
ROUNDS = 16


def strike(worker: hr.Worker) -> None:
    match DEED:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "cut":
            say(struck=True)
            cut_link(int(os.environ["HEADRACE_HOST"].removeprefix("host-")))
        case "while it sums":
            plant(DEED, worker)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def train(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == ROUND and worker.rank == VICTIM:
            strike(worker)
        worker.step(batch)
        if worker.epoch_ended:
            worker.evaluate()


def main() -> None:
    go_there()
    Path(f"pid-{RANK}").write_text(str(os.getpid()))
    with errors_said():
        strategy = hr.Mirrored(min_workers=int(sys.argv[3]))
        run = hr.launch(train, job(ROUNDS), strategy, timeout_s=2, run_dir="run")
        said = [event.text for event in run.events if event.kind == "notice"]
        say(total=total(run.model), status=run.status, said=said, steps=run.steps if hasattr(run, "steps") else None)


main()
