"""Sandblaster's processes: who is lost leaves no trace, bit for bit, and a slow worker is helped."""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from engine.conftest import below, fork_servers, until
from engine.test_elastic import Hand
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Evaluated, Stepped

pytestmark = pytest.mark.slow

EXAMPLES = 64


class Waiting(nn.Sequential):
    """A small network that takes its time until a file is there."""

    def __init__(self, awaited: Path | None = None) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.double()
        self._awaited = awaited

    def forward(self, inputs: Tensor) -> Tensor:
        if self._awaited is not None:
            until(self._awaited.exists, 0.03)
        return super().forward(inputs)  # type: ignore[no-any-return]


def job(awaited: Path | None = None, **changes: object) -> hr.Job:
    inputs = torch.sin(torch.arange(4.0 * EXAMPLES, dtype=torch.float64)).view(EXAMPLES, 4)
    data = inputs, (inputs[:, :1] * inputs[:, 1:2]).tanh()
    given: dict[str, object] = {
        "model": Waiting(awaited),
        "loss": nn.functional.mse_loss,
        "optimizer": functools.partial(
            torch.optim.LBFGS, max_iter=2, max_eval=8, history_size=10, line_search_fn="strong_wolfe"
        ),
        "data": data,
        "eval_data": data,
        "global_batch_size": EXAMPLES,
        "epochs": 6,
    }
    return hr.Job(**{**given, **changes})  # type: ignore[arg-type]


def parameters(run: hr.Run) -> list[Tensor]:
    assert run.status == "ok"
    return [parameter.detach() for parameter in run.model.parameters()]


@functools.cache
def undisturbed(epochs: int = 6) -> tuple[list[Tensor], list[float]]:
    run = hr.fit(job(epochs=epochs), hr.Sandblaster(1, portions=24), engine=hr.ThreadEngine())
    return parameters(run), losses(run)


def losses(run: hr.Run) -> list[float]:
    return [event.metrics["loss"] for event in run.events if isinstance(event, Evaluated)]


@pytest.mark.parametrize(
    ("victims", "strategy"),
    [
        ({20: 1, 60: 0}, hr.Sandblaster(3, portions=24, sharding="fixed_shards:1")),
        ({20: 3}, hr.Sandblaster(3, portions=24, backups=1, sharding="fixed_shards:1")),
    ],
    ids=["workers", "server"],
)
def test_who_is_killed_leaves_no_trace(
    engine: LocalEngine, victims: dict[int, int], strategy: hr.Strategy, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    deeds = {step: (rank, signal.SIGKILL) for step, rank in victims.items()}
    hand = Hand(deeds, done=done, backups=len(victims) == 1)
    run = hr.fit(job(done), strategy, engine=engine, on_event=hand)
    assert sorted(lost.lost for lost in hand.lost) == sorted(victims.values())
    tensors, evaluated = undisturbed()
    assert all(map(torch.equal, parameters(run), tensors))
    # Each worker evaluates a share, and there were more of them.
    assert losses(run) == pytest.approx(evaluated, rel=1e-12)
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


def test_a_run_that_goes_on_is_one_that_was_never_interrupted(engine: LocalEngine, tmp_path: Path) -> None:
    strategy, folder = hr.Sandblaster(2, servers=2, portions=24), tmp_path / "run"
    hr.fit(job(epochs=3), strategy, run_dir=folder, engine=engine)
    resumed = hr.fit(job(), strategy, run_dir=folder, engine=engine, resume=True)
    whole = hr.fit(job(), strategy, engine=engine)
    assert all(map(torch.equal, parameters(resumed), parameters(whole)))
    assert not list((folder / "snapshots").glob("*")), "those of two servers would not fit each other"


def slow_on_one(awaited: float, worker: hr.Worker) -> None:
    """Trains; the last rank needs that many seconds more for every portion."""
    for batch in worker.batches():
        if worker.rank == worker.world - 1:
            time.sleep(awaited)
        worker.step(batch)


def test_portions_of_a_slow_worker_are_computed_by_the_others(engine: LocalEngine) -> None:
    plain = dataclasses.replace(job(epochs=2), eval_data=None)
    run = hr.launch(functools.partial(slow_on_one, 0.5), plain, hr.Sandblaster(2, portions=24), engine=engine)
    assert all(map(torch.equal, parameters(run), undisturbed(epochs=2)[0]))
    by_rank = {rank: [e for e in run.events if isinstance(e, Stepped) and e.rank == rank] for rank in (0, 1)}
    assert len(by_rank[1]) < 0.2 * len(by_rank[0])
    assert by_rank[1], "it was never given a portion"
    rounds = [event for own in by_rank.values() for event in own if event.loss is not None]
    assert {step: sum(e.weight for e in rounds if e.step == step) for step in (0, 1)} == dict.fromkeys((0, 1), EXAMPLES)
