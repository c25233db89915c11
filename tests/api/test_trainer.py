"""fit and launch: what is written, what is told, what comes back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import headrace as hr
from engine.victims import EXAMPLES, INPUTS, TARGETS, Faulty, fail, long_job, make_job
from headrace.api.checks import inspect_job
from headrace.errors import UsageError, WorkerFailed
from headrace.report.model.events import read_events
from headrace.spec.events import LAUNCHER, Event, Notice, RunEnded, RunStarted
from headrace.spec.plain import to_plain
from late import Late

THREADS = hr.ThreadEngine()


def trained(**changes: Any) -> dict[str, Tensor]:
    return hr.fit(make_job(**changes), hr.Mirrored(2), engine=THREADS).model.state_dict()


def test_a_run_directory_holds_everything(tmp_path: Path) -> None:
    run = hr.fit(make_job(), hr.Mirrored(2), engine=THREADS, run_dir=tmp_path / "deep" / "run")
    assert run.run_dir == tmp_path / "deep" / "run"
    files = {str(file.relative_to(run.run_dir)) for file in run.run_dir.rglob("*") if file.is_file()}
    saved = {
        f"checkpoints/step-00000008/{name}" for name in ("manifest.json", "rank-0.safetensors", "rank-1.safetensors")
    }
    events = {f"events/{name}.jsonl" for name in ("launcher", "rank-0", "rank-1")}
    assert files == {*events, *saved, "lock", "model.safetensors"}


def test_the_launcher_says_what_is_done() -> None:
    seen: list[Event] = []
    run = hr.fit(make_job(), hr.Mirrored(2), engine=THREADS, device="cpu", on_event=seen.append)
    ours = [event for event in seen if event.rank == LAUNCHER]
    started, *notices, ended = ours
    assert isinstance(started, RunStarted)
    assert (started.strategy, started.workers, started.device) == ("mirrored", 2, "cpu")
    assert (started.global_batch_size, started.examples_per_epoch) == (8, EXAMPLES)
    assert started.plan == json.loads(json.dumps(to_plain(run.plan)))
    assert started.versions["torch"] == torch.__version__
    assert [type(each) for each in notices] == [Notice]
    assert "2 workers" in notices[0].text  # type: ignore[attr-defined]
    assert "batch of 8 = 4 + 4; 64 examples" in notices[0].text  # type: ignore[attr-defined]
    assert ended == RunEnded(LAUNCHER, ended.time_s, "ok")


@pytest.mark.slow
def test_the_callback_sees_every_event_once_in_the_order_of_writing() -> None:
    seen: list[Event] = []
    threads: set[int] = set()

    def on_event(event: Event) -> None:
        seen.append(event)
        threads.add(threading.get_ident())

    run = hr.fit(make_job(epochs=20, eval_data=(INPUTS, TARGETS)), hr.Mirrored(2), engine=THREADS, on_event=on_event)
    assert threads == {threading.get_ident()}
    by_rank: dict[int, list[Event]] = defaultdict(list)
    written: dict[int, list[Event]] = defaultdict(list)
    for event in seen:
        by_rank[event.rank].append(event)
    for event in read_events(run.run_dir):
        written[event.rank].append(event)
    assert by_rank == written
    # How it was fed, a worker says about once a second, and at the end of its loop.
    assert by_rank[0][-2].kind == "fed"
    kinds = [event.kind for event in by_rank[0] if event.kind != "fed"]
    assert kinds[0] == "worker_started"
    assert kinds[1:-1] == (["stepped"] * 8 + ["evaluated"]) * 20
    assert kinds[-1] == "worker_ended"
    kinds = [event.kind for event in by_rank[1] if event.kind != "fed"]
    assert kinds == ["worker_started", *["stepped"] * 160, "worker_ended"]


def test_a_failure_is_told_too() -> None:
    seen: list[Event] = []
    with pytest.raises(WorkerFailed, match="planted"):
        hr.fit(make_job(model=lambda: Faulty(fail, None)), hr.Mirrored(2), engine=THREADS, on_event=seen.append)
    assert "failed" in [event.kind for event in seen]
    ended = seen[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.status, "ValueError: planted at" in ended.cause) == ("failed", True)


@pytest.mark.slow
def test_the_end_of_the_time(tmp_path: Path) -> None:
    began = time.monotonic()
    run = hr.fit(long_job(), hr.Mirrored(2), engine=THREADS, seconds=0.2)
    assert 0.2 < time.monotonic() - began < 60
    assert run.status == "ok"
    (steps,) = {event.steps for event in run.events if event.kind == "worker_ended"}  # type: ignore[attr-defined]
    assert steps > 1


def test_a_look_at_a_job_leaves_the_random_numbers_as_they_were() -> None:
    def drawn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output + torch.rand(()), target)

    before = torch.get_rng_state()
    inspect_job(make_job(task=None, loss=drawn))
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_count_rounds() -> None:
    run = hr.fit(make_job(epochs=None, steps=11), hr.Mirrored(2), engine=THREADS)
    assert sum(event.kind == "stepped" for event in run.events) == 2 * 11


def test_the_learning_curve_ends_where_it_should() -> None:
    model = hr.fit(make_job(epochs=20), hr.Mirrored(2), engine=THREADS).model
    assert torch.nn.functional.mse_loss(model(INPUTS), TARGETS) < 1e-4


def test_the_run_goes_when_it_is_forgotten() -> None:
    run = hr.fit(make_job(), engine=THREADS)
    directory = run.run_dir
    assert directory.is_dir()
    del run
    assert not directory.exists()


class Listed(Dataset[Any]):
    def __init__(self, as_dict: bool = False) -> None:
        self.as_dict = as_dict

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.as_dict:
            return {"inputs": INPUTS[index], "answer": TARGETS[index]}
        return INPUTS[index], TARGETS[index]


class Named(nn.Linear):
    """Takes a batch as keywords."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor, answer: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(inputs)


