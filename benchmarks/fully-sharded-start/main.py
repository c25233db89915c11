"""The peak memory of every process that starts FullySharded: the model made in parts, and built whole by each.

python main.py --way parts|whole [--layers 24] [--workers 4]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import headrace as hr
from headrace.machine.allocator import give_back

WIDTH, VOCABULARY, LENGTH = 1024, 8192, 32


class Stack(nn.Module):
    """A transformer like GPT-2: embeddings, pre-norm blocks, a head tied to the embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def memory() -> dict[str, int]:
    """Returns what this process has of its own now, in pages and not files or shared memory, and its peak of all."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "VmHWM:", "RssShmem:")}
    return {"own_bytes": found["RssAnon:"], "shared_bytes": found["RssShmem:"], "peak_bytes": found["VmHWM:"]}


def steps(folder: Path) -> Callable[[hr.Worker], None]:
    """Returns a loop that writes what memory its process has before the first step, and after the last."""

    def train(worker: hr.Worker) -> None:
        figures = {"start": memory()}
        give_back()
        figures["start_trimmed"] = memory()
        for batch in worker.batches():
            worker.step(batch)
        figures["end"] = memory()
        give_back()
        figures["end_trimmed"] = memory()
        (folder / f"{worker.rank}.json").write_text(json.dumps(figures))

    return train


def measure(way: str, layers: int, workers: int) -> dict[str, object]:
    """Trains two steps."""
    count = 2 * workers
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    job = hr.Job(
        model=lambda: Stack(layers), loss=loss, optimizer=sgd, data=(tokens, tokens), global_batch_size=workers, steps=2
    )
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        hr.launch(
            steps(Path(folder)),
            job,
            hr.FullySharded(workers, deferred=way == "parts"),
            device="cpu",
            checkpoints=False,
            check=False,
        )
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers)]
    return {
        "model_bytes": model_bytes(layers),
        "launcher": memory(),
        **{when: {key: max(rank[when][key] for rank in ranks) for key in ranks[0][when]} for when in ranks[0]},
        "seconds": time.perf_counter() - begun,
    }


def model_bytes(layers: int) -> int:
    with torch.device("meta"):
        return sum(each.nbytes for each in Stack(layers).parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("parts", "whole"), required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    print(json.dumps(measure(given.way, given.layers, given.workers)))
