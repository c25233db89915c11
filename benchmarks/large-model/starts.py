"""What the processes of a run hold at most before the first step, with deferred=True and without. See README.md.

python benchmarks/large-model/starts.py [--width 1024] [--blocks 8] [STRATEGY ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import headrace as hr

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine

TOKENS, LENGTH = 4096, 16
STRATEGIES: dict[str, hr.Strategy] = {
    "pipeline-2": hr.Pipeline(2),
    "pipeline-4": hr.Pipeline(4),
    "tensor-2": hr.TensorParallel(2),
    "tensor-4": hr.TensorParallel(4),
    "experts-4": hr.ExpertParallel(4),
    "pipeline-2-tensor-2": hr.Hybrid(hr.Pipeline(2), hr.TensorParallel(2)),
    "mirrored-2-pipeline-2": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
    "sharded-2-tensor-2": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "sharded-2-pipeline-2": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2)),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return found


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(Block(width // 2) for _ in range(4))
        self.enter, self.leave = nn.Linear(width, width // 2), nn.Linear(width // 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        inside = self.enter(tokens)
        out = torch.zeros_like(inside)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, expert(inside[row]) * weights[row, place].unsqueeze(-1))
        return x + self.leave(out).view_as(x)


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], width: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def memory(name: str) -> int:
    """Returns VmRSS, or the peak VmHWM, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def build(make: Callable[[], nn.Module], folder: str) -> nn.Module:
    # From here on its peak counts.
    Path("/proc/self/clear_refs").write_text("5")
    place = Path(folder) / f"{os.getpid()}.begin"
    if not place.exists():
        place.write_text(str(memory("VmRSS")))
    return make()


def train(folder: str, worker: hr.Worker) -> None:
    held = sum(each.nbytes for each in worker.model.parameters() if not each.is_meta)
    own = memory("VmHWM") - int((Path(folder) / f"{os.getpid()}.begin").read_text())
    (Path(folder) / f"{worker.rank}.json").write_text(json.dumps({"start_bytes": own, "parameter_bytes": held}))
    for batch in worker.batches():
        worker.step(batch)


def deferred(strategy: hr.Strategy) -> hr.Strategy:
    if isinstance(strategy, hr.Hybrid):
        return hr.Hybrid(strategy.outer, deferred(strategy.inner))
    assert isinstance(strategy, hr.Pipeline | hr.TensorParallel | hr.ExpertParallel)
    return replace(strategy, deferred=True)


def measure(name: str, defers: bool, width: int, blocks: int) -> dict[str, int]:
    """Returns the most bytes that any worker, and the starting process, has taken before the first step."""
    strategy = deferred(STRATEGIES[name]) if defers else STRATEGIES[name]
    make = functools.partial(Net, Mixture if "experts" in name else Block, width, blocks)
    tokens = torch.randint(0, TOKENS, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        job = hr.Job(
            model=functools.partial(build, make, folder),
            loss=lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            data=(tokens, tokens),
            global_batch_size=8,
            steps=1,
        )
        hr.launch(functools.partial(train, folder), job, strategy, device="cpu", checkpoints=False, check=False)
        ranks = [json.loads(each.read_text()) for each in Path(folder).glob("*.json")]
    with torch.device("meta"):
        sizes = [each.nbytes for each in make().parameters()]
    return {
        "model_bytes": sum(sizes),
        "largest_parameter_bytes": max(sizes),
        "rank_holds_bytes": max(rank["parameter_bytes"] for rank in ranks),
        "start_bytes": max(rank["start_bytes"] for rank in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", choices=[*STRATEGIES, []], default=[])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    given = parser.parse_args()
    found = {}
    for name in given.strategies or STRATEGIES:
        found[name] = {
            when: measure(name, defers, given.width, given.blocks)
            for when, defers in (("whole", False), ("deferred", True))
        }
        print(name, json.dumps(found[name]), flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    place = results / f"starts-{given.width}-{given.blocks}.json"
    before = json.loads(place.read_text())["strategies"] if place.exists() else {}
    place.write_text(json.dumps({**machine(), "strategies": {**before, **found}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
