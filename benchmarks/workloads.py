"""The two workloads, as jobs and as plain parts: communication-heavy and compute-heavy."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.models import cnn, mlp

MODELS = {"mlp": (mlp, (784,)), "cnn": (cnn, (3, 32, 32))}
EXAMPLES_A_WORKER = 64
LARGE = "resnet50"
"""Of torchvision, for accelerators: in bfloat16, channels last."""
GPT2 = "gpt2"
"""A decoder of GPT-2's smallest size, 124 million parameters, for accelerators: in bfloat16."""
WORDS, LENGTH = 50257, 512
"""Of `GPT2`: the vocabulary, and tokens of an example; 1024 are its most."""


def model(workload: str) -> Callable[[], nn.Module]:
    """Returns what makes the model of a workload."""
    if workload == LARGE:
        large: Callable[[], nn.Module] = importlib.import_module("torchvision.models").resnet50
        return large
    return Decoder if workload == GPT2 else MODELS[workload][0]


class Decoder(nn.Module):
    """Embeddings of words and positions, blocks of causal attention, and the words' embeddings again as the head."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(1024, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        here = self.words(tokens) + self.places.weight[:length]
        return self.blocks(here, mask=mask, is_causal=True) @ self.words.weight.T


def loss_of(workload: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the loss of a workload's output and targets."""
    return next_words if workload == GPT2 else nn.functional.cross_entropy


def next_words(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def examples(workload: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(count, ...)` inputs and `(count,)` classes."""
    generator = torch.Generator().manual_seed(0)
    if workload == GPT2:
        tokens = torch.randint(WORDS, (count, LENGTH), generator=generator)
        return tokens, tokens
    shape = (3, 224, 224) if workload == LARGE else MODELS[workload][1]
    return torch.randn(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator)


def throughput(
    workload: str,
    strategy: hr.Strategy,
    workers: int,
    seconds: float,
    engine: LocalEngine,
    device: str | Sequence[str] = "cpu",
    options: hr.Options | None = None,
) -> float:
    """Trains for some seconds under a strategy; returns examples/s in steady state."""
    make, _ = MODELS[workload]
    job = hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples(workload, 4096)),
        global_batch_size=EXAMPLES_A_WORKER * workers,
        steps=1_000_000,
        options=options or hr.Options(),
    )
    from headrace.api.fit import fit

    with tempfile.TemporaryDirectory() as folder:
        run = fit(job, strategy, device=device, run_dir=Path(folder) / "run", seconds=seconds, engine=engine)
        rate = run.throughput
    if rate is None:
        raise RuntimeError(f"{seconds} s are too short for {workload}")
    return rate


def endless() -> hr.Job:
    """Returns a job of tiny steps that runs until it is ended."""
    generator = torch.Generator().manual_seed(0)
    return hr.Job(
        model=functools.partial(nn.Linear, 64, 10),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator)),
        global_batch_size=256,
        epochs=1_000_000,
    )
