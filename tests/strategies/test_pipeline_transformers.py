"""Models of the transformers library train in stages, as they come, as on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from benchmarks.zoo.models import TRANSFORMERS, job_of
from torch import Tensor

import headrace as hr
from headrace.strategies import Strategy
from strategies.contract_runs import distance, train

STAGES: dict[str, Strategy] = {
    "two": hr.Pipeline(2, 2),
    "three": hr.Pipeline(3, 2, "1f1b"),
    "late weights": hr.Pipeline(2, 2, "zb_h1"),
    "recomputed": hr.Pipeline(2, 2, recompute="always"),
    "replicas": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 2)),
}
DIAGONAL = {
    ("gpt2-padded", "three"),
    ("gpt2-padded", "late weights"),
    ("gpt2-padded", "recomputed"),
    ("t5", "two"),
    ("bert", "replicas"),
    ("mixtral", "two"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps tiny products from being shared among cores, and the library from logging."""
    before, logger = torch.get_num_threads(), logging.getLogger("transformers")
    level = logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)
    torch.set_num_threads(before)


@cache
def on_one_device(name: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    outcome = train(job_of(name), hr.OneDevice())
    return dict(outcome.tensors), dict(outcome.metrics)


def cases() -> Iterator[object]:
    for name in sorted(TRANSFORMERS):
        for stages in STAGES:
            marks = [pytest.mark.slow] if (name, stages) in DIAGONAL else [pytest.mark.full]
            yield pytest.param(name, stages, id=f"{name}-{stages}", marks=marks)


@pytest.mark.one
@pytest.mark.parametrize(("name", "stages"), list(cases()))
def test_a_transformer_in_stages_is_one_device(name: str, stages: str) -> None:
    tensors, metrics = on_one_device(name)
    outcome = train(job_of(name), STAGES[stages])
    # The library computes losses of language models in single precision.
    assert distance(outcome.tensors, tensors) <= 1e-9
    assert outcome.metrics == pytest.approx(metrics, abs=1e-6)
