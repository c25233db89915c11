"""Fully sharded training gives the numbers of torch's own `fully_shard`, also where it gathers in bf16."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import headrace as hr
from fully_sharded import torchs_own
from headrace.errors import UsageError
from strategies.contract_runs import train
from warm.programs import PYTHON

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    store = tmp_path_factory.mktemp("rival") / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    ranks = [
        subprocess.Popen(
            [PYTHON, torchs_own.__file__, str(rank), "2", str(store)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=280)[0] for rank in ranks]
    found: dict[str, dict[str, list[float]]] = json.loads(said[0].splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-9), ("bf16", 0.0)])
def test_the_numbers_are_torchs_own(rival: dict[str, dict[str, list[float]]], precision: str, within: float) -> None:
    own = train(
        torchs_own.job_of(precision), hr.FullySharded(2, param_dtype="bf16" if precision == "bf16" else None)
    ).tensors
    apart = {
        name: max(abs(a - b) for a, b in zip(own[name].flatten().tolist(), each, strict=True))
        for name, each in rival[precision].items()
    }
    assert max(apart.values()) <= within, apart


def test_bf16_units_are_far_from_those_of_float32_but_near_them() -> None:
    plain = train(torchs_own.job_of("bf16"), hr.FullySharded(2)).tensors
    half = train(torchs_own.job_of("bf16"), hr.FullySharded(2, param_dtype="bf16")).tensors
    apart = max(float((plain[name] - half[name]).abs().max()) for name in plain)
    assert 0.0 < apart < 0.1


def test_bf16_units_are_a_choice_that_is_said_twice() -> None:
    with pytest.raises(UsageError, match=r"param_dtype is 'bf16' or None, got 'fp16'"):
        hr.FullySharded(2, param_dtype="fp16")
    with pytest.raises(
        UsageError, match=r"precision is 'fp32'.*use Options\(precision=\"bf16\"\), or leave param_dtype"
    ):
        train(torchs_own.job_of("fp32"), hr.FullySharded(2, param_dtype="bf16"))
    with pytest.raises(UsageError, match="a pipeline has stages; leave it out"):
        hr.Hybrid(hr.FullySharded(2, param_dtype="bf16"), hr.Pipeline(2))
    assert not hr.FullySharded(2, param_dtype="bf16").equals_one_device
    assert not hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2, param_dtype="bf16")).equals_one_device
