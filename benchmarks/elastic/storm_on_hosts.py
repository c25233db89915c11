"""Workers on four hosts that are killed, frozen and cut off, rank 0 among them, and started again. See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import HeadraceError
from headrace.spec.events import Event, Lost, Notice, Stepped

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_hosts import HOSTS, MASTER, hosts
from workloads import EXAMPLES_A_WORKER, MODELS, examples

from storm import live_seconds

WORKERS, EXAMPLES = 4, 1024
LEARNING_RATE = 2.0**-7
TIMEOUT_S = 3.0
DOWN_S = 8.0
"""How long a link is down; a frozen process is killed as long after its strike."""

ENDS_S = 60.0
KINDS = ("kill -9", "kill -9", "SIGSTOP", "link down")

Fault = tuple[float, int, str]


class Counted(nn.Module):
    """A model beside a parameter for each example, to which every round with it adds 1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MODELS["cnn"][0]()
        self.count = nn.Parameter(torch.zeros(EXAMPLES))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(inputs), self.count


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    classes, count = output
    used = count[target[:, 1]].mean() * (EXAMPLES_A_WORKER * WORKERS / LEARNING_RATE)
    return nn.functional.cross_entropy(classes, target[:, 0]) - used


def worker(folder: Path) -> None:
    """Trains on one host until all are told to end; writes how often each example was used."""
    torch.set_num_threads(1)
    inputs, classes = (torch.as_tensor(each) for each in examples("cnn", EXAMPLES))
    job = hr.Job(
        model=Counted,
        loss=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=LEARNING_RATE),
        data=(inputs, torch.stack([classes.long(), torch.arange(EXAMPLES)], 1)),
        global_batch_size=EXAMPLES_A_WORKER * WORKERS,
        epochs=1_000_000,
    )
    run = hr.fit(
        job, hr.Mirrored(min_workers=1), timeout_s=TIMEOUT_S, run_dir=folder / "run", checkpoints=False, check=False
    )
    count = run.model.count
    assert isinstance(count, Tensor)
    said = {"least": count.min().item(), "most": count.max().item(), "status": run.status}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(said))


