"""What a script saves, loads and copies: states of models and optimizers, and whole models."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from api.plain_script.plain_runs import alike, epoch, network
from headrace.api.plain_script.checks import check_parts
from headrace.api.plain_script.gradients import Synchronizer
from headrace.api.plain_script.losses.forwards import FirstForward
from headrace.api.plain_script.losses.loss import LossWatch
from headrace.api.plain_script.meeting import Meeting
from headrace.collectives.threads import ThreadCollective, ThreadGroup


def resuming(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    """Saves, goes on, and loads what it has saved, as a script that stops does."""
    epoch(model, optimizer, batches)
    # In files.
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    epoch(model, optimizer, batches)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    epoch(model, optimizer, batches)


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_script_that_saves_and_loads(central: bool, kind: Any) -> None:
    alike(resuming, central=central, optimizer_of=lambda model: kind(model.parameters(), 0.01))


def test_a_model_can_be_copied_and_saved_as_a_whole() -> None:
    model, meeting = network(), Meeting(ThreadCollective(ThreadGroup(1), 0))
    Synchronizer(model, meeting, 0)
    FirstForward(model, meeting)
    LossWatch(meeting).begin(model, False)
    inputs = torch.ones(2, 4, dtype=torch.float64)
    outputs = model(inputs)
    content = io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    for other in (copy.deepcopy(model), torch.load(content, weights_only=False)):
        assert torch.equal(other(inputs), outputs)
        other(inputs).mean().backward()
        assert meeting.passes == 0


def test_a_model_that_has_been_trained_may_be_set_up_again() -> None:
    def twice(model: Any, optimizer: Any, batches: Any, _: object) -> None:
        epoch(model, optimizer, batches)
        check_parts(model, optimizer)
        epoch(model, optimizer, batches)

    alike(twice)
