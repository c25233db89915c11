"""fit and launch: a job, a strategy, a run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, Dataset, TensorDataset

from headrace.api.arguments import FitArguments, callbacks_of, check_arguments, checkpoints_of, resume_request
from headrace.api.checks import JobInfo, check_split, inspect_job
from headrace.api.probes.layers import refuse_share_of_one
from headrace.api.probes.probing import require_outputs_alone, run_probes
from headrace.api.probes.sets import plan_of, require_turns
from headrace.api.resume import describe_run
from headrace.api.run import Run
from headrace.api.run_directory import TemporaryRunDir
from headrace.api.supervision import supervise
from headrace.data.given import as_pipeline
from headrace.devices import AUTO, HOST, kind_of, notice_of_auto
from headrace.engine.base import FASTER, LEFT, NOT_ENCRYPTED, TERMINATED, Engine, Terminated, require_no_global_hooks
from headrace.engine.local.engine import kept_engine
from headrace.engine.torchrun.address import launched_ranks
from headrace.errors import HeadraceError, UsageError
from headrace.machine.dynamo import postpone_compiler
from headrace.machine.identity import detect, host_name, require_working_directory
from headrace.machine.limits import explained
from headrace.modules import refuse_overlapping
from headrace.prediction.device_memory import require_device_memory
from headrace.report.trackers.listeners import Listeners, OnEvent
from headrace.spec.cluster import Cluster
from headrace.spec.compute import LayerSpec
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.options import Checkpoints, check_options
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import Plan
from headrace.strategies import Strategy, resolve
from headrace.strategies.checks import check_device, check_shapes
from headrace.strategies.context import ModelProbe
from headrace.strategies.refusals import refuse
from headrace.training.embeddings.constructing import made_sparse
from headrace.training.user_code.untouched import untouched
from headrace.worker.callbacks.callback import Callback
from headrace.worker.guards.caller import Witness, read_caller
from headrace.worker.guards.witness import seeded_loss, updates_of
from headrace.worker.run_spec import AttemptInfo, RunSpec, Timeouts
from headrace.worker.session import objectives_of, sample_of
from headrace.worker.worker import Worker

if TYPE_CHECKING:
    from headrace.api.launched import Launched

_Once = Callable[[Callable[[], str]], str]
"""Calls a function that measures in one process of the run; returns in all of them what it returned there."""


def fit(
    job: Job,
    strategy: str | Strategy = "one_device",
    *,
    device: str | Sequence[str] = "auto",
    run_dir: Path | str | None = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    callbacks: Sequence[Callback] = (),
    timeout_s: float = 10.0,
    collective_timeout_s: float = 600.0,
    engine: Engine | None = None,
    seconds: float | None = None,
    checkpoints: Checkpoints | bool | None = None,
    resume: bool | Path | str = False,
    reset_optimizer: bool = False,
    check: bool = True,
    cluster: Cluster | Path | str | None = None,
    encrypt: bool = True,
) -> Run:
    """Trains a job and returns the run.

    Args:
        job, strategy: what to train, and how, by name ("mirrored") or as a value (`hr.Mirrored(workers=2)`).
        device: "auto" takes the first kind of accelerator that there is, else the CPU; or a kind in the device table,
            "cuda"; or the device of each worker, by rank, `["cuda:0", "cpu"]`; under a launcher, of each on this host.
        run_dir: where events, logs, checkpoints and the model go; None for a directory that goes with the returned run.
        on_event: called in this process with every event, in the order of their writing; a tracker as
            `hr.TensorBoard("logs")`; or a list of such.
        callbacks: what rank 0 calls at named moments, see `hr.Callback`.
        timeout_s: a process without a sign of life for this long counts as lost.
        collective_timeout_s: collectives of accelerators wait so long for a rank that lives; on CPUs for any time.
        engine: what runs the workers; None for the launcher's processes (torchrun) where there are some, else for
            local ones, which fork from a process that has imported torch and is kept until this one ends.
        seconds: ends the run in order after this time.
        checkpoints: when to save; None for `Checkpoints()` where there is a `run_dir`; True, False.
        resume: True goes on from the last checkpoint of `run_dir`, or of `copy_to`; "if_saved" begins where there is
            none; or from another run's directory or URL, or one checkpoint. Strategy and number of workers may differ.
        reset_optimizer: leaves the checkpoint's optimizer state and schedule behind; its class may be another.
        check: runs the model on a few examples before the start, and says what would differ from one device.
        cluster: links between hosts, or their file (`headrace doctor` writes one); None for 1 Gbit/s. Rank 0's counts.
        encrypt: False leaves gradients and activations between hosts unencrypted, for networks that are trusted.

    Raises:
        UsageError: the job, the strategy or the numbers do not fit together, or there is nothing to resume.
        CheckpointMismatch, CorruptCheckpoint: the checkpoint is of another job; there are some and all are damaged.
        DataError: there is no data, or it has the wrong form.
        UnfitMachine: the machine lacks something.
        RunFailed: a worker failed or was lost.

    Examples:
        >>> run = hr.fit(job, hr.Mirrored(workers=2))
        >>> run.status, run.summary.steps
        ('ok', 4)
    """
    arguments = FitArguments(
        *(device, run_dir, on_event, timeout_s, engine, seconds),
        *(checkpoints, resume, reset_optimizer, check, cluster, encrypt),
        *(callbacks, collective_timeout_s),
    )
    return (instead or run_job)(job, None, strategy, arguments)


def launch(
    train: Callable[[Worker], None],
    job: Job,
    strategy: str | Strategy = "one_device",
    *,
    device: str | Sequence[str] = "auto",
    run_dir: Path | str | None = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    callbacks: Sequence[Callback] = (),
    timeout_s: float = 10.0,
    collective_timeout_s: float = 600.0,
    engine: Engine | None = None,
    checkpoints: Checkpoints | bool | None = None,
    resume: bool | Path | str = False,
    reset_optimizer: bool = False,
    check: bool = True,
    cluster: Cluster | Path | str | None = None,
    encrypt: bool = True,
) -> Run:
    """Runs a training loop of one's own in every worker.

        def train(worker):
            for batch in worker.batches():
                loss = worker.step(batch)      # or: worker.backward(loss); worker.update()

    Args:
        train: the loop; it is called with a `Worker` in each worker. A resumed one begins with the first batch
            that the checkpoint has not seen.
        job, strategy, device, run_dir, on_event, callbacks, timeout_s, collective_timeout_s, engine, checkpoints,
            resume, reset_optimizer, check, cluster, encrypt: as for `fit`, with the same errors.

    Examples:
        >>> def train(worker):
        ...     for batch in worker.batches():
        ...         worker.step(batch)
        >>> hr.launch(train, job, hr.Mirrored(workers=2)).summary.steps
        4
    """
    arguments = FitArguments(
        *(device, run_dir, on_event, timeout_s, engine, None),
        *(checkpoints, resume, reset_optimizer, check, cluster, encrypt),
        *(callbacks, collective_timeout_s),
    )
    return (instead or run_job)(job, train, strategy, arguments)


instead: Callable[[Job, Callable[[Worker], None] | None, str | Strategy, FitArguments], Run] | None = None
"""What `fit` and `launch` do in this process in the place of a run: `headrace verify` runs a script."""


def run_job(job: Job, train: Callable[[Worker], None] | None, strategy: str | Strategy, arguments: FitArguments) -> Run:
    """Does what `fit` and `launch` do; errors show the caller's frames, not those of headrace."""
    try:
        return _run(job, train, strategy, arguments)
    except HeadraceError as error:
        # The caller's frames help a user, those of headrace do not.
        raise error.with_traceback(None) from error.__cause__
    except Exception as error:
        if (problem := explained(error)) is error:
            raise
        raise problem from error


