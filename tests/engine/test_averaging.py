"""Workers in processes that meet every few rounds: broken off and gone on with, ended in order, by the clock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace as hr
from engine import lasting
from engine.lasting import OFTEN, ROUNDS, broken_off, files_of, lasting_job, left_by
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost, WorkerFailed
from headrace.spec.events import ParametersAveraged, Stepped

PERIOD = 3
WAYS = {
    "mean": hr.LocalSGD(2, period=PERIOD),
    "nesterov": hr.DiLoCo(2, period=PERIOD, average_optimizer_state=True),
    "elastic": hr.EASGD(2, period=PERIOD),
}
pytestmark = pytest.mark.slow


def job(kind: str) -> hr.Job:
    return lasting_job(kind, options={"ema_decay": None})


@pytest.fixture(scope="module")
def whole(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], hr.Run]:
    """`whole(kind, way)`: the run without interruption."""

    @functools.cache
    def train(kind: str, way: str) -> hr.Run:
        folder = tmp_path_factory.mktemp("whole")
        return hr.fit(job(kind), WAYS[way], run_dir=folder, engine=engine, checkpoints=OFTEN)

    return train


@pytest.mark.parametrize(("kind", "way"), [("cnn", "mean"), ("lstm", "nesterov"), ("cnn", "elastic")])
@pytest.mark.parametrize("deed", [lasting.kill, lasting.fail, lasting.terminate])
def test_what_was_broken_off_ends_where_it_would_have_ended(
    engine: LocalEngine, whole: Callable[[str, str], hr.Run], tmp_path: Path, kind: str, way: str,
    deed: Callable[[], object]
) -> None:  # fmt: skip
    begin = functools.partial(hr.launch, functools.partial(broken_off, deed, 9, 1), job(kind), WAYS[way])
    if deed is lasting.terminate:
        assert begin(run_dir=tmp_path, engine=engine, checkpoints=OFTEN).status == "interrupted"
        assert files_of(tmp_path)[0] in (12, ROUNDS), "it ends when workers next meet"
    else:
        with pytest.raises((PeerLost, WorkerFailed)):
            begin(run_dir=tmp_path, engine=engine, checkpoints=OFTEN)
        assert files_of(tmp_path)[0] in (6, 9), "asked for after 4 and 8 rounds, saved when workers next met"
    run = hr.fit(job(kind), WAYS[way], run_dir=tmp_path, engine=engine, checkpoints=OFTEN, resume=True)
    assert left_by(run) == left_by(whole(kind, way))


def test_a_run_that_ends_by_the_clock_ends_when_workers_meet(engine: LocalEngine, tmp_path: Path) -> None:
    endless = lasting_job("plain", options={"ema_decay": None}, epochs=None, steps=1_000_000, eval_data=None)
    run = hr.fit(endless, hr.LocalSGD(2, period=7), run_dir=tmp_path, engine=engine, seconds=0.5)
    steps = {rank: [event.step for event in run.events if isinstance(event, Stepped) and event.rank == rank]
             for rank in (0, 1)}  # fmt: skip
    assert steps[0] == steps[1] == list(range(len(steps[0])))
    assert len(steps[0]) % 7 == 0
    assert files_of(tmp_path)[0] == len(steps[0])
    assert [event.step for event in run.events if isinstance(event, ParametersAveraged)] == list(
        range(7, len(steps[0]) + 1, 7)
    )
