"""Averaging instead of gradients: local SGD, DiLoCo and EASGD against their papers' loops, written by hand."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.data import Loader, as_pipeline
from headrace.errors import RunFailed
from headrace.metrics import weigh
from headrace.spec.events import Evaluated, ParametersAveraged
from headrace.strategies import parameter_averaging
from headrace.training.exchange import Replica
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import PeriodicSync
from strategies.contract_models import ADAM, COUNTS, MODELS, VARIANTS, Case, Convolutional, dense, images
from strategies.contract_options import SCHEDULES
from strategies.contract_runs import Saved, distance, drive, held, step, train, with_replicas
from strategies.test_contract import DOUBLE

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
PLAIN = partial(torch.optim.SGD, lr=0.1)
THREADS = hr.ThreadEngine()
EPOCHS = 3

CASES: Mapping[str, Case] = {
    "mlp": Case(dense, optimizer=MOMENTUM),
    "adam": Case(dense, optimizer=ADAM),
    "lstm": MODELS["lstm"],
    "tied": MODELS["tied"],
    "tokens": VARIANTS["tokens"],
    "batch-norm": Case(Convolutional, images),
}


@pytest.fixture(params=["in place", "apart"])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets parameters lie where workers meet, and in memory of each worker's own."""
    monkeypatch.setattr(parameter_averaging, "_RARELY", 1 if request.param == "apart" else 10**9)


def meet(models: list[nn.Module], weights: list[float], outer: dict[str, Any]) -> None:
    """Does by hand what workers do when they meet, on lists of parameters."""
    total = sum(weights)
    for tensors in zip(*(list(model.parameters()) for model in models), strict=True):
        mean = sum(w / total * t.detach() for w, t in zip(weights, tensors, strict=True))
        outer["step"](tensors, mean)
    for buffers in zip(*(list(model.buffers()) for model in models), strict=True):
        if buffers[0].is_floating_point():
            mean = sum(w / total * b for w, b in zip(weights, buffers, strict=True))
            for buffer in buffers:
                buffer.copy_(mean)


def taken(tensors: tuple[Tensor, ...], mean: Tensor) -> None:
    for tensor in tensors:
        tensor.data.copy_(mean)


