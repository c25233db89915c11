"""What a rank does where servers are on several hosts: `server_hosts_script.py DEED`; prints facts as JSON lines."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import headrace as hr
from engine.networks import cut_link, go_there, part
from engine.ranks import errors_said, say, total, until
from engine.victims import INPUTS, TARGETS, lbfgs_job, make_job, split_model

RANK = int(os.environ["RANK"])


def tell(run: hr.Run) -> None:
    say(total=total(run.model), status=run.status, loss=run.metrics.get("loss", 0.0))


def fit() -> None:
    """What equals one device, with what is checked and saved; then the others."""
    strategies = (
        hr.ParameterServer(staleness_bound=0),
        hr.ParameterAveraging(period=1, via="server"),
        hr.ParameterServer(push_codec="int8", pull_codec="bf16"),
        hr.Downpour(fetch_every=1, push_every=1),
    )
    for number, strategy in enumerate(strategies):
        tell(hr.fit(make_job(epochs=2, eval_data=(INPUTS, TARGETS)), strategy, run_dir=f"run-{number}"))


def search() -> None:
    """L-BFGS, whose portions and steering two hosts share."""
    tell(hr.fit(lbfgs_job(), hr.Sandblaster(portions=6)))


def replicas() -> None:
    """Replicas of two ranks, on one host or on two; each part has a server."""
    outer = hr.ParameterServer(servers=2, staleness_bound=0)
    for inner in (hr.Pipeline(stages=2), hr.TensorParallel(devices=2)):
        tell(hr.fit(make_job(model=split_model), hr.Hybrid(outer, inner)))


def holds_all(worker: hr.Worker, server: int = 2) -> bool:
    """Returns whether a server has told this rank that its backup holds all that it has."""
    ranks = worker._session.page.ranks
    return ranks[server].heartbeat.promotable_epoch == ranks[worker._session.run.plan.servers[0]].server_view.epoch > 0


def fail_over(strike: Callable[[], object]) -> None:
    """Rank 0 strikes the primary, which is rank 2, when its backup holds all that it has."""

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.rank == 0 and worker.round == 40:
                assert until(partial(holds_all, worker), 30)
                say(struck=True)
                strike()

    Path(f"pid-{RANK}").write_text(str(os.getpid()))
    strategy = hr.ParameterServer(staleness_bound=0, backups=1)
    job = make_job(steps=80, epochs=None)
    run = hr.launch(train, job, strategy, timeout_s=1, run_dir="run")
    tell(run)
    say(lost=[event.line for event in run.events if event.kind == "lost"])


def kill() -> None:
    fail_over(lambda: os.kill(int(Path("pid-2").read_text()), signal.SIGKILL))


def cut() -> None:
    fail_over(partial(cut_link, 1))


def come_back() -> None:
    """Rank 0 kills both servers in turn; the first one is started again, and holds all when the second is killed."""
    if RANK == 2 and (first := os.fork()):
        os.waitpid(first, 0)
    Path(f"pid-{RANK}").write_text(str(os.getpid()))
    victims = {40: 2, 60: 3}

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.rank == 0 and (victim := victims.get(worker.round)):
                assert until(partial(holds_all, worker, victim), 30)
                say(struck=victim)
                os.kill(int(Path(f"pid-{victim}").read_text()), signal.SIGKILL)

    job = make_job(steps=80, epochs=None)
    run = hr.launch(train, job, hr.ParameterServer(staleness_bound=0, backups=1), timeout_s=1, run_dir="run")
    tell(run)
    say(lost=[event.line for event in run.events if event.kind == "lost"])
    say(notices=[event.text for event in run.events if event.kind == "notice"])


def cut_workers() -> None:
    """Rank 0 cuts the other two workers from each other; they train for twice the timeout after that."""

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            if worker.rank == 0 and worker.round == 10:
                part(1, 2)
            if worker.rank == 0 and worker.round >= 10:
                time.sleep(0.05)
            worker.step(batch)
            if worker.evaluation_due:
                worker.evaluate()

    job = make_job(steps=50, epochs=None, global_batch_size=9, eval_data=(INPUTS, TARGETS))
    run = hr.launch(train, job, hr.ParameterServer(staleness_bound=0), timeout_s=1, run_dir="run")
    tell(run)


def cut_server(backups: int) -> None:
    """Rank 0 cuts the server from the worker on another host, or from its backup that holds all that it has."""

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            if worker.rank == 0 and worker.round == 10:
                assert not backups or until(partial(holds_all, worker, 1), 30)
                part(1, 2)
                say(struck=True)
            worker.step(batch)

    strategy = hr.ParameterServer(staleness_bound=0, backups=backups)
    tell(hr.launch(train, make_job(steps=30, epochs=None), strategy, timeout_s=1, run_dir="run"))


DEEDS: dict[str, Callable[[], None]] = {
    "fit": fit,
    "search": search,
    "replicas": replicas,
    "kill": kill,
    "cut": cut,
    "return": come_back,
    "part": cut_workers,
    "part-server": partial(cut_server, 0),
    "part-backup": partial(cut_server, 1),
}


def main() -> None:
    go_there()
    with errors_said():
        DEEDS[sys.argv[1]]()


main()
