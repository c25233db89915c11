"""Models of the transformers library, as they come, split by heads: equal to one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.zoo.models import TRANSFORMERS, job_of
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Notice
from strategies.contract_runs import distance, train

TWO = hr.TensorParallel(devices=2)
HYBRID = hr.Hybrid(hr.Mirrored(workers=2), TWO)
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in ("bert-mlm", "roberta", "distilbert", "bart", "whisper", "vit", "mamba", "clip", "t5")
    },
    **{name: (f"{name}-padded", GROUPED) for name in ("llama", "qwen2", "mixtral")},
    "gpt2": ("gpt2-padded", {}),
    "qwen3": ("qwen2-padded", {**GROUPED, "head_dim": 4}),
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
}
"""By name: the one of the zoo that it is like, and what is different."""
HALVED = ("bert-mlm", "gpt2", "t5", "llama", "qwen2", "vit", "whisper")
"""Of which each of two devices holds at most 0.65 of the parameters of blocks."""

QUICK = (("bert-mlm", "sdpa", TWO), ("gpt2", "eager", TWO), ("t5", "sdpa", TWO), ("llama", "sdpa", HYBRID))
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


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """Returns a model in double precision."""
    like, changes = MODELS[name]
    entry: Any = TRANSFORMERS[like].model
    kinds = ("Qwen3ForCausalLM", "Qwen3Config") if name == "qwen3" else entry.args
    made = entry.func(*kinds, **{**entry.keywords, **changes})
    if name != "mamba":
        made.set_attn_implementation(attention)
    return made.double()  # type: ignore[no-any-return]


def job(model: Callable[[], nn.Module], name: str, steps: int = 4) -> hr.Job:
    """The fourth batch has one example, so that one of two replicas has none."""
    like = job_of(MODELS[name][0], learning_rate=0.05)
    return replace(like, model=model, eval_data=None, global_batch_size=3, epochs=None, steps=steps)


def in_blocks(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention", "strategy"), CASES)
def test_a_model_as_it_comes_is_one_device_and_blocks_are_halved(
    name: str, attention: str, strategy: hr.Strategy
) -> None:
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
    # Of which the heads of keys and values are one.
    given = job(lambda: TRANSFORMERS["llama"].model().double(), "llama", steps=1)
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
    make = functools.partial(dropping, dropout)
    with LocalEngine() as engine:
        hr.fit(job(make, "gpt2", 2), TWO, device="cpu", run_dir=tmp_path, engine=engine)
        run = hr.fit(job(make, "gpt2", 4), hr.OneDevice(), device="cpu", run_dir=tmp_path, engine=engine, resume=True)
    assert all(each.isfinite().all() for each in run.model.state_dict().values())
    if not dropout:
        alone = train(job(make, "gpt2", 4), hr.OneDevice()).tensors
        assert distance(run.model.state_dict(), alone) <= 1e-9


def dropping(rate: float) -> nn.Module:
    model: Any = TRANSFORMERS["gpt2"].model
    return model(resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate).double()  # type: ignore[no-any-return]
