"""What a pipeline cannot do, it says, with the numbers and the remedy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import JobError, UnfitMachine, UsageError
from headrace.strategies.refusals import refuse
from pipeline.zoo import Greedy
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
        ({"chunks": 3}, "chunks=3 is for schedules that have several stages on each worker, and gpipe has one"),
        ({"chunks": 4, "schedule": "zb_h1"}, "and zb_h1 has one; leave it out"),
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


def test_a_model_of_one_layer_is_no_pipeline() -> None:
    with pytest.raises(UsageError, match="a model of 1 layer cannot be cut into 2 stages; use stages=1 or fewer"):
        train(replace(job(MODELS["mlp"]), model=nn.Sequential(nn.Linear(4, 3)).double()), hr.Pipeline(2))


@pytest.mark.parametrize(("batch", "message"), [(4, "a micro-batch has 1 of 4"), (16, "last .* in parts of 1")])
def test_batch_norm_of_one_example_is_refused(batch: int, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.raises(UsageError, match=message):
        train(replace(job(MODELS["mlp"]), model=model, global_batch_size=batch), hr.Pipeline(2))


@pytest.mark.slow
def test_what_an_optimizer_keeps_counts_against_the_limit() -> None:
    wide = replace(
        job(MODELS["mlp"]),
        model=nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 3)).double(),
        eval_data=None,
        data=(torch.randn(8, 512, dtype=torch.float64), torch.randint(0, 3, (8,))),
    )
    # Of 2 MB each: the larger stage's parameters and gradients fit, and what Adam keeps does not.
    strategy = hr.Pipeline(2, limit_bytes=5 << 20)
    train(replace(wide, optimizer=partial(torch.optim.SGD, lr=0.1)), strategy)
    with pytest.raises(UsageError, match=r"keeps every stage within 5,242,880 bytes.* needs 8,"):
        train(replace(wide, optimizer=torch.optim.Adam), strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (hr.Options(accumulate=2), "Options\\(accumulate=2\\) does so too; leave accumulate out"),
        (hr.Options(compile=True), "the stages of a pipeline are not compiled"),
        (hr.Options(batch_norm="sync"), "use batch_norm='local', or Pipeline\\(micro_batches=1\\)"),
    ],
)
def test_options_of_the_job_that_it_cannot_have_are_refused(options: hr.Options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        refuse(hr.Pipeline(2).refusals(), options)


def test_a_model_that_chooses_its_calls_by_the_data_is_refused_by_name() -> None:
    with pytest.raises(JobError, match=r"it ends where it called extra; .* call all of them, or use mirrored"):
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


HELD = r"when the process held [0-9,]+ bytes, of which 168 are the stage's parameters, and [0-4] of 4 micro-batches"


def test_a_stage_that_runs_out_of_memory_says_what_it_held() -> None:
    with pytest.raises(
        UnfitMachine,
        match=rf"^cpu of \S+, step 2: stage 1 ran out of memory in the forward of micro-batch 0, {HELD} .* use more",
    ):
        train(job(Case(hungry)), hr.Pipeline(2, 4, partition=[1, 2]), loop=starve)


class Starving(nn.Module):
    """Runs out of memory where it is told; what looks at the data is kept whole."""

    where = ""

    def forward(self, x: Tensor) -> Any:
        now = ("made again" if torch.is_grad_enabled() else "") if self.training else "evaluated"
        if x.isfinite().all() and self.where and now == self.where:
            raise MemoryError
        return Greedy.apply(x) if self.where == "backward" else x * 1.0  # type: ignore[no-untyped-call]


class StarvingSGD(torch.optim.SGD):
    """Finds no memory for what it keeps of a matrix of 3 x 6."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(each.shape == (3, 6) and each.grad is not None for each in self.param_groups[0]["params"]):
            raise MemoryError
        super().step()


SAID = {
    "made again": "stage 1 ran out of memory in the backward of micro-batch 3",
    "backward": "stage 1 ran out of memory in the backward of micro-batch 3",
    "evaluated": "stage 1 ran out of memory in the forward of an evaluation",
    "optimizer": "stage 1 of 2 ran out of memory in the step of the optimizer",
}


@pytest.mark.slow
@pytest.mark.parametrize("where", SAID)
def test_wherever_a_stage_runs_out_of_memory_it_says_what_it_held(where: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), Starving(), nn.Linear(6, 3))

    def loop(worker: hr.Worker) -> None:
        for batch in worker.batches():
            for layer in worker.model.children():
                if isinstance(layer, Starving):
                    layer.where = where
            worker.step(batch)
            worker.evaluate()

    wanted = job(Case(model))
    if where == "optimizer":
        wanted = replace(wanted, optimizer=partial(StarvingSGD, lr=0.1, momentum=0.9))
    held = r"when the process held [0-9,]+ bytes, of which [0-9,]+ are .*(micro-batches|StarvingSGD).*; use "
    with pytest.raises(UnfitMachine, match=f"{SAID[where]}, {held}"):
        train(wanted, hr.Pipeline(2, 4, recompute="always", partition=[1, 2]), loop=loop)
