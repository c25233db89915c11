"""Hybrids of three and four levels: each nesting is one device, and each reads the checkpoints of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.strategies import resolve
from strategies.contract_models import MODELS, VARIANTS, Case
from strategies.contract_runs import GIGABYTE, MODEL, distance, train

CASES = {**MODELS, **VARIANTS}
REPLICAS, PARTS = hr.Mirrored(2), hr.FullySharded(2)
STAGES, SLICES = hr.Pipeline(2, micro_batches=2), hr.TensorParallel(2)
NESTINGS = {
    "parts, slices": (PARTS, SLICES),
    "stages, slices": (STAGES, SLICES),
    "replicas, parts, stages": (REPLICAS, PARTS, STAGES),
    "replicas, parts, slices": (REPLICAS, PARTS, SLICES),
    "replicas, stages, slices": (REPLICAS, STAGES, SLICES),
    "parts, stages, slices": (PARTS, STAGES, SLICES),
    "replicas, parts, stages, slices": (REPLICAS, PARTS, STAGES, SLICES),
}
TOGETHER = [name for name in NESTINGS if name.endswith("stages, slices")]
every_nesting = pytest.mark.parametrize("nesting", NESTINGS)


class Block(nn.Module):
    """Attention and two linear layers around one that is not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.wide(x + self.attention(y, y, y, need_weights=False)[0])


