"""Buffers that a script's forward changes, BatchNorm's statistics above all, made one after each backward pass."""

from __future__ import annotations

import operator
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.plain_script.meeting import Meeting
from headrace.collectives.digest import digests
from headrace.errors import UsageError
from headrace.training.shared_buffers.synced import average, copy_first


class ChangedBuffers:
    """Makes buffers that some rank's forward has changed one on all: floating ones their mean, others rank 0's.

    Each counts by its rank's examples, so that the mean of a batch is that of all shares. Caches, which are not in the
    state dict, stay each rank's own.
    """

    def __init__(self, model: nn.Module, meeting: Meeting) -> None:
        self._meeting = meeting
        saved = model.state_dict(keep_vars=True)
        self._places: list[tuple[dict[str, Any], str, str]] = []
        seen = set[int]()
        for prefix, module in model.named_modules():
            for name, buffer in internals.buffers(module).items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full in saved and id(buffer) not in seen and buffer.layout is torch.strided:
                    seen.add(id(buffer))
                    self._places.append((internals.buffers(module), name, full))
        self._marks = self._digests()

    def synchronize(self, weight: float) -> None:
        """Every rank calls it, with its part of the examples.

        Raises:
            UsageError: the ranks' buffers differ in shape or type.
        """
        if not self._places:
            return
        meeting = self._meeting
        # Not their versions, which BatchNorm leaves as they are.
        changed = [now != before for now, before in zip(self._digests(), self._marks, strict=True)]
        rows = meeting.group.gather(torch.tensor(changed, dtype=torch.uint8))
        chosen = rows.any(0).nonzero().flatten().tolist()
        if not chosen:
            return
        buffers = [self._places[place][0][self._places[place][1]] for place in chosen]
        self._require_same_forms(chosen, buffers)
        is_averaged = [buffer.is_floating_point() or buffer.is_complex() for buffer in buffers]
        floating = list(compress(buffers, is_averaged))
        if not weight:
            # A forward of no examples makes them NaN.
            for buffer in floating:
                buffer.zero_()
        average(floating, meeting.group, weight)
        copy_first(list(compress(buffers, map(operator.not_, is_averaged))), meeting.group)
        self._marks = self._digests()

    def _require_same_forms(self, chosen: list[int], buffers: list[Tensor]) -> None:
        sizes = [float(buffer.nbytes) for buffer in buffers]
        for place, size, total in zip(chosen, sizes, self._meeting.group.sum(sizes), strict=True):
            if total != size * self._meeting.world:
                raise UsageError(
                    f"the buffer {self._places[place][2]} has {size:,.0f} bytes on this rank and {total:,.0f} on all "
                    f"{self._meeting.world}, so ranks cannot have one: register it with persistent=False if it is a "
                    "cache, which depends on a process's share"
                )

    def _digests(self) -> list[int]:
        return digests(buffers[name] for buffers, name, _ in self._places)
