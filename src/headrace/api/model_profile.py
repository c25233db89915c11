"""profile: measures what a job's model takes on this machine, by batch size and by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

from headrace.api.checks import JobInfo, inspect_job
from headrace.api.fit import fit
from headrace.api.profiling import measured, with_ready_data, without_end
from headrace.api.run import Run
from headrace.batches import examples_of
from headrace.bench.advice import JobFacts
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.devices import AUTO, HOST, check_name
from headrace.engine.base import Engine
from headrace.errors import HeadraceError, JobError, UnfitMachine, UsageError
from headrace.machine.allocator import give_back
from headrace.machine.identity import detect
from headrace.machine.limits import out_of_memory
from headrace.machine.resources import cores, most_threads, spare_memory_bytes
from headrace.pipeline.profile import first_batch
from headrace.pipeline.profile import profile as profile_layers
from headrace.policies.measurement import doubts
from headrace.policies.roles import threads_per_worker
from headrace.prediction.profiling.origin import digest_of, origin_here
from headrace.prediction.profiling.passes import BatchPasses, accumulation_s, measure_passes
from headrace.prediction.profiling.slices import sliced_profile
from headrace.prediction.profiling.traffic import traffic_of
from headrace.report.format import plural
from headrace.report.model.training import WARM_UP_STEPS
from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec, SlicedProfile
from headrace.spec.events import Stepped, WorkerEnded
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.options import check_options, require_count
from headrace.spec.parameter_sets import one_optimizer
from headrace.strategies import OneDevice, Strategy, Unconnected
from headrace.training.optimizer import build
from headrace.training.whole_model import HALF
from headrace.trees import map_tensors, nbytes
from headrace.worker.session import objective_of

BATCH_SIZES = (1, 4, 16)
"""That are measured besides the job's own."""
_SAMPLED, _TRIES = 2, 2
_SLICES = (2, 4, 8)
"""Devices over which layers are divided on trial."""
_TURNS, _TURN = 3, 0.5
"""How often workers side by side and one alone are measured, and the part of a measurement that each takes."""
_QUICKEST, _LEAST_STEPS, _MOST_STEPS = 3, 20, 2000


@dataclass(frozen=True)
class _Step:
    """A step of training, as a worker does it; seconds."""

    compute_s: float
    update_s: float
    rest_s: float
    spread: float
    peak_bytes: int = 0

    @property
    def total_s(self) -> float:
        """Without waiting for data."""
        return self.compute_s + self.update_s + self.rest_s


