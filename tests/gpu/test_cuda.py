"""What a GPU changes: where tensors live, never the numbers."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace as hr
from headrace import devices, errors
from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.engine.local.engine import LocalEngine
from headrace.machine.versions import minor_of
from headrace.modules import describe
from headrace.spec.events import Stepped, WorkerStarted
from headrace.training.reduction import BucketReduction, CollectiveReduction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def make() -> nn.Module:
    """A small convolutional network with BatchNorm, in double precision."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).double()


@pytest.fixture
def job() -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (150,), generator=generator)
    return hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(x, y),
        eval_data=(x, y),
        global_batch_size=32,
        epochs=3,
        options=hr.Options(clip_norm=1.0, batch_norm="sync"),
    )


@pytest.fixture(scope="module")
def engine():
    with LocalEngine() as engine:
        yield engine


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


sums_unused = pytest.mark.skipif(minor_of(torch.__version__) < (2, 13), reason="fully_sharded needs torch 2.13")


@pytest.mark.parametrize(
    "strategy",
    [
        hr.OneDevice(),
        hr.Mirrored(1),
        hr.Mirrored(1, overlap=False),
        hr.CentralStorage(1),
        pytest.param(hr.FullySharded(1), marks=sums_unused),
    ],
    ids=str,
)
def test_one_gpu_gives_what_the_cpu_gives(job: hr.Job, engine: LocalEngine, strategy: hr.Strategy) -> None:
    here = hr.fit(job, hr.OneDevice(), device="cpu", engine=engine)
    there = hr.fit(job, strategy, device="cuda", engine=engine)
    assert next(event.device for event in there.events if isinstance(event, WorkerStarted)) == "cuda:0"
    assert largest_difference(here.model, there.model) < 1e-9
    assert there.metrics == pytest.approx(here.metrics, abs=1e-9)
    losses = [event.loss for event in there.events if isinstance(event, Stepped)]
    assert len(losses) == 15
    assert None not in losses


def test_two_workers_share_one_gpu_and_the_one_copy(
    job: hr.Job, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "found", lambda kind: ("cuda:0", "cuda:0") if kind.name == "cuda" else ())
    # Without BatchNorm: its exchange goes over NCCL, which refuses two ranks on one GPU.
    dense = [nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)]
    local = replace(job, options=hr.Options(clip_norm=1.0), model=nn.Sequential(*dense).double())
    here = hr.fit(local, hr.OneDevice(), device="cpu", engine=engine)
    there = hr.fit(local, hr.CentralStorage(2), device="cuda", engine=engine)
    assert largest_difference(here.model, there.model) < 1e-9
    # Each parameter begins at a multiple of 64 bytes.
    once = sum(-(-p.nbytes // 64) * 64 for p in here.model.parameters())
    assert there.summary.cost.parameter_bytes == once


@sums_unused
def test_two_workers_share_one_gpu_and_gather_units(job: hr.Job, engine: LocalEngine) -> None:
    here = hr.fit(job, hr.OneDevice(), device="cpu", engine=engine)
    there = hr.fit(job, hr.FullySharded(), device=["cuda:0", "cuda:0"], engine=engine)
    assert largest_difference(here.model, there.model) < 1e-9


@sums_unused
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU")
def test_two_gpus_gather_units_and_scatter_their_gradients(job: hr.Job, engine: LocalEngine) -> None:
    here = hr.fit(job, hr.OneDevice(), device="cpu", engine=engine)
    for strategy in (hr.FullySharded(2), hr.FullySharded(2, [], reshard_after_forward=False)):
        there = hr.fit(job, strategy, device="cuda", engine=engine)
        assert largest_difference(here.model, there.model) < 1e-9
        assert there.metrics == pytest.approx(here.metrics, abs=1e-9)


def test_more_workers_than_gpus_is_refused(job: hr.Job) -> None:
    with pytest.raises(errors.InfeasiblePlan, match="99 workers on cuda"):
        hr.fit(job, hr.Mirrored(99), device="cuda")


def test_nan_on_a_gpu_names_the_step(job: hr.Job, engine: LocalEngine) -> None:
    x, y = job.data
    broken = replace(job, data=hr.data.from_arrays(x.clone().index_fill_(0, torch.tensor([40]), float("nan")), y))
    with pytest.raises(errors.WorkerFailed, match="rank 0 at step 1"):
        hr.fit(broken, hr.OneDevice(), device="cuda", engine=engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_through_nccl(tmp_path: Path, overlap: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 7)).cuda()
    wire = TorchDistributed(torch.distributed.FileStore(str(tmp_path / "store"), 1), 0, 1, "cuda:0", 30.0)
    try:
        specs, group = describe(module).trainable, ThreadCollective(ThreadGroup(1), 0)
        reduction = (
            BucketReduction(specs, group, wire, module, torch.device("cuda:0"))
            if overlap
            else CollectiveReduction(specs, group, wire, torch.device("cuda:0"))
        )
        loss = module(torch.randn(8, 300, device="cuda")).square().mean()
        expected = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        reduction.sink.store(torch.autograd.grad(loss, list(module.parameters()), allow_unused=True))
        reduction.reduce()
        for view, gradient in zip(reduction.layout.views(reduction.result), expected, strict=True):
            assert torch.equal(view, gradient)
        tensor = torch.arange(5.0, device="cuda")
        wire.broadcast(tensor)
        assert wire.sum([1.5, 2.0]) == [1.5, 2.0]
    finally:
        wire.close()


def test_batches_arrive_as_they_were_read() -> None:
    data = hr.data.from_arrays(torch.rand(64, 3), torch.arange(64)).shuffle().map(lambda e: (e[0] * 2, e[1]))
    device = torch.device("cuda", 0)
    loader = hr.data.Loader(data, 0, 10, (1,), 0)
    for there, here in zip(hr.data.delivered(loader.sweep(), device), loader.sweep(), strict=True):
        assert there.batch[0].device == device
        assert (there.examples, there.of, there.epoch) == (here.examples, here.of, here.epoch)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there.batch, here.batch, strict=True))
