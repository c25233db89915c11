"""What cannot be resumed: said with what differs, before anything is touched."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from engine.lasting import DATA, OFTEN, files_of, jittered, lasting_job, plain
from headrace.checkpoint import CheckpointFolder
from headrace.errors import CheckpointMismatch, CorruptCheckpoint, UsageError
from headrace.spec.events import Notice

STEPS = 9
"""Checkpoints of 8 and 9 rounds stay."""


def short_job(**changes: Any) -> hr.Job:
    return lasting_job("plain", **{"steps": STEPS, "epochs": None, **changes})


def fit(job: hr.Job, run_dir: Path, **asked: Any) -> hr.Run:
    return hr.fit(job, run_dir=run_dir, engine=hr.ThreadEngine(), **{"checkpoints": OFTEN, **asked})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "a"
    fit(short_job(), folder)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A run to go on with, or to spoil."""
    return Path(shutil.copytree(original, tmp_path / "a"))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def renamed() -> nn.Module:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 8))
    model.add_module("1", nn.Tanh())
    model.add_module("2", nn.Linear(8, 4))
    return model.double()


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4)).double()


INPUTS, CLASSES = DATA["plain"]
FEWER = hr.data.from_arrays(INPUTS[:-1], CLASSES[:-1]).shuffle().map(jittered)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"model": wider},
            ["parameter 0.weight is float64 [8, 4] in the checkpoint, float64 [9, 4] in the job",
             "parameter 2.weight is float64 [4, 8] in the checkpoint, float64 [4, 9] in the job"],
        ),
        (
            {"model": renamed},
            ["parameter 0.bias is float64 [8] in the checkpoint, missing in the job",
             "parameter first.bias is missing in the checkpoint, float64 [8] in the job"],
        ),
        (
            {"model": lambda: plain().float(), "data": (INPUTS.float(), CLASSES), "eval_data": None},
            ["parameter 0.bias is float64 [8] in the checkpoint, float32 [8] in the job"],
        ),
        ({"model": counting}, ["buffer 3.running_mean is missing in the checkpoint, float64 [4] in the job"]),
        (
            {"optimizer": functools.partial(torch.optim.SGD, lr=0.01)},
            ["the optimizer was torch.optim.adam.Adam, is torch.optim.sgd.SGD (reset_optimizer=True leaves its"],
        ),
        (
            {"optimizer": functools.partial(torch.optim.Adam, lr=0.02)},
            ["lr of the optimizer's group 0 was 0.01, is 0.02 (reset_optimizer=True takes the new one)"],
        ),
        (
            {"optimizer": functools.partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.999))},
            ["betas of the optimizer's group 0 was [0.9, 0.999], is [0.8, 0.999] (reset_optimizer=True"],
        ),
        (
            {"optimizer": lambda named: torch.optim.Adam(
                [{"params": [pair]} for pair in named], lr=0.01)},
            ["the optimizer's groups hold other parameters (reset_optimizer=True leaves its state behind)"],
        ),
        ({"global_batch_size": 10}, ["global_batch_size was 12, is 10"]),
        ({"seed": 1}, ["seed was 0, is 1"]),
        ({"data": FEWER}, ["examples was 50, is 49"]),
        (
            {"options": {"schedule": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)}},
            ["the schedule was torch.optim.lr_scheduler.StepLR, is torch.optim.lr_scheduler.ExponentialLR (reset_"],
        ),
        (
            {"options": {"schedule": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=7)}},
            ["step_size of the schedule was 4, is 7 (reset_optimizer=True takes the new one)"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_another_job(saved: Path, changes: dict[str, Any], messages: list[str]) -> None:
    before = files_of(saved)
    with pytest.raises(CheckpointMismatch) as caught:
        fit(short_job(**changes), saved, resume=True)
    for message in messages:
        assert message in str(caught.value)
    assert str(caught.value).startswith(f"{saved / 'checkpoints' / 'step-00000009'} is of another job: ")
    assert str(caught.value).endswith(". Resume the job that saved it, or begin a new run in another run_dir")
    assert caught.value.exit_code == 2
    assert files_of(saved) == before


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=0.5),
        lambda named: torch.optim.Adam([{"params": [pair]} for pair in named], lr=0.01),
    ],
    ids=["class", "lr", "groups"],
)
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=lambda s: s.name)
def test_another_optimizer_with_its_state_reset(saved: Path, strategy: hr.Strategy, optimizer: Any) -> None:
    options = {"schedule": None, "warmup": 0, "ema_decay": 0.9}
    run = fit(short_job(optimizer=optimizer, steps=STEPS + 5, options=options), saved, resume=True,
              reset_optimizer=True, strategy=strategy)  # fmt: skip
    assert run.status == "ok"
    assert files_of(saved)[0] == STEPS + 5
    # What was saved with it goes on with it.
    run = fit(short_job(optimizer=optimizer, steps=STEPS + 7, options=options), saved, resume=True, strategy=strategy)
    assert files_of(saved)[0] == STEPS + 7


