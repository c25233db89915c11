"""Numbers that are none, end to end: as if the round had not been; or from the last checkpoint on; or the end."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from engine.lasting import files_of
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import NonFiniteGradient, NonFiniteLoss, RunFailed, UsageError, WorkerFailed
from headrace.spec.events import NonFinite
from headrace.training.clipping import StepDecision
from headrace.worker.losses import MOST_IN_A_ROW, NonFiniteHandler

BATCH = 12
ROUNDS = 8
_GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(BATCH * ROUNDS, 4, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(4, (BATCH * ROUNDS,), generator=_GENERATOR)
VENOM = {"loss": math.inf, "gradient": 1000.0}
STRATEGIES = (hr.OneDevice(), hr.Mirrored(2), hr.Mirrored(3), hr.CentralStorage(2), hr.CentralStorage(3))
OFTEN = hr.Checkpoints(every_steps=2, every_s=None, keep=3)
SELDOM = hr.Checkpoints(every_steps=100, every_s=None)


def label(strategy: hr.Strategy) -> str:
    return f"{strategy.name} {getattr(strategy, 'workers', 1)}"


class Stung(nn.Module):
    """A layer whose gradient is NaN for inputs that are 1000; and statistics, which move in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        if self.training and bool((inputs == VENOM["gradient"]).any()):
            output.register_hook(lambda gradient: gradient * math.nan)
        return output


def make_job(inputs: Tensor = INPUTS, classes: Tensor = CLASSES, action: str = "skip", **changes: Any) -> hr.Job:
    options = {"clip_norm": 1.0, "ema_decay": 0.9, "on_nonfinite": action, **changes.pop("options", {})}
    plain: dict[str, Any] = {
        "model": Stung,
        "task": hr.tasks.multiclass(4),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
        "data": hr.data.from_arrays(inputs, classes),
        "global_batch_size": BATCH,
        "epochs": 1,
        "options": hr.Options(**options),
    }
    return hr.Job(**{**plain, **changes})


def poisoned(rounds: Sequence[int], place: str, example: int = -1) -> Tensor:
    """The inputs with one bad example in each of some rounds: the first is rank 0's, the last the last rank's."""
    inputs = INPUTS.clone()
    for round_ in rounds:
        inputs[round_ * BATCH + example % BATCH, :] = VENOM[place]
    return inputs


def without(rounds: Sequence[int], **changes: Any) -> hr.Job:
    """The job without the examples of some rounds."""
    kept = torch.cat([torch.arange(i * BATCH, (i + 1) * BATCH) for i in range(ROUNDS) if i not in rounds])
    return make_job(INPUTS[kept], CLASSES[kept], **changes)


def fit(job: hr.Job, strategy: hr.Strategy, run_dir: Path, **asked: Any) -> hr.Run:
    return hr.fit(job, strategy, run_dir=run_dir, **{"engine": hr.ThreadEngine(), "checkpoints": OFTEN, **asked})


def same(run: hr.Run, other: hr.Run) -> bool:
    """Whether two trained models are equal bit for bit, and finite."""
    ours, theirs = run.model.state_dict(), other.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(bool(tensor.isfinite().all()) for tensor in ours.values())
    return all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def found(run_dir: Path) -> list[tuple[int, tuple[int, ...], str]]:
    """What the events of all ranks say."""
    from headrace.report.model.events import read_events

    return [(event.step, event.ranks, event.action) for event in read_events(run_dir) if isinstance(event, NonFinite)]


def guilty(strategy: hr.Strategy, place: str, example: int) -> tuple[int, ...]:
    last = getattr(strategy, "workers", 1) - 1
    return () if place == "gradient" else (0 if example == 0 else last,)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": None, "clip_value": 0.05}], ids=str)
@pytest.mark.parametrize("example", [0, -1], ids=["first rank", "last rank"])
@pytest.mark.parametrize("place", VENOM)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_skip_is_as_if_the_round_had_not_been(
    tmp_path: Path, strategy: hr.Strategy, place: str, example: int, options: dict[str, Any]
) -> None:
    bad = (0, 3, 4)
    run = fit(make_job(poisoned(bad, place, example), options=options), strategy, tmp_path / "a")
    assert same(run, fit(without(bad, options=options), strategy, tmp_path / "b"))
    assert found(tmp_path / "a") == [(step, guilty(strategy, place, example), "skip") for step in bad]
    done = {event.steps for event in run.events if event.kind == "worker_ended"}  # type: ignore[attr-defined]
    assert done == {ROUNDS}
    checkpoints = CheckpointFolder(tmp_path / "a" / "checkpoints")
    for step in checkpoints.steps():
        for rank in checkpoints.open(step).ranks:
            tensors = checkpoints.open(step).read(rank)
            assert all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=label)