def profile(
    job: Job,
    *,
    device: str = "auto",
    threads: int | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 1.0,
    engine: Engine | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> ModelSpec:
    """Measures forward and backward of a job's model on this machine, by batch size, whole and by layer.

    Each batch size is measured three times: its layers, forward and backward of the whole model, and steps of training
    in a worker. The job is not changed, and nothing is saved. The result's `compute` has the figures, and `origin` says
    what they belong to, and what "disturbed" the measurement. Simulations and recommendations start from it.

    Args:
        job: whose model, loss, optimizer and first examples are taken. Micro-batches (`Options.accumulate`) count as
            batches, and graph mode (`Options.compile`) is off.
        device: as for `fit`.
        threads: of one process; None for all of the machine's. A worker that shares the machine has fewer.
        batch_sizes: in examples; those above the job's own, or above its number of examples, are left out.
        seconds: that each measurement takes at least.
        engine: what runs the steps of training; None for a local one.
        say: is told what is measured, and what could not be.

    Raises:
        UsageError: a batch size, the time or the threads are not above 0.
        JobError: the model cannot be built or run.
        UnfitMachine: there is not enough memory for the job's own batch.
        DataError: there is no data.

    Examples:
        >>> profile = hr.profile(job, batch_sizes=[4, 16], seconds=0.01)
        >>> [batch.examples for batch in profile.compute.batches]
        [4, 16]
    """
    if not seconds > 0:
        raise UsageError(f"seconds must be a number above 0, got {seconds!r}")
    for size in batch_sizes:
        require_count("a batch size", size)
    if threads is not None:
        require_count("threads", threads)
    info = inspect_job(job)
    one_optimizer(job.optimizer, "a profile")
    check_name(device, AUTO)
    check_options(job.options, kind := detect(device).device)
    own = _own_size(job)
    measuring = _Measuring(info, kind, threads, seconds, engine, say)
    compute, passes = _measured_sizes(measuring, sorted({own, *(size for size in batch_sizes if size < own)}), say)
    return replace(
        info.model,
        layers=compute.batches[-1].layers,
        name=type(info.module).__name__,
        compute=compute,
        flops_per_example=passes.forward_flops / own,
        origin={**origin_here(kind), **identity(info), **measuring.disturbed},
        slices=measuring.slices(),
        traffic=traffic_of(info.module, *measuring.sample),
    )


def job_facts(job: Job, name: str, seconds: float = 1.0, say: Callable[[str], object] = lambda line: None) -> JobFacts:
    """Measures what decides whether a GPU would help a job: its step, on a GPU too if there is one, and its input.

    Its errors are those of `profile`.
    """
    info = inspect_job(job)
    one_optimizer(job.optimizer, "a profile")
    measuring = _Measuring(info, "cpu", None, seconds, None, say)
    batch = measuring.batch(_own_size(job))
    examples = examples_of(batch)
    passes = measuring.passes(examples)
    gpu_step_s = None
    if (kind := detect(AUTO, fixed_shapes=False).device) != HOST:
        there = _Measuring(info, kind, None, seconds, None, say)
        on_gpu = there.passes(examples)
        gpu_step_s = on_gpu.forward_s + on_gpu.backward_s
    say("the input alone")
    return JobFacts(
        name,
        examples,
        passes.forward_s + passes.backward_s,
        passes.operations,
        nbytes(batch),
        _input_rate(job, examples, seconds),
        gpu_step_s,
    )


def _input_rate(job: Job, examples: int, seconds: float) -> float:
    """Returns the examples a second that the job's input gives, after the first batch, in which files are opened."""
    (pipeline, _), read = as_pipeline(job.data), 0
    began: float | None = None
    while True:
        shares = Loader(pipeline, job.seed, examples, (1,), 0).sweep(alone=True)
        try:
            for share in shares:
                now = perf_counter()
                if began is None:
                    began = now
                    continue
                read += share.examples
                if now - began > seconds:
                    return read / (now - began)
        finally:
            shares.close()


def _own_size(job: Job) -> int:
    """Returns the examples of a micro-batch of the job."""
    return max(1, min(-(-job.global_batch_size // job.options.accumulate), len(as_pipeline(job.data)[0])))


def _measured_sizes(
    measuring: _Measuring, sizes: Sequence[int], say: Callable[[str], object]
) -> tuple[ComputeProfile, BatchPasses]:
    """Returns what batches of these sizes take, and the last one's passes; it is the job's own, and must be run."""
    own = sizes[-1]
    batches = []
    for size in sizes:
        try:
            passes = measuring.passes(size)
            step = measuring.step(size, passes)
        except HeadraceError as error:
            if size == own:
                raise
            # A batch norm, say, takes no single example.
            say(f"batches of {size} are left out: {error}")
            continue
        # Of the compute of a step, forward and backward have the parts that they have outside of it.
        forward_part = passes.forward_s / (passes.forward_s + passes.backward_s)
        times = step.compute_s * forward_part, step.compute_s * (1 - forward_part)
        workspace = max(0, step.peak_bytes - measuring.model_bytes - passes.saved_bytes)
        batches.append(BatchProfile(size, *times, passes.saved_bytes, measuring.layers(size), workspace))
    crowd = measuring.crowd
    return ComputeProfile(
        tuple(batches), step.update_s, step.rest_s, step.spread, measuring.device, measuring.threads,
        crowd, measuring.crowding(own, passes) if crowd > 1 else 1.0, measuring.accumulate_s(),
    ), passes  # fmt: skip


def identity(info: JobInfo) -> dict[str, str]:
    """Returns what tells a job's model from others, in the origin of its profile."""
    optimizer = build(one_optimizer(info.job.optimizer, "a profile"), info.module.named_parameters())
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    options = info.job.options
    return {
        "precision": options.precision,
        "digest": digest_of(info.module, name, first_batch(info.job, _SAMPLED)),
    }


class _Measuring:
    """Measures batches of one job."""

    def __init__(
        self,
        info: JobInfo,
        device: str,
        threads: int | None,
        seconds: float,
        engine: Engine | None,
        say: Callable[[str], object],
    ) -> None:
        self.threads = threads or threads_per_worker(cores(), 1, most_threads())
        self._info = info
        self.device = device
        self._seconds = seconds
        self._engine = engine
        self._say = say
        self._objective = objective_of(info.job, info.module, info.weighed)
        self._module = info.module if device == "cpu" else copy.deepcopy(info.module).to(device)
        self._autocast = HALF.get(info.job.options.precision)
        self._has_layers = True
        self.disturbed: dict[str, str] = {}
        self.sample = first_batch(info.job, _SAMPLED), info.job.inputs

    def passes(self, size: int) -> BatchPasses:
        """Measures forward and backward of the whole model."""
        self._say(f"forward and backward of {plural(size, 'example')}")
        try:
            return measure_passes(
                self._module,
                self._objective,
                self.batch(size),
                seconds=self._seconds,
                threads=self.threads,
                autocast=self._autocast,
            )
        except (RuntimeError, ValueError, MemoryError) as error:
            if isinstance(error, MemoryError) or out_of_memory(error):
                raise UnfitMachine(
                    f"there was no memory for a batch of {plural(size, 'example')}: {error}; use more micro-batches "
                    "(Options.accumulate), or a machine with more memory"
                ) from error
            raise JobError(f"the model cannot be trained on {plural(size, 'example')}: {error}") from error
        finally:
            give_back()

    def step(self, size: int, passes: BatchPasses) -> _Step:
        """Trains for a while in a worker, with data that lies ready; again if the machine did something else.

        Of a machine that is not idle the quickest steps count.
        """
        tries: list[_Step] = []
        for _ in range(_TRIES):
            self._say(f"steps of training of {plural(size, 'example')}")
            run, measurement = measured(lambda: self._trained(size, passes, OneDevice(threads=self.threads)))
            why = doubts(measurement, None)
            tries.append(_typical_of(run, quickest=bool(why)))
            if not why:
                return tries[-1]
        self.disturbed = {"disturbed": f"while it trained on {plural(size, 'example')}, {' and '.join(why)}"}
        return min(tries, key=lambda step: step.compute_s)

    @property
    def crowd(self) -> int:
        """How many workers with so many threads the processor has cores for."""
        count = cores() // self.threads if self.device == "cpu" else 1
        return count if threads_per_worker(cores(), count) == self.threads else 1

    @property
    def model_bytes(self) -> int:
        """Of parameters, gradients and the optimizer's state."""
        model = self._info.model
        return model.parameter_bytes + (model.copies - 1) * model.trainable_bytes

    def crowding(self, size: int, passes: BatchPasses) -> float:
        """Trains as many workers side by side as there are cores for; returns how many times as long one takes.

        One worker alone takes turns with them, because a machine's speed may change meanwhile.
        """
        self._say(f"steps of training of {plural(size, 'example')} in each of {self.crowd} workers")
        ratios = []
        try:
            for _ in range(_TURNS):
                both = self._trained(size * self.crowd, passes, Unconnected(self.crowd), _TURN)
                alone = self._trained(size, passes, OneDevice(threads=self.threads), _TURN)
                ratios.append(_typical_of(both, False).total_s / _typical_of(alone, False).total_s)
        except HeadraceError as error:
            self._say(f"workers are taken not to slow each other down, which was not measured: {error}")
            return 1.0
        return max(1.0, median(ratios))

    def _trained(self, size: int, passes: BatchPasses, strategy: Strategy, part: float = 1.0) -> Run:
        options = replace(self._info.job.options, accumulate=1, compile=False, on_nonfinite="skip")
        job = without_end(replace(self._info.job, global_batch_size=size, options=options))
        steps = self._seconds / (passes.forward_s + passes.backward_s)
        count = round(part * min(max(steps, _LEAST_STEPS), _MOST_STEPS))
        return fit(
            replace(with_ready_data(job, self._seconds), steps=count),
            strategy,
            device=self.device,
            engine=self._engine,
            checkpoints=False,
            check=False,
        )

    def accumulate_s(self) -> float:
        """Measures how long it takes to add gradients of all parameters to those of an earlier micro-batch."""
        return accumulation_s(self._module, self.threads)

    def layers(self, size: int) -> tuple[LayerSpec, ...]:
        """Measures the layers, () where the model cannot be cut between them."""
        if not self._has_layers:
            return ()
        self._say(f"layers, with {plural(size, 'example')}")
        try:
            found = profile_layers(
                self._module,
                self._objective,
                self.batch(size),
                sample=self.batch(_SAMPLED),
                seconds=self._seconds,
                threads=self.threads,
                autocast=self._autocast,
            )
        except JobError as error:
            self._has_layers = False
            self._say(f"the model is measured as a whole: {error}")
            return ()
        return found.layers

    def slices(self) -> tuple[SlicedProfile, ...]:
        """Tries what tensor parallelism makes of the model, on threads; none where it cannot, or copies do not fit."""
        found: list[SlicedProfile] = []
        for devices in _SLICES:
            if 4 * devices * self.model_bytes > spare_memory_bytes():
                self._say(f"tensor parallelism over {devices} devices is not tried: its copies do not fit here")
                break
            self._say(f"slices for {devices} devices")
            try:
                found.append(sliced_profile(self._info.module, *self.sample, devices))
            except HeadraceError as error:
                self._say(f"tensor parallelism is not predicted: {error}")
                break
        return tuple(found)

    def batch(self, size: int) -> Any:
        """Returns the job's first examples, on the device."""
        batch = first_batch(self._info.job, size)
        return batch if self.device == "cpu" else map_tensors(lambda tensor: tensor.to(self.device), batch)


def _typical_of(run: Run, quickest: bool) -> _Step:
    """Returns what a step of a run's first worker takes, and what its process held."""
    steps = [event for event in run.events if isinstance(event, Stepped) and event.examples and event.rank == 0]
    ended = next(event for event in run.events if isinstance(event, WorkerEnded) and event.rank == 0)
    return replace(_typical(steps, quickest), peak_bytes=ended.peak_memory_bytes - ended.runtime_bytes)


def _typical(steps: Sequence[Stepped], quickest: bool) -> _Step:
    """Returns the medians of steps after the warm-up, or of the quickest tenth, and how much their times deviate."""
    warm = steps[min(WARM_UP_STEPS, len(steps) // 2) - 1 :]
    timed = [(later.time_s - earlier.time_s, later) for earlier, later in pairwise(warm)]
    totals = [total for total, _ in timed]
    spread = stdev(totals) / mean(totals)
    if quickest:
        timed = sorted(timed, key=lambda each: each[0])[: max(_QUICKEST, len(timed) // 10)]
    compute_s = median(step.compute_s for _, step in timed)
    update_s = median(step.update_s for _, step in timed)
    # Waiting for data is none of the model's business.
    rest_s = median(total - step.compute_s - step.update_s - step.wait_s for total, step in timed)
    return _Step(compute_s, update_s, max(0.0, rest_s), spread)
