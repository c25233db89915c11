"""Checks of a job, before a process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from headrace.api.probes.finding import names_of
from headrace.api.probes.layers import (
    check_frozen,
    check_precision,
    check_trained,
    check_weights,
    lazy_tensors,
    modes_text,
    no_sparse_gradients,
    refuse_composed,
    refuse_sparse_layers,
    require_same_parameters,
)
from headrace.api.probes.losses import check_loss_of_copy, check_loss_parameters, join_loss
from headrace.api.probes.optimizers.probe import OptimizerFindings, probe_optimizer, together
from headrace.api.probes.optimizers.schedules import check_schedule
from headrace.api.probes.parts.explained import called_with, failing_layer, guarded
from headrace.api.probes.sets import Sets, find_sets, try_loss
from headrace.batches import arguments, call, form, select_target
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.data.pipeline.combined import check_cache_folders
from headrace.data.pipeline.order import visits
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.errors import DataError, HeadraceError, InfeasiblePlan, JobError, UnknownName, UsageError
from headrace.machine.versions import notice_of_torch
from headrace.metrics import Mean, weigh
from headrace.modules import copy_module, describe, evaluating, parts_of, set_train_modes
from headrace.report.format import plural
from headrace.spec.job import Job, Share
from headrace.spec.model import ModelSpec
from headrace.spec.parameter_sets import loss_name, one_optimizer
from headrace.spec.patterns import GroupedOptimizer
from headrace.spec.plan import Plan
from headrace.tasks import Task
from headrace.training.embeddings.building import tables_of
from headrace.training.embeddings.updater import RowUpdater, check_tables
from headrace.training.optimizer import require_lbfgs
from headrace.training.user_code.trial import drawn, trial, without_compilers
from headrace.training.user_code.untouched import same_generators, untouched
from headrace.training.whole_model import cut
from headrace.worker.attributes import SameBuild
from headrace.worker.evaluations.accumulated import accumulates, check_accumulated
from headrace.worker.session import alone, make_module, objective_of, objectives_of

_TRIED_EXAMPLES = 2

_forked: list[bool] = []
"""Has an item where this process is a fork of one that has imported this."""

os.register_at_fork(after_in_child=lambda: _forked.append(True))

if TYPE_CHECKING:
    from headrace.training.deferred.parts import Deferral, Parts

T = TypeVar("T")


@dataclass(frozen=True)
class JobInfo:
    """A job that was inspected.

    Attributes:
        job: what runs: the job that was given, or one whose model has been materialised.
        weighed: whether its loss is a `Mean`.
        told: notices that another run has shown, and that are not shown again.
        sets: the names of the parameters of each set, where sets are trained in turns.
        parts: the parameters of `module` that have no memory, of a model that is made in parts; None where it is whole.
    """

    job: Job
    module: nn.Module
    model: ModelSpec
    weighed: bool
    examples: int
    notices: tuple[str, ...]
    told: frozenset[str] = frozenset()
    sets: Sets = field(default_factory=dict)
    parts: Parts | None = None


def inspect_job(job: Job, closures: bool = False, whole_model: bool = True, in_parts: bool = False) -> JobInfo:
    """Builds the job's model and runs it on two examples, with loss and metrics.

    `closures`, `whole_model` and `in_parts` are those of the strategy.

    Raises:
        JobError: the model cannot be built or run, or its optimizer not be made.
        DataError: there is no data, or the target has the wrong form.
        UsageError: the loss is no scalar, the optimizer not usable.
    """
    if not isinstance(job, Job):
        raise UsageError(f"what is trained must be an hr.Job(...), got {type(job).__name__}")
    if _forked:
        # The parent's threads, for which a computation with several would wait for ever, are not in a fork.
        torch.set_num_threads(1)
    if job.task is not None and not isinstance(job.task, Task):
        raise UsageError(f"the job's task must be one of hr.tasks, hr.tasks.multiclass(10), got {job.task!r:.60}")
    _check_early_stopping(job)
    pipeline, said_of_data = as_pipeline(job.data)
    notices = (*notice_of_torch(), *said_of_data)
    check_cache_folders(*(data for data in (pipeline, *job.eval_sets.values()) if isinstance(data, InputPipeline)))
    makers: list[Any] = [each.optimizer for each in job.sets.values()] or [job.optimizer]
    users = (job.loss, job.task, job.metrics, job.inputs, job.target, *makers, job.options.schedule)
    with torch.random.fork_rng(devices=[]), untouched(*users), same_generators():
        given = job.model
        job, module, said, parts = _made(join_loss(job, whole_model), in_parts)
        sets = find_sets(job, module)
        weighed, more = _try(job, module, job.data, "data", sets, parts)
        notices += (*said, *more)
        sample = partial(_sample, job)
        check_loss_parameters(job, module, sample)
        if isinstance(given, nn.Module):
            check_loss_of_copy(job, given, module, sample)
        for name, data in job.eval_sets.items():
            what = f"eval_data[{name.removesuffix('/')!r}]" if name else "eval_data"
            notices += (*_eval_notices(data, what), *_try(job, module, data, what, sets, parts)[1])
        check_trained(module)
        check_frozen(module)
        check_precision(job.options, module)
        if job.options.again is not None:
            from headrace.api.probes.parts.recomputed import check_recompute

            check_recompute(job, module, sample().batch, objectives_of(job, module, weighed), parts is not None)
        found = _try_update(job, module, sets, closures)
        if parts and found.needs.values:
            raise UsageError(
                "the job's optimizer looks at the values of all parameters when it is made, and deferred=True makes "
                "them one by one; leave it out"
            )
    # Each parameter, its gradient, and its optimizer state.
    spec = replace(
        describe(module, found.sliceable), copies=2 + found.kept, optimizer=found.needs, in_parts=parts is not None
    )
    spec = tables_of(module, partial(_row_updater, job), spec)
    check_tables(spec, job.options)
    job = check_weights(job, module, spec)
    # What is said of the data is often said of eval_data, too.
    drops = pipeline.batching.drop_last and pipeline.hosts is None
    examples = visits(len(pipeline), job.global_batch_size, drops)
    return JobInfo(job, module, spec, weighed, examples, tuple(dict.fromkeys(notices)), sets=sets, parts=parts)


def _sample(job: Job) -> Share:
    return _first_share(job, job.data, "data")[0]


def _eval_notices(data: object, what: str) -> tuple[str, ...]:
    """Returns what is said of data to evaluate on, which an error names."""
    try:
        return as_pipeline(data)[1]
    except DataError as error:
        raise DataError(f"{what}: {error}") from error


def _row_updater(job: Job, model: ModelSpec) -> RowUpdater:
    optimizer = one_optimizer(job.optimizer, f"the sparse embedding {model.tables[0].name!r}")
    return RowUpdater(optimizer, model, job.options)


def _try_update(job: Job, module: nn.Module, sets: Sets, closures: bool) -> OptimizerFindings:
    """Makes optimizers and schedules, each over its part of the model; returns what all of them need together."""
    every = []
    parts = parts_of(module, sets) if sets else {"": module}
    for name, part in parts.items():
        own = alone(job, name) if sets else job
        optimizer, named = one_optimizer(own.optimizer, "a set of parameters"), list(part.named_parameters())
        if isinstance(optimizer, GroupedOptimizer):
            optimizer.check(name for name, _ in named)
        of_set = f" of the set {name!r}" if sets else ""
        trial = partial(_try_optimizer, optimizer, named, closures)
        found = guarded(f"the optimizer{of_set} cannot be made", trial)
        if own.options.schedule is not None:
            guarded("the schedule cannot be made", partial(check_schedule, own.options, optimizer, named))
        every.append(replace(found, kept=found.kept + (own.options.ema_decay is not None)))
    return together(every)


def _try_optimizer(
    factory: Callable[..., Any], named: Sequence[tuple[str, Tensor]], closures: bool
) -> OptimizerFindings:
    if closures:
        require_lbfgs(factory, named)
        return OptimizerFindings()
    return probe_optimizer(factory, named)


def _try(
    job: Job, module: nn.Module, data: object, what: str, sets: Sets, parts: Parts | None
) -> tuple[bool, tuple[str, ...]]:
    """Runs the model, the loss and the metrics on the first examples.

    Returns whether the loss is a `Mean`, and the pipeline's notices.
    """
    share, notices = _first_share(job, data, what)
    if job.options.accumulate > 1 and what == "data" and share.examples > 1:
        cut(share.batch, 0, 1, share.examples)
    trained = [each for each in module.parameters() if each.requires_grad]
    with evaluating(module), torch.no_grad(), without_compilers(), untouched(module, but=trained):
        try:
            with no_sparse_gradients(module), _lending(module) if parts else nullcontext():
                weighed, output, target = _try_model(job, module, share, what, sets)
        except HeadraceError as error:
            failure = error
        else:
            _try_metrics(job, output, target, share, what)
            return weighed, notices
    if parts:
        raise JobError(f"{failure}; large parameters had no memory before they were needed: leave out deferred=True")
    return _try_in_train_mode(job, module, share, what, sets, failure), notices


def _try_in_train_mode(
    job: Job, module: nn.Module, share: Share, what: str, sets: Sets, failure: HeadraceError
) -> bool:
    """Tries a model whose loss fails in eval mode, as detection models' do, or raises `failure`; returns as above."""
    try:
        with trial(module), untouched(job.loss, job.task), no_sparse_gradients(module):
            weighed, *_ = _try_model(job, module, share, what, sets)
    except HeadraceError:
        raise failure from failure.__cause__
    if what != "data":
        raise type(failure)(
            f"{failure}. In train mode it can: evaluations run the model in eval mode, where it returns something "
            f"else; let loss and metrics take that, or leave {what} out and evaluate run.model"
        ) from failure.__cause__
    return weighed


