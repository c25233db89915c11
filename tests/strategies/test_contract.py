"""What every strategy promises. A new strategy adds its line to `ROWS`, and every test below is its own."""

from __future__ import annotations

import dataclasses
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path

import pytest
import torch

import headrace as hr
from belongings import belongings, left_since
from headrace.data import Loader, as_pipeline
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UsageError, WorkerFailed
from headrace.spec.cluster import Cluster, Host
from headrace.spec.plan import EVERY_WORKER
from headrace.strategies import STRATEGIES
from headrace.testing.strategies import CHECKS, DOUBLE, ROUNDS
from headrace.testing.strategies import StrategyContract as Row
from strategies import references
from strategies.contract_kinds import (
    AGGREGATED,
    GOSSIPS,
    HYBRIDS,
    IN_PROCESSES,
    LOCAL,
    MATRICES,
    PIPELINE,
    SANDBLASTER,
    STATISTICS,
    TPU,
)
from strategies.contract_models import (
    ADAM,
    BATCH,
    COUNTS,
    MIXTURE,
    MODELS,
    SEQUENCES,
    SGD,
    VARIANTS,
    Case,
    asking,
    explode_in_the_second_round,
    verb_by_verb,
)
from strategies.contract_runs import CLUSTER, GIGABYTE, MODEL, Outcome, by_hand, carried, distance, train

