"""Plan, model, cluster, options and job: the values that deciding is about."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.spec.job import Job
from headrace.spec.model import ITEM_BYTES, ModelSpec, ParameterSpec
from headrace.spec.options import EarlyStopping, Options
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import EVERY_WORKER, Plan, Role, Segment, name_of

PLAN = Plan(
    strategy="mirrored",
    options={"workers": 2, "note": None},
    roles=(
        Role(0, "worker", "a", "cpu", 1, 0),
        Role(1, "worker", "a", "cpu", 1, 1),
        Role(2, "server", "a", "cpu", 1, -1),
    ),
    shares=(1, 1),
    segments=(Segment("weight", 0, 6, EVERY_WORKER), Segment("bias", 0, 2, 0)),
    gradient_bytes=32,
)


def test_a_server_is_named_as_one():
    assert [name_of(PLAN, rank) for rank in (1, 2)] == ["rank 1", "rank 2 (a server)"]


@pytest.mark.parametrize(
    "value",
    [
        PLAN,
        ModelSpec((ParameterSpec("weight", (2, 3)),), (ParameterSpec("mean", (), "float64", False),), sliceable=False),
        Cluster((Host("a", 2, 2**33), Host("b", 8, 2**36, ("cuda:0",))), ranks=4, device="cuda"),
        Options(clip_norm=1.0, batch_norm="sync"),
        Options(accumulate=2, warmup=3, precision="bf16", ema_decay=0.9, on_nonfinite="rollback", eval_every=7),
    ],
)
def test_values_survive_json(value: object) -> None:
    assert from_plain(type(value), json.loads(json.dumps(to_plain(value)))) == value


def test_a_plan_counts_those_that_compute() -> None:
    assert PLAN.workers == 2


def test_a_plan_is_printed_without_its_segments() -> None:
    assert "Segment" not in repr(PLAN)
    assert "mirrored" in repr(PLAN)


@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(sorted(ITEM_BYTES)))
def test_elements_and_bytes_of_a_parameter(shape: list[int], dtype: str) -> None:
    parameter = ParameterSpec("p", tuple(shape), dtype)
    assert parameter.elements == math.prod(shape)
    assert parameter.bytes == parameter.elements * getattr(torch, dtype).itemsize


def test_frozen_parameters_get_no_gradient() -> None:
    weight, bias = ParameterSpec("weight", (2, 3)), ParameterSpec("bias", (3,), "float64")
    model = ModelSpec((weight, ParameterSpec("frozen", (100,), trainable=False), bias))
    assert model.trainable == (weight, bias)
    assert model.trainable_bytes == 24 + 24


def test_a_cluster_counts_the_accelerators_of_all_hosts() -> None:
    assert Cluster((Host("a", 2, 1, ("cuda:0", "cuda:1")), Host("b", 2, 1, ("cuda:0",)))).accelerators == 3
    assert Cluster((Host("a", 2, 1),)).accelerators == 0


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be a number above 0, got 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be a number above 0, got nan"),
        ({"batch_norm": "global"}, "batch_norm is 'local' or 'sync', got 'global'"),
        ({"clip_value": -1}, "clip_value must be a number above 0, got -1; None switches it off"),
        ({"clip_value": "1"}, "clip_value must be a number above 0, got '1'"),
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
        ({"accumulate": True}, "accumulate must be a whole number of at least 1, got True"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, got -1"),
        ({"warmup": 2.5}, "warmup must be a whole number of at least 0, got 2.5"),
        ({"schedule": 0.1}, "schedule must take an optimizer and return a scheduler, got 0.1; for example functools"),
        ({"schedule_every": "batch"}, "schedule_every is 'step' or 'epoch', got 'batch'"),
        ({"precision": "half"}, "precision is 'fp32' or 'bf16' or 'fp16', got 'half'"),
        ({"compile": "yes"}, "compile is True, False, 'auto' or .*, got 'yes'"),
        ({"ema_decay": 1}, "ema_decay must be a number between 0 and 1, got 1; None switches it off"),
        ({"ema_decay": float("nan")}, "ema_decay must be a number between 0 and 1, got nan"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'raise' or 'skip' or 'rollback', got 'ignore'"),
        ({"eval_batch_size": 0}, "eval_batch_size must be a whole number of at least 1, got 0"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1, got 0"),
        ({"early_stopping": 3}, r"early_stopping must be hr.EarlyStopping\(...\), got 3"),
        ({"accumulate": 2, "batch_norm": "sync"}, "micro-batches, .* use accumulate=1, or 'local'"),
        ({"compile": True, "batch_norm": "sync"}, "cut the model into pieces .* use one of the two"),
    ],
)
def test_options_that_cannot_be_meant(given_options: Mapping[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**given_options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ({"mode": "most"}, "mode is 'min' or 'max', got 'most'"),
        ({"patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"min_delta": -0.1}, "min_delta must be a number of at least 0, got -0.1"),
        ({"min_delta": float("inf")}, "min_delta must be a number of at least 0, got inf"),
    ],
)
def test_early_stopping_that_cannot_be_meant(given_options: Mapping[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EarlyStopping(**given_options)  # type: ignore[arg-type]


SOUND: dict[str, object] = {
    "model": functools.partial(torch.nn.Linear, 2, 1),
    "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    "data": (torch.zeros(4, 2), torch.zeros(4, 1)),
    "global_batch_size": 2,
    "loss": torch.nn.functional.mse_loss,
    "epochs": 1,
}


def test_a_job_has_defaults_and_does_not_print_its_data() -> None:
    job = Job(**SOUND)  # type: ignore[arg-type]
    assert (job.seed, job.options, job.steps) == (0, Options(), None)
    assert "data" not in repr(job)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": None}, "either a task .* or a loss"),
        ({"task": object()}, "not both or neither"),
        ({"steps": 3}, "either epochs or steps, got epochs=1, steps=3"),
        ({"epochs": None}, "either epochs or steps, got epochs=None, steps=None"),
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of at least 1, got 0"),
        ({"global_batch_size": 2.0}, "global_batch_size must be a whole number of at least 1, got 2.0"),
        ({"epochs": True}, "epochs must be a whole number of at least 1, got True"),
        ({"epochs": None, "steps": -1}, "steps must be a whole number of at least 1, got -1"),
        ({"model": 3}, "model must be callable, got 3"),
        ({"optimizer": None}, "optimizer must be callable, got None"),
        ({"options": {"clip_norm": 1.0}}, r"options must be hr.Options\(...\), got dict"),
    ],
)
def test_a_job_that_cannot_be_meant(change: Mapping[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Job(**{**SOUND, **change})  # type: ignore[arg-type]
