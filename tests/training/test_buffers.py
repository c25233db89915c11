"""Buffers that forward changes, under every strategy whose workers end rounds together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import UsageError
from headrace.spec.events import Notice
from headrace.strategies.refusals import refuse
from headrace.training.shared_buffers.synced import synced_buffers

THREADS = hr.ThreadEngine()


class Counting(nn.Module):
    """Buffers of several types, which follow what forward sees."""

    seen: Tensor
    odd: Tensor
    mean: Tensor
    wave: Tensor
    small: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex128))
        self.register_buffer("small", torch.zeros(1, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.mean.clone())
        if self.training:
            with torch.no_grad():
                self.seen += 1
                self.odd ^= True
                self.mean.lerp_(x.mean(0), 0.5)
                self.wave = self.wave * 0.5 + x.mean() * 0.5j
                self.small.fill_(1)
                self.cache = torch.zeros(len(x))
        return out


def trained(strategy: hr.Strategy, examples: int = 22, **options: Any) -> dict[str, Tensor]:
    inputs = torch.randn(examples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    job = hr.Job(
        model=Counting,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(inputs, inputs.sum(1, keepdim=True)),
        global_batch_size=6,
        steps=4,
        options=hr.Options(**options),
    )
    return hr.fit(job, strategy, engine=THREADS, check=False).model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [hr.Mirrored(2), hr.CentralStorage(3), hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2))]
)
def test_the_mean_equals_one_device(strategy: hr.Strategy) -> None:
    alone, several = trained(hr.OneDevice()), trained(strategy, sync_buffers="mean")
    for name, expected in alone.items():
        torch.testing.assert_close(several[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_first_is_rank_0s_and_local_differs() -> None:
    first, local = trained(hr.Mirrored(2), sync_buffers="first"), trained(hr.Mirrored(2))
    alone = trained(hr.OneDevice())
    assert first["seen"] == alone["seen"] == 4
    assert not torch.allclose(first["mean"], alone["mean"])
    assert not torch.allclose(local["layer.weight"], first["layer.weight"], rtol=1e-12), "rank 1's forward had its own"


def test_buffers_whose_sizes_differ_are_refused() -> None:
    def grown() -> nn.Module:
        class Growing(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.mean = torch.zeros(len(x), 4, dtype=x.dtype)
                out: Tensor = self.layer(x)
                return out

        return Growing()

    inputs = torch.ones(7, 4, dtype=torch.float64)
    job = hr.Job(
        model=grown,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(inputs, inputs.sum(1, keepdim=True)),
        global_batch_size=7,
        steps=1,
        options=hr.Options(sync_buffers="mean"),
    )
    with pytest.raises(UsageError, match="sizes depend on a worker's share"):
        hr.fit(job, hr.Mirrored(2), engine=THREADS)


@pytest.mark.parametrize("strategy", [hr.ParameterServer(2), hr.Downpour(2), hr.ParameterAveraging(2), hr.Gossip(2)])
def test_strategies_without_common_rounds_refuse_it(strategy: hr.Strategy) -> None:
    with pytest.raises(UsageError, match=r"sync_buffers='first' .*use mirrored, or sync_buffers='local'"):
        refuse(strategy.refusals(), hr.Options(sync_buffers="first"))


def test_which_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))
    assert [buffer.dtype for buffer in synced_buffers(model)] == [
        torch.int64,
        torch.float32,
        torch.float32,
        torch.int64,
    ]
    assert len(synced_buffers(Counting())) == 5
    assert ThreadCollective(ThreadGroup(1), 0).world == 1


class Kept(nn.Module):
    """Keeps its normalisation in eval mode, as frozen backbones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.layer = nn.Linear(4, 1, dtype=torch.float64)

    def train(self, mode: bool = True) -> Kept:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.norm(x))
        return out


def half_in_eval() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64).eval(), nn.Linear(4, 1, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Kept, half_in_eval])
def test_a_submodule_in_eval_mode_stays_so(model: Any) -> None:
    inputs = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    data = (inputs, inputs.sum(1, keepdim=True))
    job = hr.Job(
        model=model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        eval_data=data,
        global_batch_size=8,
        epochs=2,
    )
    results = [hr.fit(job, strategy, engine=THREADS) for strategy in (hr.OneDevice(), hr.Mirrored(2), hr.Pipeline(2))]
    for run in results:
        said = [event.text for event in run.events if isinstance(event, Notice)]
        assert any("in eval mode during training" in text for text in said)
        statistics = [tensor for name, tensor in run.model.state_dict().items() if "running_mean" in name]
        assert all(not tensor.any() for tensor in statistics)
    one, *others = (run.model.state_dict() for run in results)
    for other in others:
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_model_in_eval_mode_trains_in_train_mode() -> None:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    job = hr.Job(
        model=model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(inputs, inputs.sum(1, keepdim=True)),
        global_batch_size=8,
        steps=2,
    )
    run = hr.fit(job, hr.Mirrored(2), engine=THREADS)
    assert run.model[0].num_batches_tracked == 2
    assert not model.training
    assert any("came in eval mode" in event.text for event in run.events if isinstance(event, Notice))
