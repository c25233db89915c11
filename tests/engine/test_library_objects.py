"""What the transformers library keeps beside a model arrives with it: what it records of a forward, and the hooks."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace as hr
from headrace.engine.shipping import pack, unpack

transformers = pytest.importorskip("transformers")
TOKENS = 24


def mixtral() -> Any:
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=20,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.double()


def own_loss(output: Any, labels: Tensor) -> Tensor:
    """The model's own, with that of its routers."""
    found: Tensor = output.loss
    return found


def copied(value: Any) -> Any:
    code, memory, length = pack(value)
    return unpack(code, memory, length)


def test_a_librarys_nested_function_has_its_modules_names_where_it_arrives() -> None:
    capturing = importlib.import_module("transformers.utils.output_capturing")
    model = mixtral()
    model(torch.ones(1, 3, dtype=torch.int64))
    hooks = [hook for part in copied(model).modules() for hook in part._forward_hooks.values()]
    assert hooks
    assert all(hook.__globals__ is vars(capturing) for hook in hooks)
    kept = [hook for part in model.modules() for hook in part._forward_hooks.values()]
    values = [[[cell.cell_contents for cell in hook.__closure__][1:] for hook in each] for each in (hooks, kept)]
    assert values[0] == values[1]


def test_what_a_class_records_arrives_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = importlib.import_module("transformers.utils.output_capturing")
    model = mixtral()
    code, memory, length = pack(model)
    # As in a process that has built no model.
    monkeypatch.setattr(capturing, "_CAN_RECORD_REGISTRY", type(capturing._CAN_RECORD_REGISTRY)())
    arrived = unpack(code, memory, length)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    for output in (arrived(tokens, output_hidden_states=True), model(tokens, output_hidden_states=True)):
        assert len(output.router_logits) == 2
        assert len(output.hidden_states) == 3


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True])
def test_a_model_with_a_loss_of_its_routers_trains_as_in_a_plain_loop(used: bool) -> None:
    tokens = torch.randint(0, TOKENS, (4, 7), generator=torch.Generator().manual_seed(2))
    model, plain = mixtral(), mixtral()
    if used:
        model(tokens)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        plain(tokens, labels=tokens).loss.backward()
        optimizer.step()
    job = hr.Job(
        model=model,
        loss=own_loss,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        data=[{"input_ids": row, "labels": row} for row in tokens],
        inputs=["input_ids", "labels"],
        target="labels",
        global_batch_size=4,
        steps=3,
    )
    trained = hr.fit(job, device="cpu").model
    for (name, one), other in zip(plain.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-9, msg=name)
