"""The layers of a job's model, measured as a strategy wishes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from headrace.data import Loader, as_pipeline
from headrace.errors import UnfitMachine
from headrace.memory import give_back
from headrace.pipeline.out_of_memory import out_of_memory
from headrace.pipeline.profile.layers import MeasuredLayers, profile
from headrace.spec.job import Job
from headrace.spec.model import ProfileRequest
from headrace.training.whole_model import Objective
from headrace.trees import map_tensors

_SAMPLED = 2
"""Examples with which the layers are found."""


def measure(job: Job, module: nn.Module, objective: Objective, wish: ProfileRequest, device: str) -> MeasuredLayers:
    """Measures the layers on the first examples of the job's data.

    What memory that took is given back to the system.

    Args:
        job: what is trained.
        module: its model, which is left as it is.
        objective: its loss.
        wish: the strategy's.
        device: "cpu" or "cuda".

    Raises:
        JobError: the model cannot be cut.
        UnfitMachine: there is not enough memory.
    """
    batch, sample = _first(job, wish.examples), _first(job, _SAMPLED)
    if device != "cpu":
        module = copy.deepcopy(module).to(device)
        batch, sample = map_tensors(lambda tensor: tensor.to(device), (batch, sample))
    autocast = torch.bfloat16 if job.options.precision == "bf16" else None
    try:
        return profile(module, objective, batch, sample=sample, threads=wish.threads or None, autocast=autocast)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UnfitMachine(
            f"there was no memory to measure the layers of {type(module).__name__}, all of them, with a micro-batch of "
            f"{wish.examples} examples: {error}; use more micro-batches, or a machine with more memory"
        ) from error
    finally:
        # Else it would be kept, in a launcher that needs no more of it.
        give_back()


def _first(job: Job, examples: int) -> Any:
    pipeline, _ = as_pipeline(job.data)
    count = max(1, min(examples, len(pipeline)))
    loader = Loader(pipeline, job.seed, count, (1,), 0, ordered=True)
    return next(share.batch for share in loader.sweep(alone=True) if share.examples)
