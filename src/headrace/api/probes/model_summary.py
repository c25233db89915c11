"""summary: what a job's model consists of, layer by layer, before anything is trained."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headrace.api.checks import inspect_job
from headrace.batches import call, examples_of
from headrace.modules import evaluating
from headrace.report.format import byte_count, short
from headrace.report.views.document import embedded, html_text, scrolled_table, table_row
from headrace.spec.job import Job
from headrace.trees import map_tensors
from headrace.worker.session import sample_of

if TYPE_CHECKING:
    from headrace.prediction.memory.plan import MemoryPlan
    from headrace.strategies import Strategy

_HEADS = ("kind", "output", "parameters", "bytes", "FLOPs")


@dataclass(frozen=True)
class LayerSummary:
    """A module that computes: one with parameters of its own, or without children.

    Attributes:
        name: as in `named_modules()`; "" for the model itself.
        kind: its class.
        output: shapes of what it returns for one example, without the batch's dim; "" where forward does not call it.
        parameters, trainable: elements of its own, a tied one where it comes first; those that are not frozen.
        bytes: of its parameters.
        flops: floating-point operations of matrix products, convolutions and attention in forward, for one example.
    """

    name: str
    kind: str
    output: str
    parameters: int
    trainable: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class ModelSummary:
    """What a model consists of; printed, a table.

    Attributes:
        name: the model's class.
        layers: in the order in which forward first calls them, then those that it does not call.
        parameters, trainable: elements; sparse embeddings are not among them.
        parameter_bytes, buffer_bytes: their sizes.
        training_bytes: of parameters, their gradients and the optimizer's state on one device, without activations.
        flops: floating-point operations of forward for one example, those outside of the layers too.
        table_bytes: of sparse embeddings when all of their rows are held, by name.

    Examples:
        >>> [layer.name for layer in hr.summary(job).layers]
        ['0', '1', '2']
    """

    name: str
    layers: tuple[LayerSummary, ...]
    parameters: int
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    training_bytes: int
    flops: int
    table_bytes: Mapping[str, int]

    def __str__(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("layer", overflow="fold")
        for head in _HEADS:
            table.add_column(head, justify="left" if head in _HEADS[:2] else "right", overflow="fold")
        for each in self.layers:
            table.add_row(*map(Text, (each.name or "(itself)", *_cells(each))))
        # In letters that the terminal has: it is printed.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        written = io.BytesIO()
        text = io.TextIOWrapper(written, encoding, errors="replace", newline="\n")
        Console(file=text, width=100, highlight=False, color_system=None).print(table)
        text.write("\n".join(self._lines()) + "\n")
        text.flush()
        return written.getvalue().decode(encoding)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        rows = [
            table_row(html_text(each.name or "(itself)"), list(map(html_text, _cells(each)))) for each in self.layers
        ]
        lines = "<br/>".join(map(html_text, self._lines()))
        return embedded([scrolled_table(_HEADS, rows, "layer"), f"<p>{lines}</p>"])

    def _lines(self) -> list[str]:
        frozen = self.parameters - self.trainable
        lines = [
            f"{self.name}: {self.parameters:,} parameters ({byte_count(self.parameter_bytes)})"
            + (f", {frozen:,} of them frozen" if frozen else "")
            + (f"; buffers {byte_count(self.buffer_bytes)}" if self.buffer_bytes else ""),
            f"{short(self.flops)} FLOPs an example in forward",
            f"{byte_count(self.training_bytes)} for parameters, gradients and optimizer state, without activations",
        ]
        return lines + [f"sparse embedding {name}: {byte_count(size)}" for name, size in self.table_bytes.items()]


@overload
def summary(job: Job) -> ModelSummary: ...
@overload
def summary(job: Job, strategy: str | Strategy) -> MemoryPlan: ...
def summary(job: Job, strategy: str | Strategy | None = None) -> ModelSummary | MemoryPlan:
    """Returns what a job's model consists of, or with a strategy the memory that its fullest worker will need.

    Without a strategy it runs the model on the first examples of the job's data, in evaluation mode. With one the model
    is trained over tensors without values, as by workers on CPUs of one host. The job is not changed.

    Raises:
        JobError: the model cannot be built or run, or looks at values that it computes.
        UsageError, DataError: as for `fit`; or the memory under that strategy cannot be planned.

    Examples:
        >>> found = hr.summary(job)
        >>> found.parameters, found.parameter_bytes
        (58, 232)
    """
    if strategy is not None:
        return _memory(job, strategy)
    info = inspect_job(job)
    module, model = info.module, info.model
    batch = sample_of(info.job)
    examples = examples_of(batch)
    outputs: dict[str, str] = {}
    modules = {name: part for name, part in module.named_modules() if _computes(part)}
    counter = FlopCounterMode(display=False)
    with ExitStack() as stack:
        for name, part in modules.items():
            handle = part.register_forward_hook(partial(_note_output, outputs, name))
            stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(module))
        stack.enter_context(counter)
        call(module, batch, info.job.inputs)
    counts = {str(name): sum(by_kind.values()) for name, by_kind in counter.get_flop_counts().items()}
    kind = type(module).__name__
    seen: set[int] = set()
    layers = {}
    for name, part in modules.items():
        own = [each for each in part.parameters(recurse=False) if id(each) not in seen]
        seen |= {id(each) for each in own}
        layers[name] = LayerSummary(
            name,
            type(part).__name__,
            outputs.get(name, ""),
            sum(each.numel() for each in own),
            sum(each.numel() for each in own if each.requires_grad),
            sum(each.nbytes for each in own),
            counts.get(f"{kind}.{name}" if name else kind, 0) // examples,
        )
    order = [*outputs, *(name for name in modules if name not in outputs)]
    return ModelSummary(
        kind,
        tuple(layers[name] for name in order),
        sum(each.elements for each in model.parameters),
        sum(each.elements for each in model.trainable),
        model.parameter_bytes,
        sum(each.bytes for each in model.buffers),
        model.parameter_bytes + (model.copies - 1) * model.trainable_bytes,
        counter.get_total_flops() // examples,
        {table.name: table.rows * table.row_bytes for table in model.tables},
    )


def _memory(job: Job, strategy: str | Strategy) -> MemoryPlan:
    # Here, because it loads torch.distributed.
    from headrace.api.memory.planning import plan_memory

    return plan_memory(job, strategy)


def _computes(part: nn.Module) -> bool:
    return next(part.children(), None) is None or next(part.parameters(recurse=False), None) is not None


def _note_output(outputs: dict[str, str], name: str, part: nn.Module, given: Any, output: Any) -> None:
    if name in outputs:
        return
    shapes: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(" × ".join(map(str, tensor.shape[1:])) or "1")
        return tensor

    map_tensors(note, output)
    outputs[name] = ", ".join(shapes)


def _cells(layer: LayerSummary) -> tuple[str, ...]:
    frozen = " (frozen)" if layer.parameters and not layer.trainable else ""
    return (
        layer.kind,
        layer.output or "not called",
        f"{layer.parameters:,}{frozen}" if layer.parameters else "",
        byte_count(layer.bytes) if layer.bytes else "",
        short(layer.flops) if layer.flops else "",
    )
