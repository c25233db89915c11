"""Workers without an order, put in one: AD-PSGD and Hogwild are their papers' algorithms, step by step."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import HeadraceError, UsageError
from headrace.testing.references import ReferenceResult, WorkerCopies, mean_of
from strategies.contract_models import COUNTS, MODELS, Case, Convolutional, dense, images
from strategies.contract_runs import distance, train
from strategies.test_parameter_averaging import MOMENTUM

MLP = Case(dense, optimizer=MOMENTUM)
CASES = {"mlp": MLP, "lstm": MODELS["lstm"], "partial": MODELS["partial"], "batch-norm": Case(Convolutional, images)}


class Turns:
    """Lets workers act one after the other: each waits for its turn, and gives it to the next."""

    def __init__(self, workers: int) -> None:
        self._gates = [threading.Semaphore(rank == 0) for rank in range(workers)]

    def take(self, rank: int, act: Callable[[], Any]) -> None:
        assert self._gates[rank].acquire(timeout=30)
        act()
        self._gates[(rank + 1) % len(self._gates)].release()


def whole_steps(turns: Turns, worker: hr.Worker) -> None:
    """Each worker reads, computes and updates before the next does."""
    for batch in worker.batches():
        turns.take(worker.rank, lambda batch=batch: worker.step(batch))


def gradients_first(loss: Any, turns: Turns, worker: hr.Worker) -> None:
    """All compute their gradients; then each updates in its turn, by a gradient that is older than what it changes."""
    for inputs, target in worker.batches():
        turns.take(worker.rank, lambda x=inputs, y=target: worker.backward(loss(worker.model(x), y)))
        turns.take(worker.rank, worker.update)


def partner(seed: int, rank: int, round_: int, world: int) -> int:
    return random.Random(f"{seed}/{rank}/{round_}").choice([other for other in range(world) if other != rank])


def pairs(job: hr.Job, workers: int) -> ReferenceResult:
    """Lian et al., 2018, algorithm 1, in turns: each gradient is at what its worker had after its last step."""
    copies = WorkerCopies(job, workers)
    own = copies.models
    read = [copy.deepcopy(model) for model in own]
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            before = [each.clone() for each in read[worker].buffers()]
            copies.models = [*own[:worker], read[worker], *own[worker + 1 :]]
            copies.optimizers[worker].zero_grad()
            busy = copies.differentiate(worker, share)
            for each, now, then in zip(own[worker].buffers(), read[worker].buffers(), before, strict=True):
                each.copy_(each + now - then)
            average(own[worker], own[partner(job.seed, worker, done - 1, workers)])
            for each, same in zip(own[worker].parameters(), read[worker].parameters(), strict=True):
                each.grad, same.grad = same.grad, None
            if busy:
                copies.optimizers[worker].step()
            read[worker].load_state_dict(own[worker].state_dict())
    copies.models = own
    return copies.outcome(mean_of(copies.models))


def floating(model: nn.Module) -> Iterator[Tensor]:
    return (each for each in [*model.parameters(), *model.buffers()] if each.is_floating_point())


@torch.no_grad()
def average(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(floating(one), floating(other), strict=True):
        a.add_(b).div_(2)
        b.copy_(a)


def shared(job: hr.Job, workers: int) -> ReferenceResult:
    """Niu et al., 2011, of workers in turns: one model, a step for each share, an optimizer for each worker."""
    copies = WorkerCopies(job, workers)
    (model, *_) = copies.models
    copies.models = [model] * workers
    copies.optimizers = [job.optimizer(list(model.named_parameters())) for _ in range(workers)]
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
    return copies.outcome(model)


def stale(job: hr.Job, workers: int) -> ReferenceResult:
    """The same where all gradients of a round come before its steps, which are then by older ones."""
    copies = WorkerCopies(job, workers)
    model = copy.deepcopy(copies.models[0])
    optimizers = [job.optimizer(list(model.named_parameters())) for _ in range(workers)]
    for _, shares in copies.rounds():
        gradients = []
        for worker, share in enumerate(shares):
            copies.models[worker].load_state_dict(model.state_dict())
            gradients.append(
                [each.grad for each in copies.models[worker].parameters()]
                if copies.differentiate(worker, share)
                else None
            )
        for worker, own in enumerate(gradients):
            if own is not None:
                for parameter, gradient in zip(model.parameters(), own, strict=True):
                    parameter.grad = gradient
                optimizers[worker].step()
    return copies.outcome(model)


def floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if each.is_floating_point()}


NEVER = 1_000
"""Workers in turns cannot wait for each other before the end."""


@pytest.mark.parametrize("loop", ["whole steps", "gradients first"])
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("workers", [2, 3])
def test_pairs_in_turns_are_the_papers_algorithm(case: str, workers: int, loop: str) -> None:
    job = CASES[case].job(COUNTS["uneven"])
    loops = {"whole steps": whole_steps, "gradients first": partial(gradients_first, job.loss)}
    outcome = train(job, hr.ADPSGD(workers, meet_every=NEVER), loop=partial(loops[loop], Turns(workers)))
    assert distance(floats(outcome.tensors), floats(pairs(job, workers).tensors)) <= 1e-12
    assert distance(floats(outcome.tensors), floats(train(job, hr.Gossip(workers)).tensors)) > 1e-5


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"batch-norm"}))
@pytest.mark.parametrize("workers", [2, 3])
def test_one_copy_in_turns_is_the_papers_algorithm(case: str, workers: int) -> None:
    job = CASES[case].job(COUNTS["uneven"])
    strategy = hr.Hogwild(workers, meet_every=NEVER)
    outcome = train(job, strategy, loop=partial(whole_steps, Turns(workers)))
    assert distance(outcome.tensors, shared(job, workers).tensors) <= 1e-12
    outcome = train(job, strategy, loop=partial(gradients_first, job.loss, Turns(workers)))
    assert distance(outcome.tensors, stale(job, workers).tensors) <= 1e-12


@pytest.mark.parametrize("strategy", [hr.ADPSGD(3, meet_every=2), hr.Hogwild(3, meet_every=2)], ids=lambda s: s.name)
def test_workers_that_race_learn_as_one_device_does(strategy: hr.Strategy) -> None:
    inputs = torch.randn(128, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = (inputs, (inputs.sum(1) > 0).long())
    job = dataclasses.replace(MLP.job(8), data=data, eval_data=data, global_batch_size=16, epochs=20)
    job = dataclasses.replace(job, optimizer=partial(torch.optim.SGD, lr=0.1))
    alone, together = (hr.fit(job, each, engine=hr.ThreadEngine()).metrics["loss"] for each in ("one_device", strategy))
    begin = hr.fit(dataclasses.replace(job, epochs=1), "one_device", engine=hr.ThreadEngine()).metrics["loss"]
    assert together < begin - (begin - alone) / 2


def evaluated_by_the_loop(writes: bool, loss: Any, worker: hr.Worker) -> None:
    for inputs, target in worker.batches():
        worker.backward(loss(worker.model(inputs), target))
        worker.update()
        if worker.epoch_ended:
            if writes:
                next(worker.model.parameters()).data.add_(1)
            worker.evaluate()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_that_evaluates_changes_nothing_and_one_that_writes_before_is_refused(workers: int) -> None:
    job = dataclasses.replace(MLP.job(COUNTS["even"]), epochs=2)
    run, strategy = partial(hr.launch, engine=hr.ThreadEngine()), hr.ADPSGD(workers, meet_every=4)
    assert run(partial(evaluated_by_the_loop, False, job.loss), job, strategy).status == "ok"
    with pytest.raises(UsageError, match="the loop, between two rounds, has changed"):
        run(partial(evaluated_by_the_loop, True, job.loss), job, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.ADPSGD(3, meet_every=2), hr.Hogwild(3, meet_every=2)], ids=lambda s: s.name)
def test_a_killed_worker_holds_up_no_other_and_the_run_resumes(strategy: hr.Strategy, tmp_path: Path) -> None:
    job = dataclasses.replace(MLP.job(64), epochs=30)
    pids: dict[int, int] = {}

    def kill(event: Any) -> None:
        if event.kind == "worker_started":
            pids[event.rank] = event.pid
        if event.kind == "stepped" and event.rank == 1 and event.step == 9:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(HeadraceError, match="rank 1"):
        hr.fit(job, strategy, run_dir=tmp_path, on_event=kill, checkpoints=hr.Checkpoints(every_steps=2))
    assert hr.fit(job, strategy, run_dir=tmp_path, resume=True).summary.steps == 30 * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(hr.ADPSGD, meet_every=0), "meet_every must be a whole number of rounds of at least 1, got 0"),
        (partial(hr.Hogwild, meet_every=True), "meet_every must be a whole number of rounds of at least 1, got True"),
        (partial(hr.Hogwild, workers=0), "workers must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_refused(make: Callable[[], hr.Strategy], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
