"""A Llama with adapters of peft, in double precision, and jobs that train it; worker processes import this file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.bench.library import declare_operators
from late import Late

declare_operators()

transformers, peft = Late("transformers"), Late("peft")
VOCABULARY, LENGTH, EXAMPLES = 50, 10, 7
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Rows(torch.utils.data.Dataset[Mapping[str, Tensor]]):
    """Padded sequences, of which each has another number of tokens."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        there = torch.arange(LENGTH) < LENGTH - index
        return {"input_ids": tokens, "attention_mask": there.long(), "labels": tokens.where(there, -100)}


def causal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The library's loss without its cast to float32, which would hide differences below 1e-7."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama(layers: int = 2, **changes: Any) -> Any:
    """A model whose norms and loss compute in its own precision, which the library's do not."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    given = {**sizes, "vocab_size": VOCABULARY, "num_hidden_layers": layers, "use_cache": False, **changes}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    for part in list(made.modules()):
        for name, norm in part.named_children():
            if type(norm).__name__ == "LlamaRMSNorm":
                setattr(part, name, nn.RMSNorm(norm.weight.shape, norm.variance_epsilon))
    made.loss_function = causal_loss
    return made.double()


def with_adapters(layers: int = 2, **changes: Any) -> Any:
    """The model, of which adapters of every linear layer are trained."""
    given = {"r": 4, "target_modules": list(EVERYWHERE), "init_lora_weights": False, **changes}
    return peft.get_peft_model(llama(layers), peft.LoraConfig(**given)).double()


def job_of(model: Any = with_adapters, **changes: Any) -> hr.Job:
    """Each step has all examples, so that their order does not matter."""
    given: dict[str, Any] = {
        "model": model,
        "task": hr.tasks.own_loss(ignore_index=-100),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2),
        "data": Rows(),
        "global_batch_size": EXAMPLES,
        "steps": 4,
        "seed": 5,
    }
    return hr.Job(**{**given, **changes})


def plain(job: hr.Job, seed: int | None = None) -> dict[str, Tensor]:
    """Trains as a PyTorch script does; returns the parameters before, by names that begin with "-", and after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed if seed is None else seed)
        model = job.model()
    before = {f"-{name}": each.detach().clone() for name, each in model.named_parameters()}
    optimizer = job.optimizer([each for each in model.named_parameters() if each[1].requires_grad])  # type: ignore[operator]
    batch = torch.utils.data.default_collate([*map(Rows().__getitem__, range(EXAMPLES))])
    for _ in range(job.steps or 0):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return {**before, **{name: each.detach().clone() for name, each in model.named_parameters()}}
