"""What a parameter server promises beside the contract: one device exactly where it must be, nothing lost elsewhere."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from belongings import belongings, left_since
from cover import in_turn
from engine.victims import BadStep
from headrace.data import Loader, as_pipeline
from headrace.errors import InfeasiblePlan, NonFiniteGradient, NonFiniteLoss, UnknownName, UsageError, WorkerFailed
from headrace.parameter_server.server.optimizer import Remedies
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import NonFinite, ServerStats, Stepped
from headrace.strategies.refusals import refuse
from strategies.contract_models import ADAM, BATCH, COUNTS, MODELS, SGD, VARIANTS, Case, dense, verb_by_verb
from strategies.contract_options import BF16, BF16_NAMES, OPTIONS
from strategies.contract_runs import CLUSTER, MODEL, distance, train
from strategies.test_contract import (
    DOUBLE,
    SINGLE,
    assert_equal,
    assert_same_bits,
    assert_same_through_servers,
    on_one_device,
)

LOCAL = hr.Options(batch_norm="local")
CASES = {
    name: dataclasses.replace(case, options=dataclasses.replace(case.options, batch_norm="local"))
    for name, case in {**MODELS, **VARIANTS, **OPTIONS}.items()
}
"""Of the contract; with one worker, BatchNorm is the same either way."""

LOCK_STEP = partial(hr.ParameterServer, staleness_bound=0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one server": {},
    "two servers": {"servers": 2},
    "pieces": {"sharding": "max_size:64B"},
    "pieces on three servers": {"servers": 3, "sharding": "fixed_shards:3", "placement": "round_robin"},
}


def exchanged(name: str) -> bool:
    """Whether N workers must give what one gives: each normalises its own batch, and clips its own gradient by norm."""
    given = {**MODELS, **VARIANTS, **OPTIONS}[name].options
    return given.batch_norm == "local" and given.clip_norm is None and given.clip_value is None


EXCHANGED = sorted(filter(exchanged, CASES))
SLICED = ["mlp", "lstm", "tied", "idle", "buffers", "partial", "tokens", "groups-by-name", "own-optimizer",
          "amsgrad-partial", "average-partial", "accumulate-mean", "schedule-one-cycle", "groups-cyclic"]  # fmt: skip
"""Their optimizers work on pieces."""


@pytest.mark.parametrize(("name", "size"), in_turn(sorted(CASES), ["uneven", "tiny"], third=2))
def test_one_worker_in_lock_step_is_one_device_bit_for_bit(name: str, size: str) -> None:
    job = CASES[name].job(COUNTS[size])
    assert_same_through_servers(train(job, LOCK_STEP(1)), on_one_device(CASES[name], size, torch.float64, None), job)


@pytest.mark.parametrize("name", ["mlp", "partial", "tokens", "all-together", "adam-one-cycle"])
@pytest.mark.parametrize("bound", [None, 2])
def test_one_worker_by_itself_is_one_device_bit_for_bit(name: str, bound: int | None) -> None:
    job = CASES[name].job(COUNTS["tiny"])
    outcome = train(job, hr.ParameterServer(1, staleness_bound=bound))
    assert_same_through_servers(outcome, on_one_device(CASES[name], "tiny", torch.float64, None), job)


@pytest.mark.parametrize("option", BF16_NAMES)
def test_one_worker_in_bf16_is_one_device_bit_for_bit(option: str) -> None:
    outcome = train(BF16[option].job(COUNTS["uneven"], torch.float32), LOCK_STEP(1))
    assert_same_bits(outcome, on_one_device(BF16[option], "uneven", torch.float32, None))


@pytest.mark.parametrize("layout", ["", "max_size:64B"])
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_gradients_made_where_they_are_pushed_from_change_no_bit(name: str, layout: str, placed: list[bool]) -> None:
    outcome = train(CASES[name].job(COUNTS["uneven"]), LOCK_STEP(1, sharding=layout or None))
    assert_same_bits(outcome, on_one_device(CASES[name], "uneven", torch.float64, None))
    assert sum(placed) > len(placed) / 2


@pytest.mark.parametrize(("name", "workers", "size"), in_turn(EXCHANGED, [(2, "uneven"), (3, "tiny")], third=0))
def test_lock_step_is_the_synchronous_mean_and_two_runs_are_equal(name: str, workers: int, size: str) -> None:
    job = CASES[name].job(COUNTS[size])
    outcome = train(job, LOCK_STEP(workers))
    assert_equal(outcome, on_one_device(CASES[name], size, torch.float64, None), DOUBLE)
    assert_same_bits(outcome, train(job, LOCK_STEP(workers)))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", sorted(set(MODELS) & set(EXCHANGED)))
def test_lock_step_in_single_precision(name: str, optimizer: str) -> None:
    factory = {"sgd": SGD, "adam": ADAM}[optimizer]
    outcome = train(CASES[name].job(COUNTS["tiny"], torch.float32, factory), LOCK_STEP(3))
    assert_equal(outcome, on_one_device(CASES[name], "tiny", torch.float32, factory), SINGLE[optimizer])


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "layout"), in_turn(SLICED, [name for name in LAYOUTS if LAYOUTS[name]]))
def test_any_layout_on_servers_is_one_server(name: str, layout: str) -> None:
    job, given = CASES[name].job(COUNTS["uneven"]), LAYOUTS[layout]
    assert_equal(train(job, LOCK_STEP(2, **given)), train(job, LOCK_STEP(2)), DOUBLE)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_pushes_one_after_the_other_are_one_device_in_any_layout(layout: str) -> None:
    outcome = train(CASES["mlp"].job(COUNTS["uneven"]), hr.ParameterServer(1, **LAYOUTS[layout]))
    assert_equal(outcome, on_one_device(CASES["mlp"], "uneven", torch.float64, None), DOUBLE)


def test_a_loop_of_ones_own() -> None:
    case = CASES["mean-cnn"]
    outcome = train(case.job(COUNTS["tiny"]), LOCK_STEP(1), loop=partial(verb_by_verb, case.loss))
    assert_same_bits(outcome, on_one_device(case, "tiny", torch.float64, None))
    case = CASES["partial"]
    outcome = train(case.job(COUNTS["tiny"]), LOCK_STEP(2), loop=partial(verb_by_verb, case.loss))
    assert_equal(outcome, on_one_device(case, "tiny", torch.float64, None), DOUBLE)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.2}, {"clip_value": 0.05}, {"clip_value": 0.05, "clip_norm": 0.1}])
def test_every_worker_clips_what_it_pushes(clip: dict[str, float]) -> None:
    job = Case(dense, options=hr.Options(**clip)).job(COUNTS["even"])
    assert isinstance(job.model, nn.Module)
    module, loaders = dense().double(), []
    module.load_state_dict(job.model.state_dict())
    optimizer = job.optimizer(module.named_parameters())
    parameters = list(module.parameters())
    pipeline, _ = as_pipeline(job.data)
    loaders = [Loader(pipeline, job.seed, BATCH, (1, 1), rank).rounds() for rank in range(2)]
    for shares in islice(zip(*loaders, strict=True), 6):
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for share in shares:
            inputs, target = share.batch
            optimizer.zero_grad()
            assert job.loss is not None
            job.loss(module(inputs), target).backward()
            nn.utils.clip_grad_value_(parameters, clip.get("clip_value", 1e9))
            nn.utils.clip_grad_norm_(parameters, clip.get("clip_norm", 1e9))
            for summed, parameter in zip(total, parameters, strict=True):
                assert parameter.grad is not None
                summed += parameter.grad * share.examples / share.of
        for summed, parameter in zip(total, parameters, strict=True):
            parameter.grad = summed
        optimizer.step()
    outcome = train(job, LOCK_STEP(2))
    assert distance(outcome.tensors, module.state_dict()) <= DOUBLE
    assert distance(outcome.tensors, on_one_device(Case(dense), "even", torch.float64, None).tensors) > 1e-3


class OneGradientForTwo(nn.Module):
    """Autograd gives both biases one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.more, self.most = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + (self.more + self.most)


