"""Adapters of peft under each strategy: those of a plain loop, and the base as it was; saved as peft saves them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace as hr
from fine_tuning.models import EVERYWHERE, job_of, llama, peft, plain, with_adapters
from headrace.errors import UsageError
from headrace.spec.events import Notice

pytestmark = pytest.mark.slow

EQUAL: dict[str, hr.Strategy] = {
    "mirrored": hr.Mirrored(3),
    "central_storage": hr.CentralStorage(2),
    "parameter_server": hr.ParameterServer(2, staleness_bound=0),
    "fully_sharded": hr.FullySharded(3),
    "pipeline": hr.Pipeline(2),
    "tensor_parallel": hr.TensorParallel(2),
    "sharded replicas": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "sharded slices": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "replicas of stages": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
}
USUAL = ("mirrored", "parameter_server", "fully_sharded", "pipeline", "tensor_parallel")
"""Each way to divide a model or its state once; hybrids train adapters as their levels do."""
APART: dict[str, hr.Strategy] = {
    "parameter_averaging": hr.ParameterAveraging(2),
    "downpour": hr.Downpour(2),
    "gossip": hr.Gossip(2),
}
THREADS = hr.ThreadEngine()


@functools.cache
def expected() -> dict[str, Tensor]:
    return plain(job_of())


def require_trained(run: hr.Run, right: dict[str, Tensor]) -> None:
    found = dict(run.model.named_parameters())
    assert {f"-{name}" for name in found} == {name for name in right if name.startswith("-")}
    for name, each in found.items():
        assert float((each.detach() - right[name]).abs().max()) <= 1e-9, name
        # The base is bit for bit what it was, and adapters are not.
        assert torch.equal(each, right[f"-{name}"]) == ("lora_" not in name), name


@pytest.mark.every
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in USUAL)) for name in EQUAL])
def test_adapters_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    # Half of the steps, a checkpoint, and the others.
    hr.fit(job_of(steps=2), EQUAL[name], device="cpu", engine=THREADS, run_dir=tmp_path)
    run = hr.fit(job_of(), EQUAL[name], device="cpu", engine=THREADS, run_dir=tmp_path, resume=True)
    require_trained(run, expected())


@pytest.mark.parametrize("name", APART)
def test_the_base_stays_where_workers_are_apart(name: str) -> None:
    run = hr.fit(job_of(), APART[name], device="cpu", engine=THREADS)
    before = expected()
    for key, each in run.model.named_parameters():
        assert torch.equal(each, before[f"-{key}"]) == ("lora_" not in key), key


def test_a_checkpoint_of_shards_goes_on_in_slices(tmp_path: Path) -> None:
    hr.fit(job_of(steps=2), hr.FullySharded(2), device="cpu", engine=THREADS, run_dir=tmp_path)
    require_trained(hr.fit(job_of(), hr.TensorParallel(2), device="cpu", run_dir=tmp_path, resume=True), expected())


def test_adapters_are_saved_as_peft_reads_them(tmp_path: Path) -> None:
    run = hr.fit(job_of(), hr.FullySharded(2), device="cpu", engine=THREADS)
    where = run.save_pretrained(tmp_path / "adapters")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {each.name for each in where.iterdir()}
    torch.manual_seed(5)
    read = peft.PeftModel.from_pretrained(llama(), where).double()
    trained = run.model.state_dict()
    for name, each in read.state_dict().items():
        if "lora_" in name:
            assert torch.equal(each, trained[name]), name


def unfrozen() -> Any:
    made = with_adapters()
    made.base_model.model.lm_head.weight.requires_grad_(True)
    return made


def test_what_is_trained_and_no_adapter_is_not_lost(tmp_path: Path) -> None:
    run = hr.fit(job_of(unfrozen, steps=1), device="cpu", engine=THREADS)
    with pytest.raises(UsageError, match=r"1 trained parameters are none of the adapters'.*lm_head\.weight"):
        run.save_pretrained(tmp_path / "adapters")
    kept = functools.partial(with_adapters, modules_to_save=["lm_head"])
    run = hr.fit(job_of(kept, steps=1), device="cpu", engine=THREADS)
    assert run.save_pretrained(tmp_path / "adapters").is_dir()


ODD: dict[str, dict[str, Any]] = {
    "attention alone": {"target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised": {"use_rslora": True},
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "dropout": {"lora_dropout": 0.3},
}


@pytest.mark.parametrize("name", ODD)
def test_layers_with_adapters_are_divided(name: str) -> None:
    job = job_of(functools.partial(with_adapters, **ODD[name]), steps=3)
    # Threads share a generator.
    engine = None if name == "dropout" else THREADS
    run = hr.fit(job, hr.TensorParallel(2), device="cpu", engine=engine)
    alone = hr.fit(job, device="cpu", engine=engine).model.state_dict()
    for key, each in run.model.state_dict().items():
        assert float((each - alone[key]).abs().max()) <= 1e-9, key
    said = " ".join(event.text for event in run.events if isinstance(event, Notice))
    assert "left whole" not in said
    for layer in EVERYWHERE:
        assert layer in said or "..." in said


def test_adapters_that_read_the_base_stay_whole_and_that_is_said() -> None:
    job = job_of(functools.partial(with_adapters, use_dora=True), steps=3)
    run = hr.fit(job, hr.TensorParallel(2), device="cpu", engine=THREADS)
    alone = hr.fit(job, device="cpu", engine=THREADS).model.state_dict()
    assert all(float((each - alone[key]).abs().max()) <= 1e-9 for key, each in run.model.state_dict().items())
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert any("q_proj.base_layer: it has a parameter that" in line for line in said)


def test_blocks_are_halved() -> None:
    held: dict[str, int] = {}

    def look(worker: hr.Worker) -> None:
        if worker.rank == 0:
            held.update({name: each.numel() for name, each in worker.model.named_parameters() if "layers" in name})
        for batch in worker.batches():
            worker.step(batch)

    hr.launch(look, job_of(steps=1), hr.TensorParallel(2), device="cpu", engine=THREADS)
    whole = {name: each.numel() for name, each in with_adapters().named_parameters() if "layers" in name}
    base = [name for name in whole if "base_layer" in name]
    assert sum(held[name] for name in base) * 2 == sum(whole[name] for name in base)
    assert sum(held.values()) <= 0.65 * sum(whole.values())
