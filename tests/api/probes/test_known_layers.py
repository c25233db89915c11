"""Models of torch's own layers need no trial: the trials find nothing in any of them, and other models are tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.probes import known_layers, probing
from headrace.api.probes.known_layers import is_known
from headrace.training.user_code.objective import Objective

LOSS = Objective(hr.tasks.multiclass(3).loss)
LAYERS: dict[type, Callable[[], nn.Module]] = {
    nn.Linear: lambda: nn.Linear(6, 6),
    nn.Conv1d: lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 1), nn.Flatten()),
    nn.Conv2d: lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 1), nn.Flatten()),
    nn.MaxPool1d: lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.MaxPool1d(2), nn.Flatten()),
    nn.MaxPool2d: lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.MaxPool2d(1), nn.Flatten()),
    nn.AvgPool1d: lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.AvgPool1d(2), nn.Flatten()),
    nn.AvgPool2d: lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.AvgPool2d(1), nn.Flatten()),
}
# What dropout draws is said.
TRIED = [each for each in known_layers.LAYERS if each is not nn.Dropout]


def with_head(layer: nn.Module) -> nn.Module:
    width = layer(torch.randn(2, 6)).shape[1]
    return nn.Sequential(layer, nn.Linear(width, 3)).double()


def job_of(model: nn.Module) -> hr.Job:
    torch.manual_seed(0)
    data = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
    return hr.Job(model, torch.optim.SGD, data, task=hr.tasks.multiclass(3), global_batch_size=8, steps=1)


@pytest.mark.parametrize("layer", TRIED, ids=lambda each: each.__name__)
def test_the_trials_find_nothing_in_a_known_layer(layer: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_head(LAYERS.get(layer, layer)())
    with monkeypatch.context() as patched:
        patched.setattr(probing, "is_known", lambda module, objective: False)
        assert probing.probe(job_of(model), model, LOSS) == ()


def test_a_model_of_known_layers_runs_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[int] = []
    monkeypatch.setattr(known_layers, "_is_of_torch", lambda function: True)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forwards.append(len(x)) or x @ self.weight.T)
    model = nn.Sequential(nn.Linear(6, 3)).double()
    assert is_known(model, LOSS)
    assert probing.probe(job_of(model), model, LOSS) == ()
    assert forwards == [8], "one forward tells whether it draws random numbers"


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].register_full_backward_hook(lambda module, taken, given: (taken[0] / taken[0].norm(),))
    return model


def with_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].forward = lambda x: x[:, :3] - x[:, :3].mean(0)
    return model


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    "model",
    [
        hooked,
        with_forward,
        lambda: nn.Sequential(Own(6, 3)),
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)),
        lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Softmax(0)),
    ],
    ids=["hook", "forward", "subclass", "flat batch", "batch norm", "parametrized", "other layer"],
)
def test_other_models_are_tried(model: Callable[[], nn.Module]) -> None:
    assert not is_known(model(), LOSS)


def test_what_the_program_has_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    own_loss = Objective(lambda output, target: output.norm())
    of_inputs = Objective(LOSS.loss, inputs=lambda batch: batch[0] - batch[0].mean(0))
    assert is_known(model, LOSS)
    assert not is_known(model, own_loss)
    assert not is_known(model, of_inputs)
    for owner, name in (
        (nn.functional, "linear"),
        (nn.functional, "cross_entropy"),
        (torch, "tanh"),
        (nn.Tanh, "forward"),
        (nn.Module, "__call__"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *given: given[-1] - given[-1].mean(0))
            assert not is_known(model, LOSS), name
    handle = nn.modules.module.register_module_forward_hook(lambda module, taken, given: given - given.mean(0))
    try:
        assert not is_known(model, LOSS)
    finally:
        handle.remove()