def test_the_schedule_counts_a_skipped_round(tmp_path: Path, strategy: hr.Strategy) -> None:
    """Against a loop of plain PyTorch that leaves out the update alone."""
    schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    plain: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 4).double(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        "options": {"schedule": schedule, "clip_norm": None, "ema_decay": None},
    }
    run = fit(make_job(poisoned((2,), "loss"), **plain), strategy, tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = schedule(optimizer)
    for round_ in range(ROUNDS):
        if round_ != 2:
            optimizer.zero_grad()
            part = slice(round_ * BATCH, (round_ + 1) * BATCH)
            nn.functional.cross_entropy(model(INPUTS[part]), CLASSES[part]).backward()
            optimizer.step()
        scheduler.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("place", VENOM)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_rollback_goes_on_from_the_last_checkpoint_with_the_next_data(
    tmp_path: Path, strategy: hr.Strategy, place: str
) -> None:
    # After the checkpoint of 4 rounds one good round is lost with the bad one.
    run = fit(make_job(poisoned((5,), place), action="rollback"), strategy, tmp_path / "a")
    assert same(run, fit(without((4, 5)), strategy, tmp_path / "b"))
    assert found(tmp_path / "a") == [(5, guilty(strategy, place, -1), "rollback")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_rollback_in_the_first_round_and_again(tmp_path: Path, strategy: hr.Strategy) -> None:
    run = fit(make_job(poisoned((0, 1, 4), "loss"), action="rollback"), strategy, tmp_path / "a", checkpoints=SELDOM)
    assert same(run, fit(without((0, 1, 2, 3, 4)), strategy, tmp_path / "b"))
    assert [step for step, _, _ in found(tmp_path / "a")] == [0, 1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_rollback_in_a_run_that_goes_on_from_another(tmp_path: Path, strategy: hr.Strategy) -> None:
    """There is something to roll back to: what it went on from."""
    fit(make_job(steps=4, epochs=None), hr.Mirrored(2), tmp_path / "a")
    job = make_job(poisoned((5,), "loss"), action="rollback")
    run = fit(job, strategy, tmp_path / "b", resume=tmp_path / "a", checkpoints=SELDOM)
    good = fit(without((4, 5), steps=4, epochs=None), hr.Mirrored(2), tmp_path / "c")
    assert good.status == "ok"
    assert found(tmp_path / "b") == [(5, guilty(strategy, "loss", -1), "rollback")]
    assert CheckpointFolder(tmp_path / "b" / "checkpoints").steps() == (4, ROUNDS)
    if strategy == hr.Mirrored(2):
        # The same run in one go.
        assert same(run, fit(without((4, 5)), strategy, tmp_path / "d"))


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=label)
def test_rollback_after_a_reset_of_the_optimizer(tmp_path: Path, strategy: hr.Strategy) -> None:
    """The state of the new optimizer is what it rolls back to."""
    fit(make_job(steps=4, epochs=None), strategy, tmp_path)
    changed = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = make_job(poisoned((5,), "loss"), action="rollback", optimizer=changed)
    run = fit(job, strategy, tmp_path, resume=True, reset_optimizer=True, checkpoints=SELDOM)
    assert all(bool(tensor.isfinite().all()) for tensor in run.model.state_dict().values())
    assert files_of(tmp_path)[0] == ROUNDS


def test_rollback_is_refused_without_checkpoints(tmp_path: Path) -> None:
    for asked in ({"run_dir": tmp_path, "checkpoints": False}, {"run_dir": None, "checkpoints": None}):
        with pytest.raises(
            UsageError, match=r"on_nonfinite='rollback' needs checkpoints to roll back to; give a run_dir"
        ):
            hr.fit(make_job(action="rollback"), engine=hr.ThreadEngine(), **asked)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
@pytest.mark.parametrize("place", VENOM)
def test_raise_ends_the_run_and_the_rest_goes_on_with_skip(tmp_path: Path, strategy: hr.Strategy, place: str) -> None:
    bad = make_job(poisoned((5,), place), action="raise")
    kind = NonFiniteLoss if place == "loss" else NonFiniteGradient
    with pytest.raises(kind, match=r"at step 5") as caught:
        fit(bad, strategy, tmp_path / "a")
    assert "in a row" not in str(caught.value)
    assert "Options(on_nonfinite='skip') leaves such rounds out" in str(caught.value)
    ranks = guilty(strategy, place, -1)
    if isinstance(caught.value, NonFiniteLoss):
        assert (caught.value.rank,) == ranks
    assert found(tmp_path / "a") == [(5, ranks, "raise")]
    assert files_of(tmp_path / "a")[0] in (2, 4), "the last save may have been under way"
    # And with the other policy it ends where it would have ended with that from the start.
    run = fit(make_job(poisoned((5,), place)), strategy, tmp_path / "a", resume=True)
    assert same(run, fit(without((5,)), strategy, tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.parametrize("place", VENOM)
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=label)
def test_raise_in_processes(engine: LocalEngine, tmp_path: Path, strategy: hr.Strategy, place: str) -> None:
    bad = make_job(poisoned((5,), place), action="raise")
    with pytest.raises(WorkerFailed, match=r"NonFinite(Loss|Gradient): the (loss|gradient) is .* at step 5") as caught:
        fit(bad, strategy, tmp_path, engine=engine)
    assert caught.value.rank in (guilty(strategy, place, -1) or (0, 1))
    assert found(tmp_path) == [(5, guilty(strategy, place, -1), "raise")]
    run = fit(make_job(poisoned((5,), place), action="skip"), strategy, tmp_path, engine=engine, resume=True)
    assert same(run, fit(without((5,)), strategy, tmp_path / "b", engine=engine))


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("place", VENOM)
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=label)
def test_too_many_in_a_row_end_the_run(tmp_path: Path, strategy: hr.Strategy, place: str, action: str) -> None:
    most = MOST_IN_A_ROW[action]
    inputs = poisoned(range(1, ROUNDS), place)
    job = make_job(inputs, action=action, epochs=None, steps=100, data=hr.data.from_arrays(inputs[-60:], CLASSES[-60:]))
    with pytest.raises(
        (NonFiniteLoss, NonFiniteGradient), match=f"at step {most}, the {most + 1}th bad round in a row"
    ):
        fit(job, strategy, tmp_path)
    ranks = guilty(strategy, place, -1)
    expected = [(step, ranks, action) for step in range(most)] + [(most, ranks, "raise")]
    assert found(tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_good_round_between_them_counts(tmp_path: Path, action: str) -> None:
    job = make_job(poisoned(range(0, ROUNDS, 2), "loss"), action=action, epochs=6)
    assert fit(job, hr.Mirrored(2), tmp_path).status == "ok"
    assert len(found(tmp_path)) == 6 * ROUNDS // 2


def test_nothing_sound_to_roll_back_to(tmp_path: Path) -> None:
    def spoil(worker: hr.Worker) -> None:
        for batch in worker.batches():
            if worker.round == 3:
                for manifest in (tmp_path / "checkpoints").glob("step-*/manifest.json"):
                    manifest.write_text("{}")
            worker.step(batch)

    job = make_job(poisoned((5,), "loss"), action="rollback")
    with pytest.raises(RunFailed, match=r"there is no sound checkpoint in .*/checkpoints to roll back to"):
        hr.launch(spoil, job, run_dir=tmp_path, engine=hr.ThreadEngine(), checkpoints=SELDOM)


LOCAL = (
    *(hr.Gossip(2), hr.Gossip(3, topology="random"), hr.LocalSGD(2, period=1), hr.LocalSGD(2, period=3)),
    *(hr.DiLoCo(2, period=2), hr.EASGD(2, period=2)),
)


@pytest.mark.slow
@pytest.mark.parametrize("place", sorted(VENOM))
@pytest.mark.parametrize("strategy", LOCAL, ids=lambda strategy: f"{label(strategy)} {strategy!r:.30}")
def test_with_parameters_of_its_own_a_worker_gives_nothing_bad_to_the_others(
    tmp_path: Path, strategy: hr.Strategy, place: str
) -> None:
    run = fit(make_job(poisoned((2, 3, 5), place), options={"ema_decay": None}), strategy, tmp_path)
    assert run.status == "ok"
    assert all(bool(tensor.isfinite().all()) for tensor in run.model.state_dict().values())


def test_statistics_that_others_have_changed_stay_changed_after_bad_rounds_in_a_row() -> None:
    module = nn.BatchNorm1d(2)
    mean = module.get_buffer("running_mean")
    session = SimpleNamespace(
        run=SimpleNamespace(job=make_job()),
        replica=SimpleNamespace(compute=SimpleNamespace(module=module)),
        **dict.fromkeys(("group", "page", "events", "rank")),
    )
    handler = NonFiniteHandler(cast(Any, session), lambda: None, reporter=1)
    for mixed in (2.0, 3.0, 4.0):
        before = mean.clone()
        handler.before()
        module(torch.full((2, 2), math.nan))
        assert not mean.isfinite().any()
        handler.restore(StepDecision(False, (0,)))
        assert torch.equal(mean, before)
        mean.fill_(mixed)
