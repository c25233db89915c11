"""Sandblaster is L-BFGS on one device, and says what it cannot train."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.errors import InfeasiblePlan, UsageError
from headrace.strategies.refusals import refuse
from strategies.contract_runs import CLUSTER, MODEL, distance, train
from strategies.references import sandblaster

SEARCH = partial(torch.optim.LBFGS, history_size=10, line_search_fn="strong_wolfe")


def digits(dtype: torch.dtype, **changes: Any) -> hr.Job:
    images = hr.data.digits()
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(dtype),
        "loss": nn.functional.cross_entropy,
        "optimizer": partial(SEARCH, max_iter=1, max_eval=25),
        "data": (images.train_images[:300].to(dtype), images.train_labels[:300]),
        "eval_data": (images.test_images[:100].to(dtype), images.test_labels[:100]),
        "global_batch_size": 300,
        "epochs": 20,
    }
    return hr.Job(**{**given, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_20_iterations_are_those_of_one_device(dtype: torch.dtype, tolerance: float) -> None:
    job = digits(dtype)
    outcome, reference = train(job, hr.Sandblaster(2, servers=2)), sandblaster(job, 2)
    assert outcome.losses == pytest.approx(reference.losses, rel=tolerance, abs=tolerance)
    assert distance(outcome.tensors, reference.tensors) <= tolerance
    assert outcome.losses[-1] < 0.2 * outcome.losses[0]


def test_20_iterations_in_one_round_are_those_of_one_device() -> None:
    job = digits(torch.float64, optimizer=SEARCH, epochs=1)
    outcome, reference = train(job, hr.Sandblaster(1, servers=2)), sandblaster(job, 1)
    assert distance(outcome.tensors, reference.tensors) <= 1e-9
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-9)


def test_the_result_is_the_same_whoever_computes_what() -> None:
    job = digits(torch.float32, epochs=4)
    one, many = (train(job, hr.Sandblaster(workers, portions=11)) for workers in (1, 3))
    assert all(torch.equal(tensor, many.tensors[name]) for name, tensor in one.tensors.items())
    assert one.losses == pytest.approx(many.losses, rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Dropout(0.2), "2 (Dropout) draws random numbers (p=0.2)"),
        (nn.BatchNorm1d(10), "2 (BatchNorm1d) normalises by the statistics of a portion"),
        (nn.RReLU(), "2 (RReLU) draws random numbers"),
    ],
)
def test_a_loss_that_is_no_function_of_the_parameters_is_refused(layer: nn.Module, reason: str) -> None:
    job = digits(torch.float32, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10), layer))
    with pytest.raises(UsageError, match=re.escape(reason)):
        hr.fit(job, hr.Sandblaster(1), engine=hr.ThreadEngine())


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), nn.BatchNorm1d(10).eval()])
def test_layers_that_do_not_draw_are_taken(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), layer)
    assert hr.fit(digits(torch.float32, model=model, epochs=1), hr.Sandblaster(1), engine=hr.ThreadEngine()).metrics


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (hr.Options(clip_norm=1.0), "clip_norm=1.0 changes steps or gradients"),
        (hr.Options(clip_value=1.0), "clip_value=1.0 changes steps or gradients"),
        (hr.Options(warmup=3), "warmup=3 changes steps or gradients"),
        (hr.Options(ema_decay=0.9), "ema_decay=0.9 changes steps or gradients"),
        (hr.Options(on_nonfinite="skip"), "use on_nonfinite='raise'"),
        (hr.Options(sync_buffers="mean"), "sync_buffers='mean' combines buffers"),
    ],
)
def test_options_that_a_line_search_cannot_have_are_refused(options: hr.Options, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        refuse(hr.Sandblaster().refusals(), options)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"history": 0}, "history must be a whole number of at least 1, got 0"),
        ({"history": None}, "history must be a whole number of at least 1, got None"),
        ({"portions": 0}, "portions must be a whole number of at least 1, got 0"),
        ({"servers": None}, "servers must be a whole number of at least 1, got None"),
        ({"backups": 2}, "a server has one at most"),
    ],
)
def test_options_of_its_own_that_there_cannot_be(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        hr.Sandblaster(**given)


def test_it_takes_lbfgs_alone_and_no_other_strategy_does() -> None:
    job = digits(torch.float32)
    sgd = dataclasses.replace(job, optimizer=partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(UsageError, match="the strategy is L-BFGS, and the job's optimizer is SGD; use optimizer="):
        hr.fit(sgd, hr.Sandblaster(1), engine=hr.ThreadEngine())
    for strategy in (hr.OneDevice(), hr.Mirrored(1), hr.ParameterServer(1)):
        with pytest.raises(UsageError, match=re.escape("use hr.Sandblaster(workers=2) (--strategy sandblaster)")):
            hr.fit(job, strategy, engine=hr.ThreadEngine())


@pytest.mark.slow
def test_the_history_is_the_shorter_one_of_two() -> None:
    jobs = [digits(torch.float64, epochs=1, optimizer=partial(SEARCH, history_size=size)) for size in (2, 50)]
    short, long = (train(job, hr.Sandblaster(1, history=2)) for job in jobs)
    assert all(torch.equal(tensor, long.tensors[name]) for name, tensor in short.tensors.items())


def test_memory_for_the_vectors_is_asked_for() -> None:

    few, many = (hr.Sandblaster(1, history=history) for history in (1, 1_000_000))
    assert few.plan(MODEL, CLUSTER).elastic
    with pytest.raises(InfeasiblePlan, match="sandblaster needs"):
        many.plan(MODEL, CLUSTER)
