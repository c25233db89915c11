"""A model that is made in parts trains as on one device, under every strategy whose workers have parts of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace as hr
from headrace.collectives.threads import ThreadCollective
from headrace.errors import UsageError
from headrace.strategies.deferred import require_same_parts
from headrace.training.deferred.parts import Deferral
from headrace.training.user_code.divided import run_in_threads

WIDTH, TOKENS = 256, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return found


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.narrow(torch.relu(self.wide(x)))
        return found


class Mixture(nn.Module):
    """Two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, expert(tokens[row]) * weights[row, place].unsqueeze(-1))
        return x + out.view_as(x)


class Net(nn.Module):
    """Tied ends, buffers, layers that are drawn twice and one that begins as a multiple of another."""

    def __init__(self, block: type[nn.Module] = Block, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("scale", torch.rand(1))
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.05)
        if block is Block:
            with torch.no_grad():
                first, second = self.blocks[0], self.blocks[1]
                assert isinstance(first, Block)
                assert isinstance(second, Block)
                second.wide.weight.copy_(first.wide.weight * 0.5)
                second.narrow.weight.mul_(1 / second.narrow.weight.std())
        if tied:
            self.head.weight = self.tokens.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def job_of(block: type[nn.Module] = Block, steps: int = 2, tied: bool = True) -> hr.Job:
    tokens = torch.randint(0, TOKENS, (16, 6), generator=torch.Generator().manual_seed(0))
    return hr.Job(
        model=partial(Net, block, tied),
        loss=loss,
        optimizer=sgd,
        data=(tokens, tokens),
        global_batch_size=8,
        steps=steps,
        seed=3,
    )


def apart(run: hr.Run, other: hr.Run) -> float:
    one, two = run.model.state_dict(), other.model.state_dict()
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


STRATEGIES: dict[str, tuple[hr.Strategy, type[nn.Module]]] = {
    "pipeline": (hr.Pipeline(2, deferred=True), Block),
    "interleaved": (hr.Pipeline(2, schedule="interleaved", deferred=True), Block),
    "tensor": (hr.TensorParallel(2, deferred=True), Block),
    "experts": (hr.ExpertParallel(2, deferred=True), Mixture),
    "mirrored pipelines": (hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, deferred=True)), Block),
    "mirrored slices": (hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2, deferred=True)), Block),
    "mirrored experts": (hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2, deferred=True)), Mixture),
    "sharded experts": (hr.Hybrid(hr.FullySharded(2, deferred=True), hr.ExpertParallel(2)), Mixture),
    "sharded stages": (hr.Hybrid(hr.FullySharded(2, deferred=True), hr.Pipeline(2)), Block),
    "sharded slices": (hr.Hybrid(hr.FullySharded(2, deferred=True), hr.TensorParallel(2)), Block),
    "sliced stages": (hr.Hybrid(hr.Pipeline(2), hr.TensorParallel(2, deferred=True)), Block),
    "averaged pipelines": (hr.Hybrid(hr.ParameterAveraging(2, period=1), hr.Pipeline(2, deferred=True)), Block),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_parts_of_a_model_that_is_made_in_parts_train_as_on_one_device(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy, block = STRATEGIES[name]
    job = job_of(block)
    run = hr.fit(job, strategy, device="cpu")
    assert "bytes of parameters are made one by one" in capsys.readouterr().err
    assert apart(hr.fit(job, device="cpu"), run) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pipeline", "tensor", "experts", "mirrored slices", "sharded slices", "sharded experts"]
)
def test_parts_begin_with_stored_values(name: str, tmp_path: Path) -> None:
    strategy, block = STRATEGIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        values = Net(block).state_dict()
    del values["head.weight"]
    save_file(values, tmp_path / "model.safetensors")
    job = replace(job_of(block), weights=tmp_path)
    assert apart(hr.fit(job, device="cpu"), hr.fit(job, strategy, device="cpu")) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "tensor", "experts", "sharded experts"])
def test_a_resumed_run_takes_the_values_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    strategy, block = STRATEGIES[name]
    job = job_of(block, steps=3)
    hr.fit(replace(job, steps=2), strategy, device="cpu", run_dir=tmp_path)
    resumed = hr.fit(job, strategy, device="cpu", run_dir=tmp_path, resume=True)
    assert apart(hr.fit(job, device="cpu"), resumed) <= 1e-9


def test_ranks_that_would_make_parts_of_different_models_are_refused() -> None:
    said: dict[int, str] = {}

    def rank(collective: ThreadCollective) -> None:
        with pytest.raises(UsageError) as refused:
            require_same_parts(modules[collective.rank], collective)
        said[collective.rank] = str(refused.value)

    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(Deferral().build(Net))
    run_in_threads(rank)
    assert all("does something else in each process" in said[number] for number in range(2))


def test_what_deferred_cannot_be_is_refused() -> None:
    for kind in (hr.Pipeline, hr.TensorParallel, hr.ExpertParallel):
        with pytest.raises(UsageError, match="deferred must be True or False, got 1"):
            kind(2, deferred=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="servers must know the slices before the start"):
        hr.Hybrid(hr.Downpour(2), hr.TensorParallel(2, deferred=True))
