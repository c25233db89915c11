"""hr.summary(job, strategy): bytes that can be added up by hand, and what cannot be planned."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from api.memory.stacks import LAYERS, PARAMETERS, WIDTH, blocks, job, near, stack
from headrace.api.memory import quantised
from headrace.api.memory.planning import plan_memory
from headrace.cli import run
from headrace.errors import JobError, UsageError
from headrace.prediction.memory.kinds import KINDS, RankMemory
from headrace.report.format import byte_count
from headrace.spec.events import WorkerEnded
from strategies.mixtures import OwnStacked, Routed, read
from training.block_state import BLOCK, Blockwise
from training.odd_optimizers import Written


@pytest.mark.parametrize(("optimizer", "state"), [(torch.optim.Adam, 2), (torch.optim.SGD, 0)])
def test_parameters_and_state_of_one_device(optimizer: Any, state: int) -> None:
    memory = plan_memory(job(optimizer=optimizer), "one_device", choices=False).memory
    assert memory.parameters == PARAMETERS
    assert 0 <= memory.start - PARAMETERS - memory.batch <= 16
    assert near(memory.state, state * PARAMETERS) if state else memory.state == 0
    assert memory.batch == 2 * 64 * WIDTH * 4
    assert memory.exchange == memory.gathered == 0


def test_an_average_of_weights_is_state() -> None:
    plain, averaged = (
        plan_memory(job(**options), "one_device", choices=False).memory for options in ({}, {"ema_decay": 0.9})
    )
    assert averaged.state - plain.state == PARAMETERS


def test_mirrors_share_gradients_and_their_sum() -> None:
    memory = plan_memory(job(), hr.Mirrored(2), choices=False).memory
    assert memory.parameters == PARAMETERS
    # The sum is what the optimizer reads. The gradients of both are mapped with all of their pages, and two slots each.
    assert near(memory.gradients, PARAMETERS)
    assert near(memory.exchange, 2 * PARAMETERS + 2 * 2 * 384 * 1024)


def test_copies_that_are_averaged_and_their_mean() -> None:
    memory = plan_memory(job(), hr.ParameterAveraging(2, period=16), choices=False).memory
    assert near(memory.parameters, PARAMETERS)
    assert near(memory.state, 2 * PARAMETERS)
    # A copy for the others, and theirs; this small, the slots of sums are most of it.
    assert near(memory.exchange, 2 * PARAMETERS + 2 * 2 * 384 * 1024)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.TensorParallel(2), hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2))])
def test_slices_of_layers(strategy: hr.Strategy) -> None:
    memory = plan_memory(job(blocks), strategy, choices=False).memory
    assert 0.5 * PARAMETERS <= memory.parameters <= 0.51 * PARAMETERS
    assert near(memory.state, 2 * memory.parameters)
    # The first rank gathers the model that it writes.
    assert memory.end >= memory.parameters + memory.state + PARAMETERS


def test_one_copy_of_parameters_and_a_part_of_the_state() -> None:
    memory = plan_memory(job(), hr.CentralStorage(2), choices=False).memory
    assert near(memory.state, PARAMETERS)


@pytest.mark.slow
def test_a_sharded_worker_holds_its_part() -> None:
    memory = plan_memory(job(), hr.FullySharded(4, deferred=True), choices=False).memory
    assert near(memory.parameters, PARAMETERS // 4)
    assert near(memory.state, PARAMETERS // 2)
    assert PARAMETERS // LAYERS <= memory.gathered <= PARAMETERS


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [Routed, OwnStacked])
@pytest.mark.parametrize("outer", [hr.Mirrored(1), hr.FullySharded(2)], ids=["whole", "sharded"])
def test_a_worker_holds_its_experts_and_the_rest(outer: hr.Strategy, mixture: Callable[[], nn.Module]) -> None:
    """As many bytes as the workers of a run say that they hold; of a router's choice it is said what is assumed."""
    strategy = hr.Hybrid(outer, hr.ExpertParallel(2))
    plan = plan_memory(read(mixture), strategy, choices=False)
    run = hr.fit(read(mixture), strategy, engine=hr.ThreadEngine(), device="cpu", check=False)
    ended = [event for event in run.events if isinstance(event, WorkerEnded)]
    assert plan.memory.parameters == max(event.parameter_bytes for event in ended)
    assert plan.memory.state == pytest.approx(max(event.optimizer_bytes for event in ended), rel=0.02)
    assert "assumed: a router chooses each expert as often as the others" in str(plan)
    assert "assumed" not in str(plan_memory(job(), "one_device", choices=False))


