"""verify: trains a job's first rounds by a plain loop and under a strategy, and compares all that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from headrace.api.arguments import FitArguments
from headrace.api.checks import inspect_job
from headrace.api.fit import run_job
from headrace.api.probes.finding import names_of
from headrace.api.probes.losses import join_loss
from headrace.api.rehearsal.rehearse import rehearse
from headrace.api.run import Run
from headrace.api.run_directory import TemporaryRunDir
from headrace.api.verification.differences import (
    BY_DEFINITION,
    DIFFERS,
    DOUBLE,
    EQUAL,
    EXACT,
    SINGLE,
    SKIPPED,
    Row,
    Tolerance,
    compare_metrics,
    compare_recordings,
    compare_tensors,
)
from headrace.api.verification.jobs import (
    SUSPECTS,
    affordable_batch,
    changed_attributes,
    doubled,
    doubling,
    frozen_data,
    has_tables,
    keeping,
    own_module,
    reads_alike,
    shorten,
    with_model,
    without_random_layers,
)
from headrace.api.verification.left import losses_of, read_run
from headrace.api.verification.recording import (
    Trained,
    examine,
    first_batch,
    flat,
    tensors_in,
    train_plainly,
)
from headrace.api.verification.references import DEFINITIONS, reference_of
from headrace.api.verification.verification import Verification
from headrace.engine.base import Engine
from headrace.engine.local.engine import kept_engine
from headrace.errors import HeadraceError, JobError, UsageError
from headrace.policies.behaviour import Stages
from headrace.spec.job import Job
from headrace.spec.options import Checkpoints, require_count
from headrace.spec.plan import Plan
from headrace.strategies import OneDevice, Strategy, resolve
from headrace.strategies.hybrid import one_worker, rule_of
from headrace.worker.attributes import SameBuild
from headrace.worker.session import build_module, make_module
from headrace.worker.worker import Worker

PLAIN = "a plain PyTorch loop"
_ROUND_S = 10.0
BY_SHARES = "a plain PyTorch loop over the workers' shares, one after the other"
OWN = "plain PyTorch loops, one a worker, that mix as the strategy defines it"
REPLAY = "a replay of the run's recorded order of pushes in one process"

_ASYNCHRONOUS = "a gradient may be of older parameters, by the order in which workers push"


def verify(
    job: Job,
    strategy: str | Strategy = "mirrored",
    *,
    train: Callable[[Worker], None] | None = None,
    rounds: int = 6,
    double: bool = False,
    examples: int | None = None,
    run_dir: Path | str | None = None,
    engine: Engine | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Verification:
    """Trains a job's first rounds twice from the same start, and compares the two: the proof for this job.

    Once by a plain PyTorch loop in this process: the job's own model object, loss, optimizer and hooks; afterwards
    they are as they were. Once under the strategy with its real processes, and from the middle on again in new ones.

    Args:
        job: what is trained.
        strategy: how, by name or as a value.
        train: a loop of the user's own, as of `launch`; None for the usual one.
        rounds: how many.
        double: in double precision. Without, single precision is tried first, and double precision decides where the
            two are farther apart than rounding explains.
        examples: so many of the data; None for two epochs within the rounds.
        run_dir: where the runs' files go; None for a directory that is deleted.
        engine: as of `fit`.
        say: is told what is done.

    Raises:
        UsageError, DataError, UnfitMachine, RunFailed: as of `fit`.

    Examples:
        >>> hr.verify(job, hr.CentralStorage(workers=2), rounds=2).equal
        True
    """
    require_count("rounds", rounds, 2)
    began, chosen = perf_counter(), resolve(strategy)
    keeper = TemporaryRunDir() if run_dir is None else None
    folder = Path(keeper.path if keeper else run_dir or ".").absolute()
    threads = torch.get_num_threads()
    # The same sums in the same order, however many cores there are.
    torch.set_num_threads(1)
    try:
        with nullcontext(engine) if engine else kept_engine() as own:
            found = _Session(job, chosen, train, folder, own, (rounds, examples), say).verified(double)
        return replace(found, seconds=perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
        if keeper:
            keeper.delete()


@dataclass(frozen=True)
class _Trial:
    """One comparison of a job under a strategy."""

    job: Job
    plan: Plan
    reference: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        return all(row.verdict != DIFFERS for row in self.rows)


class _Session:
    def __init__(
        self,
        job: Job,
        strategy: Strategy,
        train: Callable[[Worker], None] | None,
        folder: Path,
        engine: Engine,
        length: tuple[int, int | None],
        say: Callable[[str], object],
    ) -> None:
        self._strategy, self._train, self._folder, self._engine, self._say = strategy, train, folder, engine, say
        rounds, examples = length
        self._job = shorten(job, rounds, examples=examples)
        self._runs = 0
        self._checked = False

    def verified(self, double: bool) -> Verification:
        """Compares; in double precision where single precision leaves a doubt; and searches the cause."""
        job, notes = self._job, ["the job's callbacks had no part in it"] if self._job.callbacks else []
        try:
            with keeping(job):
                batch = affordable_batch(job, inspect_job(job, self._strategy.closures).module, _ROUND_S)
        except JobError as error:
            error.add_note("verify runs on the CPU, and has compared nothing")
            raise
        if batch < job.global_batch_size:
            notes.append(
                f"a round of {job.global_batch_size} examples takes longer than {_ROUND_S:.0f} s on one thread: "
                f"compared with rounds of {batch}"
            )
            job = shorten(job, job.steps or 0, batch)
        if not reads_alike(job):
            job = frozen_data(job)
            notes.append(
                "the data are other ones when they are read again: they draw random numbers without a seed (a "
                "parameter rng gets a generator that has one); compared on examples that were read once"
            )
        trial, precision = self._trial(job, double), "double" if double else "single"
        if not trial.equal and not double:
            self._say("they are farther apart than rounding in single precision explains; again in double precision")
            try:
                trial, precision = self._trial(job, True), "double"
            except JobError as error:
                notes.append(f"the job cannot be run in double precision, so rounding is not ruled out: {error}")
        cause = "" if trial.equal else self._cause(job, precision == "double")
        return Verification(
            strategy=self._strategy.name,
            workers=trial.plan.workers,
            rounds=job.steps or 0,
            batch=job.global_batch_size,
            examples=len(trial.job.data),
            precision=precision,
            reference=trial.reference,
            rows=tuple(trial.rows),
            notes=(*notes, *trial.notes),
            cause=cause,
        )

    def _cause(self, job: Job, double: bool) -> str:
        """Tries again without one suspect after the other."""
        for name, (words, without) in SUSPECTS.items():
            self._say(f"again without {name}")
            try:
                if self._trial(without(job), double).equal:
                    names = changed_attributes(job, first_batch(job)) if name == "attributes" else []
                    return f"{words}{f' ({names_of(names)})' if names else ''}"
            except HeadraceError:
                continue
        return "none of " + ", ".join(SUSPECTS) + " alone: with each left out it differs, too"

    def _trial(self, job: Job, double: bool) -> _Trial:
        with doubling(job, double):
            return self._compared(doubled(job) if double else job, DOUBLE if double else SINGLE)

    def _compared(self, job: Job, tolerance: Tolerance) -> _Trial:
        strategy, notes = self._strategy, list[str]()
        # What is compared begins with the constructor's values, also in the plain loops.
        job = replace(join_loss(job, strategy.whole_model), weights=None, callbacks=())
        if not isinstance(job.model, nn.Module):
            # What a constructor draws from the system is another thing whenever it is built: all get the first one's.
            make_module(job := replace(job, model=SameBuild(job.model)))
        if strategy.equals_one_device:
            return self._beside_plain(job, strategy, tolerance)
        reference = reference_of(rule_of(strategy)) if self._train is None else None
        run = self._run(job, strategy)
        what = "turns of sets of parameters" if job.sets else "rows of sparse embeddings" if has_tables(job) else ""
        lacks = f"the reference has no {what}" if reference is not None and what else ""
        defined = reference or self._train or strategy.processes().servers or one_worker(strategy)
        if not defined:
            lacks = "headrace has no plain loop of it; write one, and give it to headrace.testing.check_strategy"
        if lacks:
            return _Trial(job, run.plan, "nothing", [Row("losses", SKIPPED, why=lacks)], notes)
        if reference is not None:
            pieces = _in_pieces(job, strategy, run.plan)
            if pieces is not job and self._plain(job, (1,)).changes:
                notes.append("forward changes buffers or state: in the plain loops, too, with each micro-batch")
            else:
                pieces = job
            with keeping(job):
                own = reference(pieces, partial(build_module, job), run.plan.shares)
            definition = DEFINITIONS[rule_of(strategy).name]
            notes.append(f"{strategy.name} differs from one device by definition: {definition}")
            return _Trial(job, run.plan, OWN, self._rows(job, strategy, run, own, tolerance), notes)
        return self._asynchronous(job, strategy, run, tolerance)

    def _beside_plain(self, job: Job, strategy: Strategy, tolerance: Tolerance) -> _Trial:
        """Compares a strategy that equals one device with it, as far as the model's layers let it."""
        if has_tables(job):
            return self._beside_one_device(job, strategy, tolerance)
        notes, words = list[str](), PLAIN
        if not rule_of(strategy).lock_step and (job.options.clip_norm or job.options.clip_value):
            job = replace(job, options=replace(job.options, clip_norm=None, clip_value=None))
            notes.append("each worker clips its own gradient before it pushes it, by definition: compared without")
        plain = self._plain(job, (1,))
        coupled = plain.drew or (plain.changes and job.options.batch_norm != "sync")
        if not coupled or not strategy.divided:
            run = self._run(job, strategy)
        if coupled and not strategy.divided and run.plan.replicas > 1 and self._train is None:
            notes.append(_why_coupled(plain))
            plain, words = self._plain(job, run.plan.shares, by_examples=not strategy.lock_step), BY_SHARES
        elif coupled and (strategy.divided or run.plan.workers > 1):
            # A micro-batch of one example cannot be normalised, so that such a model is not run as it is.
            job = with_model(job, without_random_layers)
            plain, run = self._plain(job, (1,)), self._run(job, strategy)
            notes.append(
                "dropout and BatchNorm differ by definition where a model is divided (each part draws its own numbers, "
                "and normalises micro-batches): compared with these layers in eval mode"
            )
        pieces = _in_pieces(job, strategy, run.plan) if rule_of(strategy) is strategy else job
        if pieces is not job and plain.changes:
            plain, count = self._plain(pieces, (1,)), pieces.options.accumulate
            notes.append(
                f"forward changes buffers or state: in the plain loop, too, with each of {count} micro-batches"
            )
        return _Trial(job, run.plan, words, self._rows(job, strategy, run, plain, tolerance), notes)

    def _beside_one_device(self, job: Job, strategy: Strategy, tolerance: Tolerance) -> _Trial:
        """Compares with one process of headrace's own, where the plain loop cannot do what it does."""
        alone = self._run(job, OneDevice())
        plain, run = read_run(alone), self._run(job, strategy)
        with keeping(job):
            examine(replace(job, loss=alone.loss), alone.model, plain)
        notes = ["rows of sparse embeddings are made and updated by headrace alone: compared with its one_device"]
        return _Trial(job, run.plan, "a run under one_device", self._rows(job, strategy, run, plain, tolerance), notes)

    def _asynchronous(self, job: Job, strategy: Strategy, run: Run, tolerance: Tolerance) -> _Trial:
        """Replays the recorded order of pushes in one process, and compares one worker with the plain loop."""
        definition = DEFINITIONS.get(rule_of(strategy).name, _ASYNCHRONOUS if not strategy.lock_step else "it says so")
        rows, notes, words = [], [f"{strategy.name} differs from one device by definition: {definition}"], REPLAY
        try:
            if self._train is not None:
                raise UsageError("a replay has the usual loop, and this one is of your own")
            directory = self._folder / f"replay-{self._runs}"
            with keeping(job):
                replayed = rehearse(job, strategy, from_run=run.run_dir, run_dir=directory).run
        except UsageError as error:
            notes.append(f"its own order cannot be replayed: {error}")
            words = "nothing"
        else:
            other = Trained(losses=losses_of(replayed), model=tensors_in(replayed.model), metrics=replayed.metrics)
            rows = self._rows(job, strategy, run, other, tolerance, resumes=False)
        if (one := one_worker(strategy)) is None:
            rows = rows or [Row("losses", SKIPPED, why="there is no reference for these options")]
        else:
            single = self._beside_plain(job, one, tolerance)
            notes += single.notes
            alone = "one replica" if strategy.divided else "one worker"
            words = f"{words} and, with {alone}, {single.reference}" if rows else f"{single.reference}, with {alone}"
            rows += [replace(row, what=f"{row.what}, {alone}") for row in single.rows]
        return _Trial(job, run.plan, words, rows, notes)

    def _plain(self, job: Job, shares: Sequence[int], by_examples: bool = False) -> Trained:
        with keeping(job):
            return train_plainly(job, own_module(job), shares, by_examples, self._train)

    def _run(self, job: Job, strategy: Strategy, resume: Path | None = None) -> Run:
        self._runs += 1
        saving = Checkpoints(every_steps=1, every_s=None, keep=(job.steps or 0) + 1)
        arguments = FitArguments(
            device="cpu",
            run_dir=self._folder / f"run-{self._runs}",
            on_event=None,
            timeout_s=10.0,
            engine=self._engine,
            seconds=None,
            checkpoints=saving if strategy.one_model else False,
            resume=resume or False,
            reset_optimizer=False,
            check=not self._checked,
        )
        self._checked = True
        with keeping(job):
            return run_job(job, self._train, strategy, arguments)

    def _rows(
        self, job: Job, strategy: Strategy, run: Run, plain: Trained, tolerance: Tolerance, resumes: bool = True
    ) -> list[Row]:
        ours = read_run(run)
        rows = compare_recordings(ours, plain, tolerance)
        if plain.same_draws:
            rows.append(Row("random numbers", DIFFERS, why="two workers draw the same ones"))
        if run.plan.replicas > 1 and strategy.one_model:
            # Else the run had ended with RanksDiffer: they are compared at every save and evaluation.
            rows.append(Row("all ranks with each other", EQUAL, 0.0))
        # Where each worker has a model of its own, metrics are means over these.
        evaluates = bool(plain.metrics) and strategy.one_model
        if evaluates:
            rows += compare_metrics("evaluation in the run", ours, plain, tolerance)
        rows += compare_tensors("run.model", ours.model, plain.model, tolerance)
        here = Trained()
        with keeping(job):
            examine(replace(job, loss=run.loss), run.model, here)
        if evaluates:
            rows += compare_metrics("run.model evaluated here", ours, here, tolerance)
            if plain.changes_own and run.plan.replicas > 1 and job.options.sync_buffers == "local":
                why = "each worker evaluates with its own buffers"
                rows = [
                    replace(row, verdict=BY_DEFINITION, why=why) if "evaluat" in row.what and row.by else row
                    for row in rows
                ]
        # By the run itself, in the mode in which it returns its model.
        rows += compare_tensors("run.predict", flat(run.predict(first_batch(job))), plain.outputs, tolerance)
        steps = sorted(step for step in ours.rounds if 0 < step < (job.steps or 0))
        # What differs in single precision is tried again in double.
        if steps and resumes and (tolerance is DOUBLE or not any(row.verdict == DIFFERS for row in rows)):
            middle = steps[len(steps) // 2]
            resumed = read_run(self._run(job, strategy, run.run_dir / "checkpoints" / f"step-{middle:08d}"))
            last = max(ours.rounds)
            every = {f"{kind}/{name}": each for kind, own in ours.rounds[last].items() for name, each in own.items()}
            again = {f"{kind}/{name}": each for kind, own in resumed.rounds[last].items() for name, each in own.items()}
            rows += compare_tensors("resumed run", again, every, EXACT)
        return rows


def _in_pieces(job: Job, strategy: Strategy, plan: Plan) -> Job:
    """Returns a job whose plain loop does with each micro-batch what stages do; the job itself where there are none."""
    stages = strategy.behave(plan.workers).division
    if not isinstance(stages, Stages):
        return job
    return replace(job, options=replace(job.options, accumulate=stages.micro_batches))


def _why_coupled(plain: Trained) -> str:
    what = (
        "each worker draws its own dropout" if plain.drew else "statistics of BatchNorm follow each worker's own share"
    )
    return f"{what}, so one device differs by definition: compared with a plain loop that does the same"