@pytest.mark.parametrize("options", [hr.Options(clip_norm=0.1), hr.Options(clip_value=0.01)])
def test_a_gradient_that_two_parameters_share_is_clipped_once(options: hr.Options) -> None:
    case = Case(OneGradientForTwo, options=options)
    outcome = train(case.job(COUNTS["even"]), LOCK_STEP(1))
    assert_same_bits(outcome, on_one_device(case, "even", torch.float64, None))


REGIMES: dict[str, hr.Strategy] = {
    "asynchronous": hr.ParameterServer(3),
    "asynchronous on two servers": hr.ParameterServer(2, servers=2, sharding="fixed_shards:2"),
    "bound 2": hr.ParameterServer(3, staleness_bound=2),
    "lock-step": LOCK_STEP(3),
    "downpour": hr.Downpour(3, push_every=3, fetch_every=2),
    "downpour in turn": hr.Downpour(2, servers=2, push_every=2, fetch_every=1, overlap=False),
    "full scale": hr.ParameterServer(2, scale="full"),
    "remedies": hr.ParameterServer(3, remedies=Remedies(divide=True, compensation=0.04, asynchronous_workers=3)),
}


@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_an_epoch_visits_every_example_once(regime: str) -> None:
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
        global_batch_size=8,
        epochs=epochs,
    )
    seen.clear()
    run = hr.fit(job, REGIMES[regime], engine=hr.ThreadEngine(), check=False)
    # The first two are tried before the run, and the first one tells what an empty share looks like.
    assert {example for (example, _), times in seen.items() if times > 1} <= {0, 1}
    assert Counter(example for example, _ in seen) == dict.fromkeys(range(count), epochs)
    steps = [event for event in run.events if isinstance(event, Stepped)]
    assert sum(event.examples for event in steps) == count * epochs
    assert {event.step for event in steps} == set(range(4 * epochs))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_the_fastest_is_never_further_ahead_than_the_bound(bound: int) -> None:
    begun = [0, 0]
    rounds = 9
    ahead: list[int] = []
    come = threading.Condition()

    def loop(worker: hr.Worker) -> None:
        for batch in worker.batches():
            with come:
                begun[worker.rank] = worker.round + 1
                come.notify_all()
                if worker.rank == 1:
                    allowed = min(worker.round + 1 + bound, rounds)
                    assert come.wait_for(partial(reached, allowed), timeout=30), "a worker that may go on does not wait"
                    # Time enough for one round more.
                    come.wait_for(partial(reached, allowed + 1), timeout=0.02)
                    ahead.append(begun[0] - begun[1])
            worker.step(batch)

    def reached(count: int) -> bool:
        return begun[0] >= count

    job = dataclasses.replace(CASES["mlp"].job(64), epochs=None, steps=rounds, eval_data=None)
    run = hr.launch(loop, job, hr.ParameterServer(2, staleness_bound=bound), engine=hr.ThreadEngine())
    assert run.status == "ok"
    assert ahead == [min(bound, rounds - 1 - round_) for round_ in range(rounds)]


