"""Numbers of a batch that Python reads in forward or loss are said; others are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace as hr
from headrace.api.probes.layers import probe_draws_and_reads
from headrace.api.probes.parts.sample import Sample
from headrace.training.user_code.objective import Objective

INPUTS = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
TARGETS = torch.arange(16) % 3
Forward = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer, self.forward_of, self.flag = nn.Linear(4, 3), forward, torch.tensor(1)
        self.norm, self.lstm = nn.BatchNorm1d(4, momentum=None), nn.LSTM(4, 3, batch_first=True)
        self.rare, self.encoder = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [3]), nn.TransformerEncoderLayer(4, 2, 8)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.forward_of(self, inputs, self.layer(inputs))


def halved(output: Tensor) -> Tensor:
    while output.norm() > 1:
        output = output / 2
    return output


@torch.jit.script
def scripted(inputs: Tensor, output: Tensor) -> Tensor:
    if bool(inputs.mean() > 9):
        output = output * 2
    return output


READING: dict[str, Forward] = {
    "if": lambda _, x, h: 2 * h if x.mean() > 9 else h,
    "while": lambda _, x, h: halved(h),
    "int": lambda _, x, h: h / int((x > 9).sum() + 1),
    "tolist": lambda _, x, h: h if max(x[:, 0].tolist()) < 9 else 2 * h,
    "array": lambda _, x, h: h if np.asarray(x).mean() < 9 else 2 * h,
    "in": lambda _, x, h: 2 * h if 0.5 in x else h,
    "allclose": lambda _, x, h: 2 * h if torch.allclose(x, x[:1]) else h,
    "a size": lambda _, x, h: torch.cat([h, h.new_zeros((x > 9).sum(), 3)]),
    "a slice": lambda _, x, h: torch.cat([h, h[: (x > 9).sum()]]),
    "a shape": lambda _, x, h: h * (1 + len((x > 9).nonzero())),
    "script": lambda _, x, h: scripted(x, h),
}
CLEAN: dict[str, Forward] = {
    "a parameter": lambda net, x, h: 2 * h if net.layer.weight.mean() > 0 else h,
    "an attribute": lambda net, x, h: h * net.flag.item(),
    "its length": lambda _, x, h: h * (len(x) / x.shape[0]),
    "a text": lambda _, x, h: h if f"{x.mean()}" else 2 * h,
    "an argument that torch checks": lambda _, x, h: h + F.one_hot((x[:, 0] > 0).long(), 3),
    "a layer of torch": lambda net, x, h: h + net.rare(x, (x[:, 0] > 0).long()).output[:, None],
    "a distribution": lambda _, x, h: h + torch.distributions.Normal(x, 1.0).log_prob(x)[:, :3],
    "statistics": lambda net, x, h: h + net.norm(x)[:, :3],
    "attention": lambda net, x, h: h + net.encoder(x[:, None])[:, 0, :3],
    "packed": lambda net, x, h: h + net.lstm(
        nn.utils.rnn.pack_padded_sequence(x[:, None], torch.ones(len(x)), batch_first=True)
    )[1][0][0],
}  # fmt: skip


def said(forward: Forward, loss: Any = F.cross_entropy) -> list[str]:
    findings = probe_draws_and_reads(Sample(Net(forward), (INPUTS, TARGETS), Objective(loss)))
    return [each.line for each in findings if "Python reads" in each.what]


@pytest.mark.parametrize("forward", READING.values(), ids=READING)
def test_a_number_of_the_batch_is_said_with_its_line(forward: Forward) -> None:
    (line,) = said(forward)
    assert "'test_reads.py:" in line


@pytest.mark.parametrize("forward", CLEAN.values(), ids=CLEAN)
def test_nothing_is_said_of_other_numbers(forward: Forward) -> None:
    assert said(forward) == []


def test_nothing_is_said_of_the_rows_of_sparse_embeddings() -> None:
    job = hr.Job(
        lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(3, 3)),
        partial(torch.optim.SGD, lr=0.1), (TARGETS[:, None], TARGETS), 8, task=hr.tasks.multiclass(3), steps=1,
    )  # fmt: skip
    run = hr.fit(job, hr.Mirrored(2), engine=hr.ThreadEngine())
    assert not [event for event in run.events if "Python reads" in getattr(event, "text", "")]


def limited(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    return loss.log() if loss > 9 else loss


def test_a_loss_that_decides_by_its_value_is_said() -> None:
    assert len(said(lambda _, x, h: h, limited)) == 1


@pytest.mark.parametrize(
    ("strategy", "accumulate", "lines"),
    [(hr.Mirrored(2), 1, 1), (hr.OneDevice(), 2, 1), (hr.OneDevice(), 1, 0)],
)
def test_a_run_says_it_where_another_number_can_come_out(strategy: Any, accumulate: int, lines: int) -> None:
    job = hr.Job(
        partial(Net, READING["if"]), partial(torch.optim.SGD, lr=0.1), (INPUTS, TARGETS), 8,
        loss=F.cross_entropy, steps=1, options=hr.Options(accumulate=accumulate),
    )  # fmt: skip
    run = hr.fit(job, strategy, engine=hr.ThreadEngine())
    notices = [event.text for event in run.events if event.kind == "notice"]
    assert sum("Python reads a number of the batch" in text for text in notices) == lines
