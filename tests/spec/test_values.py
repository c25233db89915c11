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
from headrace.spec import Cluster, Host, Job, ModelSpec, Op, Options, ParameterSpec, Plan, Role, Segment
from headrace.spec.model import ITEM_BYTES
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import EVERY_WORKER

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


@pytest.mark.parametrize(
    "value",
    [
        PLAN,
        Op("update@1", "update", 1, "cpu:1", 24, ("exchange@1",)),
        ModelSpec((ParameterSpec("weight", (2, 3)),), (ParameterSpec("mean", (), "float64", False),), sliceable=False),
        Cluster((Host("a", 2, 2**33), Host("b", 8, 2**36, ("cuda:0",))), ranks=4, device="cuda"),
        Options(clip_norm=1.0, batch_norm="sync"),
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
        ({"eval_batch_size": 0}, "eval_batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_meant(given_options: Mapping[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**given_options)  # type: ignore[arg-type]


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