class OuterSGD:
    """torch's own optimizer over a copy of the parameters, whose gradient is how far the mean has come."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._by_first: dict[int, tuple[Tensor, torch.optim.Optimizer]] = {}

    def begin(self, models: list[nn.Module]) -> None:
        for parameter in models[0].parameters():
            anchor = nn.Parameter(parameter.detach().clone())
            self._by_first[id(parameter)] = anchor, torch.optim.SGD([anchor], **self._options)

    def step(self, tensors: tuple[Tensor, ...], mean: Tensor) -> None:
        anchor, optimizer = self._by_first[id(tensors[0])]
        anchor.grad = anchor.detach() - mean
        optimizer.step()
        taken(tensors, anchor.detach())


def by_hand(job: hr.Job, workers: int, period: int, outer: dict[str, Any]) -> dict[str, Tensor]:
    """Trains with a loop of plain PyTorch a worker, in turns."""
    assert isinstance(job.model, nn.Module)
    assert job.loss is not None
    models: list[nn.Module] = [copy.deepcopy(job.model) for _ in range(workers)]
    optimizers = [job.optimizer(list(model.named_parameters())) for model in models]
    loaders = [Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,) * workers, r)
               for r in range(workers)]  # fmt: skip
    rounds = (job.epochs or 0) * loaders[0].rounds_per_epoch
    outer["begin"](models)
    since = [0.0] * workers
    for round_, shares in enumerate(zip(*(loader.rounds(0, rounds) for loader in loaders), strict=True)):
        for worker, share in enumerate(shares):
            optimizers[worker].zero_grad()
            if not share.examples:
                continue
            inputs, target = share.batch
            total, weight = weigh(job.loss(models[worker](inputs), target), share.examples)
            since[worker] += float(weight)
            if weight:
                (total / weight).backward()
                optimizers[worker].step()
        if (round_ + 1) % period == 0 or round_ + 1 == rounds:
            with torch.no_grad():
                meet(models, since, outer)
            since = [0.0] * workers
    return models[0].state_dict()


MEAN = {"begin": lambda models: None, "step": taken}


def floating(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


@pytest.mark.each_value
@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(("workers", "period", "size"), [(2, 3, "uneven"), (3, 2, "tiny"), (3, 100, "uneven")])
def test_local_steps_and_their_mean(case: str, workers: int, period: int, size: str) -> None:
    job = CASES[case].job(COUNTS[size])
    outcome = train(job, hr.LocalSGD(workers, period=period))
    assert distance(floating(outcome.tensors), floating(by_hand(job, workers, period, MEAN))) <= 1e-12


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(("workers", "period"), [(1, 2), (2, 3), (3, 2)])
def test_diloco_is_sgd_with_nesterov_momentum_on_the_mean(workers: int, period: int) -> None:
    job = CASES["adam"].job(COUNTS["uneven"])
    sgd = OuterSGD(lr=0.7, momentum=0.9, nesterov=True)
    outcome = train(job, hr.DiLoCo(workers, period=period))
    reference = by_hand(job, workers, period, {"begin": sgd.begin, "step": sgd.step})
    assert distance(outcome.tensors, reference) <= 1e-12
    mean = by_hand(job, workers, period, MEAN)
    assert distance(outcome.tensors, mean) > 1e-3


def test_an_outer_step_of_rate_1_is_the_mean() -> None:
    job = CASES["mlp"].job(COUNTS["uneven"])
    one, other = (train(job, hr.LocalSGD(2, period=2, outer=outer)) for outer in (None, hr.Nesterov(1.0, 0.0)))
    assert distance(one.tensors, other.tensors) <= 1e-12


@pytest.mark.parametrize("workers", [2, 3])
def test_elastic_averaging_keeps_a_centre(workers: int) -> None:
    job, period, alpha = CASES["mlp"].job(COUNTS["uneven"]), 3, 0.9 / workers
    centres: dict[int, Tensor] = {}

    def begin(models: list[nn.Module]) -> None:
        centres.update({id(p): p.detach().clone() for p in models[0].parameters()})

    def step(tensors: tuple[Tensor, ...], _: Tensor) -> None:
        centre = centres[id(tensors[0])]
        apart = [tensor.detach() - centre for tensor in tensors]
        for tensor, distance_ in zip(tensors, apart, strict=True):
            tensor.data.sub_(alpha * distance_)
        centre.add_(alpha * sum(apart))

    outcome = train(job, hr.EASGD(workers, period=period))
    by_hand(job, workers, period, {"begin": begin, "step": step})
    assert len(centres) == len(outcome.tensors)
    for tensor, centre in zip(outcome.tensors.values(), centres.values(), strict=True):
        assert float((tensor - centre).abs().max()) <= 1e-12


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("model", ["mlp", "lstm", "tied", "idle", "buffers", "partial"])
@pytest.mark.parametrize("size", ["uneven", "tiny"])
def test_a_period_of_1_with_plain_sgd_is_one_device(model: str, size: str, workers: int) -> None:
    case = MODELS[model]
    job = Case(case.model, case.data, case.loss, optimizer=PLAIN).job(COUNTS[size])
    outcome, reference = train(job, hr.ParameterAveraging(workers, period=1)), train(job, hr.OneDevice())
    trained = {name for name, _ in case.model().named_parameters()}
    ours, theirs = ({n: t for n, t in each.tensors.items() if n in trained} for each in (outcome, reference))
    assert distance(ours, theirs) <= DOUBLE


@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(MOMENTUM, nesterov=True)])
@pytest.mark.parametrize("size", ["even", "uneven", "tiny"])
def test_with_momentum_too_where_the_state_is_averaged(optimizer: Callable[..., Any], size: str) -> None:
    job = Case(dense, optimizer=optimizer).job(COUNTS[size])
    reference = train(job, hr.OneDevice())
    outcome = train(job, hr.ParameterAveraging(3, period=1, average_optimizer_state=True))
    assert distance(outcome.tensors, reference.tensors) <= DOUBLE
    apart = train(job, hr.ParameterAveraging(3, period=1))
    # Momentum is linear: as long as every worker always has the same part of the batch, even that is one device.
    assert (distance(apart.tensors, reference.tensors) > DOUBLE) == (size != "even")


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("strategy", [hr.LocalSGD(3, period=2), hr.DiLoCo(3, period=2), hr.EASGD(3, period=2),
                                      hr.ParameterAveraging(3, period=2, average_optimizer_state=True)])  # fmt: skip
def test_by_a_wire_as_through_shared_memory(strategy: hr.ParameterAveraging) -> None:
    job = CASES["batch-norm"].job(COUNTS["tiny"])
    host, wire = (drive(job, strategy, 3, 0, 7, wired=wired) for wired in (False, True))
    for one, other in zip(host, wire, strict=True):
        assert distance(floating(one.tensors), floating(other.tensors)) <= 1e-12
    agree = distance(floating(host[0].tensors), floating(host[1].tensors)) == 0
    assert not agree, "the seventh round is behind the last meeting"


FEWER = {"bf16": 2e-2, "int8": 4e-2}


@pytest.mark.parametrize("outer", [None, "nesterov", "elastic"])
@pytest.mark.parametrize("codec", sorted(FEWER))
def test_fewer_bits_on_the_wire_cost_little(codec: str, outer: str | None) -> None:
    job = CASES["mlp"].job(COUNTS["tiny"])
    strategy = hr.ParameterAveraging(3, period=2, outer=outer)
    plain = drive(job, strategy, 3, 0, 8, wired=True)
    coded = drive(job, dataclasses.replace(strategy, codec=codec), 3, 0, 8, wired=True)
    for one, other in zip(coded, plain, strict=True):
        assert 0 < distance(floating(one.tensors), floating(other.tensors)) < FEWER[codec]
    if outer != "elastic":
        first = floating(coded[0].tensors)
        assert all(distance(floating(each.tensors), first) == 0 for each in coded), "the same bits on all workers"


@pytest.mark.parametrize("codec", ["plain", *sorted(FEWER)])
@pytest.mark.parametrize("outer", [None, "nesterov", "elastic"])
def test_to_look_changes_nothing_over_a_wire(codec: str, outer: str | None) -> None:
    strategy = hr.ParameterAveraging(2, period=3, outer=outer, codec=codec)

    def act(looks: bool, rank: int, replica: Replica, loader: Loader) -> list[Mapping[str, Tensor]]:
        assert isinstance(replica.sync, PeriodicSync)
        seen = []
        for round_, share in enumerate(itertools.islice(loader.rounds(), 7)):
            step(replica, share, round_)
            for averaged in (True, True, False, False) if looks else ():
                replica.sync.swap_weights(averaged)
                seen += [held(replica).tensors] if averaged else []
        # What was seen in the end is what all are together; and where each has gone.
        return [*seen[-1:], held(replica).tensors]

    job = CASES["mlp"].job(COUNTS["uneven"])
    looking, others = (with_replicas(job, strategy, 2, partial(act, looks), wired=True) for looks in (True, False))
    assert all(distance(a[-1], b[-1]) == 0 for a, b in zip(looking, others, strict=True))
    assert distance(looking[0][0], looking[1][0]) == 0 < distance(looking[0][1], looking[1][1])


@pytest.mark.parametrize("codec", ["plain", "int8"])
@pytest.mark.parametrize("outer", [None, "nesterov", "elastic"])
def test_what_was_lost_on_the_wire_is_saved_too(codec: str, outer: str | None) -> None:
    strategy, job = hr.ParameterAveraging(2, period=2, outer=outer, codec=codec), CASES["adam"].job(COUNTS["uneven"])

    def act(stop: int, rank: int, replica: Replica, loader: Loader) -> tuple[Saved, list[StatePiece], Saved]:
        assert isinstance(replica.sync, PeriodicSync)
        for round_, share in enumerate(itertools.islice(loader.rounds(), stop)):
            step(replica, share, round_)
        own = list(replica.sync.own())
        with replica.sync.swapped_weights():
            shown = held(replica)
        return shown, own, held(replica)

    def go_on(rank: int, replica: Replica, loader: Loader) -> Saved:
        (first, _, _), own = begun[0], begun[rank][1]
        found = {piece.name: piece for piece in (*first.pieces, *own)}
        replica.load(found.values(), first.settings)
        for round_, share in enumerate(itertools.islice(loader.rounds(4), 4), 4):
            step(replica, share, round_)
        return held(replica)

    begun = with_replicas(job, strategy, 2, partial(act, 4), wired=True)
    whole = with_replicas(job, strategy, 2, partial(act, 8), wired=True)
    again = with_replicas(job, strategy, 2, go_on, begun[0][0], wired=True, first=4)
    assert [distance(one.tensors, other[2].tensors) for one, other in zip(again, whole, strict=True)] == [0, 0]


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_micro_batches_schedules_and_warm_up_are_those_of_one_device(every: str) -> None:
    options = hr.Options(accumulate=2, schedule=SCHEDULES["exponential"], schedule_every=every, warmup=4)
    job = Case(dense, optimizer=MOMENTUM, options=options).job(COUNTS["tiny"])
    outcome = train(job, hr.ParameterAveraging(3, period=1, average_optimizer_state=True))
    assert distance(outcome.tensors, train(job, hr.OneDevice()).tensors) <= DOUBLE


def history(run: hr.Run) -> list[ParametersAveraged]:
    return [event for event in run.events if isinstance(event, ParametersAveraged)]


def fit(job: hr.Job, strategy: hr.Strategy, **asked: Any) -> hr.Run:
    return hr.fit(job, strategy, device="cpu", engine=THREADS, **asked)


def test_post_local_meets_after_every_round_first(tmp_path: Path) -> None:
    run = fit(CASES["mlp"].job(COUNTS["uneven"]), hr.LocalSGD(2, period=3, post_local=4), run_dir=tmp_path)
    assert [event.step for event in history(run)] == [1, 2, 3, 4, 7, 9]
    assert [event.rounds for event in history(run)] == [1, 1, 1, 1, 3, 2]
    assert [event.period for event in history(run)][:5] == [1, 1, 1, 3, 3]
    assert all(event.drift > 0 and event.why == "as asked for" for event in history(run))


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("strategy", [hr.LocalSGD(2, period=4), hr.DiLoCo(2, period=4), hr.EASGD(2, period=4)])
def test_to_look_changes_nothing(strategy: hr.Strategy, tmp_path: Path) -> None:
    case = CASES["batch-norm"]
    runs = [
        fit(Case(case.model, case.data, options=hr.Options(eval_every=every)).job(COUNTS["uneven"]), strategy,
            run_dir=tmp_path / str(every))
        for every in (1, 100)
    ]  # fmt: skip
    looks = [[event.step for event in run.events if isinstance(event, Evaluated)] for run in runs]
    assert looks == [list(range(1, 10)), [9]]
    assert distance(*(run.model.state_dict() for run in runs)) == 0.0  # type: ignore[call-arg]
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.each_value
@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("strategy", [hr.LocalSGD(3, period=2), hr.DiLoCo(3, period=4), hr.EASGD(3, period=4),
                                      hr.LocalSGD(3, period=4, average_optimizer_state=True)])  # fmt: skip
@pytest.mark.parametrize("case", ["mlp", "adam", "batch-norm"])
def test_what_is_saved_when_workers_meet_goes_on_bit_for_bit(strategy: hr.Strategy, case: str, tmp_path: Path) -> None:
    job = CASES[case].job(COUNTS["uneven"])
    whole = fit(job, strategy, run_dir=tmp_path / "whole", checkpoints=hr.Checkpoints(every_steps=3, keep=9))
    saved = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert "step-00000004" in saved, "asked for after 3 rounds, there when workers next met"
    middle = tmp_path / "whole" / "checkpoints" / "step-00000004"
    again = fit(job, strategy, run_dir=tmp_path / "again", resume=middle)
    assert distance(again.model.state_dict(), whole.model.state_dict()) == 0.0
    assert [event.step for event in history(again)] == [e.step for e in history(whole) if e.step > 4]


@pytest.mark.parametrize("other", [hr.OneDevice(), hr.Mirrored(2), hr.LocalSGD(3, period=2)], ids=str)
def test_any_strategy_goes_on_from_any(other: hr.Strategy, tmp_path: Path) -> None:
    ours, job = hr.DiLoCo(2, period=3), CASES["adam"].job(COUNTS["uneven"])
    for number, (first, then) in enumerate([(ours, other), (other, ours)]):
        begun, again = (tmp_path / f"{name}{number}" for name in ("begun", "again"))
        fit(job, first, run_dir=begun, checkpoints=hr.Checkpoints(every_steps=6, keep=9))
        run = fit(job, then, run_dir=again, resume=begun / "checkpoints" / "step-00000006")
        assert run.metrics["loss"] < 3.0
        assert all(bool(tensor.isfinite().all()) for tensor in run.model.state_dict().values())


def spoil_in_round(spoilt: int, worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
        if worker.round == spoilt and worker.rank == 1:
            with torch.no_grad():
                next(worker.model.parameters()).fill_(float("nan"))


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("outer", [None, "nesterov", "elastic"])
@pytest.mark.parametrize("average_state", [False, True])
def test_who_has_lost_its_numbers_is_left_out_and_goes_on(
    outer: str | None, average_state: bool, tmp_path: Path
) -> None:
    strategy = hr.ParameterAveraging(3, period=2, outer=outer, average_optimizer_state=average_state)
    # Behind the meeting after four rounds: the fifth round's loss would be none.
    options = hr.Options(on_nonfinite="skip")
    job = Case(dense, optimizer=MOMENTUM, options=options).job(COUNTS["uneven"])
    run = hr.launch(partial(spoil_in_round, 4), job, strategy, device="cpu", run_dir=tmp_path, engine=THREADS)
    assert {event.step: event.left_out for event in history(run) if event.left_out} == {6: (1,)}
    assert all(bool(tensor.isfinite().all()) for tensor in run.model.state_dict().values())


def spoil_all(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
        with torch.no_grad():
            next(worker.model.parameters()).fill_(float("inf"))


def test_no_worker_left_with_numbers_ends_the_run(tmp_path: Path) -> None:
    job = Case(dense, options=hr.Options(on_nonfinite="skip")).job(COUNTS["uneven"])
    with pytest.raises(RunFailed, match="after 2 rounds no worker has finite parameters; lower the learning rate"):
        hr.launch(spoil_all, job, hr.LocalSGD(2, period=2), device="cpu", run_dir=tmp_path, engine=THREADS)
