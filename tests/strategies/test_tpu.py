"""Steps of one shape: padded batches weigh nothing, one program a run, and what cannot be one program is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, _create_work_from_future
from torch.futures import Future

import headrace as hr
from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.devices import DEVICES
from headrace.errors import DataError, InfeasiblePlan, JobError, UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Notice
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.strategies.checks import check_device
from headrace.testing.strategies import DOUBLE
from headrace.training.fixed_shapes.program import FixedShapes
from headrace.training.user_code.objective import Objective
from headrace.worker.session import DeviceGroup
from strategies.contract_models import (
    ADAM,
    COUNTS,
    Case,
    Convolutional,
    Partial,
    Tied,
    dense,
    images,
    padded_text,
    without_padding,
)
from strategies.contract_runs import distance, train

pytestmark = pytest.mark.slow

EAGER = functools.partial(hr.TPU, compiler="eager")
"""Traces the same program, and runs it as it is."""

graphs: list[tuple[torch.fx.GraphModule, Sequence[Any]]] = []


def counting(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    graphs.append((graph, inputs))
    return graph.forward


@functools.cache
def counting_backend() -> str:
    """Returns the name of a backend that writes down what it compiles."""
    # Not while tests are collected: it imports the compiler.
    torch._dynamo.register_backend(name="headrace_counting")(counting)
    return "headrace_counting"


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


CASES = {
    "tokens": Case(Tied, padded_text, without_padding),
    "batch norm": Case(Convolutional, images, optimizer=ADAM),
    "micro-batches": Case(dense, options=hr.Options(accumulate=2, clip_norm=0.3)),
}


@pytest.mark.parametrize(
    ("name", "workers", "size"),
    [
        ("tokens", 3, "tiny"),
        ("batch norm", 2, "uneven"),
        ("micro-batches", 2, "uneven"),
    ],
)
def test_it_is_mirrored(name: str, workers: int, size: str) -> None:
    job = CASES[name].job(COUNTS[size])
    ours, theirs = train(job, EAGER(workers)), train(job, hr.Mirrored(workers))
    assert distance(ours.tensors, theirs.tensors) <= DOUBLE
    assert ours.losses == pytest.approx(theirs.losses, rel=DOUBLE, abs=DOUBLE)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=DOUBLE, abs=DOUBLE)


def test_a_run_with_uneven_last_batches_compiles_one_program_a_worker() -> None:
    graphs.clear()
    job = dataclasses.replace(Case(normalised).job(13), global_batch_size=8)
    train(job, hr.TPU(2, compiler=counting_backend()))
    # Three epochs of batches of 8 and 5: two workers with 4 examples each, and with 3 and 2.
    assert len(graphs) == 2
    shapes = [sorted(tuple(each.shape) for each in inputs if each.dim() and len(each) == 4) for _, inputs in graphs]
    assert shapes == [[(4,), (4,), (4, 4)]] * 2, "weights, targets, and what the model takes"
    assert torch._dynamo.config.recompile_limit > 1


class Recording(dist.ProcessGroup):
    """A backend of torch.distributed for one rank, that writes down which collectives it is asked for."""

    asked: ClassVar[list[str]] = []

    def getBackendName(self) -> str:
        return "headrace_recording"

    def broadcast(self, tensors: list[Tensor], options: object = None) -> Any:
        return self._done("broadcast", tensors)

    def allreduce(self, tensors: list[Tensor], options: object = None) -> Any:
        return self._done("allreduce", tensors)

    def _done(self, name: str, tensors: list[Tensor]) -> Any:
        self.asked.append(f"{name} {len(tensors[0].view(-1))} {tensors[0].dtype}")
        future: Future[list[Tensor]] = Future()
        future.set_result(tensors)
        return _create_work_from_future(future)


def test_its_collectives_are_those_of_the_backend_in_the_devices_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda store, rank, world, timeout: Recording(rank, world)  # noqa: E731
    dist.Backend.register_backend("headrace_recording", made, devices=["cpu"])
    monkeypatch.setitem(DEVICES, "cpu", dataclasses.replace(DEVICES["cpu"], backend="headrace_recording"))
    connected = TorchDistributed(HashStore(), 0, 1, "cpu", 30.0)
    try:
        monkeypatch.setattr(DeviceGroup, "_connect", lambda self: connected)
        job = Case(functools.partial(nn.Linear, 4, 3)).job(COUNTS["uneven"])
        theirs = train(job, hr.OneDevice())
        ours = train(job, EAGER(1))
    finally:
        connected.close()
    assert distance(ours.tensors, theirs.tensors) <= DOUBLE
    # The parameters once, then one sum in each of nine rounds, of the 15 gradients and what aligns them to cache lines.
    assert (
        Recording.asked
        == ["broadcast 12 torch.float64", "broadcast 3 torch.float64"] + ["allreduce 24 torch.float64"] * 9
    )


def program_of(module: nn.Module, examples: int = 4, loss: Callable[..., Any] = nn.functional.mse_loss) -> FixedShapes:
    return FixedShapes(module, Objective(loss), examples, torch.device("cpu"), "eager")


def share_of(*batch: Tensor) -> Share:
    return Share(batch, len(batch[0]), len(batch[0]), 0)


def loss_of(program: FixedShapes, *batch: Tensor, loss: Callable[..., Any] = nn.functional.mse_loss) -> Any:
    share = share_of(*batch)
    with program.errors():
        return program.loss(Objective(loss), share.batch, share)


def test_padding_weighs_nothing_at_all() -> None:
    module = nn.Linear(2, 1).double()
    program = program_of(module)
    x, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    for count in (4, 3, 1):
        rows = torch.arange(count) % 3
        padded, plain = loss_of(program, x[rows], y[rows]), nn.functional.mse_loss(module(x[rows]), y[rows])
        assert padded.item() == pytest.approx(plain.item(), rel=1e-14)
        ours, theirs = (torch.autograd.grad(each, [*module.parameters()]) for each in (padded, plain))
        assert all(torch.allclose(one, other, rtol=1e-13, atol=1e-14) for one, other in zip(ours, theirs, strict=True))
    assert program.compilations == 1


def test_another_form_of_batch_is_refused_and_not_compiled() -> None:
    program = program_of(nn.Linear(2, 1))
    loss_of(program, torch.ones(4, 2), torch.ones(4, 1))
    with pytest.raises(
        DataError, match=r"batch\[0\] is \(4, 2\) torch.float32, and here batch\[0\] is \(4, 3, 2\) tor"
    ):
        loss_of(program, torch.ones(4, 3, 2), torch.ones(4, 3, 1))
    with pytest.raises(UsageError, match="a step has 4 examples on each worker, and this batch 5"):
        loss_of(program, torch.ones(5, 2), torch.ones(5, 1))
    assert program.compilations == 1


class Counts(nn.Module):
    """Its forward depends on a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


