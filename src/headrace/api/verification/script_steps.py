"""Plain scripts: the models that `hr.setup` is given, written after each step, and compared."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from headrace.api.verification.differences import BY_DEFINITION, DIFFERS, DOUBLE, EXACT, SINGLE, Row, compare_recordings
from headrace.api.verification.jobs import random_layers
from headrace.api.verification.recording import Trained, by_kind
from headrace.api.verification.verification import Verification
from headrace.errors import RunFailed
from headrace.machine.identity import verified_steps
from headrace.modules import parameters_and_buffers

_FACTS = "facts.json"
_numbers = itertools.count()


def record_steps(model: nn.Module, optimizer: torch.optim.Optimizer | None, loader: object, strategy: str) -> None:
    """Writes a model after each step, and ends the process after the last one that `headrace verify` asks for."""
    asked = verified_steps()
    if asked is None:
        return
    number, steps = next(_numbers), itertools.count()
    folder = asked[0] / f"model-{number}"
    folder.mkdir(parents=True)
    data = loader.dataset if isinstance(loader, DataLoader) else ()
    facts = {
        "strategy": strategy,
        "batch": getattr(loader, "batch_size", None) or 0,
        "examples": len(data) if isinstance(data, Sized) else 0,
        "random": random_layers(model),
    }
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")

    def write(*_: object) -> None:
        step = next(steps)
        tensors = {name: each.clone().contiguous() for name, each in parameters_and_buffers(model)}
        save_file(tensors, folder / f"{step:06d}.safetensors")
        if step == asked[1] and number == 0:
            raise SystemExit(0)

    if optimizer is not None:
        write()
        optimizer.register_step_post_hook(write)
        return
    # What the script has made of the parameters is there when the next pass begins.
    plain = torch.autograd.backward

    def backward(*given: Any, **named: Any) -> None:
        write()
        plain(*given, **named)

    # `Tensor.backward` calls it by this name.
    setattr(torch.autograd, "backward", backward)  # noqa: B010


def compare_scripts(script: Path, alone: Path, launched: Path, workers: int) -> Verification:
    """Compares what a script has written alone with what each of its processes has.

    Raises:
        RunFailed: it has written nothing, since it does not call `hr.setup`.
    """
    models = sorted(path.name for path in alone.glob("rank-0/model-*"))
    if not models:
        raise RunFailed(f"{script} calls neither hr.setup nor hr.fit or hr.launch, so there is nothing to compare")
    rows: list[Row] = []
    for model in models:
        folders = (alone / "rank-0", *(launched / f"rank-{rank}" for rank in range(workers)))
        plain, *ranks = (
            Trained(
                rounds={int(path.stem): by_kind(load_file(path)) for path in (folder / model).glob("*.safetensors")}
            )
            for folder in folders
        )
        facts = json.loads((launched / "rank-0" / model / _FACTS).read_text(encoding="utf-8"))
        double = all(each.dtype != torch.float32 for each in plain.rounds[0]["parameters"].values())
        found = compare_recordings(ranks[0], plain, DOUBLE if double else SINGLE)
        if facts["random"]:
            why = f"{facts['random']}: each process has its own share"
            found = [replace(row, verdict=BY_DEFINITION, why=why) if row.verdict == DIFFERS else row for row in found]
        for rank, other in enumerate(ranks[1:], 1):
            apart = compare_recordings(other, ranks[0], EXACT)
            found += [replace(row, what=f"{row.what}, rank {rank} and 0") for row in apart]
        rows += [replace(row, what=f"{row.what}{f' ({model})' * (len(models) > 1)}") for row in found]
    return Verification(
        strategy=f"{script.name}, {facts['strategy']}",
        workers=workers,
        rounds=plain.last,
        batch=facts["batch"],
        examples=facts["examples"],
        precision="double" if double else "single",
        reference="the script alone, in one process",
        rows=tuple(rows),
    )
