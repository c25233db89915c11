"""Writes tensors to a file, and makes tensors of its bytes; without torch the others find what is saved."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headrace.checkpoint.header import NAMES, TensorEntry, encode
from headrace.checkpoint.manifest import FileRecord
from headrace.checkpoint.storage import CHUNK, Digest, File
from headrace.errors import UsageError
from headrace.trees import as_bytes

_TYPES: dict[str, torch.dtype] = {name: getattr(torch, word) for name, word in NAMES.items()}
_BEHIND = 512 << 20
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def write(file: File, name: str, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes tensors of any strides and device as a new safetensors file, and syncs it; copies a few chunks at most."""
    # The widest elements first, so that every tensor is aligned, in the file and in memory.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    try:
        front = encode(_entries(ordered))
    except ValueError as error:
        raise UsageError(f"cannot save {name}: {error}") from None
    size = 0
    # Digesting goes on while the disk syncs.
    with Digest(behind_bytes=_BEHIND) as digest:
        for piece, copied in _bytes(front, ordered):
            # Only a copied piece costs memory until it is digested.
            digest.feed(piece, CHUNK if copied else None)
            size += len(piece)
            file.write_all(piece)
        file.sync()
        return FileRecord(name, size, digest.hexdigest())


def allocate(count: int) -> tuple[Tensor, memoryview]:
    """Allocates `count` untouched bytes as a tensor and its writable view; a MemoryError if there are not as many."""
    try:
        buffer = torch.empty(count, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryError(f"{count:,} bytes for the tensors of a checkpoint cannot be allocated") from error
    return buffer, buffer.numpy().data


def mapped(memory: mmap.mmap, start: int) -> Tensor:
    """Returns the bytes of a mapped file from `start` on."""
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start)


def views(buffer: Tensor, entries: Sequence[TensorEntry]) -> dict[str, Tensor]:
    """Returns the tensors in a buffer of bytes, without copying."""
    return {
        entry.name: buffer[entry.begin : entry.end].view(_TYPES[entry.dtype]).view(entry.shape) for entry in entries
    }


def _entries(tensors: Sequence[tuple[str, Tensor]]) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise UsageError(
                f"tensor {name!r} is {tensor.layout} of {tensor.dtype} on {tensor.device}; "
                f"a checkpoint holds dense ones of {', '.join(sorted(NAMES.values()))}"
            )
        if name == "__metadata__":
            raise UsageError("a tensor cannot be named '__metadata__', which safetensors keeps for itself")
        place = entries[-1].end if entries else 0
        entries.append(TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape), place))
    return entries


def _bytes(front: bytes, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[memoryview, bool]]:
    """Yields the file's content in pieces, each with whether it is a copy of a tensor's memory."""
    yield memoryview(front), False
    for _, tensor in tensors:
        for chunk in chunks(tensor.detach()):
            dense = chunk.resolve_conj().resolve_neg().contiguous().cpu()
            in_place = tensor.is_contiguous() and dense.data_ptr() == chunk.data_ptr()
            yield as_bytes(dense).numpy().data, not in_place


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yields flat pieces of about `CHUNK` bytes in row-major order, without copying a contiguous tensor."""
    most = CHUNK // tensor.element_size()
    if tensor.is_contiguous() or tensor.numel() <= most:
        flat = tensor.reshape(-1)
        yield from (flat[at : at + most] for at in range(0, len(flat), most))
        return
    rows = most * len(tensor) // tensor.numel()
    if rows == 0:
        for row in tensor:
            yield from chunks(row)
    else:
        for part in tensor.split(rows):
            yield part.reshape(-1)
