"""How long a rehearsal of 64 workers takes here, against one process that trains the same examples."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

import headrace as hr
from headrace.models import mlp
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.model import ModelSpec, ParameterSpec

FOLDER = Path(__file__).resolve().parent
SGD = functools.partial(torch.optim.SGD, lr=0.01)


def data(examples: int) -> tuple[Tensor, Tensor]:
    """Returns images and labels of the form of Fashion-MNIST."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(examples, 784, generator=generator), torch.randint(10, (examples,), generator=generator)


def job(batch: int, steps: int) -> hr.Job:
    return hr.Job(
        model=mlp, task=hr.tasks.multiclass(10), optimizer=SGD, data=data(batch * steps), global_batch_size=batch,
        steps=steps, seed=0,
    )  # fmt: skip


def spec() -> ModelSpec:
    """Returns a profile with invented times: what a rehearsal takes here does not depend on them."""
    named = [ParameterSpec(name, tuple(value.shape)) for name, value in mlp().named_parameters()]
    return ModelSpec(tuple(named), compute=ComputeProfile((BatchProfile(32, 0.004, 0.008),), 0.002, 0.0005, 0.2))


def timed(what: Callable[[Path], object]) -> float:
    """Returns the seconds of a call that gets a folder of its own; what it says is dropped."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        began = perf_counter()
        what(Path(folder) / "run")
        return perf_counter() - began


def one_process(batch: int, steps: int, folder: Path) -> None:
    hr.fit(
        job(batch, steps), hr.OneDevice(), device="cpu", engine=hr.ThreadEngine(), run_dir=folder,
        checkpoints=False, check=False,
    )  # fmt: skip


def rehearsed(strategy: hr.Strategy, batch: int, steps: int, folder: Path) -> None:
    hr.rehearse(job(batch, steps), strategy, model=spec(), run_dir=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--share", type=int, default=32, help="examples of a worker's step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lockstep", action="store_true", help="also mirrored, whose every worker updates its mirror")
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "times.json")
    options = parser.parse_args()
    workers, share, rounds = options.workers, options.share, options.rounds
    batch = workers * share
    cases: dict[str, Callable[[Path], object]] = {
        f"one process, batches of {share}": functools.partial(one_process, share, rounds * workers),
        f"one process, batches of {batch}": functools.partial(one_process, batch, rounds),
        "rehearse parameter_server": functools.partial(rehearsed, hr.ParameterServer(workers=workers), batch, rounds),
        "rehearse downpour, pushes every 5": functools.partial(rehearsed, hr.Downpour(workers=workers), batch, rounds),
    }
    if options.lockstep:
        cases["rehearse mirrored"] = functools.partial(rehearsed, hr.Mirrored(workers=workers), batch, rounds)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(options.turns + 1):
        for name, case in cases.items():
            took = timed(case)
            if turn:  # the first warms up
                seconds[name].append(took)
    base, *_ = seconds.values()
    ratios = {name: [own / other for own, other in zip(mine, base, strict=True)] for name, mine in seconds.items()}
    print(f"{workers} workers, {rounds} rounds, {share} examples a step, {torch.get_num_threads()} threads")
    for name, mine in seconds.items():
        own = ratios[name]
        print(f"{name:<36}{median(mine):>8.2f} s{median(own):>8.2f} x ({min(own):.2f} to {max(own):.2f})")
    document = {"workers": workers, "rounds": rounds, "share": share, "seconds": seconds, "torch": torch.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