def _run(job: Job, train: Callable[[Worker], None] | None, strategy: str | Strategy, arguments: FitArguments) -> Run:
    check_arguments(train, arguments)
    callbacks = callbacks_of(job, arguments)
    listeners = Listeners(arguments.on_event)
    require_working_directory()
    # Now, because building the user's model may change the working directory.
    wanted = None if arguments.run_dir is None else Path(arguments.run_dir).absolute()
    request = resume_request(arguments)
    chosen, caller = resolve(strategy), read_caller()
    postpone_compiler()
    ranks = launched_ranks() if arguments.engine is None else None
    launched = _launched(ranks)
    if launched:
        launched.begin(chosen, wanted, arguments.timeout_s)
    known = Cluster.load(arguments.cluster) if isinstance(arguments.cluster, str | Path) else arguments.cluster
    with _machines(chosen, arguments, ranks) as cluster:
        # A data set may count or draw what is read of it; the run begins with it as it was.
        with untouched(*map(_objects, (getattr(job, "data", None), *getattr(job, "eval_sets", {}).values()))):
            info, plan = _planned(job, chosen, arguments, cluster, known, launched)
        job = info.job
        checkpoints = checkpoints_of(job, chosen, arguments)
        keeper = TemporaryRunDir() if wanted is None else None
        directory = wanted or Path(keeper.path if keeper else ".")
        engine: Engine
        with nullcontext(arguments.engine) if arguments.engine else _own_engine(arguments, launched) as engine:
            spec = RunSpec(
                job=job,
                train=train,
                strategy=chosen,
                plan=plan,
                model=info.model,
                weighed=info.weighed,
                run_dir=directory,
                started=monotonic(),
                timeouts=Timeouts(arguments.timeout_s, arguments.collective_timeout_s),
                seconds=arguments.seconds,
                checkpoints=checkpoints,
                description=describe_run(job, info, plan) if checkpoints or arguments.resume else {},
                callbacks=callbacks,
                attempt=AttemptInfo(lasting=keeper is None),
                caller=replace(caller, witness=_witness(info, arguments, bool(launched))),
            )
            follow = launched.supervise if launched else supervise
            status = follow(spec, info, engine, request, listeners)
    _leave(status, keeper)
    return Run(job, plan, directory, status, info.module, keeper)


