"""What each strategy's workers read of stored values: bytes, and that every worker begins with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.data.sources.storage import SourceFile
from weights.models import losses_of, write

pytestmark = pytest.mark.slow
WIDTH, EXPERTS = 64, 4


class Mixture(nn.Module):
    """Experts in a list, of which one is frozen, a layer that all workers have, and a buffer that forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.experts[1].requires_grad_(False)
        self.register_buffer("shift", torch.ones(1))
        self.double()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = F.layer_norm(self.first(x) + self.shift, [WIDTH]).flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return tokens, weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        tokens, weights, chosen = self.route(x)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made = made.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return x + made.view_as(x)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("tkoi,ti->tko", self.weight[index], tokens) + self.bias[index]
        return (each * weights[..., None]).sum(1)


class Stacked(Mixture):
    """Experts as rows of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Rows()  # type: ignore[assignment]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tokens, weights, chosen = self.route(x)
        made: Tensor = self.experts(tokens, chosen, weights)  # type: ignore[operator]
        return x + made.view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = self.into(x + self.shift).view(count, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(seen.transpose(1, 2).reshape(x.shape))


class Anchored(torch.optim.Optimizer):
    """Draws parameters to what they were when it was made."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        for each in self.param_groups[0]["params"]:
            self.state[each]["first"] = each.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-group["lr"]).lerp_(self.state[each]["first"], 0.1)


def half_frozen() -> nn.Module:
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    made[0].requires_grad_(False)
    return made


SGD = partial(torch.optim.SGD, lr=0.1)
X = torch.randn(8, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
# The model, the strategy, and what all workers read together of the files' bytes.
CASES: dict[str, tuple[Callable[[], nn.Module], hr.Strategy, float]] = {
    "mirrored": (Attention, hr.Mirrored(3), 1),
    "central_storage": (Attention, hr.CentralStorage(3), 1),
    "parameter_averaging": (Attention, hr.ParameterAveraging(3), 1),
    "gossip": (Attention, hr.Gossip(3), 1),
    "servers": (Attention, hr.ParameterServer(3, servers=2, staleness_bound=0), 1),
    "downpour": (Attention, hr.Downpour(3, servers=2), 1),
    "averages on servers": (Attention, hr.ParameterAveraging(3, via="server"), 1),
    "stages and servers": (
        nn.Sequential,
        hr.Hybrid(hr.ParameterServer(2, servers=2, staleness_bound=0), hr.Pipeline(2)),
        1,
    ),
    "slices and servers": (
        Attention,
        hr.Hybrid(hr.ParameterServer(2, servers=2, staleness_bound=0), hr.TensorParallel(2)),
        1,
    ),
    # Servers hold no frozen parameter, so that each of three workers reads the half of the model.
    "servers, half frozen": (half_frozen, hr.ParameterServer(3, staleness_bound=0), 2),
    "context_parallel": (Attention, hr.ContextParallel(2), 1),
    "replicas of rings": (Attention, hr.Hybrid(hr.Mirrored(2), hr.ContextParallel(2)), 1),
    "sharded rings": (Attention, hr.Hybrid(hr.FullySharded(2), hr.ContextParallel(2)), 1),
    "experts": (Mixture, hr.ExpertParallel(2), 1),
    "stacked experts": (Stacked, hr.ExpertParallel(3), 1),
    "replicas of experts": (Mixture, hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2)), 1.8),
    "sharded experts": (Mixture, hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2)), 1.2),
    "replicas of slices": (Attention, hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)), 1),
    "replicas of stages": (nn.Sequential, hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)), 1),
    "sharded stages": (nn.Sequential, hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2)), 1),
}


def stages() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def values_of(model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        return {name: each / 2 + 0.01 for name, each in model().state_dict().items()}


def job_of(model: Callable[[], nn.Module], folder: Path, optimizer: Any = SGD, steps: int = 3) -> hr.Job:
    return hr.Job(
        model=model, loss=F.mse_loss, optimizer=optimizer, data=(X, X.flip(1)), global_batch_size=8, steps=steps,
        seed=3, weights=folder,
    )  # fmt: skip


def loaded(model: Callable[[], nn.Module]) -> nn.Module:
    """Returns a model that its constructor has given the values that are stored."""
    module = model()
    module.load_state_dict(values_of(model))
    return module


def plain(model: Callable[[], nn.Module], optimizer: Any, steps: int = 3) -> tuple[dict[str, Tensor], list[float]]:
    module, losses = loaded(model), list[float]()
    made = optimizer(module.parameters())
    for _ in range(steps):
        made.zero_grad()
        value = F.mse_loss(module(X), X.flip(1))
        value.backward()
        made.step()
        losses.append(value.item())
    return module.state_dict(), losses


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest difference of two models' tensors."""
    assert one.keys() == other.keys()
    return max(float((each - other[name]).abs().max()) for name, each in one.items())


@pytest.mark.parametrize("name", CASES)
def test_workers_begin_with_stored_values_and_read_no_more_than_they_need(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, lock, into = list[int](), threading.Lock(), SourceFile.read_into

    def counted(self: SourceFile, start: int, buffer: memoryview) -> None:
        with lock:
            read.append(len(buffer))
        into(self, start, buffer)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    model, strategy, times = CASES[name]
    model = stages if model is nn.Sequential else model
    folder = write(tmp_path / "weights", values := values_of(model))
    run = hr.fit(job_of(model, folder), strategy, device="cpu", engine=hr.ThreadEngine(), checkpoints=False)
    total = sum(each.nbytes for each in values.values())
    assert 0.98 * times * total <= sum(read) <= 1.02 * times * total
    if strategy.equals_one_device:
        assert apart(run.model.state_dict(), plain(model, SGD)[0]) <= 1e-9


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (Attention, hr.FullySharded(2)),
        (Attention, hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2))),
        (Mixture, hr.ExpertParallel(2)),
        (Stacked, hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2))),
    ],
)
def test_an_optimizer_that_is_made_from_values_is_made_from_stored_ones(
    model: Callable[[], nn.Module], strategy: hr.Strategy, tmp_path: Path
) -> None:
    folder = write(tmp_path / "weights", values_of(model))
    run = hr.fit(job_of(model, folder, Anchored), strategy, device="cpu", engine=hr.ThreadEngine(), checkpoints=False)
    assert apart(run.model.state_dict(), plain(model, Anchored)[0]) <= 1e-9


