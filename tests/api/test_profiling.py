"""Where a job's time goes, measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from engine import victims
from headrace.api.profiling import Profile, profile
from headrace.engine.local.engine import LocalEngine

pytestmark = pytest.mark.slow

INPUTS = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True)
Example = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


LIGHT = functools.partial(nn.Linear, 16, 1)


def job(model: Any = LIGHT, data: Any = (INPUTS, TARGETS)) -> hr.Job:
    return hr.Job(
        model=model,
        task=hr.tasks.regression(),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        data=data,
        eval_data=(INPUTS, TARGETS),
        global_batch_size=32,
        epochs=1,
        options=hr.Options(eval_every=3, early_stopping=hr.EarlyStopping(patience=1), on_nonfinite="rollback"),
    )


def look(engine: LocalEngine, job: hr.Job, strategy: Any = None) -> Profile:
    found = profile(job, strategy or hr.OneDevice(), device="cpu", seconds=1.0, engine=engine)
    assert found.bottleneck is not None
    assert not found.together.curves.evaluations
    return found


def test_a_slow_transform_holds_the_training_up(engine: LocalEngine) -> None:
    def quick(example: Example) -> Example:
        return example

    def slow(example: Example) -> Example:
        time.sleep(0.001)
        return example

    data = hr.data.from_arrays(INPUTS, TARGETS).shuffle().map(quick).map(slow, parallel="inline")
    found = look(engine, job(data=data))
    assert found.bottleneck is not None
    assert (found.bottleneck.kind, found.bottleneck.stage) == ("INPUT-BOUND", "map(slow)")
    assert found.alone_per_s is not None
    assert 0 < found.alone_per_s < 1000
    assert found.ceiling.examples_per_s is not None
    assert found.together.examples_per_s is not None
    assert found.ceiling.examples_per_s > 2 * found.together.examples_per_s
    assert [stage.name for stage in found.stages.stages] == ["source", "map(quick)", "map(slow)", "batch"]


class Heavy(nn.Linear):
    """Takes 20 ms a step."""

    def forward(self, inputs: Tensor) -> Tensor:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return super().forward(inputs)


def test_a_heavy_model_holds_the_training_up(engine: LocalEngine) -> None:
    found = look(engine, job(model=functools.partial(Heavy, 16, 1)))
    assert found.bottleneck is not None
    assert found.bottleneck.kind == "COMPUTE-BOUND"
    assert found.ceiling.inputs is not None
    assert found.ceiling.inputs.by_rank[0].batches >= 1


def test_one_slow_rank_holds_the_training_up(engine: LocalEngine) -> None:
    class Uneven(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if victims.rank() == 1:
                time.sleep(0.02)
            return super().forward(inputs)

    found = look(engine, job(model=functools.partial(Uneven, 16, 1)), hr.Mirrored(2))
    assert found.bottleneck is not None
    assert (found.bottleneck.kind, found.bottleneck.rank) == ("STRAGGLER", 1)
