"""Trainings that are broken off, and what they leave. Workers import this module by its name."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.spec.events import Stepped, WorkerStarted

EXAMPLES = 50
"""Five rounds of twelve an epoch, the last of two."""
ROUNDS = 15
OFTEN = hr.Checkpoints(every_steps=4, every_s=None, keep=2)
STRATEGIES = (hr.OneDevice(threads=1), hr.Mirrored(2), hr.CentralStorage(2))


class Recurrent(nn.Module):
    """Two layers of LSTM with dropout between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(inputs)[0][:, -1])
        return logits


def convolutional() -> nn.Module:
    """A layer of convolution, statistics of its own, dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * 16, 4)
    )


def plain() -> nn.Module:
    """Nothing that depends on the number of workers, in double precision."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


_GENERATOR = torch.Generator().manual_seed(0)
_CLASSES = torch.randint(4, (EXAMPLES,), generator=_GENERATOR)
MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": convolutional, "lstm": Recurrent, "plain": plain}
DATA = {
    "cnn": (torch.randn(EXAMPLES, 1, 6, 6, generator=_GENERATOR), _CLASSES),
    "lstm": (torch.randn(EXAMPLES, 5, 4, generator=_GENERATOR), _CLASSES),
    "plain": (torch.randn(EXAMPLES, 4, generator=_GENERATOR, dtype=torch.float64), _CLASSES),
}


def jittered(example: tuple[Any, Any], rng: np.random.Generator) -> tuple[Any, Any]:
    """Adds noise that depends on seed, epoch and index."""
    inputs, target = example
    return inputs + 0.1 * float(rng.standard_normal()), target


def lasting_job(kind: str = "cnn", options: dict[str, Any] | None = None, **changes: Any) -> hr.Job:
    """A job that has state of every kind, 15 rounds long."""
    plain: dict[str, Any] = {
        "model": MODELS[kind],
        "task": hr.tasks.multiclass(4),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
        "data": hr.data.from_arrays(*DATA[kind]).shuffle().map(jittered),
        "eval_data": DATA[kind],
        "global_batch_size": 12,
        "epochs": 3,
        "options": hr.Options(
            **{
                "schedule": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=4),
                "warmup": 3,
                "clip_norm": 1.0,
                "ema_decay": 0.9,
                **(options or {}),
            }
        ),
    }
    return hr.Job(**{**plain, **changes})


def broken_off(deed: Callable[[], object], at: int, who: int, worker: hr.Worker) -> None:
    """The usual loop, but for a deed after round `at` of rank `who`."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()
        if worker.round == at and worker.rank == who:
            deed()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise ValueError("planted")


def fail_once_saved(run_dir: Path) -> None:
    """Fails, but not before a checkpoint is whole: it is written beside the training."""
    deadline = time.monotonic() + 30
    while not CheckpointFolder(run_dir / "checkpoints").steps():
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.001)
    fail()


def files_of(run_dir: Path) -> tuple[int, dict[str, str]]:
    """The last checkpoint: its step, and the digests of its files."""
    checkpoint, wrong = CheckpointFolder(run_dir / "checkpoints").latest()
    assert checkpoint is not None
    assert wrong == ()
    return checkpoint.step, {record.name: record.sha256 for record in checkpoint.manifest.files}


def left_by(run: hr.Run) -> tuple[int, dict[str, str], bytes, dict[str, float]]:
    """All that must be equal: the last checkpoint, the model's file, the metrics."""
    step, files = files_of(run.run_dir)
    if len({event.pid for event in run.events if isinstance(event, WorkerStarted)}) < run.plan.workers:
        # Threads share one generator, whose state is that of the last seed.
        folder = run.run_dir / "checkpoints" / f"step-{step:08d}"
        files = {name: without_random(folder / name) for name in files}
    return step, files, (run.run_dir / "model.safetensors").read_bytes(), run.metrics


def without_random(path: Path) -> str:
    """The digest of a rank's tensors, its generators' states left out."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        if not name.startswith("random/"):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def paced(number: int, at: int, launcher: int, worker: hr.Worker) -> None:
    """Rank 0 sends its launcher a signal after round `at`, and does not go on before that has come."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()
        if worker.round == at and worker.rank == 0 and number:
            os.kill(launcher, number)
            deadline = time.monotonic() + 30
            # Who has lost its launcher is ended here; who is asked to end is told by the page.
            while not worker._session.page.stop:
                assert time.monotonic() < deadline, "no signal"
                time.sleep(0.001)


def main() -> None:
    """`lasting.py KIND STRATEGY RUN_DIR RESUME SIGNAL AT`: a training in a process of its own, or by a launcher."""
    kind, strategy, run_dir, resume, number, at = sys.argv[1:]
    chosen: dict[str, hr.Strategy] = {each.name: each for each in STRATEGIES}
    run = hr.launch(
        functools.partial(paced, int(number), int(at), os.getpid()),
        lasting_job(kind),
        strategy if "RANK" in os.environ else chosen[strategy],
        run_dir=run_dir,
        resume=resume == "resume",
        checkpoints=OFTEN,
    )
    print(run.status)  # noqa: T201


if __name__ == "__main__":
    main()


def stopped_at(at: int, worker: hr.Worker) -> None:
    """The usual loop, but that it stops at the first fence from a round on."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()
            if worker.round + 1 >= at:
                break


def rounds_of(run: hr.Run, rank: int | None = None) -> dict[int, int]:
    """How many examples every round has had, of one rank or of all."""
    rounds: dict[int, int] = {}
    for event in run.events:
        if isinstance(event, Stepped) and event.examples and rank in (None, event.rank):
            rounds[event.step] = rounds.get(event.step, 0) + event.examples
    return rounds