@pytest.mark.parametrize("changes", [{"model": wider}, {"seed": 1}])
def test_a_reset_optimizer_excuses_nothing_else(saved: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointMismatch):
        fit(short_job(**changes), saved, resume=True, reset_optimizer=True)


def edit(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_version_of_the_format(saved: Path, version: int) -> None:
    newest = saved / "checkpoints" / "step-00000009"
    edit(newest, version=version)
    with pytest.raises(CorruptCheckpoint, match=f"version {version}"):
        fit(short_job(), saved, resume=newest)
    run = fit(short_job(), saved, resume=True)
    assert any(f"version {version}" in event.text for event in run.events if isinstance(event, Notice))


def damage(checkpoint: Path) -> None:
    path = checkpoint / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_the_newest_is_damaged(saved: Path, original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = saved / "checkpoints" / "step-00000009"
    damage(newest)
    run = fit(short_job(), saved, resume=True)
    assert files_of(saved) == files_of(original)
    told = [event.text for event in run.events if isinstance(event, Notice)]
    said = capsys.readouterr().err
    for texts in ("\n".join(told), said):
        assert f"damaged, left out: {newest / 'rank-0.safetensors'}: " in texts
        assert f"goes on from {newest.with_name('step-00000008')}" in texts


def test_all_are_damaged(saved: Path) -> None:
    for checkpoint in (saved / "checkpoints").iterdir():
        damage(checkpoint)
    with pytest.raises(
        CorruptCheckpoint, match=r"step-00000009/rank-0.safetensors: .*; resume from an older"
    ) as caught:
        fit(short_job(), saved, resume=True)
    assert caught.value.exit_code == 5


def test_the_named_one_is_damaged(saved: Path) -> None:
    damage(saved / "checkpoints" / "step-00000009")
    with pytest.raises(CorruptCheckpoint, match=r"step-00000009/rank-0.safetensors: "):
        fit(short_job(), saved, resume=saved / "checkpoints" / "step-00000009")


def test_nothing_to_resume(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(UsageError, match=r"there is nothing to resume from: .*/b does not exist; begin without resume"):
        fit(short_job(), tmp_path / "b", resume=True)
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match=r"nothing to resume from: .*/c does not exist"):
        fit(short_job(), tmp_path / "b", resume=tmp_path / "c")
    with pytest.raises(UsageError, match=r"nothing to resume from: .*step-00000007 does not exist"):
        fit(short_job(), tmp_path / "b", resume=saved / "checkpoints" / "step-00000007")
    with pytest.raises(UsageError, match=r"nothing to resume from: .*/test_resume.py is a file; name a run_dir"):
        fit(short_job(), tmp_path / "b", resume=__file__)
    with pytest.raises(UsageError, match=r"or one checkpoint's folder by the name that it was saved with"):
        fit(short_job(), tmp_path / "b", resume=saved / "checkpoints")
    with pytest.raises(UsageError, match=r"resume needs the run_dir of the run that goes on"):
        hr.fit(short_job(), resume=True)
    with pytest.raises(UsageError, match=r"reset_optimizer .* is for a run that goes on; say from what by resume"):
        fit(short_job(), tmp_path / "b", reset_optimizer=True)
    for nonsense in (5, None, ["a"]):
        with pytest.raises(UsageError, match="resume is True, 'if_saved', a run's directory, one checkpoint or a URL"):
            fit(short_job(), tmp_path / "b", resume=nonsense)
    assert not (tmp_path / "b").exists()


def test_a_requeued_run_goes_on_where_something_is_saved_and_begins_where_nothing_is(tmp_path: Path) -> None:
    again = functools.partial(fit, run_dir=tmp_path / "a", resume="if_saved")
    whole = weights(again(short_job()))
    # As after an attempt that has ended before its first save.
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    begun = again(short_job())
    assert torch.equal(weights(begun), whole)
    assert (begun.summary.started.resumed_step, begun.summary.outcome.attempts) == (0, 2)
    more = again(short_job(steps=STEPS + 2))
    assert (more.summary.started.resumed_step, more.summary.steps) == (STEPS, STEPS + 2)
    with pytest.raises(UsageError, match=r"--resume-if-saved\) goes on from checkpoints, and this run saves none"):
        again(short_job(), checkpoints=False)


def test_a_run_that_was_killed_after_its_last_save_leaves_no_half_checkpoint_when_it_is_resumed(saved: Path) -> None:
    # Found by scripts/storm, seed 8064.
    checkpoints = saved / "checkpoints"
    whole = {path.name for path in checkpoints.iterdir()}
    for half in ("step-00000001.old", "step-00000009.part"):
        shutil.copytree(next(checkpoints.glob("step-*")), checkpoints / half)
    fit(short_job(), saved, resume=True)
    assert {path.name for path in checkpoints.iterdir()} == whole


def weights(run: hr.Run) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in run.model.parameters()])


