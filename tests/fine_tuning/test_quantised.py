"""Adapters on a base of few bits, whose scales are no parameters: those of a plain loop, or refused by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from fine_tuning.models import VOCABULARY, job_of, llama, peft, plain
from headrace.api.run import load_model
from headrace.errors import CheckpointMismatch, JobError, UsageError
from headrace.worker.run_spec import model_path

THREADS = hr.ThreadEngine()
EQUAL: dict[str, hr.Strategy] = {
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(2),
    "parameter_server": hr.ParameterServer(2, staleness_bound=0),
    "fully_sharded": hr.FullySharded(2),
    "pipeline": hr.Pipeline(2),
    "hybrid": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
}
DIVIDED = (
    hr.TensorParallel(2),
    hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2)),
    hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
)


class Packed(nn.Module):
    """Weights of 8 bits and a scale, which is written beside them and not read, as bitsandbytes does."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}weight.scale"] = self.scale


class Adapted(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.lora_down = nn.Parameter(torch.randn(2, width, dtype=torch.float64))
        self.lora_up = nn.Parameter(torch.randn(width, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) + x @ self.lora_down.T @ self.lora_up.T
        return made


class Reader(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        values = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(base))
        self.tokens = nn.Embedding(VOCABULARY, 16, dtype=torch.float64).requires_grad_(False)
        self.mixed = Adapted(Packed(values), 16)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:
        logits = self.mixed(self.tokens(input_ids)) @ self.tokens.weight.T
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


class Output(dict[str, Tensor]):
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        super().__init__(loss=loss, logits=logits)
        self.loss = loss


def of_bitsandbytes(base: int) -> Any:
    """A Llama of which each linear layer is in 4 bits, with adapters of peft; all else in double precision."""
    bnb = importlib.import_module("bitsandbytes")

    class Exact(bnb.nn.Linear4bit):  # type: ignore[misc, name-defined]
        """Its own kernel of CPUs has no double precision: it returns what is no number."""

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, bnb.functional.dequantize_4bit(self.weight, self.weight.quant_state).to(x.dtype))

    made = llama()
    for name, part in list(made.named_modules()):
        if isinstance(part, nn.Linear) and name != "lm_head":
            few = Exact(part.in_features, part.out_features, bias=False, quant_type="nf4")
            values = torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(base))
            few.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4")
            made.set_submodule(name, few.to("cpu"))
    made.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(made, config).double()


MODELS: dict[str, Callable[[int], Any]] = {"bitsandbytes": of_bitsandbytes, "packed": Reader}


def of_base(name: str, base: int = 1) -> Callable[[], Any]:
    if name == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    return functools.partial(MODELS[name], base)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", EQUAL)
def test_adapters_are_those_of_a_plain_loop(name: str, model: str, tmp_path: Path) -> None:
    make = of_base(model)
    given: dict[str, Any] = {"device": "cpu", "engine": THREADS, "run_dir": tmp_path}
    hr.fit(job_of(make, steps=2), EQUAL[name], **given)
    run = hr.fit(job_of(make), EQUAL[name], **given, resume=True)
    right = plain(job_of(make))
    for key, each in run.model.named_parameters():
        assert torch.equal(each, right[f"-{key}"]) == ("lora_" not in key), key
        assert float((each.detach().double() - right[key].double()).abs().max()) <= 1e-9, key
    made = make().state_dict()
    beside = [key for key in made if key not in dict(run.model.named_parameters())]
    assert beside
    assert all(torch.equal(run.model.state_dict()[key], made[key]) for key in beside)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DIVIDED, ids=str)
def test_where_models_are_divided_it_is_refused(strategy: hr.Strategy) -> None:
    with pytest.raises(UsageError, match=r"weight.scale'.*: the model's state_dict makes these tensors of others"):
        hr.fit(job_of(of_base("packed")), strategy, device="cpu", engine=THREADS)


@pytest.mark.slow
def test_a_base_of_other_values_is_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "engine": THREADS, "run_dir": tmp_path}
    hr.fit(job_of(of_base("packed"), steps=2), **given)
    with pytest.raises(UsageError, match=r"writes 'mixed.layer.weight.scale' and does not read it"):
        load_model(Reader(2), model_path(tmp_path))
    with pytest.raises(CheckpointMismatch, match=r"'mixed.layer.weight' has other values, and others beside it"):
        hr.fit(job_of(of_base("packed", 2)), **given, resume=True)


class Composed(Tensor):
    """What torchao's tensors are: several ones."""

    def __tensor_flatten__(self) -> Any: ...


def of_several() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    made[0].weight = nn.Parameter(torch.ones(2, 2).as_subclass(Composed), requires_grad=False)  # type: ignore[assignment]
    return made


def test_tensors_that_hold_several_are_refused() -> None:
    with pytest.raises(JobError, match=r"'0.weight' is a Composed of .*, which holds several tensors"):
        hr.fit(job_of(of_several), device="cpu", engine=THREADS)


def test_numbers_whose_scales_a_first_forward_takes_are_refused_by_name() -> None:
    class Int8Params(nn.Parameter):
        """As bitsandbytes has them."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Int8Params(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
            self.lora = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.lora(x)
            return made

    data = torch.ones(8, 8)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    job = hr.Job(model=Base, loss=F.mse_loss, optimizer=sgd, data=(data, data), global_batch_size=4, steps=1)
    with pytest.raises(JobError, match=r"'weight' is in 8 bits of bitsandbytes on a CPU: its first forward takes"):
        hr.fit(job, "one_device", device="cpu")
