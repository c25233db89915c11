"""Mixtures of the transformers library, with their router's loss, are trained as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from strategies.contract_runs import distance, train

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "initializer_range": 0.3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
CHOSEN = {
    "plain": hr.ExpertParallel(3),
    "mirrored": hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2)),
    "sharded": hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2)),
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 5, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 12, "head_dim": 4},
}


def mixture(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**SHAPE, **KINDS[kind])
    )
    model.set_experts_implementation("eager")
    return model.double()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", CHOSEN)
def test_they_are_one_device(name: str, kind: str) -> None:
    text = torch.randint(0, 23, (10, 7), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": each, "labels": each} for each in text]
    job = hr.Job(
        model=partial(mixture, kind),
        task=hr.tasks.own_loss(),
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        data=examples,
        global_batch_size=4,
        epochs=1,
    )
    right, found = train(job, hr.OneDevice()), train(job, CHOSEN[name])
    assert distance(found.tensors, right.tensors) <= 1e-9
    # The library computes the loss itself in float32.
    assert found.losses == pytest.approx(right.losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("router", "lines"), [({}, 1), ({"output_router_logits": False}, 0)], ids=["with", "without"])
def test_shares_say_that_a_routers_loss_is_of_their_own_tokens(router: dict[str, Any], lines: int) -> None:
    """With the usual factor of 0.001 the losses of halves are their mean but for rounding in float32."""
    torch.manual_seed(0)
    shape = {**SHAPE, **KINDS["Mixtral"], "router_aux_loss_coef": 0.001, **router}
    text = torch.randint(0, 23, (8, 7), generator=torch.Generator().manual_seed(1))
    job = hr.Job(
        model=transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape)),
        task=hr.tasks.own_loss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=[{"input_ids": each, "labels": each} for each in text],
        global_batch_size=4,
        epochs=1,
    )
    run = hr.fit(job, hr.Mirrored(2), device="cpu", engine=hr.ThreadEngine())
    said = [event.text for event in run.events if event.kind == "notice" and "router's loss" in event.text]
    assert len(said) == lines
