"""Memory of attention over a divided sequence: live bytes of tensors on each of 4 ranks against those of one device.

Causal attention of 16,384 tokens in double precision, forward and backward: what it is given, what it returns, what it
keeps, and what ranks share. Both ways give the same numbers to 1e-9.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import torch
import torch.nn.functional as F
from harness import report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective
from headrace.context_parallel.attention import attend
from headrace.context_parallel.placement import Zigzag
from headrace.context_parallel.ring import SharedRing
from headrace.trees import tensors_of

WORLD, HEADS, WIDTH = 4, 8, 64


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, of tensors that this thread has made."""

    _known: ClassVar[set[int]] = set()
    """Of all threads: a rank also sees what others share with it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_of(output):
            self._see(tensor)
        return output

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._leave, address, size)

    def _leave(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def drawn(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, tokens, WIDTH, dtype=torch.float64, generator=generator) for _ in range(4)]


def whole(tokens: int) -> tuple[int, list[Tensor]]:
    """Returns the peak, and the output and gradients."""
    with Live() as live:
        *given, weight = (each.clone() for each in drawn(tokens))
        out = F.scaled_dot_product_attention(*[each.requires_grad_() for each in given], is_causal=True)
        found = torch.autograd.grad(out, given, weight)
        return live.peak, [out.detach(), *found]


def divided(tokens: int, group: ThreadCollective) -> tuple[int, list[Tensor]]:
    place = Zigzag(tokens, group.rank, WORLD)
    mine = [place.take(each, 2) for each in drawn(tokens)]
    with Live() as live:
        *given, weight = (each.clone() for each in mine)
        given = [each.requires_grad_() for each in given]
        out = attend(place, SharedRing(group), *given, None, 0.0, True, scale=None, enable_gqa=False)
        found = torch.autograd.grad(out, given, weight)
        return live.peak, [out.detach(), *found]


if __name__ == "__main__":
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    one, right = whole(tokens)
    ranks = together(WORLD, lambda group: divided(tokens, group))
    place = Zigzag(tokens, 0, WORLD)
    for index, each in enumerate(right):
        found = place.join([parts[index] for _, parts in ranks], 2)
        assert float((found - each).abs().max()) <= 1e-9 * float(each.abs().max())
    most = max(peak for peak, _ in ranks)
    figures = {"one device": [one / 1e6], f"a rank of {WORLD}": [most / 1e6]}
    report(Path(__file__).parent, "memory", "MB", figures, {f"a rank of {WORLD} / one device": most / one})
