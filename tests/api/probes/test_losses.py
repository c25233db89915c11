"""A loss with parameters or buffers is trained, saved and resumed with the model, or refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.api.exporting import trained
from headrace.errors import JobError, UsageError

RNG = torch.Generator().manual_seed(1)
DATA = torch.randn(22, 4, generator=RNG, dtype=torch.float64), torch.randint(0, 3, (22,), generator=RNG)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
THREADS = hr.ThreadEngine()


class Learned(nn.Module):
    """Has a weight of each class, and a layer, that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3).double())
        self.layer = nn.Linear(3, 2).double()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.weight, target) + 0.1 * self.layer(output).square().mean()


class Centred(nn.Module):
    """Follows the mean output in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(output - self.centre, target)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return loss


def _net() -> nn.Module:
    # Its forward calls all its children, of which the loss is one meanwhile.
    return nn.Sequential(nn.Linear(4, 3)).double()


def _job(loss: Any, epochs: int = 2, **changes: Any) -> hr.Job:
    given = {
        "model": _net, "loss": loss, "optimizer": SGD, "data": DATA, "eval_data": DATA, "global_batch_size": 8,
        "epochs": epochs, **changes,
    }  # fmt: skip
    return hr.Job(**given)


def _by_hand(loss: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, loss = _net(), copy.deepcopy(loss)
    optimizer = SGD([*model.parameters(), *loss.parameters()])
    for epoch in range(2):
        for inputs, target in hr.data.batches(hr.data.as_pipeline(DATA)[0].batch(8), epoch=epoch):
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
    return model.state_dict() | {f"loss.{name}": each for name, each in loss.state_dict().items()}


def _state(run: hr.Run) -> dict[str, Tensor]:
    return run.model.state_dict() | {f"loss.{name}": each for name, each in run.loss.state_dict().items()}


def _require_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        hr.OneDevice(),
        hr.Mirrored(workers=2),
        hr.CentralStorage(workers=2),
        hr.ParameterServer(workers=2, staleness_bound=0),
    ],
    ids=lambda each: each.name,
)
def test_its_parameters_are_trained_with_the_model(strategy: Any) -> None:
    loss = Learned()
    before = copy.deepcopy(loss.state_dict())
    _require_same(_state(hr.fit(_job(loss), strategy, engine=THREADS)), _by_hand(loss))
    _require_same(loss.state_dict(), before)


@pytest.mark.parametrize("make", [Learned, Centred])
def test_it_is_saved_resumed_and_left_out_of_the_model_that_is_exported(make: Any, tmp_path: Path) -> None:
    loss = make()
    hr.fit(_job(loss, epochs=1), run_dir=tmp_path, engine=THREADS)
    run = hr.fit(_job(loss), run_dir=tmp_path, resume=True, engine=THREADS)
    _require_same(_state(run), _by_hand(loss))
    for step in (None, 6):
        job, module, _ = trained(_job(loss), tmp_path, step)
        _require_same(module.state_dict(), run.model.state_dict())
        # With which an export is measured.
        assert isinstance(job.loss, nn.Module)
        _require_same(job.loss.state_dict(), run.loss.state_dict())


def test_its_buffers_are_said_where_each_worker_has_its_own() -> None:
    run = hr.fit(_job(Centred()), hr.Mirrored(workers=2), engine=THREADS)
    assert any(
        "'headrace_loss.centre': forward changes" in event.text for event in run.events if event.kind == "notice"
    )


@pytest.mark.parametrize(
    "strategy",
    [hr.Pipeline(stages=1), hr.TensorParallel(devices=2), hr.FullySharded(workers=2)],
    ids=lambda each: each.name,
)
def test_strategies_that_divide_the_model_refuse_it(strategy: Any) -> None:
    with pytest.raises(UsageError, match="the loss has 3 parameters of its own, and this strategy divides the model"):
        hr.fit(_job(Learned()), strategy, engine=THREADS)


def test_parameters_that_nothing_would_train_are_refused() -> None:
    loss = Learned()
    with pytest.raises(JobError, match=r"the loss depends on . parameters that the model that is trained does not"):
        hr.fit(_job(lambda output, target: loss(output, target)), engine=THREADS)


def test_a_teacher_that_a_loss_asks_without_gradients_is_no_part_of_it() -> None:
    teacher = _net()

    def distilled(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return nn.functional.mse_loss(output, wanted)

    assert hr.fit(_job(distilled, inputs=0, target=lambda batch: batch), engine=THREADS).status == "ok"


def test_a_loss_of_torch_stays_out_of_the_model(tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3).double())
    run = hr.fit(_job(loss), run_dir=tmp_path, engine=THREADS)
    assert run.loss is loss
    assert sorted(run.model.state_dict()) == ["0.bias", "0.weight"]


class Keeping(nn.Module):
    """Leaves a number and a list for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.aux, self.kept, self.scale = torch.zeros(()), [torch.zeros(())], 2.0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        self.aux = self.kept[0] = output.square().mean()
        return output