def _try_model(job: Job, module: nn.Module, share: Share, what: str, sets: Sets) -> tuple[bool, Any, Any]:
    """Runs model and loss in the mode that they are in; returns whether the loss is a `Mean`, output and target."""
    before = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    output = _run(job, module, share.batch, what)
    require_same_parameters(before, module)
    target = select_target(share.batch, job.target)
    if job.task:
        job.task.check(output, target)
    return _try_losses(job, module, (output, target), share, what, sets), output, target


def _try_metrics(job: Job, output: Any, target: Any, share: Share, what: str) -> None:
    metrics = {**(job.task.metrics if job.task else {}), **(job.metrics or {})}
    for name, metric in metrics.items():
        failure = f"the metric {name!r} cannot be computed on {what}"
        if accumulates(metric):
            guarded(failure, partial(check_accumulated, name, metric, job.task, output, target, share.examples))
        else:
            weigh(guarded(failure, partial(metric, output, target)), share.examples, name)


def _try_losses(job: Job, module: nn.Module, taken: tuple[Any, Any], share: Share, what: str, sets: Sets) -> bool:
    """Computes the loss, or each set's; `taken` is output and target. Returns whether it is a `Mean`."""
    if not sets:
        loss = guarded(
            f"the loss cannot be computed on {what}", lambda: objective_of(job, module).loss(*taken), called_with
        )
        weigh(loss, share.examples, "the loss")
        return isinstance(loss, Mean)
    means = set()
    for name, own in sets.items():
        attempt = partial(try_loss, name, objective_of(alone(job, name), module).loss, module, own, share)
        means.add(isinstance(guarded(f"the loss of {name!r} cannot be computed on {what}", attempt), Mean))
    if len(means) > 1:
        raise UsageError(
            f"some of the losses of {', '.join(sets)} are hr.Mean and others plain scalars; return hr.Mean from all, "
            "with the number of examples as the weight where that is what counts"
        )
    return means == {True}


