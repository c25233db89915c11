"""A long run under parameter servers whose workers leave and are replaced all the time: what grows? See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from growth import Growth, growth, table
from torch import nn

import headrace as hr
from belongings import GONE, Figures, Roles, file_figures, process_figures, ranks
from headrace.engine.local.scaling import ask_for_workers
from headrace.errors import UsageError

WORKERS, SERVERS = 3, 2
ROLES = Roles(WORKERS, SERVERS)
TIMEOUT_S = 3.0
LOOK_EVERY_S = 5.0
MINUTE_S = 60.0
WINDOW = 10
"""Minutes that are compared, at the begin and at the end."""
WAYS = ("kill -9", "SIGSTOP", "leaves in order")
RUN_DIR = "run"
RESULTS = Path(__file__).parent / "results"


def augmented(example: tuple[torch.Tensor, torch.Tensor], rng: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Augments by chance."""
    return example[0] + 0.1 * float(rng.standard_normal()), example[1]


def job() -> hr.Job:
    """Returns a job without an end, with data that is shuffled and augmented, evaluations, and state of every kind."""
    generator = torch.Generator().manual_seed(0)
    inputs, classes = torch.randn(2048, 256, generator=generator), torch.randint(10, (2048,), generator=generator)
    return hr.Job(
        model=lambda: nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.Adam, lr=0.001),
        data=hr.data.from_arrays(inputs, classes).shuffle().map(augmented),
        eval_data=(inputs, classes),
        global_batch_size=64 * WORKERS,
        epochs=1_000_000,
        options=hr.Options(eval_every=500),
    )


def train(folder: Path, seconds: float) -> None:
    """Trains for some seconds, and prints how it ended."""
    run = hr.fit(
        job(),
        hr.ParameterServer(WORKERS, servers=SERVERS, backups=1),
        run_dir=folder / RUN_DIR,
        seconds=seconds,
        timeout_s=TIMEOUT_S,
        checkpoints=hr.Checkpoints(every_s=60.0, keep=2),
    )
    print(json.dumps({"status": run.status, "parameters finite": all(map(is_finite, run.model.parameters()))}))


def is_finite(parameter: torch.Tensor) -> bool:
    return bool(parameter.isfinite().all())


class Leaver:
    """Lets a worker leave every so often, each by chance in one of three ways; its replacement joins.

    Attributes:
        left: how often in each way.
        refused: why the run has not let one go, and how often.
        every_s: time between two.
    """

    def __init__(self, launcher: int, run_dir: Path, seed: int, every_s: float) -> None:
        self.left: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.every_s = every_s
        self._launcher, self._run_dir = launcher, run_dir
        self._chance = random.Random(seed)

    def once(self) -> None:
        """Lets one leave, and after a request in order, lets one join."""
        way = self._chance.choice(WAYS)
        try:
            if way == "leaves in order":
                ask_for_workers(self._run_dir, -1)
                self._await_fewer()
                ask_for_workers(self._run_dir, 1)
            else:
                workers = self._workers()
                if len(workers) < WORKERS:
                    self.refused["the one before has not been replaced yet"] += 1
                    return
                os.kill(self._chance.choice(workers), signal.SIGKILL if way == "kill -9" else signal.SIGSTOP)
        except (UsageError, *GONE) as error:
            self.refused[f"{way}: {error}"] += 1
        else:
            self.left[way] += 1

    def _await_fewer(self) -> None:
        deadline = time.monotonic() + self.every_s
        while len(self._workers()) >= WORKERS and time.monotonic() < deadline:
            time.sleep(0.05)

    def _workers(self) -> list[int]:
        return [pid for rank, pid in ranks(self._launcher).items() if ROLES.of(rank) == "worker"]


@contextmanager
def leaving(leaver: Leaver) -> Iterator[None]:
    """Lets workers leave in a thread, so that looking is not late."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(leaver.every_s):
            leaver.once()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def look(process: subprocess.Popen[str], folder: Path) -> Figures:
    """Returns the largest of each figure within a minute; of less than that where the run ends."""
    largest: Figures = {}
    until = time.monotonic() + MINUTE_S
    while time.monotonic() < until and process.poll() is None:
        try:
            figures = process_figures(process.pid, ROLES)
            figures |= file_figures(process.pid, folder / RUN_DIR, folder / "tmp")
        except GONE:
            break  # the run has ended meanwhile
        for what, value in figures.items():
            largest[what] = max(largest.get(what, 0.0), value)
        time.sleep(LOOK_EVERY_S)
    return largest


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Starts the run; as root with a /dev/shm of its own, so that what others leave there does not count."""
    command = [sys.executable, __file__, str(seconds / 3600), "--inside", str(folder)]
    if os.geteuid() == 0:
        own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", own, "sh", *command]
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "CI": "true"}  # no moving bars
    with (folder / "stderr").open("w") as errors:
        # Keys pressed in the terminal are for this process, which passes them on.
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )


def soak(hours: float, seed: int, every_s: float, folder: Path) -> dict[str, Any]:
    """Runs for so long; returns all that was seen."""
    minutes: list[Figures] = []
    process = start(folder, 3600 * hours)
    began = time.monotonic()
    while not (folder / RUN_DIR / "logs" / "rank-0.log").exists():
        if process.poll() is not None:
            raise RuntimeError(f"the run has not begun:\n{(folder / 'stderr').read_text()[-2000:]}")
        time.sleep(0.1)
    leaver = Leaver(process.pid, folder / RUN_DIR, seed, every_s)
    try:
        with leaving(leaver):
            while process.poll() is None:
                minutes.append(look(process, folder))
                (RESULTS / "minutes.json").write_text(json.dumps(minutes) + "\n")
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
    except BaseException:
        process.kill()
        raise
    said, _ = process.communicate()
    lost = (folder / RUN_DIR / "events" / "launcher.jsonl").read_text().count('"kind":"lost"')
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "every_s": every_s,
        "hours": (time.monotonic() - began) / 3600,
        "exit code": process.returncode,
        "run": json.loads(said.splitlines()[-1]) if said.strip() else {},
        "left": dict(leaver.left),
        "refused": dict(leaver.refused),
        "lost": lost,
        "left over in TMPDIR": sorted(os.listdir(folder / "tmp")),
        # The minute in which the run ends is not a whole one.
        "growth": [asdict(row) for row in growth(minutes[:-1], WINDOW)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hours", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of who leaves, and how")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="between two that leave")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # A shell lets what it starts in the background ignore the signal by which the run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments.inside:
        train(arguments.inside, 3600 * arguments.hours)
        return 0
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        document = soak(arguments.hours, arguments.seed, arguments.every, Path(folder))
        sys.stderr.write((Path(folder) / "stderr").read_text()[-4000:])
    (RESULTS / "soak.json").write_text(json.dumps(document, indent=1) + "\n")
    rows = [Growth(**row) for row in document.pop("growth")]
    print(json.dumps(document, indent=1), table(rows), sep="\n\n")
    return int(document["exit code"] != 0 or any(row.verdict == "GROWS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