ROWS = {
    "ad_psgd": Row(partial(hr.ADPSGD, meet_every=3), many=(1, 1), leaves_out=frozenset({"options"})),
    "aggregated": Row(partial(hr.Aggregated, by="plain"), references.one_model),
    "central_storage": Row(hr.CentralStorage),
    "context_parallel": Row(hr.ContextParallel, many=(2, 4), replicas=lambda workers: 1, whole=False, model=SEQUENCES),
    # One worker that waits: the order of several ones' pushes is that of the machine.
    "downpour": Row(
        partial(hr.Downpour, fetch_every=2, push_every=2, overlap=False),
        partial(references.downpour, meet=ROUNDS),
        many=(1, 1),
        servers=1,
        leaves_out=frozenset({"partly-used", "statistics"}),
    ),
    "expert_parallel": Row(hr.ExpertParallel, workers=(2,), many=(2, 4), whole=False, model=MIXTURE, refuses=MATRICES),
    "fully_sharded": Row(hr.FullySharded, workers=(2,), refuses=MATRICES),
    "gossip": Row(hr.Gossip, references.gossip),
    "hogwild": Row(partial(hr.Hogwild, meet_every=3), many=(1, 1), leaves_out=frozenset({"options"})),
    "hybrid": Row(
        lambda workers: hr.Hybrid(hr.Mirrored(workers=max(1, workers // 2)), hr.TensorParallel(devices=2)),
        workers=(4,),
        many=(4, 4),
        replicas=lambda workers: workers // 2,
        refuses=MATRICES,
    ),
    "mirrored": Row(hr.Mirrored),
    "one_device": Row(lambda workers: hr.OneDevice(), workers=(1,), many=(1, 1)),
    "parameter_averaging": Row(partial(hr.ParameterAveraging, period=3), references.local_sgd, period=3),
    "parameter_server": Row(partial(hr.ParameterServer, staleness_bound=0), servers=1, leaves_out=STATISTICS),
    "pipeline": PIPELINE,
    "sandblaster": SANDBLASTER,
    "tensor_parallel": Row(hr.TensorParallel, workers=(2,), many=(2, 3), replicas=lambda workers: 1, refuses=MATRICES),
    "tpu": TPU,
    "unconnected": Row(hr.Unconnected, references.unconnected),
}

KINDS = {
    **ROWS,
    **LOCAL,
    **HYBRIDS,
    **AGGREGATED,
    **GOSSIPS,
    "diloco": Row(partial(hr.DiLoCo, period=3), references.diloco, period=3),
    "easgd": Row(partial(hr.EASGD, period=3), references.easgd, period=3, leaves_out=STATISTICS),
    "parameter_server-asynchronous": Row(hr.ParameterServer, many=(1, 1), servers=1, leaves_out=STATISTICS),
}
"""Strategies with other numbers have other references."""

SINGLE = {"sgd": 1e-5, "adam": 1e-4}
"""How far N workers may be from one device in single precision; see `contract_runs.distance`."""


def of(strategies: Iterator[str] | list[str]) -> pytest.MarkDecorator:
    """Runs a test for each strategy and each number of workers."""
    cases = [(name, workers) for name in strategies for workers in ROWS[name].workers]
    return pytest.mark.parametrize(("name", "workers"), cases, ids=[f"{name}-{n}" for name, n in cases])


EVERY = sorted(STRATEGIES)
# Of one that does so with some options alone, the class has a property.
SYNCHRONOUS = [name for name in EVERY if STRATEGIES[name].equals_one_device is True and ROWS[name].whole]
every_strategy, every_synchronous_strategy = of(EVERY), of(SYNCHRONOUS)
every_size = pytest.mark.parametrize("size", sorted(COUNTS))
every_model = pytest.mark.parametrize("model", sorted(MODELS))


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


@cache
def on_one_device(case: Case, size: str, dtype: torch.dtype, optimizer: Callable[..., object] | None) -> Outcome:
    return train(case.job(COUNTS[size], dtype, optimizer), hr.OneDevice())


def assert_equal(outcome: Outcome, reference: Outcome, tolerance: float) -> None:
    assert distance(outcome.tensors, reference.tensors) <= tolerance
    assert outcome.losses == pytest.approx(reference.losses, rel=tolerance, abs=tolerance)
    assert outcome.metrics == pytest.approx(reference.metrics, rel=tolerance, abs=tolerance)


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.metrics == other.metrics
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def assert_same_through_servers(one: Outcome, other: Outcome, job: hr.Job) -> None:
    """Servers update by Adam in one pass, which rounds otherwise than torch's default."""
    assert isinstance(job.model, torch.nn.Module)
    if type(job.optimizer(list(job.model.named_parameters()))) in (torch.optim.Adam, torch.optim.AdamW):
        assert_equal(one, other, DOUBLE)
    else:
        assert_same_bits(one, other)


def test_every_strategy_has_its_row() -> None:
    assert sorted(ROWS) == EVERY
    assert [name for name in EVERY if type(ROWS[name].make(1)) is not STRATEGIES[name]] == []


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("larger", [False, True], ids=["fewer", "more"])
@pytest.mark.parametrize("check", sorted(CHECKS))
def test_every_kind_keeps_its_row(kind: str, larger: bool, check: str, tmp_path: Path) -> None:
    if check not in KINDS[kind].leaves_out:
        CHECKS[check](KINDS[kind], KINDS[kind].many[larger], tmp_path)


def test_a_reference_is_at_most_40_lines() -> None:
    lengths = {
        name: len(inspect.getsource(each).splitlines())
        for name, each in vars(references).items()
        if inspect.isfunction(each) and each.__module__ == references.__name__
    }
    assert {name: length for name, length in lengths.items() if length > 40} == {}
    # One worker of those without an order is one device.
    needed = [name for name in EVERY if ROWS[name].many != (1, 1) and not ROWS[name].make(2).equals_one_device]
    assert [name for name in needed if ROWS[name].reference is references.one_device] == []


@pytest.mark.each_value
@every_size
@pytest.mark.parametrize("model", sorted({**MODELS, **VARIANTS}))
def test_one_device_is_a_loop_of_plain_pytorch_bit_for_bit(model: str, size: str) -> None:
    case = {**MODELS, **VARIANTS}[model]
    outcome, reference = on_one_device(case, size, torch.float64, None), by_hand(case.job(COUNTS[size]))
    assert_same_bits(dataclasses.replace(outcome, metrics={}), reference)
    assert any(
        not torch.equal(tensor, outcome.tensors[name]) for name, tensor in case.job(8).model.state_dict().items()
    )


@pytest.mark.each_value
@every_synchronous_strategy
@every_model
@every_size
def test_any_number_of_workers_is_one_device(name: str, workers: int, model: str, size: str) -> None:
    case = MODELS[model]
    strategy, job = ROWS[name].make(workers), case.job(COUNTS[size])
    outcome = train(job, strategy)
    assert_equal(outcome, on_one_device(case, size, torch.float64, None), DOUBLE)
    assert_same_bits(outcome, train(job, strategy))


@pytest.mark.each_value
@every_synchronous_strategy
@every_model
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_any_number_of_workers_is_one_device_in_single_precision(
    name: str, workers: int, model: str, optimizer: str
) -> None:
    case, factory = MODELS[model], {"sgd": SGD, "adam": ADAM}[optimizer]
    outcome = train(case.job(COUNTS["tiny"], torch.float32, factory), ROWS[name].make(workers))
    assert_equal(outcome, on_one_device(case, "tiny", torch.float32, factory), SINGLE[optimizer])


@pytest.mark.each_value
@every_synchronous_strategy
@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("size", ["uneven", "tiny"])
def test_clipping_weights_and_optimizers_are_those_of_one_device(
    name: str, workers: int, variant: str, size: str
) -> None:
    case = VARIANTS[variant]
    if variant in ROWS[name].refuses:
        with pytest.raises(UsageError, match="needs whole parameters"):
            train(case.job(COUNTS[size]), ROWS[name].make(workers))
        return
    outcome = train(case.job(COUNTS[size]), ROWS[name].make(workers))
    assert_equal(outcome, on_one_device(case, size, torch.float64, None), DOUBLE)


@pytest.mark.each_value
@every_synchronous_strategy
@pytest.mark.parametrize("model", ["mlp", "cnn", "partial", "mean-cnn", "mean-clipped"])
def test_a_loop_of_ones_own_is_one_device_too(name: str, workers: int, model: str) -> None:
    case = {**MODELS, **VARIANTS}[model]
    outcome = train(case.job(COUNTS["tiny"]), ROWS[name].make(workers), loop=partial(verb_by_verb, case.loss))
    assert_equal(outcome, on_one_device(case, "tiny", torch.float64, None), DOUBLE)


USUAL = {(model, SYNCHRONOUS[turn % len(SYNCHRONOUS)]) for turn, model in enumerate(IN_PROCESSES)}


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=[pytest.mark.full] * (name != "mirrored" and (model, name) not in USUAL))
        for model in IN_PROCESSES
        for name in SYNCHRONOUS
    ],
)
def test_processes_are_one_device(processes: Engine, name: str, model: str) -> None:
    if model in ROWS[name].refuses:
        return
    case, (size, workers) = {**MODELS, **VARIANTS}[model], IN_PROCESSES[model]
    outcome = train(case.job(COUNTS[size]), ROWS[name].make(min(workers, max(ROWS[name].workers))), processes)
    assert_equal(outcome, on_one_device(case, size, torch.float64, None), DOUBLE)


