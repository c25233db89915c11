"""Models of matrices alone: many parameters for little computation, so that the exchange weighs heavily."""

from __future__ import annotations

from torch import nn


def mlp(features: int = 784, hidden: int = 2048, classes: int = 10) -> nn.Sequential:
    """Returns two hidden layers; with the defaults 5.8 million parameters.

    Maps `(batch, features)` to logits `(batch, classes)`.
    """
    return nn.Sequential(
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
