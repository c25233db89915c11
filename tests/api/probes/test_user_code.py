"""Hooks and forwards that are not the same over parts of a batch: found before the start, and refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headrace as hr
from headrace.errors import HeadraceError, JobError, UsageError

THREADS = hr.ThreadEngine()


class Model(nn.Module):
    """Three layers; `change` adds what is tried."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.body, self.mid, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.double()
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mid(torch.tanh(self.body(x)))))
        return out


def job(model: Any, **options: Any) -> hr.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(29, 4, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=model,
        loss=functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(x, x.square().sum(1, keepdim=True)),
        global_batch_size=8,
        epochs=1,
        options=hr.Options(**options),
    )


def trained(model: Any, strategy: hr.Strategy, **options: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = hr.fit(job(model, **options), strategy, engine=THREADS).model.state_dict()
    return state


def remain(model: Any) -> None:
    """No hook."""


def scale(model: Any) -> None:
    model.mid.weight.register_hook(lambda gradient: gradient * 0.5)


def masked(model: Any) -> None:
    kept = torch.ones(8, 8, dtype=torch.float64).tril()

    def apply(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(kept)

    model.mid.weight.register_post_accumulate_grad_hook(apply)


def decay(model: Any) -> None:
    model.mid.weight.register_hook(lambda gradient, own=model.mid.weight: gradient + 0.1 * own.detach())


def reverse(model: Any) -> None:
    model.mid.register_full_backward_hook(lambda module, to_input, to_output: (to_input[0] * -0.5,))


def double(model: Any) -> None:
    model.mid.register_full_backward_pre_hook(lambda module, to_output: (to_output[0] * 2,))


def clamp_values(model: Any) -> None:
    model.mid.register_full_backward_hook(lambda module, to_input, to_output: (to_input[0].clamp(-0.01, 0.01),))


def gain(model: Any) -> None:
    model.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))
    model.mid.register_forward_hook(lambda module, inputs, output: output * model.gain)


def clamp(model: Any) -> None:
    model.mid.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def clip(model: Any) -> None:
    def shorten(parameter: nn.Parameter) -> None:
        nn.utils.clip_grad_norm_([parameter], 0.05)

    model.mid.weight.register_post_accumulate_grad_hook(shorten)


def noise(model: Any) -> None:
    model.mid.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))


def step(model: Any) -> None:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    model.mid.weight.register_post_accumulate_grad_hook(update)


def remember(model: Any) -> None:
    last: list[Tensor] = []

    def smooth(gradient: Tensor) -> Tensor:
        last.append(gradient if not last else 0.9 * last.pop() + 0.1 * gradient)
        return last[-1]

    model.mid.weight.register_hook(smooth)


def combine(model: Any) -> None:
    model.mid.register_full_backward_hook(lambda module, to_input, to_output: (to_input[0] / to_input[0].norm(),))


CARRIED = (scale, masked, decay, reverse, double, clamp_values, gain)
REFUSED = {
    clamp: "'mid.weight': a hook of this parameter is not linear",
    clip: "'mid.weight': a hook of this parameter is not linear",
    noise: "'mid.weight': a hook of this parameter draws random numbers",
    step: "'mid.weight': a hook of this parameter changes the parameter itself",
    remember: "'mid.weight': a hook of this parameter remembers gradients",
    combine: "'mid': a backward hook of this module combines the examples of a batch",
}
WHOLE = {"pipeline": hr.Pipeline(2), "tensor_parallel": hr.TensorParallel(2)}
SHARED: dict[str, hr.Strategy] = {
    "mirrored": hr.Mirrored(2),
    "three mirrors": hr.Mirrored(3),
    "central_storage": hr.CentralStorage(2),
    "parameter_server": hr.ParameterServer(2, staleness_bound=0),
}


