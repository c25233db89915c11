"""Downpour as a run: data and fences, the warm start, what fails and goes on; the rest is in test_parameter_server."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from belongings import belongings, left_since
from engine.lasting import lasting_job, rounds_of, stopped_at
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import WorkerFailed
from headrace.parameter_server.client.client import Client
from headrace.spec.events import Evaluated, Saved
from strategies.contract_models import COUNTS, MODELS
from strategies.contract_runs import train

INTERVALS = [(2, 3), (5, 4), (1, 1), (9, 20)]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("fetch_every", "push_every"), INTERVALS)
def test_every_example_of_every_epoch_comes_once(
    fetch_every: int, push_every: int, workers: int, overlap: bool, tmp_path: Path
) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def visited(example: tuple[Tensor, Tensor], rng: Any) -> tuple[Tensor, Tensor]:
        # What a number of an epoch is drawn from, an example of another epoch is not.
        with lock:
            seen[int(example[0][0]), int(rng.integers(1 << 62))] += 1
        return example

    count, epochs = 26, 3
    x = torch.arange(float(count))[:, None].expand(count, 4)
    job = hr.Job(
        model=lambda: nn.Linear(4, 2),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        data=hr.data.from_arrays(x, torch.arange(count) % 2).shuffle().map(visited),
        eval_data=(x, torch.arange(count) % 2),
        global_batch_size=4,
        epochs=epochs,
        options=hr.Options(eval_every=5),
    )
    run = hr.fit(
        job,
        hr.Downpour(workers, fetch_every=fetch_every, push_every=push_every, overlap=overlap),
        engine=hr.ThreadEngine(),
        run_dir=tmp_path,
        checkpoints=hr.Checkpoints(every_steps=4, every_s=None),
        check=False,
    )
    # The first two are tried before the run, and the first one tells what an empty share looks like.
    assert {example for (example, _), times in seen.items() if times > 1} <= {0, 1}
    assert Counter(example for example, _ in seen) == dict.fromkeys(range(count), epochs)
    assert rounds_of(run) == {round_: 2 if round_ % 7 == 6 else 4 for round_ in range(7 * epochs)}
    assert [event.step for event in run.events if isinstance(event, Saved)] == [0, 4, 8, 12, 16, 20, 21]
    assert [event.step for event in run.events if isinstance(event, Evaluated)] == [5, 10, 15, 20, 21]


@pytest.mark.parametrize(("push_every", "last"), [(1, 7), (2, 8), (3, 8)])
def test_the_first_worker_warms_up_alone(push_every: int, last: int, tmp_path: Path) -> None:
    """Fences after rounds 2, 4, 6, ..., where blocks end; the last block of the warm start is done whole."""
    others = threading.Event()

    def loop(worker: hr.Worker) -> None:
        for batch in worker.batches():
            if worker.rank:
                others.set()
            elif worker.round >= last:
                assert others.wait(30), "the others never begin"
            worker.step(batch)
            if worker.evaluation_due:
                worker.evaluate()

    job = dataclasses.replace(MODELS["mlp"].job(COUNTS["even"]), epochs=8)
    strategy = hr.Downpour(3, fetch_every=1, push_every=push_every, warmstart_steps=7)
    arguments: dict[str, Any] = {"engine": hr.ThreadEngine(), "run_dir": tmp_path}
    first = hr.launch(loop, dataclasses.replace(job, epochs=2), strategy, **arguments)
    assert rounds_of(first, rank=0) == rounds_of(first) == dict.fromkeys(range(4), 4)
    run = hr.launch(loop, job, strategy, **arguments, resume=True)
    assert rounds_of(run) == dict.fromkeys(range(16), 4)
    alone = rounds_of(run, rank=0)
    assert {round_: alone.get(round_) for round_ in range(last)} == dict.fromkeys(range(last), 4)
    assert others.is_set()


def without_fences(count: int) -> hr.Job:
    return dataclasses.replace(MODELS["mlp"].job(count), eval_data=None)


class Planted(RuntimeError):
    """What goes wrong in these tests."""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("verb", ["push", "fetch"])
def test_an_error_in_the_background_reaches_the_caller(
    verb: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"push": "push", "fetch": "pull"}[verb]
    usual = getattr(Client, name)
    times: Counter[str] = Counter()

    def fails(self: Client, *args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread().name
        times[thread] += 1
        if thread == f"headrace-{verb}" and times[thread] == 3:
            raise Planted("no such luck")
        return usual(self, *args, **kwargs)

    before = belongings()
    with monkeypatch.context() as patch:
        patch.setattr(Client, name, fails)
        with pytest.raises(WorkerFailed, match="Planted: no such luck"):
            train(without_fences(40), hr.Downpour(workers, fetch_every=1, push_every=1))
    assert left_since(before) == {}


def explode_at_once(worker: hr.Worker) -> None:
    for number, batch in enumerate(worker.batches()):
        worker.step(batch)
        if number == 4:
            raise Planted("with a push and a fetch under way")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [hr.ThreadEngine, LocalEngine])
def test_nothing_is_left_of_what_was_under_way(engine: type[Engine], tmp_path: Path) -> None:
    before = belongings()
    with closing(engine()) as started:
        for number in range(3):
            with pytest.raises(WorkerFailed, match="under way"):
                hr.launch(
                    explode_at_once,
                    without_fences(80),
                    hr.Downpour(2, servers=2, fetch_every=1, push_every=1),
                    engine=started,
                    run_dir=tmp_path / "runs",
                )
            (tmp_path / "runs").rename(tmp_path / f"run-{number}")
    assert left_since(before) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("fetch_every", "push_every"), [(1, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("kind", ["cnn", "plain"])
def test_one_worker_that_waits_goes_on_bit_for_bit(
    kind: str, fetch_every: int, push_every: int, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "strategy": hr.Downpour(1, fetch_every=fetch_every, push_every=push_every, overlap=False),
        "engine": hr.ThreadEngine(),
        "checkpoints": hr.Checkpoints(every_steps=4, every_s=None),
    }
    job = lasting_job(kind)
    whole = hr.fit(job, **arguments, run_dir=tmp_path / "whole")
    first = hr.launch(partial(stopped_at, 5), job, **arguments, run_dir=tmp_path / "parts")
    assert first.summary.steps == 5
    run = hr.fit(job, **arguments, run_dir=tmp_path / "parts", resume=True)
    assert run.metrics == whole.metrics
    tensors = whole.model.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in run.model.state_dict().items())
