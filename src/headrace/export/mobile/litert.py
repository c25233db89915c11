"""`model.tflite`: how it is made by litert-torch, and how it is run here, by LiteRT's own interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import DataError, JobError, UnfitMachine
from headrace.export.programs import ProgramRunner, Traced, first_line, quiet, writing
from headrace.export.signature import TensorForm
from headrace.machine.extras import absent, remedy

_TRIED = "litert-torch 0.10 with torch 2.13"


def require_litert() -> None:
    """Raises an UnfitMachine with what to install where LiteRT is not there."""
    if missing := absent("litert-torch", "ai-edge-litert"):
        raise UnfitMachine(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{remedy('litert')} brings them ({_TRIED} was tried, here is torch {torch.__version__}), or write the "
            "format pte"
        )


def save_tflite(traced: Traced, path: Path, inputs: Mapping[str, Tensor]) -> None:
    """Writes `model.tflite`, whose signature has the names of the inputs and outputs.

    Raises:
        JobError: LiteRT cannot convert the model.
    """
    with quiet():
        try:
            import litert_torch

            named = _Named(traced.program.module(), tuple(inputs))
            content = litert_torch.convert(named, sample_kwargs=dict(inputs)).model_content()
        except Exception as error:  # of the converter, which raises what its passes raise
            raise JobError(
                f"LiteRT cannot convert the model: {first_line(error)}; {_TRIED} was tried; the format pte may have it"
            ) from None
    with writing(path):
        path.write_bytes(content)


def one_by_one(forms: Sequence[TensorForm]) -> tuple[TensorForm, ...]:
    """Returns the forms of what `TfliteRunner` takes: any number of examples, each of which is a call."""
    return tuple(replace(form, shape=(-1, *form.shape[1:])) for form in forms)


class TfliteRunner(ProgramRunner):
    """Runs `model.tflite`, example by example: the file has fixed shapes, and whole numbers of 32 bits for 64."""

    def __init__(self, path: Path, inputs: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> None:
        require_litert()
        self._inputs, self._outputs = ([form.name for form in forms] for forms in (inputs, outputs))
        with quiet():
            try:
                from ai_edge_litert.interpreter import Interpreter

                # The signature's memory is the interpreter's, so that it is kept.
                self._interpreter: Any = Interpreter(str(path))
                self._call: Any = self._interpreter.get_signature_runner()
                self._types = {name: detail["dtype"] for name, detail in self._call.get_input_details().items()}
            except (RuntimeError, ValueError, ImportError) as error:
                raise JobError(
                    f"LiteRT's interpreter cannot load {path.name}: {first_line(error)}; {_TRIED} was tried"
                ) from None

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, list[Tensor]] = {name: [] for name in self._outputs}
        given = {name: self._of_file(name, inputs[name].numpy()) for name in self._inputs}
        for index in range(len(next(iter(inputs.values())))):
            answer = self._call(**{name: values[index : index + 1] for name, values in given.items()})
            for name in self._outputs:
                outputs[name].append(torch.from_numpy(answer[name]))
        return {name: torch.cat(parts) for name, parts in outputs.items()}

    def _of_file(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns an input in the file's type; raises DataError for a whole number that this does not hold."""
        given = values.astype(self._types[name])
        if values.dtype.kind in "iu" and (wrong := values[given != values]).size:
            raise DataError(
                f"{name} has {wrong[0]}, and a .tflite file takes {given.dtype.name}: from {np.iinfo(given.dtype).min} "
                f"to {np.iinfo(given.dtype).max}; export the model in another format for larger numbers"
            )
        return given


class _Named(nn.Module):
    """A program that takes its inputs by name, which become those of the file's signature."""

    def __init__(self, program: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.program = program
        self._names = names

    def forward(self, **inputs: Tensor) -> Any:
        """Passes the inputs on in their order."""
        return self.program(*(inputs[name] for name in self._names))
