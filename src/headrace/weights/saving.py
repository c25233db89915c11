"""Writes a trained model in the layout that its stored values had: the same names in files of the same names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.header import NAMES, PREFIX
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.spec.weights import Weights
from headrace.weights.files import ENDING, INDEX, StoredTensor, absolute, find_tensors

_CHUNK = 8 << 20
_WORDS = {dtype: word for word, dtype in NAMES.items()}


def save_like(weights: Weights, model: Path, path: Path) -> None:
    """Writes the tensors of a run's `model.safetensors` as the stored ones are, one piece after the other.

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
    trained = find_tensors(model)
    files[min(files)] += [name for name in trained if _fits(name, weights.missing)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        total = sum(_write(trained, path / file, names) for file, names in files.items())
        if len(files) > 1:
            listed = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
            (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if source is not None and disk.is_folder(source):
            for other in source.iterdir():
                if disk.is_file(other) and other.name != INDEX and other.suffix != ENDING:
                    shutil.copy(other, path / other.name)
    except OSError as error:
        raise UnfitMachine(f"cannot save the model to {path}: {error}") from error


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _write(trained: Mapping[str, StoredTensor], path: Path, names: Iterable[str]) -> int:
    """Writes some tensors as a file, of which one piece at a time is in memory; returns their bytes."""
    sizes = {name: getattr(torch, trained[name].dtype).itemsize for name in names}
    # In the order of the safetensors library.
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        end = begin + sizes[name] * trained[name].elements
        shape = list(trained[name].shape)
        header[name] = {"dtype": _WORDS[trained[name].dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(PREFIX, "little") + text)
        for name in order:
            each, size = trained[name], sizes[name] * trained[name].elements
            for at in range(0, size, _CHUNK):
                file.write(each.file.read(each.begin + at, min(_CHUNK, size - at)))
    part.rename(path)
    return begin
