"""Stored values of which not all are the model's, or by other names: what is missing keeps the constructor's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headrace as hr
from headrace.errors import UsageError
from weights.models import job_of, stored, write

GIVEN: dict[str, Any] = {"rename": {"body.": "", "body.layers.": "layers."}, "missing": ["head.*"], "unused": ["pool*"]}


def place(tmp_path: Path) -> Path:
    """Files without the head, with another thing, and with a prefix before the names."""
    values = {f"body.{name}": each for name, each in stored().items() if name != "head.weight"}
    return write(tmp_path / "weights", {**values, "pooler": torch.ones(2)}, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.OneDevice(),
        hr.FullySharded(2),
        hr.FullySharded(2, deferred=True),
        hr.TensorParallel(2),
        pytest.param(hr.Pipeline(2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_head_that_is_missing_is_the_constructors(strategy: hr.Strategy, tmp_path: Path) -> None:
    weights = hr.Weights(place(tmp_path), **GIVEN)
    run = hr.fit(job_of(weights, steps=1, rate=0.0), strategy, device="cpu", engine=hr.ThreadEngine())
    head = hr.fit(job_of(None, steps=1, rate=0.0), device="cpu").model.state_dict()["head.weight"]
    for name, each in {**stored(), "head.weight": head}.items():
        assert torch.equal(run.model.state_dict()[name], each), name
    saved = run.save_pretrained(tmp_path / "saved")
    files = [load_file(each) for each in sorted(saved.glob("*.safetensors"))]
    assert {name for file in files for name in file} == {*stored()}
    again = hr.fit(job_of(saved, steps=1, rate=0.0), device="cpu").model.state_dict()
    assert torch.equal(again["head.weight"], head)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "none is said": ({}, "(the nearest to the first is 'body."),
    "the head is not said": ({**GIVEN, "missing": []}, "1 tensors of the model are not there, 'head.weight'"),
    "no such missing": ({**GIVEN, "missing": ["heads.*"]}, "no tensor of the model is named so"),
    "no such unused": ({**GIVEN, "unused": ["poller"]}, "unused has 'poller' (the nearest to the first is 'pooler')"),
    "missing, and there": (
        {**GIVEN, "missing": ["head.*", "scale"]},
        "leave it out, or name what is",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_names_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    given, said = WRONG[name]
    with pytest.raises(UsageError) as caught:
        hr.fit(job_of(hr.Weights(place(tmp_path), **given)), device="cpu")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"where": ""}, "weights must be a folder, a file or a URL"),
        ({"rename": ["a", "b"]}, "rename must be a dict"),
        ({"missing": "head.*"}, "missing must be a list"),
        ({"unused": [3]}, "unused must be a list"),
    ],
)
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hr.Weights(**{"where": "folder", **given})
