"""Options that a job leaves open, the order of memory and compilation: what training steps show to be faster here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import nn

from headrace.api.checks import JobInfo
from headrace.api.probes.sets import plan_of
from headrace.batches import examples_of
from headrace.devices import HOST, captures
from headrace.errors import HeadraceError, JobError, UsageError, in_one_line
from headrace.machine.allocator import give_back
from headrace.modules import copy_module
from headrace.pipeline.layer_cost import clock
from headrace.pipeline.profile import first_batch, limited_threads
from headrace.spec.cluster import Cluster
from headrace.spec.job import Share
from headrace.spec.options import CUDAGRAPHS
from headrace.spec.plan import Plan
from headrace.strategies import Strategy
from headrace.training.fixed_shapes.graph_mode import CompiledModule, GraphMode
from headrace.training.whole_model import WholeModel, use_channels_last
from headrace.worker.session import alone, objectives_of

_CLEAR = 0.97
"""Part of the time of the model's own order that a step in the other order may take at most, to be chosen."""
_SECONDS = 1.0
_STEP_S = 0.1
"""How long a measured step takes at most; with more examples than fit into it, fewer are measured."""
_FEW = 2
_LEAST, _MOST = 3, 20
"""Steps in each order that count."""


@dataclass(frozen=True)
class FormatChoice:
    """Whether weights are put in channels-last order, and the line that says why."""

    channels_last: bool
    line: str


def settle_memory_format(
    info: JobInfo, strategy: Strategy, plan: Plan, cluster: Cluster, measured_once: Callable[[Callable[[], str]], str]
) -> tuple[JobInfo, Plan]:
    """Returns the job with the order of memory that it runs in, never "auto", and its plan.

    Of several processes with the same job, which all call `measured_once`, the first measures for all.

    Raises:
        UsageError: the job asks for an order that the strategy does not keep, or for one that no weight can have.
        JobError: the model fails in the order that the job asks for.
    """
    wanted = info.job.options.memory_format
    if wanted == "preserve":
        return info, plan
    obstacle = strategy.refuses_channels_last()
    if not obstacle and all(len(each.shape) != 4 for each in info.model.parameters):
        obstacle = "it orders weights of 4 dims, those of convolutions over two dims, and the model has none"
    if wanted == "channels_last":
        if obstacle:
            raise UsageError(f"memory_format='channels_last': {obstacle}; or leave memory_format out")
        _require_step(info, cluster.device)
        choice = FormatChoice(channels_last=True, line="")
    elif obstacle:
        choice = FormatChoice(channels_last=False, line=f"memory_format: the model's own; {obstacle}")
    else:

        def measured() -> str:
            found = _choose(info, plan, cluster.device)
            return json.dumps([found.channels_last, found.line])

        choice = FormatChoice(*json.loads(measured_once(measured)))
    settled = "channels_last" if choice.channels_last else "preserve"
    job = replace(info.job, options=replace(info.job.options, memory_format=settled))
    info = replace(info, job=job, notices=(*info.notices, *filter(None, [choice.line])))
    if not choice.channels_last:
        return info, plan
    info = replace(info, model=info.model.in_channels_last())
    return info, plan_of(strategy, info.model, cluster, info.sets)


def _require_step(info: JobInfo, device: str) -> None:
    """Raises a JobError if a training step fails in channels-last order."""
    if info.model.tables:
        # Their rows come from the exchange.
        return
    with torch.random.fork_rng(devices=[]):
        share = _first_share(info, _FEW)
        try:
            _Trial(info, True, device).step(share)
        except HeadraceError:
            raise
        except Exception as error:
            raise JobError(
                f"the model cannot be trained with memory_format='channels_last': {type(error).__name__}: {error}; "
                "use flatten or reshape in forward, which take any order, or leave memory_format out"
            ) from error


