"""What each layer of a model costs: its forward and backward, what autograd keeps, what crosses a cut behind it.

Every layer is a stage of its own, and a micro-batch goes through all of them in one process:

    forward    x ─► layer 0 ─► detached ─► layer 1 ─► detached ─► ...
                     │ ▲                    │ ▲
    backward         └─┘                    └─┘ ones

Each layer's backward follows its forward at once, from a gradient of ones, and its gradients are dropped before the
next layer runs: so a model can be measured whose activations and gradients do not fit into memory. The first sweep
counts bytes. The others count seconds: of those that a layer computes the median, of those that it waits (for a file,
say) the least.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batches import select_target
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.errors import JobError, UnfitMachine, UsageError
from headrace.machine.allocator import give_back
from headrace.machine.limits import out_of_memory
from headrace.metrics import weigh
from headrace.modules import set_train_modes
from headrace.pipeline.backward import run_backward
from headrace.pipeline.digest import digest
from headrace.pipeline.layer_cost import LayerTiming, between, clock, kept_bytes, place, typical
from headrace.pipeline.stage import OUTPUT, Stage, TracedModel, at_once, cut
from headrace.pipeline.trace.tracing import trace
from headrace.spec.compute import LayerSpec
from headrace.spec.job import Job
from headrace.spec.model import ProfileRequest
from headrace.training.deferred.lending import holding, lending
from headrace.training.deferred.parts import keep_parts, parts_of, set_aside
from headrace.training.shared_buffers.batch_norm import NO_STATISTICS
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import unchanged
from headrace.trees import map_tensors, nbytes

_LEAST, _MOST = 5, 30
"""Sweeps that count."""
_LIMITING = threading.RLock()


@dataclass(frozen=True)
class MeasuredLayers:
    """A model's layers, and in how many sweeps they were measured."""

    layers: tuple[LayerSpec, ...]
    sweeps: int
    notices: tuple[str, ...]


def profile(
    module: nn.Module,
    objective: Objective,
    batch: Any,
    *,
    sample: Any = None,
    seconds: float = 1.5,
    threads: int | None = None,
    autocast: torch.dtype | None = None,
) -> MeasuredLayers:
    """Measures a model's layers. The model and the random numbers are left as they were, its gradients empty.

    Layers that cannot be parted are measured together, and the last of them is said to take it all. It takes at least
    `seconds` and 5 sweeps, and at most 30. `sample` are a few examples to find the layers with, all of whose
    activations are held; None for `batch`. Raises a `JobError` if the model cannot be cut.
    """
    with lending(module), ExitStack() as stack:
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        for each in (unchanged(module), limited_threads(threads)):
            stack.enter_context(each)
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, autocast))
        traced = trace(module, batch if sample is None else sample, objective.inputs)
        groups = groups_of(traced)
        set_train_modes(module)
        sweep = Sweep(module, cut(traced, groups), traced.inputs(batch), loss_of(objective, batch), device)
        saved, crossing = sweep.count()
        times: list[list[LayerTiming]] = []
        until = perf_counter() + seconds
        while len(times) < _LEAST or (perf_counter() < until and len(times) < _MOST):
            times.append([each for layer in sweep.run() for each in layer])
    figures = typical(times)
    size = {name: nbytes(parameter) for name, parameter in module.named_parameters()}
    rows = zip(figures[::2], figures[1::2], saved, crossing, strict=True)
    measured = dict(zip((group[-1] for group in groups), rows, strict=True))
    layers = []
    for layer in traced.layers:
        own_bytes = sum(size[name] for name in layer.parameters)
        costs = measured.get(layer.name, (0.0, 0.0, 0, 0))
        layers.append(LayerSpec(layer.name, layer.parameters, own_bytes, *costs, bool(layer.joined)))
    return MeasuredLayers(tuple(layers), len(times), traced.notices)


def loss_of(objective: Objective, batch: Any) -> Callable[[Any], Tensor]:
    """Returns a function of the output: the mean loss of a batch."""

    def loss(output: Any) -> Tensor:
        total, weight = weigh(objective.loss(output, select_target(batch, objective.target)), 1, "the loss")
        return total / weight

    return loss


