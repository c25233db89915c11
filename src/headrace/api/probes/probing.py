"""Runs the probes over a job, and chooses what a run says of their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, product
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from headrace.api.checks import JobInfo
from headrace.api.probes.carried_state import CARRIED, COUNTED, probe_carried_state
from headrace.api.probes.changing_buffers import probe_changing_buffers, probe_written_parameters
from headrace.api.probes.finding import Finding, Scope
from headrace.api.probes.known_layers import is_known
from headrace.api.probes.layers import probe_batch_norm, probe_draws_and_reads, probe_rows
from headrace.api.probes.losses import probe_left_behind
from headrace.api.probes.parts.gradients import probe_gradients
from headrace.api.probes.parts.hooks import probe_parameter_hooks
from headrace.api.probes.parts.router_loss import probe_router_loss
from headrace.api.probes.parts.sample import Sample
from headrace.api.probes.parts.split_loss import probe_split_loss, probe_split_metrics
from headrace.api.probes.reading import probe_reading
from headrace.batches import call, select_target
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.errors import DataError, JobError, UsageError, in_one_line
from headrace.policies.roles import pieces_of
from headrace.spec.job import Job, Share
from headrace.spec.plan import Plan, cuts_shares, has_stages
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import run_forward, trial
from headrace.training.whole_model import cut
from headrace.worker.evaluations.accumulated import accumulates
from headrace.worker.session import objectives_of

Probe = Callable[[Sample], Sequence[Finding]]

PROBES: tuple[Probe, ...] = (
    probe_split_loss,
    probe_router_loss,
    probe_changing_buffers,
    probe_written_parameters,
    probe_draws_and_reads,
    probe_carried_state,
    probe_parameter_hooks,
    probe_gradients,
    probe_rows,
)
_OF_ANY = (probe_draws_and_reads, probe_parameter_hooks, probe_rows)
"""Those of models of known layers, too."""
_LEAST, _MOST, _MOST_OF_SMALL = 4, 8, 32
"""Examples of the batch: at least two halves of two, because BatchNorm takes no batch of one."""
_SMALL = 1_000_000
"""Parameters of a small model: of more examples, more likely some are masked or of another class."""
_BATCHES = 3
"""For the loss of a small model."""
_MOST_S = 0.05
"""What a forward of more than `_MOST` examples may take."""
_SEEN = 16
"""Batches of which the first with as many is taken: a filter or a collate function may leave out examples."""


def probe(job: Job, module: nn.Module, *objectives: Objective, probes: Iterable[Probe] = PROBES) -> tuple[Finding, ...]:
    """Runs the probes with each objective on some examples of the job's data."""
    shares = _some_shares(job, job.data, module if probe_split_loss in probes else None, 1 if job.task else _BATCHES)
    if not shares:
        return ()
    share, *others = shares
    findings: list[Finding] = []
    if probe_split_loss in probes:
        try:
            findings += probe_reading(job, module, objectives[0])
        except Exception as error:  # whatever a user's data or model raises
            findings.append(_left_out("the data were not read again in parts", error))
    try:
        cut(share.batch, 0, 1, share.examples, "a probe")
    except DataError as error:
        return (*findings, _left_out("the batch cannot be cut into parts", error))
    try:
        if share.examples > _MOST and _is_slow(module, share, objectives[0]):
            share, others = replace(share, batch=cut(share.batch, 0, _LEAST, share.examples), examples=_LEAST), []
    except Exception as error:  # whatever a user's model raises
        return (*findings, _left_out(f"the model failed on part of a batch of {share.examples} examples", error))
    known = [is_known(module, objective) for objective in objectives]
    for each, (objective, is_plain) in product(probes, zip(objectives, known, strict=True)):
        if is_plain and each not in _OF_ANY:
            continue
        try:
            findings += each(Sample(module, share.batch, objective))
        except Exception as error:  # whatever a user's model raises
            findings.append(_left_out(f"the model failed on part of a batch of {share.examples} examples", error))
    if job.task is None and probe_split_loss in probes and not findings:
        # One batch of the data may be all alike; the loss of a task is a mean of any.
        samples = [Sample(module, other.batch, objectives[0]) for other in others]
        findings += [each for sample in samples for each in probe_split_loss(sample)]
    # What two losses both show is said once.
    return tuple(dict.fromkeys(findings))


def _is_slow(module: nn.Module, share: Share, objective: Objective) -> bool:
    """Whether so many examples take long."""
    batch = cut(share.batch, 0, _LEAST, share.examples)
    began = perf_counter()
    with trial(module):
        run_forward(module, batch, objective)
    return (perf_counter() - began) * share.examples / _LEAST > _MOST_S