def _first_share(job: Job, data: object, what: str) -> tuple[Share, tuple[str, ...]]:
    """Returns the first examples, and the pipeline's notices."""
    pipeline, _ = as_pipeline(data)
    loader = Loader(pipeline, job.seed, min(_TRIED_EXAMPLES, len(pipeline)), (1,), 0, ordered=True)
    before = drawn()
    share = next((share for share in loader.sweep(alone=True) if share.examples), None)
    if share is None:
        raise DataError(f"nothing is left of {what}: a filter leaves out every one of {len(pipeline)} examples")
    notices = tuple(loader.counters.notices)
    collator = pipeline.batching.collate
    if collator is not None and drawn() != before:
        notices += (
            f"the collator {collator.name} draws from the process's own random numbers, so that a run that is repeated "
            "or resumed gets other batches; give it a parameter rng, a numpy.random.Generator to draw from",
        )
    return share, notices


def _made(job: Job, in_parts: bool) -> tuple[Job, nn.Module, tuple[str, ...], Parts | None]:
    """Returns the job that runs, its model in the modes that it trains in, and what the user is told of it.

    And the parameters that have no memory, where `in_parts` asks for it and it can be.
    """
    given = isinstance(job.model, nn.Module)
    what = "the model cannot be copied; give a function that builds it" if given else "the model cannot be built"
    build = None if given else job.model if isinstance(job.model, SameBuild) else SameBuild(job.model)
    job = replace(job, model=build or job.model)
    deferral = _deferral(given) if in_parts else None
    if build is not None:
        build.deferral = deferral
    module = guarded(what, lambda: make_module(job))
    if not isinstance(module, nn.Module):
        raise JobError(f"the job's model must be or return a torch.nn.Module, got {type(module).__name__}")
    refuse_composed(module)
    if build is not None and build.quick:
        build.compare(partial(make_module, replace(job, model=build.build)))
    refuse_sparse_layers(module)
    came_in_eval = not module.training
    set_train_modes(module)
    notices = modes_text(module, came_in_eval)
    lazy, parts = lazy_tensors(module), None
    if deferral:
        parts, said = deferral.settle(module)
        notices += (said,)
        if build is not None and not parts:
            build.deferral = None
    if lazy:
        share, _ = _first_share(job, job.data, "data")
        with evaluating(module), torch.no_grad():
            _run(job, module, share.batch, "data")
        if left := lazy_tensors(module):
            raise JobError(
                f"{left[0]!r} has no shape yet, after a batch went through the model; leave out the lazy layer that "
                "forward does not use, or use one that is not lazy"
            )
        # Every worker gets this model: its own would have no shape before its first batch.
        job = replace(job, model=copy_module(module))
        notices += (f"lazy layers got their shapes from the first examples of the data: {names_of(lazy)}",)
    return job, module, notices, parts


