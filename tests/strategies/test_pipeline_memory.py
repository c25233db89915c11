"""What the stages of a pipeline keep, count and make again."""

from __future__ import annotations

import copy
import dataclasses
import threading
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.data import Loader, as_pipeline
from headrace.pipeline.buffers import SavedBuffers
from headrace.pipeline.staged import StagedModel
from headrace.training.exchange import Replica
from strategies.contract_models import Case, images
from strategies.contract_runs import distance, drive, step, with_replicas
from strategies.saved_bytes import SavedBytes
from strategies.test_pipeline import DEEP, job, merged

WIDTH, EXAMPLES = 64, 64


def wide() -> nn.Module:
    return nn.Sequential(
        *[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())], nn.Linear(WIDTH, 3)
    )


def vectors(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randint(0, 3, (count,))


def wide_job() -> hr.Job:
    return dataclasses.replace(Case(wide, vectors).job(EXAMPLES), global_batch_size=EXAMPLES)


def counted(strategy: hr.Pipeline, stages: int) -> list[tuple[StagedModel, SavedBytes]]:
    """Returns what each stage has computed with, and the bytes that it has kept, after one step."""

    def act(_: int, replica: Replica, loader: Loader) -> tuple[StagedModel, SavedBytes]:
        compute = replica.compute
        assert isinstance(compute, StagedModel)
        saved = SavedBytes(compute.runner, compute.module)
        for share in islice(loader.rounds(), 1):
            step(replica, share, 0)
        return compute, saved

    return with_replicas(wide_job(), strategy, stages, act)


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", (8, 8, 8)), ("1f1b", (3, 2, 1)), ("zb_h1", (3, 2, 1))])
def test_in_flight_are_all_micro_batches_or_as_many_as_there_are_stages(schedule: str, most: tuple[int, ...]) -> None:
    ranks = [compute for compute, _ in counted(hr.Pipeline(3, 8, schedule), 3)]
    assert tuple(rank.in_flight for rank in ranks) == most
    # Each of two cuts is crossed by a matrix forward, and one backward, written by one stage and read by another.
    crossing = 2 * EXAMPLES * WIDTH * torch.float64.itemsize
    moved = [rank.moved_bytes / crossing for rank in ranks]
    assert moved == pytest.approx([1, 2, 1], rel=0.2)


@pytest.mark.parametrize(("recompute", "schedule"), [("always", "gpipe"), ("except_last", "gpipe"), ("always", "1f1b")])
def test_who_makes_activations_again_keeps_inputs_and_those_of_one_micro_batch(recompute: str, schedule: str) -> None:
    usual = counted(hr.Pipeline(2, 8, schedule), 2)
    again = counted(hr.Pipeline(2, 8, schedule, recompute), 2)
    inputs = EXAMPLES * WIDTH * torch.float64.itemsize
    for (_, saved), (_, less) in zip(usual, again, strict=True):
        assert less.peak <= 1.15 * (inputs + saved.largest)
        # Else it would keep as much for nothing.
        assert less.peak < 0.8 * saved.peak or schedule == "1f1b"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_what_is_made_again_is_the_same_to_the_last_bit(schedule: str) -> None:
    usual, *others = (
        merged(drive(job(DEEP), hr.Pipeline(3, 4, schedule, recompute), 3, 0, 3))
        for recompute in ("never", "except_last", "always")
    )
    assert [distance(other, usual) for other in others] == [0.0, 0.0]


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 3)
    )


@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_dropout_that_is_made_again_drops_the_same(recompute: str) -> None:
    """On one stage, because the threads of a process draw from one generator."""

    def ran(way: str, seed: int = 5) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return merged(drive(job(Case(dropping)), hr.Pipeline(1, 4, "gpipe", way), 1, 0, 3))

    assert distance(ran(recompute), ran("never")) == 0.0
    assert distance(ran("never", 6), ran("never")) > 1e-3