def groups_of(traced: TracedModel) -> list[list[str]]:
    """Returns the names of layers, those together that cannot be parted."""
    groups: list[list[str]] = [[]]
    for layer in traced.layers:
        groups[-1].append(layer.name)
        if not layer.joined:
            groups.append([])
    return [group for group in groups if group]


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Lets torch compute with so many threads; None for as many as before.

    The number is one for the process: of several threads, one at a time changes it and gives it back.
    """
    with _LIMITING:
        before = torch.get_num_threads()
        torch.set_num_threads(count or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


_SAMPLED = 2
"""Examples with which the layers are found."""
_KEPT = 16
"""Measurements that a process keeps."""
_measured: dict[str, MeasuredLayers] = {}


def measure(job: Job, module: nn.Module, objective: Objective, request: ProfileRequest, device: str) -> MeasuredLayers:
    """Measures the layers on the first examples of the job's data, and gives the memory back to the system.

    Returns what this process has measured before of a model of the same code and configuration, with examples of the
    same form. Raises a `JobError` if the model cannot be cut, an `UnfitMachine` if there is not enough memory.
    """
    batch, sample = first_batch(job, request.examples), first_batch(job, _SAMPLED)
    if device != "cpu":
        module, parts = copy.deepcopy(module), parts_of(module)
        if parts:
            keep_parts(module, parts)
        with set_aside(module):
            module.to(device)
        batch, sample = map_tensors(lambda tensor: tensor.to(device), (batch, sample))
    autocast = torch.bfloat16 if job.options.precision == "bf16" else None
    form = map_tensors(lambda tensor: (tensor.shape, tensor.dtype), batch)
    key = digest(module, objective, sample, form, request, torch.get_num_threads(), device, autocast)
    if key is not None and (known := _measured.get(key)) is not None:
        return known
    try:
        found = profile(module, objective, batch, sample=sample, threads=request.threads or None, autocast=autocast)
    except ValueError as error:
        if request.examples > 1 or NO_STATISTICS not in str(error):
            raise
        raise UsageError(
            f"a micro-batch has 1 of {job.global_batch_size} examples, and BatchNorm computes no statistics of one; "
            "use a larger global_batch_size, or fewer micro_batches or replicas"
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise JobError(
                f"the model fails where its layers are measured one after the other, with {request.examples} examples: "
                f"{error}; where it keeps a graph from one forward to the next, detach() it, or use a strategy that "
                "runs the whole model, as mirrored"
            ) from error
        raise UnfitMachine(
            f"there was no memory to measure the layers of {type(module).__name__}, all of them, with a micro-batch of "
            f"{request.examples} examples: {error}; use more micro-batches, or a machine with more memory"
        ) from error
    finally:
        # The allocator of a launcher would keep it for ever.
        give_back()
    if key is not None:
        with _LIMITING:
            if len(_measured) == _KEPT:
                del _measured[next(iter(_measured))]
            _measured[key] = found
    return found


def first_batch(job: Job, examples: int) -> Any:
    """Returns the first examples of a job's data, or all of them if it has fewer."""
    pipeline, _ = as_pipeline(job.data)
    count = max(1, min(examples, len(pipeline)))
    loader = Loader(pipeline, job.seed, count, (1,), 0, ordered=True)
    return next(share.batch for share in loader.sweep(alone=True) if share.examples)


@dataclass
class Sweep:
    """Micro-batches through all layers and back; each layer is a stage."""

    module: nn.Module
    stages: Sequence[Stage]
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    device: torch.device

    def run(self) -> list[tuple[LayerTiming, LayerTiming]]:
        """Returns what each layer took, forward and backward."""
        passes = []

        def measure(stage: Stage, got: Mapping[str, Any]) -> dict[str, Any]:
            began: list[tuple[float, float]] = []
            # The second time counts, when gradients add up, as they do from micro-batch to micro-batch.
            for _ in range(2):
                values = _received(got)
                # What forward does on the way to the layer is done once a stage, not once a layer.
                gave, roots = self._forward(stage, values, lambda: began.append(clock(self.device)))
                forwarded = clock(self.device)
                if roots:
                    with stage.gradients.adding():
                        run_backward(roots, [torch.ones_like(root) for root in roots])
                ended = clock(self.device)
            passes.append((between(began[-1], forwarded), between(forwarded, ended)))
            return gave

        self._each(measure)
        return passes

    def count(self) -> tuple[list[int], list[int]]:
        """Returns the bytes that autograd keeps for each layer and for none before it, and those alive behind it."""
        saved: list[int] = []
        crossing = [0] * len(self.stages)
        # Names of values that are kept for a layer already. Places in memory are taken again.
        counted: set[str] = set()

        def measure(stage: Stage, got: Mapping[str, Any]) -> dict[str, Any]:
            # Here, because a model that is made in parts has those of one layer at a time.
            model = {place(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
            kept, (gave, _) = kept_bytes(lambda: self._forward(stage, _received(got)), lambda made: made[1])
            before = model | {place(got[name]) for name in counted & got.keys()}
            saved.append(sum(size for place, size in kept.items() if place not in before))
            held = {**got, **gave}
            tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
            counted.update(name for name, tensor in tensors.items() if place(tensor) in kept.keys() | before)
            for value in stage.sends:
                for index in range(value.producer, value.consumers[-1]):
                    crossing[index] += nbytes(gave[value.name])
            return gave

        self._each(measure)
        return saved, crossing

    def _each(self, measure: Callable[[Stage, Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Calls `measure` with every layer and its inputs; it returns the layer's outputs."""
        alive: dict[str, Any] = {}
        for stage in self.stages:
            got = {name: self.inputs[name] for name in stage.inputs}
            got |= {value.name: alive[value.name] for value in stage.receives}
            # Outside of what is measured.
            with holding(self.module, stage.parameters):
                gave = measure(stage, got)
            alive |= _received({value.name: gave[value.name] for value in stage.sends})
            del got, gave
            for value in stage.receives:
                if value.consumers[-1] == stage.index:
                    del alive[value.name]
            for name in stage.parameters:
                self.module.get_parameter(name).grad = None

    def _forward(
        self, stage: Stage, values: dict[str, Any], begun: Callable[[], None] = at_once
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Returns what a layer gives, and what of it has a gradient."""
        gave = stage.run(values, begun)
        if stage.last:
            gave[OUTPUT] = self.loss(gave[OUTPUT])
        roots = [value for value in gave.values() if isinstance(value, Tensor) and value.requires_grad]
        return gave, roots


def _received(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values as a stage gets them: without what they were made of."""
    return {
        name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
