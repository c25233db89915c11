"""The hard cases: what models of other people do that a strategy can get wrong, one small model each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import hard_models as blocks
import hard_states as states
import torch
import torch.nn.functional as F
from hard_models import CLASSES, INPUTS, LENGTH, WORDS, Between
from torch import Tensor, nn

import headrace as hr
import models

HALF_TOLERANCE = 1e-5
EXAMPLES = 10


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    Attributes:
        model: builds it.
        batch: returns all examples.
        loss: of output and target; None where `task` has it.
        tolerance: largest distance from one device that counts as equal.
        double: whether the model is made one of double precision.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[..., Any] | None = F.cross_entropy
    task: Any = None
    tolerance: float = 1e-9
    double: bool = True


def rows() -> tuple[Tensor, Tensor]:
    """Returns inputs and classes."""
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(EXAMPLES, INPUTS, generator=generator),
        torch.randint(0, CLASSES, (EXAMPLES,), generator=generator),
    )


def words() -> dict[str, Tensor]:
    """Returns sequences and their lengths."""
    generator = torch.Generator().manual_seed(2)
    return {
        "words": torch.randint(0, WORDS, (EXAMPLES, LENGTH), generator=generator),
        "lengths": torch.randint(2, LENGTH + 1, (EXAMPLES,), generator=generator),
    }


def first_word(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Compares the output with a class that the first word has."""
    return F.cross_entropy(output, batch["words"][:, 0] % CLASSES)


_BLOCKS: Mapping[str, Callable[[], nn.Module]] = {
    "parameter used outside its layer": blocks.Outside,
    "weight_norm (hook)": blocks.old_weight_norm,
    "weight_norm (parametrization)": blocks.new_weight_norm,
    "spectral_norm (hook)": blocks.old_spectral_norm,
    "spectral_norm (parametrization)": blocks.new_spectral_norm,
    "symmetric parametrization": blocks.parametrized,
    "hooks that know the batch size": blocks.hooked,
    "reshape by the batch size": blocks.Heads,
    "experts picked by hand": blocks.Experts,
    "vmap": blocks.Mapped,
    "autograd.grad in forward": blocks.Energy,
    "ScriptModule": blocks.scripted,
    "compiled submodule": blocks.compiled,
    "checkpoint, use_reentrant=False": partial(blocks.Checkpointed, False),
    "checkpoint, use_reentrant=True": partial(blocks.Checkpointed, True),
    "extra state": partial(blocks.ExtraState, False),
    "extra state that forward changes": partial(blocks.ExtraState, True),
    "complex buffer": partial(blocks.Fourier, False),
    "complex128 parameter": partial(blocks.Fourier, True),
    "sparse COO buffer": partial(blocks.Graph, "coo", True),
    "sparse COO attribute": partial(blocks.Graph, "coo", False),
    "sparse CSR buffer": partial(blocks.Graph, "csr", True),
    "sparse CSR attribute": partial(blocks.Graph, "csr", False),
    "VQ codebook": states.Codebook,
    "target network of buffers": partial(states.Target, True),
    "target network, frozen parameters": partial(states.Target, False),
    "queue of keys": states.Queue,
    "InstanceNorm with running statistics": states.Instances,
    "BatchNorm kept in eval mode": states.Frozen,
    "int and bool buffers": partial(states.Whole, False),
    "int buffer that counts": partial(states.Whole, True),
    "mean over the batch": states.Centred,
}


def _between(block: Callable[[], nn.Module]) -> nn.Module:
    return Between(block())


def _auxiliary() -> nn.Module:
    return blocks.WithAuxiliary(blocks.Auxiliary())


def _contrastive_clip() -> nn.Module:
    return states.Contrastive(models.TRANSFORMERS["clip"].model())


def cases() -> dict[str, Case]:
    """Returns every case by name."""
    clip = models.TRANSFORMERS["clip"]
    return {
        **{name: Case(partial(_between, block), rows) for name, block in _BLOCKS.items()},
        "hook on the model": Case(blocks.hooked_model, rows),
        "ScriptModule as the model": Case(blocks.scripted_model, rows),
        "compiled model": Case(blocks.compiled_model, rows),
        "self.aux_loss": Case(_auxiliary, rows, blocks.auxiliary_loss),
        "packed_sequence": Case(blocks.Packed, words, first_word),
        "F.embedding(sparse=True)": Case(partial(blocks.Words, False), words, first_word),
        "nn.Embedding(sparse=True)": Case(partial(blocks.Words, True), words, first_word),
        "mean over tokens": Case(states.Language, words, states.over_tokens),
        "mean over tokens, hr.Mean": Case(states.Language, words, states.weighed_tokens),
        "contrastive loss": Case(partial(_between, blocks.dense), rows, states.contrastive),
        "comes in eval mode": Case(states.in_eval_mode, rows),
        "lazy layers": Case(states.lazy, rows),
        "float16 parameters": Case(partial(states.half, torch.float16), rows, tolerance=HALF_TOLERANCE, double=False),
        "bfloat16 parameters": Case(partial(states.half, torch.bfloat16), rows, tolerance=HALF_TOLERANCE, double=False),
        "CLIP, loss a pair": Case(clip.model, clip.batch, models.loss_of),
        "CLIP, contrastive loss": Case(_contrastive_clip, clip.batch, None, hr.tasks.own_loss()),
    }