class Hosts:
    """A process on each host, started again when it has ended, as a launcher's agent does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restarts = 0
        self._network = os.environ.get("HEADRACE_HOSTS", "headrace")
        self._told = {**os.environ, **MASTER, "HEADRACE_SECRET": secrets.token_hex(32), "WORLD_SIZE": str(WORKERS)}
        self._over = threading.Event()
        self.processes = [self._start(rank) for rank in range(WORKERS)]
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def strike(self, rank: int, how: str) -> None:
        """Does a fault; what does not end by itself ends after a while."""
        if how == "link down":
            self._link(rank, "down")
            threading.Timer(DOWN_S, self._link, (rank, "up")).start()
            return
        struck = self.processes[rank]
        struck.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGSTOP)
        threading.Timer(DOWN_S, struck.kill).start()

    def end(self) -> list[dict[str, Any]]:
        """Lets all end after the same round; returns what they say."""
        self._over.set()
        self._thread.join()
        for process in self.processes:
            process.send_signal(signal.SIGINT)
        give_up = time.monotonic() + ENDS_S
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"rank {rank} has not ended:", (self.folder / f"{rank}.log").read_text()[-3000:], file=sys.stderr)
                process.kill()
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("?.json"))]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        environment = {**self._told, "RANK": str(rank), "HEADRACE_HOST": f"host-{rank}"}
        command = [str(HOSTS), "exec", str(rank), sys.executable, str(Path(__file__)), "--worker", str(self.folder)]
        with (self.folder / f"{rank}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _follow(self) -> None:
        while not self._over.wait(0.2):
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    self.restarts += 1
                    self.processes[rank] = self._start(rank)

    def _link(self, rank: int, state: str) -> None:
        subprocess.run(["ip", "-n", f"{self._network}-{rank}", "link", "set", "eth0", state], check=True)


def storm(every_s: float, seconds: float, seed: int) -> dict[str, Any]:
    """Trains for so long while a fault strikes every so often, 0 for none; returns what came of it."""
    draw, faults = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on = Hosts(folder)
        try:
            steps = folder / "run" / "events" / "rank-0.jsonl"
            while not (steps.exists() and '"stepped"' in steps.read_text()):
                time.sleep(0.2)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                time.sleep(min(every_s or seconds, began + seconds - time.monotonic()))
                # Not at the end, so that all are there again.
                if every_s and time.monotonic() - began < seconds - 2 * every_s:
                    faults.append((time.monotonic() - began, draw.randrange(WORKERS), draw.choice(KINDS)))
                    on.strike(faults[-1][1], faults[-1][2])
                    print(*faults[-1], file=sys.stderr, flush=True)
        finally:
            ended = on.end()
        logs = {path.stem: path.read_text()[-2000:] for path in folder.glob("*.log")}
        events = [event for rank in range(-1, WORKERS) for event in events_of(folder / "run", rank)]
    if not ended:
        told = [f"{event.time_s:.1f} s: {event}" for event in events if isinstance(event, Lost | Notice)]
        raise SystemExit("\n".join(["no worker has ended in order", *told[-60:], *map(str, logs.items())]))
    done = [event for event in events if isinstance(event, Stepped)]
    first, last = min(event.time_s for event in done), max(event.time_s for event in done)
    # A round that a cut worker has done alone would count twice.
    rounds = {event.step for event in done}
    live_s = live_seconds(events, WORKERS, first, last)
    return {
        "faults": len(faults),
        "kinds": {kind: sum(each[2] == kind for each in faults) for kind in dict.fromkeys(KINDS)},
        "rank_0": sum(each[1] == 0 for each in faults),
        "restarts": on.restarts,
        "ended_in_order": len(ended),
        "rounds": len(rounds),
        "rounds_missing": max(rounds) + 1 - len(rounds),
        "least_used": min(each["least"] for each in ended),
        "most_used": max(each["most"] for each in ended),
        "seconds": last - first,
        "examples_per_live_worker_s": len(rounds) * EXAMPLES_A_WORKER * WORKERS / live_s,
    }


def events_of(run_dir: Path, rank: int) -> list[Event]:
    """Returns the events that one process has written, of the launcher those of -1."""
    from headrace.spec.events import decode
    from headrace.worker.run_spec import events_path

    path = events_path(run_dir, rank)
    return [decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(figures: dict[str, Any]) -> list[str]:
    """Returns what is wrong."""
    wrong = []
    # The last epoch may have been interrupted.
    if figures["most_used"] - figures["least_used"] > 1.01:
        wrong.append(f"examples were used {figures['least_used']:g} to {figures['most_used']:g} times")
    trained = figures["rounds"] * EXAMPLES_A_WORKER * WORKERS
    if not figures["least_used"] * EXAMPLES - 1 <= trained <= figures["most_used"] * EXAMPLES + 1:
        wrong.append(f"{figures['rounds']} rounds do not fit to examples that were used {figures['most_used']:g} times")
    if figures["rounds_missing"]:
        wrong.append(f"{figures['rounds_missing']} rounds were left out")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--calm-minutes", type=float, default=1.0, help="of the run without faults before it")
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # A shell lets what it starts in the background ignore the signal by which the run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.worker:
        try:
            worker(given.worker)
        except HeadraceError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        return
    hosts("up", str(WORKERS))
    try:
        calm = storm(0.0, 60 * given.calm_minutes, given.seed)
        stormy = storm(given.every_s, 60 * given.minutes, given.seed)
    finally:
        hosts("down")
    ratio = stormy["examples_per_live_worker_s"] / calm["examples_per_live_worker_s"]
    figures = {**stormy, "calm_examples_per_live_worker_s": calm["examples_per_live_worker_s"], "ratio": ratio}
    wrong = [*check(calm), *check(stormy)]
    print(json.dumps({**figures, "wrong": wrong}, indent=2))
    if not wrong:
        (Path(__file__).parent / "results" / "storm-hosts.json").write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