def test_choices_are_beside_what_was_asked_for() -> None:
    # So many examples that activations take more than what the optimizer's step needs for a moment.
    large = replace(job(), data=(torch.ones(2048, WIDTH), torch.zeros(2048, WIDTH)), global_batch_size=1024)
    plan = hr.summary(large, hr.Mirrored(2))
    assert isinstance(plan, hr.MemoryPlan)
    assert plan.choices["recompute='full'"].activations < plan.memory.activations
    assert plan.choices["hr.FullySharded"].state < plan.memory.state
    lines = str(plan).splitlines()
    assert [len(line) for line in lines if len(line) > 80] == []
    assert [line.split()[0] for line in lines[2:4]] == ["as", "recompute='full'"]


def test_what_cannot_be_had_says_why() -> None:
    plan = hr.summary(job(partial(nn.Linear, WIDTH, WIDTH)), "one_device")
    assert "has none with parameters" in plan.impossible["recompute='full'"]
    assert "recompute='full': recompute='full' runs blocks again" in str(plan)


def test_the_job_and_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(3)
    model = stack()
    values = [each.clone() for each in model.parameters()]
    before = torch.get_rng_state()
    memory = plan_memory(job(model), "one_device", choices=False).memory
    assert memory.parameters == PARAMETERS
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, values, model.parameters()))


def in_rounds(memory: RankMemory) -> list[int]:
    return [*(getattr(memory, kind) for kind in KINDS), memory.host]


def test_what_forward_keeps_on_the_host_is_beside_what_the_device_has() -> None:
    large = job(batch=1024)
    plan = plan_memory(large, "one_device")
    offloaded = plan.choices["recompute='offload'"]
    # Each block's result waits on the host, and one at a time comes back; those of tanh are the next layer's inputs.
    result = 1024 * WIDTH * 4
    assert plan.memory.activations - offloaded.activations >= (LAYERS - 2) * result
    assert LAYERS * result <= offloaded.host <= 2 * (LAYERS + 1) * result
    assert offloaded.parameters == plan.memory.parameters
    assert plan.memory.host == 0
    told = f"recompute='offload', on an accelerator: {byte_count(offloaded.host)} in host memory besides"
    assert told in str(plan).splitlines()
    same = plan_memory(job(batch=1024, recompute="offload"), "one_device")
    assert in_rounds(same.memory) == in_rounds(offloaded)
    assert in_rounds(same.choices["recompute=None"]) == in_rounds(plan.memory)
    assert max(map(len, str(same).splitlines())) <= 80


@pytest.mark.slow
def test_parts_on_the_host_are_beside_what_the_device_has() -> None:
    plan = plan_memory(job(), hr.FullySharded(2))
    offloaded = plan.choices["offload=True"]
    assert (offloaded.parameters, offloaded.gradients, offloaded.state) == (0, 0, 0)
    # Parameters, gradients, and both averages of Adam; of pinned memory a part takes a power of two.
    assert 2 * PARAMETERS <= offloaded.host <= 3 * PARAMETERS
    assert (
        sum(in_rounds(plan.memory)) - sum(in_rounds(offloaded)) + offloaded.host
        >= plan.memory.parameters + plan.memory.state
    )
    # Each device has the whole model before it keeps its part.
    assert offloaded.peak == offloaded.start >= PARAMETERS
    given = hr.FullySharded(2, offload=True)
    same = plan_memory(job(), given)
    assert in_rounds(same.memory) == in_rounds(offloaded)
    assert in_rounds(same.choices["offload=False"]) == in_rounds(plan.memory)
    both = plan_memory(job(), hr.Hybrid(hr.Mirrored(2), given), choices=False).memory
    assert (both.parameters, both.state) == (0, 0)
    assert both.host >= 2 * PARAMETERS


