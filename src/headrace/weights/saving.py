"""Writes a trained model in the layout that its stored values had: the same names in files of the same names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.checkpoint.header import PREFIX
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.spec.weights import Weights
from headrace.weights.conversions import Converted, convert, revert
from headrace.weights.files import ENDING, INDEX, WORDS, StoredTensor, absolute, find_tensors
from headrace.weights.reading import chunks


def save_like(weights: Weights, module: nn.Module, model: Path, path: Path) -> None:
    """Writes the tensors of a run's `model.safetensors` as the stored ones are, one piece after the other.

    Names are the model's, or those of what the transformers library has converted. What was missing is in the first
    file, what was unused in none. What else is in a folder of this machine, such as `config.json`, is copied.

    Raises:
        DataError: the stored tensors cannot be found again.
        UsageError: `path` is that place.
        UnfitMachine: the directory cannot be written.
    """
    given = absolute(weights.where)
    source = None if "://" in given else Path(given).resolve()
    if source is not None and path.resolve() == (source.parent if given.endswith(ENDING) else source):
        raise UsageError(f"{path} has the weights that the run began with; name another directory")
    stored = {name: each for name, each in find_tensors(weights.where).items() if not _fits(name, weights.unused)}
    trained = find_tensors(model)
    renamed = {name: weights.renamed(name) for name in stored}
    uses: dict[str, list[Converted]] = {}
    for each in convert(module, renamed, stored):
        for name in each.sources:
            uses.setdefault(name, []).append(each)
    files: dict[str, dict[str, StoredTensor]] = {}
    for name, was in stored.items():
        file = was.extents[0].file.name.rpartition("/")[2]
        files.setdefault(file, {})[renamed[name]] = revert(uses[name], trained, was)
    files[min(files)] |= {name: each for name, each in trained.items() if _fits(name, weights.missing)}
    try:
        path.mkdir(parents=True, exist_ok=True)
        total = sum(_write(tensors, path / file) for file, tensors in files.items())
        if len(files) > 1:
            listed = {name: file for file, tensors in files.items() for name in tensors}
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


def _write(tensors: Mapping[str, StoredTensor], path: Path) -> int:
    """Writes tensors as a file, of which one piece at a time is in memory; returns their bytes."""
    sizes = {name: getattr(torch, each.dtype).itemsize for name, each in tensors.items()}
    # In the order of the safetensors library.
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        each = tensors[name]
        end = begin + sizes[name] * each.elements
        header[name] = {"dtype": WORDS[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(PREFIX, "little") + text)
            for name in order:
                for chunk in chunks(tensors[name]):
                    file.write(chunk.numpy().data)
        part.rename(path)
    except BaseException:
        # On a full disk it would take what is left.
        part.unlink(missing_ok=True)
        raise
    return begin
