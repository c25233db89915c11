"""Writes a trained model in the layout that its stored values had: the same names in files of the same names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.spec.weights import Weights
from headrace.weights.files import ENDING, INDEX, absolute, find_tensors


def save_like(weights: Weights, model: Path, path: Path) -> None:
    """Writes the tensors of a run's `model.safetensors` as the stored ones are: one file after the other.

    Names are the model's. What was missing is in the first file, what was unused in none. What else is in a folder of
    this machine, such as `config.json`, is copied.

    Raises:
        DataError: the stored tensors cannot be found again.
        UsageError: `path` is that place.
        UnfitMachine: the directory cannot be written.
    """
    given = absolute(weights.where)
    source = None if "://" in given else Path(given).resolve()
    if source is not None and path.resolve() == (source.parent if given.endswith(ENDING) else source):
        raise UsageError(f"{path} has the weights that the run began with; name another directory")
    files: dict[str, list[str]] = {}
    for name, each in find_tensors(weights.where).items():
        if not _fits(name, weights.unused):
            files.setdefault(each.file.name.rpartition("/")[2], []).append(weights.renamed(name))
    with safe_open(model, "pt") as trained:
        files[min(files)] += [name for name in trained.keys() if _fits(name, weights.missing)]  # noqa: SIM118
    try:
        path.mkdir(parents=True, exist_ok=True)
        total = sum(_write(model, path / file, names) for file, names in files.items())
        if len(files) > 1:
            listed = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
            (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if source is not None and disk.is_folder(source):
            for other in source.iterdir():
                if disk.is_file(other) and other.name != INDEX and other.suffix != ENDING:
                    shutil.copy(other, path / other.name)
    except (OSError, SafetensorError) as error:
        raise UnfitMachine(f"cannot save the model to {path}: {error}") from error


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _write(model: Path, path: Path, names: list[str]) -> int:
    """Writes some tensors as a file, and returns their bytes; no more than these are in memory."""
    with safe_open(model, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in names}
    part = path.with_name(f"{path.name}.part")
    save_file(tensors, part, {"format": "pt"})
    part.rename(path)
    return sum(each.nbytes for each in tensors.values())
