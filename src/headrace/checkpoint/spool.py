"""Tensors that wait to be saved, in a file without a name: the system can take their memory back."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headrace.shared_memory.layout import on_lines
from headrace.trees import as_bytes

_KEPT_BYTES = 64 << 20
_SEGMENT_BYTES = 256 << 20


class Spool:
    """Keeps the first tensors as they are, and writes those that come later to a file in `folder`.

    A tensor of the file is a view of it: its pages come into memory when they are read. The file has no name, and its
    blocks are free when the last of its tensors is gone.

    Args:
        kept_bytes: of the tensors that stay in memory.

    Attributes:
        problem: why a tensor could not be written; what `keep` returned from then on must not be used.
    """

    def __init__(self, folder: Path, kept_bytes: int = _KEPT_BYTES) -> None:
        self.problem: OSError | None = None
        self._folder = folder
        self._left = kept_bytes
        self._descriptor = -1
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._start = self._at = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *error: object) -> None:
        # What is mapped stays.
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def keep(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the CPU, or one of the same content whose memory is the file.

        An empty one where the disk has no room: who saves reads the rest all the same, because others take part in it.
        """
        if self.problem:
            return tensor.new_empty(0)
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            return tensor
        content = as_bytes(tensor.contiguous())
        try:
            place = self._place(len(content))
            view = memoryview(content.numpy().data)
            # Written, not copied into the mapping, so that it takes no memory of this process.
            while view:
                view = view[os.pwrite(self._descriptor, view, self._start + place + len(content) - len(view)) :]
        except OSError as error:
            self.problem = error
            return tensor.new_empty(0)
        return self._segment[place : place + len(content)].view(tensor.dtype).view(tensor.shape)

    def _place(self, count: int) -> int:
        """Returns where in the present segment there is room."""
        if self._descriptor < 0:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._descriptor = os.dup(file.fileno())
        place = on_lines(self._at)
        if place + count > len(self._segment):
            self._start += len(self._segment)
            size = -(-max(count, _SEGMENT_BYTES) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._descriptor, self._start + size)
            mapped = mmap.mmap(self._descriptor, size, offset=self._start)
            self._segment = torch.frombuffer(mapped, dtype=torch.uint8)
            place = 0
        self._at = place + count
        return place
