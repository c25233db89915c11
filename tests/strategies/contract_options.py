"""The options of training, each in a job where it bites: what every synchronous strategy does as one device does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import headrace as hr
from strategies.contract_models import (
    ADAM,
    SGD,
    Case,
    Idle,
    Partial,
    Recurrent,
    Tied,
    by_dimensions,
    by_name,
    dense,
    heavy_classes,
    padded_text,
    text,
    without_padding,
)

__all__ = ["BF16", "BF16_NAMES", "OPTIONS", "SCHEDULES"]

SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "lambda": partial(schedulers.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "step": partial(schedulers.StepLR, step_size=2, gamma=0.5),
    "multi-step": partial(schedulers.MultiStepLR, milestones=[1, 4, 4], gamma=0.5),
    "cosine": partial(schedulers.CosineAnnealingLR, T_max=6, eta_min=0.001),
    "restarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "one-cycle": partial(schedulers.OneCycleLR, max_lr=0.2, total_steps=20),
    "cyclic": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=3, mode="exp_range", gamma=0.9),
    "exponential": partial(schedulers.ExponentialLR, gamma=0.8),
    "linear": partial(schedulers.LinearLR, start_factor=0.3, total_iters=4),
    "polynomial": partial(schedulers.PolynomialLR, total_iters=7, power=2.0),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.ConstantLR(optimizer, 0.1, 2), schedulers.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.LinearLR(optimizer, 0.5, total_iters=3), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
}
"""Every kind of torch's that goes by steps."""

GROUPS = {
    "lambda": partial(schedulers.LambdaLR, lr_lambda=[lambda step: 0.9**step, lambda step: 1 / (step + 1)]),
    "one-cycle": partial(schedulers.OneCycleLR, max_lr=[0.2, 0.02], total_steps=20),
    "cyclic": partial(schedulers.CyclicLR, base_lr=[0.01, 0.002], max_lr=[0.2, 0.1], step_size_up=2),
}
"""With a value for each of two groups."""


def _case(model: Callable[..., Any] = dense, /, **options: Any) -> Case:
    return Case(model, options=hr.Options(**options))


OPTIONS: Mapping[str, Case] = {
    "accumulate-2": _case(accumulate=2),
    "accumulate-3": _case(accumulate=3),
    "accumulate-more-than-there-is": _case(accumulate=9),
    "accumulate-partial": _case(Partial, accumulate=2),
    "accumulate-idle": _case(Idle, accumulate=3),
    "accumulate-tied": Case(Tied, text, options=hr.Options(accumulate=2)),
    "accumulate-tokens": Case(Recurrent, padded_text, without_padding, options=hr.Options(accumulate=2)),
    "accumulate-mean": Case(dense, loss=heavy_classes, options=hr.Options(accumulate=3, clip_norm=0.3)),
    "accumulate-adam": Case(dense, optimizer=ADAM, options=hr.Options(accumulate=2)),
    "clip-value": _case(clip_value=0.02),
    "clip-value-partial": _case(Partial, clip_value=0.02),
    "clip-value-and-norm": _case(clip_value=0.05, clip_norm=0.1),
    "clip-after-accumulation": _case(accumulate=2, clip_value=0.05, clip_norm=0.1),
    "average": _case(ema_decay=0.7),
    "average-partial": _case(Partial, ema_decay=0.7),
    "average-tied": Case(Tied, text, options=hr.Options(ema_decay=0.5)),
    "average-idle": _case(Idle, ema_decay=0.9),
    "warm-up": _case(warmup=4),
    "warm-up-longer-than-the-run": _case(warmup=100),
    "warm-up-groups": Case(dense, optimizer=by_name, options=hr.Options(warmup=3)),
    **{f"schedule-{name}": _case(schedule=schedule) for name, schedule in SCHEDULES.items()},
    **{f"epochs-{name}": _case(schedule=SCHEDULES[name], schedule_every="epoch") for name in ("step", "restarts")},
    **{
        f"groups-{name}": Case(dense, optimizer=by_dimensions, options=hr.Options(schedule=schedule, warmup=2))
        for name, schedule in GROUPS.items()
    },
    "adam-one-cycle": Case(dense, optimizer=ADAM, options=hr.Options(schedule=SCHEDULES["one-cycle"])),
    "muon-schedule": Case(
        partial(torch.nn.Linear, 4, 3, bias=False),
        optimizer=partial(torch.optim.Muon, lr=0.02),
        options=hr.Options(schedule=SCHEDULES["cosine"], ema_decay=0.8),
    ),
    "unfrozen": Case(
        hr.frozen(Partial, "extra.*", until_epoch=2),
        options=hr.Options(accumulate=2, clip_value=0.05, ema_decay=0.7, schedule=SCHEDULES["step"]),
    ),
    "all-together": Case(
        Partial,
        optimizer=partial(SGD, nesterov=True),
        options=hr.Options(
            accumulate=2,
            clip_value=0.1,
            clip_norm=0.2,
            schedule=SCHEDULES["cosine"],
            warmup=3,
            ema_decay=0.8,
            on_nonfinite="skip",
        ),
    ),
}

BF16: Mapping[str, Case] = {
    "mlp": _case(precision="bf16"),
    "lstm": Case(Recurrent, text, options=hr.Options(precision="bf16")),
    "accumulate": _case(precision="bf16", accumulate=2, clip_norm=0.5),
    "tokens": Case(Recurrent, padded_text, without_padding, options=hr.Options(precision="bf16", accumulate=2)),
    "partial": _case(Partial, precision="bf16", ema_decay=0.8),
}


def _has_recurrent_bf16() -> bool:
    """Whether torch has kernels for an LSTM in bf16 on this processor; without AVX-512 it has none."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):
                raise
            return False
    return True


_RECURRENT = pytest.mark.skipif(not _has_recurrent_bf16(), reason="torch computes no LSTM in bf16 on this processor")
BF16_NAMES = [pytest.param(name, marks=_RECURRENT if BF16[name].model is Recurrent else ()) for name in sorted(BF16)]
"""The names of `BF16`, of which those that the processor cannot compute are skipped."""
