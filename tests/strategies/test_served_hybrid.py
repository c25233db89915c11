"""Replicas that several ranks hold, with servers outside: what whole workers do, and each rank its own bytes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, NonFiniteLoss, UsageError
from headrace.machine.background import BackgroundThread
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import ServerStats, Stepped
from headrace.strategies import resolve
from headrace.strategies.refusals import refuse
from strategies.contract_models import ADAM, MODELS, VARIANTS, Case, dense, verb_by_verb
from strategies.contract_options import OPTIONS
from strategies.contract_runs import CLUSTER, GIGABYTE, MODEL, Outcome, carried, distance, train

CASES = {**MODELS, **VARIANTS, **OPTIONS, "adam": Case(dense, optimizer=ADAM)}
LOCK_STEP = partial(hr.ParameterServer, servers=2, staleness_bound=0)
ONE_BY_ONE, IN_PIECES = hr.Pipeline(stages=2, micro_batches=1), hr.Pipeline(stages=2, micro_batches=2)
SLICES = hr.TensorParallel(devices=2)
INNER: dict[str, hr.Strategy] = {"whole": ONE_BY_ONE, "pieces": IN_PIECES, "slices": SLICES}
REGIMES: dict[str, hr.Strategy] = {
    "asynchronous": hr.ParameterServer(2, servers=2),
    "asynchronous on three servers": hr.ParameterServer(2, servers=3, sharding="fixed_shards:2"),
    "bound 1": hr.ParameterServer(2, servers=2, staleness_bound=1),
    "lock-step": LOCK_STEP(2),
    "downpour": hr.Downpour(2, servers=2, push_every=3, fetch_every=2),
    "downpour in turn": hr.Downpour(2, servers=2, push_every=2, fetch_every=1, overlap=False),
    "downpour warms up": hr.Downpour(2, servers=2, push_every=2, fetch_every=1, warmstart_steps=3),
}

every_regime = pytest.mark.parametrize("regime", sorted(REGIMES))


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert distance(one.tensors, other.tensors) <= 1e-9
    assert one.losses == pytest.approx(other.losses, rel=1e-9)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-9)


@pytest.mark.each_value
@pytest.mark.parametrize("inner", sorted(INNER))
@pytest.mark.parametrize("count", [11, 9])
@pytest.mark.parametrize(
    "model", ["mlp", "tied", "idle", "adam", "tokens", "groups-by-name", "nesterov-foreach", "schedule-one-cycle"]
)
def test_lock_step_is_one_device(model: str, count: int, inner: str) -> None:
    job = CASES[model].job(count)
    assert_equal(train(job, hr.Hybrid(LOCK_STEP(2), INNER[inner])), train(job, hr.OneDevice()))


@pytest.mark.parametrize(
    "layout",
    [{"servers": 5, "sharding": "fixed_shards:2"}, {"servers": 3, "sharding": "max_size:64B"}, {"transport": "tcp"}],
)
def test_any_layout_on_servers_is_one_device(layout: dict[str, Any]) -> None:
    job = CASES["mlp"].job(9)
    outer = hr.ParameterServer(2, **{"servers": 2, "staleness_bound": 0, **layout})
    assert_equal(train(job, hr.Hybrid(outer, IN_PIECES)), train(job, hr.OneDevice()))


@pytest.mark.parametrize("inner", ["pieces", "slices"])
@pytest.mark.parametrize("model", ["clipped", "tied-clipped", "tied-clipped-twice", "average"])
def test_replicas_are_workers_that_hold_all(model: str, inner: str) -> None:
    """A norm is that of what one replica pushes, as of what one worker pushes, and counts nothing twice."""
    cases = {
        **CASES,
        "tied-clipped": dataclasses.replace(MODELS["tied"], options=hr.Options(clip_norm=0.05)),
        "average": dataclasses.replace(MODELS["mlp"], options=hr.Options(ema_decay=0.9, clip_value=0.05)),
        "tied-clipped-twice": dataclasses.replace(MODELS["tied"], options=hr.Options(clip_value=0.01, clip_norm=0.02)),
    }
    job = cases[model].job(11)
    outcome = train(job, hr.Hybrid(LOCK_STEP(2), INNER[inner]))
    assert_equal(outcome, train(job, hr.ParameterServer(2, staleness_bound=0)))


@pytest.mark.parametrize("model", ["mlp", "tied"])
def test_a_loop_of_ones_own_on_slices_is_one_device(model: str) -> None:
    case = MODELS[model]
    outcome = train(case.job(11), hr.Hybrid(LOCK_STEP(2), SLICES), loop=partial(verb_by_verb, case.loss))
    assert_equal(outcome, train(case.job(11), hr.OneDevice()))


@pytest.mark.slow
@pytest.mark.parametrize("inner", sorted(INNER))
@pytest.mark.parametrize("model", ["tied", "adam"])
def test_a_replica_that_pours_is_a_worker_that_pours(model: str, inner: str) -> None:
    job, every = CASES[model].job(11), partial(hr.Downpour, 1, overlap=False)
    alone = train(job, hr.Hybrid(every(servers=2, push_every=1, fetch_every=1), INNER[inner]))
    assert_equal(alone, train(job, hr.OneDevice()))
    apart = train(job, hr.Hybrid(every(servers=2, push_every=2, fetch_every=3), INNER[inner]))
    assert_equal(apart, train(job, every(push_every=2, fetch_every=3)))


@pytest.mark.parametrize("inner", ["whole", "slices"])
@pytest.mark.parametrize("outer", [{}, {"push_codec": "int8", "pull_codec": "bf16"}], ids=["plain", "coded"])
def test_running_statistics_and_codecs_are_those_of_workers_that_hold_all(inner: str, outer: dict[str, Any]) -> None:
    """What a codec loses depends on how parameters are cut, which is by layers here."""
    job = dataclasses.replace(MODELS["mlp" if outer else "cnn"], options=hr.Options(batch_norm="local")).job(11)
    one = train(job, hr.Hybrid(LOCK_STEP(2, **outer), INNER[inner]))
    other = train(job, hr.ParameterServer(2, staleness_bound=0, **outer))
    assert distance(one.tensors, other.tensors) <= (0.02 if outer else 1e-9)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1"])
def test_other_schedules(schedule: str) -> None:
    job = Case(deep).job(11)
    inner = hr.Pipeline(stages=2, micro_batches=2, schedule=schedule)
    assert_equal(train(job, hr.Hybrid(LOCK_STEP(2), inner)), train(job, hr.OneDevice()))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "inner"), [("tied", "pieces"), ("adam", "slices")])
def test_processes_are_one_device_and_two_runs_alike(processes: LocalEngine, model: str, inner: str) -> None:
    job = CASES[model].job(11)
    one, again = (train(job, hr.Hybrid(LOCK_STEP(2), INNER[inner]), processes) for _ in range(2))
    assert_equal(one, train(job, hr.OneDevice()))
    assert distance(one.tensors, again.tensors) == 0
    assert one.losses == again.losses


def counted(seen: Counter[int], lock: threading.Lock, example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    with lock:
        seen[int(example[0][0])] += 1
    return example


def delaying(worker: hr.Worker) -> None:
    """The usual loop, but that the second replica takes its time now and then."""
    for batch in worker.batches():
        if worker.rank in (2, 3) and worker.round % 3 == 1:
            time.sleep(0.01)
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()


@every_regime
def test_an_epoch_visits_every_example_once_and_every_shard_has_every_push_once(regime: str) -> None:
    count, epochs, batch = 26, 3, 8
    x = torch.arange(float(count))[:, None].expand(count, 4)
    job = hr.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        task=hr.tasks.multiclass(2),
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        data=hr.data.from_arrays(x, torch.arange(count) % 2).shuffle(),
        eval_data=(x, torch.arange(count) % 2),
        global_batch_size=batch,
        epochs=epochs,
    )
    run = hr.launch(delaying, job, hr.Hybrid(REGIMES[regime], IN_PIECES), engine=hr.ThreadEngine())
    steps = [event for event in run.events if isinstance(event, Stepped) and event.lease >= 0]
    for stage in (0, 1):
        leases = [event.lease for event in steps if event.rank % 2 == stage]
        span = getattr(REGIMES[regime], "push_every", 1)
        rounds = Counter(event.step for event in steps if event.rank % 2 == stage)
        assert set(rounds) == set(range(4 * epochs))
        assert len({(event.lease, event.step) for event in steps if event.rank % 2 == stage}) == len(leases)
        if span == 1:
            assert len(set(leases)) == len(leases) == run.plan.replicas * 4 * epochs
    assert sum(event.examples for event in steps) == count * epochs, "the last stage counts"
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    pushed = len({event.lease for event in steps})
    assert {shard.pushes for served in last.values() for shard in served.shards} == {pushed}
    assert [served.refused for served in last.values()] == [{}] * len(last)


@pytest.mark.each_value
@pytest.mark.parametrize("inner", ["pieces", "slices"])
@every_regime
def test_an_evaluation_is_that_of_the_parameters_that_are_left(regime: str, inner: str) -> None:
    if inner == "slices" and regime == "asynchronous on three servers":
        return
    job = CASES["tied"].job(11)
    run = hr.fit(job, hr.Hybrid(REGIMES[regime], INNER[inner]), engine=hr.ThreadEngine())
    assert job.eval_data is not None
    inputs, target = job.eval_data
    with torch.no_grad():
        loss = float(job.loss(run.model(inputs), target))
    assert run.metrics["loss"] == pytest.approx(loss, rel=1e-12)


def test_a_sync_point_waits_for_the_pushes_of_every_rank_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BackgroundThread.start

    def start_slowly(background: BackgroundThread, task: Callable[[], object]) -> None:
        late = threading.current_thread().name == "rank-3"
        start(background, lambda: (time.sleep(0.1 * late), task()))

    monkeypatch.setattr(BackgroundThread, "start", start_slowly)
    job = CASES["tied"].job(11)
    run = hr.fit(job, hr.Hybrid(REGIMES["downpour"], INNER["slices"]), engine=hr.ThreadEngine())
    assert job.eval_data is not None
    inputs, target = job.eval_data
    with torch.no_grad():
        loss = float(job.loss(run.model(inputs), target))
    assert run.metrics["loss"] == pytest.approx(loss, rel=1e-12)


def test_slices_move_once_and_what_all_hold_once() -> None:
    run = hr.fit(CASES["mlp"].job(8), hr.Hybrid(LOCK_STEP(2), SLICES), engine=hr.ThreadEngine())
    sizes = {name: each.numel() * each.element_size() for name, each in run.model.named_parameters()}
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    pushed = sum(shard.pushed_bytes for served in last.values() for shard in served.shards)
    assert pushed == 2 * run.summary.steps * sum(sizes.values())


def test_each_rank_moves_the_bytes_of_its_own_stage() -> None:
    job, outer = CASES["mlp"].job(8), LOCK_STEP(2)
    run = hr.fit(job, hr.Hybrid(outer, ONE_BY_ONE), engine=hr.ThreadEngine())
    rounds = run.summary.steps
    sizes = {name: each.numel() * each.element_size() for name, each in run.model.named_parameters()}
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    named = [{shard.name for shard in served.shards} for served in last.values()]
    assert named[0] | named[1] == set(sizes)
    assert not named[0] & named[1]
    for served, names in zip(last.values(), named, strict=True):
        own = sum(sizes[name] for name in names)
        assert sum(shard.pushed_bytes for shard in served.shards) == 2 * rounds * own
        # The last push of a replica brings nothing new before it meets the others.
        assert 2 * rounds * own <= sum(shard.pulled_bytes for shard in served.shards) <= 2 * (rounds + 4) * own
        stage = run.plan.role(served.rank).stage
        assert {int(rank) % 2 for rank in served.waited_s} == {stage}


def test_a_loss_that_is_none_ends_the_run_with_the_last_stage_named() -> None:
    def poisoned(worker: hr.Worker) -> None:
        for inputs, target in worker.batches():
            worker.step((torch.full_like(inputs, float("nan")) if worker.rank > 1 else inputs, target))

    with pytest.raises(NonFiniteLoss, match="the loss is nan on rank 3 at step 0"):
        hr.launch(poisoned, CASES["mlp"].job(8), hr.Hybrid(LOCK_STEP(2), ONE_BY_ONE), engine=hr.ThreadEngine())


def test_a_bad_gradient_of_one_stage_is_that_of_the_replica() -> None:
    """All ranks leave it out, or stages would go on from different data."""

    def poisoned(worker: hr.Worker) -> None:
        for inputs, target in worker.batches():
            bad = worker.round == 1 and worker.rank > 1
            worker.step((torch.full_like(inputs, float("nan")) if bad else inputs, target))

    job = Case(dense, options=hr.Options(on_nonfinite="skip")).job(8)
    run = hr.launch(poisoned, job, hr.Hybrid(LOCK_STEP(2), ONE_BY_ONE), engine=hr.ThreadEngine())
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
    last = {event.rank: event for event in run.events if isinstance(event, ServerStats)}
    assert [dict(served.refused) for served in last.values()] == [
        {"not_finite": len(served.shards)} for served in last.values()
    ]


def test_the_plan_says_who_serves_whom() -> None:
    strategy = hr.Hybrid(hr.ParameterServer(2, servers=3, sharding="fixed_shards:2"), hr.Pipeline(2, partition=[1, 2]))
    model = dataclasses.replace(
        MODEL,
        parameters=(*MODEL.parameters, dataclasses.replace(MODEL.parameters[0], name="other")),
        layers=(
            dataclasses.replace(MODEL.layers[0]),
            dataclasses.replace(MODEL.layers[1], parameters=("other",)),
            MODEL.layers[2],
        ),
    )
    plan = strategy.plan(model, CLUSTER)
    assert carried(plan) == plan
    assert [(role.kind, role.data_rank, role.stage) for role in plan.roles] == [
        *[("worker", replica, stage) for replica in (0, 1) for stage in (0, 1)],
        *[("server", -1, 0), ("server", -1, 1), ("server", -1, 0)],
    ]
    assert {(segment.parameter, plan.role(segment.owner).stage) for segment in plan.segments} == {
        ("weight", 0),
        ("other", 1),
    }
    assert (plan.replicas, plan.workers, plan.shares, plan.replaces) == (2, 4, (1, 1), False)
    with pytest.raises(InfeasiblePlan, match=r"2 stages with parameters, each of which has servers .* there are 1;"):
        dataclasses.replace(strategy, outer=hr.ParameterServer(2)).plan(model, CLUSTER)
    launched = Cluster((Host("here", 4, GIGABYTE),), ranks=7)
    counted_out = dataclasses.replace(strategy, outer=dataclasses.replace(strategy.outer, workers=None))
    assert counted_out.plan(model, launched) == dataclasses.replace(plan, options=dataclasses.asdict(counted_out))
    with pytest.raises(InfeasiblePlan, match=r"asks for 4 workers and 3 servers and the launcher started 9"):
        strategy.plan(model, dataclasses.replace(launched, ranks=9))
    with pytest.raises(InfeasiblePlan, match=r"needs [\d,]+ bytes of host memory"):
        strategy.plan(model, Cluster((Host("small", 4, 3_000),)))


def test_servers_for_a_first_stage_that_holds_nothing_are_refused() -> None:
    layers = (MODEL.layers[2], MODEL.layers[0])
    strategy = hr.Hybrid(LOCK_STEP(2), hr.Pipeline(stages=2, partition=[1, 1]))
    with pytest.raises(InfeasiblePlan, match="stage 0 of 2 has no parameter to train, and the data is leased"):
        strategy.plan(dataclasses.replace(MODEL, layers=layers), CLUSTER)


@pytest.mark.parametrize(
    ("outer", "reason"),
    [
        (hr.ParameterServer(2, servers=2, backups=1), "without a rank of a replica it cannot; use backups=0"),
        (hr.ParameterServer(3, servers=1, backup_workers=1), "drops what comes late, .*; use backup_workers=0"),
        (hr.Downpour(2, servers=2, backups=1), "without a rank of a replica it cannot"),
        (hr.ParameterAveraging(2, via="server"), "the ranks of a replica cannot"),
    ],
)
def test_what_replicas_cannot_have_is_refused(outer: hr.Strategy, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        hr.Hybrid(outer, ONE_BY_ONE)


@pytest.mark.parametrize(
    ("outer", "refusal", "reason"),
    [
        (LOCK_STEP(2, sharding="max_size:64B"), UsageError, "checkpoints join whole slices"),
        (hr.ParameterServer(2), InfeasiblePlan, "2 slices with parameters, .* there are 1; use servers=2"),
        (hr.ParameterServer(2, servers=3), InfeasiblePlan, "there are 3; use servers=2"),
    ],
)
def test_slices_have_one_server_each(outer: hr.Strategy, refusal: type[Exception], reason: str) -> None:
    with pytest.raises(refusal, match=reason):
        train(CASES["mlp"].job(8), hr.Hybrid(outer, SLICES))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (hr.Options(on_nonfinite="rollback"), "those of a parameter server are never at the same round"),
        (hr.Options(batch_norm="sync"), "use batch_norm='local'"),
        (hr.Options(precision="fp16"), "use precision='bf16'"),
        (hr.Options(accumulate=2), "give Pipeline"),
    ],
)
def test_options_that_make_replicas_meet_are_refused(options: hr.Options, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        refuse(hr.Hybrid(LOCK_STEP(2), ONE_BY_ONE).refusals(), options)


def test_it_has_a_name_on_the_command_line() -> None:
    text = "hybrid(outer='downpour(workers=2, servers=2)', inner='pipeline(stages=2)')"
    assert resolve(text) == hr.Hybrid(hr.Downpour(2, servers=2), hr.Pipeline(2))
