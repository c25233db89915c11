"""Fully sharded training beyond the contract: units, what is held and when, refusals, lost workers."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace import errors
from headrace.checkpoint import CheckpointFolder
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, PeerLost, UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Notice, WorkerEnded
from headrace.spec.model import ModelSpec, ParameterSpec
from late import Late
from strategies.contract_models import Case, Partial, asking, vectors
from strategies.contract_runs import distance, drive, train

fsdp, dtensor = Late("torch.distributed.fsdp"), Late("torch.distributed.tensor")
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Blocks(nn.Module):
    """A tied embedding and head around blocks, of which one is called twice."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.embedding(text)
        for block in (*self.blocks, self.blocks[1]):
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden))
        return self.head(self.norm(hidden)).transpose(1, 2)


class Experts(nn.Module):
    """Which experts run depends on the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        rare = asking(x)
        output = self.experts[0](x)
        return output + rare[:, None] * self.experts[1](x) if rare.any() else output


class Scaled(nn.Module):
    """Has a parameter without rows, which every worker has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.body(x)


def texts(count: int) -> tuple[Tensor, Tensor]:
    characters = torch.randint(0, 7, (count, 6))
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()


LAYERS = Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), optimizer=ADAM)


@pytest.mark.parametrize(
    ("workers", "reshard", "recompute"), [(2, True, False), (2, False, False), (2, True, True), (1, True, False)]
)
def test_blocks_are_one_device(workers: int, reshard: bool, recompute: bool) -> None:
    job = Case(functools.partial(Blocks, recompute), texts, optimizer=ADAM).job(11)
    strategy = hr.FullySharded(workers, reshard_after_forward=reshard)
    assert distance(train(job, strategy).tensors, train(job, hr.OneDevice()).tensors) <= 1e-9


@pytest.mark.parametrize(
    ("units", "said"),
    [
        ("auto", "3 units and the rest of the model; the largest is 'blocks.0'"),
        (["blocks.*"], "3 units and the rest of the model; the largest is 'blocks.0'"),
        (["blocks.[02]"], "2 units and the rest of the model; the largest is 'the rest'"),
        ([], "the whole model as one unit; the largest is 'the rest'"),
    ],
    ids=str,
)
def test_units_are_found_or_named(units: str | list[str], said: str, tmp_path: Path) -> None:
    job = Case(Blocks, texts).job(8)
    run = hr.fit(job, hr.FullySharded(2, units), device="cpu", run_dir=tmp_path, engine=hr.ThreadEngine())
    notices = [event.text for event in run.events if isinstance(event, Notice)]
    assert [text.startswith(f"sharded over 2 workers: {said}") for text in notices if "sharded" in text] == [True]
    assert distance(run.model.state_dict(), train(job, hr.OneDevice()).tensors) <= 1e-9


def test_an_older_torch_is_refused_with_the_version_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it ranks that use different parts of a unit would sum tensors of different parameters.
    monkeypatch.delattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    with pytest.raises(errors.UnfitMachine, match=r"torch 2\..*some ranks use a part.*'torch>=2.13', or use mirrored"):
        hr.fit(Case(Blocks, texts).job(8), hr.FullySharded(2), device="cpu", engine=hr.ThreadEngine())


def test_each_worker_holds_its_part_and_gathers_a_unit_while_it_runs() -> None:
    held: dict[int, list[int]] = {}
    gathered: dict[int, list[bool]] = {}

    def look(worker: hr.Worker) -> None:
        first, second = worker.model.get_submodule("0"), worker.model.get_submodule("2")
        seen = gathered.setdefault(worker.rank, [])
        first.register_forward_hook(lambda *_: seen.append(isinstance(second.weight, dtensor.DTensor)))
        second.register_forward_hook(lambda *_: seen.append(isinstance(first.weight, dtensor.DTensor)))
        for batch in worker.batches():
            worker.step(batch)
            held[worker.rank] = [each.to_local().numel() for each in worker.model.parameters()]  # type: ignore[attr-defined]

    train(LAYERS.job(8), hr.FullySharded(3), loop=look)
    # 8 rows are 3 + 3 + 2, and 3 rows one each.
    assert held == {0: [12, 3, 8, 1], 1: [12, 3, 8, 1], 2: [8, 2, 8, 1]}
    assert all(all(seen) for seen in gathered.values())


def test_a_unit_that_only_some_examples_need_is_named() -> None:
    job = Case(Experts, vectors).job(11)
    with pytest.raises(UsageError, match=r"'experts\.1' .* put what only some examples need into a larger unit"):
        train(job, hr.FullySharded(2))
    assert distance(train(job, hr.FullySharded(2, [])).tensors, train(job, hr.OneDevice()).tensors) <= 1e-9


