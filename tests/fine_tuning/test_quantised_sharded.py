"""A base of few bits that workers have divided: what each holds, what is saved, and what is refused by name."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from collectives.seats import together
from fine_tuning.models import Rows, job_of, llama, peft, plain
from fine_tuning.test_quantised import Reader, of_base
from headrace.errors import UsageError
from headrace.modules import beside_frozen
from headrace.spec.events.worker import WorkerEnded
from headrace.strategies.broadcast import broadcast
from headrace.worker import main

THREADS = hr.ThreadEngine()


def of_kernel(storage: torch.dtype = torch.uint8, double: bool = False) -> Any:
    """A Llama as transformers and peft make it, in single precision; `double` quantises the scales, too."""
    bnb = importlib.import_module("bitsandbytes")
    made = llama(hidden_size=64, intermediate_size=96).float()
    given: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": double, "quant_storage": storage}
    for name, part in list(made.named_modules()):
        if isinstance(part, nn.Linear) and name != "lm_head":
            few = bnb.nn.Linear4bit(part.in_features, part.out_features, bias=False, **given)
            few.weight = bnb.nn.Params4bit(part.weight.data, requires_grad=False, module=few, **given)
            made.set_submodule(name, few.to("cpu"))
    made.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(made, config)


def given(tmp_path: Path) -> dict[str, Any]:
    return {"device": "cpu", "engine": THREADS, "run_dir": tmp_path}


def of_parts(run: hr.Run) -> list[int]:
    return [each.parameter_bytes for each in run.events if isinstance(each, WorkerEnded)]


def written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathers(*_: Any) -> None:
        raise AssertionError("one process gathers the whole model")

    monkeypatch.setattr(main, "_leave_gathered", gathers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "double"), [(torch.uint8, False), (torch.uint8, True), (torch.bfloat16, True)], ids=str
)
def test_with_its_own_kernel_numbers_are_those_of_a_plain_loop(
    storage: torch.dtype, double: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    written_in_parts(monkeypatch)
    # Adam would make the rounding of small gradients large, and each further step makes it some four times as large.
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    job = job_of(functools.partial(of_kernel, storage, double), optimizer=sgd, steps=3)
    right = plain(job)
    # On some processors the kernel packs a weight that it meets in eval mode, and has no backward then.
    run = hr.fit(replace(job, eval_data=Rows()), hr.FullySharded(2), **given(tmp_path))
    named = dict(run.model.named_parameters())
    assert of_parts(run) == [sum(each.nbytes for each in named.values()) // 2] * 2
    for key, each in named.items():
        if each.requires_grad:
            each = each.detach()
            # Sums in single precision, in another order.
            assert float((each - right[key]).abs().max()) <= 1e-6, key
            assert float((each - right[f"-{key}"]).abs().max()) >= 1e-3, key
        else:
            assert torch.equal(each.view(torch.uint8), right[key].view(torch.uint8)), key
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        begun = job.model().state_dict()
    state = run.model.state_dict()
    beside = beside_frozen(run.model)
    assert len(beside) == 14 * (3 + 2 * double)
    assert all(torch.equal(state[key], begun[key]) for key in beside)


@pytest.mark.slow
def test_stages_with_its_own_kernel_leave_the_base_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    job = job_of(of_kernel, optimizer=sgd, steps=3, eval_data=Rows())
    right = plain(job)
    for key, each in hr.fit(job, hr.Pipeline(2, 2), **given(tmp_path)).model.named_parameters():
        assert torch.equal(each, right[key]) or (each.requires_grad and (each - right[key]).abs().max() <= 1e-6), key


@pytest.mark.slow
def test_a_plan_counts_the_parts_of_packed_bytes() -> None:
    pytest.importorskip("bitsandbytes")
    held = sum(each.nbytes for each in of_kernel().parameters())
    assert hr.summary(job_of(of_kernel), hr.FullySharded(2)).memory.parameters == held // 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["packed", "bitsandbytes"])
def test_a_checkpoint_goes_on_in_another_layout(model: str, tmp_path: Path) -> None:
    make = of_base(model)
    job, right = job_of(make), plain(job_of(make))
    whole = hr.fit(job, hr.FullySharded(2), **given(tmp_path / "whole")).model.state_dict()
    for name, strategy in (("same", hr.FullySharded(2)), ("four", hr.FullySharded(4)), ("one", "one_device")):
        hr.fit(job_of(make, steps=2), hr.FullySharded(2), **given(tmp_path / name))
        found = hr.fit(job, strategy, **given(tmp_path / name), resume=True).model
        for key, each in found.named_parameters():
            assert float((each.detach().double() - right[key].double()).abs().max()) <= 1e-9, (name, key)
        state = found.state_dict()
        assert state.keys() == whole.keys()
        assert name != "same" or all(torch.equal(each, whole[key]) for key, each in state.items())


@pytest.mark.slow
def test_layers_that_run_again_in_backward_have_their_scales() -> None:
    make = of_base("bitsandbytes")
    right = plain(job_of(make))
    job = job_of(make, options=hr.Options(recompute="full"))
    run = hr.fit(job, hr.FullySharded(2), device="cpu", engine=THREADS)
    for key, each in run.model.named_parameters():
        assert float((each.detach().double() - right[key].double()).abs().max()) <= 1e-9, key


def of_floats() -> nn.Module:
    made = Reader(1)
    made.mixed.layer.weight = nn.Parameter(made.mixed.layer.weight.view(torch.float32), False)  # type: ignore[union-attr]
    made.mixed.layer.forward = lambda x: x  # type: ignore[union-attr]
    return made


@pytest.mark.slow
def test_numbers_packed_into_floats_are_not_rounded() -> None:
    job = job_of(of_floats, options=hr.Options(precision="bf16"))
    with pytest.raises(UsageError, match=r"'mixed.layer.weight' is frozen, of torch.float32, and has '.*weight.scale'"):
        hr.fit(job, hr.FullySharded(2, param_dtype="bf16"), device="cpu", engine=THREADS)


def test_scales_of_another_process_are_refused() -> None:
    models = [Reader(1), Reader(1), Reader(2)]
    together(2, lambda group: broadcast(models[group.rank], group))

    def differ(group: Any) -> str:
        with pytest.raises(UsageError, match=r"'mixed.layer.weight.scale': .* is not the same in each process") as seen:
            broadcast(models[group.rank + 1], group)
        return str(seen.value)

    assert len(set(together(2, differ))) == 1
