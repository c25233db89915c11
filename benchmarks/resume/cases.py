"""What is broken off and goes on: strategies, each with every option, in a job with state of every kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import headrace as hr

EXAMPLES = 50
ROUNDS = 30
BATCH = 12
POISONED = 0.02
"""The part of the examples that are NaN where a job has an answer to that."""


class Recurrent(nn.Module):
    """An LSTM of two layers, with dropout between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs)[0][:, -1])


class Pair(nn.Module):
    """A generator and a critic, which are trained in turns; called with a vector it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(36, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 36))
        self.critic = nn.Sequential(nn.Linear(36, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.generator(inputs.flatten(1))


def critic_loss(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, made = batch[0].flatten(1), model.generator(batch[0].flip(1).flatten(1))
    return functional.softplus(-model.critic(real)).mean() + functional.softplus(model.critic(made)).mean()


def generator_loss(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.softplus(-model.critic(model.generator(batch[0].flatten(1)))).mean()


def convolutional() -> nn.Module:
    """Convolution, BatchNorm with statistics local to a worker, dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 4)
    )


def dense() -> nn.Module:
    """Neither BatchNorm nor dropout: for an optimizer that evaluates one batch several times."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4))


def jittered(example: tuple[Tensor, Tensor], rng: Any) -> tuple[Tensor, Tensor]:
    """Augments by chance."""
    return example[0] + 0.1 * float(rng.standard_normal()), example[1]


def poisoned(example: tuple[Tensor, Tensor], rng: Any) -> tuple[Tensor, Tensor]:
    """Augments by chance; a few examples are NaN."""
    inputs, target = jittered(example, rng)
    return (inputs * float("nan") if float(rng.random()) < POISONED else inputs), target


ADAM = functools.partial(torch.optim.Adam, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
LBFGS = functools.partial(torch.optim.LBFGS, max_iter=3, max_eval=12, line_search_fn="strong_wolfe")
STEP = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=4)

USUAL: Mapping[str, Any] = {"schedule": STEP, "warmup": 3, "clip_norm": 1.0, "ema_decay": 0.9, "eval_every": 7}

STRATEGIES: Mapping[str, hr.Strategy] = {
    "one_device": hr.OneDevice(threads=1),
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(2),
    "pipeline": hr.Pipeline(stages=2),
    "tensor_parallel": hr.TensorParallel(2),
    "fully_sharded": hr.FullySharded(2),
    "mirrored_elastic": hr.Mirrored(2, min_workers=2, max_workers=2),
    "pipeline_1f1b": hr.Pipeline(stages=2, micro_batches=3, schedule="1f1b"),
    "local_sgd": hr.LocalSGD(2, period=4),
    "local_sgd_shared_state": hr.LocalSGD(2, period=4, average_optimizer_state=True, post_local=5),
    "diloco": hr.DiLoCo(2, period=4),
    "easgd": hr.EASGD(2, period=4),
    "gossip": hr.Gossip(2),
    "gossip_hypercube": hr.Gossip(4, topology="hypercube"),
    "gossip_random": hr.Gossip(3, topology="random", period=2),
    "mirrored_x_pipeline": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
    "mirrored_x_tensor_parallel": hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
    "mirrored_x_fully_sharded": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "fully_sharded_x_pipeline": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2, micro_batches=1)),
    "local_sgd_x_pipeline": hr.Hybrid(hr.LocalSGD(2, period=4), hr.Pipeline(2)),
    "tpu": hr.TPU(2, compiler="eager"),
    "sandblaster": hr.Sandblaster(2),
}

REFUSED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("local_sgd", "local_sgd_shared_state", "diloco", "easgd", "local_sgd_x_pipeline"), ("ema_decay",)),
    **dict.fromkeys(("gossip", "gossip_hypercube", "gossip_random"), ("ema_decay",)),
    "sandblaster": ("schedule", "warmup", "clip_norm", "ema_decay"),
}
"""Of the usual options those that a strategy refuses; the job is without them there."""


@dataclass(frozen=True)
class Variant:
    """What differs from the usual job.

    Attributes:
        options: over the usual ones; one that is None or absent by default is left to its default.
        changes: other arguments of `hr.Job`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


