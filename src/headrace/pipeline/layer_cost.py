"""The seconds that a layer takes, and the bytes that autograd keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace import internals
from headrace.devices import HOST, synchronize
from headrace.modules import is_dense


@dataclass(frozen=True)
class LayerTiming:
    """What a layer took for one forward or backward: seconds in which it computed, and in which it waited."""

    busy_s: float
    waited_s: float


def clock(device: torch.device) -> tuple[float, float]:
    """Returns the time of the clock, and of the processor, when the device has done all that was asked."""
    if device.type != HOST:
        synchronize(device)
        now = perf_counter()
        return now, now
    # Of this thread, which autograd's backward runs in, too: neighbours who take its processor do not count.
    return perf_counter(), thread_time()


T = TypeVar("T")


def kept_bytes(forward: Callable[[], T], roots: Callable[[T], Sequence[Tensor]]) -> tuple[dict[int, int], T]:
    """Returns the bytes that autograd keeps of a forward, by their place in memory, and what it returned.

    `roots` are the tensors in that from which backward begins.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[place(tensor)] = _stored_bytes(tensor)
        # Detached, because a layer that keeps what it has made would hold itself for ever.
        return tensor.detach()

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return kept, forward()
    except RuntimeError:
        # torch.func.grad permits no hooks; any other error is raised again.
        found = forward()
        return {place(tensor): _stored_bytes(tensor) for tensor in _saved(roots(found))}, found


def typical(sweeps: Sequence[Sequence[LayerTiming]]) -> list[float]:
    """Returns the seconds of each column: the median that it computed, and the least that it waited.

    Every sweep does the same, so each is brought to the length of the median one first: machines drift, and more from
    sweep to sweep than within one. A process that has no processor for a while waits, too, but hardly in every sweep.
    """
    busy = [[each.busy_s for each in sweep] for sweep in sweeps]
    length = median(map(sum, busy))
    scaled = [[each * length / (sum(sweep) or 1.0) for each in sweep] for sweep in busy]
    waited = [min(each.waited_s for each in column) for column in zip(*sweeps, strict=True)]
    return [median(column) + wait for column, wait in zip(zip(*scaled, strict=True), waited, strict=True)]


def between(began: tuple[float, float], ended: tuple[float, float]) -> LayerTiming:
    """Returns what passed between two times of `clock`."""
    busy = ended[1] - began[1]
    return LayerTiming(busy, max(0.0, ended[0] - began[0] - busy))


def _saved(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields what the nodes of a graph keep, as far as they show it."""
    nodes = {root.grad_fn for root in roots}
    left = list(nodes)
    while left:
        node: Any = left.pop()
        shown = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
        for kept in (*shown, getattr(node, "saved_tensors", ())):
            yield from (each for each in (kept if isinstance(kept, tuple) else (kept,)) if isinstance(each, Tensor))
        further = {following for following, _ in node.next_functions if following is not None} - nodes
        nodes |= further
        left += further


def place(tensor: Tensor) -> int:
    """Returns where a tensor's memory is."""
    # A sparse tensor has no memory of its own, but that of its indices and values.
    return tensor.untyped_storage().data_ptr() if is_dense(tensor) else id(tensor)


def _stored_bytes(tensor: Tensor) -> int:
    if is_dense(tensor):
        return tensor.untyped_storage().nbytes()
    return (internals.sparse_values(tensor)() if tensor.is_sparse else tensor.values()).nbytes
