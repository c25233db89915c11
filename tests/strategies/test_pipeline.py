"""Pipelines are one device: every schedule, any number of stages and micro-batches."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headrace as hr
from engine.victims import NOTICED_S
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost
from headrace.pipeline.schedules import SCHEDULES
from strategies.contract_models import MODELS, VARIANTS, Case, dense
from strategies.contract_runs import Saved, distance, drive
from strategies.hosts_models import Deep

COUNT, BATCH, ROUNDS = 19, 8, 3
"""The last batch has three examples."""


DEEP = Case(Deep)

CUT = ("lstm", "tied", "idle")
CASES = {
    **{name: MODELS[name] for name in CUT},
    **{
        name: VARIANTS[name]
        for name in ("clipped", "tokens", "mean-clipped", "groups-by-name", "muon", "own-optimizer")
    },
    "clipped-twice": Case(dense, options=hr.Options(clip_value=0.1, clip_norm=0.2, warmup=3, on_nonfinite="skip")),
    "clipped-tied": dataclasses.replace(MODELS["tied"], options=hr.Options(clip_norm=0.1)),
}
HOW = [
    {"schedule": "gpipe", "recompute": "never"},
    {"schedule": "1f1b", "recompute": "except_last"},
    {"schedule": "1f1b", "recompute": "always"},
    {"schedule": "zb_h1", "recompute": "never"},
    {"schedule": "zb_h1", "recompute": "except_last"},
    {"schedule": "zb_h2"},
]
STATES = {
    "momentum": DEEP,
    "adam-tied": dataclasses.replace(MODELS["tied"], optimizer=partial(torch.optim.Adam, lr=0.01)),
    "groups-warm-up-average": dataclasses.replace(
        VARIANTS["groups-by-name"],
        options=hr.Options(schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=2), warmup=4, ema_decay=0.8),
    ),
}


def job(case: Case) -> hr.Job:
    return dataclasses.replace(case.job(COUNT), global_batch_size=BATCH)


def merged(ranks: list[Saved]) -> dict[str, Tensor]:
    """Returns every tensor from the first rank that has it."""
    return {
        name: next(each.tensors[name] for each in ranks if not each.tensors[name].is_meta) for name in ranks[0].tensors
    }


@cache
def on_one_device(case: Case) -> dict[str, Tensor]:
    return merged(drive(job(case), hr.OneDevice(), 1, 0, ROUNDS))


def in_stages(case: Case, stages: int, micro_batches: int, **options: object) -> dict[str, Tensor]:
    strategy = partial(hr.Pipeline, stages, micro_batches, **options)  # type: ignore[arg-type]
    return merged(drive(job(case), strategy(), stages, 0, ROUNDS))


@pytest.mark.each_value
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_any_number_of_stages_is_one_device(schedule: str, micro_batches: int) -> None:
    two, again, three = (in_stages(DEEP, stages, micro_batches, schedule=schedule) for stages in (2, 2, 3))
    assert distance(two, on_one_device(DEEP)) <= 1e-9
    assert distance(two, again) == 0.0
    assert distance(two, three) == 0.0


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_there_is_to_sum_and_to_weigh_is_that_of_one_device(case: str, how: dict[str, object]) -> None:
    case_ = CASES[case]
    assert distance(in_stages(case_, 2, 4, **how), on_one_device(case_)) <= 1e-9


def whole(ranks: list[Saved]) -> Saved:
    """Returns what a checkpoint of these ranks holds."""
    assert all(each.settings == ranks[0].settings for each in ranks)
    pieces = [piece for each in ranks for piece in each.pieces]
    assert len({piece.name for piece in pieces}) == len(pieces)
    return Saved(merged(ranks), pieces, ranks[0].settings)


@pytest.mark.parametrize("case", sorted(STATES))
@pytest.mark.parametrize(("saver", "loader"), [(2, 3), (2, 1), (1, 3)])
def test_a_checkpoint_goes_on_on_another_number_of_stages(case: str, saver: int, loader: int) -> None:
    def ran(stages: int, start: int, stop: int, saved: Saved | None = None) -> Saved:
        strategy = hr.Pipeline(stages, 4, "1f1b") if stages > 1 else hr.OneDevice()
        return whole(drive(job(STATES[case]), strategy, stages, start, stop, saved))

    begun = ran(saver, 0, 3)
    resumed, uninterrupted = ran(loader, 3, 6, begun), ran(loader, 0, 6)
    assert distance(begun.tensors, uninterrupted.tensors) > 1e-4
    assert distance(resumed.tensors, uninterrupted.tensors) <= 1e-9


def die_in_the_third_round(told: Path, worker: hr.Worker) -> None:
    """A loop whose last stage is killed while the others wait for it."""
    for batch in worker.batches():
        if worker.round == 2 and worker.rank == worker.world - 1:
            told.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


@pytest.mark.slow
def test_a_stage_that_dies_ends_the_run_at_once_and_it_goes_on_with_fewer(tmp_path: Path) -> None:
    told, run_dir = tmp_path / "told", tmp_path / "run"
    checkpoints = hr.Checkpoints(every_steps=1)
    three = dataclasses.replace(job(DEEP), epochs=2)
    with LocalEngine() as engine:
        begin = partial(hr.launch, partial(die_in_the_third_round, told), three, hr.Pipeline(3, 4))
        with pytest.raises(PeerLost) as lost:
            begin(device="cpu", run_dir=run_dir, engine=engine, checkpoints=checkpoints)
        assert time.monotonic() - float(told.read_text()) < NOTICED_S
        assert "rank 2 (stage 2 of 3)" in str(lost.value)
        assert "SIGKILL" in str(lost.value)
        resumed = hr.fit(three, hr.Pipeline(2, 4), device="cpu", run_dir=run_dir, engine=engine, resume=True)
    uninterrupted = drive(three, hr.OneDevice(), 1, 0, 6)
    assert distance(resumed.model.state_dict(), merged(uninterrupted)) <= 1e-9
