"""Other people's models, as they come, under every strategy: does a run equal that of one device?

Each model trains three rounds in double precision, the last with fewer examples, without what draws random numbers. The
trained parameters are compared with one device's where the strategy equals one device; of the others, the run must end
well. A model with BatchNorm is compared with one device that accumulates as many shares or micro-batches, as
docs/guide/options.md says. Of the hard cases (`--hard`), buffers and extra state are compared, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hard
import vision
from harness import machine

import headrace as hr
import models
from headrace.api.checks import inspect_job
from headrace.api.probes.probing import probe
from headrace.batches import examples_of
from headrace.errors import HeadraceError
from headrace.spec.events.run import Notice
from headrace.trees import map_tensors
from headrace.worker.session import objective_of

FOLDER = Path(__file__).parent
LIMIT_S = 300


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
    """A model, its examples, and what is asked of it; the last of three rounds has fewer examples.

    `tolerance` is the largest distance from one device that counts as equal. `double` makes the model one of double
    precision. `state` compares buffers and extra state, too.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    global_batch_size: int
    loss: Callable[..., Any] | None = None
    task: Any = None
    tolerance: float = 1e-9
    double: bool = True
    state: bool = False


@dataclass
class Told:
    """The lines that a run wrote for the user; `of_probes` are those that the model's probes could say."""

    of_probes: frozenset[str]
    lines: list[str] = field(default_factory=list)
    began: bool = False

    def hear(self, event: Any) -> None:
        self.began = True
        if isinstance(event, Notice):
            self.lines.append(event.text)

    def about(self) -> dict[str, list[str]]:
        """Returns what was said of the model."""
        said = [line for line in self.lines if line in self.of_probes]
        whole = [line for line in self.lines if "not cut" in line or "left whole" in line]
        return {key: lines for key, lines in (("said", said), ("whole", whole)) if lines}


class Hang(BaseException):
    """A run that has not ended in time."""


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


def hard_entries() -> dict[str, Entry]:
    """Returns the hard cases by name."""
    return {
        name: Entry(each.model, each.batch, 4, each.loss, each.task, each.tolerance, each.double, state=True)
        for name, each in hard.cases().items()
    }


def built(make: Callable[[], nn.Module], double: bool) -> nn.Module:
    """Returns a model that drops nothing, in double precision."""
    module = make().double() if double else make()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif type(layer).__name__ == "StochasticDepth":
            vars(layer)["p"] = 0.0
    return module


def job(entry: Entry, accumulate: int = 1) -> hr.Job:
    torch.manual_seed(1)
    return hr.Job(
        model=partial(built, entry.model, entry.double),
        task=entry.task,
        loss=entry.loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=Examples(entry.batch()),
        global_batch_size=entry.global_batch_size,
        epochs=1,
        options=hr.Options(accumulate=accumulate),
    )


def trained(
    entry: Entry, strategy: hr.Strategy, accumulate: int = 1, on_event: Callable[[Any], None] | None = None
) -> dict[str, Tensor]:
    """Returns the trained tensors by name."""
    with deadline(LIMIT_S):
        run = hr.fit(job(entry, accumulate), strategy, checkpoints=False, timeout_s=30.0, on_event=on_event)
    if not entry.state:
        return {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for name, value in run.model.state_dict().items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for key, part in parts.items():
            found[name + key] = part.to_dense() if isinstance(part, Tensor) else torch.as_tensor(part)
    return found


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raises a `Hang` where what runs inside takes longer."""

    def end(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def probed(entry: Entry) -> frozenset[str]:
    """Returns the lines that the probes have for a model."""
    try:
        info = inspect_job(job(entry))
    except HeadraceError:
        return frozenset()
    findings = probe(info.job, info.module, objective_of(info.job, info.weighed))
    return frozenset((*info.notices, *(finding.line for finding in findings)))


def outcome(
    entry: Entry, normalises: bool, way: Way, reference: Callable[[int], dict[str, Tensor]], told: Told
) -> dict[str, Any]:
    """Returns what became of a model under a strategy."""
    try:
        found = trained(entry, way.strategy, on_event=told.hear)
    except Hang:
        return {"result": "hang"}
    except HeadraceError as error:
        return {"result": "failed" if told.began else "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:  # which no run should end with
        return {"result": "crash", "why": f"{type(error).__name__}: {error}"}
    if not way.equal:
        return {"result": "runs", **told.about()}
    expected = reference(way.pieces if normalises else 1)
    furthest = max(map(_distance, (found[name] for name in expected), expected.values()))
    result = "equal" if furthest <= entry.tolerance else "differs"
    return {"result": result, "distance": furthest, **told.about()}


def _distance(one: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max())


def row(entry: Entry, ways: Mapping[str, Way]) -> dict[str, Any]:
    """Returns what became of a model under each strategy."""
    normalises = any(isinstance(layer, _BatchNorm) and layer.training for layer in entry.model().modules())
    lines = probed(entry)
    known: dict[int, dict[str, Tensor]] = {}

    def reference(pieces: int) -> dict[str, Tensor]:
        if pieces not in known:
            known[pieces] = trained(entry, hr.OneDevice(threads=1), pieces)
        return known[pieces]

    results: dict[str, Any] = {}
    for name, way in ways.items():
        began = time.perf_counter()
        results[name] = outcome(entry, normalises, way, reference, Told(lines))
        results[name]["seconds"] = round(time.perf_counter() - began, 2)
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
    cell = f"{each['result']} {each['distance']:.0e}" if "distance" in each else str(each["result"])
    told = [word for word in ("said", "whole") if word in each]
    return ", ".join([cell, *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="names; all of them by default")
    parser.add_argument("--hard", action="store_true", help="the hard cases in place of models of libraries")
    parser.add_argument("--ways", nargs="*", help="strategies; all of them by default")
    parser.add_argument("--name", help="of the file in results/")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = hard_entries() if given.hard else entries()
    name = given.name or ("hard" if given.hard else "zoo")
    ways = {name: WAYS[name] for name in given.ways or WAYS}
    began, results = time.perf_counter(), {}
    (FOLDER / "results").mkdir(exist_ok=True)
    for model in given.models or known:
        print(model, file=sys.stderr, flush=True)
        results[model] = row(known[model], ways)
        document = {**machine(), "seconds": round(time.perf_counter() - began), "results": results}
        (FOLDER / "results" / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table(results, ways))


if __name__ == "__main__":
    main()
