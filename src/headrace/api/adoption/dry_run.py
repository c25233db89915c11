"""Runs a script until it has made some steps, and notes what meets in its loop: FOLDER STEPS SCRIPT ARGUMENTS.

Nothing of the script is changed but its random numbers: they begin anew with each batch, so that the step of a job can
draw the same.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import runpy
import sys
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from headrace.api.adoption.facts import (
    Facts,
    Frame,
    begin_anew,
    write_batch,
    write_examples,
    write_facts,
    write_state,
)
from headrace.devices import DEVICES
from headrace.modules import parameters_and_buffers

_LITERALS = (bool, int, float, str, type(None))


class DryRun:
    """Watches the script; `facts` is what it has seen."""

    def __init__(self, folder: Path, steps: int, script: Path) -> None:
        self._folder, self._most, self._script = folder, steps, script.resolve()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parsed: tuple[argparse.Namespace, dict[str, Any]] | None = None
        self._loops: list[tuple[FrameType, int, DataLoader[Any]]] = []
        self._trained: list[DataLoader[Any]] = []
        self._stack: list[tuple[FrameType, int, dict[str, Any]]] = []
        self._model: nn.Module | None = None
        self._batch: Any = None
        self._loss, self._passes, self._most_passes, self._steps, self._loop = 0.0, 0, 0, 0, -1
        self._elsewhere, self._problem, self._unfit = "", "", ""

    def watch(self) -> None:
        """Has torch tell of loaders, backward passes, steps, and the parser of arguments of what it returns."""
        iterate: Any = DataLoader.__iter__
        backward: Any = torch.Tensor.backward
        parse = argparse.ArgumentParser.parse_args
        dry = self

        def batches(loader: DataLoader[Any]) -> Iterator[Any]:
            place = dry._in_script(inspect.currentframe())
            if place is not None:
                dry._loops.append((place, place.f_lineno, loader))
            for batch in iterate(loader):
                dry._begin(batch)
                yield batch

        @functools.wraps(backward)
        def noted(loss: torch.Tensor, *given: Any, **named: Any) -> None:
            dry._note_pass(loss, inspect.currentframe())
            backward(loss, *given, **named)

        @functools.wraps(parse)
        def parsed(*given: Any, **named: Any) -> Any:
            found = parse(*given, **named)
            dry._parsed = (found, dict(vars(found)))
            return found

        # Public methods, of which a subclass of a script has its own.
        setattr(DataLoader, "__iter__", batches)  # noqa: B010
        setattr(torch.Tensor, "backward", noted)  # noqa: B010
        setattr(argparse.ArgumentParser, "parse_args", parsed)  # noqa: B010
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def facts(self) -> Facts:
        """Returns what the script was seen to do so far."""
        if not self._stack:
            return Facts(problem=self._problem or "it makes no backward pass, so nothing is trained")
        if not self._optimizers:
            return Facts(problem=self._problem or "no optimizer of torch.optim makes a step")
        loader = self._loops[self._loop][2] if self._loop >= 0 else None
        data = loader.dataset if loader is not None else None
        examples = len(data) if isinstance(data, Sized) and not isinstance(data, IterableDataset) else 0
        batch = (loader.batch_size if loader is not None else 0) or 0
        return Facts(
            problem=self._problem,
            frames=tuple(self._frame(*each) for each in self._stack),
            loop_line=self._loops[self._loop][1] if loader is not None else 0,
            elsewhere=self._elsewhere,
            optimizers=len(self._optimizers),
            passes=self._most_passes,
            loaders=len(self._trained),
            whole=self._is_whole(),
            batch_size=batch,
            examples=examples,
            left_out=examples % batch if loader is not None and loader.drop_last and batch else 0,
            arguments=self._literals(),
            steps=self._steps,
            order=self._unfit or self._order(loader),
        )

    def _order(self, loader: DataLoader[Any] | None) -> str:
        """Writes examples of the loader's data; returns what of it a job cannot have."""
        if loader is None or isinstance(loader.dataset, IterableDataset):
            return ""
        sampler, kinds, data = loader.sampler, (RandomSampler, SequentialSampler), cast("Sized", loader.dataset)
        if type(loader.batch_sampler) is not BatchSampler or type(sampler) not in kinds:
            return f"the loader has a {type(sampler).__name__} of its own, and a job shuffles or goes in order"
        if isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != len(data)):
            return "the loader draws some examples again, and a job takes each once in an epoch"
        others = {
            name: value for _, _, values in self._stack for name, value in values.items() if self._is_alike(value)
        }
        try:
            for name, each in {"train": loader, **others}.items():
                write_examples(self._folder, name, each.dataset, len(cast("Sized", each.dataset)))
        except TypeError as error:
            return f"an example holds {error}, and a job's are made of tensors, numbers and texts"
        return ""

    def _literals(self) -> dict[str, Any] | None:
        if self._parsed is None:
            return None
        return {name: value for name, value in self._parsed[1].items() if _is_literal(value)}

    def _in_script(self, frame: FrameType | None) -> FrameType | None:
        """Returns the innermost frame of the script's folder from this one on."""
        while frame is not None and not self._is_own(frame):
            frame = frame.f_back
        return frame

    def _is_own(self, frame: FrameType) -> bool:
        path = Path(frame.f_code.co_filename)
        return (
            path.is_absolute() and path.parent.is_relative_to(self._script.parent) and "site-packages" not in str(path)
        )

    def _begin(self, batch: Any) -> None:
        self._batch = batch
        begin_anew(self._steps)

    def _note_pass(self, loss: torch.Tensor, frame: FrameType | None) -> None:
        self._loss = float(loss.detach().sum())
        self._passes += 1
        inside = []
        while frame is not None:
            if self._is_own(frame):
                inside.append(frame)
            frame = frame.f_back
        inside.reverse()
        found = [place for place, (held, _, _) in enumerate(self._loops) if any(held is each for each in inside)]
        if found and all(self._loops[found[-1]][2] is not each for each in self._trained):
            self._trained.append(self._loops[found[-1]][2])
        if self._stack or not inside:
            return
        if found:
            self._loop = found[-1]
            loop = self._loops[self._loop][0]
            inside = inside[: next(place for place, each in enumerate(inside) if each is loop) + 1]
        own = [each for each in inside if Path(each.f_code.co_filename) == self._script]
        if inside[-1] is not own[-1]:
            self._elsewhere = inside[-1].f_code.co_filename
        self._stack = [(each, each.f_lineno, {**each.f_locals, **_globals(each)}) for each in own]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
        self._most_passes = max(self._most_passes, self._passes)
        if self._model is None and self._stack:
            self._model = self._model_of(optimizer)
            if self._model is None:
                self._problem = "no module that the loop knows has all parameters of the optimizer"
                raise SystemExit(0)
            write_state(self._folder, 0, dict(parameters_and_buffers(self._model)))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._model is None or optimizer is not self._optimizers[0]:
            return
        try:
            write_batch(self._folder, self._steps, self._batch, self._loss)
        except TypeError as error:
            self._unfit = f"a batch holds {error}, and a job's are made of tensors, numbers and texts"
        self._steps, self._passes = self._steps + 1, 0
        write_state(self._folder, self._steps, dict(parameters_and_buffers(self._model)))
        if self._steps >= self._most:
            raise SystemExit(0)

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
        known = [value for _, _, values in self._stack for _, value in _expressions(values)]
        modules = [each for each in known if isinstance(each, nn.Module)]
        fitting = [each for each in modules if wanted <= {id(parameter) for parameter in each.parameters()}]
        return min(fitting, key=lambda each: sum(1 for _ in each.modules()), default=None)

    def _is_whole(self) -> bool:
        groups = self._optimizers[0].param_groups
        own = list(self._model.parameters()) if self._model is not None else []
        given = list(map(id, groups[0]["params"]))
        trained = [id(each) for each in own if each.requires_grad]
        return len(groups) == 1 and given in (list(map(id, own)), trained)

    def _frame(self, frame: FrameType, line: int, values: dict[str, Any]) -> Frame:
        roles: dict[str, Any] = {}
        for place, optimizer in enumerate(self._optimizers):
            number = f" {place}" * bool(place)
            roles[f"optimizer{number}"] = optimizer
            roles[f"model{number}"] = self._model if not place else self._model_of(optimizer)
        if self._loop >= 0:
            roles["loader"] = self._loops[self._loop][2]
        if self._parsed:
            roles["arguments"] = self._parsed[0]
        found = list(_expressions(values))
        schedules: list[Any] = []
        for _, value in found:
            mine = isinstance(value, LRScheduler) and value.optimizer is self._optimizers[0]
            if mine and all(value is not each for each in schedules):
                schedules.append(value)
        roles |= {f"schedule{f' {place}' * bool(place)}": value for place, value in enumerate(schedules)}
        names: dict[str, str] = {}
        for role, wanted in roles.items():
            for name, value in found:
                if value is wanted:
                    names.setdefault(role, name)
        devices = tuple(sorted({name for name, value in found if _is_device(value)}))
        others = tuple(name for name, value in found if "." not in name and self._is_alike(value))
        return Frame(frame.f_code.co_name, frame.f_code.co_firstlineno, line, names, devices, others)

    def _is_alike(self, value: Any) -> bool:
        """Tells whether a loader has data of the kind that is trained on, and other examples."""
        if self._loop < 0 or not isinstance(value, DataLoader):
            return False
        loader = self._loops[self._loop][2]
        return type(value.dataset) is type(loader.dataset) and value.dataset is not loader.dataset