def test_the_cases_are_as_difficult_as_they_say() -> None:
    """A clip that never bites, or a share that always asks, would prove nothing."""
    uneven, tiny = MODELS["partial"].job(COUNTS["uneven"]), MODELS["partial"].job(COUNTS["tiny"])
    loaders = [Loader(as_pipeline(uneven.data)[0], uneven.seed, BATCH, (1, 1), rank) for rank in (0, 1)]
    asked = [[bool(asking(s.batch[0]).any()) for s in islice(loader.rounds(), 9)] for loader in loaders]
    assert {(True, False), (False, True), (False, False)} <= set(zip(*asked, strict=True))
    assert next(Loader(as_pipeline(tiny.data)[0], tiny.seed, BATCH, (1, 1), 1).rounds(2)).examples == 0
    text = VARIANTS["tokens"].job(COUNTS["tiny"])
    shares = islice(Loader(as_pipeline(text.data)[0], text.seed, BATCH, (1, 1, 1), 2).rounds(), 9)
    assert any(share.examples and (share.batch[1] < 0).all() for share in shares)
    for variant in ("clipped", "clipped-cnn", "clipped-partial", "mean-clipped"):
        case = VARIANTS[variant]
        free = dataclasses.replace(case, options=dataclasses.replace(case.options, clip_norm=None))
        clipped, unclipped = by_hand(case.job(11)).tensors, by_hand(free.job(11)).tensors
        assert distance(clipped, unclipped) > 1e-3, variant


@every_strategy
def test_a_plan_survives_json(name: str, workers: int) -> None:
    strategy = ROWS[name].make(workers)
    plan = strategy.plan(MODEL, CLUSTER)
    assert carried(plan) == plan
    assert (plan.strategy, plan.workers) == (name, workers)
    assert plan.replicas == len(plan.shares) == ROWS[name].replicas(workers)
    assert list(plan.servers) == list(range(workers, workers + ROWS[name].servers))
    assert dict(plan.options) == dataclasses.asdict(strategy)


@every_strategy
def test_a_plan_gives_every_element_one_owner(name: str, workers: int) -> None:
    plan = ROWS[name].make(workers).plan(MODEL, CLUSTER)
    owned = sorted((segment.start, segment.stop) for segment in plan.segments)
    assert {segment.parameter for segment in plan.segments} == {"weight"}
    assert [start for start, _ in owned] == [0, *[stop for _, stop in owned[:-1]]]
    assert owned[-1][1] == 200
    assert {segment.owner for segment in plan.segments} <= {EVERY_WORKER, *(plan.servers or range(workers))}