class Clamped(nn.Module):
    """Writes to a parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_forward_that_writes_to_a_parameter_is_refused(workers: int) -> None:
    with pytest.raises(UsageError, match=r"forward changed the parameter 'head\.weight', .* or use hr\.Mirrored"):
        train(Case(Clamped, vectors).job(8), hr.FullySharded(workers))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(5, 5).float(), nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x.float()).double() + self.wide(x.double())


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (Blocks, hr.FullySharded(2, ["block.*"]), r"'block\.\*' of units matches no module of the model; there are "),
        (Blocks, hr.FullySharded(2, ["blocks.0.1"]), r"matches only 'blocks\.0\.1', without parameters"),
        (Blocks, hr.FullySharded(2, ["blocks"]), r"'blocks' is a ModuleList, which is never called.*'blocks\.\*'"),
        (Blocks, hr.FullySharded(2, ["head"]), r"'embedding\.weight' belongs to the rest .* and to the unit 'head'"),
        (Mixed, hr.FullySharded(2), "the rest of the model has trained parameters of float32 and float64"),
    ],
    ids=["nothing", "without parameters", "list", "tied", "types"],
)  # fmt: skip
def test_units_that_cannot_be_are_refused(model: Callable[[], nn.Module], strategy: hr.Strategy, words: str) -> None:
    data = torch.randint(0, 7, (8, 5)), torch.randint(0, 7, (8, 5))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    job = hr.Job(model=model, loss=loss, optimizer=ADAM, data=data, global_batch_size=4, epochs=1)
    with pytest.raises(UsageError, match=words):
        train(job, strategy)


def test_options_that_cannot_be_meant_are_refused() -> None:
    for wrong in ("blocks.*", [""], [3]):
        with pytest.raises(UsageError, match="units is 'auto', or a list"):
            hr.FullySharded(2, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reshard_after_forward must be True, False or None, got 2"):
        hr.FullySharded(reshard_after_forward=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="use compile=False"):
        train(Case(Partial, options=hr.Options(compile=True)).job(8), hr.FullySharded(2))
    for outer in (hr.ParameterAveraging(2, period=2), hr.ParameterServer(2)):
        with pytest.raises(UsageError, match=r"divides sum their gradients .* outer strategy must be hr\.Mirrored"):
            hr.Hybrid(outer, hr.FullySharded(2))
    with pytest.raises(UsageError, match=r"codec='int8' is for gradients of whole parameters, .* use codec='plain'"):
        hr.Hybrid(hr.Mirrored(2, codec="int8"), hr.FullySharded(2))
    with pytest.raises(UsageError, match=r"give each once, in the order hr\.Mirrored"):
        hr.Hybrid(hr.FullySharded(2), hr.FullySharded(2))
    gpus = Cluster((Host("gpu", 4, 1 << 30, ("cuda:0", "cuda:1")),), device="cuda")
    plan = hr.Hybrid(hr.Mirrored(1), hr.FullySharded(2)).plan(ModelSpec(()), gpus)
    assert [role.device for role in plan.roles] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            9_000,
            r"needs 12,000 bytes .* 3,000 too few: .* as many workers on each of 2 such hosts or more, 8 processes$",
        ),
        (
            13_000,
            r"needs 16,000 bytes .* of 4 workers builds the whole model, 4,000 bytes, .*; 3 workers a host would do",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would_do(memory: int, words: str) -> None:
    model = ModelSpec((ParameterSpec("weight", (100, 10)),))
    with pytest.raises(InfeasiblePlan, match=words):
        hr.FullySharded(4).plan(model, Cluster((Host("here", 4, memory),)))


def test_what_is_not_trained_takes_memory_on_a_worker() -> None:
    model = ModelSpec((ParameterSpec("base", (900, 10), trainable=False), ParameterSpec("adapter", (100, 10))))
    # Of 36,000 bytes and four times 4,000, each has a quarter.
    host = Host("gpu", 4, 1 << 30, tuple(f"cuda:{index}" for index in range(4)), device_memory_bytes=12_000)
    with pytest.raises(InfeasiblePlan, match=r"needs 13,000 bytes on each device, .* 52,000 bytes .*; 5 workers would"):
        hr.FullySharded(4).plan(dataclasses.replace(model, copies=4), Cluster((host,), device="cuda"))


def test_a_model_that_no_host_can_build_is_refused() -> None:
    model = ModelSpec((ParameterSpec("weight", (100, 10)),))
    hosts = tuple(Host(f"h{rank}", 4, 3_500, ranks=(rank,)) for rank in range(4))
    with pytest.raises(
        InfeasiblePlan, match=r"needs 4,000 bytes .* h0 has 3,500 left, 500 too few: each worker builds"
    ):
        hr.FullySharded().plan(model, Cluster(hosts, ranks=4))


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (2_000, r"needs 6,000 bytes on each device, .* have 2,000, 4,000 too few: .* 12,000 bytes .*; 6 workers would"),
        (
            3_500,
            r"needs 4,000 bytes on each device, .* have 3,500: each holds the whole model before it keeps its part",
        ),
    ],
)
def test_a_model_that_does_not_fit_on_devices_is_refused(memory: int, words: str) -> None:
    model = ModelSpec((ParameterSpec("weight", (100, 10)),))
    workers = 2 if memory < 3_000 else 4
    names = tuple(f"cuda:{index}" for index in range(workers))
    host = Host("gpu", 4, 1 << 30, names, device_memory_bytes=memory)
    with pytest.raises(InfeasiblePlan, match=words):
        hr.FullySharded(workers).plan(model, Cluster((host,), device="cuda"))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("model", [Blocks, sequential, Scaled])
def test_units_go_by_the_collectives_of_devices(model: Callable[[], nn.Module]) -> None:
    job = Case(model, texts if model is Blocks else vectors, optimizer=ADAM).job(11)
    ranks, one = drive(job, hr.FullySharded(3), 3, 0, 9, wired=True), drive(job, hr.OneDevice(), 1, 0, 9)
    names, seen = dict(job.model.named_parameters()).keys(), Counter[str]()  # type: ignore[union-attr]
    for rank in ranks:
        # Each rank has other parameters whole, to be saved. Of a tied parameter the second name has this rank's part.
        whole = {name: tensor for name, tensor in rank.tensors.items() if not isinstance(tensor, dtensor.DTensor)}
        seen.update(whole.keys() & names)
        assert distance(whole, {name: one[0].tensors[name] for name in whole}) <= 1e-9
    # `drive` lets every rank lead; one without rows is not divided.
    assert seen == Counter({name: 3 if name == "scale" else 1 for name in names})


def test_replicas_that_are_divided_are_refused_where_their_state_does_not_fit() -> None:
    model = ModelSpec((ParameterSpec("weight", (100, 10)),))
    two_by_two = hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2))
    with pytest.raises(
        InfeasiblePlan, match=r"hybrid needs 24,000 bytes .* 24,000 bytes in all; .* 8 processes in 2 replicas"
    ):
        two_by_two.plan(model, Cluster((Host("here", 4, 20_000),)))
    plan = two_by_two.plan(model, Cluster((Host("here", 4, 30_000),)))
    assert [(each.start, each.stop, each.owner) for each in plan.segments] == [(0, 500, 0), (500, 1_000, 1)]
    assert plan.shares == (1, 1, 1, 1)


@pytest.mark.slow
def test_replicas_that_are_divided_save_each_part_once_and_resume_bit_for_bit(tmp_path: Path) -> None:
    job, strategy = LAYERS.job(11), hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2))
    halfway = dataclasses.replace(job, epochs=None, steps=3)
    run = {"device": "cpu", "engine": hr.ThreadEngine()}
    hr.fit(halfway, strategy, run_dir=tmp_path / "a", **run)  # type: ignore[arg-type]
    checkpoint = CheckpointFolder(tmp_path / "a" / "checkpoints").open(3)
    saved = [{name for name in checkpoint.read(rank) if name.startswith(("state/", "parameter/"))} for rank in range(4)]
    assert all(saved[:2])
    assert not any(saved[2:])
    resumed = hr.fit(job, strategy, run_dir=tmp_path / "a", resume=True, **run)  # type: ignore[arg-type]
    whole = hr.fit(job, strategy, **run)  # type: ignore[arg-type]
    assert distance(resumed.model.state_dict(), whole.model.state_dict()) == 0.0


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


def lose_rank_1(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == 1 and worker.round == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


@pytest.mark.slow
def test_a_killed_worker_is_named_and_the_run_resumes_bit_for_bit(processes: Engine, tmp_path: Path) -> None:
    job = LAYERS.job(11)
    strategy = hr.FullySharded(2)
    each = hr.Checkpoints(every_steps=2)
    killed = {"device": "cpu", "run_dir": tmp_path / "killed", "engine": processes, "checkpoints": each}
    with pytest.raises(PeerLost, match="rank 1"):
        hr.launch(lose_rank_1, job, strategy, **killed)  # type: ignore[arg-type]
    resumed = hr.fit(job, strategy, resume=True, **killed)  # type: ignore[arg-type]
    whole = hr.fit(job, strategy, device="cpu", run_dir=tmp_path / "whole", engine=processes)
    assert distance(resumed.model.state_dict(), whole.model.state_dict()) == 0.0
    # 67 parameters in float64: half of them each, but for the odd row.
    ended = [event for event in whole.events if isinstance(event, WorkerEnded)]
    assert {event.rank: event.parameter_bytes for event in ended} == {0: 8 * 38, 1: 8 * 29}
    assert distance(resumed.model.state_dict(), train(job, hr.OneDevice()).tensors) <= 1e-9
