"""The jobs: three real tasks, and a mixture of experts for the strategy that divides one."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.models import char_lstm, fashion_cnn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "char_lstm"), str(EXAMPLES / "large_lm")]
from llama import Block, LanguageModel, Shape  # noqa: E402
from stdlib_text import VOCAB, texts  # noqa: E402

TIME = 64
"""Characters of an example."""
GPT = Shape(layers=2, width=64, hidden=128, heads=4, kv_heads=2)
EXPERTS, CHOSEN = 8, 2
EVERY = 20
"""Rounds between evaluations. They are sync points of asynchronous workers, so that all periods divide this."""
CLIENTS, ALPHA, CLIENT_ROUNDS = 20, 0.3, 5
"""Clients whose classes are drawn with a concentration, each of whom has its turn for so many rounds."""
LBFGS_BATCHES = 10
"""Batches of the others in one of L-BFGS's."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        rate: the learning rate in the middle of those that are tried.
        optimizer: makes one with a learning rate.
        batch, rounds: of the run.
        data: returns examples to train on, and to evaluate on.
        metric: what the figures show beside the loss.
    """

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Pair, Pair]]
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    batch: int
    rounds: int
    classifies: bool = False

    def job(self, seed: int, rate: float, changes: str = "", rounds: int | None = None) -> hr.Job:
        """Returns the job; `changes` is "lbfgs" for another optimizer, on as many examples in larger batches, or
        "skewed" for examples that each worker has of one client, of few classes.
        """
        rounds, batch, every = rounds or self.rounds, self.batch, EVERY
        optimizer = functools.partial(self.optimizer, lr=rate)
        if changes == "lbfgs":
            rounds, batch, every = rounds // LBFGS_BATCHES, batch * LBFGS_BATCHES, EVERY // LBFGS_BATCHES
            optimizer = functools.partial(
                torch.optim.LBFGS, lr=1.0, max_iter=4, max_eval=10, line_search_fn="strong_wolfe"
            )
        train, test = self.data()
        examples = self.rounds * self.batch
        # As many as the run takes, so that none comes twice.
        data: Any = (train[0][:examples], train[1][:examples])
        if changes == "skewed":
            clients = hr.data.dirichlet(data[1], clients=CLIENTS, alpha=ALPHA)
            data = hr.data.by_client(hr.data.from_arrays(*data), clients, rounds=CLIENT_ROUNDS)
        return hr.Job(
            model=self.model,
            task=hr.tasks.multiclass(10) if self.classifies else None,
            loss=None if self.classifies else next_character,
            metrics=None if self.classifies else {"accuracy": accuracy},
            optimizer=optimizer,
            data=data,
            eval_data=test,
            global_batch_size=batch,
            steps=rounds,
            seed=seed,
            options=hr.Options(eval_every=every),
        )


def next_character(output: Tensor, target: Tensor) -> Tensor:
    """Mean over batch and time of logits `(batch, time, vocab)` against `(batch, time)`, nats."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).double().mean()


@functools.cache
def images() -> tuple[Pair, Pair]:
    found = hr.data.fashion_mnist()
    return found.train, (found.test_images[:1000], found.test_labels[:1000])


@functools.cache
def characters() -> tuple[Pair, Pair]:
    with contextlib.redirect_stderr(io.StringIO()):
        train, test = texts(TIME)
    # The windows of the text in another order: else a run sees the first files alone.
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
    held = torch.randperm(len(test[0]), generator=torch.Generator().manual_seed(0))[:128]
    return (train[0][order], train[1][order]), (test[0][held], test[1][held])


def unigram_entropy() -> float:
    """Returns the entropy of single characters of the text to evaluate on, nats."""
    _, (_, target) = characters()
    shares = torch.bincount(target.flatten(), minlength=VOCAB).double() / target.numel()
    return float(torch.special.entr(shares).sum())


class Mixture(nn.Module):
    """Takes the place of a feed-forward layer; each token goes to the two experts that the router likes best."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(shape.width, shape.hidden), nn.SiLU(), nn.Linear(shape.hidden, shape.width))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made = made.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return made.view_as(x)


def mixture() -> LanguageModel:
    model = LanguageModel(GPT, TIME)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.feed_forward = Mixture(GPT)
    return model


SGD = functools.partial(torch.optim.SGD, momentum=0.9)
TASKS = {
    "cnn": Task("Fashion-MNIST, convolutions", fashion_cnn, images, SGD, 0.06, 64, 200, classifies=True),
    "lstm": Task(
        "characters, LSTM", functools.partial(char_lstm, VOCAB, embedding=32, hidden=128), characters,
        torch.optim.Adam, 0.02, 32, 120,
    ),
    "gpt": Task(
        "characters, GPT", functools.partial(LanguageModel, GPT, TIME), characters, torch.optim.AdamW, 0.004, 16, 140,
    ),
    "mixture": Task(
        "characters, GPT with experts", mixture, characters, torch.optim.AdamW, 0.004, 16, 140,
    ),
}  # fmt: skip
