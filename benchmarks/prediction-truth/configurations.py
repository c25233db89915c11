"""The 16 configurations of this machine's rows: three models, strategies, links; and their jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.models import cnn

BATCH = {"mlp": 64, "cnn": 32, "transformer": 8}
"""Examples of a worker."""
_BATCHES = 16
"""That lie in memory, so that the data is small beside the model."""
_LENGTH, _VOCABULARY, _WIDTH, _HEADS, _BLOCKS = 64, 1000, 256, 4, 4


def mlp() -> nn.Sequential:
    """3.8 million parameters, 15 MB: much to exchange for its computing."""
    first = [nn.Linear(784, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1000))


class Attention(nn.Module):
    """Self-attention of each position to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.outward = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `(batch, length, width)` to the same shape."""
        parts = self.inward(hidden).view(-1, _LENGTH, 3, _HEADS, _WIDTH // _HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        out: Tensor = self.outward(mixed.transpose(1, 2).reshape(-1, _LENGTH, _WIDTH))
        return out


class Block(nn.Module):
    """Attention and two dense layers, each added to what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(_WIDTH), Attention())
        dense = [nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)]
        self.dense = nn.Sequential(nn.LayerNorm(_WIDTH), *dense)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `(batch, length, width)` to the same shape."""
        hidden = hidden + self.attention(hidden)
        out: Tensor = hidden + self.dense(hidden)
        return out


def transformer() -> nn.Sequential:
    """3.7 million parameters, 15 MB: a language model of four blocks."""
    return nn.Sequential(
        nn.Embedding(_VOCABULARY, _WIDTH),
        *(Block() for _ in range(_BLOCKS)),
        nn.LayerNorm(_WIDTH),
        nn.Linear(_WIDTH, _VOCABULARY),
    )


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy of all positions."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


_MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...], int]] = {
    "mlp": (mlp, nn.functional.cross_entropy, (784,), 1000),
    "cnn": (cnn, nn.functional.cross_entropy, (3, 32, 32), 10),
    "transformer": (transformer, token_loss, (_LENGTH,), _VOCABULARY),
}


def job(model: str, batch: int, steps: int = 100) -> hr.Job:
    """Returns the job of a model with a global batch; Adam, as most train."""
    make, loss, shape, classes = _MODELS[model]
    torch.manual_seed(0)
    count = _BATCHES * BATCH[model]
    words = model == "transformer"
    inputs = torch.randint(0, classes, (count, *shape)) if words else torch.randn(count, *shape)
    targets = torch.randint(0, classes, (count, *(shape if words else ())))
    return hr.Job(
        model=make,
        loss=loss,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-4),
        data=hr.data.from_arrays(inputs, targets),
        global_batch_size=batch,
        steps=steps,
    )


@dataclass(frozen=True)
class Configuration:
    """One row.

    Attributes:
        strategy: as text.
        replicas: that each have `BATCH` examples of a global batch.
        period: rounds between two averages.
        mbit: of the links of two hosts of one core, and of a third one for a server; None for two cores of one host.
    """

    model: str
    strategy: str
    replicas: int = 2
    mbit: int | None = None
    servers: int = 0
    micro_batches: int = 1
    period: int = 1

    @property
    def batch(self) -> int:
        """Examples of a global batch."""
        return self.replicas * BATCH[self.model]

    @property
    def name(self) -> str:
        """For people."""
        where = f"{self.mbit} Mbit/s" if self.mbit else "one host"
        return f"{self.strategy}, {self.model}, {where}"


CONFIGURATIONS = (
    Configuration("transformer", "one_device(threads=1)", 1),
    Configuration("mlp", "mirrored(workers=2)"),
    Configuration("cnn", "mirrored(workers=2)"),
    Configuration("transformer", "central_storage(workers=2)"),
    Configuration("mlp", "mirrored(workers=2)", mbit=1000),
    Configuration("mlp", "mirrored(workers=2)", mbit=250),
    Configuration("cnn", "mirrored(workers=2)", mbit=100),
    Configuration("transformer", "mirrored(workers=2, codec='bf16')", mbit=100),
    Configuration("mlp", "mirrored(workers=2, codec='int8')", mbit=100),
    Configuration("cnn", "parameter_server(workers=2, staleness_bound=0)", mbit=250, servers=1),
    Configuration("transformer", "parameter_server(workers=2)", mbit=250, servers=1),
    Configuration("mlp", "downpour(workers=2, push_every=4, fetch_every=4)", mbit=250, servers=1),
    Configuration("mlp", "parameter_averaging(workers=2, period=8)", mbit=100, period=8),
    Configuration("transformer", "parameter_averaging(workers=2, period=4)", mbit=250, period=4),
    Configuration("transformer", "pipeline(stages=2, micro_batches=4)", mbit=250, micro_batches=4),
    Configuration("mlp", "pipeline(stages=2, micro_batches=4)", mbit=1000, micro_batches=4),
)
