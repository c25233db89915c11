"""Replicas that are pipelines, and divide each stage among them: what they train, hold, save and refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Notice, WorkerEnded
from headrace.spec.plan import Segment
from strategies.contract_models import ADAM, MODELS, VARIANTS, Case, Tied, images, text, vectors
from strategies.contract_runs import GIGABYTE, MODEL, distance, train

CASES = {
    **MODELS,
    **VARIANTS,
    "clipped-tied": Case(Tied, text, options=hr.Options(clip_norm=0.3)),
    "averaged": Case(MODELS["mlp"].model, optimizer=ADAM, options=hr.Options(ema_decay=0.8)),
    "scalar": Case(MODELS["buffers"].model, optimizer=ADAM),
}
PIPELINE = hr.Pipeline(stages=2, micro_batches=2)


def divided(replicas: int = 2, inner: hr.Pipeline = PIPELINE) -> hr.Hybrid:
    return hr.Hybrid(hr.FullySharded(replicas), inner)


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


@pytest.mark.each_value
@pytest.mark.parametrize(
    "model",
    ["mlp", "lstm", "idle", "clipped", "clipped-tied", "mean-clipped", "tokens", "unfrozen-clipped", "unfrozen-tied",
     "amsgrad", "groups-by-dimensions", "own-optimizer", "averaged"],
)  # fmt: skip
@pytest.mark.parametrize(("replicas", "count"), [(2, 11), (3, 9)])
def test_they_are_one_device(model: str, replicas: int, count: int) -> None:
    case = CASES.get(model) or Case(MODELS["mlp"].model, optimizer=partial(ADAM, amsgrad=True, weight_decay=0.01))
    job = case.job(count)
    # A replica's share of 4 examples is cut into 2 micro-batches, or is 1 example.
    strategy = divided(replicas, hr.Pipeline(2, 4 // replicas))
    outcome, one = train(job, strategy), train(job, hr.OneDevice())
    assert distance(outcome.tensors, one.tensors) <= 1e-9
    assert outcome.losses == pytest.approx(one.losses, rel=1e-9)
    assert outcome.metrics == pytest.approx(one.metrics, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_every_schedule_is_one_device(schedule: str, recompute: str) -> None:
    layers = (layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh()))
    job = Case(lambda: nn.Sequential(*layers, nn.Linear(4, 3)), optimizer=ADAM).job(11)
    inner = hr.Pipeline(2, 2, schedule, recompute)
    assert distance(train(job, divided(2, inner)).tensors, train(job, hr.OneDevice()).tensors) <= 1e-9


def test_statistics_of_batches_are_those_of_mirrored_replicas() -> None:
    case = dataclasses.replace(MODELS["cnn"], options=hr.Options())
    outcome, mirrored = (train(case.job(11), hr.Hybrid(each(2), PIPELINE)) for each in (hr.FullySharded, hr.Mirrored))
    assert distance(outcome.tensors, mirrored.tensors) <= 1e-9
    assert outcome.metrics == pytest.approx(mirrored.metrics, rel=1e-9)


@pytest.mark.slow
def test_four_processes_hold_half_a_stage_each_and_two_runs_are_alike(processes: Engine, tmp_path: Path) -> None:
    job = Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), optimizer=ADAM).job(11)
    strategy = divided(2, hr.Pipeline(2, 2, partition=[2, 1]))
    one, again = (
        hr.fit(job, strategy, device="cpu", run_dir=tmp_path / name, engine=processes) for name in ("one", "again")
    )
    assert distance(one.model.state_dict(), again.model.state_dict()) == 0
    assert distance(one.model.state_dict(), train(job, hr.OneDevice()).tensors) <= 1e-9
    ended = {event.rank: event for event in one.events if isinstance(event, WorkerEnded)}
    # The stages have 8 rows of 4 and 8, and 3 rows of 8 and 3 parameters of 8 bytes. Rank 3 has memory for 2 rows, too.
    assert {rank: event.parameter_bytes for rank, event in ended.items()} == {0: 160, 1: 144, 2: 160, 3: 144}
    numbers = {rank: event.optimizer_bytes // 8 for rank, event in ended.items()}
    # Two of each parameter, and of each tensor a count of steps in single precision.
    assert numbers == {0: 41, 1: 37, 2: 41, 3: 19}


def test_between_rounds_there_is_a_part_alone() -> None:
    seen: dict[int, list[tuple[str, bool]]] = {}

    def look(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            here = [(name, each) for name, each in worker.model.named_parameters() if not each.is_meta]
            seen[worker.rank] = [(name, bool(each.isnan().all())) for name, each in here]
            assert all(each.untyped_storage().nbytes() == each.element_size() for _, each in here)
            assert all(each.grad is None for _, each in here)
        if worker.rank == 0:
            with pytest.raises(UsageError, match=r"parameters of Sequential are divided|this rank holds a part"):
                worker.model(torch.zeros(1, 4))

    train(CASES["mlp"].job(8), divided(2, hr.Pipeline(2, 2, partition=[2, 1])), loop=look)
    first, last = [("0.weight", True), ("0.bias", True)], [("2.weight", True), ("2.bias", True)]
    assert seen == {0: first, 1: last, 2: first, 3: last}


def test_one_stage_is_divided_too() -> None:
    job = CASES["scalar"].job(9)
    said: list[str] = []

    def look(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
        with pytest.raises(UsageError, match="parameters of Buffered are divided among ranks, and whole within a step"):
            worker.model(batch[0])
        said.append("refused")

    outcome = train(job, divided(2, hr.Pipeline(1, 2)), loop=look)
    assert said == ["refused"] * 2
    calls = {name: each for name, each in outcome.tensors.items() if name != "calls"}
    one = {name: each for name, each in train(job, hr.OneDevice()).tensors.items() if name != "calls"}
    assert distance(calls, one) <= 1e-9


def test_what_is_divided_is_said(tmp_path: Path) -> None:
    job = CASES["mlp"].job(8)
    strategy = divided(2, hr.Pipeline(2, 2, partition=[2, 1]))
    run = hr.fit(job, strategy, device="cpu", run_dir=tmp_path, engine=hr.ThreadEngine())
    said = sorted(event.text for event in run.events if isinstance(event, Notice) and "between rounds" in event.text)
    assert [text.split(" of its stage's ")[0] for text in said] == ["rank 0 holds 120", "rank 1 holds 112"]


THEN = {
    "one_device": hr.OneDevice(),
    "mirrored": hr.Mirrored(3),
    "three replicas": divided(3, hr.Pipeline(2, 1)),
    "two": divided(2),
}


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "tied", "idle"])
@pytest.mark.parametrize("then", sorted(THEN))
def test_a_checkpoint_has_the_same_parameters_under_any_strategy(case: str, then: str, tmp_path: Path) -> None:
    job = dataclasses.replace(CASES[case].job(11, optimizer=ADAM), epochs=2)
    run = {"device": "cpu", "engine": hr.ThreadEngine(), "run_dir": tmp_path}
    saved = hr.fit(job, divided(2), **run)  # type: ignore[arg-type]
    loaded = hr.fit(job, THEN[then], resume=True, **run)  # type: ignore[arg-type]
    assert distance(loaded.model.state_dict(), saved.model.state_dict()) == 0.0
    further = hr.fit(dataclasses.replace(job, epochs=3), THEN[then], resume=True, **run)  # type: ignore[arg-type]
    whole = hr.fit(dataclasses.replace(job, epochs=3), hr.OneDevice(), device="cpu", engine=hr.ThreadEngine())
    assert distance(further.model.state_dict(), whole.model.state_dict()) <= 1e-9


@pytest.mark.slow
def test_each_part_is_saved_once(tmp_path: Path) -> None:
    job = dataclasses.replace(CASES["tied"].job(8, optimizer=ADAM), epochs=None, steps=2)
    hr.fit(job, divided(2), device="cpu", run_dir=tmp_path, engine=hr.ThreadEngine())
    checkpoint = CheckpointFolder(tmp_path / "checkpoints").open(2)
    saved = [{name for name in checkpoint.read(rank) if name.startswith("state/")} for rank in range(4)]
    # Of the embedding, 7 rows of 4 numbers; the last stage, which has it too, saves none of it.
    assert "state/embedding.weight/exp_avg@0" in saved[0]
    assert "state/embedding.weight/exp_avg@16" in saved[2]
    assert not any("embedding" in name for name in saved[1] | saved[3])


class Grows(nn.Module):
    """Writes to a parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.scale.mul_(0.5)
        return self.last(hidden * self.scale)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"forward changed the parameter 'scale', and .* releases it"):
        train(Case(Grows, vectors).job(8), divided())
    for units in (["blocks.*"], []):
        with pytest.raises(UsageError, match=r"units=.* gathered as one in a pipeline is a rank's stages; leave units"):
            hr.Hybrid(hr.FullySharded(2, units), PIPELINE)
    with pytest.raises(UsageError, match=r"reshard_after_forward=True releases .* leave it out"):
        hr.Hybrid(hr.FullySharded(2, reshard_after_forward=True), PIPELINE)
    assert hr.Hybrid(hr.FullySharded(2, reshard_after_forward=False), PIPELINE).processes().workers == 4
    with pytest.raises(UsageError, match=r"needs whole parameters .* a part under hybrid"):
        train(CASES["muon"].job(8), divided())
    with pytest.raises(UsageError, match="use batch_norm='local'"):
        train(Case(MODELS["cnn"].model, images, options=hr.Options(batch_norm="sync")).job(8), divided())


def test_the_plan_gives_every_element_one_owner() -> None:
    def plan(memory: int) -> tuple[Segment, ...]:
        return divided(3, hr.Pipeline(2)).plan(MODEL, Cluster((Host("here", 4, memory),))).segments

    # The first of two stages has the one trained parameter, of 20 rows.
    assert [(each.start, each.stop, each.owner) for each in plan(GIGABYTE)] == [
        (0, 70, 0), (70, 140, 2), (140, 200, 4),
    ]  # fmt: skip
    # Three replicas' parameters and gradients in a round, and all parts with their copies: 9 times 800 bytes.
    with pytest.raises(InfeasiblePlan, match=r"hybrid needs 7,200 bytes of host memory"):
        plan(7_000)
