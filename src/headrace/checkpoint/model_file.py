"""The file of a trained model that several ranks write, each the tensors that it has, one after the other.

rank 0   header, extra state   ─► model.safetensors.part
rank r   each of its tensors   ─► its place there, then the next
rank 0   all are there         ─► model.safetensors

Each host has such a file, which its first rank makes. Before the last step these are summed in pieces: where a host's
ranks have written nothing, its file has zeros.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace.checkpoint.forms import encode as dense_parts
from headrace.checkpoint.header import BYTES, NAMES, PREFIX, TensorEntry, encode, parse
from headrace.collectives.base import ProcessGroup, gather_bytes
from headrace.machine import disk
from headrace.modules import beside_frozen, is_dense
from headrace.spec.model import ModelSpec
from headrace.trees import as_bytes

_PIECE = 8 << 20
"""Bytes that hosts exchange at once."""
_TYPES = {word: name for name, word in NAMES.items()}


def save_in_parts(
    module: nn.Module,
    model: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    extra: Mapping[str, Tensor],
    path: Path,
    group: ProcessGroup,
    first: int = 0,
) -> bool:
    """Writes a model to a file on each host; all ranks call it, and none holds more than one tensor of the others.

    Args:
        tensors: those that this rank writes, whole, by checkpoint name; each is some rank's.
        extra: what else there is, on rank 0.
        first: the first rank of this one's host.

    Returns:
        Whether the files are there: not where it cannot be written, or a tensor has no form of its own in such files.
    """
    names = _names_in_state(module)
    if beside := beside_frozen(module).keys():
        # Each rank has them, as they are.
        names[""] = [name for name in names[""] if name not in beside]
        names = {key: own for key, own in names.items() if own}
        state = module.state_dict() if group.rank == 0 else {}
        extra = {**extra, **{name: state[name] for name in beside & state.keys()}}
    (front, *_) = gather_bytes(group, _front(names, module, model, extra) if group.rank == 0 else b"")
    if not front:
        return False
    entries = {each.name: each for each in parse(front[2 * PREFIX :], int.from_bytes(front[:PREFIX], "little"))}
    size, begin, written, leads = int.from_bytes(front[:PREFIX], "little"), len(front) - PREFIX, 0, group.rank == first
    # Ranks of a host see one file; several hosts may, too.
    part = path.with_name(f"{path.name}.part-{first}" if first else f"{path.name}.part")
    failed = leads and not _begin(part, front[PREFIX:], begin + size)
    problems, files = group.sum([float(failed), float(leads)])
    if not problems:
        if group.rank == 0:
            own = dense_parts(extra)
            written += sum(_write(part, entries[name], begin, each) for name, each in own.items())
        for name, tensor in tensors:
            # Others gather with this rank, also after its disk has failed.
            written += sum(_write(part, entries[each], begin, tensor) for each in names.get(name, ()))
            # Before the next is gathered.
            del tensor
    (total,) = group.sum([float(written)])
    complete = not problems and total == sum(each.end - each.begin for each in entries.values())
    if complete and files > 1:
        complete = _joined(part, range(begin, begin + size, _PIECE), begin + size, leads, group)
    if leads:
        with suppress(OSError):
            if complete:
                part.rename(path)
            else:
                part.unlink(missing_ok=True)
    (there,) = group.sum([float(leads and complete and disk.is_file(path))])
    return there == files


def _names_in_state(module: nn.Module) -> dict[str, list[str]]:
    """Returns the names in `state_dict()` of each tensor, by its checkpoint name; "" has those of none."""
    first = {id(parameter): f"parameter/{name}" for name, parameter in module.named_parameters()}
    first |= {id(buffer): f"buffer/{name}" for name, buffer in module.named_buffers()}
    names: dict[str, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(first.get(id(value), ""), []).append(name)
    return names


def _front(names: Mapping[str, list[str]], module: nn.Module, model: ModelSpec, extra: Mapping[str, Tensor]) -> bytes:
    """Returns the bytes of all tensors, as a number, and the file's header; b"" where it has no form for one."""
    specs = {spec.name: spec for spec in (*model.parameters, *model.buffers)}
    forms: list[tuple[str, str, tuple[int, ...]]] = []
    sparse = any(not is_dense(each) for each in (*module.parameters(), *module.buffers()))
    for key, own in names.items():
        spec = specs.get(key.partition("/")[2])
        if sparse or spec is None or spec.dtype not in _TYPES:
            return b""
        forms += [(name, _TYPES[spec.dtype], tuple(spec.shape)) for name in own]
    forms += [(name, _TYPES[_word(each)], tuple(each.shape)) for name, each in dense_parts(extra).items()]
    entries: list[TensorEntry] = []
    # In the order of the safetensors library.
    for name, dtype, shape in sorted(forms, key=lambda form: (-BYTES[form[1]], form[0])):
        entries.append(TensorEntry(name, dtype, shape, entries[-1].end if entries else 0))
    size = entries[-1].end if entries else 0
    try:
        return size.to_bytes(PREFIX, "little") + encode(entries)
    except ValueError:
        return b""


def _begin(part: Path, front: bytes, size: int) -> bool:
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(front)
            # With its room, so that a full disk is known before the rest is gathered.
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        return False
    return True


def _joined(part: Path, starts: Iterable[int], end: int, leads: bool, group: ProcessGroup) -> bool:
    """Gives each host's file what the others' ranks have written; returns whether all have it."""
    failed = False
    for start in starts:
        piece = torch.zeros(min(_PIECE, end - start), dtype=torch.uint8)
        content = memoryview(piece.numpy().data)
        failed = failed or (leads and not _moved(part, start, content, reads=True))
        # The others' pieces come, also after this disk has failed.
        group.all_reduce(piece)
        failed = failed or (leads and not _moved(part, start, content, reads=False))
    (failures,) = group.sum([float(failed)])
    return not failures


def _moved(part: Path, start: int, content: memoryview, reads: bool) -> bool:
    """Reads or writes a piece of a file; returns whether all of it could be."""
    try:
        with part.open("r+b", buffering=0) as file:
            file.seek(start)
            while content:
                count = file.readinto(content) if reads else file.write(content)
                if not count:
                    return False
                content = content[count:]
    except OSError:
        return False
    return True


def _write(part: Path, entry: TensorEntry, begin: int, tensor: Tensor) -> int:
    """Writes a tensor to its place, and returns its bytes; 0 where it cannot be written."""
    if _TYPES.get(_word(tensor)) != entry.dtype or tuple(tensor.shape) != entry.shape:
        return 0
    content = memoryview(as_bytes(tensor.detach().cpu().contiguous()).numpy().data)
    return entry.end - entry.begin if _moved(part, begin + entry.begin, content, reads=False) else 0


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
