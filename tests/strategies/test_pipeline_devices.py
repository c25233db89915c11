"""Pipelines whose stages exchange by the devices' own send and receive are one device, and wait for nobody for ever."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.data import Loader
from headrace.errors import UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.staged import StagedModel
from headrace.training.exchange import Replica
from pipeline.rendezvous import Devices, Meeting
from pipeline.shapes import chunks_of
from strategies.contract_models import Case
from strategies.contract_runs import distance, drive, with_replicas
from strategies.test_pipeline import CASES, DEEP, HOW, ROUNDS, in_stages, job, merged, on_one_device


def between(case: Case, stages: int, micro_batches: int, **options: object) -> tuple[dict[str, Tensor], Meeting]:
    """Returns what comes of a pipeline on devices, and what these have exchanged."""
    strategy = partial(hr.Pipeline, stages, micro_batches, **options)  # type: ignore[arg-type]
    meeting = Meeting(stages)
    ranks = drive(job(case), strategy(), stages, 0, ROUNDS, wired=Devices(meeting))
    assert not any(meeting.running), "all that has been sent was received"
    return merged(ranks), meeting


@pytest.mark.each_value
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_is_one_device(schedule: str, micro_batches: int, stages: int) -> None:
    """The model has values that go past stages, and the last batch three examples."""
    chunks = 1 if 3 in chunks_of(schedule) and stages > 3 else 2
    found, meeting = between(DEEP, stages, micro_batches, schedule=schedule, chunks=chunks)
    assert distance(found, on_one_device(DEEP)) <= 1e-9
    assert distance(found, in_stages(DEEP, stages, micro_batches, schedule=schedule, chunks=chunks)) == 0.0
    assert meeting.nbytes > 0


@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_there_is_to_sum_and_to_weigh_is_that_of_one_device(case: str, how: dict[str, object]) -> None:
    found, _ = between(CASES[case], 2, 4, **how)
    assert distance(found, on_one_device(CASES[case])) <= 1e-9


class Masked(nn.Module):
    """How many rows go on depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(torch.tanh(self.second(x[x[:, 0] > 0])))


class Wide(nn.Module):
    """Twelve values cross each cut, more than go in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.second, self.third = nn.Linear(4, 4), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.tanh(layer(x)) for layer in self.first]
        x = self.second(values[0])
        return self.third(torch.cat([value * x for value in values], 1))


class Counting(nn.Module):
    """A buffer that every forward changes crosses a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("steps", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 0.25
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) * self.steps)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return output.square().sum() / 8


def test_what_changes_for_inputs_of_one_form_is_refused_by_name() -> None:
    case = Case(Masked, loss=squared)
    assert distance(in_stages(case, 3, 2), in_stages(case, 2, 2)) == 0.0
    said = (
        r"among the values that stage 0 sends to stage 1, was float64 \[\d, 4\] with a gradient for a micro-batch of "
        r"this form, and is float64 \[\d, 4\] with a gradient now; .* \(partition\), or use device='cpu'"
    )
    with pytest.raises(UsageError, match=said):
        between(case, 2, 2, partition=[1, 2])


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_messages_of_many_tensors_go_in_several_operations(schedule: str) -> None:
    found, meeting = between(Case(Wide), 3, 4, schedule=schedule, chunks=2)
    assert distance(found, on_one_device(Case(Wide))) <= 1e-9
    assert meeting.most == 8


def test_a_buffer_that_changes_while_it_is_on_its_way_arrives_as_it_was() -> None:
    found, _ = between(Case(Counting), 2, 4)
    assert distance(found, in_stages(Case(Counting), 2, 4)) == 0.0


def test_batches_of_other_shapes_are_agreed_on_anew() -> None:
    """The number of the notes that go by the host: none in the second epoch."""
    sent: list[int] = []

    def act(rank: int, replica: Replica, loader: Loader) -> None:
        compute = replica.compute
        assert isinstance(compute, StagedModel)
        (box,) = compute.runner._channels._mailboxes.outboxes.values()
        for share in islice(loader.rounds(), 2 * loader.rounds_per_epoch):
            replica.exchange.begin(0)
            compute.run(share)
            if rank == 0:
                sent.append(box.moved_bytes)

    deep = dataclasses.replace(
        job(Case(Masked, loss=squared)), model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    )
    with_replicas(deep, hr.Pipeline(2, 4), 2, act, wired=Devices(Meeting(2)))
    first, second = sent[:3], sent[3:]
    assert 0 < first[0] == first[1] < first[2]
    assert second == [first[2]] * 3
