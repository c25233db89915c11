"""A job against the script that it was made of: the steps that a dry run has seen, made again by the job's parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.api.adoption.facts import Facts, begin_anew, plain, read_examples, read_state, read_steps
from headrace.api.adoption.loop import Unfit
from headrace.api.verification.plain_loop import PlainLoop
from headrace.api.verification.recording import own_objective
from headrace.data.pipeline.source import Epoch
from headrace.modules import copy_module, parameters_and_buffers, set_train_modes
from headrace.spec.job import Job, Share


def prove(job: Job, facts: Facts, folder: Path) -> None:
    """Trains by a plain loop over the job's parts, on the script's own batches.

    Raises:
        Unfit: its parameters, losses or buffers are not those of the script, bit for bit.
    """
    assert isinstance(job.model, nn.Module)
    model = copy_module(job.model)
    set_train_modes(model)
    _compare("the weights that it begins with", model, read_state(folder, 0), buffers=False)
    _compare_data(job.data, folder, facts.examples)
    epoch = -(-(facts.examples - facts.left_out) // facts.batch_size)
    loop = PlainLoop(job, model, own_objective(job, model), epoch, _lend)
    for number, step in enumerate(read_steps(folder, facts.steps)):
        begin_anew(number)
        loop.begin([(0, Share(step.batch, 1, 1, number // epoch))])
        loop.differentiate()
        loop.update()
        if not _equal(float(loop.loss), step.loss):
            raise Unfit(
                f"the loss of step {number} is {float(loop.loss):.9g} by the job, and {step.loss:.9g} in the script"
            )
        _compare(f"what step {number} makes", model, step.after)


def _compare_data(data: Any, folder: Path, count: int) -> None:
    """Compares some examples, for random numbers that make data may have been drawn otherwise."""
    if len(data) != count:
        raise Unfit(f"the job's data has {len(data)} examples, and the script's {count}")
    for place, expected in read_examples(folder, "train", count).items():
        begin_anew(place)
        if not _alike(plain(data.source.example(place, Epoch(0, 0))), expected):
            raise Unfit(f"example {place} of the job's data is another than in the script")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        same = isinstance(other, list | tuple) and len(one) == len(other)
        return same and all(map(_alike, one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.shape == other.shape and torch.equal(one.to(other.dtype), other)
    return bool(one == other)


@contextlib.contextmanager
def _lend(_: int) -> Iterator[None]:
    yield


def _equal(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _compare(what: str, model: nn.Module, expected: dict[str, Tensor], buffers: bool = True) -> None:
    made = dict(parameters_and_buffers(model))
    short = {_plain(name): each for name, each in made.items()}
    for name, tensor in expected.items():
        if not buffers and name.startswith("buffer/"):
            continue
        mine = made.get(name, short.get(name))
        if mine is None:
            raise Unfit(f"{what}: the job's model has no {name}")
        if not torch.equal(mine.detach().cpu(), tensor):
            apart = (mine.detach().double().cpu() - tensor.double()).abs().max()
            raise Unfit(f"{what}: {name} differs from the script's by up to {float(apart):.3g}")


def _plain(name: str) -> str:
    """Returns a name without that of the module that holds the model."""
    kind, _, inner = name.partition("/")
    return f"{kind}/{inner.removeprefix('model.')}"
