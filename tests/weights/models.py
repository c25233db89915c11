"""A job whose model begins with stored values, and these; worker processes import this file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import headrace as hr
from headrace.spec.events import Stepped

TOKENS, WIDTH, LAYERS = 50, 16, 4


class Stack(nn.Module):
    """Embeddings, layers of which one has a frozen weight, a head, and a buffer that forward uses."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.ones(1))
        self.layers[1].get_parameter("first.weight").requires_grad_(False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.tokens(tokens))) * self.scale
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Odd rows, which two ranks cannot divide evenly.
        self.first, self.second, self.norm = nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.norm(hidden + self.second(F.gelu(self.first(hidden))))
        return found


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def stored(tied: bool = False) -> dict[str, Tensor]:
    """Values that no constructor of the job makes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        state = Stack(tied).state_dict()
    return {name: each + 0.25 for name, each in state.items()}


def write(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
    """Writes tensors as one file, or as several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(tensors)
    listed = {name: f"model-{index % files + 1:05}-of-{files:05}.safetensors" for index, name in enumerate(names)}
    for file in {*listed.values()}:
        save_file({name: tensors[name] for name in names if listed[name] == file}, folder / file, {"format": "pt"})
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": listed})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def job_of(weights: Path | str | None, tied: bool = False, steps: int = 5, rate: float = 1e-2) -> hr.Job:
    """Each step has all examples, so that their order does not matter."""
    tokens = torch.randint(0, TOKENS, (8, 6), generator=torch.Generator().manual_seed(0))
    return hr.Job(
        model=partial(Stack, tied),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=rate),
        data=(tokens, tokens),
        global_batch_size=8,
        steps=steps,
        seed=3,
        weights=weights,
    )


def losses_of(run: hr.Run) -> list[float]:
    """Returns the loss of each step: those of all workers that have one, by their weights."""
    steps: dict[int, list[Stepped]] = {}
    for each in run.events:
        if isinstance(each, Stepped) and each.loss is not None:
            steps.setdefault(each.step, []).append(each)
    weighed = [[(each.loss or 0.0, each.weight) for each in steps[step]] for step in sorted(steps)]
    return [sum(value * weight for value, weight in own) / sum(weight for _, weight in own) for own in weighed]
