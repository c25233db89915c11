"""Scripts on several ranks: right to 1e-9 against the script alone, or one error that says what differs."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from api.plain_script.plain_runs import alike, epoch, loader_of, on_ranks, said, sgd, trained
from headrace.api.plain_script.gradients import Synchronizer
from headrace.api.plain_script.meeting import Meeting
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import PeerLost, UsageError


def plain(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for _ in range(3):
        epoch(model, optimizer, batches)


def unfreezing(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    model[0].requires_grad_(False)
    epoch(model, optimizer, batches)
    model[0].requires_grad_(True)
    epoch(model, optimizer, batches)
    model[2].requires_grad_(False)
    epoch(model, optimizer, batches)


def adding(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    epoch(model, optimizer, batches)
    layer = nn.Linear(1, 1).double()
    nn.init.constant_(layer.weight, 0.5)
    nn.init.zeros_(layer.bias)
    model.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
    epoch(model, optimizer, batches)


def several_passes(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for _ in range(2):
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=False)
            outputs = model(inputs)
            functional.mse_loss(outputs, targets).backward(retain_graph=True)
            (outputs.abs().mean() / 3).backward()
            functional.l1_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def accumulating(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for _ in range(2):
        for place, (inputs, targets) in enumerate(batches):
            functional.mse_loss(model(inputs), targets).backward()
            if place % 2:
                optimizer.step()
                optimizer.zero_grad()


def penalty(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for inputs, _targets in batches:
        optimizer.zero_grad()
        inputs = inputs.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (slope.square().sum(1) - 1).square().mean().backward()
        optimizer.step()


def closures(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for inputs, targets in batches:

        def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)


def rooted(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    """Assigns gradients that follow from those of backward alone."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign() * parameter.grad.abs().sqrt()
        optimizer.step()


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("script", [plain, unfreezing, adding, several_passes, accumulating, penalty, closures, rooted])
def test_as_the_script_alone(script: Any, central: bool) -> None:
    alike(script, central=central)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=1, max_iter=5, line_search_fn="strong_wolfe")


def test_lbfgs_sees_the_loss_of_the_whole_batch() -> None:
    alike(closures, optimizer_of=lbfgs, loader=lambda: loader_of(22))


def test_one_copy_is_not_for_lbfgs() -> None:
    results = on_ranks(lambda meeting: trained(closures, meeting, optimizer_of=lbfgs, central=True))
    assert "LBFGS needs all parameters at once" in said(results)


def sums(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for _ in range(2):
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=False)
            functional.mse_loss(model(inputs), targets, reduction="sum").backward()
            (functional.l1_loss(model(inputs), targets, reduction="sum") / 3).backward()
            torch.autograd.grad(model(inputs).sum(), model[0].weight)
            optimizer.step()


def test_sums_are_added() -> None:
    alike(sums, reduction="sum", optimizer_of=lambda model: torch.optim.SGD(model.parameters(), 0.01))


