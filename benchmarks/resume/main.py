"""A run that is killed at a random moment and goes on ends bit for bit where it would have ended.

A trial kills a random worker (in one of twenty the launcher, with all that it has started) with SIGKILL at a random
moment of a run, lets the run go on, kills it again, up to four times, and compares what is left in the end (the
digests of the last checkpoint's files, the model's file, the metrics) with the uninterrupted run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from processes import below, rank_of, workers

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost, UsageError
from headrace.spec.events import RunStarted

EXAMPLES = 50
ROUNDS = 30
STRATEGIES = {
    "one_device": hr.OneDevice(threads=1),
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(2),
    "pipeline": hr.Pipeline(stages=2),
    "tensor_parallel": hr.TensorParallel(2),
    "fully_sharded": hr.FullySharded(2),
}
KINDS = ("cnn", "lstm")
CHECKPOINTS = hr.Checkpoints(every_steps=3, every_s=None, keep=2)
LAUNCHER_IN = 20
MOST_KILLS = 4
LONGEST_S = 120.0


class Recurrent(nn.Module):
    """An LSTM of two layers, with dropout between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs)[0][:, -1])


def convolutional() -> nn.Module:
    """Convolution, BatchNorm with statistics local to a worker, dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 4)
    )


def jittered(example: tuple[Tensor, Tensor], rng: Any) -> tuple[Tensor, Tensor]:
    """Augments by chance."""
    return example[0] + 0.1 * float(rng.standard_normal()), example[1]


def make_job(kind: str) -> hr.Job:
    """Returns a job of 30 rounds, the last of every epoch a short one, with state of every kind."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 6, 6) if kind == "cnn" else (5, 4)
    inputs = torch.randn(EXAMPLES, *shape, generator=generator)
    classes = torch.randint(4, (EXAMPLES,), generator=generator)
    return hr.Job(
        model=convolutional if kind == "cnn" else Recurrent,
        task=hr.tasks.multiclass(4),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        data=hr.data.from_arrays(inputs, classes).shuffle().map(jittered),
        eval_data=(inputs, classes),
        global_batch_size=12,
        epochs=6,
        options=hr.Options(
            schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=4),
            warmup=3,
            clip_norm=1.0,
            ema_decay=0.9,
            eval_every=7,
        ),
    )


def left_by(run_dir: Path, metrics: dict[str, float]) -> tuple[Any, ...]:
    """Returns all that must be equal."""
    checkpoint, wrong = CheckpointFolder(run_dir / "checkpoints").latest()
    assert checkpoint is not None
    files = {record.name: record.sha256 for record in checkpoint.manifest.files}
    return checkpoint.step, files, len(wrong), (run_dir / "model.safetensors").read_bytes(), metrics


@dataclass
class Row:
    """What came of the trials of one model under one strategy.

    Attributes:
        equal: trials that ended where the uninterrupted run ends.
        wrong: what was not so.
        kills: how many workers or launchers were killed in all; how many of them launchers.
        from_steps: how often a run went on from each step; 0 where there was no checkpoint yet and it began anew.
    """

    strategy: str
    kind: str
    equal: int = 0
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    launchers: int = 0
    from_steps: dict[int, int] = field(default_factory=dict)


