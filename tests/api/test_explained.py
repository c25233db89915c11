"""What of a job fails, in words that name the layer, the memory, or what a function is called with."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.checks import inspect_job
from headrace.errors import JobError, UsageError

IMAGES, LABELS = torch.randn(32, 1, 8, 8), torch.arange(32) % 10


def job(**changes: Any) -> hr.Job:
    plain: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        "task": hr.tasks.multiclass(10),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "data": (IMAGES, LABELS),
        "global_batch_size": 8,
        "epochs": 1,
    }
    return hr.Job(**{**plain, **changes})


def test_shapes_that_do_not_fit_name_the_layer() -> None:
    with pytest.raises(JobError) as caught:
        inspect_job(job(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))))
    said = str(caught.value)
    assert "mat1 and mat2" in said
    assert "layer 1: Linear(in_features=784, out_features=10, bias=True) got (2, 64); the batch is" in said
    assert "8, 8)" in said.partition("the batch is")[2]


def test_hooks_are_taken_away() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(JobError, match="layer 1"):
        inspect_job(job(model=module))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


class Outside(nn.Module):
    """Fails between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images.flatten(1)) @ images


def test_what_fails_between_layers_names_none_of_them() -> None:
    with pytest.raises(JobError, match="cannot be run on data") as caught:
        inspect_job(job(model=Outside))
    assert "; layer" not in str(caught.value)


def wrong_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_loss_of_another_form() -> None:
    with pytest.raises(JobError, match=r"is called with the model's output and the target: loss\(output, target\)"):
        inspect_job(job(task=None, loss=wrong_loss))


def test_a_layer_that_is_too_large_says_how_large() -> None:
    with pytest.raises(JobError, match=r"the model cannot be built: it asks for \d+ TB at once, and .* are free"):
        inspect_job(job(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4 * 10**12))))


def test_a_job_without_data_or_batch() -> None:
    with pytest.raises(UsageError, match="a job needs data=: a tuple of tensors"):
        hr.Job(nn.Linear, torch.optim.SGD, epochs=1, task=hr.tasks.regression(), global_batch_size=8)
    with pytest.raises(UsageError, match="a job needs global_batch_size=: the examples"):
        hr.Job(nn.Linear, torch.optim.SGD, (IMAGES, LABELS), epochs=1, task=hr.tasks.regression())
