"""The slowest stage of the automatic split, beside the best of all contiguous splits, every stage measured as such.

The split is chosen from a profile of single layers. Then every stage that there could be is measured as one piece, on
its own inputs and gradients, and all splits are compared by these seconds: the sums of layers are not asked again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import machine

from headrace.models import char_lstm, cnn, fashion_cnn, mlp
from headrace.modules import describe
from headrace.pipeline.partition import Terms, split
from headrace.pipeline.profile import Sweep, profile
from headrace.pipeline.stage import TracedModel, cut
from headrace.pipeline.trace.tracing import trace
from headrace.spec.model import ModelSpec
from headrace.training.whole_model import Objective

EXAMPLES = 32
STAGES = (2, 3, 4)
Bounds = tuple[int, int]


class UNet(nn.Module):
    """Skips over one and over three levels; `(batch, 1, 64, 64)` to as much."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        convolution = partial(nn.Conv2d, kernel_size=3, padding=1)
        self.first, self.second = convolution(1, width), convolution(width, 2 * width)
        self.middle = convolution(2 * width, 2 * width)
        self.third, self.last = convolution(4 * width, width), convolution(2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.first(x))
        low = F.relu(self.second(F.max_pool2d(high, 2)))
        deep = F.relu(self.middle(F.max_pool2d(low, 2)))
        up = F.relu(self.third(torch.cat([F.interpolate(deep, scale_factor=2), low], 1)))
        return self.last(torch.cat([F.interpolate(up, scale_factor=2), high], 1))


class Encoder(nn.Module):
    """Four layers of attention; `(batch, time)` to logits `(batch, vocab, time)`."""

    def __init__(self, vocab: int = 1000, features: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, features)
        layer = nn.TransformerEncoderLayer(features, 4, 4 * features, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(features, vocab)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(text))).transpose(1, 2)


def gpt2() -> nn.Module:
    """GPT-2 with 12 blocks as transformers makes it: with its cache, and the head tied to the embedding."""
    # Here, because the other models need no transformers.
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"vocab_size": 5000, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=256, n_head=8, **tokens))


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


Batch = tuple[Tensor, Tensor]


def classes(*shape: int) -> Batch:
    return torch.randn(EXAMPLES, *shape), torch.randint(0, 10, (EXAMPLES,))


def text(vocab: int, examples: int = EXAMPLES) -> Batch:
    return torch.randint(0, vocab, (examples, 64)), torch.randint(0, vocab, (examples, 64))


def characters(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(output: Any, target: Tensor) -> Tensor:
    return characters(output.logits, target)


ZOO: dict[str, tuple[Callable[[], nn.Module], Batch, Callable[..., Tensor]]] = {
    "mlp": (mlp, classes(784), F.cross_entropy),
    "cnn": (cnn, classes(3, 32, 32), F.cross_entropy),
    "fashion_cnn": (fashion_cnn, classes(1, 28, 28), F.cross_entropy),
    "char_lstm": (partial(char_lstm, 65), text(65), characters),
    "8 linear layers": (linears, classes(1024), F.cross_entropy),
    "u-net": (UNet, (torch.randn(8, 1, 64, 64), torch.randn(8, 1, 64, 64)), F.mse_loss),
    "encoder": (Encoder, text(1000), F.cross_entropy),
    "gpt2, 12 blocks": (gpt2, text(5000, 4), tokens),
}


def every_stage(traced: TracedModel, batch: Batch, loss: Callable[..., Tensor], rounds: int) -> dict[Bounds, float]:
    """Returns the seconds of every stage that there could be: of all splits into three, in turn."""
    names = [layer.name for layer in traced.layers]
    places = [0, *(index + 1 for index, layer in enumerate(traced.layers) if not layer.joined)]
    sweeps = {}
    for start, stop in combinations(places, 2):
        bounds = sorted({0, start, stop, len(names)})
        stages = cut(traced, [names[a:b] for a, b in pairwise(bounds)])
        sweep = Sweep(traced.module, stages, traced.inputs(batch), lambda output: loss(output, batch[1]), CPU)
        sweeps[start, stop] = sweep, bounds.index(start)
    totals: list[float] = []
    figures: dict[Bounds, list[float]] = {bounds: [] for bounds in sweeps}
    for round_ in range(rounds + 1):
        for bounds, (sweep, index) in sweeps.items():
            seconds = [forward.busy_s + backward.busy_s for forward, backward in sweep.run()]
            if round_:
                # Every sweep does the whole model, so its length is that of the machine's drift.
                totals.append(sum(seconds))
                figures[bounds].append(seconds[index] / totals[-1])
    return {bounds: statistics.median(shares) * statistics.median(totals) for bounds, shares in figures.items()}


CPU = torch.device("cpu")


def slowest(stops: list[int], seconds: dict[Bounds, float], spec: ModelSpec) -> float:
    """Returns the seconds of the slowest stage, with what it sends and receives."""
    crossing = [0, *(layer.crossing_bytes for layer in spec.layers[:-1]), 0]
    moved = 2 / Terms().bytes_per_s
    return max(seconds[a, b] + moved * (crossing[a] + crossing[b]) for a, b in pairwise([0, *stops]))


def compare(name: str, rounds: int) -> list[dict[str, object]]:
    make, batch, loss = ZOO[name]
    torch.manual_seed(0)
    model = make()
    measured = profile(model, Objective(loss), batch, threads=1)
    spec = replace(describe(model), layers=measured.layers)
    traced = trace(model, batch)
    seconds = every_stage(traced, batch, loss, rounds)
    count = len(spec.layers)
    inner = [index + 1 for index, layer in enumerate(spec.layers[:-1]) if not layer.joined]
    rows: list[dict[str, object]] = []
    for stages in STAGES:
        if stages > len(inner) + 1:
            continue
        chosen = [len(part) for part in split(spec, stages, Terms())]
        stops = [sum(chosen[: index + 1]) for index in range(stages)]
        splits = {cuts: slowest([*cuts, count], seconds, spec) for cuts in combinations(inner, stages - 1)}
        ours, best = slowest(stops, seconds, spec), min(splits.values())
        counts = [b - a for a, b in pairwise([0, *min(splits, key=splits.__getitem__), count])]
        rows.append(
            {"model": name, "stages": stages, "splits": len(splits), "ours": chosen, "ours_s": ours}
            | {"best": counts, "best_s": best, "over": ours / best - 1}
        )
        print(
            f"{name:16} {stages} stages  {len(splits):3} splits   ours {'-'.join(map(str, chosen)):10} "
            f"{ours * 1e3:7.2f} ms   best {'-'.join(map(str, counts)):10} {best * 1e3:7.2f} ms  {ours / best - 1:+.1%}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--name", default="partition", help="of the file in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in arguments.models for row in compare(name, arguments.rounds)]
    worst = max(float(str(row["over"])) for row in rows)
    print(f"the slowest stage is at most {worst:.1%} slower than in the best split")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {**machine(), "rounds": arguments.rounds, "worst": worst, "rows": rows}
    (results / f"{arguments.name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