def test_a_run_directory_with_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    for name in ("step-one", "step-00000001"):
        fit(short_job(), tmp_path / name)
        assert fit(short_job(), tmp_path / name, resume=tmp_path / name).status == "ok"


def test_a_directory_that_holds_another_run(saved: Path, tmp_path: Path) -> None:
    fit(short_job(), tmp_path / "b")
    with pytest.raises(UsageError, match=r"/b holds a run already; name another run_dir, or delete it; resume=True"):
        fit(short_job(), tmp_path / "b", resume=saved)


def test_what_may_be_changed_is_changed_and_said(saved: Path) -> None:
    run = fit(short_job(options={"clip_norm": 0.5, "accumulate": 2}, steps=STEPS + 1), saved, resume=True)
    told = [event.text for event in run.events if isinstance(event, Notice)]
    assert "since it was saved: clip_norm was 1.0, is 0.5" in told
    assert "since it was saved: accumulate was 1, is 2" in told
    assert not any("warmup" in text for text in told)


def forge(run_dir: Path, spoil: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Puts a newer checkpoint there, whole by all its digests."""
    folder = CheckpointFolder(run_dir / "checkpoints")
    latest, _ = folder.latest()
    assert latest is not None
    description, tensors = json.loads(json.dumps(latest.description)), latest.read(0)
    spoil(description, tensors)
    folder.begin(10)
    folder.commit(10, [folder.write(10, 0, tensors)], description, 3)


SENSELESS: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "no job": lambda said, _: said.pop("job"),
    "no optimizer": lambda said, _: said["job"].update(optimizer=[1, 2]),
    "no settings": lambda said, _: said.pop("settings"),
    "groups": lambda said, _: said["settings"].update(groups=7),
    "options": lambda said, _: said["settings"]["groups"][0].update(options={"lr": {"tensor": 1, "dtype": "load"}}),
    "schedule": lambda said, _: said["settings"].update(schedule=[1]),
    "early stopping": lambda said, _: said.update(early_stopping={"best": "x"}),
    "state": lambda _, tensors: tensors.update({"state/0.weight/exp_avg@x": torch.zeros(1)}),
    "state before its parameter": lambda _, tensors: tensors.update({"state/0.weight/exp_avg@-7": torch.zeros(2)}),
    "random": lambda _, tensors: tensors.update({"random/torch": torch.zeros(3, dtype=torch.uint8)}),
    "no random": lambda _, tensors: tensors.pop("random/python"),
    "numpy": lambda _, tensors: tensors.update({"random/numpy": torch.zeros(3, dtype=torch.int64)}),
}


@pytest.mark.parametrize("what", SENSELESS)
def test_a_whole_checkpoint_of_no_run(saved: Path, what: str) -> None:
    forge(saved, SENSELESS[what])
    with pytest.raises(CorruptCheckpoint, match=r"step-00000010: its content makes no sense"):
        fit(short_job(steps=12), saved, resume=True)


class Seasoned(nn.Module):
    """Counts its steps in a buffer that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.layer(inputs) * (1 + 0.1 * self.steps)


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2)], ids=lambda strategy: strategy.name)
def test_a_buffer_that_is_not_part_of_the_state_goes_on_too(tmp_path: Path, strategy: hr.Strategy) -> None:
    for name, steps in (("whole", [STEPS]), ("parts", [5, STEPS])):
        for part in steps:
            fit(short_job(model=Seasoned, steps=part), tmp_path / name, resume=part != steps[0], strategy=strategy)
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert parts == whole