class Looking(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        made = super().forward(values)
        return made[made.sum(1) > 0]


@pytest.mark.parametrize(
    ("given", "strategy", "error", "told"),
    [
        (job(), hr.Hybrid(hr.ParameterServer(2, servers=2), hr.Pipeline(2)), UsageError, "a stage of a pipeline waits"),
        (
            job(),
            hr.Downpour(2, backups=1, transport="tcp"),
            UsageError,
            "transport='tcp' sends a backup what was pushed",
        ),
        (job(optimizer=torch.optim.LBFGS), hr.Sandblaster(2), UsageError, "the servers of sandblaster"),
        (job(compile=True), "one_device", UsageError, "leave compile out"),
        (job(partial(Looking, WIDTH, WIDTH)), "one_device", JobError, "not known without its values"),
        (job(partial(nn.EmbeddingBag, 9, 4, sparse=True)), "one_device", UsageError, "sparse embeddings"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    given: hr.Job, strategy: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        plan_memory(given, strategy)


JOB = """
import torch
from functools import partial
import headrace as hr

def job(width=16):
    data = torch.zeros(8, width)
    return hr.Job(model=partial(torch.nn.Linear, width, 1), loss=lambda output, target: output.sum(), steps=1,
                  optimizer=partial(torch.optim.SGD, lr=0.1), data=(data, data), global_batch_size=4)
"""


def test_the_command_prints_a_table_of_80_columns(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    assert run(["plan", "job.py", "--set", "width=100000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one_device, 1 worker: what the fullest holds at its peak, with 4 examples"
    assert lines[2].split()[:4] == ["as", "it", "is", "400"]
    assert [line for line in lines if len(line) > 80 and "recompute" not in line] == []


def test_state_in_blocks_is_what_the_blocks_take() -> None:
    planned = plan_memory(job(optimizer=Blockwise), "one_device", choices=False).memory
    # A byte for each element, and a scale of 4 bytes for each block.
    assert near(planned.state, PARAMETERS // 4 * (1 + 4 // BLOCK))


def test_state_in_8_bits_is_a_choice_where_torchao_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan_memory(job(), hr.Mirrored(2))
    monkeypatch.setattr(quantised, "absent", lambda *_: [])
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(optim=SimpleNamespace(Adam8bit=Blockwise)))
    chosen = plan_memory(job(), hr.Mirrored(2)).choices["state in 8 bits"]
    assert near(plain.memory.state, 2 * PARAMETERS)
    assert near(chosen.state, PARAMETERS // 2)
    sharded = plan_memory(job(), hr.FullySharded(2)).impossible
    assert "needs whole parameters" in sharded["state in 8 bits"]
    assert "state in 8 bits" not in plan_memory(job(optimizer=torch.optim.SGD), "one_device").choices
    assert quantised.in_8_bits(partial(torch.optim.Adam, foreach=False)) is None


def test_an_optimizer_of_ones_own_is_tried_with_values() -> None:
    assert near(
        plan_memory(job(optimizer=Written), hr.FullySharded(2), choices=False).memory.parameters, PARAMETERS // 2
    )


def test_the_choice_that_needs_least_is_said() -> None:
    plan = plan_memory(job(), hr.Mirrored(2))
    least = min(plan.choices.values(), key=lambda each: each.peak)
    assert f"needs least: {byte_count(plan.peak - least.peak)} less" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 80
