"""What a pipeline cannot do, it says, with the numbers and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import JobError, UnfitMachine, UsageError
from strategies.contract_models import MODELS, Case
from strategies.contract_runs import train
from strategies.test_pipeline import job


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages must be a whole number of at least 1, got 0"),
        ({"micro_batches": 0}, "micro_batches is 'auto', or a whole number of at least 1, got 0"),
        ({"micro_batches": True}, "got True"),
        ({"schedule": "1f1"}, "there is no schedule '1f1'; did you mean '1f1b'"),
        ({"recompute": "some"}, "there is no way to recompute 'some'; known: always, except_last, never"),
        ({"cost": "money"}, "there is no cost of a stage 'money'; known: both, memory, time"),
        ({"partition": "4,4"}, "partition is 'auto', or of each stage how many layers it has"),
        ({"partition": 4}, "partition is 'auto'.* got 4"),
        ({"partition": [5.5, 5.5]}, r"partition is 'auto'.* got \[5.5, 5.5\]"),
        ({"partition": [True, 10]}, r"got \[True, 10\]"),
        ({"partition": ["stem", "head"]}, r"or a list of their names, .* got \['stem', 'head'\]"),
        ({"limit_bytes": "1GB"}, "limit_bytes must be a whole number of at least 1, got '1GB'"),
        ({"deferred_batch_norm": 3}, "deferred_batch_norm must be True or False, got 3"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.Pipeline(**options)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (hr.Pipeline(4), "a model of 3 layers cannot be cut into 4 stages; use stages=3 or fewer"),
        (hr.Pipeline(2, 9), "micro_batches=9 of a batch of 8 examples would be empty; use micro_batches=8 or fewer"),
        (hr.Pipeline(2, partition=[1, 1]), r"1 \+ 1 = 2 layers, and the model has 3"),
        (hr.Pipeline(2, partition=[1, 1, 1]), "partition has 3 stages, and stages=2"),
        (hr.Pipeline(2, partition=[["0"], ["1", "3"]]), "there is no layer '3'; known: 0, 1, 2"),
        (hr.Pipeline(2, limit_bytes=100), "keeps every stage within 100 bytes.* needs [0-9]"),
    ],
)
def test_plans_that_do_not_fit_are_refused_with_the_numbers(strategy: hr.Pipeline, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(job(MODELS["mlp"]), strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (hr.Options(accumulate=2), "Options\\(accumulate=2\\) does so too; leave accumulate out"),
        (hr.Options(compile=True), "the stages of a pipeline are not compiled"),
        (hr.Options(precision="fp16"), "no loss scale; use Options\\(precision='bf16'\\)"),
        (hr.Options(batch_norm="sync"), "use batch_norm='local', or Pipeline\\(micro_batches=1\\)"),
    ],
)
def test_options_of_the_job_that_it_cannot_have_are_refused(options: hr.Options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.Pipeline(2).check(options)


def test_a_model_that_looks_at_the_data_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="Partial cannot be cut into stages: what it does depends on the data"):
        train(job(MODELS["partial"]), hr.Pipeline(2))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (1, r"computes whole steps; use worker.step\(batch\)"),
        (2, r"holds a part of Sequential, which cannot be called; use worker.step\(batch\)"),
    ],
)
def test_a_loop_of_ones_own_does_whole_steps(stages: int, message: str) -> None:
    def loop(worker: hr.Worker) -> None:
        for inputs, target in worker.batches():
            worker.backward(nn.functional.cross_entropy(worker.model(inputs), target))

    with pytest.raises(UsageError, match=message):
        train(job(MODELS["mlp"]), hr.Pipeline(stages), loop=loop)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_refused_by_name() -> None:
    def model() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Linear(4, 6).double()), nn.Linear(6, 3).double())

    with pytest.raises(JobError, match=r"0 is a TorchScript module, .* build it without torch\.jit\.script"):
        train(replace(job(MODELS["mlp"]), model=model), hr.Pipeline(2))


class Hungry(nn.Module):
    """Wants a petabyte from the second round on; what looks at the data is kept whole."""

    wants = False

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(1 << 50).sum() if x.isfinite().all() and self.wants else x * 1.0


def hungry() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), Hungry(), nn.Linear(6, 3))


def starve(worker: hr.Worker) -> None:
    for batch in worker.batches():
        for layer in worker.model.children():
            if isinstance(layer, Hungry):
                layer.wants = worker.round == 1
        worker.step(batch)


def test_a_stage_that_runs_out_of_memory_says_what_it_held() -> None:
    with pytest.raises(
        UnfitMachine, match=r"stage 1 ran out of memory in the forward of micro-batch 0, when .* use more"
    ):
        train(job(Case(hungry)), hr.Pipeline(2, 4, partition=[1, 2]), loop=starve)
