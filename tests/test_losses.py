"""The cross-entropy of a large vocabulary, chunk by chunk."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.errors import DataError, UsageError

DOUBLE = torch.float64


def case(bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Returns hidden, weight, bias and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 7, 6, generator=generator, dtype=DOUBLE)
    weight = torch.randn(19, 6, generator=generator, dtype=DOUBLE)
    shift = torch.randn(19, generator=generator, dtype=DOUBLE) if bias else None
    labels = torch.randint(0, 19, (3, 7), generator=generator)
    labels[0, 2:] = -100
    return hidden, weight, shift, labels


def gradients(loss: Tensor, *of: Tensor | None) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * 1.7, [each for each in of if each is not None])]


@pytest.mark.parametrize("chunk", [1, 4, 21, 50, None])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int | None, bias: bool) -> None:
    hidden, weight, shift, labels = case(bias)
    leaves = [each.requires_grad_() for each in (hidden, weight, shift) if each is not None]
    logits = F.linear(hidden, weight, shift)
    right = gradients(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), *leaves)
    found = gradients(hr.linear_cross_entropy(hidden, weight, labels, bias=shift, chunk=chunk), *leaves)
    assert max(float((a - b).abs().max()) for a, b in zip(right, found, strict=True)) <= 1e-12


def test_a_frozen_head_gets_no_gradient_and_a_trained_one_without_trained_inputs_does() -> None:
    hidden, weight, _, labels = case()
    hr.linear_cross_entropy(hidden.requires_grad_(), weight, labels).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    hr.linear_cross_entropy(hidden.detach(), weight.requires_grad_(), labels, chunk=5).backward()
    assert weight.grad is not None


def test_without_a_token_that_counts_it_is_zero_and_so_are_gradients() -> None:
    hidden, weight, _, labels = case()
    loss = hr.linear_cross_entropy(hidden.requires_grad_(), weight, torch.full_like(labels, 9), ignore_index=9)
    loss.backward()
    assert loss == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_backward_runs_twice_and_a_second_derivative_is_refused() -> None:
    hidden, weight, _, labels = case()
    loss = hr.linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    again = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, again)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_half_precision_is_that_of_autocast_with_a_loss_in_single() -> None:
    hidden, weight, _, labels = case()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        right = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten())
        found = hr.linear_cross_entropy(hidden, weight, labels, chunk=4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(right, hidden, weight), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, "labels"),
        ({"labels": torch.zeros(3, 7)}, "class indices, integers, as labels; got torch.float32"),
        ({"weight": torch.zeros(19, 5)}, r"\(3, 7, 6\), \(19, 5\)"),
        ({"weight": torch.zeros(6)}, r"\(6,\)"),
        ({"bias": torch.zeros(18)}, r"\(18,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    hidden, weight, bias, labels = case()
    given = {"hidden": hidden, "weight": weight, "bias": bias, "labels": labels, **change}
    with pytest.raises(DataError, match=message):
        hr.linear_cross_entropy(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", [19, -1])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    hidden, weight, _, labels = case()
    labels[1, 1] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        hr.linear_cross_entropy(hidden, weight, labels)


def test_no_tokens_a_chunk_is_refused() -> None:
    hidden, weight, _, labels = case()
    with pytest.raises(UsageError, match="chunk must be a whole number of at least 1, got 0"):
        hr.linear_cross_entropy(hidden, weight, labels, chunk=0)


PEAK = """
import resource, sys, torch, headrace as hr
torch.set_num_threads(1)
hidden = torch.randn(512, 16, requires_grad=True); weight = torch.randn(128_000, 16, requires_grad=True)
labels = torch.zeros(512, dtype=torch.long)
hr.linear_cross_entropy(hidden[:1], weight, labels[:1]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "whole":
    torch.nn.functional.cross_entropy(hidden @ weight.t(), labels).backward()
else:
    hr.linear_cross_entropy(hidden, weight, labels, chunk=32).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_the_logits_of_a_large_vocabulary_are_never_whole() -> None:
    def peak(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PEAK, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    logits = 512 * 128_000 * 4
    assert peak("whole") > logits
    assert peak("chunked") < 0.35 * logits


class Chunked(nn.Module):
    """A model that computes its own loss by chunks, or from whole logits."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.chunk = chunk
        self.embed = nn.Embedding(23, 8, dtype=DOUBLE)
        self.body = nn.Sequential(*(nn.Linear(8, 8, dtype=DOUBLE) for _ in range(4)))
        self.head = nn.Linear(8, 23, bias=False, dtype=DOUBLE)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(self.embed(input_ids).tanh())[:, :-1]
        if self.chunk:
            return {"loss": hr.linear_cross_entropy(hidden, self.head.weight, labels[:, 1:], chunk=self.chunk)}
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels[:, 1:].flatten())}


class Padded(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eleven sequences with different numbers of tokens."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 23, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.where(torch.arange(6) < 6 - index % 4, -100)}


def job(chunk: int | None) -> hr.Job:
    return hr.Job(
        model=lambda: Chunked(chunk),
        task=hr.tasks.own_loss(ignore_index=-100),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        data=Padded(),
        global_batch_size=4,
        steps=4,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.Mirrored(3),
        hr.CentralStorage(2),
        hr.FullySharded(2),
        hr.ParameterServer(2, staleness_bound=0),
        hr.TensorParallel(2),
        hr.Pipeline(2, 2),
        hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    ],
    ids=lambda strategy: strategy.name,
)
def test_a_tied_head_is_trained_by_chunks_under_each_strategy(strategy: hr.Strategy) -> None:
    threads = hr.ThreadEngine()
    whole = hr.fit(job(None), engine=threads).model.state_dict()
    found = hr.fit(job(3), strategy, engine=threads).model.state_dict()
    assert max(float((whole[name] - found[name]).abs().max()) for name in whole) <= 1e-9
