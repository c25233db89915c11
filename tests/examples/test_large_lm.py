"""The example of a language model of any size trains, tiny, under the layouts that it names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import HeadraceError

THREADS = hr.ThreadEngine()
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "large_lm"
SIZES = {"10m": 10e6, "100m": 100e6, "350m": 350e6, "1.5b": 1.5e9}


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in ("job", "llama"):
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("job")
        for name in ("job", "llama"):
            sys.modules.pop(name, None)


def in_double(model: Any) -> torch.nn.Module:
    return model().double()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def job(example: Any) -> hr.Job:
    made = example.job("tiny", steps=3, batch=8, length=16, megabytes=0.01)
    # All layouts visit the examples in one order.
    return replace(made, model=partial(in_double, made.model))


@pytest.fixture(scope="module")
def one_device(job: hr.Job) -> dict[str, torch.Tensor]:
    return hr.fit(job, device="cpu", engine=THREADS).model.state_dict()


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["4", "c2", "2x2", "2x2x2"])
def test_each_layout_is_one_device(layout: str, example: Any, job: hr.Job, one_device: dict[str, torch.Tensor]) -> None:
    found = hr.fit(job, example.LAYOUTS[layout], device="cpu", engine=THREADS).model.state_dict()
    assert max(float((found[name] - each).abs().max()) for name, each in one_device.items()) <= 1e-9


def test_a_sample_is_the_likeliest_byte_after_each_other(example: Any) -> None:
    class Next(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert tokens.shape[1] <= 4
            return torch.nn.functional.one_hot(tokens + 1, 256).float()

    assert example.generate(Next(), "ab", 4, length=5) == "abcdefg"


def test_holding_out_every_sequence_is_refused(example: Any) -> None:
    with pytest.raises(HeadraceError, match="held=80 of 78 sequences leaves none"):
        example.job("tiny", length=128, megabytes=0.01, held=80)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_what_it_says(size: str, example: Any) -> None:
    assert example.count(example.SIZES[size]) == pytest.approx(SIZES[size], rel=0.06)