@functools.cache
def plain(change: Callable[[Any], None]) -> dict[str, Tensor]:
    """Trains with plain PyTorch."""
    described = job(functools.partial(Model, change))
    torch.manual_seed(described.seed)
    model = Model(change)
    optimizer = described.optimizer(list(model.named_parameters()))  # type: ignore[operator]
    for inputs, target in hr.data.batches(hr.data.as_pipeline(described.data)[0].batch(8), epoch=0, seed=0):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    return model.state_dict()


def instance(change: Callable[[Any], None]) -> nn.Module:
    torch.manual_seed(0)
    return Model(change)


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["function", "instance"])
@pytest.mark.parametrize("name", [*SHARED, *WHOLE])
@pytest.mark.parametrize("change", CARRIED, ids=lambda change: change.__name__)
def test_hooks_that_are_the_same_over_parts_are_carried(change: Callable[[Any], None], name: str, form: str) -> None:
    model = functools.partial(Model, change) if form == "function" else instance(change)
    if change is clamp_values and name == "parameter_server":
        with pytest.raises(UsageError, match="'mid': a backward hook of this module looks at the size of gradients"):
            trained(model, SHARED[name])
        return
    torch.testing.assert_close(trained(model, {**SHARED, **WHOLE}[name]), plain(change), rtol=0, atol=1e-9)


