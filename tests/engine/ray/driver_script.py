"""What a user's process does on a Ray cluster: `driver_script.py DEED ADDRESS FOLDER`; it says what it found."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.data
import torch

import headrace as hr
from engine.ranks import say
from engine.ray.clusters import raylet_of
from engine.ray.jobs import Deeds, counting, digits, interrupt, mean
from headrace.engine.local.scaling import ask_for_states, ask_for_workers
from headrace.engine.ray.run import RayRun
from headrace.errors import HeadraceError, WorkerFailed
from headrace.spec.events import Event

SPREAD = "STRICT_SPREAD"


class Occupant:
    """An actor of another job."""

    def ready(self) -> bool:
        return True


def kill_raylet(deeds: Deeds, rank: int = 1) -> None:
    node = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeName"] == deeds.hosts[rank])
    os.kill(raylet_of(node), signal.SIGKILL)


def kill_process(deeds: Deeds) -> None:
    os.kill(deeds.processes[1], signal.SIGKILL)


def kill_agent(deeds: Deeds) -> None:
    stat = Path(f"/proc/{deeds.processes[1]}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


def kill_rank_0(deeds: Deeds) -> None:
    os.kill(deeds.processes[0], signal.SIGKILL)


def kill_server(deeds: Deeds) -> None:
    os.kill(deeds.servers[2], signal.SIGKILL)


def total(run: hr.Run) -> float:
    return sum(float(each.double().sum()) for each in run.model.parameters())


def equal(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """The results of threads, of one node, of two, and of two and of one that do not see the run's directory."""
    runs = [hr.fit(digits(), hr.Mirrored(workers=2), engine=hr.ThreadEngine())]
    runs += [hr.fit(digits(), hr.Mirrored(workers=2), engine=engine)]
    spread = hr.RayEngine(placement=SPREAD)
    runs += [hr.fit(digits(), hr.Mirrored(workers=2), engine=spread)]
    ask = RayRun._folders

    def no_mark(self: RayRun) -> list[str]:
        self._wanted = (self._wanted[0], "no-such-mark")
        return ask(self)

    RayRun._folders = no_mark  # type: ignore[method-assign]
    runs += [hr.fit(digits(), hr.Mirrored(workers=2), engine=each) for each in (spread, engine)]
    return {
        "totals": [total(run) for run in runs],
        "accuracies": [run.metrics["accuracy"] for run in runs],
        "hosts": [sorted({role.host for role in run.plan.roles}) for run in runs],
        "kinds": [sorted({event.kind for event in run.events}) for run in runs],
        "logs": [sorted(path.read_text() for path in (run.run_dir / "logs").glob("*")) for run in runs],
    }


