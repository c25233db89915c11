"""What a rank of elastic workers on several hosts does: `views_script.py TRAINS DEED VICTIM LEAST [STRATEGY]`.

It prints facts. The victim is struck in round 7, and the others go on. TRAINS is "counts" for a model whose
parameters count how often each example was used, "bits" for one in which every trace of a spoilt round shows.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headrace as hr
from engine.counting import EXAMPLES, counting_job
from engine.elastic_loops import ROUND, job, plant
from engine.networks import cut_link, go_there
from engine.ranks import errors_said, say, total, until
from headrace.api import launched
from headrace.engine.local.scaling import ask_for_states, ask_for_workers

STRATEGIES: dict[str, Callable[..., hr.Strategy]] = {
    "mirrored": hr.Mirrored,
    "central_storage": hr.CentralStorage,
    "averaging": functools.partial(hr.ParameterAveraging, period=4),
}

COUNTS, DEED = sys.argv[1] == "counts", sys.argv[2]
VICTIM, LEAST = int(sys.argv[3]), int(sys.argv[4])
STRATEGY = STRATEGIES[sys.argv[5] if len(sys.argv) > 5 else "mirrored"]
RANK = int(os.environ["RANK"])


def fail() -> None:
    raise RuntimeError("an error of the user's")


DEEDS: dict[str, Callable[[hr.Worker], object]] = {
    "none": lambda _: None,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    # Between two rounds.
    "leave": lambda _: os._exit(0),
    "leaders": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "both": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "return": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "succeed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "cut": lambda _: cut_link(int(os.environ["HEADRACE_HOST"].removeprefix("host-"))),
    "sum": lambda worker: plant("while it sums", worker),
    "update": lambda worker: plant("in its update", worker),
    "fail": lambda _: fail(),
    "ask": lambda _: ask(),
}

GOES_BACK = ("return", "succeed")


def ask() -> None:
    """Asks, as a user would, what workers there are, that one leaves, and how another one joins."""
    run_dir = Path("run").absolute()

    def act() -> None:
        say(states=[(each.rank, each.process, each.state) for each in ask_for_states(run_dir)])
        say(told=ask_for_workers(run_dir, -1))

    threading.Thread(target=act, daemon=True).start()


def come_back() -> None:
    """Lets a child do what this process was to do; when it has ended, this one is started again by its launcher."""
    first = os.fork()
    if first:
        _, status = os.waitpid(first, 0)
        say(ended=os.waitstatus_to_exitcode(status))


def end_second_leader() -> None:
    """Ends the one that leads instead of rank 0: at once, or when it serves the store that others would look for."""
    file = Path("run/leader.json")
    assert DEED == "both" or until(lambda: file.exists() and json.loads(file.read_text())["rank"] == 1, 20)
    say(struck=True)
    os.kill(os.getpid(), signal.SIGKILL)


def end_late() -> None:
    """Lets the one that leads instead of rank 0 write the run's end when the others could have read it long ago."""
    write = launched._Successor.__exit__

    def write_late(*given: Any) -> None:
        time.sleep(0.5)
        write(*given)

    launched._Successor.__exit__ = write_late  # type: ignore[method-assign]


def train(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == VICTIM and worker.round == ROUND and not worker._session.is_replacement:
            say(struck=True)
            DEEDS.get(DEED, DEEDS["none"])(worker)
        if DEED in ("leaders", "both") and worker.rank == 1 and worker.round == ROUND + 2:
            end_second_leader()
        if DEED in GOES_BACK and worker.round > ROUND and worker.world < 3:
            # So that one that comes back finds the others at work.
            time.sleep(0.2)
        if DEED == "ask" and worker.round > ROUND and worker.world == 3:
            time.sleep(0.1)
        worker.step(batch)
        if worker.rank == VICTIM and worker.round == ROUND and DEED == "leave after":
            os._exit(0)
        if worker.evaluation_due:
            worker.evaluate()
    # By place in the group, which other members than at the start have.
    say(places=worker._session.group.views.now.ends.names)


def main() -> None:
    go_there()
    if DEED in GOES_BACK and RANK == VICTIM:
        come_back()
    if DEED in ("succeed", "kill"):
        end_late()
    data = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    with errors_said():
        run = hr.launch(
            train,
            counting_job(10, eval_data=data) if COUNTS else job(),
            STRATEGY(min_workers=LEAST),
            timeout_s=2,
            run_dir="run",
            checkpoints=hr.Checkpoints(every_steps=5, every_s=None),
        )
    said = [event.text for event in run.events if event.kind == "notice"]
    lost = [event.line for event in run.events if event.kind == "lost"]
    off = (run.model.count - 10).abs().max().item() if COUNTS else 0.0  # type: ignore[operator]
    say(total=total(run.model), off=off, said=said, lost=lost, summary=run.summary.status)


main()