def probe_metrics(job: Job, module: nn.Module) -> tuple[Finding, ...]:
    """Runs the job's own metrics on some examples of its evaluation data, whole and in parts."""
    metrics = {name: metric for name, metric in (job.metrics or {}).items() if not accumulates(metric)}
    shares = _some_shares(job, job.eval_sets[""], module, 1) if metrics and job.eval_sets else []
    if not shares:
        return ()

    def taken(batch: Any) -> tuple[Any, Any]:
        return call(module, batch, job.inputs), select_target(batch, job.target)

    try:
        return tuple(probe_split_metrics(module, shares[0].batch, taken, metrics))
    except Exception as error:  # whatever a user's metric raises
        return (_left_out(f"a metric failed on part of a batch of {shares[0].examples} examples", error),)


def _some_shares(job: Job, data: Any, module: nn.Module | None, most: int) -> list[Share]:
    """Returns small batches of examples from all over the data, none where there are too few.

    Several, and larger ones, for a small model whose loss is compared.
    """
    pipeline, _ = as_pipeline(data)
    small = module is not None and sum(map(Tensor.numel, module.parameters())) < _SMALL
    count = min(_MOST_OF_SMALL if small else _MOST, max(_LEAST, job.global_batch_size), len(pipeline))
    loader = Loader(pipeline, job.seed, count, (1,), 0, ordered=True)
    large = (share for share in islice(loader.spread(), _SEEN) if share.examples >= _LEAST)
    return list(islice(large, most if small else 1))


def _left_out(reason: str, error: Exception) -> Finding:
    return Finding(
        f"{reason}: {in_one_line(error)}",
        "not probed",
        "compare a short run with one_device yourself",
        Scope.EQUALITY,
    )


def require_outputs_alone(job: Job, module: nn.Module, *objectives: Objective) -> None:
    """Raises a UsageError where the loss looks at more of forward than its output."""
    for finding in probe(job, module, *objectives, probes=(probe_left_behind,)):
        if finding.refused:
            raise UsageError(finding.line)


def run_probes(info: JobInfo, plan: Plan, equals: bool = True, threads: bool = False) -> tuple[str, ...]:
    """Runs the probes that find what a run under a plan says, and returns its lines; see `said_by`.

    `threads` tells whether workers are threads of one process.

    Raises:
        JobError: forward carries something from batch to batch, and the plan has stages, which do not.
    """
    job, accumulate = info.job, info.job.options.accumulate
    findings = (*probe_metrics(job, info.module), *_clipped(job))
    probes = PROBES if _scopes(plan, accumulate) else (probe_carried_state, probe_rows)
    probes += (probe_left_behind,) if threads and not has_stages(plan) else ()
    # Where experts are divided, the router's loss is that of all workers' tokens.
    with _without_router_loss(info):
        findings += probe(job, info.module, *objectives_of(job, info.module, info.weighed), probes=probes)
    if job.options.batch_norm == "local":
        findings += probe_batch_norm(info.module, pieces_of(plan, job.global_batch_size, accumulate))
    said = said_by(findings, plan, accumulate, equals)
    lost = (CARRIED, COUNTED) if cuts_shares(plan) else (CARRIED,)
    if has_stages(plan) and (carried := [each for each in findings if each.what in lost]):
        raise JobError(
            f"{plan.strategy} runs each micro-batch by stages, which carry nothing to the next one, and forward does: "
            f"{carried[0].where}; {carried[0].remedy}, or use a strategy that runs the whole model, as mirrored"
        )
    return said


def _without_router_loss(info: JobInfo) -> AbstractContextManager[None]:
    if not info.model.experts:
        return nullcontext()
    from headrace.expert_parallel.balance import without_router_loss

    return without_router_loss(info.module)


def _clipped(job: Job) -> tuple[Finding, ...]:
    """Returns a finding where gradients are clipped."""
    given = [name for name in ("clip_norm", "clip_value") if getattr(job.options, name) is not None]
    what = (
        "each worker clips the gradient of its own share, before it is summed or applied, so the update is another one"
    )
    remedy = "use mirrored, central_storage or fully_sharded, which clip that of the whole batch"
    return (Finding(what, " and ".join(given), remedy, Scope.OWN_MEANS),) if given else ()


def said_by(findings: Iterable[Finding], plan: Plan, accumulate: int, equals: bool = True) -> tuple[str, ...]:
    """Returns the lines that a run under a plan says.

    Raises:
        UsageError: one is of what cannot be had, and the plan's strategy `equals` one device.
    """
    scopes = {*_scopes(plan, accumulate), Scope.EVALUATION, Scope.START, Scope.STATE}
    said = [finding for finding in findings if finding.scope in scopes]
    for finding in said:
        if finding.refused and equals:
            raise UsageError(finding.line)
    return tuple(finding.line for finding in said)


def _scopes(plan: Plan, accumulate: int) -> set[Scope]:
    scopes = {Scope.SHARES, Scope.PIECES} if cuts_shares(plan) or accumulate > 1 else set()
    if plan.workers > 1:
        scopes.add(Scope.PROCESSES)
    if len(plan.shares) > 1:
        scopes |= {Scope.SHARES, Scope.WORKERS}
        scopes |= set() if plan.assigns_data or plan.min_workers else {Scope.OWN_MEANS}
    return scopes
