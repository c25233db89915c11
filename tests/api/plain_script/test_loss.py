"""Losses that are sums over examples are told apart from means, by their graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from api.plain_script.plain_runs import on_ranks
from headrace.api.plain_script.given.deliveries import Delivery
from headrace.api.plain_script.losses.forwards import FirstForward
from headrace.api.plain_script.losses.loss import LossWatch, mean_check
from headrace.api.plain_script.meeting import BACKWARD, Meeting
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import UsageError
from headrace.training.user_code.loss_graph import (
    LastOutput,
    ShareFactors,
    findings_of,
    made_of,
    require_mean,
    require_sum,
)

EXAMPLES, BATCH = 4, 8
MODEL = nn.Linear(5, 3)
Loss = Callable[[Tensor, Tensor], Tensor]

SUMS: dict[str, Loss] = {
    "sum": lambda outputs, _: outputs.square().sum(),
    "by name": lambda outputs, targets: functional.mse_loss(outputs, targets, reduction="sum"),
    "over the batch's size": lambda outputs, targets: functional.mse_loss(outputs, targets, reduction="sum") / BATCH,
    "of several": lambda outputs, targets: (
        functional.l1_loss(outputs, targets)
        + functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
    ),
    "cross entropy": lambda outputs, targets: functional.cross_entropy(outputs, targets.argmax(1), reduction="sum"),
    "halved": lambda outputs, _: -0.5 * (1 + outputs - outputs.exp()).sum(),
    "of sums": lambda outputs, _: outputs.square().sum(1).sum(),
    "log probability": lambda outputs, _: -torch.distributions.Normal(outputs, 1.0).log_prob(torch.zeros(())).sum() * 2,
}
MEANS: dict[str, Loss] = {
    "mean": lambda outputs, targets: functional.mse_loss(outputs, targets),
    "by hand": lambda outputs, _: outputs.square().sum() / len(outputs),
    "over all": lambda outputs, _: outputs.square().sum() / outputs.numel(),
    "of sums": lambda outputs, _: outputs.square().sum(1).mean(),
    "batch mean": lambda outputs, targets: functional.kl_div(outputs, targets.softmax(1), reduction="batchmean"),
    "with a penalty": lambda outputs, _: (
        outputs.square().mean()
        + MODEL.weight.abs().sum()
        + 0.1 * sum(each.square().sum() for each in MODEL.parameters())
    ),
    "of stacked losses": lambda outputs, _: torch.stack([outputs.square().mean()] * EXAMPLES).sum(),
    "scaled": lambda outputs, targets: functional.cross_entropy(outputs, targets.argmax(1)) * 65536 / 2,
    "smoothed": lambda outputs, targets: functional.cross_entropy(outputs, targets.argmax(1), label_smoothing=0.1),
    "distilled": lambda outputs, targets: (
        functional.kl_div(outputs, targets.softmax(1), reduction="batchmean") * (0.5 * 2.0**2)
    ),
}


def meeting() -> Meeting:
    return Meeting(ThreadCollective(ThreadGroup(1), 0))


def loss_of(loss: Loss) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 5, generator=drawn)
    # Random numbers in forward make no difference.
    outputs = functional.dropout(MODEL(inputs), 0.1)
    return loss(outputs, torch.rand(EXAMPLES, 3, generator=drawn))


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_is_refused_with_the_remedy(kind: str) -> None:
    with pytest.raises(UsageError, match=r"the loss is a sum .*reduction='sum'"):
        require_mean(mean_check(meeting()), loss_of(SUMS[kind]), EXAMPLES, BATCH)


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_is_not(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    require_mean(mean_check(meeting()), loss_of(MEANS[kind]), EXAMPLES, BATCH)
    assert capfd.readouterr().err == ""


def test_a_sum_over_another_number_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        same = meeting()
        require_mean(mean_check(same), loss_of(lambda outputs, _: outputs.square().sum() / 37), EXAMPLES, BATCH)
        require_mean(mean_check(same), loss_of(lambda outputs, _: outputs.square().sum() / 37), EXAMPLES, BATCH)
    assert capfd.readouterr().err.count("the loss is a sum (SumBackward0 over [4, 3]) divided by 37") == 2


COUPLED: dict[str, tuple[Loss, str]] = {
    "root": (lambda outputs, targets: functional.mse_loss(outputs, targets).sqrt(), "depends on other examples"),
    "root of cross entropy": (
        lambda outputs, targets: functional.cross_entropy(outputs, targets.argmax(1)).sqrt(),
        "depends on other examples",
    ),
    "compared": (
        lambda outputs, _: functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))),
        "depends on other examples",
    ),
    "chosen": (
        lambda outputs, targets: functional.mse_loss(outputs[1:], targets[1:]),
        "some examples of a share have no gradient",
    ),
    "hardest": (
        lambda outputs, _: outputs.square().sum(1).topk(2).values.mean(),
        "some examples of a share have no gradient",
    ),
    "ignored": (
        lambda outputs, targets: functional.cross_entropy(
            outputs, targets.argmax(1).index_fill(0, torch.tensor(2), -100)
        ),
        "some examples of a share have no gradient",
    ),
    "of some numbers": (
        lambda outputs, targets: functional.mse_loss(outputs.flatten()[:7], targets.flatten()[:7]),
        "the loss is a mean over some numbers of a share alone (MseLossBackward0",
    ),
    "padded": (
        lambda outputs, targets: functional.cross_entropy(
            outputs[..., None].repeat(1, 1, 2), torch.tensor([[0, -100], [1, 1], [2, 0], [1, -100]])
        ),
        "the loss is a mean over some numbers of a share alone (NllLoss2DBackward0",
    ),
    "adapted": (
        lambda outputs, _: (
            torch.autograd.grad(outputs.square().mean(), MODEL.weight, create_graph=True)[0].square().mean()
        ),
        "torch.autograd.grad gives gradients of the parameters that are of each process's share alone",
    ),
    "weighted": (
        lambda outputs, targets: functional.cross_entropy(outputs, targets.argmax(1), torch.arange(1.0, 4)),
        "cross_entropy with class weights",
    ),
}


def watched(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.autograd, "grad", torch.autograd.grad)
    same = meeting()
    same.deliveries.add(Delivery(EXAMPLES, BATCH, ()), 0, 0, 0)
    LossWatch(same).begin(MODEL, False)
    drawn = torch.Generator().manual_seed(0)
    targets = torch.rand(EXAMPLES, 3, generator=drawn)
    for _ in range(6):
        loss(MODEL(torch.randn(EXAMPLES, 5, generator=drawn)), targets).backward()
    assert not MODEL._forward_hooks


@pytest.mark.parametrize("kind", COUPLED)
def test_a_loss_that_is_no_mean_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loss, message = COUPLED[kind]
    watched(loss, monkeypatch)
    assert capfd.readouterr().err.count(message) == 1


@pytest.mark.parametrize("kind", MEANS)
def test_of_a_mean_nothing_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watched(MEANS[kind], monkeypatch)
    assert capfd.readouterr().err == ""


def test_of_one_example_a_sum_and_a_mean_are_told_apart() -> None:
    outputs = MODEL(torch.ones(1, 5))
    require_mean(mean_check(meeting()), outputs.square().sum() / len(outputs), 1, 2)
    with pytest.raises(UsageError, match="the loss is a sum"):
        require_mean(mean_check(meeting()), outputs.square().sum(), 1, 2)


def test_the_first_passes_of_each_model_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    watched = meeting()
    watched.deliveries.add(Delivery(2, 4, ()), 0, 0, 0)
    watch = LossWatch(watched)
    for _ in range(2):
        watch.begin(MODEL, False)
        watch.begin(nn.Linear(1, 1), False)
        with pytest.raises(UsageError, match="the loss is a sum"):
            MODEL(torch.ones(2, 5)).sum().backward()
        for _ in range(20):
            MODEL(torch.ones(2, 5)).square().mean().backward()
        assert torch.autograd.grad is plain


def test_losses_that_processes_make_otherwise_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    def meet(meeting: Meeting) -> None:
        examples = (3, 2)[meeting.rank]
        for factor in (2.0, 1 / examples, 1.0, (1.0, 0.1)[meeting.rank]):
            assert not meeting.rank or capfd.readouterr().err == ""
            meeting.made.append(made_of(MODEL(torch.ones(examples, 5)).square().mean() * factor))
            meeting.meet(BACKWARD, examples=examples)

    assert on_ranks(meet) == [None, None]
    assert "on rank 0 of MulBackward0 [1.0]" in (said := capfd.readouterr().err)
    assert "on rank 1 of MulBackward0 [0.1" in said


FACTORS: dict[str, tuple[Loss, bool]] = {
    "times": (lambda outputs, _: outputs.square().mean() * len(outputs), True),
    "part of a batch": (lambda outputs, _: functional.mse_loss(outputs, _) * (len(outputs) / BATCH) / 3, True),
    "over": (lambda outputs, _: outputs.square().mean() / len(outputs) + outputs.sum() / len(outputs), True),
    "constant": (lambda outputs, _: outputs.square().mean() / EXAMPLES, False),
    "of a sum": (lambda outputs, _: outputs.square().sum() / len(outputs) / 3, False),
}


@pytest.mark.parametrize(("loss", "told"), FACTORS.values(), ids=FACTORS)
def test_a_mean_with_a_factor_by_the_number_of_examples_is_told(loss: Loss, told: bool) -> None:
    factors = ShareFactors()
    targets, sizes = torch.zeros(EXAMPLES, 3), (EXAMPLES, EXAMPLES, 3, 2)
    lines = [factors.look(loss(MODEL(torch.ones(size, 5)), targets[:size]), size) for size in sizes]
    assert [bool(line) for line in lines] == [False, False, told, False]


def test_a_tensor_whose_backward_adds_its_elements_is_a_sum() -> None:
    outputs = MODEL(torch.ones(EXAMPLES, 5))
    require_mean(mean_check(meeting()), outputs, EXAMPLES, BATCH, torch.full_like(outputs, 1 / EXAMPLES))
    with pytest.raises(UsageError, match="the loss is a sum"):
        require_mean(mean_check(meeting()), outputs, EXAMPLES, BATCH, torch.ones_like(outputs))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (SUMS["by name"], ""),
        (SUMS["halved"], ""),
        (lambda outputs, _: outputs.square().mean() * EXAMPLES, ""),
        (MEANS["mean"], "the loss is a mean (MseLossBackward0 over 12 numbers)"),
        (MEANS["of sums"], "the loss is a mean (MeanBackward0 over 4 numbers)"),
        (lambda outputs, _: outputs.sum() + MODEL.weight.norm(), "a term of the loss is made of parameters alone"),
        (lambda outputs, _: checkpoint(torch.exp, outputs, use_reentrant=True).sum(), "use use_reentrant=False"),
    ],
)
def test_what_is_no_sum_is_refused_where_shares_are_added(loss: Loss, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) if message else nullcontext():
        require_sum(loss_of(loss), EXAMPLES)


class Centered(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, values: Tensor) -> Tensor:
        self.seen += len(values)
        return values


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Tanh(), ""),
        (nn.Dropout(), ""),
        (nn.BatchNorm1d(3), ""),
        (nn.LayerNorm(3), ""),
        (Centered(), "forward combines the examples of a batch"),
        (Counting(), "forward changes '1.seen'"),
    ],
)
def test_a_first_forward_tells_what_is_of_a_share(
    layer: nn.Module, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model, same = nn.Sequential(nn.Linear(5, 3), layer), meeting()
    FirstForward(model, same)
    inputs = torch.randn(EXAMPLES, 5)
    model(inputs)
    same.deliveries.add(Delivery(EXAMPLES, BATCH, ()), 0, 0, 0)
    for _ in range(2):
        model(inputs)
    assert not model._forward_hooks
    found = capfd.readouterr().err
    assert found.count(message) == 1 if message else found == ""


def test_what_is_made_to_look_at_a_loss_lies_where_it_does() -> None:
    outputs = torch.randn(4, 3, requires_grad=True)
    loss = (outputs.softmax(0) ** 2).mean()
    # In the place of an accelerator: what names no device would be made on this one.
    with torch.device("meta"):
        found = list(findings_of(loss, outputs, len(outputs)))
    assert any("depends on other examples" in line for line in found)


@pytest.mark.parametrize(
    ("loss_of", "is_said"),
    [
        (lambda rows: functional.cross_entropy(rows @ rows.t(), torch.arange(8).roll(4)), True),
        (lambda rows: (1 - functional.cosine_similarity(rows[:4], rows[4:])).mean(), False),
        (lambda rows: (1 - functional.cosine_similarity(rows[::2], rows[1::2])).mean(), False),
        (lambda rows: functional.cross_entropy(rows, torch.arange(8) % 3), False),
    ],
)
def test_the_rows_of_other_examples_are_looked_at(loss_of: Callable[[Tensor], Tensor], is_said: bool) -> None:
    """Two views of four pictures, which may be compared with each other, and not with those of other pictures."""
    last = LastOutput()
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    last.keep(None, None, rows)
    outputs = last.take(4)
    assert outputs is rows
    assert any("depends on other examples" in line for line in findings_of(loss_of(rows), rows, 4)) == is_said


def test_rows_of_frames_are_not_examples() -> None:
    last = LastOutput()
    for shape, taken in (((12, 4, 7), False), ((4, 12, 7), True), ((5, 7), False), ((8, 7), True)):
        last.keep(None, None, torch.ones(shape, requires_grad=True))
        assert (last.take(4) is not None) == taken
