"""`headrace train` and `headrace compare`: one job under one strategy, or under several."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.combinations import count_of, refuse_idle, resolved
from headrace.cli.command import command, option
from headrace.cli.engines import job_on_engine, launched_rank, own_engine, refuse_launcher
from headrace.cli.jobfile import find_job, load_job
from headrace.cli.options import (
    CheckOption,
    CheckpointEveryOption,
    CollectiveTimeoutOption,
    CopyToOption,
    DeviceOption,
    DevicesOption,
    EncryptOption,
    JobFile,
    ResetOptimizerOption,
    ResumeFromOption,
    ResumeIfSavedOption,
    ResumeOption,
    RunClusterOption,
    RunDirOption,
    SecretFileOption,
    ServersOption,
    SettingsOption,
    SnapshotsEveryOption,
    StrategyOption,
    TensorBoardOption,
    TimeoutOption,
    TrackerOption,
    WorkersOption,
    check_strategies,
    checkpoints_of,
    complete_strategies,
    default_run_dir,
    job_name,
    listeners,
    saying_where,
    split_names,
)
from headrace.cli.output import Answer, ExitCode, say_at_once, show_comparison, show_run
from headrace.cli.ray_cluster import PlacementOption, ResourcesOption, RuntimeEnvOption, is_ray, ray_engine
from headrace.cli.watching import watching
from headrace.devices import AUTO
from headrace.errors import UsageError
from headrace.machine.extras import require_extra
from headrace.spec.call import parse_call
from headrace.spec.options import is_url

if TYPE_CHECKING:
    from headrace.api.run import Run
    from headrace.spec.job import Job
    from headrace.spec.options import Checkpoints
    from headrace.strategies import Strategy

_EXAMPLES = """
  headrace train job.py
  headrace train job.py --strategy mirrored --workers 2
  headrace train job.py --set lr=0.05 --set epochs=1 --run-dir runs/a
  headrace train job.py --strategy "parameter_server(servers=2)" --workers 2
  headrace train job.py --strategy mirrored --json | jq .metrics
  headrace train job.py --run-dir runs/a --checkpoint-every 100
  headrace train job.py --run-dir runs/a --resume
  headrace train job.py --tracker mine.py:Csv --set job.metrics=mine.py:top5
  headrace train job.py --cluster ray://auto --workers 8 --servers 2
"""

_COMPARE_EXAMPLES = """
  headrace compare job.py --workers 2
  headrace compare job.py --strategies one_device,mirrored --workers 2
  headrace compare job.py --workers 2 --set epochs=1 --json | jq .verdict
"""

_PredictOption = Annotated[Path | None, option("--predict FILE", "A profile: the report says how far off it predicts.")]
_WatchOption = Annotated[bool, option("--watch", "Show the run in a browser meanwhile, and say where.")]
_VerboseOption = Annotated[bool, option("--verbose -v", "Print all that is known of the run at its end.")]


@command(_EXAMPLES)
def train(
    answer: Answer,
    path: JobFile,
    strategy: StrategyOption = "one_device",
    workers: WorkersOption = None,
    servers: ServersOption = None,
    device: DevicesOption = AUTO,
    run_dir: RunDirOption = None,
    settings: SettingsOption = None,
    timeout_s: TimeoutOption = 10.0,
    collective_timeout_s: CollectiveTimeoutOption = 600.0,
    checkpoint_every: CheckpointEveryOption = None,
    snapshots_every: SnapshotsEveryOption = None,
    keep: Annotated[int | None, option("--keep N", "How many of the last checkpoints stay. Default: 3.", min=1)] = None,
    copy_to: CopyToOption = None,
    resume: ResumeOption = False,
    resume_if_saved: ResumeIfSavedOption = False,
    resume_from: ResumeFromOption = None,
    reset_optimizer: ResetOptimizerOption = False,
    check: CheckOption = True,
    cluster: RunClusterOption = None,
    runtime_env: RuntimeEnvOption = None,
    resources: ResourcesOption = None,
    placement: PlacementOption = None,
    secret_file: SecretFileOption = None,
    encrypt: EncryptOption = True,
    predict: _PredictOption = None,
    tensorboard: TensorBoardOption = None,
    tracker: TrackerOption = None,
    watch: _WatchOption = False,
    verbose: _VerboseOption = False,
) -> None:
    """Train the job of a file under one strategy."""
    say_at_once(f"starting {strategy}{f' with {workers} workers' if workers else ''}: {path}")
    strategy = _check(["parameter_server" if servers and strategy == "one_device" else strategy], path, tensorboard)
    ray = ray_engine(cluster, secret_file, runtime_env, resources, placement)
    saved = checkpoints_of(checkpoint_every, keep, snapshots_every, copy_to)
    going = _going(resume, resume_if_saved, resume_from, run_dir)
    where = run_dir or default_run_dir(f"{job_name(path)}-{parse_call(strategy).name.rpartition(':')[2]}")
    # In this order: the engine forks this process, which must not have run the job file before.
    with own_engine(secret_file, path, ray) as engine, saying_where(where):
        job, chosen = load_job(path, settings or ()), resolved(strategy, workers, servers)
        fit = partial(_fit(), timeout_s=timeout_s, collective_timeout_s=collective_timeout_s, engine=engine)
        _keep_prediction(predict, cluster, job, chosen, device, where)
        with listeners(tensorboard, tracker) as on_event, watching(where, watch):
            run = fit(
                job,
                strategy=chosen,
                device=device,
                run_dir=where,
                on_event=on_event,
                checkpoints=_saving(answer, chosen, saved),
                resume=going,
                reset_optimizer=reset_optimizer,
                check=check,
                cluster=None if ray else cluster,
                encrypt=encrypt,
            )
    _finish(answer, where, run.interrupted, verbose)


def _fit() -> Callable[..., Run]:
    # Now that the engine has forked: it imports torch.
    from headrace.api.fit import fit

    return fit


def _finish(answer: Answer, run_dir: Path, interrupted: bool, verbose: bool) -> None:
    """Prints a run where one process speaks for all, and exits if it was interrupted."""
    if launched_rank() in (None, 0):
        # Lazily: `--help` need not wait for reports.
        from headrace.report.model.summary import summarize

        then = None if verbose else _next(run_dir, interrupted)
        show_run(answer, summarize(run_dir), run_dir, short=then)
    if interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _next(run_dir: Path, interrupted: bool) -> str:
    """Returns what to type next: how to go on with a run that was ended, else how to see it."""
    from headrace.report.model.ending import resuming_command

    going_on = resuming_command(shlex.join(["headrace", *sys.argv[1:]]), run_dir) if interrupted else ""
    return going_on or shlex.join(["headrace", "report", str(run_dir)])


def _keep_prediction(
    profile: Path | None, cluster: str | None, job: Job, strategy: Strategy, device: str, run_dir: Path
) -> None:
    """Predicts what a run on the machines of a file takes, or on this one, and keeps it in the run's directory."""
    if profile is None or launched_rank() not in (None, 0):
        return
    refuse_idle(
        {"--predict": is_ray(cluster)},
        "it simulates the machines of a file, or this one, and --cluster names a Ray cluster; leave one of them out",
    )
    from headrace.machine.identity import detect
    from headrace.prediction.simulation.simulate import simulate

    if cluster is None and launched_rank() is not None:
        raise UsageError("--predict needs --cluster FILE on several hosts: headrace doctor measures one")
    machines = cluster or detect(device)
    if not isinstance(machines, Path | str) and len(machines.kinds) > 1:
        raise UsageError(f"--predict simulates devices of one kind, got --device {device}; leave one of them out")
    batch, pieces = job.global_batch_size, job.options.accumulate
    simulate(profile, machines, strategy, global_batch_size=batch, accumulate=pieces).save(run_dir)


