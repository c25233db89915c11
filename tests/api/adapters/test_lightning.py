"""A LightningModule as a job has the numbers of Lightning's own Trainer, and what a job cannot carry is refused."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from headrace.errors import HeadraceError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    L: Any = pytest.importorskip("lightning.pytorch")

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


class Classifier(L.LightningModule):
    def __init__(self, configure: Configure = alone) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)).double()
        # One parameter in two places.
        self.net[2].bias = self.net[0].bias
        self.configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        output = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(output, batch[1]), prog_bar=True)
        self.log_dict({"val_accuracy": (output.argmax(1) == batch[1]).double().mean()})

    def configure_optimizers(self) -> Any:
        return self.configure(self)


@pytest.mark.slow
@pytest.mark.parametrize("configure", [one_cycle, by_epoch, alone])
def test_the_numbers_of_lightnings_own_trainer(configure: Configure) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Classifier(configure)
    before, theirs = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    plain = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = L.Trainer(max_epochs=4, accelerator="cpu", devices=1, gradient_clip_val=0.3, **plain)
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


class Indexed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 else 2 * loss


class Epochs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.current_epoch * self.net(batch[0]).mean()
        return loss


class Hooked(Classifier):
    def on_after_backward(self) -> None:
        """Does nothing."""


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def plateau(module: Any) -> Any:
    optimizer = alone(module)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (nn.Linear(1, 1), None, "takes a LightningModule, got Linear"),
        (Epochs(), loader(), r"test_lightning.py:\d+: training_step uses current_epoch"),
        (Hooked(), loader(), "Hooked defines on_after_backward"),
        (Manual(), loader(), "automatic_optimization=False"),
        (Classifier(plateau), loader(), "ReduceLROnPlateau follows a metric"),
        (Classifier(lambda module: [alone(module), alone(module)]), loader(), "gives 2 optimizers"),
        (Classifier(), loader(drop_last=True), "without drop_last"),
        (Classifier(), None, "there is no data"),
    ],
)
def test_what_a_job_does_not_carry_is_refused(module: Any, data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.from_lightning(module, data, epochs=1)


@pytest.mark.slow
def test_the_index_of_a_batch_is_refused_before_the_start() -> None:
    with pytest.raises(HeadraceError, match="a step uses batch_idx"):
        hr.fit(hr.from_lightning(Indexed(), loader(), epochs=1), engine=hr.ThreadEngine())