def _globals(frame: FrameType) -> dict[str, Any]:
    """Returns what a function knows besides its own names."""
    return {name: value for name, value in frame.f_globals.items() if name not in frame.f_locals}


def _expressions(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names of a function, then the attributes and the entries of what they name."""
    plain = {name: value for name, value in values.items() if name.isidentifier() and not name.startswith("__")}
    yield from plain.items()
    for name, value in plain.items():
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", each) for key, each in value.items() if isinstance(key, str))
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and not isinstance(value, nn.Module | type) and not inspect.ismodule(value):
            yield from ((f"{name}.{inner}", each) for inner, each in held.items() if inner.isidentifier())


def _is_device(value: Any) -> bool:
    name = value if isinstance(value, str) else value.type if isinstance(value, torch.device) else ""
    return name.partition(":")[0] in DEVICES


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return isinstance(value, _LITERALS)


def main() -> None:
    """Runs the script that `sys.argv` names."""
    folder, steps, script, *arguments = sys.argv[1:]
    dry = DryRun(Path(folder), int(steps), Path(script))
    sys.argv = [script, *arguments]
    # Where a script finds the files beside it.
    sys.path[0] = str(Path(script).resolve().parent)
    dry.watch()
    try:
        runpy.run_path(str(Path(script).resolve()), run_name="__main__")
    finally:
        write_facts(Path(folder), dry.facts())


if __name__ == "__main__":
    main()
