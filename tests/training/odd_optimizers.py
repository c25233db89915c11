"""Optimizers as users write them: what they look at, where they keep what they know, and what else they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

optim = torch.optim


class Written(optim.Optimizer):
    """Plain SGD, written out, whose `rate` says what is done with a group's gradients first."""

    def __init__(self, params: Any, lr: float = 0.1, boost: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.boost = boost

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            moved = [tensor for tensor in group["params"] if tensor.grad is not None]
            for tensor in moved:
                tensor.add_(tensor.grad, alpha=-group["lr"] * self.boost * self.scale(moved, tensor))

    def begin(self) -> None:
        """Before the groups."""

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        return 1.0


class OfGroup(Written):
    """A step of one length for all parameters of a group."""

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        return 1.0 / float(sum(each.grad.norm() for each in moved if each.grad is not None))


class OfParameter(Written):
    """A step of the parameter's own length."""

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        assert tensor.grad is not None
        return float(tensor.norm() / tensor.grad.norm())


class Limited(Written):
    """Looks at all parameters together where the gradients are large alone."""

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        norm = float(sum(each.grad.square().sum() for each in moved if each.grad is not None)) ** 0.5
        return min(1.0, 100.0 / norm)


class Counting(Written):
    """Counts its steps in an attribute, by which the rate falls."""

    steps = 0

    def begin(self) -> None:
        self.steps += 1
        self.boost = 1.0 / self.steps


class CountingByGroup(Written):
    def begin(self) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        return 1.0 / float(self.param_groups[0]["steps"])


class Remembering(Written):
    """Keeps the last losses in something that no checkpoint can hold."""

    def begin(self) -> None:
        self.last = deque([*vars(self).get("last", ()), 1.0], maxlen=9)

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        return 1.0 / len(self.last)


class Noisy(Written):
    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        return float(torch.rand(()))


class Anchored(Written):
    """Stays near where the parameters began."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state[tensor]["anchor"] = tensor.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for tensor, state in self.state.items():
            tensor.lerp_(state["anchor"], 0.1)


class Placed(Written):
    """Moves each element by a factor of its own, which goes by its place in its parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for tensor in group["params"]:
                factors = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype)
                self.state[tensor]["factor"] = factors.view(tensor.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for tensor, state in self.state.items():
            if tensor.grad is not None:
                tensor.addcmul_(tensor.grad, state["factor"], value=-0.1)


class Keeping(Written):
    """Keeps collections and texts of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                state = self.state[tensor]
                state.setdefault("moments", [torch.zeros_like(tensor), (torch.zeros_like(tensor), 2)])
                state |= {"form": "own", "nothing": None}
                first, (second, _) = state["moments"]
                first.lerp_(tensor.grad, 0.1)
                second.lerp_(tensor.grad.square(), 0.1)
                tensor.addcdiv_(first, second.sqrt().add_(1e-8), value=-group["lr"])


class Wrapped(optim.Optimizer):
    """Moves slow parameters every third step, as lookahead does."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and self.count % 3 == 0:
                    slow = self.state[tensor].setdefault("slow", tensor.clone())
                    slow.lerp_(tensor, 0.5)
                    tensor.copy_(slow)


def of_tensors(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Two groups, and not all parameters in the order of the model."""

    def factory(pairs: Any) -> Any:
        first, *others = (tensor for _, tensor in pairs)
        return kind([{"params": others}, {"params": [first], "lr": 0.02}])

    return factory


def hooked(hook: Callable[..., Any]) -> Callable[..., Any]:
    def factory(pairs: Any) -> optim.Optimizer:
        optimizer = optim.SGD(pairs, lr=0.1)
        optimizer.register_step_pre_hook(hook)
        return optimizer

    return factory


def clamp(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                tensor.grad.clamp_(-0.5, 0.5)


def bounded(pairs: Any) -> optim.Optimizer:
    """Keeps all weights small after a step."""

    def limit(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.data.clamp_(-0.2, 0.2)

    optimizer = optim.SGD(pairs, lr=0.1)
    optimizer.register_step_post_hook(limit)
    return optimizer


def clip(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_([tensor for group in optimizer.param_groups for tensor in group["params"]], 1.0)


class Averaging(Written):
    """Trains with other parameters than it evaluates with, as schedule-free optimizers do."""

    trains = False

    def train(self) -> None:
        if not self.trains:
            self._exchange()
        self.trains = True

    def eval(self) -> None:
        if self.trains:
            self._exchange()
        self.trains = False

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, state in self.state.items():
            state["other"], value = tensor.clone(), state["other"]
            tensor.copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.trains
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for tensor in group["params"]:
                if tensor.grad is not None:
                    mean = self.state[tensor].setdefault("other", tensor.clone())
                    mean.lerp_(tensor, 1 / group["steps"])


def momentous(pairs: Any) -> optim.Optimizer:
    """Begins with a momentum."""
    optimizer = optim.SGD(pairs, lr=0.1, momentum=0.9)
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            optimizer.state[tensor]["momentum_buffer"] = torch.full_like(tensor, 0.5)
    return optimizer


def double(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Doubles every gradient, once."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                tensor.grad.mul_(2)


def careless(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Expects a gradient of every parameter."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.grad.clamp_(-0.5, 0.5)


def patched(pairs: Any) -> optim.Optimizer:
    """Has a step in place of its class's."""
    optimizer = optim.SGD(pairs, lr=0.1)
    inner = optimizer.step

    def step(closure: Any = None) -> None:
        double(optimizer, (), {})
        inner()

    vars(optimizer)["step"] = step
    return optimizer


def looking_ahead(pairs: Any) -> Wrapped:
    return Wrapped(optim.SGD(pairs, lr=0.1, momentum=0.9))


def by_dims(pairs: Any) -> optim.Optimizer:
    """Adds a group after it was made, and has vectors in another one than matrices."""
    optimizer = optim.AdamW([tensor for _, tensor in pairs if tensor.dim() > 1], lr=0.01, weight_decay=0.5)
    optimizer.add_param_group({"params": [tensor for _, tensor in pairs if tensor.dim() < 2], "weight_decay": 0.0})
    return optimizer


class SlowCopies(optim.Optimizer):
    """Lookahead as it is often written: the slow copies are made by the constructor, and kept in an attribute."""

    def __init__(self, params: Any, every: int = 5) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.every, self.done = every, 0
        self.slow = [tensor.detach().clone() for group in self.param_groups for tensor in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.done += 1
        if self.done % self.every == 0:
            every = [tensor for group in self.param_groups for tensor in group["params"]]
            for slow, tensor in zip(self.slow, every, strict=True):
                tensor.copy_(slow.lerp_(tensor, 0.5))


class Referring(Written):
    """Keeps its parameters in a list of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = [tensor for group in self.param_groups for tensor in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for tensor in self.mine:
            if tensor.grad is not None:
                tensor.sub_(tensor.grad, alpha=0.1)
