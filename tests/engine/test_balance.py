"""Workers of different speed: shares follow it, and the result stays that of one device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import Tensor, nn

import headrace as hr
from engine.ranks import total
from engine.victims import INPUTS, TARGETS, make_job, rank
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.report.model.summary import summarize

pytestmark = pytest.mark.slow


class Uneven(nn.Linear):
    """An example takes worker 2 four times as long as the others."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(len(inputs) * (0.004 if rank() == 2 else 0.001))
        return super().forward(inputs)


@pytest.mark.parametrize("strategy", [hr.Mirrored, hr.CentralStorage])
def test_a_slow_worker_gets_less_and_nothing_else_changes(
    engine: LocalEngine, tmp_path: Path, strategy: type[hr.Mirrored] | type[hr.CentralStorage]
) -> None:
    # 64 examples: the last batch of an epoch has 16.
    job = make_job(model=Uneven, global_batch_size=24, epochs=8)
    run = hr.fit(job, strategy(3, balance="speed"), engine=engine, run_dir=tmp_path / "run")
    plain = hr.fit(make_job(global_batch_size=24, epochs=8), engine=hr.ThreadEngine())
    assert total(run.model) == pytest.approx(total(plain.model), abs=1e-6)
    found = summarize(tmp_path / "run")
    assert found.balance is not None
    assert found.balance.splits[0] == (0, (8, 8, 8))
    first, second, slow = found.balance.last
    # In proportion it would be 10.7 + 10.7 + 2.7.
    assert 2 <= slow <= 5
    assert first + second + slow == 24
    steps = [event for event in run.events if event.kind == "stepped"]
    assert sum(event.examples for event in steps) == 8 * 64
    assert [event.examples for event in steps if event.rank == 2 and event.step == 0] == [8]
    assert [event.examples for event in steps if event.rank == 2 and event.step == 21] == [slow]


def test_equal_workers_keep_equal_shares(engine: LocalEngine, tmp_path: Path) -> None:
    class Even(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            # So long that what else the machine does is little beside it.
            time.sleep(0.05 * self.training)
            return super().forward(inputs)

    job = make_job(model=lambda: Even(4, 1), global_batch_size=16, epochs=6)
    hr.fit(job, hr.Mirrored(2, balance="speed"), engine=engine, run_dir=tmp_path / "run")
    assert summarize(tmp_path / "run").balance is None


def test_where_shares_cannot_follow_the_speed() -> None:
    with pytest.raises(UnknownName, match="balance"):
        hr.Mirrored(2, balance="sped")
    with pytest.raises(
        UsageError, match="balance='speed' compares workers that each have the whole model, and pipeline"
    ):
        hr.Hybrid(hr.Mirrored(2, balance="speed"), hr.Pipeline(2))
    data = hr.data.local(hr.data.from_arrays(INPUTS, TARGETS))
    with pytest.raises(
        InfeasiblePlan, match="each host stores its own; give every host all data, or use balance='equal'"
    ):
        hr.fit(make_job(data=data), hr.Mirrored(2, balance="speed"), engine=hr.ThreadEngine())
