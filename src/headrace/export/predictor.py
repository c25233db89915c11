"""The trained model as a function of named tensors: what every exported file computes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headrace.batches import call
from headrace.errors import JobError
from headrace.export.tables import with_whole_tables
from headrace.spec.job import Job

_LABELS = "labels"
"""The keyword by which a model that computes its loss gets the targets; without it, it predicts."""
_LOSS = "loss"


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of one call of the model by name; the first `positional` are passed by position."""

    tensors: Mapping[str, Tensor]
    positional: int


@runtime_checkable
class Exportable(Protocol):
    """A model that answers in another form than it is trained in: a recommender gives the best of all films."""

    def exported(self) -> nn.Module:
        """Returns the module that answers, with the trained weights; it takes keys of the batch by name."""


class Predictor(nn.Module):
    """Computes what `Run.predict` returns: the model's output after the task's activation, as named tensors.

    Args:
        model: the trained model, in evaluation mode.
        names: of the inputs, in the order of the arguments.
        positional: how many of them the model takes by position.
    """

    def __init__(self, model: nn.Module, job: Job, names: tuple[str, ...], positional: int) -> None:
        super().__init__()
        self.model = model
        self._activation = job.task.activation if job.task else None
        self._names = names
        self._positional = positional

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        named = dict(zip(self._names[self._positional :], inputs[self._positional :], strict=True))
        output = self.model(*inputs[: self._positional], **named)
        return outputs_of(self._activation(output) if self._activation else output)


def answering_form(job: Job, model: nn.Module) -> tuple[Job, nn.Module]:
    """Returns what is exported of a trained model: itself, or what its `exported()` makes of it.

    The job that comes with it selects the inputs of that module, and has neither an activation nor an evaluation set,
    for its metrics are of the form that is trained; its data are what the trained model is evaluated on.
    """
    if not isinstance(model, Exportable):
        return job, with_whole_tables(model)
    module = with_whole_tables(model.exported())
    names = tuple(inspect.signature(module.forward).parameters)
    data = job.eval_sets.get("", job.data)
    return replace(job, data=data, eval_data=None, inputs=names, task=None, loss=_none, metrics=None), module


def inputs_of(job: Job, model: nn.Module, batch: Any) -> ModelInputs:
    """Returns what the model gets from a batch, by the names of `forward`'s parameters.

    Raises:
        JobError: it is not a flat list of tensors.
    """
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    call(lambda *args, **kwargs: seen.append((args, kwargs)), batch, job.inputs)
    ((args, kwargs),) = seen
    if job.task is not None and job.task.name.startswith("own_loss"):
        kwargs.pop(_LABELS, None)
    inputs = dict(zip(_parameters(model, len(args)), args, strict=True)) | kwargs
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise JobError(
                f"the model's input {name} is a {type(value).__name__}; an exported model takes tensors by name: let "
                "the batch be a dict of tensors, or let Job.inputs select them"
            )
    return ModelInputs(inputs, len(args))


def outputs_of(output: Any) -> dict[str, Tensor]:
    """Returns the tensors of a model's output by name; a loss is none of them, and what is no tensor is left out.

    Raises:
        JobError: there is no tensor in it.
    """
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        pairs = [(str(name), value) for name, value in output.items() if name != _LOSS]
    elif isinstance(output, tuple | list):
        pairs = [(f"output_{index}", value) for index, value in enumerate(output)]
    else:
        pairs = []
    tensors = {name: value for name, value in pairs if isinstance(value, Tensor)}
    if not tensors:
        raise JobError(
            f"the model returns a {type(output).__name__} without a tensor on its first level; return a tensor, a "
            "tuple or a dict of tensors"
        )
    return tensors


def predictor_of(job: Job, model: nn.Module, batch: Any) -> tuple[Predictor, ModelInputs]:
    """Returns the model as a function of named tensors, and its inputs of a batch."""
    # A cache of keys and values is state between calls, which an exported file does not have.
    if getattr(getattr(model, "config", None), "use_cache", None):
        model.config.use_cache = False  # type: ignore[union-attr]
    inputs = inputs_of(job, model, batch)
    return Predictor(model.eval(), job, tuple(inputs.tensors), inputs.positional).eval(), inputs


def keeps_cache(model: nn.Module) -> bool:
    """Whether the model would keep keys and values between calls, which is left out of an export."""
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def _none(output: Any, target: Any) -> Tensor:
    raise JobError("what a model exports in its own place has no loss")


def _parameters(model: nn.Module, count: int) -> list[str]:
    """Returns the names of the first parameters of `forward`; "input_<n>" where it takes any number."""
    plain = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return [plain[index] if index < len(plain) else f"input_{index}" for index in range(count)]


def run(module: Predictor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Runs the trained model without gradients."""
    with torch.no_grad():
        outputs: dict[str, Tensor] = module(*inputs.values())
    return outputs