class Attending(nn.Module):
    """Reads four numbers as four positions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.enter(x.unsqueeze(-1))).mean(1))


def job(case: str, count: int = 21) -> hr.Job:
    clipped = hr.Options(clip_norm=0.3)
    made = (Case(Attending, options=clipped) if case == "attention" else CASES[case]).job(count)
    return hr.Job(**{**vars(made), "global_batch_size": 8})


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    """Of workers that threads cannot be: stages around slices."""
    with LocalEngine() as engine:
        yield engine


@every_nesting
@pytest.mark.parametrize("case", ["mlp", "idle", "clipped", "mean-clipped", "tokens", "attention"])
def test_every_nesting_is_one_device(case: str, nesting: str, processes: LocalEngine) -> None:
    engine = processes if nesting in TOGETHER else None
    outcome, one = train(job(case), hr.Hybrid(*NESTINGS[nesting]), engine), train(job(case), hr.OneDevice())
    assert distance(outcome.tensors, one.tensors) <= 1e-9
    assert outcome.losses == pytest.approx(one.losses, rel=1e-9)
    assert outcome.metrics == pytest.approx(one.metrics, rel=1e-9)


@pytest.mark.full
@pytest.mark.slow
def test_two_runs_of_sixteen_processes_are_alike(processes: LocalEngine) -> None:
    strategy = hr.Hybrid(REPLICAS, PARTS, STAGES, SLICES)
    one, again = (train(job("attention"), strategy, processes) for _ in range(2))
    assert distance(one.tensors, again.tensors) == 0
    assert one.losses == again.losses


@pytest.mark.parametrize("nesting", ["stages, slices", "replicas, stages, slices"])
def test_averaging_replicas_of_sliced_stages_are_workers_that_average(nesting: str, processes: LocalEngine) -> None:
    averaging = hr.ParameterAveraging(2, period=3)
    strategy = hr.Hybrid(averaging, STAGES, SLICES)
    clipped = job("attention", 9)
    assert distance(train(clipped, strategy, processes).tensors, train(clipped, averaging).tensors) <= 1e-9


@pytest.mark.slow
@every_nesting
@pytest.mark.parametrize("other", ["one device", "replicas, parts, stages, slices", "parts of three"])
def test_checkpoints_go_from_each_nesting_to_each(
    nesting: str, other: str, tmp_path: Path, processes: LocalEngine
) -> None:
    adam = dataclasses.replace(job("attention"), optimizer=partial(torch.optim.AdamW, lr=0.01))
    others = {"one device": hr.OneDevice(), "parts of three": hr.Hybrid(hr.FullySharded(3), SLICES)}
    first, then = hr.Hybrid(*NESTINGS[nesting]), others.get(other) or hr.Hybrid(*NESTINGS[other])
    for steps, strategy in ((3, first), (5, then), (7, first)):
        part = hr.Job(**{**vars(adam), "epochs": None, "steps": steps})
        run = hr.fit(part, strategy, device="cpu", run_dir=tmp_path, engine=processes, resume=steps > 3, check=False)
    whole = hr.Job(**{**vars(adam), "epochs": None, "steps": 7})
    assert distance(run.model.state_dict(), train(whole, hr.OneDevice()).tensors) <= 1e-9


@pytest.mark.parametrize("nesting", ["stages, slices", "replicas, stages, slices"])
def test_norms_of_what_several_stages_hold_are_refused(nesting: str, processes: LocalEngine) -> None:
    clipped = dataclasses.replace(job("tied"), options=hr.Options(clip_norm=1.0))
    with pytest.raises(UsageError, match=r"several stages of a replica hold .embedding\.weight."):
        train(clipped, hr.Hybrid(*NESTINGS[nesting]), processes)


def test_stages_of_slices_are_no_threads() -> None:
    with pytest.raises(UsageError, match="a Pipeline around TensorParallel is not for ThreadEngine"):
        train(job("mlp"), hr.Hybrid(STAGES, SLICES))


def test_levels_are_numbered_from_the_outermost() -> None:
    strategy = hr.Hybrid(REPLICAS, PARTS, hr.Pipeline(3), SLICES)
    assert strategy == hr.Hybrid(REPLICAS, hr.Hybrid(PARTS, hr.Hybrid(hr.Pipeline(3), SLICES)))
    assert strategy.processes().workers == 24
    deep = dataclasses.replace(MODEL, layers=()) if not MODEL.layers else MODEL
    plan = hr.Hybrid(REPLICAS, PARTS, SLICES).plan(deep, Cluster((Host("here", 8, GIGABYTE),), ranks=8))
    assert [(role.data_rank, role.stage) for role in plan.roles] == [(rank // 2, rank % 2) for rank in range(8)]
    # The first slices of the first replica own the parts.
    assert {segment.owner for segment in plan.segments} == {0, 2}


def test_what_a_launcher_started_is_shared_out() -> None:
    def roles(*levels: hr.Strategy) -> int:
        return hr.Hybrid(*levels).plan(MODEL, Cluster((Host("here", 8, GIGABYTE),), ranks=8)).replicas

    assert roles(hr.Mirrored(), hr.FullySharded(2), SLICES) == roles(REPLICAS, hr.FullySharded(), SLICES) == 4
    with pytest.raises(InfeasiblePlan, match=r"\? replicas on 3 x 2 devices each, and the launcher started 8.*say all"):
        roles(hr.Mirrored(), hr.FullySharded(3), SLICES)
    with pytest.raises(InfeasiblePlan, match=r"\? replicas on \? x 2 devices each"):
        roles(hr.Mirrored(), hr.FullySharded(), SLICES)


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (
            (REPLICAS, SLICES, STAGES),
            r"are hr\.Mirrored, hr\.TensorParallel, hr\.Pipeline; use hr\.Mirrored, hr\.Pipeline, hr\.Tensor",
        ),
        ((REPLICAS, PARTS, PARTS), "give each once"),
        ((SLICES, STAGES), r"use hr\.Pipeline, hr\.TensorParallel, in the order"),
        ((PARTS, REPLICAS), r"use hr\.Mirrored, hr\.FullySharded, in the order"),
        ((REPLICAS, PARTS, REPLICAS), "the inner strategy of a hybrid must be"),
        ((SLICES, hr.Gossip(2)), "the inner strategy of a hybrid must be"),
        ((hr.Gossip(2), PARTS), r"the outer strategy of a hybrid must be .* got Gossip"),
        ((hr.ParameterServer(2), STAGES, SLICES), "the shards of a stage or of a slice"),
        ((hr.ParameterAveraging(2, period=2), PARTS, SLICES), "sum their gradients in every round"),
        ((REPLICAS, hr.FullySharded(2, units=[]), STAGES, SLICES), "leave units out"),
    ],
)
def test_what_cannot_be_nested_is_refused(levels: tuple[hr.Strategy, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hr.Hybrid(*levels)


def test_a_rank_is_named_by_its_stage_and_slice(processes: LocalEngine) -> None:
    run = hr.fit(job("mlp"), hr.Hybrid(REPLICAS, STAGES, SLICES), device="cpu", engine=processes, check=False)
    assert run.plan.part_of(5) == "stage 0 of 2, slice 1 of 2, replica 1"
    assert run.plan.part_of(6) == "stage 1 of 2, slice 0 of 2, replica 1"
    assert resolve("hybrid(mirrored(2), pipeline(2, 2), tensor_parallel(2))") == hr.Hybrid(REPLICAS, STAGES, SLICES)
