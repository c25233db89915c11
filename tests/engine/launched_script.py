"""What a rank does under a launcher: `launched_script.py DEED [VICTIM]`; prints facts as JSON lines."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import headrace as hr
from engine.networks import cut_link
from engine.ranks import say, total
from engine.victims import long_job, make_job, two_layers
from headrace.errors import HeadraceError

RANK = int(os.environ["RANK"])
DEED, VICTIM = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1


def deeds(deed: Callable[[], None]) -> Callable[[hr.Worker], None]:
    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            if worker.round == 3 and worker.rank == VICTIM:
                time.sleep(0.1)  # the others wait in the exchange
                say(deed=DEED)
                sys.stdout.flush()
                deed()
            worker.step(batch)
            if worker.epoch_ended:
                worker.evaluate()

    return train


def fail() -> None:
    raise ValueError("planted")


DEEDS: dict[str, Callable[[], None]] = {
    "raise": fail,
    "outlive": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "cut": lambda: cut_link(VICTIM),
    "leave": lambda: os._exit(0),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def train_under(strategy: str) -> None:
    seen: list[str] = []
    run = hr.fit(make_job(model=two_layers), strategy, on_event=lambda event: seen.append(event.kind))
    say(
        workers=run.plan.workers,
        status=run.status,
        total=total(run.model),
        rate=run.throughput is not None,
        events=len(run.events),
        seen=len(seen),
        files=sorted(os.listdir(run.run_dir)),
    )


def follow() -> None:
    """Rank 0 waits in its run until it is told of an event; then it is told of one by an error of its own."""
    heard = threading.Event()

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
        if worker.rank == 0:
            assert heard.wait(30)
            say(heard=True)

    hr.launch(train, make_job(), "mirrored", on_event=lambda event: heard.set())
    hr.fit(long_job(), "mirrored", on_event=lambda event: fail())


def main() -> None:
    if DEED == "fit":
        train_under("mirrored")
        train_under("central_storage")
        train_under("pipeline")
    elif DEED == "follow":
        follow()
    elif DEED == "contradict":
        hr.fit(make_job(), hr.Mirrored(3))
    elif DEED == "nested":
        say(deed=DEED, at=time.monotonic())
        hr.fit(make_job(), hr.Hybrid(hr.Mirrored(2), hr.FullySharded(4)))
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run = hr.launch(deeds(DEEDS[DEED]), long_job(), "mirrored", timeout_s=2, run_dir="run")
        say(status=run.status, total=total(run.model))


try:
    main()
except HeadraceError as error:
    say(error=type(error).__name__, message=str(error))
    raise
except ValueError as error:
    if DEED != "outlive":
        raise
    say(error="ValueError", message=str(error))
    # Goes on with something else, and computes.
    while time.monotonic() < float(sys.argv[3]):
        pass
