"""Are the examples the same when they are read again, and a batch of a part of them the part of the batch?"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import nn

from headrace.api.probes.finding import Finding, Scope, names_of
from headrace.api.probes.parts.split_loss import bounds_of_parts, loss_apart
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.data.pipeline.parts import COMBINES, differences
from headrace.data.pipeline.source import ArraySource
from headrace.spec.job import Job
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import drawn
from headrace.training.user_code.untouched import same_generators

_LEAST, _MOST = 4, 8
"""Examples that are read."""
_MOST_S = 0.5
"""What reading them may take."""
_WHERE = "the data"


def probe_reading(job: Job, module: nn.Module, objective: Objective) -> Sequence[Finding]:
    """Reads some examples twice as one batch, and in parts, as workers do."""
    pipeline, _ = as_pipeline(job.data)
    batching = pipeline.batching
    users = pipeline.steps or batching.collate or batching.pad is not None
    count = min(_MOST, max(_LEAST, job.global_batch_size), len(pipeline))
    if count < 2 or (isinstance(pipeline.source, ArraySource) and not users):
        return ()
    loader = Loader(pipeline, job.seed, count, (1,), 0, ordered=True)
    with torch.random.fork_rng(devices=[]), same_generators():
        before, began = drawn(), perf_counter()
        whole = loader.first(0, count)
        if (seconds := perf_counter() - began) > _MOST_S:
            return (_slow(count, seconds),)
        draws = drawn() != before
        again = loader.first(0, count)
        parts = [loader.first(*bounds) for bounds in bounds_of_parts(count)]
    if changed := [name for name, _ in differences(whole.batch, [again.batch])]:
        return (_random() if draws else _changing(changed),)
    if draws or not whole.examples or not all(part.examples for part in parts):
        return ()
    found = dict(differences(whole.batch, [part.batch for part in parts]))
    apart = loss_apart(module, objective, whole, parts) if found else None
    if apart is None:
        return ()
    problem = COMBINES if COMBINES in found.values() else next(iter(found.values()))
    return (
        Finding(
            f"a batch {problem}, see {names_of(list(found))}, and each worker makes one of its share: the loss of "
            f"{whole.examples} examples is {apart[0]:.6g}, the weighted mean of those of their parts {apart[1]:.6g}",
            _WHERE,
            "let model and loss ignore what is padded, or pad to one length"
            if problem != COMBINES
            else "make examples one by one in the data set, or use one_device",
            Scope.WORKERS,
        ),
    )


def _slow(count: int, seconds: float) -> Finding:
    return Finding(
        f"reading {count} examples takes {seconds:.2g} s, so it was not tried whether they are alike in other batches",
        _WHERE,
        "compare a short run with one_device yourself",
        Scope.EQUALITY,
    )


def _random() -> Finding:
    return Finding(
        "reading it draws random numbers, others in each process, so no number equals one device's exactly",
        _WHERE,
        "draw them from the parameter rng of a function in hr.data's map",
        Scope.EQUALITY,
    )


def _changing(names: list[str]) -> Finding:
    return Finding(
        f"examples are others when they are read again ({names_of(names)}), and no global random numbers were drawn: a "
        "counter, a generator of its own, the time or the process decides; each worker has its own, equal ones at the "
        "start, and no checkpoint has it",
        _WHERE,
        "let an example depend on its index alone, or on the parameter rng of a function in hr.data's map",
        Scope.STATE,
    )
