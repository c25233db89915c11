"""Runs on simulated devices that count what a step waits for, in programs of their own: a line of JSON for each run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from headrace.strategies import Strategy
from headrace.worker import losses
from simulated.accelerator import counted, counters, on_device
from strategies.contract_runs import distance

BATCH, ROUNDS = 12, 8
READS = ("items", "reads", "pinned_reads")
"""Copies from a device to the host."""
_GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(BATCH * ROUNDS, 4, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(4, (BATCH * ROUNDS,), generator=_GENERATOR)

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01)
PLAIN = functools.partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS: Mapping[str, Any] = {"adam": ADAM, "adamw": ADAMW, "sgd": SGD, "plain": PLAIN}
RMSPROP = functools.partial(torch.optim.RMSprop, lr=0.01)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def mean_of_some(output: Tensor, target: Tensor) -> hr.Mean:
    """A mean over the examples that are not of class 0."""
    counts = target != 0
    each = F.cross_entropy(output, target, reduction="none")
    return hr.Mean(total=(each * counts).sum(), weight=counts.sum())


CASES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "clip": {"clip_norm": 0.3},
    "both": {"clip_value": 0.05, "clip_norm": 0.1},
    "skip": {"on_nonfinite": "skip"},
    "skip, clip": {"on_nonfinite": "skip", "clip_norm": 0.3, "ema_decay": 0.9, "warmup": 3},
    "accumulated": {"accumulate": 3},
    "skip, both": {"on_nonfinite": "skip", "clip_value": 0.05, "clip_norm": 0.1, "accumulate": 2},
}


def make_job(bad: Sequence[int] = (), loss: Any = F.cross_entropy, optimizer: Any = ADAM, **options: Any) -> hr.Job:
    inputs = INPUTS.clone()
    for round_ in bad:
        inputs[round_ * BATCH + BATCH - 1] = math.inf
    return hr.Job(
        model=net,
        loss=functools.partial(on_device, loss),
        optimizer=optimizer,
        data=hr.data.from_arrays(inputs, CLASSES),
        global_batch_size=BATCH,
        epochs=1,
        options=hr.Options(**options),
    )


def watched(folder: Path, worker: hr.Worker) -> None:
    """A loop that writes down what each step has counted; losses are read at the end."""
    losses._READ_EVERY_S = math.inf
    steps = []
    for batch in worker.batches():
        with counted() as rise:
            worker.step(batch)
        steps.append(rise)
    (folder / str(worker.rank)).write_text(json.dumps(steps))


def on_devices(name: str, job: hr.Job, strategy: Strategy, like: Strategy | None = None) -> None:
    """Prints how far a run is from the same, or another strategy, on CPUs, and what its steps have waited for."""
    folder = Path.cwd() / f"steps {strategy.name} {name}"
    folder.mkdir(exist_ok=True)
    run = hr.launch(functools.partial(watched, folder), job, strategy, device="fake")
    if int(os.environ.get("RANK", "0")):
        return
    steps = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    here = hr.fit(job, like or strategy, device="cpu", engine=hr.ThreadEngine(), check=False)
    say(
        name=name,
        apart=distance(run.model.state_dict(), here.model.state_dict()),
        reads=[[sum(step[each] for each in READS) for step in own] for own in steps],
        waits=[[step["waits"] for step in own] for own in steps],
        left_out=events_of(run),
        expected=events_of(here),
        losses=losses_of(run),
        like=losses_of(here),
    )


def events_of(run: hr.Run) -> list[tuple[int, tuple[int, ...], str]]:
    return [(each.step, each.ranks, each.action) for each in run.events if each.kind == "non_finite"]  # type: ignore[attr-defined]


def losses_of(run: hr.Run) -> list[float | None]:
    found = [each for each in run.events if each.kind == "stepped"]
    return [each.loss for each in sorted(found, key=lambda each: (each.step, each.rank))]  # type: ignore[attr-defined]


def steps(strategy: Strategy, names: Sequence[str] = tuple(CASES), bad: Sequence[int] = (), **changes: Any) -> None:
    for name in names:
        own = bad if CASES[name].get("on_nonfinite") == "skip" else ()
        on_devices(name, make_job(own, **{**changes, **CASES[name]}), strategy)


def means(strategy: Strategy, names: Sequence[str] = ("default", "accumulated", "clip")) -> None:
    for name in names:
        on_devices(f"mean, {name}", make_job((), mean_of_some, **CASES[name]), strategy)


def hybrids(bad: Sequence[int]) -> None:
    """Runs replicas of two devices each, and stages whose parts two replicas share."""
    for inner in (hr.Pipeline(2, micro_batches=2), hr.TensorParallel(2)):
        steps(hr.Hybrid(hr.Mirrored(2), inner), ("both", "skip, clip"), bad)
        means(hr.Hybrid(hr.Mirrored(2), inner), ("clip",))
    means(hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)))
    steps(hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2, micro_batches=2)), ("both", "skip, clip"), bad)


def optimizers(strategy: Strategy) -> None:
    for name, optimizer in OPTIMIZERS.items():
        on_devices(name, make_job((0, 3, 4), optimizer=optimizer, **CASES["skip, clip"]), strategy)


def coded(strategy: Strategy) -> None:
    """Says how far a run of several hosts is from that of their CPUs, which send the same bits."""
    job = make_job(optimizer=PLAIN, accumulate=2)
    there, here = (hr.fit(job, strategy, device=device, check=False) for device in ("fake", "cpu"))
    say(apart=distance(there.model.state_dict(), here.model.state_dict()))


class Watched(nn.Module):
    """Layers of over a megabyte each, between which backward says how many copies to the host have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 400), nn.Linear(400, 400), nn.Linear(400, 400), nn.Linear(400, 4)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if x.requires_grad:
                x.register_hook(self.look)
        return x

    def look(self, gradient: Tensor) -> None:
        if gradient.device.type == "fake":
            FOUND.append(counters()["pinned_reads"])