def test_backup_workers_take_the_first_gradients_and_count_the_late_ones() -> None:
    job = dataclasses.replace(CASES["mlp"].job(COUNTS["even"]), epochs=4)
    run = hr.fit(job, hr.ParameterServer(3, backup_workers=1), engine=hr.ThreadEngine())
    counted = sum(event.examples for event in run.events if isinstance(event, Stepped))
    assert counted == COUNTS["even"] * 4
    assert {event.step for event in run.events if isinstance(event, Stepped)} == set(range(8))


def poisoned(bad: list[int], value: float, worker: hr.Worker) -> None:
    """The usual loop, but that rank 1's inputs of some rounds are no numbers."""
    for inputs, target in worker.batches():
        if worker.rank == 1 and worker.round in bad:
            inputs = torch.full_like(inputs, value)
        worker.step((inputs, target))
        if worker.evaluation_due:
            worker.evaluate()


@pytest.mark.parametrize("strategy", [LOCK_STEP(2), hr.ParameterServer(2, staleness_bound=1)], ids=["0", "1"])
def test_a_gradient_that_is_not_finite_is_refused_and_the_others_go_on(strategy: hr.Strategy) -> None:
    job = Case(dense, options=hr.Options(on_nonfinite="skip")).job(COUNTS["even"])
    run = hr.launch(partial(poisoned, [1, 3], float("nan")), job, strategy, engine=hr.ThreadEngine())
    assert run.status == "ok"
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
    told = [event for event in run.events if isinstance(event, NonFinite)]
    assert [(event.rank, event.step, event.action) for event in told] == [(1, 1, "skip"), (1, 3, "skip")]
    (served,) = [event for event in run.events if isinstance(event, ServerStats)][-1:]
    shards = len(served.shards)
    assert dict(served.refused) == {"not_finite": 2 * shards}
    losses = {(event.rank, event.step): event.loss for event in run.events if isinstance(event, Stepped)}
    assert [key for key, loss in losses.items() if loss is None] == [(1, 1), (1, 3)]
    assert len(losses) == 2 * 6


def test_a_loss_that_is_none_ends_the_run_with_its_rank_named() -> None:
    job = CASES["mlp"].job(COUNTS["even"])
    with pytest.raises(NonFiniteLoss, match="the loss is nan on rank 1 at step 2"):
        hr.launch(partial(poisoned, [2], float("nan")), job, LOCK_STEP(2), engine=hr.ThreadEngine())


