"""Checkpoints of workers that average, where the newest are damaged."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import headrace as hr
from api.test_resume import damage
from engine.lasting import OFTEN, files_of, lasting_job, left_by
from headrace.errors import CorruptCheckpoint

WAYS = {
    "all-reduce": hr.DiLoCo(2, period=3, average_optimizer_state=True),
    "server": hr.DiLoCo(2, period=3, average_optimizer_state=True, via="server", post_local=2, servers=2),
    "server-one": hr.LocalSGD(1, period=3, via="server"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(WAYS))
def test_where_the_newest_is_damaged_it_goes_on_from_the_one_before(way: str, tmp_path: Path) -> None:
    job = lasting_job("plain", options={"ema_decay": None} if way == "all-reduce" else {})
    fit = functools.partial(hr.fit, job, WAYS[way], engine=hr.ThreadEngine(), checkpoints=OFTEN)
    whole = left_by(fit(run_dir=tmp_path / "a"))
    step, _ = files_of(tmp_path / "a")
    newest = tmp_path / "a" / "checkpoints" / f"step-{step:08d}"
    damage(newest)
    assert left_by(fit(run_dir=tmp_path / "a", resume=True))[:2] == whole[:2]
    for checkpoint in newest.parent.iterdir():
        damage(checkpoint)
    with pytest.raises(CorruptCheckpoint, match=r"rank-0.safetensors: .*; resume from an older"):
        fit(run_dir=tmp_path / "a", resume=True)
