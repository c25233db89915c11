"""Trains the cnn on photographs while they are decoded: how long it waits for them. See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import headrace as hr
from headrace.data import DecodeImage, Loader
from headrace.engine.local.engine import LocalEngine
from headrace.models import cnn
from headrace.spec.events import Stepped

BATCH = 32
WARM_UP_STEPS = 20


def write_photographs(folder: Path, count: int) -> None:
    """Writes pieces of scikit-learn's two photographs as JPEG, 375 x 500 and 500 x 375."""
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    chance = np.random.default_rng(0)
    for number in range(count):
        photograph = photographs[number % 2]
        width, height = photograph.size
        side = int(chance.integers(200, 400))
        left, top = int(chance.integers(0, width - side)), int(chance.integers(0, height - side))
        piece = photograph.crop((left, top, left + side, top + side))
        piece.resize((375, 500) if number % 3 else (500, 375)).save(folder / f"{number:05}.jpg", quality=90)


class FromBytes(nn.Module):
    """`(batch, height, width, 3)` uint8 to `(batch, 3, height, width)` float32, 0 to 1."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2).float().div_(255)


def model() -> nn.Module:
    return nn.Sequential(FromBytes(), cnn())


def label(name: str) -> int:
    return int(Path(name).stem) % 2


def pipeline(folder: Path, parallel: str | int) -> hr.data.Pipeline:
    files = hr.data.from_files(str(folder / "*.jpg"), label=label)
    return files.shuffle().map(DecodeImage(32, 32), field=0, parallel=parallel)


def input_rate(folder: Path, parallel: str | int) -> float:
    """Returns the images a second of the input alone."""
    began, examples = time.perf_counter(), 0
    for share in Loader(pipeline(folder, parallel), 0, BATCH, (1,), 0).sweep():
        examples += share.examples
    return examples / (time.perf_counter() - began)


def train(folder: Path, data: hr.data.Pipeline, seconds: float, engine: LocalEngine) -> dict[str, float]:
    """Trains with one thread; returns examples/s, and the part of the time in which the device waited."""
    job = hr.Job(
        model=model,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=data,
        global_batch_size=BATCH,
        steps=1_000_000,
    )
    with tempfile.TemporaryDirectory() as place:
        strategy = hr.OneDevice(threads=1)
        run = hr.fit(job, strategy, run_dir=Path(place) / "run", seconds=seconds, engine=engine, checkpoints=False)
        steps = [event for event in run.events if isinstance(event, Stepped)][WARM_UP_STEPS:]
    lasted = steps[-1].time_s - steps[0].time_s
    return {
        "examples_per_s": sum(step.examples for step in steps[1:]) / lasted,
        "waits": sum(step.wait_s for step in steps[1:]) / lasted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place, LocalEngine() as engine:
        folder = Path(place)
        write_photographs(folder, 2000)
        for _ in range(arguments.rounds):
            images = torch.randint(256, (2000, 32, 32, 3), dtype=torch.uint8)
            memory = hr.data.from_arrays(images, torch.arange(2000) % 2).shuffle()
            row = {
                "input_alone": input_rate(folder, 1),
                "in_memory": train(folder, memory, arguments.seconds, engine),
                "one input thread": train(folder, pipeline(folder, 1), arguments.seconds, engine),
                "auto": train(folder, pipeline(folder, "auto"), arguments.seconds, engine),
                "inline": train(folder, pipeline(folder, "inline"), arguments.seconds, engine),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    for name in ("in_memory", "one input thread", "auto", "inline"):
        rate = statistics.median(row[name]["examples_per_s"] for row in rows)
        waits = statistics.median(row[name]["waits"] for row in rows)
        print(f"{name}: {rate:.0f} examples/s, waits {100 * waits:.1f} % of the time")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "input-training.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
