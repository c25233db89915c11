"""The example with a GPT-2 trains, in a tiny form, under the strategies that its page names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.bench.library import declare_operators

THREADS = hr.ThreadEngine()
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "transformer_lm"
TINY = {"steps": 4, "batch": 8, "layers": 2, "width": 64, "length": 16, "vocabulary": 280, "modules": 1}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hr.Job]:
    declare_operators()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.syspath_prepend(str(FOLDER))
        # Under names of their own, since other examples have a job.py, too.
        for name in ("job", "stdlib_tokens"):
            patch.delitem(sys.modules, name, raising=False)
        made: Any = importlib.import_module("job")
        # In parts of the text, which take a moment.
        text = made.stdlib_text(1)[:20_000]
        patch.setattr(made, "stdlib_text", lambda modules: text)
        yield made.job(**TINY)
        for name in ("job", "stdlib_tokens"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def one_device(job: hr.Job) -> hr.Run:
    return hr.fit(job, engine=THREADS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.Mirrored(2),
        pytest.param(hr.TensorParallel(2), marks=pytest.mark.full),
        hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
        hr.Pipeline(2),
        pytest.param(hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)), marks=pytest.mark.full),
    ],
    ids=["mirrored", "tensor_parallel", "hybrid", "pipeline", "hybrid of pipelines"],
)
def test_it_gives_the_loss_of_one_device(job: hr.Job, one_device: hr.Run, strategy: hr.Strategy) -> None:
    run = hr.fit(job, strategy, engine=THREADS)
    assert run.metrics["loss"] == pytest.approx(one_device.metrics["loss"], rel=1e-5)


@pytest.mark.slow
def test_it_trains_under_diloco_and_is_saved(job: hr.Job, one_device: hr.Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = hr.fit(job, hr.DiLoCo(2, period=2), engine=THREADS)
    assert abs(run.metrics["loss"] - one_device.metrics["loss"]) < 0.5
    saved = AutoModelForCausalLM.from_pretrained(run.save_pretrained(tmp_path / "saved"))
    assert torch.equal(saved.lm_head.weight, run.model.lm_head.weight)
