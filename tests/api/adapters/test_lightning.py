"""A LightningModule as a job has the numbers of Lightning's own Trainer, and what a job cannot carry is refused."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from headrace.errors import HeadraceError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")
INPUTS = torch.randn(45, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) > 0).long()
Configure = Callable[[Any], Any]


def loader(examples: int = 45, **more: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(INPUTS[:examples], TARGETS[:examples]), **{"batch_size": 16, **more})


def one_cycle(module: Any) -> Any:
    named = [*module.named_parameters()]
    groups = [
        {"params": [each for name, each in named if "bias" in name], "weight_decay": 0.0},
        {"params": [each for name, each in named if "bias" not in name]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_epoch(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, later], [2])]


def alone(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def modules() -> Any:
    """Imported by the tests alone, not while any other is collected."""
    return importlib.import_module("api.adapters.lightning_modules")


@pytest.mark.slow
@pytest.mark.parametrize("configure", [one_cycle, by_epoch, alone])
def test_the_numbers_of_lightnings_own_trainer(configure: Configure, modules: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = modules.Classifier(configure)
    before, theirs = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    plain = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = modules.L.Trainer(max_epochs=4, accelerator="cpu", devices=1, gradient_clip_val=0.3, **plain)
    trainer.fit(theirs, loader(), loader(21, batch_size=8))
    options = hr.Options(clip_norm=0.3)
    job = hr.from_lightning(module, loader(), loader(21, batch_size=8), epochs=4, options=options)
    for strategy in (hr.OneDevice(), hr.Mirrored(3), hr.CentralStorage(2), hr.FullySharded(2)):
        run = hr.fit(job, strategy, engine=hr.ThreadEngine())
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(run.model.module.state_dict()[name], value, rtol=1e-9, atol=1e-9)
        for name in ("val_loss", "val_accuracy"):
            assert run.metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), abs=1e-9)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.slow
def test_hooks_of_parameters_are_carried(modules: Any) -> None:
    module = modules.Classifier(alone)
    before = copy.deepcopy(module.state_dict())
    module.net[0].weight.register_hook(torch.zeros_like)
    after = hr.fit(hr.from_lightning(module, loader(), epochs=1), hr.OneDevice()).model.module.state_dict()
    assert torch.equal(after["net.0.weight"], before["net.0.weight"])
    assert not torch.equal(after["net.3.weight"], before["net.3.weight"])


def plateau(module: Any) -> Any:
    optimizer = alone(module)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def twice(module: Any) -> Any:
    return [alone(module), alone(module)]


@pytest.mark.parametrize(
    ("build", "data", "message"),
    [
        (lambda _: nn.Linear(1, 1), None, "takes a LightningModule, got Linear"),
        (
            lambda modules: modules.Epochs(alone),
            loader(),
            r"lightning_modules.py:\d+: training_step uses current_epoch",
        ),
        (lambda modules: modules.Hooked(alone), loader(), "Hooked defines on_after_backward"),
        (lambda modules: modules.Manual(alone), loader(), "automatic_optimization=False"),
        (lambda modules: modules.Classifier(plateau), loader(), "ReduceLROnPlateau follows a metric"),
        (lambda modules: modules.Classifier(twice), loader(), "gives 2 optimizers"),
        (lambda modules: modules.Classifier(alone), None, "there is no data"),
    ],
)
def test_what_a_job_does_not_carry_is_refused(build: Any, data: Any, message: str, modules: Any) -> None:
    with pytest.raises(UsageError, match=message):
        hr.from_lightning(build(modules), data, epochs=1)


def test_an_evaluation_that_leaves_out_examples_is_refused(modules: Any) -> None:
    with pytest.raises(UsageError, match="an evaluation has all examples"):
        hr.from_lightning(modules.Classifier(alone), loader(), loader(drop_last=True), epochs=1)


@pytest.mark.slow
def test_the_index_of_a_batch_is_refused_before_the_start(modules: Any) -> None:
    with pytest.raises(HeadraceError, match="a step uses batch_idx"):
        hr.fit(hr.from_lightning(modules.Indexed(alone), loader(), epochs=1), engine=hr.ThreadEngine())