def test_a_gradient_that_is_none_ends_the_run() -> None:
    def loop(worker: hr.Worker) -> None:
        for inputs, target in worker.batches():
            loss = nn.functional.cross_entropy(worker.model(inputs), target)
            if worker.rank == 1 and worker.round == 2:
                # The root of zero has no slope.
                loss = loss + (0 * sum(parameter.sum() for parameter in worker.model.parameters())).sqrt()
            worker.backward(loss)
            worker.update()

    with pytest.raises(NonFiniteGradient, match="at step 2"):
        hr.launch(loop, CASES["mlp"].job(COUNTS["even"]), LOCK_STEP(2), engine=hr.ThreadEngine())


def test_too_many_bad_gradients_in_a_row_end_the_run() -> None:
    job = dataclasses.replace(Case(dense, options=hr.Options(on_nonfinite="skip")).job(COUNTS["even"]), epochs=8)
    with pytest.raises(NonFiniteLoss, match=r"rank 1 .* the 11th bad round in a row"):
        hr.launch(partial(poisoned, list(range(16)), float("nan")), job, LOCK_STEP(2), engine=hr.ThreadEngine())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_nonfinite": "rollback"}, "never at the same round; use 'skip'"),
        ({"batch_norm": "sync"}, "use batch_norm='local', or mirrored"),
    ],
)
def test_options_that_make_workers_meet_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        train(Case(dense, options=hr.Options(**options)).job(COUNTS["even"]), LOCK_STEP(1))


def test_a_loss_scale_of_each_worker_is_refused() -> None:
    with pytest.raises(UsageError, match="use precision='bf16'"):
        refuse(hr.ParameterServer(2).refusals(), hr.Options(precision="fp16"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"staleness_bound": -1}, "staleness_bound must be a whole number of at least 0, got -1"),
        ({"staleness_bound": 1.5}, "staleness_bound must be a whole number of at least 0, got 1.5"),
        ({"backup_workers": -2}, "backup_workers must be a whole number of at least 0, got -2"),
        ({"backup_workers": 1, "staleness_bound": 3}, "give one of them"),
        ({"servers": 0}, "servers must be a whole number of at least 1, got 0"),
        ({"workers": True}, "workers must be a whole number"),
        ({"scale": "half"}, "scale must be 'share' or 'full', got 'half'"),
        ({"sharding": "max_size:little"}, "max_size"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        hr.ParameterServer(**given)


def test_an_unknown_placement_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="did you mean 'greedy'"):
        hr.ParameterServer(placement="greedi")


@pytest.mark.parametrize(
    ("strategy", "cluster", "reason"),
    [
        (hr.ParameterServer(2, servers=2), CLUSTER, "2 servers and only 1 shards"),
        (hr.ParameterServer(2, backup_workers=2), CLUSTER, "2 of 2 workers cannot be backups"),
        (hr.ParameterServer(2), dataclasses.replace(CLUSTER, ranks=2), "2 workers and 1 servers and the launcher st"),
        (hr.ParameterServer(servers=3), dataclasses.replace(CLUSTER, ranks=3), "the launcher started 3 processes"),
        (hr.ParameterServer(2), Cluster((Host("here", 4, 5_599),)), "needs 5,600 bytes of host memory"),
    ],
)
def test_a_cluster_that_cannot_hold_it(strategy: hr.Strategy, cluster: Cluster, reason: str) -> None:
    with pytest.raises(InfeasiblePlan, match=reason):
        strategy.plan(MODEL, cluster)


def test_a_launchers_last_ranks_are_servers() -> None:
    plan = hr.ParameterServer(servers=2, sharding="fixed_shards:2").plan(MODEL, dataclasses.replace(CLUSTER, ranks=5))
    assert [role.kind for role in plan.roles] == ["worker"] * 3 + ["server"] * 2
    assert plan.servers == (3, 4)


def test_optimizers_that_need_whole_matrices_get_them_whole() -> None:
    job = VARIANTS["muon"].job(COUNTS["tiny"])
    with pytest.raises(InfeasiblePlan, match="needs whole ones"):
        train(job, LOCK_STEP(1, sharding="max_size:64B"))
    outcome = train(job, LOCK_STEP(2, servers=2))
    assert_equal(outcome, on_one_device(VARIANTS["muon"], "tiny", torch.float64, None), DOUBLE)


@pytest.mark.slow
def test_many_servers_and_workers_leave_nothing_behind() -> None:
    before = belongings()
    train(CASES["mlp"].job(COUNTS["tiny"]), hr.ParameterServer(4, servers=3, sharding="max_size:64B"))
    with pytest.raises(WorkerFailed, match=r"rank 2 .* planted at"):
        train(CASES["mlp"].job(COUNTS["tiny"], optimizer=BadStep), hr.ParameterServer(2))
    assert left_since(before, within_s=10) == {}