@pytest.mark.parametrize("change", [*CARRIED, clamp, clip, remember], ids=lambda change: change.__name__)
def test_with_micro_batches_a_hook_of_a_parameter_sees_the_whole_gradient(change: Callable[[Any], None]) -> None:
    found = trained(functools.partial(Model, change), hr.OneDevice(), accumulate=3)
    torch.testing.assert_close(found, plain(change), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_other_hooks_are_refused_where_a_batch_is_shared(change: Callable[[Any], None], name: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[change]):
        hr.fit(job(functools.partial(Model, change)), SHARED[name], engine=THREADS)


@pytest.mark.parametrize("change", [clamp, clip, remember, step], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", WHOLE)
def test_and_carried_where_it_is_not(change: Callable[[Any], None], name: str) -> None:
    found = trained(functools.partial(Model, change), WHOLE[name])
    torch.testing.assert_close(found, plain(change), rtol=0, atol=1e-9)


def test_a_strategy_that_differs_by_definition_says_so() -> None:
    run = hr.fit(job(functools.partial(Model, clamp)), hr.ParameterAveraging(2, period=2), engine=THREADS)
    assert any("is not linear" in event.text for event in run.events if event.kind == "notice")


@pytest.mark.parametrize("change", [scale, clamp, masked], ids=lambda change: change.__name__)
def test_hooks_of_divided_parameters_are_refused(change: Callable[[Any], None]) -> None:
    with pytest.raises(UsageError, match=r"'mid\.weight': fully_sharded divides the parameter"):
        hr.fit(job(functools.partial(Model, change)), hr.FullySharded(2), engine=THREADS, check=False)


def narrow(output: Tensor, target: Tensor) -> Tensor:
    """A loss in single precision of a model in double precision, as the transformers library's."""
    return functional.smooth_l1_loss(output.float(), target.float())


@pytest.mark.parametrize("strategy", [hr.ParameterServer(2), hr.Mirrored(2)], ids=str)
def test_the_rounding_of_a_loss_is_no_finding(strategy: hr.Strategy) -> None:
    run = hr.fit(dataclasses.replace(job(functools.partial(Model, remain)), loss=narrow), strategy, engine=THREADS)
    said = [event.text for event in run.events if event.kind == "notice"]
    assert not any("size of gradients" in text or "combines" in text for text in said)


def test_trying_hooks_leaves_their_state_and_the_model_as_they_were() -> None:
    calls: list[Tensor] = []
    model = instance(lambda model: model.mid.weight.register_hook(calls.append))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.body.weight.register_hook(lambda gradient: gradient.sign())  # type: ignore[union-attr,operator]
    with pytest.raises(UsageError, match="is not linear"):
        hr.fit(job(model), hr.Mirrored(2), engine=THREADS)
    assert calls == []
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Writes(Model):
    """Writes to a weight in forward: in the way `how` does."""

    def __init__(self, how: Callable[[nn.Parameter], None]) -> None:
        super().__init__(lambda _: None)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.how(self.body.weight)
        return super().forward(x)


def normalise(weight: nn.Parameter) -> None:
    weight.div_(weight.norm())


def replace(weight: nn.Parameter) -> None:
    weight.data = functional.normalize(weight.data, dim=1)


def limit(weight: nn.Parameter) -> None:
    weight.data.clamp_(-2, 2)


def fade(weight: nn.Parameter) -> None:
    weight.mul_(0.9)


class Renormed(nn.Module):
    """Its embedding shortens the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(5, 8, max_norm=1.0).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(x[:, 0].abs().long().clamp(0, 4)))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{how.__name__: functools.partial(Writes, how) for how in (normalise, replace, limit, fade)},
    "renormed": Renormed,
}
SEVERAL: dict[str, hr.Strategy] = {**SHARED, **WHOLE, "fully_sharded": hr.FullySharded(2)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_forward_that_writes_to_what_is_trained_is_refused(name: str, model: str) -> None:
    with pytest.raises(HeadraceError, match=r"'(body|rows)\.weight'"):
        hr.fit(job(MODELS[model]), SEVERAL[name], engine=THREADS)


def test_one_device_does_what_such_a_forward_says() -> None:
    hr.fit(job(MODELS["fade"]), engine=THREADS)
    hr.fit(job(MODELS["normalise"], accumulate=2), engine=THREADS)
    with pytest.raises(UsageError, match=r"'body.weight': forward .* once for each micro-batch"):
        hr.fit(job(MODELS["fade"], accumulate=2), engine=THREADS)


def shared_by_data(model: Any) -> None:
    model.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)).double()
    model.body[1].weight = nn.Parameter(model.mid.weight.data)


def transposed(model: Any) -> None:
    model.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)).double()
    model.body[1].weight = nn.Parameter(model.mid.weight.data.t())


def beside(model: Any) -> None:
    model.register_buffer("copy", model.mid.weight.data)


def in_attribute(model: Any) -> None:
    model.copy = model.mid.weight.data


def expanded(model: Any) -> None:
    model.mid.bias = nn.Parameter(torch.ones(1, dtype=torch.float64).expand(8))


def side_by_side(model: Any) -> None:
    memory = torch.randn(16, dtype=torch.float64)
    model.mid.bias, model.body.bias = nn.Parameter(memory[:8]), nn.Parameter(memory[8:])


def tied(model: Any) -> None:
    model.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)).double()
    model.body[1].weight = model.mid.weight


@pytest.mark.parametrize("change", [shared_by_data, transposed, beside, in_attribute, expanded])
def test_parameters_that_share_memory_without_being_one_are_refused(change: Callable[[Any], None]) -> None:
    for strategy in (hr.CentralStorage(2), hr.ParameterServer(2), hr.Pipeline(2), hr.FullySharded(2)):
        with pytest.raises(JobError, match=r"'(mid|body\.1)\.(weight|bias)' (shares memory with|is expanded)"):
            hr.fit(job(functools.partial(Model, change)), strategy, engine=THREADS, check=False)
    for model in (instance(change), hr.frozen(instance(change), "body.*")):
        with pytest.raises(JobError, match="a model that is given as an object is copied"):
            hr.fit(job(model), engine=THREADS, check=False)


@pytest.mark.parametrize("change", [side_by_side, tied])
@pytest.mark.parametrize("form", ["function", "instance"])
def test_parts_of_one_memory_and_tied_weights_are_not(change: Callable[[Any], None], form: str) -> None:
    model = functools.partial(Model, change) if form == "function" else instance(change)
    found = trained(model, hr.CentralStorage(2))
    torch.testing.assert_close(found, plain(change), rtol=0, atol=1e-9)