def survive(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """Under servers with backups the process of a worker, then the node of another run's, is killed."""
    strategy, found = hr.ParameterServer(workers=2, backups=1), []
    for deed in (kill_process, kill_raylet):
        deeds = Deeds(deed)
        # Longer than a process needs to begin on a machine that others use.
        run = hr.fit(counting(2000), strategy, engine=hr.RayEngine(placement=SPREAD), on_event=deeds)
        said = [event.text for event in run.events if event.kind == "notice"]
        counts = sorted(set(run.model.count.tolist()))
        found.append({"status": run.status, "counts": counts, "hosts": deeds.hosts, "lost": deeds.lost, "said": said})
    return {"runs": found}


def replace_server(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """A server is killed, and when its successor has become the backup the one that has taken its place, too."""
    return _replace(kill_server)


def move_server(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """The same, but first the server's node is killed."""
    return _replace(functools.partial(kill_raylet, rank=2))


def _replace(deed: Callable[[Deeds], None]) -> dict[str, Any]:
    deeds, ready = Deeds(deed), []

    def told(event: Event) -> None:
        deeds(event)
        if event.kind == "backup_ready":
            ready.append(event.backup)
            if ready[-1] == 2:
                os.kill(deeds.servers[3], signal.SIGKILL)

    run = hr.fit(
        counting(4000), hr.ParameterServer(workers=2, backups=1), engine=hr.RayEngine(), on_event=told, timeout_s=5
    )
    return {
        "status": run.status,
        "counts": sorted(set(run.model.count.tolist())),
        "ready": ready,
        "hosts": deeds.hosts,
        "lost": [rank for rank, _ in deeds.lost],
        "said": [event.text for event in run.events if event.kind == "notice"],
    }


def elastic(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """Of three workers a process, an actor, a node and rank 0 are killed; all come back."""
    found = []
    for deed, placement, until in (
        (kill_process, None, "with a new rank 1"),
        (kill_agent, None, "with a new rank 1"),
        (kill_raylet, SPREAD, "with a new rank 1"),
        (kill_rank_0, None, "with a new rank 0"),
    ):
        deeds = Deeds(deed, until=until)
        run = hr.fit(
            counting(1_000_000),
            hr.Mirrored(workers=3, min_workers=2),
            engine=hr.RayEngine(placement=placement),
            on_event=deeds,
            timeout_s=5,
        )
        said = [event.text for event in run.events if event.kind == "notice"]
        counts = run.model.count.detach()
        found.append({"status": run.status, "apart": float(counts.max() - counts.min()), "said": said})
    return {"runs": found}


def grow(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """A node is killed, and there is none for its worker until another one joins the cluster."""
    deeds = Deeds(kill_raylet, until="with a new rank 1")

    def told(event: Event) -> None:
        deeds(event)
        if event.kind == "notice" and "without rank 1" in event.text:
            (folder / "smaller").touch()

    run = hr.fit(
        counting(1_000_000),
        hr.Mirrored(workers=3, min_workers=2),
        engine=hr.RayEngine(placement=SPREAD),
        on_event=told,
        timeout_s=5,
    )
    counts = run.model.count.detach()
    said = [event.text for event in run.events if event.kind == "notice"]
    return {"status": run.status, "apart": float(counts.max() - counts.min()), "hosts": deeds.hosts, "said": said}


def scale(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """One of three workers is asked to leave, and to come back."""
    said: list[str] = []

    def await_states(*wanted: str) -> None:
        while [each.state for each in ask_for_states(folder / "run", 60)] != list(wanted):
            time.sleep(0.2)

    def ask() -> None:
        try:
            await_states("trains", "trains", "trains")
            said.append(ask_for_workers(folder / "run", -1, 60))
            await_states("trains", "trains", "is gone")
            said.append(ask_for_workers(folder / "run", 1, 60))
            await_states("trains", "trains", "trains")
            ask_for_workers(folder / "run", 1, 60)
        except HeadraceError as error:
            said.append(str(error))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    # On a thread, because the events are told by the one that answers.
    asking = threading.Thread(target=ask)
    deeds = Deeds(lambda _: asking.start(), after=30)
    run = hr.fit(
        counting(1_000_000),
        hr.Mirrored(workers=3, min_workers=2),
        engine=engine,
        on_event=deeds,
        run_dir=folder / "run",
    )
    asking.join()
    counts = run.model.count.detach()
    return {"status": run.status, "apart": float(counts.max() - counts.min()), "said": said}


def resume(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """The node of a stage is killed; the run goes on from its checkpoint with what is left."""
    deeds, strategy = Deeds(kill_raylet, after=40), hr.Pipeline(stages=2, micro_batches=2)
    saves = hr.Checkpoints(every_steps=10)
    try:
        hr.fit(
            digits(40),
            strategy,
            engine=hr.RayEngine(placement=SPREAD),
            on_event=deeds,
            run_dir=folder,
            checkpoints=saves,
        )
    except HeadraceError as error:
        said = [type(error).__name__, str(error)]
    run = hr.fit(digits(40), strategy, engine=engine, run_dir=folder, checkpoints=saves, resume=True)
    ours = hr.fit(digits(40), strategy, engine=hr.ThreadEngine())
    return {"hosts": deeds.hosts, "said": said, "status": run.status, "totals": [total(run), total(ours)]}


def fail(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """The errors of user code, of a module that only this process has, and of a cluster that others use."""

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            if worker.rank == 1 and worker.round == 5:
                raise ValueError("a broken image")
            worker.step(batch)

    found = {}
    try:
        hr.launch(train, digits(), hr.Mirrored(workers=2), engine=engine)
    except WorkerFailed as error:
        found["raised"] = [str(error), error.traceback]
    only_here = types.ModuleType("only_here")
    exec("import torch\nclass Net(torch.nn.Linear):\n    pass", vars(only_here))
    sys.modules["only_here"] = only_here
    job = hr.Job(
        model=functools.partial(only_here.Net, 64, 1),
        loss=mean,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(torch.eye(64), torch.zeros(64)),
        global_batch_size=16,
        epochs=1,
    )
    try:
        hr.fit(job, hr.Mirrored(workers=2), engine=engine)
    except HeadraceError as error:
        found["module"] = str(error)
    others = ray.remote(num_cpus=2)(Occupant).remote()
    ray.get(others.ready.remote())
    try:
        hr.fit(digits(), hr.Mirrored(workers=6), engine=hr.RayEngine(start_timeout_s=1))
    except HeadraceError as error:
        found["busy"] = str(error)
    ray.kill(others)
    deeds = Deeds(interrupt)
    run = hr.fit(digits(10_000), hr.Mirrored(workers=2), engine=engine, on_event=deeds)
    return {**found, "interrupted": run.status, "reserved": _reserved()}


def read(engine: hr.RayEngine, folder: Path) -> dict[str, Any]:
    """What a data set of Ray gives, beside the same arrays: in order, with shuffling, with resuming, its errors."""
    # As in a job file: Ray Data connects by itself.
    os.environ["RAY_ADDRESS"] = sys.argv[2]
    inputs, targets = hr.data.digits().train
    rows = [
        {"image": image.numpy(), "digit": int(digit), "name": f"row {index}"}
        for index, (image, digit) in enumerate(zip(inputs, targets, strict=True))
    ]
    source = ray.data.from_items(rows, override_num_blocks=7).map(lambda row: {**row, "twice": 2 * row["digit"]})
    pipeline = hr.data.from_ray(source)
    assert signal.getsignal(signal.SIGTERM).__module__.startswith("ray.")
    found = list(hr.data.batches(pipeline.batch(100)))
    order = [name for batch in found for name in batch["name"]]
    twice = torch.cat([batch["twice"] for batch in found])
    pairs = hr.data.from_ray(source, ["image", "digit"]).map(lambda row: (row["image"], row["digit"])).shuffle()
    runs = []
    for data in (pairs, hr.data.from_arrays(inputs, targets).shuffle()):
        whole = hr.fit(replace(digits(), data=data), hr.Mirrored(workers=2), engine=hr.ThreadEngine())
        runs.append(total(whole))
    resumed = partly(replace(digits(), data=pairs), engine, folder)
    refused = []
    ragged = [{"x": torch.zeros(1 + number % 2).numpy()} for number in range(4)]
    for act in (
        lambda: hr.data.from_ray(source, ["colour"]),
        lambda: hr.data.from_ray(source, memory_limit=1000),
        lambda: hr.data.from_ray(source.filter(lambda row: False)),
        lambda: hr.data.from_ray(ray.data.from_items(ragged, override_num_blocks=1)),
        lambda: hr.data.from_ray(rows),
    ):
        try:
            act()
        except HeadraceError as error:
            refused.append(str(error))
    return {
        "in_order": order == [row["name"] for row in rows] and bool((twice == 2 * targets).all()),
        "totals": [*runs, resumed],
        "refused": refused,
    }


def partly(job: hr.Job, engine: hr.RayEngine, folder: Path) -> float:
    """The result of a run on the cluster that is interrupted in its first epoch, and then goes on with one worker."""
    saves = hr.Checkpoints(every_steps=5)
    deeds = Deeds(interrupt, after=3)
    first = hr.fit(job, hr.Mirrored(workers=2), engine=engine, run_dir=folder, checkpoints=saves, on_event=deeds)
    assert first.status == "interrupted"
    return total(hr.fit(job, hr.OneDevice(), engine=hr.ThreadEngine(), run_dir=folder, checkpoints=saves, resume=True))


def _reserved(within_s: float = 20.0) -> float:
    """CPUs that are still reserved; Ray frees them a little later."""
    give_up = time.monotonic() + within_s
    while (left := ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)) and (
        time.monotonic() < give_up
    ):
        time.sleep(0.1)
    return left


def main() -> None:
    deed, address, folder = sys.argv[1:]
    engine = hr.RayEngine(address)
    known = (equal, survive, replace_server, move_server, elastic, grow, scale, resume, fail, read)
    deeds = {each.__name__: each for each in known}
    said = deeds[deed](engine, Path(folder))
    say(**said)
    engine.close()


if __name__ == "__main__":
    main()
