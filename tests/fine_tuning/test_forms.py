"""What fine-tuning jobs bring: transformers' gradient checkpointing, and several texts packed into one sequence."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace as hr
from fine_tuning.models import LENGTH, Rows, job_of, llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
]
THREADS = hr.ThreadEngine()
STRATEGIES: dict[str, hr.Strategy] = {
    "mirrored": hr.Mirrored(3),
    "fully_sharded": hr.FullySharded(2),
    "tensor_parallel": hr.TensorParallel(2),
    "pipeline": hr.Pipeline(2, 2),
    "parameter_server": hr.ParameterServer(2, staleness_bound=0),
}


class Packed(torch.utils.data.Dataset[Mapping[str, Tensor]]):
    """Two texts a sequence, one behind the other: places begin again at 0, and attention stays inside each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        row, cut = Rows()[index % len(Rows())], 3 + index % 4
        places = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
        texts = (places.diff(prepend=places[:1] - 1) < 0).cumsum(0)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = (later & (texts[:, None] == texts)).unsqueeze(0)
        labels = row["input_ids"].where(places > 0, -100).where(torch.arange(LENGTH) < LENGTH - index, -100)
        return {"input_ids": row["input_ids"], "position_ids": places, "attention_mask": mask, "labels": labels}


def checkpointed() -> Any:
    made = llama()
    made.gradient_checkpointing_enable()
    return made


def job(form: str) -> hr.Job:
    if form == "packed":
        return job_of(llama, data=Packed(), global_batch_size=8, steps=3)
    return job_of(checkpointed, steps=3)


@functools.cache
def alone(form: str) -> dict[str, Tensor]:
    """A plain loop over the whole data."""
    given = job(form)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed)
        model = given.model()  # type: ignore[call-arg]
    model.train()
    optimizer = given.optimizer(model.named_parameters())  # type: ignore[operator]
    batch = torch.utils.data.default_collate([given.data[index] for index in range(len(given.data))])
    for _ in range(given.steps or 0):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.each_value
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("form", ["checkpointed", "packed"])
def test_it_is_a_plain_loop(form: str, name: str) -> None:
    run = hr.fit(job(form), STRATEGIES[name], device="cpu", engine=THREADS)
    right = alone(form)
    for key, each in run.model.named_parameters():
        assert float((each.detach() - right[key]).abs().max()) <= 1e-9, key


def test_forwards_run_again_where_the_model_says_so() -> None:
    calls = [0]

    def counting() -> Any:
        made = checkpointed()
        made.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        return made

    hr.fit(job_of(counting, steps=1), hr.OneDevice(), device="cpu", engine=THREADS, check=False)
    assert calls[0] >= 2
