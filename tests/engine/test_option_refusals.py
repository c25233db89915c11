"""Options that cannot be kept are refused before anything starts, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers

import headrace as hr
from headrace.api.checks import inspect_job
from headrace.errors import DataError, JobError, UsageError
from headrace.spec.options import check_options

SGD = partial(torch.optim.SGD, lr=0.1)


def job(data: Any = None, model: Callable[[], nn.Module] | None = None, **options: Any) -> hr.Job:
    return hr.Job(
        model=model or partial(nn.Linear, 2, 1),
        loss=lambda output, target: F.mse_loss(output.float(), target.float()),
        optimizer=SGD,
        data=data or (torch.zeros(4, 2), torch.zeros(4, 1)),
        global_batch_size=2,
        epochs=1,
        options=hr.Options(**options),
    )


def prepared(**arguments: Any) -> None:
    inspect_job(job(**arguments))


def foreign(_: torch.optim.Optimizer) -> schedulers.LRScheduler:
    return schedulers.StepLR(SGD([torch.zeros(1)]), step_size=1)


class Remembering(schedulers.StepLR):
    """Keeps what no checkpoint can."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history = {1, 2}
        super().__init__(optimizer, step_size=1)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (schedulers.ReduceLROnPlateau, "ReduceLROnPlateau follows a metric, .*CosineAnnealingLR"),
        (lambda optimizer: 0.1, "must return a torch.optim.lr_scheduler.LRScheduler, got float; for example"),
        (foreign, "drives another optimizer than the one that it was given"),
        (Remembering, "the schedule's state holds a set, which a checkpoint cannot keep; use plain numbers"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(schedule: Callable[..., Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prepared(schedule=schedule)


def test_a_schedule_that_fails_is_an_error_of_the_job() -> None:
    with pytest.raises(JobError, match=r"the schedule cannot be made: TypeError: .*step_size"):
        prepared(schedule=schedulers.StepLR)


def test_half_precision_on_the_wrong_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"precision='fp16' is for GPUs.* use precision='bf16'"):
        check_options(hr.Options(precision="fp16"), "cpu")
    check_options(hr.Options(precision="fp16"), "cuda")
    check_options(hr.Options(precision="bf16"), "cpu")


@pytest.mark.parametrize(("dtype", "named"), [(torch.float64, "float64"), (torch.bfloat16, "bfloat16")])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_of_a_model_that_has_nothing_to_halve_is_refused(
    dtype: torch.dtype, named: str, precision: str
) -> None:
    data = (torch.zeros(4, 2, dtype=dtype), torch.zeros(4, 1))
    with pytest.raises(UsageError, match=rf"precision='{precision}' changes .* and the model's are {named};"):
        prepared(data=data, model=partial(nn.Linear, 2, 1, dtype=dtype), precision=precision)


class Packed(torch.utils.data.Dataset[Any]):
    """Examples that its loader packs one after the other, so that a batch has another first dim."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 2)


def test_a_batch_that_cannot_be_cut_is_refused_where_it_must_be() -> None:
    loader = torch.utils.data.DataLoader(Packed(), batch_size=2, collate_fn=lambda rows: (torch.cat(rows), None))
    packed = {"data": loader, "model": lambda: nn.Sequential(nn.Linear(2, 1), Zero())}
    inspect_job(whole(**packed))
    with pytest.raises(DataError, match=r"batch\[0\] is a tensor of shape \(6, 2\).*use accumulate=1"):
        inspect_job(whole(**packed, accumulate=2))


class Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0


def whole(data: Any, model: Callable[[], nn.Module], accumulate: int = 1) -> hr.Job:
    return hr.Job(
        model=model,
        loss=lambda output, _: output.mean(),
        optimizer=SGD,
        data=data,
        global_batch_size=2,
        epochs=1,
        options=hr.Options(accumulate=accumulate),
    )