class Deep(Attention):
    """With parameters that are made in parts, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2100), nn.Linear(2100, WIDTH)
        self.down.bias.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(super().forward(x))))
        return hidden


RINGS = hr.Hybrid(hr.FullySharded(2), hr.ContextParallel(2))
NESTED: dict[str, tuple[Callable[[], nn.Module], hr.Strategy]] = {
    "replicas of rings": (Deep, hr.Hybrid(hr.Mirrored(2), hr.ContextParallel(2))),
    "sharded rings": (Deep, RINGS),
    "sharded rings in parts": (Deep, hr.Hybrid(hr.FullySharded(2, deferred=True), hr.ContextParallel(2))),
    "replicas of sharded rings": (Deep, hr.Hybrid(hr.Mirrored(2), RINGS)),
    "replicas of experts": (Mixture, hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2))),
    "replicas of stacked experts": (Stacked, hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2))),
    "sharded experts": (Mixture, hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2))),
    "replicas of sharded stacked experts": (
        Stacked,
        hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.ExpertParallel(2)),
    ),
}


def fitted(job: hr.Job, strategy: hr.Strategy, **more: Any) -> hr.Run:
    return hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine(), **more)


@pytest.mark.parametrize("name", NESTED)
def test_nestings_of_rings_and_experts_begin_bit_for_bit_and_go_on_as_a_plain_loop(name: str, tmp_path: Path) -> None:
    model, strategy = NESTED[name]
    folder = write(tmp_path / "weights", values_of(model))
    still = fitted(job_of(model, folder, partial(torch.optim.SGD, lr=0.0), 1), strategy, checkpoints=False)
    assert apart(still.model.state_dict(), values_of(model)) == 0
    run = fitted(job_of(model, folder, steps=5), strategy, checkpoints=False)
    trained, losses = plain(model, SGD, 5)
    assert max(abs(one - two) for one, two in zip(losses_of(run), losses, strict=True)) <= 1e-9
    assert apart(run.model.state_dict(), trained) <= 1e-9


@pytest.mark.parametrize("name", NESTED)
def test_averages_and_what_is_resumed_are_those_of_a_model_that_loads_its_values(name: str, tmp_path: Path) -> None:
    model, strategy = NESTED[name]
    job = job_of(model, write(tmp_path / "weights", values_of(model)), torch.optim.AdamW, 4)
    job = replace(job, options=hr.Options(ema_decay=0.5))
    fitted(replace(job, steps=2), strategy, run_dir=tmp_path / "run")
    run = fitted(job, strategy, run_dir=tmp_path / "run", resume=True)
    other = fitted(replace(job, model=partial(loaded, model), weights=None), hr.OneDevice(), checkpoints=False)
    assert apart(run.model.state_dict(), other.model.state_dict()) <= 1e-9


@pytest.mark.parametrize("strategy", [hr.Mirrored(3), hr.CentralStorage(3)])
def test_sets_of_parameters_begin_with_stored_values(strategy: hr.Strategy, tmp_path: Path) -> None:
    def loss(module: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(module(batch[0]), batch[1])

    sets = {"into": hr.ParameterSet(Anchored, ["into.*"]), "out": hr.ParameterSet(SGD, ["out.*"])}
    job = job_of(Attention, write(tmp_path / "weights", values_of(Attention)), steps=5)
    job = replace(job, optimizer=sets, loss=dict.fromkeys(sets, loss), options=hr.Options(ema_decay=0.5))
    run = fitted(job, strategy, checkpoints=False)
    other = fitted(replace(job, model=partial(loaded, Attention), weights=None), hr.OneDevice(), checkpoints=False)
    assert apart(run.model.state_dict(), other.model.state_dict()) <= 1e-9


def big() -> nn.Module:
    return nn.Linear(WIDTH, 64 * WIDTH).double()


def tell(folder: Path, worker: hr.Worker) -> None:
    """Leaves how many bytes this process has read."""
    lines = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    (folder / f"{worker.rank}").write_text(lines["rchar"])
    for batch in worker.batches():
        worker.step(batch)


@pytest.mark.parametrize(("strategy", "apart"), [(hr.Mirrored(2), True), (hr.Mirrored(2, min_workers=1), False)])
def test_each_reads_where_the_first_worker_may_be_lost(strategy: hr.Strategy, apart: bool, tmp_path: Path) -> None:
    # Before the others have its parameters.
    folder = write(tmp_path / "weights", values := big().state_dict())
    job = replace(job_of(big, folder, steps=1), data=(X, torch.zeros(8, 6, 64 * WIDTH, dtype=torch.float64)))
    hr.launch(partial(tell, tmp_path), job, strategy, device="cpu", checkpoints=False)
    first, second = (int((tmp_path / str(rank)).read_text()) for rank in range(2))
    size = sum(each.nbytes for each in values.values())
    assert first - second > size / 2 if apart else abs(first - second) < size / 2