def _of(**options: Any) -> Variant:
    return Variant(options)


TURNS = {
    "critic": hr.ParameterSet(ADAM, rounds=2, schedule=STEP, clip_norm=0.2),
    "generator": hr.ParameterSet(SGD, warmup=3),
}

PLAIN = {"schedule": None, "clip_norm": None, "ema_decay": None, "warmup": 0}

VARIANTS: Mapping[str, Variant] = {
    "cnn": Variant(),
    "lstm": Variant(changes={"model": Recurrent, "shape": (5, 4)}),
    "bf16": _of(precision="bf16"),
    "accumulate": _of(accumulate=3),
    "clip_value": _of(clip_value=0.02),
    "no_clip": _of(clip_norm=None),
    "no_average": _of(ema_decay=None),
    "epoch_schedule": _of(schedule_every="epoch", schedule=functools.partial(STEP, step_size=2)),
    "restarts": _of(schedule=functools.partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=7)),
    "sync_batch_norm": _of(batch_norm="sync"),
    "sync_buffers": _of(sync_buffers="mean"),
    "early_stopping": _of(early_stopping=hr.EarlyStopping(patience=3)),
    "skip": Variant({"on_nonfinite": "skip"}, {"augment": poisoned}),
    "rollback": Variant({"on_nonfinite": "rollback"}, {"augment": poisoned}),
    "channels_last": _of(memory_format="channels_last"),
    "compile": _of(compile=True),
    "sgd": Variant(changes={"optimizer": SGD}),
    "adafactor": Variant(changes={"optimizer": functools.partial(torch.optim.Adafactor, lr=0.01)}),
    "frozen": Variant(changes={"model": hr.frozen(convolutional, "0.*", until_epoch=2)}),
    "lbfgs": Variant(PLAIN, {"optimizer": LBFGS, "model": dense, "augment": None}),
    "turns": Variant(
        PLAIN,
        {"model": Pair, "optimizer": TURNS, "loss": {"critic": critic_loss, "generator": generator_loss}, "task": None},
    ),
}
"""One for each option, in a job where it has an effect; `cnn` and `lstm` have all of the usual ones."""


GO_ON = ("mirrored_elastic", "sandblaster")
"""Strategies whose runs go on without a worker: only their launcher's end interrupts them."""

NOT_COMPILED: Mapping[tuple[str, str], str] = {("tpu", "lstm"): "torch does not compile an LSTM"}
"""Pairs that no run can train, which only shows when it does."""


def make_job(strategy: str, variant: str) -> hr.Job:
    """Returns a job of 30 rounds, the last of every epoch a short one; fewer where it stops early."""
    changed = dict(VARIANTS[variant].changes)
    shape: tuple[int, ...] = changed.pop("shape", (1, 6, 6))
    augment: Callable[..., Any] | None = changed.pop("augment", jittered)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, *shape, generator=generator)
    classes = torch.randint(4, (EXAMPLES,), generator=generator)
    data = hr.data.from_arrays(inputs, classes).shuffle()
    usual = {name: value for name, value in USUAL.items() if name not in REFUSED.get(strategy, ())}
    options = hr.Options(**{**usual, **VARIANTS[variant].options})
    arguments: dict[str, Any] = {
        "model": convolutional,
        "task": hr.tasks.multiclass(4),
        "optimizer": ADAM,
        "eval_data": (inputs, classes),
        "data": data if augment is None else data.map(augment),
        "global_batch_size": BATCH,
        "epochs": 6,
        "options": options,
    }
    return hr.Job(**{**arguments, **changed})
