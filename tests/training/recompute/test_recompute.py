"""Blocks that run again in backward leave everything as without: numbers, buffers, attributes, hooks, generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headrace as hr
from headrace.api.checks import inspect_job
from headrace.errors import JobError, UsageError
from headrace.modules import copy_module
from headrace.training.recompute.blocks import find_blocks, recompute

Choice = str | Sequence[str] | None
CHOICES: list[Choice] = ["full", "selective", "blocks.*", ["blocks.0", "blocks.2.inner"]]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=str)


class Block(nn.Module):
    """Draws from all generators, writes to buffers and attributes, and uses what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 6))
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0
        self.register_buffer("moving", torch.zeros(6))
        self.moving: Tensor

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.moving.mul_(0.9).add_(x.mean(0))
        if random.random() < 0.3 or np.random.random() < 0.1:
            return x * scale["by"]
        made: Tensor = self.norm(x + self.inner(x + self.moving)) * (1 + self.calls / 100)
        return made * scale["by"]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale={"by": x.detach().abs().mean() + 1})
        made: Tensor = self.last(x)
        return made


def trained(module: nn.Module, choice: Choice, rounds: int = 6) -> dict[str, Any]:
    """Returns all that training in a plain loop leaves."""
    module = copy_module(module)
    if choice is not None:
        recompute(module, choice)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(rounds):
        optimizer.zero_grad()
        loss = module(torch.randn(8, 4, generator=data).to(next(module.parameters()).dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kept = {name: each.tolist() for name, each in module.state_dict().items()}
    calls = [part.calls for part in module.modules() if isinstance(part, Block)]
    return {
        **kept,
        "losses": losses,
        "calls": calls,
        "next": [torch.rand(1).item(), random.random(), np.random.random()],
    }


@every_choice
def test_all_that_training_leaves_is_as_without(choice: Choice) -> None:
    torch.manual_seed(0)
    module = Stack().double()
    assert trained(module, choice) == trained(module, None)


def kept_bytes(module: nn.Module, choice: Choice) -> int:
    """Returns the bytes that forward keeps for backward, parameters aside."""
    module = copy_module(module)
    if choice is not None:
        recompute(module, choice)
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(torch.randn(256, 4)).sum()
    assert loss.requires_grad
    return sum(kept.values())


def test_less_is_kept() -> None:
    random.seed(5)
    module = Stack()
    plain, full = kept_bytes(module, None), kept_bytes(module, "full")
    assert full < plain / 3


class Counting:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self.seen.append(type(module).__name__)


@pytest.mark.parametrize("choice", [None, "full", "selective"])
def test_hooks_are_called_once(choice: Choice) -> None:
    module, before, after = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), Counting(), Counting()
    module[0].register_forward_hook(after)
    module[0][0].register_forward_hook(after)
    module[0][0].register_forward_pre_hook(before)
    if choice:
        recompute(module, choice)
    for _ in range(3):
        module(torch.randn(2, 4)).sum().backward()
    assert (len(before.seen), len(after.seen)) == (3, 6)


def test_hooks_that_change_what_is_computed_are_called_again() -> None:
    def scale(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0] * 3,)

    def gradients(choice: Choice) -> list[list[float]]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)))
        module[0][2].register_forward_pre_hook(scale)
        if choice:
            recompute(module, choice)
        module(torch.ones(3, 4)).square().sum().backward()
        return [each.grad.tolist() for each in module.parameters() if each.grad is not None]

    assert gradients("full") == gradients(None) == gradients("selective")


def test_attention_that_drops_is_run_again() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.weight(x).unflatten(-1, (3, 2, 4)).unbind(-3)
            query, key, value = (part.transpose(1, 2) for part in parts)
            found = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.4, is_causal=True)
            return nn.functional.dropout(found.transpose(1, 2).flatten(2), 0.4)

    def gradients(choice: Choice) -> list[list[float]]:
        torch.manual_seed(0)
        module = nn.Sequential(Attends(), Attends())
        if choice:
            recompute(module, choice)
        module(torch.randn(2, 5, 8)).square().sum().backward()
        return [each.grad.tolist() for each in module.parameters() if each.grad is not None]

    assert gradients("selective") == gradients(None) == gradients("full")