@contextmanager
def struck(dice: random.Random, moment_s: float) -> Iterator[None]:
    """Kills a random worker, `moment_s` after it appeared."""
    over = threading.Event()
    which = dice.random()

    def strike() -> None:
        while not (found := workers()):
            if over.wait(0.001):
                return
        if over.wait(moment_s):
            return
        alive = [pid for pid in workers() if rank_of(pid) is not None] or found
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(alive[int(which * len(alive))], signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def train(engine: LocalEngine | None, kind: str, strategy: str, run_dir: Path) -> hr.Run:
    """Trains, from the last checkpoint on if there is one; a run that has none begins anew."""
    fit = functools.partial(hr.fit, make_job(kind), STRATEGIES[strategy], run_dir=run_dir, engine=engine,
                            checkpoints=CHECKPOINTS)  # fmt: skip
    try:
        return fit(resume=run_dir.exists())
    except UsageError as error:
        if "nothing to resume" not in str(error):
            raise
        shutil.rmtree(run_dir)
        return fit()


def kill_launcher(kind: str, strategy: str, run_dir: Path, moment_s: float) -> None:
    """Trains in a process of its own, which is killed `moment_s` after its first checkpoint is there."""
    command = [sys.executable, __file__, "--one", kind, strategy, str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (run_dir / "events" / "rank-0.jsonl").exists():
        time.sleep(0.001)
    time.sleep(moment_s)
    children = below(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child.pid}").exists() for child in children):
        if time.monotonic() > deadline:
            raise RuntimeError("the workers have outlived their launcher")
        time.sleep(0.005)


def trial(
    engine: LocalEngine, row: Row, whole: tuple[Any, ...], length_s: float, dice: random.Random, folder: Path
) -> str:
    """Breaks one run off, again and again, and lets it end; returns what is wrong, "" if nothing."""
    run_dir = folder / "run"
    if dice.randrange(LAUNCHER_IN) == 0:
        kill_launcher(row.kind, row.strategy, run_dir, dice.uniform(0, length_s))
        row.kills += 1
        row.launchers += 1
    kills, wanted = 0, dice.randint(1, MOST_KILLS)
    while kills < wanted:
        try:
            with struck(dice, dice.uniform(0.1, 1.0) * length_s):
                train(engine, row.kind, row.strategy, run_dir)
            if kills:
                break
            # It was faster than its killer, who gets another.
            shutil.rmtree(run_dir)
        except PeerLost:
            kills += 1
    row.kills += kills
    run = train(engine, row.kind, row.strategy, run_dir)
    for event in run.events:
        if isinstance(event, RunStarted):
            row.from_steps[event.resumed_step] = row.from_steps.get(event.resumed_step, 0) + 1
    left = left_by(run_dir, run.metrics)
    names = ("step", "files of the last checkpoint", "damaged ones", "model.safetensors", "metrics")
    return ", ".join(name for name, ours, theirs in zip(names, left, whole, strict=True) if ours != theirs)


def campaign(trials: int, seed: int, strategies: Sequence[str]) -> list[Row]:
    """Runs everything on one engine, the rows by turns."""
    rows = [Row(strategy, kind) for strategy in strategies for kind in KINDS]
    dice = random.Random(seed)
    with LocalEngine() as engine, tempfile.TemporaryDirectory() as place:
        whole, lengths = {}, {}
        for row in rows:
            # Twice, because the first run of all is slower.
            for attempt in range(2):
                began = time.monotonic()
                run_dir = Path(place) / f"{row.strategy}-{row.kind}-{attempt}"
                run = train(engine, row.kind, row.strategy, run_dir)
                lengths[id(row)] = time.monotonic() - began
                whole[id(row)] = left_by(run_dir, run.metrics)
        for number in range(trials):
            for row in rows:
                signal.alarm(int(LONGEST_S))
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    wrong = trial(engine, row, whole[id(row)], lengths[id(row)], dice, Path(folder))
                signal.alarm(0)
                if wrong:
                    row.wrong.append(f"trial {number}: {wrong}")
                row.equal += not wrong
            print(f"\rtrial {number + 1} of {trials} of each", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each model under each strategy")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES], metavar="NAME")
    parser.add_argument("--name", default="resume", help="of the file of results")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "STRATEGY", "RUN_DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["CI"] = "true"  # no moving bars
    if arguments.one:
        kind, strategy, run_dir = arguments.one
        train(None, kind, strategy, Path(run_dir))
        return 0
    began = time.monotonic()
    rows = campaign(arguments.trials, arguments.seed, arguments.strategies)
    print(f"{'strategy':18}{'model':8}{'equal':>14}{'kills':>8}{'of launchers':>14}{'went on from':>14}")
    for row in rows:
        between = {step: count for step, count in row.from_steps.items() if 0 < step < ROUNDS}
        print(f"{row.strategy:18}{row.kind:8}{row.equal:6} of {arguments.trials:<4}{row.kills:8}{row.launchers:14}"
              f"{sum(between.values()):7} x {len(between)} steps")  # fmt: skip
    for row in rows:
        for wrong in row.wrong:
            print(f"{row.kind} under {row.strategy}: {wrong}")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {
        "arguments": {"trials": arguments.trials, "seed": arguments.seed, "strategies": arguments.strategies},
        "torch": torch.__version__,
        "seconds": time.monotonic() - began,
        "rows": [asdict(row) for row in rows],
    }
    (results / f"{arguments.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
