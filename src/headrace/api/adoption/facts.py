"""What a dry run of a script has seen, as the two processes exchange it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.spec.plain import from_plain, to_plain
from headrace.trees import as_json, from_json

FACTS = "facts.json"
SEED = 20_000
"""Of the random numbers of the first step; the next has the next one. What a step draws is thus the same in its job."""


@dataclass(frozen=True)
class Frame:
    """A function of the script that was running when its first step differentiated.

    Attributes:
        function: its name; "<module>" for the script itself.
        first: the line where it begins.
        line: the line that it was at.
        names: the expression of each object that training needs, by its role ("model", "optimizer", "loader",
            "schedule", "arguments"; further ones have a number, "model 1"), where this function has one.
        devices: the names of this function that are devices.
        others: the names of its other loaders, of data of the same kind.
    """

    function: str
    first: int
    line: int
    names: dict[str, str]
    devices: tuple[str, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a dry run has seen.

    Attributes:
        problem: why no form can be written; empty where one can.
        frames: from the script itself to the function whose loop takes the batches.
        loop_line: where that loop takes a batch; 0 where there is no loader.
        elsewhere: the file of that loop, where it is not the script.
        optimizers: how many were stepped.
        passes: most backward passes between two steps.
        loaders: how many loaders the steps took batches from.
        whole: whether the optimizer has one group, of all parameters in the model's order.
        batch_size, examples: of the loader; 0 where it has none.
        left_out: examples at the end of an epoch that the loader leaves out (`drop_last`).
        arguments: what the script's parser returned, as far as these are literals.
        steps: how many were seen.
        order: why a job cannot go through the loader's batches in its order; empty where it can.
    """

    problem: str = ""
    frames: tuple[Frame, ...] = ()
    loop_line: int = 0
    elsewhere: str = ""
    optimizers: int = 0
    passes: int = 0
    loaders: int = 0
    whole: bool = False
    batch_size: int = 0
    examples: int = 0
    left_out: int = 0
    arguments: dict[str, Any] | None = None
    steps: int = 0
    order: str = ""


@dataclass(frozen=True)
class SeenStep:
    """One step: the batch that it took, its loss, and the model's parameters and buffers after it."""

    batch: Any
    loss: float
    after: dict[str, Tensor]


def write_facts(folder: Path, facts: Facts) -> None:
    """Writes what was seen."""
    (folder / FACTS).write_text(json.dumps(to_plain(facts)), encoding="utf-8")


def read_facts(folder: Path) -> Facts:
    """Returns what was seen."""
    return from_plain(Facts, json.loads((folder / FACTS).read_text(encoding="utf-8")))


def write_state(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    """Writes parameters and buffers after so many steps."""
    save_file({name: each.detach().clone().contiguous() for name, each in tensors.items()}, _state(folder, number))


def read_state(folder: Path, number: int) -> dict[str, Tensor]:
    """Returns parameters and buffers after so many steps."""
    return dict(load_file(_state(folder, number)))


def write_batch(folder: Path, number: int | str, batch: Any, loss: float) -> None:
    """Writes the batch of a step, made of tensors and of what JSON has, and its loss.

    Raises a TypeError that says what else it holds.
    """
    tensors: list[Tensor] = []
    text = json.dumps({"batch": as_json(plain(batch), tensors), "loss": loss})
    save_file(
        {str(place): each.detach().clone().contiguous() for place, each in enumerate(tensors)},
        folder / f"batch-{number}",
    )
    (folder / f"batch-{number}.json").write_text(text, encoding="utf-8")


def write_examples(folder: Path, role: str, data: Any, count: int) -> None:
    """Writes the first, a middle and the last example of some data."""
    for place in places(count):
        begin_anew(place)
        write_batch(folder, f"{role}-{place}", data[place], 0.0)


def read_examples(folder: Path, role: str, count: int) -> dict[int, Any]:
    """Returns those examples by their index; {} where there are none."""
    return {place: _read_batch(folder, f"{role}-{place}")[0] for place in places(count)}


def places(count: int) -> list[int]:
    """Returns the indices of the examples that are compared."""
    return sorted({0, count // 2, count - 1}) if count else []


def begin_anew(number: int) -> None:
    """Has random numbers begin at a place of their own."""
    torch.manual_seed(SEED + number)
    random.seed(SEED + number)
    np.random.seed(SEED + number)


def read_steps(folder: Path, count: int) -> list[SeenStep]:
    """Returns the steps."""
    steps = []
    for number in range(count):
        batch, loss = _read_batch(folder, str(number))
        steps.append(SeenStep(batch, loss, read_state(folder, number + 1)))
    return steps


def plain(batch: Any) -> Any:
    """Returns a batch with arrays as tensors; of other mappings and named tuples only what they hold counts."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        held = [plain(each) for each in batch]
        return tuple(held) if isinstance(batch, tuple) else held
    if isinstance(batch, np.generic):
        return batch.item()
    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) else batch


def _read_batch(folder: Path, name: str) -> tuple[Any, float]:
    text = json.loads((folder / f"batch-{name}.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / f"batch-{name}")
    # Copies are aligned as a loader's tensors are, which some kernels round by.
    return from_json(text["batch"], lambda place: tensors[str(place)].clone()), text["loss"]


def _state(folder: Path, number: int) -> Path:
    return folder / f"state-{number}.safetensors"
