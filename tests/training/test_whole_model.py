"""Forward and backward on a worker's share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from collectives.seats import together
from engine.victims import make_job
from headrace.collectives.threads import ThreadCollective
from headrace.metrics import Mean
from headrace.spec.job import Share
from headrace.training.shared_buffers.batch_norm import synchronise_batch_norm
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import WholeModel


class Kept:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []
        self.nothing = 0

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = list(gradients)

    def store_nothing(self) -> None:
        self.nothing += 1


class TiedAndIdle(nn.Module):
    """Weights used twice, a frozen one and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def examples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(count, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def part(low: int, high: int, of: int = 6) -> Share:
    x, y = examples(of)
    return Share((x[low:high], y[low:high]), high - low, of, 0)


def weighted(output: Tensor, target: Tensor) -> Mean:
    weights = (target[:, 0] > 0).double()
    return Mean((weights * (output - target).square().sum(1)).sum(), weights.sum())


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TiedAndIdle()


def gradients_of(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> list[Tensor | None]:
    model = module()
    loss(model, *examples(6)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("cuts", [(0, 6), (0, 3, 6), (0, 1, 1, 6), (0, 4, 6, 6)], ids=str)
@pytest.mark.parametrize("weighed", [False, True])
def test_contributions_add_up_to_the_gradient_of_the_global_mean(cuts: tuple[int, ...], weighed: bool) -> None:
    loss: Callable[..., Any] = weighted if weighed else F.mse_loss

    modules = [module() for _ in cuts[1:]]

    def act(host: ThreadCollective) -> tuple[list[Tensor | None], float | None, float]:
        sink = Kept()
        share = part(cuts[host.rank], cuts[host.rank + 1])
        computed = WholeModel(modules[host.rank], Objective(loss, weighed=weighed), sink, host.sum).run(share)
        assert sink.nothing == (share.examples == 0)
        return sink.gradients, None if computed.loss is None else float(computed.loss), computed.weight

    def on_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = loss(model(x), y)
        return value.total / value.weight if weighed else value

    results = together(len(cuts) - 1, act)
    whole = gradients_of(on_one)
    assert whole[0] is None
    for index, expected in enumerate(whole):
        found = [gradients[index] for gradients, _, _ in results if gradients]
        if expected is None:
            assert found == [None] * len(found)
        else:
            torch.testing.assert_close(
                torch.stack([g for g in found if g is not None]).sum(0), expected, rtol=1e-12, atol=1e-14
            )
    mean = sum(value * weight for _, value, weight in results if value is not None) / sum(w for _, _, w in results)
    assert mean == pytest.approx(float(on_one(module(), *examples(6)).detach()), rel=1e-12)


class Recomputing(TiedAndIdle):
    """Recomputes in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def test_reentrant_checkpoints_have_the_same_gradients() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Recomputing()
    sink = Kept()
    WholeModel(model, Objective(F.mse_loss), sink).run(part(0, 6))
    for found, expected in zip(sink.gradients, gradients_of(lambda each, x, y: F.mse_loss(each(x), y)), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_a_sink_gradients_are_where_torch_leaves_them() -> None:
    model = module()
    computed = WholeModel(model, Objective(F.mse_loss)).run(part(0, 6))
    expected = gradients_of(lambda model, x, y: F.mse_loss(model(x), y))
    found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert [gradient is None for gradient in found] == [True, False]
    assert torch.equal(found[1], expected[1])  # type: ignore[arg-type]
    assert computed.weight == 6.0
    assert computed.loss is not None
    assert not computed.loss.requires_grad


@pytest.mark.parametrize("weighed", [False, True])
def test_an_empty_share_says_that_it_weighs_nothing(weighed: bool) -> None:
    said: list[Sequence[float]] = []
    sink = Kept()

    def total(values: Sequence[float]) -> list[float]:
        said.append(values)
        return [3.0]

    def fail(*_: object) -> Tensor:
        raise AssertionError("there is nothing to run the model on")

    computed = WholeModel(module(), Objective(fail, fail, weighed=weighed), sink, total).run(part(2, 2))
    assert (computed.loss, computed.weight) == (None, 0.0)
    assert sink.nothing == 1
    assert sink.gradients == []
    assert said == ([[0.0]] if weighed else [])


def test_a_batch_that_weighs_nothing_moves_nothing() -> None:
    sink = Kept()
    computed = WholeModel(module(), Objective(lambda o, t: Mean((o * 0).sum(), 0.0), weighed=True), sink).run(
        part(0, 6)
    )
    assert computed.loss is None
    assert computed.weight == 0.0
    assert sink.gradients[1] is not None
    assert not sink.gradients[1].any()


@pytest.mark.parametrize("weighed", [False, True])
def test_layers_that_talk_do_so_on_an_empty_share_too(weighed: bool) -> None:
    """A worker that has no example has no gradient either, even of a layer that looks at how many there are."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()
            self.few = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * self.few if len(x) < 3 else self.norm(x)

    def act(host: ThreadCollective) -> tuple[int, list[Tensor | None]]:
        model, sink = Normed(), Kept()
        assert synchronise_batch_norm(model, host)
        loss: Callable[..., Any] = weighted if weighed else F.mse_loss
        compute = WholeModel(model, Objective(loss, weighed=weighed), sink, host.sum, always=True)
        computed = compute.run(part(0, 6) if host.rank == 0 else part(6, 6))
        assert (computed.loss is None) == (host.rank == 1)
        return sink.nothing, sink.gradients

    (first, gradients), (second, nothing) = together(2, act)
    assert (first, second, nothing) == (0, 1, [])
    assert [gradient is None for gradient in gradients] == [True, False, False]
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


def test_a_prediction_has_no_gradient_and_keeps_the_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    compute = WholeModel(model, Objective(F.mse_loss))
    x = torch.ones(2, 3)
    output = compute.predict((x, None))
    assert not output.requires_grad
    assert torch.equal(output, model[0](x))


def test_a_batch_of_any_form_comes_to_the_device() -> None:
    compute = WholeModel(nn.Linear(1, 1, device="meta"), Objective(F.mse_loss))
    placed = compute.place({"pair": (torch.ones(1), [torch.ones(2)]), "name": "a", "count": 3})
    assert placed["pair"][0].device.type == placed["pair"][1][0].device.type == "meta"
    assert (placed["name"], placed["count"]) == ("a", 3)
    here = (torch.ones(1), [torch.ones(2)])
    assert WholeModel(nn.Linear(1, 1), Objective(F.mse_loss)).place(here) is here


def test_a_mean_is_over_the_weights_of_all_workers() -> None:
    def loss(output: Tensor, target: Tensor) -> Mean:
        weights = torch.where(target > 0, 9.0, 1.0)
        return Mean((weights * (output - target) ** 2).sum(), weights.sum())

    job = make_job(task=None, loss=loss)
    one, two = (
        hr.fit(job, strategy, engine=hr.ThreadEngine(), check=False).model.state_dict()
        for strategy in (hr.OneDevice(), hr.Mirrored(2))
    )
    torch.testing.assert_close(two, one, atol=1e-6, rtol=0.0)
