"""Models of the transformers library, as they come, split by heads: equal to one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Notice
from headrace.tensor_parallel.recording import tensors_of
from strategies.contract_runs import distance, train
from tensor_parallel.zoo import MODELS, WORDS, build

TWO = hr.TensorParallel(devices=2)
HYBRID = hr.Hybrid(hr.Mirrored(workers=2), TWO)
HALVED = ("bert", "gpt2", "t5", "llama", "qwen2", "vit", "whisper")
"""Of which each of two devices holds at most 0.65 of the parameters of blocks."""

QUICK = (("bert", "sdpa", TWO), ("gpt2", "eager", TWO), ("t5", "sdpa", TWO), ("llama", "sdpa", HYBRID))
CASES = [
    *QUICK,
    *(
        pytest.param(name, attention, strategy, marks=pytest.mark.full)
        for name in MODELS
        for attention in ("sdpa", "eager")
        for strategy in (TWO, HYBRID)
        if (name, attention, strategy) not in QUICK and (name, attention) != ("mamba", "eager")
    ),
]


def loss(output: Any, batch: Any) -> Tensor:
    """The model's own, or that of the next words, or anything that depends on every output."""
    if output.get("loss") is not None:
        own: Tensor = output["loss"]
        return own
    if "image_embeds" in output:
        # Its other outputs compare every example with every other, so that shares of a batch have another loss.
        apart: Tensor = (output["image_embeds"] - output["text_embeds"]).square().mean()
        return apart
    if "logits" in output and output["logits"].shape[-1] == WORDS:
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), batch["input_ids"].flatten())
    total: Tensor = sum(each.square().mean() for each in tensors_of(output) if each.is_floating_point())  # type: ignore[assignment]
    return total


def job(model: Callable[[], nn.Module], name: str, steps: int = 3) -> hr.Job:
    torch.manual_seed(3)
    return hr.Job(
        model=model,
        loss=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=MODELS[name][1](11),
        global_batch_size=4,
        steps=steps,
        seed=1,
    )


def in_blocks(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention", "strategy"), CASES)
def test_a_model_as_it_comes_is_one_device_and_blocks_are_halved(
    name: str, attention: str, strategy: hr.Strategy
) -> None:
    """The last batch of an epoch has 3 examples, of which two replicas have an uneven share."""
    given = job(functools.partial(build, name, attention), name)
    held: dict[str, int] = {}

    def look(worker: hr.Worker) -> None:
        if worker.rank == 0:
            held.update({path: each.numel() for path, each in worker.model.named_parameters() if in_blocks(path)})
        for batch in worker.batches():
            worker.step(batch)

    outcome = train(given, strategy, loop=look)
    assert distance(outcome.tensors, train(given, hr.OneDevice()).tensors) <= 1e-9
    whole = sum(math.prod(each.shape) for path, each in build(name).named_parameters() if in_blocks(path))
    assert name not in HALVED or sum(held.values()) <= 0.65 * whole


@pytest.mark.slow
def test_heads_that_devices_cannot_share_stay_whole_and_that_is_said(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=32,
    )  # fmt: skip
    given = job(lambda: LlamaForCausalLM(config).double(), "llama", steps=1)
    run = hr.fit(given, TWO, device="cpu", run_dir=tmp_path, engine=hr.ThreadEngine())
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert (
        "left whole on every device: model.layers.*.self_attn: it has 1 heads, which 2 devices cannot share evenly"
    ) in said
    assert any("column model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj; row" in line for line in said)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_processes_train_with_dropout_and_go_on_from_a_checkpoint_on_one_device(dropout: float, tmp_path: Path) -> None:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=4, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout,
    )  # fmt: skip
    make = functools.partial(_gpt2, config)
    with LocalEngine() as engine:
        hr.fit(job(make, "gpt2", 2), TWO, device="cpu", run_dir=tmp_path, engine=engine)
        run = hr.fit(job(make, "gpt2", 4), hr.OneDevice(), device="cpu", run_dir=tmp_path, engine=engine, resume=True)
    assert all(each.isfinite().all() for each in run.model.state_dict().values())
    if not dropout:
        alone = train(job(make, "gpt2", 4), hr.OneDevice()).tensors
        assert distance(run.model.state_dict(), alone) <= 1e-9


def _gpt2(config: Any) -> nn.Module:
    from transformers import GPT2LMHeadModel

    made: nn.Module = GPT2LMHeadModel(config).double()
    return made
