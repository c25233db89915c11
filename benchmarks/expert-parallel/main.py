"""Experts divided over two workers, beside mirrors and one device: memory and time. See README.md."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import WorkerEnded

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report

WIDTH, HIDDEN, EXPERTS, CHOSEN, LAYERS, TOKENS, BATCH = 256, 1024, 8, 2, 4, 64, 16
WARM_UP = 3


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made = made.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return x + made.view_as(x)


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mixture() for _ in range(LAYERS)))


def train(told: Path, worker: hr.Worker) -> None:
    """Leaves rank 0's milliseconds a step after the first ones."""
    for batch in worker.batches():
        if worker.round == WARM_UP:
            began = perf_counter()
        worker.step(batch)
    if worker.rank == 0:
        told.write_text(str(1e3 * (perf_counter() - began) / (worker.rounds - WARM_UP)))


def run(engine: LocalEngine, strategy: hr.Strategy, steps: int) -> tuple[float, float, float]:
    """Returns milliseconds a step, and MB of the fullest process: what it trains with, and all that it grew by."""
    torch.manual_seed(0)
    x = torch.randn(2 * BATCH, TOKENS, WIDTH)
    job = hr.Job(
        model=mixture,
        loss=F.mse_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.001),
        data=(x, x.flip(1)),
        global_batch_size=BATCH,
        steps=steps + WARM_UP,
    )
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        given = {"run_dir": f"{folder}/run", "engine": engine, "checkpoints": False, "device": "cpu"}
        events = hr.launch(partial(train, told), job, strategy, **given).events  # type: ignore[arg-type]
        ended = [event for event in events if isinstance(event, WorkerEnded)]
        held = max(2 * event.parameter_bytes + event.optimizer_bytes for event in ended)
        grown = max(event.peak_memory_bytes - event.runtime_bytes for event in ended)
        return float(told.read_text()), held / 1e6, grown / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args()
    ways = {
        "one device, one thread": hr.OneDevice(threads=1),
        "mirrored, 2 workers": hr.Mirrored(2),
        "expert_parallel, 2 workers": hr.ExpertParallel(2),
    }
    memory: dict[str, list[float]] = {}
    with LocalEngine() as engine:

        def milliseconds(name: str) -> float:
            taken, held, grown = run(engine, ways[name], chosen.steps)
            memory.setdefault(f"{name}: parameters, gradients, state", []).append(held)
            memory.setdefault(f"{name}: all that a process grew by", []).append(grown)
            return taken

        figures = alternate({name: partial(milliseconds, name) for name in ways}, chosen.rounds)
    one, mirrored, experts = ways
    here, kinds = Path(__file__).parent, ("parameters, gradients, state", "all that a process grew by")
    report(
        here,
        "time",
        "ms a step",
        figures,
        {f"{each} / {experts}": ratio(figures, each, experts) for each in (one, mirrored)},
    )
    ratios = {f"{experts} / {one}: {kind}": ratio(memory, f"{experts}: {kind}", f"{one}: {kind}") for kind in kinds}
    report(here, "memory", "MB", memory, ratios)


if __name__ == "__main__":
    main()