class Moving(nn.Module):
    """Its forward moves buffers that it computes with: one in place, one by another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.linspace(1, 2, 16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
            self.seen = self.seen + 1
        return x * self.scale.clone() * self.table + self.seen


def moving() -> nn.Module:
    old, new = nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm
    first = nn.Linear(4, 16), Moving(), nn.Tanh(), old(nn.Linear(16, 16)), nn.BatchNorm1d(16)
    return nn.Sequential(*first, new(nn.Linear(16, 16)), Moving(), nn.Linear(16, 3))


def peaks(schedule: str) -> list[int]:
    return [saved.peak for _, saved in counted(hr.Pipeline(3, 8, schedule, partition=[4, 4, 5]), 3)]


def test_split_backward_passes_hold_what_their_weight_passes_need_and_no_activations() -> None:
    """Rank r of 3 holds those of 3 - r micro-batches at most, and inputs and gradients for r + 1 weight passes."""
    matrix = EXAMPLES // 8 * WIDTH * torch.float64.itemsize
    # Of a micro-batch the first two stages save their input and what two layers return, the last one a little more than
    # that; their weight passes need two inputs and two gradients, those of the last stage three inputs, and two.
    usual, split = ([bytes_ / matrix for bytes_ in peaks(schedule)] for schedule in ("1f1b", "zb_h1"))
    assert usual == pytest.approx([3 * 3, 2 * 3, 3], rel=0.06)
    assert split == pytest.approx([2 * 3 + 4, 3 + 2 * 4, 3 * 5], rel=0.06)


@pytest.mark.one
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_what_is_made_again_starts_from_the_buffers_as_they_were(schedule: str, deferred: bool) -> None:
    usual, *others = (
        merged(drive(job(Case(moving)), hr.Pipeline(2, 4, schedule, way, deferred_batch_norm=deferred), 2, 0, 2))
        for way in ("never", "except_last", "always")
    )
    assert usual["1.seen"] == usual["6.seen"] > 3
    assert [distance(other, usual) for other in others] == [0.0, 0.0]


def test_of_buffers_only_those_are_kept_that_move() -> None:
    module = nn.Sequential(Moving(), Moving())
    buffers = SavedBuffers(module, [name for name, _ in module.named_buffers()])
    was = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with buffers.watched() as kept:
        module[0](torch.full((3, 16), 2.0))
    assert [(each.owner, each.name) for each in kept] == [(module[0], "scale"), (module[0], "seen")]
    moved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with buffers.as_before(kept):
        assert all(torch.equal(buffer, was[name]) for name, buffer in module.named_buffers())
        module[0](torch.full((3, 16), 2.0))
        assert all(torch.equal(buffer, moved[name]) for name, buffer in module.named_buffers())
    assert all(torch.equal(buffer, moved[name]) for name, buffer in module.named_buffers())


class Following(nn.Module):
    """A copy of its weight follows that, in place, and is computed with."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        slow = torch.zeros(2, 2, dtype=torch.float64)
        if frozen:
            self.slow = nn.Parameter(slow, requires_grad=False)
        else:
            self.register_buffer("slow", slow)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.lerp_(self.layer.weight, 0.5)
        out: Tensor = self.layer(x) @ self.slow
        return out


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_pass_gets_what_its_forward_has_computed_with(frozen: bool) -> None:
    torch.manual_seed(0)
    module, batches = Following(frozen), torch.randn(2, 3, 2, dtype=torch.float64)
    alone = copy.deepcopy(module)
    buffers, slow = SavedBuffers(module, ["slow"]), module.slow
    outputs = []
    for batch in batches:
        with buffers.left_to_backward():
            outputs.append(module(batch))
    for output in outputs:
        output.sum().backward()
    buffers.settle()
    for batch in batches:
        alone(batch).sum().backward()
    assert module.slow is slow
    assert torch.equal(module.slow, alone.slow)
    torch.testing.assert_close(module.layer.weight.grad, alone.layer.weight.grad)


def normalised() -> nn.Module:
    first = (nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    return nn.Sequential(*first, nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2, momentum=None), nn.Flatten(), nn.Linear(8, 3))


def by_pieces(count: int, pieces: int, rounds: int, deferred: bool) -> dict[str, Tensor]:
    """Trains as a pipeline does whose running averages follow once a batch, or by each piece; in plain PyTorch."""
    wanted = job(Case(normalised, images))
    module: Any = copy.deepcopy(wanted.model)
    optimizer = wanted.optimizer(list(module.named_parameters()))
    layers = [layer for layer in module if isinstance(layer, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, inputs: seen[layer].append(inputs[0].detach()))
    loader = Loader(as_pipeline(wanted.data)[0], wanted.seed, count, (1,), 0)
    for share in islice(loader.rounds(), rounds):
        optimizer.zero_grad()
        inputs, target = share.batch
        before = [(layer.running_mean.clone(), layer.running_var.clone()) for layer in layers]
        tracked = [int(layer.num_batches_tracked) for layer in layers]
        for x, y in zip(inputs.tensor_split(pieces), target.tensor_split(pieces), strict=True):
            if len(x):
                (nn.functional.cross_entropy(module(x), y) * len(x) / len(inputs)).backward()
        if deferred:
            for layer, (mean, variance), count_ in zip(layers, before, tracked, strict=True):
                whole = torch.cat(seen[layer]).transpose(0, 1).flatten(1)
                factor = 1 / (count_ + 1) if layer.momentum is None else layer.momentum
                layer.running_mean.copy_(mean.lerp(whole.mean(1), factor))
                layer.running_var.copy_(variance.lerp(whole.var(1), factor))
                layer.num_batches_tracked.fill_(count_ + 1)
        for each in seen.values():
            each.clear()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("deferred", [True, False])
def test_running_averages_follow_once_a_batch_or_by_each_micro_batch(deferred: bool, recompute: str) -> None:
    strategy = hr.Pipeline(2, 4, recompute=recompute, deferred_batch_norm=deferred)
    ours = merged(drive(job(Case(normalised, images)), strategy, 2, 0, 3))
    assert distance(ours, by_pieces(8, 4, 3, deferred)) <= 1e-9


def test_half_precision_is_that_of_one_device_in_pieces() -> None:
    case = dataclasses.replace(DEEP, options=hr.Options(precision="bf16"))
    wanted = dataclasses.replace(case.job(19, torch.float32), global_batch_size=8)
    pieces = dataclasses.replace(wanted, options=hr.Options(precision="bf16", accumulate=4))
    (reference,) = drive(pieces, hr.OneDevice(), 1, 0, 2)
    for recompute in ("never", "always"):
        ours = merged(drive(wanted, hr.Pipeline(3, 4, "1f1b", recompute), 3, 0, 2))
        assert distance(ours, reference.tensors) <= 1e-2


def test_predictions_come_from_the_last_stage_alone() -> None:
    wanted, both = job(DEEP), threading.Barrier(2)
    inputs, _ = wanted.data

    def act(_: int, replica: Replica, loader: Loader) -> tuple[bool, Any]:
        replica.compute.module.eval()
        output = replica.compute.predict((inputs, None))
        # Who sends keeps the memory until all has been received.
        both.wait()
        return replica.compute.counts, output

    (first, nothing), (last, output) = with_replicas(wanted, hr.Pipeline(2, 4), 2, act)
    assert (first, nothing, last) == (False, None, True)
    model: Any = wanted.model
    assert torch.equal(output, model.eval()(inputs))
