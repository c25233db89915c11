"""Every nesting of strategies up to four levels: how far it is from one device, and bytes predicted and counted.

What is nested in what is asked of `hr.Hybrid`: each order of levels that it takes is run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError, UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import WorkerEnded
from headrace.spec.model import ModelSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine
from llama import TOKENS, WORDS, llama

BATCH, STEPS, MOST = 16, (2, 6), 16
RESULTS = Path(__file__).parent / "results" / "nestings.json"
PARTITIONS = {2: [19, 20], 4: [10, 9, 9, 11]}
"""Between blocks: "auto" cuts by measured times, which on a machine that does other work differ from run to run."""
LEVELS: dict[str, Callable[[int], hr.Strategy]] = {
    "M": hr.Mirrored,
    "F": hr.FullySharded,
    "P": lambda stages: hr.Pipeline(stages, micro_batches=2, partition=PARTITIONS[stages]),
    "T": hr.TensorParallel,
    "C": hr.ContextParallel,
    "E": hr.ExpertParallel,
}


def nestings(counts: list[int]) -> Iterator[tuple[str, hr.Strategy]]:
    """Yields what `hr.Hybrid` takes, of at most so many levels and processes, and each level alone."""
    for depth in range(1, 5):
        for names in itertools.permutations(LEVELS, depth):
            for sizes in itertools.product(counts, repeat=depth):
                if math.prod(sizes) > MOST or sum(size != counts[0] for size in sizes) > 1:
                    continue
                levels = [LEVELS[name](size) for name, size in zip(names, sizes, strict=True)]
                try:
                    strategy = levels[0] if depth == 1 else hr.Hybrid(*levels)
                except UsageError:
                    continue
                yield " ".join(f"{name}{size}" for name, size in zip(names, sizes, strict=True)), strategy


def job(mixture: bool, steps: int, examples: int) -> hr.Job:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, WORDS, (examples, TOKENS), generator=generator)
    return hr.Job(
        model=functools.partial(llama, mixture),
        task=hr.tasks.language_model(shifted=False),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        data=(text, text.roll(-1, 1)),
        global_batch_size=BATCH,
        steps=steps,
        options=hr.Options(clip_norm=0.5),
    )


def trained(
    strategy: hr.Strategy, mixture: bool, steps: int, examples: int, engine: Any
) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the parameters after so many steps, and the bytes that a rank has moved, on average."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"device": "cpu", "engine": engine, "checkpoints": False, "check": False}
        run = hr.fit(job(mixture, steps, examples), strategy, run_dir=folder, **given)
        tensors = {name: each.detach() for name, each in run.model.named_parameters()}
        return tensors, mean(event.moved_bytes for event in run.events if isinstance(event, WorkerEnded))


def row(strategy: hr.Strategy, mixture: bool, profile: ModelSpec, right: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns what a nesting does: the last batch of the first run has fewer examples than the others."""
    with LocalEngine() as engine:
        found, _ = trained(strategy, mixture, STEPS[1], 2 * BATCH + 5, engine)
        apart = max(float((found[name] - each).abs().max()) for name, each in right.items())
        few, many = (trained(strategy, mixture, steps, BATCH, engine)[1] for steps in STEPS)
    moved = (many - few) / (STEPS[1] - STEPS[0])
    try:
        cluster = Cluster((Host("here", 16, 64_000_000_000),))
        predicted = hr.simulate(profile, cluster, strategy, global_batch_size=BATCH).moved_bytes
    except HeadraceError as error:
        return {"apart": apart, "counted": moved, "refused": str(error)}
    return {"apart": apart, "counted": moved, "predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[2], help="of each level; one may have another")
    parser.add_argument("--only", nargs="+", default=[], help='nestings such as "M2 T2"')
    parser.add_argument("--missing", action="store_true", help="only those that the file of results does not have")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["nestings"] if RESULTS.exists() else {}
    known: dict[bool, Any] = {}
    print(f"{'nesting':16}{'from one device':>18}{'predicted':>12}{'counted':>12}{'ratio':>8}")
    for name, strategy in nestings(chosen.counts):
        if (chosen.only and name not in chosen.only) or (chosen.missing and name in rows):
            continue
        if chosen.list:
            print(name)
            continue
        mixture = "E" in name
        if mixture not in known:
            right, _ = trained(hr.OneDevice(), mixture, STEPS[1], 2 * BATCH + 5, None)
            known[mixture] = hr.profile(job(mixture, 4, 2 * BATCH), batch_sizes=[], seconds=0.01), right
        try:
            rows[name] = made = row(strategy, mixture, *known[mixture])
        except HeadraceError as error:
            rows[name] = made = {"refused": str(error)}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({**machine(), "nestings": rows}, indent=1) + "\n")
        if "apart" not in made:
            print(f"{name:16}{'refused':>18}  {made['refused']:.120}", flush=True)
            continue
        ratio = f"{made['counted'] / made['predicted']:8.4f}" if made.get("predicted") else f"{'-':>8}"
        said = f"{made['predicted']:12,.0f}" if "predicted" in made else f"{'-':>12}"
        print(f"{name:16}{made['apart']:18.1e}{said}{made['counted']:12,.0f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
