"""What a script with an Accelerator writes, and reads when it goes on. Nothing is pickled."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace.accelerate.base import Prepared
from headrace.checkpoint.forms import decode, encode
from headrace.errors import DataError, UnfitMachine, UsageError
from headrace.machine import disk
from headrace.trees import as_json, from_json

_PARTS = "state.safetensors"
_NUMBERS = "state"
_VERSION = 1
_PREFIX = "checkpoint_"


class Saving(Prepared):
    """Files of a script. All processes call the same methods; the first one writes."""

    _states_saved = 0

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Lets objects with `state_dict` and `load_state_dict` be saved and loaded with the rest.

        Raises:
            UsageError: one has no such methods.
        """
        for each in objects:
            if not all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict")):
                raise UsageError(f"a {type(each).__name__} has no state_dict and load_state_dict; give what has both")
        self._registered.extend(objects)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns a model's state."""
        return dict(model.state_dict())

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Saves what torch.save saves, or a dict of tensors as safetensors; the first process of all writes."""
        if safe_serialization:
            self._here.on_first(_write, _separate(obj), Path(f))
        else:
            self._here.on_first(torch.save, obj, f)

    def save_model(self, model: nn.Module, save_directory: Any, max_shard_size: Any = None) -> None:
        """Writes a model's parameters and buffers as one `model.safetensors`."""
        path = Path(save_directory)
        state = _separate(model.state_dict())
        self._here.on_first(_write, state, path / _model_name(0))

    def save_state(self, output_dir: Any = None, **_: Any) -> str:
        """Writes models, optimizers, schedules, loaders, registered objects and random numbers; returns the folder.

        Raises:
            UnfitMachine: it cannot be written.
            UsageError: there is no folder, or a state holds what is neither a tensor nor a plain value.
        """
        path = self._folder(output_dir)
        tensors: list[Tensor] = []
        try:
            kept = as_json(dict(self._states()), tensors)
        except TypeError as error:
            raise UsageError(
                f"the state of what was prepared or registered holds {error} which is neither a tensor nor a plain "
                "value, and nothing is pickled; leave it out of its state_dict()"
            ) from error
        drawn = self._here.gather(_draws())
        content = encode({str(place): each.detach().cpu().contiguous() for place, each in enumerate(tensors)})
        text = json.dumps({"version": _VERSION, "states": kept, "draws": drawn, "passes": self._progress.passes})
        models = [_separate(model.state_dict()) for model in self._models]

        def write() -> None:
            # A folder without it is none that can be loaded: it is written last.
            if disk.exists(path / _PARTS):
                (path / _PARTS).unlink()
            for place, model in enumerate(models):
                _write(model, path / _model_name(place))
            _write(content, path / _PARTS, {_NUMBERS: text})
            self._keep_few(path)

        self._here.on_first(write)
        self._states_saved += 1
        return str(path)

    def load_state(self, input_dir: Any = None, **_: Any) -> None:
        """Reads what `save_state` has written, into the same models, optimizers, schedules, loaders and objects.

        Random numbers continue where each process was, if there are as many processes.

        Raises:
            DataError: the folder is missing or damaged, or another library has written it.
            UsageError: what is prepared is not what was saved.
        """
        path = Path(input_dir) if input_dir else self._last()
        try:
            with safe_open(path / _PARTS, "pt") as stored:
                kept = json.loads((stored.metadata() or {})[_NUMBERS])
            if kept["version"] != _VERSION:
                raise ValueError(f"its version is {kept['version']}, and {_VERSION} is known")
            parts = decode(load_file(path / _PARTS))
            models = [load_file(path / _model_name(place)) for place in range(len(self._models))]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            found = path.iterdir() if disk.is_folder(path) else ()
            pickled = [each.name for each in found if each.suffix in (".bin", ".pkl")]
            remedy = (
                f"it has {pickled[0]}, which Accelerate wrote and which is pickled: load the model's file alone"
                if pickled
                else "name a folder that save_state() has written"
            )
            raise DataError(f"cannot load the state from {path} ({error}); {remedy}") from error
        states = from_json(kept["states"], lambda place: parts[str(place)])
        wanted = dict(self._owners())
        if len(states) != len(wanted) or set(states) != set(wanted):
            raise UsageError(
                f"{path} has the state of {', '.join(sorted(states)) or 'nothing'}, and prepared or registered are "
                f"{', '.join(sorted(wanted)) or 'none'}; prepare the same before load_state()"
            )
        for model, tensors in zip(self._models, models, strict=True):
            model.load_state_dict(tensors)
        for name, owner in wanted.items():
            owner[1](states[name])
        self._progress.passes = kept["passes"]
        if len(kept["draws"]) == self.num_processes:
            drawn = kept["draws"][self.process_index]
            _continue(drawn)
            # What follows, an iteration's begin and batches that are skipped, draws some that the saved run had drawn.
            self._progress.resumed = [lambda: _continue(drawn)]

    def _states(self) -> Iterator[tuple[str, Any]]:
        return ((name, state()) for name, (state, _) in self._owners())

    def _owners(self) -> Iterator[tuple[str, tuple[Callable[[], Any], Callable[[Any], Any]]]]:
        """Yields each part's name, with what returns and what takes its state."""
        for place, each in enumerate((*self._optimizers, *self._schedulers, *self._registered)):
            yield f"{type(each).__name__} {place}", (each.state_dict, each.load_state_dict)
        for place, loader in enumerate(self._loaders):
            yield f"{type(loader).__name__} {place}", (loader.state, loader.load)

    def _folder(self, given: Any) -> Path:
        project = self._settings.project
        if self._settings.numbers and project:
            path = project / "checkpoints" / f"{_PREFIX}{self._settings.first + self._states_saved}"
            if disk.exists(path):
                raise UsageError(f"{path} exists; set the project configuration's iteration to the next number")
            return path
        if given is None:
            raise UsageError("save_state needs a folder; name one")
        return Path(given)

    def _last(self) -> Path:
        numbered = sorted(self._numbered(), key=_number)
        if not numbered:
            raise UsageError("load_state needs a folder; name one")
        return numbered[-1]

    def _numbered(self) -> list[Path]:
        project = self._settings.project
        folder = project / "checkpoints" if project else None
        found = folder.glob(f"{_PREFIX}*") if folder else ()
        return [each for each in found if each.name.removeprefix(_PREFIX).isdecimal()]

    def _keep_few(self, newest: Path) -> None:
        most = self._settings.keeps
        if self._settings.numbers and most is not None:
            older = sorted((each for each in self._numbered() if each != newest), key=_number)
            for each in older[: len(older) + 1 - most]:
                shutil.rmtree(each)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _model_name(place: int) -> str:
    return f"model_{place}.safetensors" if place else "model.safetensors"


def _separate(state: Any) -> dict[str, Tensor]:
    """Returns tensors that share no memory, each name its own."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, each in state.items():
        if not isinstance(each, Tensor):
            raise UsageError(f"{name} is a {type(each).__name__}, and a file of safetensors has tensors alone")
        tensor = each.detach().cpu().contiguous()
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def _write(tensors: dict[str, Tensor], path: Path, said: dict[str, str] | None = None) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, {"format": "pt", **(said or {})})
        part.rename(path)
    except (OSError, SafetensorError) as error:
        raise UnfitMachine(f"cannot save to {path}: {error}") from error


def _draws() -> list[Any]:
    """Returns where this process's random numbers are: torch's, numpy's and Python's."""
    kind, words, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), [kind, np.asarray(words).tolist(), *rest], random.getstate()]


def _continue(drawn: list[Any]) -> None:
    own, (kind, words, *rest), (version, numbers, left) = drawn
    torch.set_rng_state(torch.tensor(own, dtype=torch.uint8))
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
    random.setstate((version, tuple(numbers), left))
