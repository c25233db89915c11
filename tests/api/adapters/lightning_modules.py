"""Modules of Lightning, which takes seconds to import: only the tests of them do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    L: Any = pytest.importorskip("lightning.pytorch")

Configure = Callable[[Any], Any]


class Classifier(L.LightningModule):
    def __init__(self, configure: Configure) -> None:
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
    def __init__(self, configure: Configure) -> None:
        super().__init__(configure)
        self.automatic_optimization = False