FOUND: list[int] = []


def looking(folder: Path, worker: hr.Worker) -> None:
    steps = []
    for batch in worker.batches():
        FOUND.clear()
        before = counters()["pinned_reads"]
        worker.step(batch)
        steps.append([count - before for count in FOUND])
    (folder / str(worker.rank)).write_text(json.dumps(steps))


def overlapping(strategy: Strategy, **options: Any) -> None:
    """Says how many buckets have left between two layers of backward, and how far the run is from one on CPUs."""
    job = dataclasses.replace(make_job(optimizer=PLAIN, **options), model=Watched)
    folder = Path.cwd() / "looks"
    folder.mkdir(exist_ok=True)
    run = hr.launch(functools.partial(looking, folder), job, strategy, device="fake")
    if int(os.environ.get("RANK", "0")):
        return
    here = hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine(), check=False)
    found = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    say(apart=distance(run.model.state_dict(), here.model.state_dict()), found=found)


def evaluating(folder: Path, worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
    with counted() as rise:
        metrics = worker.evaluate()
    (folder / str(worker.rank)).write_text(json.dumps({**rise, "metrics": metrics}))


def evaluations(strategy: Strategy) -> None:
    """Says what an evaluation of seven batches, the last of them short, has waited for, and how far its numbers are."""
    for name, loss in (("plain", F.cross_entropy), ("mean", mean_of_some)):
        metrics = {"accuracy": hr.metrics.accuracy, "best two": functools.partial(hr.metrics.top_k_accuracy, k=2)}
        job = dataclasses.replace(make_job((), loss), metrics=metrics, eval_data=(INPUTS[:79], CLASSES[:79]))
        folder = Path.cwd() / f"evaluation {name}"
        folder.mkdir()
        hr.launch(functools.partial(evaluating, folder), job, strategy, device="fake")
        found = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
        here = hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine(), check=False)
        apart = max(abs(each["metrics"][key] - value) for each in found for key, value in here.metrics.items())
        names = ("waits", *READS, "blocking_writes", "pageable_writes")
        say(
            name=name,
            apart=apart,
            names=sorted(here.metrics),
            counts=[{key: each[key] for key in names} for each in found],
        )
