"""The critical batch that the noise of gradients says, beside the one that steps to a loss at six batch sizes say.

    .venv/bin/python benchmarks/critical-batch/main.py [--jobs digits,text]

Each job is trained in plain PyTorch to its goal at six batch sizes, with the best of several learning rates for each (a
median of three seeds), and steps = fewest x (1 + critical / batch) is fitted to them. `hr.steps_to_goal` sees one batch
size, with its best rate. Target: within a factor of 1.5.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr

HERE = Path(__file__).parent
SIZES = (8, 16, 32, 64, 128, 256)
MEASURED = 64
"""The batch that headrace sees."""
SEEDS = (0, 1, 2)
MOST_STEPS = 4000


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """What is trained, and to which loss of the evaluation set; `rates` ascend by the same factor."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    goal: float
    optimizer: Callable[..., torch.optim.Optimizer]
    rates: tuple[float, ...]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    inputs, labels = torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]
    return inputs[:1400], labels[:1400], inputs[1400:], labels[1400:]


def text() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pieces of 24 characters of the standard library; the targets are the next ones."""
    import argparse as module

    source = Path(module.__file__).read_bytes()
    pieces = torch.tensor([min(byte, 127) for byte in source[: len(source) // 25 * 25]]).view(-1, 25)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    return pieces[:-400, :-1], pieces[:-400, 1:], pieces[-400:, :-1], pieces[-400:, 1:]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 24)
        self.memory = nn.GRU(24, 48, batch_first=True)
        self.out = nn.Linear(48, 128)

    def forward(self, characters: Tensor) -> Tensor:
        return self.out(self.memory(self.embedding(characters))[0])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(256, 10))


RATES = tuple(2.0**power for power in range(-5, 3))
TASKS = {
    "digits, perceptron, SGD": Task(perceptron, digits, 0.25, torch.optim.SGD, RATES),
    "digits, convolutions, momentum": Task(
        convolutions, digits, 0.2, functools.partial(torch.optim.SGD, momentum=0.9), tuple(each / 8 for each in RATES)
    ),
    "text, recurrent, Adam": Task(Reader, text, 1.7, torch.optim.Adam, tuple(2.0**power for power in range(-9, -3))),
}


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=draws)
        yield from order[: count // size * size].view(-1, size)


def steps_of(task: Task, size: int, rate: float, seed: int, most: int) -> int | None:
    """Returns the steps to the goal in plain PyTorch; None if it takes more than `most`."""
    inputs, targets, later, wanted = task.data()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=rate)
    for step, index in enumerate(batches(len(inputs), size, seed), 1):
        optimizer.zero_grad()
        cross_entropy(model(inputs[index]), targets[index]).backward()
        optimizer.step()
        # A look costs as much as a step of a large batch.
        if step % max(1, step // 50) == 0:
            with torch.no_grad():
                loss = float(cross_entropy(model(later), wanted))
            if loss <= task.goal:
                return step
            if not math.isfinite(loss):
                return None
        if step >= most:
            return None
    raise AssertionError


def best_of(task: Task, size: int) -> tuple[float, float]:
    """Returns the fewest steps over the rates (the median of the seeds), and the rate."""
    found: tuple[float, float] | None = None
    for rate in reversed(task.rates):
        most = MOST_STEPS if found is None else math.ceil(1.2 * found[0])
        counts = [steps_of(task, size, rate, seed, most) for seed in SEEDS]
        known = sorted(math.inf if each is None else each for each in counts)
        if math.isfinite(median(known)) and (found is None or median(known) < found[0]):
            found = median(known), rate
    assert found is not None, f"no rate reaches the goal with batches of {size}"
    return found


def critical_of(steps: dict[int, float]) -> float:
    """Returns the critical batch of least squares in the logarithms of the steps."""

    def spread(critical: float) -> float:
        rests = [math.log(count) - math.log(1 + critical / size) for size, count in steps.items()]
        middle = sum(rests) / len(rests)
        return sum((each - middle) ** 2 for each in rests)

    return min((2 ** (power / 16) for power in range(16 * 14)), key=spread)


def measured(task: Task, rate: float) -> list[float]:
    inputs, targets, later, wanted = task.data()
    job = hr.Job(
        model=task.model,
        loss=cross_entropy,
        optimizer=functools.partial(task.optimizer, lr=rate),
        data=(inputs, targets),
        eval_data=(later, wanted),
        global_batch_size=MEASURED,
        epochs=200,
    )
    from dataclasses import replace

    return [
        hr.steps_to_goal(replace(job, seed=seed), f"loss {task.goal}", device="cpu").critical_batch for seed in SEEDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", default="")
    wanted = [each for each in parser.parse_args().jobs.split(",") if each]
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, task in TASKS.items():
        if wanted and not any(each in name for each in wanted):
            continue
        began = time.monotonic()
        best = {size: best_of(task, size) for size in SIZES}
        fitted = critical_of({size: steps for size, (steps, _) in best.items()})
        seen = measured(task, best[MEASURED][1])
        told = median(seen)
        rows.append(
            {
                "job": name,
                "steps": {size: steps for size, (steps, _) in best.items()},
                "rates": {size: rate for size, (_, rate) in best.items()},
                "fitted": fitted,
                "noise": seen,
                "ratio": told / fitted,
                "seconds": time.monotonic() - began,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "critical-batch.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'job':34}{'steps to the loss':>20}{'noise':>9}{'ratio':>8}")
    for row in rows:
        print(f"{row['job']:34}{row['fitted']:>20.0f}{median(row['noise']):>9.0f}{row['ratio']:>8.2f}")
    sys.exit(any(not 1 / 1.5 <= row["ratio"] <= 1.5 for row in rows))


if __name__ == "__main__":
    main()
