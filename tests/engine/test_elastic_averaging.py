"""Workers that are lost, join and leave while parameters are averaged; the rest is in test_elastic."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

import headrace as hr
from engine.counting import Counter, counting_job
from engine.test_elastic import Counted, Hand, check_counts
from headrace.engine.local.engine import LocalEngine

pytestmark = pytest.mark.slow

EPOCHS = 40


@pytest.mark.parametrize(("wait", "servers"), [(2, 1), (0.2, 1), (2, 2), (0.2, 2)])
def test_killed_workers_are_replaced_and_no_example_is_lost_or_doubled(
    engine: LocalEngine, wait: float, servers: int, tmp_path: Path
) -> None:
    hand = Hand({30: (1, signal.SIGKILL), 80: (0, signal.SIGKILL)}, done=tmp_path / "done")
    job = counting_job(EPOCHS, model=partial(Counter, tmp_path / "done"))
    check_counts(hr.fit(job, Counted(3, wait=wait, servers=servers), engine=engine, on_event=hand), EPOCHS)
    assert sorted(lost.lost for lost in hand.lost) == [0, 1]


def test_a_killed_server_with_a_backup_is_followed_by_it(engine: LocalEngine, tmp_path: Path) -> None:
    hand = Hand({30: (3, signal.SIGKILL)}, backups=1, done=tmp_path / "done")
    job = counting_job(EPOCHS, model=partial(Counter, tmp_path / "done"))
    check_counts(hr.fit(job, Counted(3, wait=0.2, backups=1), engine=engine, on_event=hand), EPOCHS)
    assert [lost.lost for lost in hand.lost] == [3]
