"""One small job for each thing of a user's that must be carried to the workers."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import headrace as hr

draws = torch.Generator().manual_seed(1)
INPUTS = torch.randn(60, 4, generator=draws)
TARGETS = torch.randint(0, 3, (60,), generator=draws)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """A body, and a head."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), between(), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(inputs))
        return output


def hooked(module: Callable[[], nn.Module] = Net) -> nn.Module:
    """A hook masks the gradients of two rows and adds to them; another scales the sum, by what the head is."""
    model: Any = module()
    mask = torch.ones(6, 4)
    mask[:2] = 0
    head = model.head.weight

    def scaled(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(1 + head.detach()[0, 0])

    model.body[0].weight.register_hook(lambda gradient: gradient * mask + 0.01)
    model.head.bias.register_post_accumulate_grad_hook(scaled)
    return model


class Drawn(Net):
    """An attribute that the operating system draws in the constructor: another one in each process."""

    def __init__(self) -> None:
        super().__init__()
        drawn = np.random.default_rng(int.from_bytes(os.urandom(4)))
        self.angles = torch.from_numpy(drawn.standard_normal((4, 4)))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.sin(inputs @ self.angles.to(inputs.dtype)))


class Codebook(Net):
    """A buffer that forward changes, and a count of calls, with which inputs are scaled."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
                self.calls += 1
        return super().forward((inputs - self.mean) / (1 + 0.1 * self.calls))


class Counting(nn.Module):
    """Extra state, which forward changes and scales by: how often it was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return inputs / (1 + 0.2 * self.calls)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Freezing(Net):
    """Freezes its body after three calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.body.requires_grad_(int(self.calls) <= 3)
        return super().forward(inputs)


class Chosen(Net):
    """A layer that some examples go through, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        rows = (inputs[:, 0] > 1.0).nonzero().flatten()
        return output.index_add(0, rows, self.expert(inputs[rows])) if len(rows) else output


class Tied(nn.Module):
    """The last layer but one has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        output: Tensor = self.head(torch.tanh(self.third(hidden)))
        return output


class Tempered(nn.Module):
    """A loss with a temperature, which is trained, and a count of its calls, which it divides by."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output * self.heat, target) / (1 + 0.1 * self.calls)


class Stepping(torch.optim.Optimizer):
    """SGD that counts its steps in an attribute, by which it slows down, and has a factor for each element.

    It evaluates with the mean of all parameters so far, as schedule-free optimizers do.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state[tensor]["factor"] = torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    factor = self.state[tensor].get("factor", torch.ones(())).to(tensor.dtype)
                    tensor.sub_(tensor.grad * factor, alpha=group["lr"] / self.steps)


class Averaging(Stepping):
    """Trains with other parameters than it evaluates with, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.trains = True

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    @torch.no_grad()
    def _turn(self, trains: bool) -> None:
        for tensor, state in self.state.items() if trains != self.trains else ():
            if "mean" in state:
                state["mean"], value = tensor.clone(), state["mean"]
                tensor.copy_(value)
        self.trains = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for tensor, state in self.state.items():
            state.setdefault("mean", tensor.clone()).lerp_(tensor, 1 / self.steps)


def grouped(named: Any) -> torch.optim.Optimizer:
    """Two groups with learning rates of their own."""
    named = list(named)
    heads = [parameter for name, parameter in named if name.startswith("head")]
    rest = [parameter for name, parameter in named if not name.startswith("head")]
    return torch.optim.SGD([{"params": heads, "lr": 0.2}, {"params": rest}], lr=0.05, momentum=0.9)


def clamping(named: Any) -> torch.optim.Optimizer:
    """Plain SGD with a hook that clamps gradients."""
    optimizer = torch.optim.SGD(named, lr=0.1)

    def clamp(stepped: torch.optim.Optimizer, *_: object) -> None:
        for tensor in itertools.chain.from_iterable(group["params"] for group in stepped.param_groups):
            if tensor.grad is not None:
                tensor.grad.clamp_(-0.02, 0.02)

    optimizer.register_step_pre_hook(clamp)
    return optimizer


def weighted(output: Tensor, target: Tensor) -> hr.Mean:
    """A mean by the weights of the classes, whose sum a share does not know."""
    weights = torch.tensor([0.1, 1.0, 10.0], dtype=output.dtype)[target]
    return hr.Mean((nn.functional.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


def twice(worker: hr.Worker) -> None:
    """Differentiates two losses before it updates, and changes the gradients between."""
    for inputs, target in worker.batches():
        for factor in (0.5, 1.5):
            worker.backward(nn.functional.cross_entropy(worker.model(inputs), target) * factor)
        for parameter in worker.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        worker.update()
        if worker.evaluation_due:
            worker.evaluate()


NORMAL = functools.partial(Net, functools.partial(nn.BatchNorm1d, 6))

KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "hooks": {"model": hooked},
    "given hooks": {"model": hooked()},
    "attributes": {"model": Drawn},
    "buffers": {"model": Codebook, "options": hr.Options(sync_buffers="mean")},
    "local buffers": {"model": Codebook},
    "extra state": {"model": functools.partial(Net, Counting)},
    "batch norm": {"model": NORMAL},
    "synced batch norm": {"model": NORMAL, "options": hr.Options(batch_norm="sync")},
    "dropout": {"model": functools.partial(Net, functools.partial(nn.Dropout, 0.3))},
    "groups": {"optimizer": grouped},
    "adam": {"optimizer": functools.partial(torch.optim.Adam, lr=0.01)},
    "optimizer hooks": {"optimizer": clamping},
    "optimizer attributes": {"optimizer": Stepping},
    "optimizer modes": {"optimizer": Averaging},
    "weights": {"task": None, "loss": weighted},
    "trained loss": {"task": None, "loss": Tempered()},
    "clip": {"options": hr.Options(clip_norm=0.1)},
    "clip value": {"options": hr.Options(clip_value=0.01)},
    "warmup": {"options": hr.Options(warmup=4)},
    "schedule": {
        "options": hr.Options(schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5))
    },
    "average": {"options": hr.Options(ema_decay=0.6)},
    "accumulate": {"options": hr.Options(accumulate=3)},
    "frozen": {"model": hr.frozen(Net, "body.*", until_epoch=1)},
    "freezing": {"model": Freezing},
    "chosen": {"model": Chosen, "optimizer": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)},
    "tied": {"model": Tied},
    "own loop": {"train": twice},
}

STRATEGIES: Mapping[str, hr.Strategy] = {
    "mirrored": hr.Mirrored(workers=2),
    "central_storage": hr.CentralStorage(workers=2),
    "parameter_server": hr.ParameterServer(workers=2, staleness_bound=0),
    "parameter_averaging": hr.LocalSGD(workers=2, period=2),
    "pipeline": hr.Pipeline(stages=2),
    "fully_sharded": hr.FullySharded(workers=2),
    "tensor_parallel": hr.TensorParallel(devices=2),
}


def job(kind: str = "plain") -> hr.Job:
    parts: dict[str, Any] = {"model": Net, "task": hr.tasks.multiclass(3), "optimizer": SGD, **KINDS[kind]}
    parts.pop("train", None)
    data = INPUTS, TARGETS
    return hr.Job(data=data, eval_data=data, global_batch_size=10, epochs=3, seed=0, **parts)


def verified(kind: str, strategy: str, engine: Any = None) -> hr.Verification:
    """Verifies a kind of job in double precision, under a strategy of two workers."""
    return hr.verify(job(kind), STRATEGIES[strategy], train=KINDS[kind].get("train"), double=True, engine=engine)
