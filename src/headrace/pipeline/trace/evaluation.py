"""A forward that is another one in evaluation, cut where the one of training is.

What computes with a parameter is where the parameter is; what has none stays with the layer before it, unless it is a
module that training has, too.

    training      stem │ blocks ─┬─ head          output, auxiliary
                       │         └─ auxiliary
    evaluation    stem │ blocks ─── head          output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.pipeline.trace.layers import Layer


def align(trained: Sequence[Layer], evaluated: Sequence[Layer]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """Finds for each layer of evaluation the layer of training that it stays with.

    Args:
        trained, evaluated: the layers of both forwards, in order.

    Returns:
        The layers of training, between which there is no cut that evaluation cannot have, too; and the index of one of
        them for each of evaluation.
    """
    joined = [layer.joined for layer in trained]

    def join(first: int, last: int, why: str) -> None:
        for index in range(first, last):
            joined[index] = joined[index] or why

    places: list[int] = []
    for layer in evaluated:
        before = places[-1] if places else 0
        holders = _holders(trained, layer)
        join(min(holders, default=0), max(holders, default=0), f"{layer.name} needs all of it in evaluation")
        places.append(max(holders, default=before))
    furthest = 0
    for place, layer in zip(places, evaluated, strict=True):
        join(place, furthest, f"evaluation does {layer.name} after {trained[furthest].name}")
        furthest = max(furthest, place)
    for index, layer in enumerate(evaluated[:-1]):
        if layer.joined:
            first, last = sorted(places[index : index + 2])
            join(first, last, f"in evaluation, {layer.joined}")
    layers = tuple(replace(layer, joined=why) for layer, why in zip(trained, joined, strict=True))
    return layers, tuple(places)


def _holders(trained: Sequence[Layer], layer: Layer) -> list[int]:
    """Returns the indices of the layers of training that have what a layer of evaluation needs."""
    needed = {*layer.parameters, *layer.buffers}
    for index, other in enumerate(trained):
        if other.name == layer.name and needed <= {*other.parameters, *other.buffers}:
            return [index]
    # Of what several layers share any of them will do.
    firsts = (
        next(index for index, other in enumerate(trained) if name in (*other.parameters, *other.buffers))
        for name in needed
    )
    return sorted(set(firsts))