def refusal(name: str, workers: int, cluster: Cluster) -> str:
    with pytest.raises(InfeasiblePlan) as refused:
        ROWS[name].make(workers).plan(MODEL, cluster)
    return str(refused.value)


@every_strategy
def test_a_host_without_memory_is_refused(name: str, workers: int) -> None:
    message = refusal(name, workers, Cluster((Host("small", 4, 1_599),)))
    needed = re.search(r"needs ([\d,]+) bytes", message)
    assert needed
    # A copy of the parameters and one of the gradients, of 200 floats each, is the least that there is.
    assert int(needed[1].replace(",", "")) >= 1_600
    assert "small has 1,599 left" in message


@every_strategy
def test_a_launcher_with_another_number_of_processes_is_refused(name: str, workers: int) -> None:
    ranks = workers + ROWS[name].servers + 1
    message = refusal(name, workers, Cluster((Host("here", 4, GIGABYTE),), ranks=ranks))
    assert f"{workers} workers" in message
    assert f"started {ranks} processes" in message


@every_strategy
def test_fewer_accelerators_than_workers_are_refused(name: str, workers: int) -> None:
    there = tuple(f"cuda:{index}" for index in range(workers - 1))
    message = refusal(name, workers, Cluster((Host("gpus", 4, GIGABYTE, there),), device="cuda"))
    assert f"{workers} workers on cuda" in message
    assert f"gpus has {workers - 1}" in message


@every_strategy
def test_two_hosts_are_refused(name: str, workers: int) -> None:
    message = refusal(name, workers, Cluster((Host("left", 4, GIGABYTE), Host("right", 4, GIGABYTE))))
    assert "has 2: left, right" in message


def fail(name: str, workers: int, folder: Path, engine: Engine) -> WorkerFailed:
    job = ROWS[name].takes(MODELS["mlp"].job(8))
    with pytest.raises(WorkerFailed) as failed:
        hr.launch(
            explode_in_the_second_round, job, ROWS[name].make(workers), device="cpu", run_dir=folder, engine=engine
        )
    return failed.value


def assert_tells(error: WorkerFailed, workers: int) -> None:
    assert error.rank == workers - 1
    assert f"rank {workers - 1}" in str(error)
    assert "Bang: something is wrong with this batch" in str(error)
    told = error.traceback or "".join(traceback.format_exception(error))
    assert "in explode_in_the_second_round" in told


@every_strategy
def test_an_error_in_a_thread_reaches_the_caller(name: str, workers: int, tmp_path: Path) -> None:
    assert_tells(fail(name, workers, tmp_path, hr.ThreadEngine()), workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=[pytest.mark.full] * (workers < max(ROWS[name].workers)))
        for name in EVERY
        for workers in ROWS[name].workers
    ],
)
def test_an_error_in_a_process_reaches_the_caller(
    name: str, workers: int, tmp_path: Path, processes: LocalEngine
) -> None:
    assert_tells(fail(name, workers, tmp_path, processes), workers)


def which(name: str) -> str:
    """Returns the model that gives a strategy the most to do; BatchNorm is global under the synchronous ones alone."""
    # A program of tpu has no room for layers that talk, and tokens no BatchNorm.
    return "cnn" if STRATEGIES[name].equals_one_device is True and name not in ("tpu", "context_parallel") else "mlp"


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_threads_leave_nothing_behind(name: str, tmp_path: Path) -> None:
    workers = max(ROWS[name].workers)
    before = belongings()
    train(ROWS[name].takes(MODELS[which(name)].job(COUNTS["tiny"])), ROWS[name].make(workers))
    fail(name, workers, tmp_path, hr.ThreadEngine())
    assert left_since(before) == {}


@pytest.mark.slow
# Under tpu they are those of mirrored, and trace a program each, which takes seconds.
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.full] * (each == "tpu")) for each in EVERY])
def test_processes_leave_nothing_behind(name: str, tmp_path: Path) -> None:
    workers = max(ROWS[name].workers)
    before = belongings()
    with LocalEngine() as engine:
        train(ROWS[name].takes(MODELS[which(name)].job(COUNTS["tiny"])), ROWS[name].make(workers), engine)
        fail(name, workers, tmp_path, engine)
    assert left_since(before) == {}
