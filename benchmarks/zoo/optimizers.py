"""Other people's optimizers, as they come, under every strategy: does a run equal a plain loop of PyTorch?

Every optimizer of torch, torch_optimizer, pytorch_optimizer, schedulefree and prodigyopt that is made from parameters
and a learning rate trains a small model in double precision for six rounds, two of them short. A cell is *equal*, with
the largest difference of any parameter from the plain loop's (1e-9 counts as equal); *refused* before the start, with
what was said; or *differs* or *failed*, which no cell should be. Where the plain loop's own result changes as much when
gradients are summed from two halves of a batch, or in a second run, a difference is *rounding* or *random*. One
that the plain loop itself cannot use is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import machine
from main import Hang, deadline

import headrace as hr
from headrace.data import Loader, as_pipeline
from headrace.errors import HeadraceError

FOLDER = Path(__file__).parent
LIBRARIES = ("torch.optim", "torch_optimizer", "pytorch_optimizer", "schedulefree", "prodigyopt")
LIMIT_S = 60
ROUNDS, EXAMPLES, BATCH = 6, 22, 8
EQUAL = 1e-9

WAYS: Mapping[str, hr.Strategy] = {
    "one_device": hr.OneDevice(),
    "mirrored 2": hr.Mirrored(workers=2),
    "central_storage 2": hr.CentralStorage(workers=2),
    "parameter_server 2, bound 0": hr.ParameterServer(workers=2, staleness_bound=0),
    "parameter_server 2, 2 servers": hr.ParameterServer(workers=2, servers=2, staleness_bound=0),
    "pipeline 2": hr.Pipeline(stages=2, micro_batches=2),
    "tensor_parallel 2": hr.TensorParallel(devices=2),
    "fully_sharded 2": hr.FullySharded(workers=2),
    "hybrid 2 x 2": hr.Hybrid(hr.Mirrored(workers=2), hr.Pipeline(stages=2, micro_batches=1)),
}


def made(library: str, name: str, pairs: Any) -> torch.optim.Optimizer:
    """Makes an optimizer of a library, with its own defaults; a matrix alone where it takes nothing else."""
    kind = getattr(importlib.import_module(library), name)
    own = inspect.signature(kind).parameters
    required = "lr" in own and own["lr"].default is inspect.Parameter.empty
    options = {"lr": 0.01} if required else {}
    tensors = [tensor for _, tensor in pairs]
    optimizer: torch.optim.Optimizer = kind(tensors, **options)
    return optimizer


def model(biases: bool = True) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8, bias=biases), nn.Tanh(), nn.Linear(8, 3, bias=biases)).double()


def job(library: str, name: str, biases: bool = True) -> hr.Job:
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(EXAMPLES, 6, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=partial(model, biases),
        task=hr.tasks.multiclass(3),
        optimizer=partial(made, library, name),
        data=(inputs, torch.randint(0, 3, (EXAMPLES,), generator=generator)),
        global_batch_size=BATCH,
        steps=ROUNDS,
    )


def plain(job: hr.Job, pieces: int = 1, draws: int = 0) -> list[Tensor]:
    """Trains with a loop of plain PyTorch over the same global batches, in so many pieces; returns the parameters.

    Before, it draws so many random numbers.
    """
    assert callable(job.model)
    assert job.task is not None
    module = job.model()
    torch.rand(draws)
    optimizer = job.optimizer(list(module.named_parameters()))
    switch(optimizer, "train")
    loader = Loader(as_pipeline(job.data)[0], job.seed, BATCH, (1,), 0)
    for share in islice(loader.rounds(), ROUNDS):
        inputs, target = share.batch
        optimizer.zero_grad()
        for x, y in zip(inputs.tensor_split(pieces), target.tensor_split(pieces), strict=True):
            (job.task.loss(module(x), y) * len(x) / len(inputs)).backward()
        optimizer.step()
    switch(optimizer, "eval")
    return [parameter.detach() for parameter in module.parameters()]


def switch(optimizer: Any, mode: str) -> None:
    """Calls `train()` or `eval()`, where an optimizer has it."""
    if callable(change := getattr(optimizer, mode, None)):
        change()


def names_of(library: str) -> Iterator[str]:
    """Yields the names of a library's optimizers."""
    module = importlib.import_module(library)
    for name in sorted(dir(module)):
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name


def row(library: str, name: str, engine: Any) -> dict[str, Any]:
    """Returns what became of an optimizer under each strategy; why it is left out, if the plain loop cannot use it."""
    errors = []
    for biases in (True, False):
        # Some take matrices alone.
        one = job(library, name, biases)
        try:
            with deadline(LIMIT_S):
                expected, halves = plain(one), plain(one, 2)
                own = distance(plain(one, draws=1), expected), distance(halves, expected)
            break
        except (Exception, Hang) as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])
    else:
        return {"left out": errors[0]}
    return {way: outcome(one, strategy, expected, own, engine) for way, strategy in WAYS.items()}


def outcome(
    job: hr.Job, strategy: hr.Strategy, expected: list[Tensor], own: tuple[float, float], engine: Any
) -> dict[str, Any]:
    """Returns what became of a run; `own` are the distances of other plain loops, with other numbers and other sums."""
    began: list[Any] = []
    try:
        with deadline(LIMIT_S):
            run = hr.fit(job, strategy, engine=engine, checkpoints=False, timeout_s=30.0, on_event=began.append)
    except Hang:
        return {"result": "hang"}
    except HeadraceError as error:
        return {"result": "failed" if began else "refused", "why": f"{type(error).__name__}: {error}"}
    found = [parameter.detach() for parameter in run.model.parameters()]
    apart = distance(found, expected)
    result = "equal" if apart <= EQUAL else "random" if own[0] > EQUAL else "rounding" if own[1] > EQUAL else "differs"
    return {"result": result, "distance": apart}


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference; of numbers of which some are none, the same must be none."""
    return max(
        float((one - other).abs().nan_to_num_(0.0 if torch.equal(one.isnan(), other.isnan()) else float("inf")).max())
        for one, other in zip(found, expected, strict=True)
    )


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| optimizer | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    for name, found in results.items():
        if "left out" not in found:
            lines.append(f"| {name} | {' | '.join(map(_cell, found.values()))} |")
    return "\n".join(lines)


def _cell(each: Mapping[str, Any]) -> str:
    return f"{each['result']} {each['distance']:.0e}" if "distance" in each else str(each["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="*", default=LIBRARIES)
    parser.add_argument("--names", nargs="*", help="of optimizers; all of them by default")
    parser.add_argument("--threads", action="store_true", help="workers are threads, which is quicker")
    parser.add_argument("--name", default="optimizers", help="of the file in results/")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began, results = time.perf_counter(), {}
    for library in given.libraries:
        for name in names_of(library):
            if given.names and name not in given.names:
                continue
            results[f"{library}.{name}"] = found = row(library, name, hr.ThreadEngine() if given.threads else None)
            said = found if "left out" in found else {way: _cell(each) for way, each in found.items()}
            print(f"{library}.{name}: {said}", file=sys.stderr, flush=True)
            document = {**machine(), "seconds": round(time.perf_counter() - began), "results": results}
            (FOLDER / "results" / f"{given.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