class Holding(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + 0.1 * next(self.model.parameters()).square().sum()


def _losses(model: Keeping) -> dict[str, Any]:
    kept = model.kept
    return {
        "a variable": lambda output, target: cross_entropy(output, target) + model.aux,
        "a list": lambda output, target: cross_entropy(output, target) + kept[0],
        "its parameters": lambda output, target: cross_entropy(output, target) + model.layer.weight.square().sum(),
        "the model": Holding(model),
    }


@pytest.mark.parametrize("what", _losses(Keeping()))
def test_a_loss_that_looks_at_the_given_model_is_refused(what: str) -> None:
    model = Keeping()
    before = model.aux
    with pytest.raises(JobError, match=r"and workers train copies of the model, which it would not see; return from"):
        hr.fit(_job(_losses(model)[what], model=model), hr.OneDevice(), engine=THREADS)
    assert model.aux is before


def test_a_loss_may_look_at_what_the_given_model_does_not_change() -> None:
    model = Keeping()
    run = hr.fit(
        _job(lambda output, target: model.scale * cross_entropy(output, target), model=model),
        hr.Mirrored(2),
        engine=THREADS,
    )
    assert run.status == "ok"


class Leaving(nn.Module):
    """Leaves a number in its class, or one with its graph."""

    last: Tensor | float = 0.0
    with_graph = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        mean = hidden.square().mean()
        Leaving.last = mean if self.with_graph else mean.item()
        output: Tensor = self.head(hidden)
        return output


class LeavingGraph(Leaving):
    with_graph = True


@pytest.mark.parametrize("model", [Leaving, LeavingGraph])
@pytest.mark.parametrize("strategy", [hr.Pipeline(2), hr.Pipeline(2, 1), hr.Mirrored(2)])
def test_a_loss_that_looks_at_what_forward_leaves_is_refused_by_stages_and_threads(model: Any, strategy: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) * (1 + Leaving.last)

    with pytest.raises(UsageError, match=r"what forward leaves elsewhere .*, which other stages lack"):
        hr.fit(_job(loss, model=model), strategy, engine=THREADS)
    assert hr.fit(_job(loss, model=model), hr.Mirrored(1), engine=THREADS).status == "ok"
    assert hr.fit(_job(cross_entropy, model=model), strategy, engine=THREADS).status == "ok"


def test_a_forward_that_goes_back_through_the_last_ones_graph_is_named_where_layers_are_measured() -> None:
    class Carried(LeavingGraph):
        def forward(self, x: Tensor) -> Tensor:
            before = Leaving.last
            return super().forward(x) + 1e-30 * before

    Leaving.last = 0.0
    with pytest.raises(JobError, match=r"the model fails where its layers are measured .* keeps a graph from one"):
        hr.fit(_job(cross_entropy, model=Carried), hr.Pipeline(2), engine=THREADS)