def test_a_second_program_is_an_error() -> None:
    module = Counts()
    program = program_of(module)
    loss_of(program, torch.ones(4, 2), torch.ones(4, 1))
    module.factor = 2
    with pytest.raises(
        JobError, match="a second program: something that is no tensor has changed since the first step"
    ):
        loss_of(program, torch.ones(4, 2), torch.ones(4, 1))


def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x])


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(doubled(x))[: len(x)]


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Partial, nn.functional.mse_loss, "without control flow that depends on values; use mirrored"),
        (Doubling, nn.functional.mse_loss, "BatchNorm sees 8 rows where a worker has 4 examples"),
        (lambda: nn.Flatten(0), nn.functional.mse_loss, r"is a tensor of shape \(16,\), without one entry for each"),
    ],
    ids=["control flow", "batch norm", "no examples"],
)
def test_what_cannot_be_one_program_is_refused(
    model: Callable[[], nn.Module], loss: Callable[..., Any], said: str
) -> None:
    width = 2 if model is Doubling else 4
    with pytest.raises(JobError, match=said):
        loss_of(program_of(model(), loss=loss), torch.ones(4, width), torch.ones(4, width), loss=loss)


def test_evaluations_have_multiples_of_one_length() -> None:
    seen: list[int] = []
    module = nn.Linear(2, 1)
    module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    program = program_of(module)
    x = torch.randn(6, 2)
    for count in (6, 4, 1):
        assert torch.allclose(program.predict(module, x[:count], None), x[:count] @ module.weight.T + module.bias)
    assert program.predict(module, x[:0], None).shape == (0, 1)
    assert seen == [8, 4, 4, 0]


def test_options_and_loops_that_one_program_cannot_have() -> None:
    job = Case(dense).job(COUNTS["even"])
    with pytest.raises(UsageError, match="a step of tpu is one program without such talk; use batch_norm='local'"):
        train(dataclasses.replace(job, options=hr.Options(batch_norm="sync")), EAGER(2))

    def loop(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.backward(worker.model(batch[0]).sum())

    with pytest.raises(UsageError, match="the strategy computes whole steps; use worker"):
        train(job, EAGER(1), loop=loop)
    with pytest.raises(UsageError, match="compiler is the name of a backend of"):
        hr.TPU(compiler=3)  # type: ignore[arg-type]


def test_it_says_what_it_compiles_and_plans_for_tpus() -> None:
    job = Case(dense).job(COUNTS["even"])
    run = hr.fit(job, EAGER(2), device="cpu", engine=hr.ThreadEngine())
    notices = [event.text for event in run.events if isinstance(event, Notice)]
    assert "a step is one program for 2 examples a worker, compiled by eager" in notices
    model = ModelSpec((ParameterSpec("weight", (4,)),))
    launched = Cluster((Host("a", 4, 2**30, ("tpu", "tpu")),), 2, "tpu")
    plan = hr.TPU().plan(model, launched)
    check_device(hr.TPU(), plan, launched)
    assert [role.device for role in plan.roles] == ["tpu", "tpu"]
    alone = dataclasses.replace(launched, ranks=None)
    with pytest.raises(
        InfeasiblePlan, match=r"2 workers on tpu \(collectives: tpu_dist; package: torch_tpu; .* torchrun"
    ):
        check_device(hr.TPU(2), hr.TPU(2).plan(model, alone), alone)