def test_running_statistics_are_one_and_are_weighted_by_examples() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().requires_grad_(True)

    first = build()

    def copy() -> nn.Module:
        model = build()
        model.load_state_dict(first.state_dict())
        return model

    seen: dict[int, tuple[int, Any]] = {}

    def once(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
        inputs, targets = next(iter(batches))
        functional.mse_loss(model(inputs), targets).backward()
        seen[meeting.rank] = (len(inputs), model[0](inputs).mean(0).detach())

    results = on_ranks(lambda meeting: trained(once, meeting, build=copy, loader=lambda: loader_of(5)))
    count = sum(number for number, _ in seen.values())
    mean = sum(number * value for number, value in seen.values()) / count
    for result in results:
        assert not isinstance(result, Exception), result
        *_, running_mean, _, batches = result
        assert torch.allclose(running_mean, 0.1 * mean, atol=1e-12)
        assert batches == 1
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_statistics_that_are_made_anew_are_one() -> None:
    """As torch.optim.swa_utils.update_bn does, without a backward pass."""

    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def statistics(model: Any, _: object, batches: Any, __: object) -> None:
        for inputs, _targets in batches:
            with torch.no_grad():
                model(inputs)

    def act(meeting: Meeting) -> Any:
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        return trained(statistics, meeting, build=lambda: model, loader=lambda: loader_of(11))

    first, second = on_ranks(act)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[-1] == 2
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def one_ulp(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
    epoch(model, optimizer, islice(batches, 1))
    if meeting.rank == 1:
        weight = model[2].weight.data
        weight[0, 3] = torch.nextafter(weight[0, 3], 2 * weight[0, 3])
    epoch(model, optimizer, batches)


def other_rate(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
    epoch(model, optimizer, batches)
    optimizer.param_groups[0]["lr"] /= 1 + meeting.rank
    epoch(model, optimizer, batches)


def frozen_on_one(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
    epoch(model, optimizer, batches)
    model[0].weight.requires_grad_(meeting.rank == 0)
    epoch(model, optimizer, batches)


def hooking(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    epoch(model, optimizer, batches)


def skipping(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
    for place, (inputs, targets) in enumerate(batches):
        if (meeting.rank, place) != (1, 1):
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def stepping_twice(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
    for inputs, targets in batches:
        functional.mse_loss(model(inputs), targets).backward()
        for _ in range(1 + meeting.rank):
            optimizer.step()


def gradients_of_its_own(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for inputs, targets in batches:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(functional.mse_loss(model(inputs), targets), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def steps_by_hand(model: Any, _optimizer: Any, batches: Any, _: object) -> None:
    for inputs, targets in batches:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(functional.mse_loss(model(inputs), targets), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= 0.1 * gradient


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (one_ulp, "2.weight has other values on rank 1 than on rank 0, after 1 backward passes and 1 steps"),
        (other_rate, "lr of parameter group 0 of SGD is 0.05 on rank 1 and 0.1 on rank 0, after 4 backward passes"),
        (frozen_on_one, "0.weight is frozen, float64 [6, 4] on rank 1 and trained, float64 [6, 4] on rank 0"),
        (hooking, "a hook was registered on 0.weight after hr.setup"),
        (skipping, "rank 1 is at loss.backward() (after 1 backward passes and 1 steps, batch 2 of iteration 0)"),
        (stepping_twice, "rank 1 is at loss.backward() (after 1 backward passes and 2 steps, batch 1 of iteration 0)"),
        (gradients_of_its_own, "the gradient of 0.weight is another one on rank 1 than on rank 0 in step 0"),
        (steps_by_hand, "0.weight has other values on rank 1 than on rank 0, after 0 backward passes and 0 steps"),
    ],
)
def test_ranks_that_differ_are_told_where(script: Any, message: str) -> None:
    results = on_ranks(lambda meeting: trained(script, meeting))
    # A thread that raises ends the others' waits.
    assert {type(result) for result in results} <= {UsageError, PeerLost}, results
    assert message in said(results)


def choosing(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    """Trains on hard examples alone, of which the shares have unequal numbers."""
    for inputs, targets in batches:
        chosen = targets[:, 0] > -0.3
        optimizer.zero_grad()
        functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()


def halving(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    """Gives the model its examples in two parts, and sequences with the batch in another place."""
    for inputs, targets in batches:
        middle = len(inputs) // 2
        outputs = torch.cat([model(inputs[:middle]), model(inputs[middle:])])
        optimizer.zero_grad()
        functional.mse_loss(outputs, targets).backward()
        optimizer.step()


def test_unequal_parts_of_shares_are_refused() -> None:
    alike(halving)
    message = said(on_ranks(lambda meeting: trained(choosing, meeting)))
    assert "examples of the shares of ranks 0, 1 and so on, and gradients are weighted by all" in message
    assert not any(
        isinstance(result, Exception)
        for result in on_ranks(lambda meeting: trained(choosing, meeting, reduction="mean"))
    )


def clamping(model: Any, optimizer: Any, batches: Any, _: object) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.mul_(0.9)


def saving_on_one(model: Any, optimizer: Any, batches: Any, meeting: Any) -> None:
    epoch(model, optimizer, batches)
    if meeting.rank == 0:
        optimizer.state_dict()
    epoch(model, optimizer, batches)


def loading_others(model: Any, _: object, __: object, meeting: Any) -> None:
    model.load_state_dict({name: each + meeting.rank for name, each in model.state_dict().items()})


def later_optimizer(model: Any, _: object, batches: Any, __: object) -> None:
    epoch(model, sgd(model), batches)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (clamping, "0.weight has changed since hr.setup, or since the last optimizer.step()"),
        (steps_by_hand, "0.weight has changed since hr.setup, or since the last optimizer.step()"),
        (later_optimizer, "SGD steps over parameters of which there is one copy"),
        (skipping, "rank 1 is at "),
        (saving_on_one, "rank 0 at optimizer.state_dict(), which every process calls under central_storage"),
        (loading_others, "0.weight that model.load_state_dict() gets is another one on rank 1 than on rank 0"),
    ],
)
def test_what_every_process_would_do_to_the_one_copy_is_refused(script: Any, message: str) -> None:
    assert message in said(on_ranks(lambda meeting: trained(script, meeting, central=True)))


class Signs(torch.optim.Optimizer):
    """One of the user's own, with an argument that it keeps as an attribute."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, {})
        self.rate = rate

    def scale(self) -> float:
        return self.rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=self.scale())


class Normed(Signs):
    """Steps by what is together a fixed length."""

    def scale(self) -> float:
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        return self.rate / float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def test_optimizers_of_users_over_the_one_copy() -> None:
    alike(plain, optimizer_of=lambda model: Signs(model.parameters(), 0.01), central=True)
    alike(plain, optimizer_of=lambda model: Normed(model.parameters(), 0.01))
    results = on_ranks(
        lambda meeting: trained(
            plain, meeting, optimizer_of=lambda model: Normed(model.parameters(), 0.01), central=True
        )
    )
    assert "Normed updates a parameter by what it sees of others" in said(results)


class Refused(torch.autograd.Function):
    """Fails in backward, where `.grad` of what comes after it is there already."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


def test_a_backward_that_has_failed_is_followed_by_one_that_synchronizes() -> None:
    model = nn.Linear(2, 1)
    meeting = Meeting(ThreadCollective(ThreadGroup(1), 0))
    Synchronizer(model, meeting, 0)
    with pytest.raises(ValueError, match="planted"):
        model(Refused.apply(torch.ones(3, 2, requires_grad=True))).sum().backward()
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
    assert meeting.passes == 2


def test_a_lost_process_is_named() -> None:
    def act(meeting: Meeting) -> None:
        if meeting.rank == 1:
            raise ValueError("planted")
        trained(plain, meeting)

    first, second = on_ranks(act)
    assert isinstance(first, PeerLost)
    assert isinstance(second, ValueError)
    assert first.rank == 1
