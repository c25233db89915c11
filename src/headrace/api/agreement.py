"""What all processes of a launcher must have in common before they train one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

from headrace.api.checks import JobInfo
from headrace.data.cache.fingerprint import fingerprint
from headrace.data.given import as_pipeline
from headrace.data.pipeline.source import ArraySource
from headrace.engine.torchrun.agreement import require_same
from headrace.engine.torchrun.store import gather, of_first
from headrace.machine.identity import versions
from headrace.strategies import Strategy
from headrace.worker.attributes import SameBuild

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""In the text of a function: another one in each process."""


def require_alike(info: JobInfo, strategy: Strategy, encrypt: bool) -> None:
    """Compares the facts of all ranks, and gives the model the attributes of rank 0's; all ranks call it together.

    Raises:
        UsageError: some rank has other facts than rank 0.
        JobError: an attribute cannot be replaced.
    """
    require_same(facts_of(info, strategy, encrypt))
    build = info.job.model
    if isinstance(build, SameBuild):
        text = build.text()
        if len(set(gather(fingerprint(text)))) > 1:
            build.take(of_first(lambda: text), info.module)


def facts_of(info: JobInfo, strategy: Strategy, encrypt: bool) -> Mapping[str, str]:
    """Returns what must be the same on all ranks, by name; of the data a few rows, because all would take long."""
    job = info.job
    parameters = [(each.name, each.shape, each.dtype) for each in info.model.parameters]
    facts = {
        **versions(),
        "strategy": _text(strategy),
        "encrypt": str(encrypt),
        "global_batch_size": str(job.global_batch_size),
        "epochs": str(job.epochs),
        "steps": str(job.steps),
        "seed": str(job.seed),
        **{f"Options({field.name})": _text(getattr(job.options, field.name)) for field in fields(job.options)},
        "the model": f"{len(parameters)} parameters with digest {fingerprint(parameters)[:12]}",
    }
    pipeline, _ = as_pipeline(job.data)
    if pipeline.hosts is None:
        source = pipeline.source
        sample = f", some with digest {source.sample_digest()[:12]}" if isinstance(source, ArraySource) else ""
        facts["the data"] = f"{info.examples:,} examples{sample}"
    return facts


def _text(value: object) -> str:
    return _ADDRESS.sub("", repr(value))
