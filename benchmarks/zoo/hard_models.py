"""Small models, each with one thing that makes it hard to train on several devices.

Blocks take and return `(batch, 8)` and stand between dense layers, see `Between`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

INPUTS, WIDTH, CLASSES, WORDS, LENGTH = 6, 8, 5, 12, 7


class Between(nn.Module):
    """Dense layers with a block between them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.block = block
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(self.block(torch.tanh(self.first(x))))))
        return out


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Two layers whose weights are normalised by a hook or a parametrization."""
    return nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), norm(nn.Linear(WIDTH, WIDTH)))


def old_weight_norm() -> nn.Module:
    return normed(nn.utils.weight_norm)


def new_weight_norm() -> nn.Module:
    return normed(parametrizations.weight_norm)


def old_spectral_norm() -> nn.Module:
    return normed(nn.utils.spectral_norm)


def new_spectral_norm() -> nn.Module:
    return normed(parametrizations.spectral_norm)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def parametrized() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Outside(nn.Module):
    """Reads a layer's weight without calling the layer, as tied autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t())


def _scale_by_size(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    examples = inputs[0].shape[0]
    return output.reshape(examples, 2, -1).flip(1).reshape(examples, -1)


def _before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].reshape(len(inputs[0]), -1) * 0.5,)


def hooked() -> nn.Module:
    block = dense()
    block[0].register_forward_hook(_scale_by_size)  # type: ignore[arg-type]
    block[2].register_forward_pre_hook(_before)
    return block


def hooked_model() -> nn.Module:
    model = Between(dense())
    model.register_forward_pre_hook(_before)
    return model


class Heads(nn.Module):
    """Moves heads into the batch dimension, by the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        examples = int(x.shape[0])
        rows = x.reshape(examples, 2, WIDTH // 2).permute(1, 0, 2).reshape(examples * 2, WIDTH // 2)
        out = torch.tanh(self.inner(rows)).reshape(2, examples, WIDTH // 2)
        return out.permute(1, 0, 2).reshape(examples, WIDTH)


class Experts(nn.Module):
    """Each example goes to the expert that its gate picks; an expert without examples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out[rows] = best[rows, None] * expert(x[rows])
        return x + out


class Packed(nn.Module):
    """An LSTM over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.cell(packed)
        out: Tensor = self.last(torch.tanh(self.middle(hidden[-1])))
        return out


class Mapped(nn.Module):
    """Runs a layer example by example with vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.vmap(lambda row: torch.tanh(self.inner(row)) * row.norm())(x)
        return out


class Energy(nn.Module):
    """Returns the gradient of an energy, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
        return x - slope


class Auxiliary(nn.Module):
    """Keeps a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        self.aux_loss = hidden.square().mean()
        return hidden


class WithAuxiliary(Between):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "aux_loss": self.block.aux_loss}


def auxiliary_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target) + 0.1 * output["aux_loss"]


def scripted() -> nn.Module:
    return torch.jit.script(dense())  # type: ignore[no-any-return]


def scripted_model() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(INPUTS, WIDTH), dense(), nn.Linear(WIDTH, CLASSES)))  # type: ignore[no-any-return]


def compiled() -> nn.Module:
    return torch.compile(dense())  # type: ignore[return-value]


def compiled_model() -> nn.Module:
    return torch.compile(Between(dense()))  # type: ignore[return-value]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = dense()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class ExtraState(nn.Linear):
    """Has state that is no tensor; `counts` changes it in forward."""

    def __init__(self, counts: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.counts = counts
        self.seen = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.seen += len(x)
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Fourier(nn.Module):
    """Multiplies in the frequency domain: by a complex buffer, or a complex parameter."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        values = torch.randn(WIDTH // 2 + 1, dtype=torch.complex128)
        if trained:
            self.filter = nn.Parameter(values)
        else:
            self.register_buffer("filter", values)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, WIDTH)


class Graph(nn.Module):
    """Multiplies by a sparse matrix, which is a buffer or an attribute."""

    adjacency: Tensor

    def __init__(self, layout: str, buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        whole = (torch.rand(WIDTH, WIDTH) > 0.6).double()
        adjacency = whole.to_sparse() if layout == "coo" else whole.to_sparse_csr()
        if buffer:
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.adjacency, self.inner(x).t()).t()


class Words(nn.Module):
    """An embedding with sparse gradients, of the layer or of the function."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = layer
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=layer)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        found = self.embedding(words) if self.layer else F.embedding(words, self.embedding.weight, sparse=True)
        out: Tensor = self.last(found.mean(1))
        return out