def _saving(answer: Answer, strategy: Strategy, wanted: Checkpoints | None) -> Checkpoints | bool | None:
    """Returns what `fit` takes; what is asked for is not left out where the strategy has no single model to save."""
    servers = getattr(getattr(strategy, "outer", strategy), "servers", None)
    if not servers:
        why = f"for parameter servers without backups, and {strategy.name} has none; leave it out"
        refuse_idle(answer.given("--snapshots-every"), why)
    asked = answer.given("--checkpoint-every", "--keep", "--copy-to", "--snapshots-every")
    return (wanted or False) if strategy.one_model or any(asked.values()) else None


def _check(strategies: Sequence[str], path: Path, tensorboard: Path | None) -> str:
    """Checks what a command is given; returns the first strategy."""
    check_strategies(strategies)
    find_job(path)
    if tensorboard is not None:
        require_extra("tensorboard", "--tensorboard")
    return strategies[0]


def _going(resume: bool, if_saved: bool, resume_from: str | None, run_dir: Path | None) -> bool | str | Path:
    if (resume or if_saved) and run_dir is None:
        raise UsageError("--resume goes on with a run: name it by --run-dir, or another one by --resume-from")
    if resume + if_saved + bool(resume_from) > 1:
        raise UsageError(
            "--resume and --resume-if-saved go on with --run-dir, --resume-from with another run; give one of them"
        )
    if resume_from:
        return resume_from if is_url(resume_from) else Path(resume_from)
    return "if_saved" if if_saved else resume


@command(_COMPARE_EXAMPLES, "comparing strategies")
def compare(
    answer: Answer,
    path: JobFile,
    strategies: Annotated[
        str,
        option(
            "--strategies NAME,NAME,...",
            "Under which it is trained, one after the other.",
            autocompletion=complete_strategies,
        ),
    ] = "one_device,mirrored,central_storage",
    workers: WorkersOption = None,
    device: DeviceOption = AUTO,
    run_dir: RunDirOption = None,
    settings: SettingsOption = None,
    timeout_s: TimeoutOption = 10.0,
    collective_timeout_s: CollectiveTimeoutOption = 600.0,
    tensorboard: TensorBoardOption = None,
    tracker: TrackerOption = None,
    retries: Annotated[int, option("--retries N", "Most repetitions of a disturbed measurement.", min=0)] = 2,
) -> None:
    """Train the job of a file under several strategies.

    Progress goes to stderr, the table to stdout, with the path of a page that needs no other file.
    """
    refuse_launcher("compare")
    names = split_names(strategies)
    _check(names, path, tensorboard)
    where = run_dir or default_run_dir(f"compare-{job_name(path)}")
    with job_on_engine(path, settings) as (job, engine), saying_where(where):
        from headrace.api.comparison import compare as compare_strategies
        from headrace.strategies import resolve

        chosen = [resolve(name, workers) for name in names]
        for name, count in zip(names, map(count_of, chosen), strict=True):
            if workers is not None and count not in (None, workers):
                raise UsageError(f"--workers {workers}: {name} runs on {count}; say it once")
        with listeners(tensorboard, tracker) as on_event:
            comparison = compare_strategies(
                job,
                chosen,
                device=device,
                run_dir=where,
                on_event=on_event,
                timeout_s=timeout_s,
                collective_timeout_s=collective_timeout_s,
                engine=engine,
                retries=retries,
            )
    show_comparison(answer, comparison.summaries, comparison.references, where, comparison.page)
    if any(summary.status == "interrupted" for summary in comparison.summaries):
        raise typer.Exit(ExitCode.INTERRUPTED)