FORMS: dict[str, dict[str, Any]] = {
    "arrays": {"data": (INPUTS.numpy(), TARGETS.numpy())},
    "pipeline": {"data": hr.data.from_arrays(INPUTS, TARGETS).shuffle()},
    "TensorDataset": {"data": TensorDataset(INPUTS, TARGETS)},
    "data set": {"data": Listed()},
    "DataLoader": {"data": DataLoader(Listed(), batch_size=3, shuffle=True)},
    "dict, selected by key": {"data": {"a": INPUTS, "b": TARGETS}, "inputs": "a", "target": "b"},
    "dict, selected by functions": {
        "data": {"a": INPUTS, "b": TARGETS},
        "inputs": lambda batch: batch["a"],
        "target": lambda batch: batch["b"],
    },
    "dict, as keywords": {"data": {"inputs": INPUTS, "answer": TARGETS}, "model": Named, "target": "answer"},
    "dict, some as keywords": {"data": Listed(True), "model": Named, "inputs": ["inputs"], "target": "answer"},
    "dict, whole to the loss": {
        "data": Listed(True),
        "model": Named,
        "task": None,
        "loss": lambda output, batch: (output - batch["answer"]).square().mean(),
    },
    "three, selected by index": {"data": (INPUTS, INPUTS, TARGETS), "inputs": 0, "target": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_data_in_any_form_trains_the_same_model(form: str) -> None:
    torch.testing.assert_close(trained(**FORMS[form]), trained(), rtol=0, atol=0)


def test_a_model_that_is_given_starts_the_run() -> None:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(7.0)
    seen: list[Tensor] = []

    def train(worker: hr.Worker) -> None:
        seen.append(worker.model.weight.detach().clone())  # type: ignore[operator]
        for batch in worker.batches():
            worker.step(batch)

    run = hr.launch(train, make_job(model=model), hr.Mirrored(2), engine=THREADS)
    assert [set(weight.flatten().tolist()) for weight in seen] == [{7.0}, {7.0}]
    assert set(model.weight.flatten().tolist()) == {7.0}
    assert not torch.equal(run.model.weight, model.weight)  # type: ignore[arg-type]


def test_the_verbs_one_by_one_do_what_a_step_does() -> None:
    def train(worker: hr.Worker) -> None:
        for inputs, targets in worker.batches():
            worker.backward((worker.model(inputs) - targets).square().mean())
            worker.update()

    run = hr.launch(train, make_job(), hr.Mirrored(2), engine=THREADS)
    torch.testing.assert_close(run.model.state_dict(), trained(), rtol=0, atol=0)


def test_an_update_without_a_backward() -> None:
    def train(worker: hr.Worker) -> None:
        for _ in worker.batches():
            worker.update()

    with pytest.raises(UsageError, match=r"worker.update\(\) without a worker.backward\(loss\) before it"):
        hr.launch(train, make_job(), hr.Mirrored(2), engine=THREADS)


def test_a_loop_that_ends_early() -> None:
    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.round == 2:
                break

    run = hr.launch(train, make_job(), hr.Mirrored(2), engine=THREADS)
    assert {event.steps for event in run.events if event.kind == "worker_ended"} == {3}  # type: ignore[attr-defined]


def test_tensorboard_gets_what_happened(tmp_path: Path) -> None:
    heard: list[Event] = []
    listeners = [heard.append, hr.TensorBoard(tmp_path / "board", every_s=0)]
    run = hr.fit(make_job(eval_data=(INPUTS, TARGETS)), hr.Mirrored(2), engine=THREADS, on_event=listeners)
    assert len(heard) == len(run.events)
    read = Late("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert [point.step for point in read.Scalars("loss")] == list(range(8))
    assert read.Scalars("evaluation/loss")[-1].value == pytest.approx(run.metrics["loss"])
    assert {f"seconds/compute/rank-{rank}" for rank in range(2)} <= set(read.Tags()["scalars"])


def test_without_a_launcher_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE alone, as some systems leave it lying about, is no launcher."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert hr.fit(make_job(), hr.Mirrored(2), engine=THREADS).plan.workers == 2
    assert "RANK" not in os.environ
