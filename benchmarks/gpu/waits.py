"""How often a training step waits for the GPU: with each option, the places where torch says that it does.

torch warns where an operation waits for the device (`torch.cuda.set_sync_debug_mode`), and headrace's steps run in this
process, so each warning has its line. A bare loop beside it has 0. See README.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import report
from workloads import examples, model

import headrace as hr

SETTLED, STEPS = 10, 30
"""Steps before those that are watched, and these; losses are read a few times a second, which is not a step's wait."""

OPTIONS = {
    "default": hr.Options(),
    "clip_norm": hr.Options(clip_norm=1.0),
    "fp16": hr.Options(precision="fp16"),
    "skip": hr.Options(on_nonfinite="skip"),
}

found: Counter[str] = Counter()
"""Waits, by file and line, of the run that goes on."""


def watched(worker: hr.Worker) -> None:
    """A loop whose steps after the first are watched."""
    for number, batch in enumerate(worker.batches()):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if number >= SETTLED and torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
            try:
                worker.step(batch)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("default")
        found.update(f"{Path(each.filename).name}:{each.lineno}" for each in said if "synchron" in str(each.message))


def waits(options: hr.Options, strategy: hr.Strategy, device: str) -> float:
    """Returns waits a step."""
    found.clear()
    job = hr.Job(
        model=model("mlp"),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples("mlp", 4096)).shuffle(),
        global_batch_size=64,
        steps=SETTLED + STEPS,
        options=options,
    )
    hr.launch(watched, job, strategy, device=device, engine=hr.ThreadEngine(), check=False)
    for place, count in found.most_common(5):
        print(f"{place:40} {count / STEPS:8.2f} a step", file=sys.stderr)
    return sum(found.values()) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    device = parser.parse_args().device
    rows = {
        f"{name}, {strategy.name}": [waits(options, strategy, device)]
        for name, options in OPTIONS.items()
        if device == "cuda" or name != "fp16"
        for strategy in (hr.OneDevice(), hr.Mirrored(1))
    }
    report(Path(__file__).parent, f"waits-{device}", "waits a step", rows, {})


if __name__ == "__main__":
    main()
