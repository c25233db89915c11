"""Sequences that are divided over workers are trained as on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from collectives.seats import together
from headrace.context_parallel.replica import DividedForward
from headrace.context_parallel.ring import SharedRing
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UsageError
from headrace.spec.compute import TokenUse
from strategies.contract_runs import distance, train

ADAM = partial(torch.optim.Adam, lr=0.01)
WORDS, WIDTH, MOST = 11, 8, 40


class Block(nn.Module):
    """A layer of a transformer; `how` is given to attention."""

    def __init__(self, heads: int = 2, **how: Any) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.heads, self.how = heads, how

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.mixed(self.first(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, mask, **self.how)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.body(self.second(x))


class Decoder(nn.Module):
    """A language model that counts the places of its tokens; `again` runs its layers again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks = nn.ModuleList([Block(is_causal=True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.again = again

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.embedded, tokens, use_reentrant=False) if self.again else self.embedded(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        y: Tensor = self.head(x)
        return y

    def embedded(self, tokens: Tensor) -> Tensor:
        # Needs a graph of its own, for a checkpoint.
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Reader(nn.Module):
    """Reads both ways, where a mask of the batch lets it; gets positions."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)
        self.pairs = pairs

    def forward(self, tokens: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        shown = mask if self.pairs else mask[:, None, None, :]
        y: Tensor = self.head(self.block(self.words(tokens) + self.places(places), shown))
        return y


def words(count: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(length))


def written(tokens: int = 13, again: bool = False, **changes: Any) -> hr.Job:
    """A language model on texts that end early: how many tokens count differs."""
    torch.manual_seed(1)
    text = words(11, tokens)
    labels = torch.where(torch.arange(tokens) < torch.arange(11)[:, None] + 2, text, -100)
    job = hr.Job(
        model=Decoder(again).double(),
        task=hr.tasks.language_model(),
        optimizer=ADAM,
        data=(text, labels),
        eval_data=(text[:5], labels[:5]),
        global_batch_size=4,
        epochs=2,
        seed=3,
    )
    return dataclasses.replace(job, **changes)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def read(tokens: int = 14, pairs: bool = False) -> hr.Job:
    """A regression, whose loss no one knows; three numbers a token."""
    torch.manual_seed(1)
    text = words(9, tokens)
    shape = (9, 1, tokens, tokens) if pairs else (9, tokens)
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(shape, generator=generator) > 0.3
    mask[..., 0] = True
    target = torch.randn(9, tokens, 3, dtype=torch.float64, generator=generator)
    places = torch.arange(tokens).flip(0).expand(9, tokens).contiguous()
    data = [
        {"tokens": each[0], "mask": each[1], "places": each[2], "target": each[3]}
        for each in zip(text, mask, places, target, strict=True)
    ]
    return hr.Job(
        model=Reader(pairs).double(),
        loss=squared,
        optimizer=ADAM,
        data=data,
        eval_data=data[:3],
        global_batch_size=4,
        epochs=2,
        seed=3,
        inputs=["tokens", "mask", "places"],
        target="target",
    )


JOBS: dict[str, Callable[[], hr.Job]] = {
    "language model": written,
    "even": partial(written, 16),
    "short": partial(written, 5),
    "checkpoints": partial(written, again=True),
    "clipped": partial(written, options=hr.Options(clip_norm=0.2)),
    "accumulated": partial(written, options=hr.Options(accumulate=2)),
    "every label": partial(written, task=hr.tasks.language_model(shifted=False)),
    "other loss": partial(
        written, task=None, loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten().relu())
    ),
    "mask of keys": read,
    "mask of pairs": partial(read, pairs=True),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, workers) for name in sorted(JOBS) for workers in ((1, 2, 3, 4) if name == "language model" else (2, 3))],
)
def test_workers_that_are_threads_are_one_device(name: str, workers: int) -> None:
    right, found = train(JOBS[name](), hr.OneDevice()), train(JOBS[name](), hr.ContextParallel(workers))
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language model", "checkpoints", "mask of keys"])
def test_workers_that_are_processes_are_one_device(name: str) -> None:
    right = train(JOBS[name](), hr.OneDevice())
    with LocalEngine() as engine:
        for workers in (2, 4):
            found = train(JOBS[name](), hr.ContextParallel(workers), engine)
            assert distance(found.tensors, right.tensors) <= 1e-9
            assert found.losses == pytest.approx(right.losses, rel=1e-9)


def test_half_precision_is_near_one_device() -> None:
    job = written(model=Decoder(), options=hr.Options(precision="bf16"), optimizer=partial(torch.optim.SGD, lr=0.1))
    right, found = train(job, hr.OneDevice()), train(job, hr.ContextParallel(2))
    assert distance(found.tensors, right.tensors) <= 2e-2
    assert found.losses == pytest.approx(right.losses, rel=2e-2)


def test_a_loop_of_ones_own_does_whole_steps() -> None:
    def steps(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)

    right, found = train(written(), hr.OneDevice(), loop=steps), train(written(), hr.ContextParallel(2), loop=steps)
    assert distance(found.tensors, right.tensors) <= 1e-9

    def verbs(worker: hr.Worker) -> None:
        for text, _ in worker.batches():
            worker.backward(worker.model(text).mean())

    with pytest.raises(UsageError, match=r"use worker\.step"):
        train(written(), hr.ContextParallel(2), loop=verbs)


def test_a_model_that_looks_at_other_tokens_is_refused_before_the_start() -> None:
    class Mean(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            y = super().forward(tokens)
            return y - y.mean(1, keepdim=True)

    with pytest.raises(UsageError, match="the forward of Mean does not compute each token alone"):
        hr.fit(written(model=Mean().double()), hr.ContextParallel(2), device="cpu", engine=hr.ThreadEngine())


def test_hooks_of_parameters_are_refused() -> None:
    job = written()
    assert isinstance(job.model, Decoder)
    job.model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(UsageError, match=r"'head\.weight': .*the gradient of some tokens"):
        hr.fit(job, hr.ContextParallel(2), device="cpu", engine=hr.ThreadEngine(), check=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [(hr.Options(compile=True), "compile"), (hr.Options(batch_norm="sync"), "batch_norm='sync'")],
)
def test_options_that_it_cannot_have_are_refused(options: hr.Options, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hr.fit(written(options=options), hr.ContextParallel(2), device="cpu", engine=hr.ThreadEngine())


def test_numbers_that_the_trial_has_not_seen_are_refused_where_they_may_be_tokens() -> None:
    class Counting(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(self.count)[0]

    def act(use: TokenUse, count: int) -> None:
        def rank(group: Any) -> None:
            module = Counting(count)
            with DividedForward(module, SharedRing(group), group, use).dividing():
                module(torch.zeros(2, 12, 3))

        together(2, rank)

    act(TokenUse(), 5)
    with pytest.raises(UsageError, match="it was not called"):
        act(TokenUse(), 6)
    line = Counting.forward.__code__.co_firstlineno + 1
    counts = TokenUse((f"test_context_parallel.py:{line}, {Counting.forward.__qualname__}",))
    with pytest.raises(UsageError, match=r"this worker has 6 tokens; .* it counted tokens"):
        act(counts, 5)


HYBRIDS: dict[str, Callable[[], hr.Strategy]] = {
    "mirrored": lambda: hr.Hybrid(hr.Mirrored(2), hr.ContextParallel(2)),
    "sharded": lambda: hr.Hybrid(hr.FullySharded(2), hr.ContextParallel(2)),
    "both": lambda: hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.ContextParallel(2)),
}


@pytest.mark.parametrize("name", ["accumulated", "clipped", "language model", "mask of keys", "other loss"])
@pytest.mark.parametrize("hybrid", sorted(HYBRIDS))
def test_replicas_that_divide_sequences_are_one_device(hybrid: str, name: str) -> None:
    right, found = train(JOBS[name](), hr.OneDevice()), train(JOBS[name](), HYBRIDS[hybrid]())
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", sorted(HYBRIDS))
def test_processes_that_divide_sequences_are_one_device(hybrid: str) -> None:
    right = train(written(), hr.OneDevice())
    with LocalEngine() as engine:
        found = train(written(), HYBRIDS[hybrid](), engine)
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


@pytest.mark.parametrize(
    "levels",
    [
        (hr.ContextParallel(2), hr.Mirrored(2)),
        (hr.Mirrored(2), hr.ContextParallel(2), hr.TensorParallel(2)),
        (hr.ParameterAveraging(2), hr.ContextParallel(2)),
        (hr.Pipeline(2), hr.ContextParallel(2)),
    ],
)
def test_levels_that_cannot_be_around_it_are_refused(levels: tuple[hr.Strategy, ...]) -> None:
    with pytest.raises(UsageError, match=r"around hr\.ContextParallel"):
        hr.Hybrid(*levels)
