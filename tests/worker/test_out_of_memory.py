"""An error that says "out of memory" is told with where it was, what was there, and what would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.errors import UnfitMachine, WorkerFailed

SAID = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes"


class Fails(torch.autograd.Function):
    """Passes a value on, and finds no memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        raise RuntimeError(SAID)


class Block(nn.Module):
    """A layer that finds no memory in the second step, where it is told to."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where, self.steps = where, 0

    def forward(self, x: Tensor) -> Tensor:
        # The batches of two examples of the checks before a run do not count.
        self.steps += self.training and len(x) > 2
        x = self.linear(x)
        now = self.where if self.steps == 2 else ""
        if now == "forward" or (self.where == "evaluation" and not self.training and len(x) > 2):
            raise torch.OutOfMemoryError(SAID)
        if now == "again":
            # The second call of the first step.
            raise RuntimeError(SAID)
        return Fails.apply(x) if now == "backward" else torch.relu(x)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(where), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x))


class Starving(torch.optim.AdamW):
    """Finds no memory for its state."""

    def step(self, closure: Any = None) -> Any:
        raise MemoryError


def job(where: str, **changes: Any) -> hr.Job:
    torch.manual_seed(0)
    x, y = torch.randn(24, 4), torch.randint(2, (24,))
    return hr.Job(
        model=partial(Net, where),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=(x, y),
        eval_data=(x, y) if where == "evaluation" else None,
        global_batch_size=8,
        epochs=2,
        **changes,
    )


def fails(wanted: hr.Job, strategy: hr.Strategy | None = None, **more: Any) -> str:
    with pytest.raises((UnfitMachine, WorkerFailed)) as caught:
        hr.fit(wanted, strategy or hr.OneDevice(), engine=hr.ThreadEngine(), check=False, **more)
    return str(caught.value)


WHERE = {
    "forward": r"in forward of step 2 \(round 1, epoch 0, a share of 8 examples\), at 'blocks.1' \(Block\)",
    "backward": r"in backward of step 2 \(.*\), at 'blocks.1.linear' \(FailsBackward\)",
    "evaluation": r"in an evaluation after step 3, at 'blocks.1' \(Block\)",
}


@pytest.mark.parametrize("where", WHERE)
def test_it_says_step_batch_and_layer(where: str) -> None:
    said = fails(job(where))
    assert re.match(rf"cpu of \S+ ran out of memory {WHERE[where]}: {re.escape(SAID)}\. In bytes: ", said), said


def test_what_is_computed_again_is_named_where_it_failed() -> None:
    def again() -> nn.Module:
        net = Net("again")
        block = net.blocks[1]
        whole = block.forward

        def forward(x: Tensor) -> Any:
            return checkpoint(whole, x, use_reentrant=False)

        block.forward = forward  # type: ignore[method-assign]
        return net

    assert "in backward of step 1 (" in (said := fails(replace(job("again"), model=again)))
    assert "at 'blocks.1' (Block)" in said


def test_the_optimizers_step_says_what_keeps_less() -> None:
    said = fails(replace(job(""), optimizer=partial(Starving, lr=0.1)))
    assert "in the optimizer's step of step 1 (round 0, " in said
    assert said.index("fully_sharded, under which each of N workers keeps 1/N") < said.index("Options(accumulate=2)")


def test_amounts_are_those_that_there_are() -> None:
    said = fails(job("forward"))
    held = {name: int(number.replace(",", "")) for name, number in re.findall(r"([a-z ]+) ([0-9,]+)[,.]", said)}
    # 3 blocks of 4 x 4 + 4, a head of 2 x 4 + 2, in fp32; AdamW keeps two of each and a step count.
    assert held[" parameters"] == 4 * (3 * 20 + 10)
    assert held[" optimizer state"] == 2 * held[" parameters"] + 8 * 4
    assert held[" in use"] > held[" activations and all else about"] > 0


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, r"Options\(accumulate=2\), with micro-batches of 4 examples, not 8: about [0-9,]+ for activations"),
        ({"accumulate": 2}, r"Options\(accumulate=4\), with micro-batches of 2 examples, not 4"),
        ({"precision": "bf16"}, r"Options\(recompute='full'\), which computes the activations of blocks again"),
    ],
)
def test_what_would_fit_is_said_with_numbers(options: dict[str, Any], remedy: str) -> None:
    where = "forward" if options.get("accumulate") != 2 else "backward"
    said = fails(job(where, options=hr.Options(**options)))
    assert re.search(remedy, said), said
    assert ("precision='bf16'" in said) == ("precision" not in options)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "strategy",
    [hr.Mirrored(2), hr.CentralStorage(2), hr.ParameterServer(2, 1), hr.ParameterAveraging(2), hr.FullySharded(2)],
    ids=lambda strategy: strategy.name,
)
@pytest.mark.slow
def test_under_every_strategy(strategy: hr.Strategy) -> None:
    said = fails(job("forward"), strategy)
    assert re.search(r"at 'blocks.1' \((FSDP)?Block\)", said)
    assert "in forward of step " in said
    assert ("more workers, each with a smaller part" in said) == (strategy.name == "fully_sharded")


def test_other_errors_stay_as_they_are() -> None:
    def loop(worker: hr.Worker) -> None:
        raise RuntimeError("no such thing")

    with pytest.raises((RuntimeError, WorkerFailed), match="no such thing") as caught:
        hr.launch(loop, job(""), hr.OneDevice(), engine=hr.ThreadEngine(), check=False)
    assert "out of memory" not in str(caught.value)
