"""Adapters on a base whose values are in the files of another model: found by that model's names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headrace as hr
from fine_tuning.models import job_of, llama, peft, plain, with_adapters
from headrace.errors import UsageError

pytestmark = pytest.mark.slow
THREADS = hr.ThreadEngine()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("base")
    torch.manual_seed(77)
    llama().save_pretrained(place)
    return place


def loaded(base: Path, make: Callable[[], Any]) -> Any:
    """What a script does: the base is loaded, and then it gets adapters."""
    made = make()
    values = load_file(base / "model.safetensors")
    for name, each in made.named_parameters():
        if "lora_" not in name:
            short = name.removeprefix("base_model.model.").replace(".base_layer", "")
            each.data.copy_(values[short.replace("modules_to_save.default.", "").replace("original_module.", "")])
    return made


@pytest.mark.every
@pytest.mark.parametrize(
    "strategy", [hr.OneDevice(), hr.FullySharded(2), hr.FullySharded(2, deferred=True), hr.TensorParallel(2)], ids=str
)
def test_the_base_is_read_by_its_own_names(strategy: hr.Strategy, base: Path, tmp_path: Path) -> None:
    make = functools.partial(with_adapters, modules_to_save=["lm_head"])
    run = hr.fit(job_of(make, weights=base), strategy, device="cpu", engine=THREADS)
    right = plain(job_of(functools.partial(loaded, base, make)))
    for name, each in run.model.named_parameters():
        assert float((each.detach() - right[name]).abs().max()) <= 1e-9, name
    where = run.save_pretrained(tmp_path / "adapters")
    read = peft.PeftModel.from_pretrained(llama(), where)
    trained = run.model.state_dict()
    for name, each in read.state_dict().items():
        if "lora_" in name or "modules_to_save" in name:
            assert torch.equal(each.double(), trained[name]), name


def of_the_base(how: str) -> Any:
    """A model whose adapters say so; in double precision peft itself does not compute them."""
    made = with_adapters(use_dora=how == "use_dora=True")
    made.peft_config["default"].init_lora_weights = how
    return made


def test_adapters_that_begin_with_values_of_the_base_are_refused(base: Path) -> None:
    for how in ("use_dora=True", "olora"):
        with pytest.raises(UsageError, match=f"{how}'? computes adapters of the base's values"):
            hr.fit(job_of(functools.partial(of_the_base, how), weights=base), device="cpu", engine=THREADS)


def test_names_that_are_not_the_bases_are_said(base: Path) -> None:
    with pytest.raises(UsageError, match=r"the nearest to the first is 'model\.layers"):
        hr.fit(job_of(functools.partial(with_adapters, 3), weights=base), device="cpu", engine=THREADS)