def _objects(data: object) -> object:
    """Returns data that may change when it is read: not tensors."""
    return data if isinstance(data, Dataset | DataLoader) and type(data) is not TensorDataset else None


def _leave(status: str, keeper: TemporaryRunDir | None) -> None:
    """Ends this process where the run was not to go on in it."""
    if status == LEFT:
        # The others have the model, and this process has nothing more to do.
        sys.stderr.write("headrace: this worker has left the run, as it was asked to\n")
        raise SystemExit(0)
    if status == TERMINATED:
        # SIGTERM asks this process to end, and now everything is saved.
        if keeper:
            keeper.delete()
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)
        raise Terminated


@contextmanager
def _machines(strategy: Strategy, arguments: FitArguments, ranks: int | None) -> Iterator[Cluster]:
    """Yields the machines that the engine has, or this one, and gives back what the engine has placed there."""
    check_shapes(strategy, arguments.device)
    require_no_global_hooks(arguments.engine, bool(ranks))
    if arguments.engine is None:
        yield detect(arguments.device, ranks, strategy.fixed_shapes)
        return
    cluster = arguments.engine.cluster(strategy, arguments.device, arguments.encrypt)
    try:
        yield cluster
    finally:
        arguments.engine.release()


def _planned(
    job: Job,
    chosen: Strategy,
    arguments: FitArguments,
    cluster: Cluster,
    known: Cluster | None,
    launched: Launched | None,
) -> tuple[JobInfo, Plan]:
    """Inspects the job, and returns what it is and who does what; all the launcher's processes call it together."""
    if known:
        cluster = cluster.with_links_of(known)
    if isinstance(job, Job) and chosen.sparse_names():
        job = replace(job, model=made_sparse(job.model, chosen.sparse_names()))
    require_turns(job, chosen)
    info = replace(inspect_job(job, chosen.closures, chosen.whole_model, chosen.in_parts), told=arguments.told)
    job = info.job
    refuse(chosen.refusals(), job.options)
    if launched:
        cluster = launched.joined(info, chosen, cluster, arguments.encrypt)
    cluster = replace(cluster, trusted=not arguments.encrypt)
    for kind in cluster.kinds:
        check_options(job.options, kind)
    if known and len(cluster.hosts) > 1:
        known.require(cluster.hosts)
    if len(cluster.hosts) > 1 and as_pipeline(job.data)[0].hosts is not None:
        if not launched:
            raise UsageError(
                "hr.data.local is what each host has, and this engine's hosts are others than this one; read the data "
                "from a place that all hosts reach"
            )
        info = replace(info, examples=launched.examples_of_hosts(job, cluster))
    _check_tables(info.model, chosen)
    refuse_overlapping(info.module, "" if chosen.keeps_memory else f"{chosen.name} gives each memory of its own")
    once: _Once = launched.measured_once if launched else lambda measured: measured()
    info = _inspected(job, info, chosen, cluster, arguments.encrypt, once)
    plan = plan_of(chosen, info.model, cluster, info.sets)
    check_device(chosen, plan, cluster)
    if chosen.whole_model:
        require_device_memory(plan, info.model, cluster)
    if arguments.device == AUTO and cluster.hosts[0].name == host_name() and (said := notice_of_auto(cluster.device)):
        info = replace(info, notices=(*info.notices, said))
    if cluster.device != HOST:
        from headrace.policies.own_devices import shared_devices

        info = replace(info, notices=(*info.notices, *shared_devices(plan)))
    check_split(job, info, plan)
    refuse_share_of_one(job, info.module, plan, info.examples, chosen)
    if job.options.memory_format != "preserve":
        from headrace.api.probes.measured import settle_memory_format

        info, plan = settle_memory_format(info, chosen, plan, cluster, once)
    if job.options.compile == "auto":
        from headrace.api.probes.measured import settle_compile

        info = settle_compile(info, plan, cluster.device, once)
    threads = arguments.engine is not None and arguments.engine.in_caller
    probed = arguments.check and info.parts is None
    told = run_probes(info, plan, chosen.equals_one_device, threads) if probed else ()
    return replace(info, notices=(*info.notices, *told)), plan


