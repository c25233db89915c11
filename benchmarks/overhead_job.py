"""The jobs whose fixed cost a step is measured."""

from __future__ import annotations

import torch
from torch import nn
from workloads import MODELS, examples


def make_model(workload: str) -> nn.Module:
    """Returns a model whose step costs next to nothing, or one of the workloads'."""
    return nn.Linear(16, 10) if workload == "tiny" else MODELS[workload][0]()


def make_data(workload: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and classes."""
    if workload == "tiny":
        generator = torch.Generator().manual_seed(0)
        return torch.randn(65536, 16, generator=generator), torch.randint(10, (65536,), generator=generator)
    return examples(workload, 4096)
