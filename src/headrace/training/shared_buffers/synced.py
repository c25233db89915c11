"""Buffers that forward changes, made one on all workers: `Options(sync_buffers=...)`.

    worker 0   forward on its share ─► buffers b0 ─┐            ┌─► b
                                                   ├─ "mean" ───┤     b = (n0 b0 + n1 b1) / (n0 + n1), n: examples
    worker 1   forward on its share ─► buffers b1 ─┘  "first"   └─► b     or b0

It is done at the end of each round, so that the next forward, evaluations and checkpoints see the same on all workers.
DistributedDataParallel sends rank 0's buffers before each forward, to the same effect as "first".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.modules import is_dense
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.trees import as_bytes


def synced_buffers(module: nn.Module) -> list[Tensor]:
    """Returns the buffers that are saved, in the model's order, without the running statistics of BatchNorm.

    These are averaged where they are used. Buffers that are not saved are caches, whose shapes may depend on a worker's
    share.
    """
    normal = {id(buffer) for buffer in averaged_buffers(module)}
    kept = module.state_dict(keep_vars=True)
    return [
        buffer
        for name, buffer in module.named_buffers()
        if name in kept and id(buffer) not in normal and not buffer.is_meta and is_dense(buffer)
    ]


class BufferSync:
    """Makes a module's buffers one on all workers: their mean, or rank 0's; integers and truth values are rank 0's."""

    def __init__(self, module: nn.Module, mean: bool) -> None:
        self._module = module
        self._mean = mean

    @torch.no_grad()
    def synchronize(self, group: ProcessGroup, weight: float) -> None:
        """Every worker of `group` calls it, each with its weight in the mean.

        Raises:
            UsageError: the workers' buffers differ in size.
        """
        if group.world == 1:
            return
        # Anew in each round, because forward may have replaced some.
        buffers = synced_buffers(self._module)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        total, sizes = group.sum([weight, float(nbytes)])
        if sizes != nbytes * group.world:
            raise UsageError(
                f"this worker's buffers have {nbytes:,} bytes and those of all {group.world} {sizes:,.0f}: their sizes "
                "depend on a worker's share, so they cannot be combined; use sync_buffers='local'"
            )
        averaged = [each for each in buffers if self._mean and (each.is_floating_point() or each.is_complex())]
        chosen = {id(buffer) for buffer in averaged}
        copy_first([buffer for buffer in buffers if id(buffer) not in chosen], group)
        average(averaged, group, weight / total if total else 1 / group.world)


def average_by_weight(buffers: list[Tensor], group: ProcessGroup, weight: float = 1.0) -> None:
    """Replaces buffers by their means over the workers, where each has a weight."""
    if group.world > 1 and buffers:
        (total,) = group.sum([weight])
        average(buffers, group, weight / total if total else 1 / group.world)


def average(buffers: list[Tensor], group: ProcessGroup, part: float) -> None:
    """Replaces buffers by the sum of all workers' times their parts, which are 1 together."""
    means: list[tuple[Tensor, Tensor]] = []
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        # Sums of half precision would lose what a slow average moves by.
        wide = torch.promote_types(dtype, torch.float32)
        # Of a device all at once, because each copy waits for it.
        flat = torch.cat([buffer.detach().to(wide).reshape(-1) for buffer in same]).cpu()
        scaled = (torch.view_as_real(flat) if wide.is_complex else flat) * part
        group.all_reduce(scaled)
        mean = (torch.view_as_complex(scaled) if wide.is_complex else scaled).to(same[0].device)
        means += zip(same, mean.split([buffer.numel() for buffer in same]), strict=True)
    # Only when all are complete: if a worker is lost before, what needed them is done again.
    for buffer, value in means:
        buffer.copy_(value.view(buffer.shape))


def copy_first(buffers: list[Tensor], group: ProcessGroup) -> None:
    if not buffers:
        return
    # Bytes, because not every type of numbers can be sent.
    parts = [as_bytes(buffer.detach().contiguous()) for buffer in buffers]
    content = torch.cat(parts).cpu()
    group.broadcast(content)
    content = content.to(buffers[0].device)
    for buffer, part in zip(buffers, content.split([len(part) for part in parts]), strict=True):
        # A copy, because elements must lie at multiples of their size.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def copy_first_buffers(module: nn.Module, group: ProcessGroup) -> None:
    """Copies rank 0's buffers to workers that had no example, and so no forward that changes theirs."""
    copy_first(synced_buffers(module), group)
