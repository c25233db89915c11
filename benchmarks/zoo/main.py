"""Other people's models, as they come, under every strategy: does a run equal that of one device?

Each model trains three rounds in double precision, the last with fewer examples, without what draws random numbers. The
trained parameters are compared with one device's where the strategy equals one device; of the others, the run must end
well. A model with BatchNorm is compared with one device that accumulates as many shares or micro-batches, as
docs/guide/options.md says.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import vision
from harness import machine

import headrace as hr
import models
from headrace.errors import HeadraceError, UsageError
from headrace.training.whole_model import examples_of
from headrace.trees import map_tensors

FOLDER = Path(__file__).parent
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Way:
    """A strategy; BatchNorm sees one of so many `pieces` of a batch at a time; `equal` to one device."""

    strategy: hr.Strategy
    pieces: int = 1
    equal: bool = True


WAYS: Mapping[str, Way] = {
    "mirrored 2": Way(hr.Mirrored(workers=2), 2),
    "mirrored 3": Way(hr.Mirrored(workers=3), 3),
    "central_storage 2": Way(hr.CentralStorage(workers=2), 2),
    "parameter_server 2, bound 0": Way(hr.ParameterServer(workers=2, staleness_bound=0), 2),
    "pipeline 2": Way(hr.Pipeline(stages=2, micro_batches=2), 2),
    "pipeline 3": Way(hr.Pipeline(stages=3, micro_batches=2, schedule="1f1b"), 2),
    "tensor_parallel 2": Way(hr.TensorParallel(devices=2)),
    "hybrid 2 x 2": Way(hr.Hybrid(hr.Mirrored(workers=2), hr.Pipeline(stages=2, micro_batches=1)), 2),
    "averaging 2": Way(hr.ParameterAveraging(workers=2, period=2), equal=False),
}


class Examples(torch.utils.data.Dataset[Any]):
    """The examples of a batch of any form."""

    def __init__(self, batch: Any) -> None:
        self.batch = map_tensors(lambda each: each.double() if each.is_floating_point() else each, batch)

    def __len__(self) -> int:
        return examples_of([self.batch])

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self.batch)


@dataclass(frozen=True)
class Entry:
    """A model, its examples, and what is asked of it; the last of three rounds has fewer examples."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    global_batch_size: int
    loss: Callable[..., Any] | None = None
    task: Any = None


def entries() -> dict[str, Entry]:
    """Returns every model of the benchmark, by name."""
    found = {
        # Three workers get 2 + 1 + 1 examples, and in the last round 1 + 1 + 0.
        name: Entry(
            each.model,
            each.batch,
            4,
            loss=models.loss_of if each.task is None else None,
            task=None if each.task is None else hr.tasks.own_loss(**each.task),
        )
        for name, each in models.TRANSFORMERS.items()
    }
    vision_models = {
        name: Entry(model, partial(batch, 22), 8, loss=vision.loss) for name, (model, batch) in vision.entries().items()
    }
    return found | vision_models


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns a model in double precision that drops nothing."""
    module = make().double()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif type(layer).__name__ == "StochasticDepth":
            vars(layer)["p"] = 0.0
    return module


def job(entry: Entry, accumulate: int) -> hr.Job:
    torch.manual_seed(1)
    return hr.Job(
        model=partial(built, entry.model),
        task=entry.task,
        loss=entry.loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=Examples(entry.batch()),
        global_batch_size=entry.global_batch_size,
        epochs=1,
        options=hr.Options(accumulate=accumulate),
    )


def trained(entry: Entry, strategy: hr.Strategy, accumulate: int = 1) -> dict[str, Tensor]:
    run = hr.fit(job(entry, accumulate), strategy, checkpoints=False, timeout_s=60.0)
    return {name: parameter.detach() for name, parameter in run.model.named_parameters()}


def outcome(entry: Entry, normalises: bool, way: Way, reference: Callable[[int], dict[str, Tensor]]) -> dict[str, Any]:
    """Returns what became of a model under a strategy."""
    try:
        found = trained(entry, way.strategy)
    except UsageError as error:
        return {"result": "refused", "why": str(error)}
    except HeadraceError as error:
        return {"result": "failed", "why": f"{type(error).__name__}: {error}"}
    if not way.equal:
        return {"result": "runs"}
    expected = reference(way.pieces if normalises else 1)
    furthest = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    return {"result": "equal" if furthest <= TOLERANCE else "differs", "distance": furthest}


def row(entry: Entry, ways: Mapping[str, Way]) -> dict[str, Any]:
    """Returns what became of a model under each strategy."""
    normalises = any(isinstance(layer, _BatchNorm) for layer in entry.model().modules())
    known: dict[int, dict[str, Tensor]] = {}

    def reference(pieces: int) -> dict[str, Tensor]:
        if pieces not in known:
            known[pieces] = trained(entry, hr.OneDevice(), pieces)
        return known[pieces]

    results: dict[str, Any] = {}
    for name, way in ways.items():
        began = time.perf_counter()
        results[name] = outcome(entry, normalises, way, reference) | {"seconds": round(time.perf_counter() - began, 2)}
        print(f"  {name:32} {results[name]}"[:200], file=sys.stderr, flush=True)
    return results


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]], ways: Mapping[str, Way]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| model | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for model, row_ in results.items():
        cells = [_cell(each) for each in row_.values()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(each: Mapping[str, Any]) -> str:
    return f"{each['result']} {each['distance']:.0e}" if "distance" in each else str(each["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="names; all of them by default")
    parser.add_argument("--ways", nargs="*", help="strategies; all of them by default")
    parser.add_argument("--name", default="zoo", help="of the file in results/")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = entries()
    ways = {name: WAYS[name] for name in given.ways or WAYS}
    began, results = time.perf_counter(), {}
    (FOLDER / "results").mkdir(exist_ok=True)
    for model in given.models or known:
        print(model, file=sys.stderr, flush=True)
        results[model] = row(known[model], ways)
        document = {**machine(), "seconds": round(time.perf_counter() - began), "results": results}
        (FOLDER / "results" / f"{given.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table(results, ways))


if __name__ == "__main__":
    main()
