"""What code around a model does that is divided among workers: as with plain PyTorch, or one error that says what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headrace as hr
from headrace.errors import UsageError
from worker.test_between_verbs import by_hand, make_job, net


def limits(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        nn.utils.clip_grad_norm_(worker.model.parameters(), 0.1)
        worker.update()


def penalises(worker: Any) -> None:
    for x, y in worker.batches():
        out = worker.model(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        worker.backward(functional.mse_loss(out, y) + slope.square().mean())
        worker.update()


def follows_a_copy(worker: Any) -> None:
    teacher = torch.optim.swa_utils.AveragedModel(worker.model)
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y + teacher(x).detach()))
        worker.update()
        teacher.update_parameters(worker.model)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (limits, r"no norm or sum of them can be taken in a loop; use Options\(clip_norm"),
        (penalises, "a derivative of a derivative .* use mirrored"),
        (follows_a_copy, r"cannot be copied under fully_sharded .* use Options\(ema_decay"),
    ],
)
def test_what_a_divided_model_cannot_do_is_said(loop: Callable[[Any], None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hr.launch(loop, make_job(), hr.FullySharded(2), engine=hr.ThreadEngine(), check=False)


def test_a_copy_of_a_split_model_computes_as_it_does() -> None:
    run = hr.launch(follows_a_copy, make_job(), hr.TensorParallel(2), engine=hr.ThreadEngine(), check=False)
    torch.testing.assert_close(run.model.state_dict(), by_hand(follows_a_copy), rtol=0, atol=1e-9)


def saved_in_half() -> nn.Module:
    module = net()
    module.register_state_dict_post_hook(lambda _, state, *__: state.update({k: v / 2 for k, v in state.items()}))
    return module


@pytest.mark.parametrize(
    "strategy", [hr.FullySharded(2), hr.TensorParallel(2), hr.Pipeline(2), hr.Hybrid(hr.Mirrored(1), hr.Pipeline(2))]
)
def test_a_state_dict_that_makes_other_tensors_is_refused_where_models_are_divided(strategy: hr.Strategy) -> None:
    with pytest.raises(UsageError, match=r"'0.weight', .*: the model's state_dict makes these tensors of others"):
        hr.fit(make_job(saved_in_half), strategy, engine=hr.ThreadEngine(), check=False)


def test_layers_with_hooks_stay_whole_for_servers_too() -> None:
    def hooked() -> nn.Module:
        module = net()
        module[2].weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index,union-attr]
        return module

    strategy = hr.Hybrid(hr.ParameterServer(workers=1, servers=2, staleness_bound=0), hr.TensorParallel(2))
    alone, run = (hr.fit(make_job(hooked), each, engine=hr.ThreadEngine()) for each in (hr.OneDevice(), strategy))
    torch.testing.assert_close(run.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-9)