def _choose(info: JobInfo, plan: Plan, device: str) -> FormatChoice:
    """Measures steps in both orders, as a worker of the plan would make them."""
    threads = plan.role(0).threads if device == "cpu" else None
    share = -(-info.job.global_batch_size // plan.replicas)
    try:
        with torch.random.fork_rng(devices=[]), limited_threads(threads):
            return _measured(info, device, share, threads == 1)
    except HeadraceError:
        raise
    except Exception as error:  # whatever a user's model raises
        line = f"memory_format: the model's own; a step to measure failed: {in_one_line(error)}"
        return FormatChoice(channels_last=False, line=line)
    finally:
        # The allocator of a launcher would keep it for ever.
        give_back()


def _measured(info: JobInfo, device: str, wanted: int, one_thread: bool) -> FormatChoice:
    own, last = _Trial(info, False, device, one_thread), _Trial(info, True, device, one_thread)
    few = _first_share(info, min(_FEW, wanted))
    # The first step in each order, which sets up memory and kernels, does not count.
    for trial in (own, last):
        trial.step(few)
    examples = max(few.examples, min(wanted, int(few.examples * _STEP_S / max(own.step(few), 1e-9))))
    share = _first_share(info, examples)
    own_s, last_s = _in_turn(own, last, share)
    part = f", measured with {share.examples} of {wanted} examples" if share.examples < wanted else ""
    if last_s < _CLEAR * own_s:
        line = f"channels_last, {1e3 * last_s:.1f} ms a step against {1e3 * own_s:.1f}{part}"
        return FormatChoice(channels_last=True, line=f"memory_format: {line}")
    line = f"the model's own, {1e3 * own_s:.1f} ms a step against {1e3 * last_s:.1f} in channels_last{part}"
    return FormatChoice(channels_last=False, line=f"memory_format: {line}")


def _in_turn(own: _Trial, last: _Trial, share: Share) -> tuple[float, float]:
    """Returns the seconds of a step of each, the medians of some steps in turn after a first one."""
    until = perf_counter() + _SECONDS
    for trial in (own, last):
        trial.step(share)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < _LEAST or (len(pairs) < _MOST and perf_counter() < until):
        # In turn, because the first one of a pair finds other memory in the cache.
        if len(pairs) % 2:
            after = last.step(share)
            pairs.append((own.step(share), after))
        else:
            pairs.append((own.step(share), last.step(share)))
    own_s, last_s = (median(times) for times in zip(*pairs, strict=True))
    return own_s, last_s


def settle_compile(
    info: JobInfo, plan: Plan, device: str, measured_once: Callable[[Callable[[], str]], str]
) -> JobInfo:
    """Returns the job with what `compile="auto"` chooses here, and a notice with the figures.

    Of several processes with the same job, which all call `measured_once`, the first measures for all.
    """

    def measured() -> str:
        try:
            return json.dumps(_choose_way(info, plan, device))
        finally:
            # The allocator of a launcher would keep it for ever.
            give_back()

    how, line = json.loads(measured_once(measured))
    job = replace(info.job, options=replace(info.job.options, compile=how))
    return replace(info, job=job, notices=(*info.notices, f"compile: {line}"))


def _choose_way(info: JobInfo, plan: Plan, device: str) -> tuple[bool | str, str]:
    """Measures steps as a worker of the plan would make them, eager and compiled; returns what to take, and why."""
    threads = plan.role(0).threads if device == HOST else None
    last = info.job.options.memory_format == "channels_last"
    ways: tuple[bool | str, ...] = (CUDAGRAPHS, "reduce-overhead") if captures(device) else (True,)
    best: bool | str = False
    least, said = _CLEAR, []
    with torch.random.fork_rng(devices=[]), limited_threads(threads):
        share = _first_share(info, -(-info.job.global_batch_size // plan.replicas))
        eager = _Trial(info, last, device, threads == 1)
        for how in ways:
            graph = partial(CompiledModule, full=share.examples, how=how)
            compiled = _Trial(info, last, device, threads == 1, graph)
            began = perf_counter()
            try:
                compiled.step(share)
                compile_s = perf_counter() - began
                eager_s, compiled_s = _in_turn(eager, compiled, share)
            except JobError as error:
                said.append(f"{how} fails: {in_one_line(error)}")
                continue
            said.append(
                f"{1e3 * compiled_s:.2f} ms a step with {how}, after {compile_s:.0f} s of compiling, against "
                f"{1e3 * eager_s:.2f} ms"
            )
            if compiled_s < least * eager_s:
                best, least = how, compiled_s / eager_s
    return best, f"{best}; {'; '.join(said)}"


def _first_share(info: JobInfo, examples: int) -> Share:
    batch = first_batch(info.job, examples)
    count = examples_of(batch)
    return Share(batch, count, count, 0)


class _Trial:
    """Training steps, without updates, of a copy of the model in one order of memory, compiled or not.

    Their time is that of the processor where they take one thread, so that other programs do not count.
    """

    def __init__(
        self,
        info: JobInfo,
        channels_last: bool,
        device: str,
        one_thread: bool = False,
        graph: Callable[[nn.Module], GraphMode] | None = None,
    ) -> None:
        job = info.job
        self._device, self._clock = torch.device(device), int(one_thread)
        self._module = copy_module(info.module).to(device)
        if channels_last:
            use_channels_last(self._module)
        options = [alone(job, name).options for name in job.sets] or [job.options]
        objectives = objectives_of(job, self._module, info.weighed)
        pairs = zip(objectives, options, strict=True)
        self._computes = [
            WholeModel(self._module, objective, options=each, graph=graph(self._module) if graph else None)
            for objective, each in pairs
        ]

    def step(self, share: Share) -> float:
        """Returns the seconds of a step."""
        self._module.zero_grad()
        began = clock(self._device)
        for compute in self._computes:
            compute.run(share)
        return clock(self._device)[self._clock] - began[self._clock]