def _deferral(given: bool) -> Deferral:
    from headrace.training.deferred.parts import Deferral

    return Deferral("the job has the model itself; give it a function that builds it" if given else "")


def _lending(module: nn.Module) -> AbstractContextManager[None]:
    from headrace.training.deferred.lending import lending

    return lending(module)


def _check_early_stopping(job: Job) -> None:
    option = job.options.early_stopping
    if option is None:
        return
    if job.eval_data is None:
        raise UsageError("early_stopping follows evaluations, and the job has no eval_data; give it some")
    losses = list(map(loss_name, job.sets)) or ["loss"]
    metrics = [*losses, *(job.task.metrics if job.task else ()), *(job.metrics or ())]
    names = [f"{prefix}{name}" for prefix in job.eval_sets for name in metrics]
    if option.metric not in names:
        raise UnknownName("metric for early stopping", option.metric, names)


def _run(job: Job, module: nn.Module, batch: Any, what: str) -> Any:
    def run() -> Any:
        try:
            return call(module, batch, job.inputs)
        except TypeError as error:
            got = f"a batch that is {form(batch)}, it gets {arguments(batch, job.inputs)}; see `inputs` of hr.Job"
            raise TypeError(f"{error}. Of {got}") from error

    return guarded(f"the model cannot be run on {what}", run, partial(failing_layer, module, run))


def check_split(job: Job, info: JobInfo, plan: Plan) -> None:
    """Raises where a plan has more workers than a batch or the data have examples for."""
    count = plan.replicas
    if job.global_batch_size < count:
        raise InfeasiblePlan(
            f"a global batch of {job.global_batch_size} cannot be split among {count} workers; "
            f"use global_batch_size={count} or more, or fewer workers"
        )
    if plan.balances and as_pipeline(job.data)[0].hosts is not None:
        raise InfeasiblePlan(
            "balance='speed' gives a fast worker more examples, and hr.data.local says that each host stores "
            "its own; give every host all data, or use balance='equal'"
        )
    if info.examples < count:
        raise DataError(f"{plural(info.examples, 'example')} for {count} workers; use fewer workers, or give more data")