def test_blocks_are_found_by_containers_or_patterns() -> None:
    module = Stack()
    assert find_blocks(module, "full") == ("blocks.0", "blocks.1", "blocks.2")
    assert find_blocks(module, ["blocks.*.inner", "blocks.1"]) == ("blocks.0.inner", "blocks.1", "blocks.2.inner")
    with pytest.raises(UsageError, match=r"no module that fits 'block\.\*' of recompute's model; did you mean 'blocks"):
        find_blocks(module, "block.*")
    with pytest.raises(UsageError, match=r"'blocks' is a ModuleList, which is never called; name its entries"):
        find_blocks(module, "blocks")
    with pytest.raises(UsageError, match="Linear has none with parameters"):
        find_blocks(nn.Linear(2, 2), "full")


def job(module: Any, choice: Choice, batch: int = 8) -> hr.Job:
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    options = hr.Options(recompute=choice)
    return hr.Job(module, torch.optim.SGD, data, batch, epochs=1, loss=nn.functional.cross_entropy, options=options)


class Shifting(nn.Module):
    """Keeps what it has seen where nothing can put it back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "list":
            self.seen.append(len(x))
        if self.how == "list is used":
            self.seen.append(1)
            return torch.tanh(self.layer(x) * len(self.seen))
        if self.how == "input":
            return torch.tanh(self.layer(x.add_(1.0)))
        made: Tensor = self.layer(x)
        return made


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("list", "'1' cannot run again in backward: 'seen' is changed once more"),
        ("list is used", "'1' cannot run again in backward"),
        ("input", "modified by an inplace operation"),
    ],
)
def test_what_cannot_run_again_is_refused_by_name_before_the_start(how: str, told: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Shifting(how), nn.Linear(4, 3))

    inspect_job(job(make, None))
    with pytest.raises(UsageError) as refused:
        inspect_job(job(make, "full"))
    assert told in str(refused.value)
    inspect_job(job(make, "0"))


def test_a_buffer_that_is_first_written_to_later_ends_the_run() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0
            self.register_buffer("scale", torch.ones(8192))
            self.scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                self.scale.mul_(2)
            made: Tensor = self.layer(x) * self.scale[:4]
            return made

    module = nn.Sequential(Later())
    recompute(module, "full")
    module(torch.randn(2, 4)).sum().backward()
    with pytest.raises(JobError, match="'0' has written to the buffer 'scale' for the first time in a later step"):
        module(torch.randn(2, 4)).sum().backward()


def _write(module: nn.Module) -> None:
    with torch.no_grad():
        next(module[1].parameters()).add_(1)


def _exchange(module: nn.Module) -> None:
    module[1].bias = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(("change", "named"), [(_write, "weight"), (_exchange, "bias")])
@pytest.mark.parametrize("choice", ["full", "selective"])
def test_a_parameter_that_changes_between_forward_and_backward_ends_the_run(
    choice: str, change: Callable[[nn.Module], None], named: str
) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    recompute(module, choice)
    loss = module(torch.randn(2, 4)).square().sum()
    change(module)
    with pytest.raises(JobError, match=f"the parameter '{named}' of '1' was changed between forward and backward"):
        loss.backward()


def test_a_parameter_that_its_own_forward_writes_to_is_no_change() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 4)).double()
    again = copy_module(plain)
    recompute(again, "full")
    for module in (plain, again):
        for tokens in ([1, 2], [2, 5]):
            loss = module(torch.tensor(tokens)).square().sum()
            for _ in range(2):
                loss.backward(retain_graph=True)
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
        assert torch.equal(one, other)


def test_models_that_recompute_by_themselves_are_not_doubled() -> None:
    module = nn.Sequential(nn.Linear(4, 3))
    vars(module[0])["gradient_checkpointing"] = True
    with pytest.raises(UsageError, match=r"'0' recomputes by itself .* leave recompute out"):
        recompute(module, "full")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"recompute": 3}, "recompute is 'full', 'selective', 'offload', or patterns"),
        ({"recompute": ""}, "None switches it off"),
        ({"recompute": ["a", 2]}, "recompute is 'full'"),
        ({"recompute": "full", "compile": True}, "a compiled model chooses by itself"),
    ],
)
def test_bad_choices_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        hr.Options(**given)


def test_strategies_that_run_again_by_themselves_refuse_it() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for strategy, remedy in ((hr.Pipeline(2), "Pipeline(recompute='always')"), (hr.TPU(), "leave recompute out")):
        with pytest.raises(UsageError) as refused:
            hr.fit(job(module, "full"), strategy)
        assert remedy in str(refused.value)