def _witness(info: JobInfo, arguments: FitArguments, launched: bool) -> Witness | None:
    """Returns what workers in processes of their own are to compute, too; None where there are none, or it fails."""
    in_caller = launched or (arguments.engine is not None and arguments.engine.in_caller)
    if in_caller or not arguments.check or info.model.tables or info.parts:
        return None
    with untouched(_objects(info.job.data)):
        batch = sample_of(info.job)
    try:
        loss = seeded_loss(info.module, batch, objectives_of(info.job, info.module, info.weighed))
    except Exception:
        # A loss that fails on two examples in train mode is not compared; where the run's batches fail, it says so.
        return None
    return Witness(batch, loss, updates_of(info.job, info.module))


def _launched(ranks: int | None) -> Launched | None:
    """Returns what each of a launcher's processes does besides; None where there is no launcher."""
    if ranks is None:
        return None
    from headrace.api.launched import Launched

    return Launched(ranks)


def _own_engine(arguments: FitArguments, launched: Launched | None) -> AbstractContextManager[Engine]:
    return launched.engine(arguments.timeout_s, arguments.encrypt) if launched else kept_engine()


def _inspected(job: Job, info: JobInfo, strategy: Strategy, cluster: Cluster, encrypt: bool, once: _Once) -> JobInfo:
    """Lets the strategy inspect the model."""
    objective = objectives_of(job, info.module, info.weighed)[0]
    notices = []
    if len(cluster.hosts) > 1 and not encrypt:
        notices.append(NOT_ENCRYPTED)
    elif len(cluster.hosts) > 1 and (backend := kind_of(cluster.device).backend) and cluster.device != HOST:
        notices.append(f"{cluster.device}: between hosts tensors go through host memory, encrypted; {FASTER} {backend}")

    def layers(request: ProfileRequest) -> tuple[LayerSpec, ...]:
        # What does so may hold a graph, or what the trace of forward has left.
        require_outputs_alone(job, info.module, objective)
        from headrace.pipeline.profile import MeasuredLayers, measure

        def measured() -> str:
            with untouched(objective.loss):
                return json.dumps(to_plain(measure(job, info.module, objective, request, cluster.device)))

        # One process measures for all, so that all make the same plan.
        found = from_plain(MeasuredLayers, json.loads(once(measured)))
        notices.extend(found.notices)
        return found.layers

    sample, options = (lambda: sample_of(job)), job.options
    probe = ModelProbe(
        info.module, job.global_batch_size, cluster, layers, sample, job.inputs, options.clip_norm, options.accumulate
    )
    model = strategy.inspect_model(info.model, probe)
    return replace(info, model=model, notices=(*info.notices, *notices))


def _check_tables(model: ModelSpec, strategy: Strategy) -> None:
    if model.tables and not strategy.sparse_tables:
        raise UsageError(
            f"{strategy.name} does not train the sparse embedding {model.tables[0].name!r}; use sparse=False there, or "
            "one_device, mirrored, central_storage or parameter_server"
        )
