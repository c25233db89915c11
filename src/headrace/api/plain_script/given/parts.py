"""A process's part of what all have, and the whole of what each has a part of: tensors in any tree."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from torch import Tensor

from headrace.api.plain_script.given.deliveries import Delivery
from headrace.api.plain_script.meeting import GATHER, Meeting
from headrace.checkpoint.forms import pack, unpack
from headrace.collectives.base import gather_bytes, gather_texts
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.policies.roles import bounds
from headrace.trees import as_bytes, map_leaves, map_tensors, tensors_of


def share_of(values: Any, dim: int, meeting: Meeting | None) -> Any:
    """Returns this rank's part of each tensor along `dim`; the next backward pass is of it."""
    tensors = _tensors(values, dim, "share")
    lengths = {tensor.shape[dim] for tensor in tensors}
    if len(lengths) > 1:
        raise UsageError(
            f"share takes tensors of one batch, and they have {' and '.join(map(str, sorted(lengths)))} examples in "
            f"dim {dim}; call it for each"
        )
    if meeting is None:
        return values
    (length,) = lengths
    start, stop = bounds(length, (1,) * meeting.world)[meeting.rank]
    part = map_tensors(lambda tensor: tensor.narrow(dim, start, stop - start).contiguous(), values)
    # What lies on a device is not waited for.
    content = [as_bytes(tensor.detach().contiguous()) for tensor in tensors if tensor.device.type == HOST]
    order = 0
    for each in content:
        order = zlib.crc32(each.numpy().tobytes(), order)
    meeting.deliveries.keep(Delivery(stop - start, length, part), order)
    return part


def whole_of(values: Any, dim: int, meeting: Meeting | None) -> Any:
    """Returns each tensor's parts of all ranks, joined along `dim` by rank."""
    tensors = [tensor.detach() for tensor in _tensors(values, dim, "whole")]
    if meeting is None:
        return map_tensors(Tensor.detach, values)
    meeting.meet(GATHER)
    names: list[str] = []
    map_leaves(lambda name, leaf: names.append(name) if isinstance(leaf, Tensor) else None, values, "")
    forms = [
        [name, str(tensor.dtype), [size for place, size in enumerate(tensor.shape) if place != dim % tensor.dim()]]
        for name, tensor in zip(names, tensors, strict=True)
    ]
    for rank, text in enumerate(gather_texts(meeting.group, json.dumps(forms))):
        if json.loads(text) != json.loads(json.dumps(forms)):
            raise UsageError(
                f"whole joins the tensors of all processes along dim {dim}, and rank {rank} gives {text}, and rank "
                f"{meeting.rank} {json.dumps(forms)}; pad them to one size"
            )
    contents = gather_bytes(meeting.group, pack({str(place): tensor.cpu() for place, tensor in enumerate(tensors)}))
    parts = [unpack(content) for content in contents]
    joined = iter(
        torch.cat([part[str(place)] for part in parts], dim).to(tensor.device) for place, tensor in enumerate(tensors)
    )
    return map_tensors(lambda _: next(joined), values)


def _tensors(values: Any, dim: int, name: str) -> list[Tensor]:
    tensors = tensors_of(values)
    if not tensors:
        raise UsageError(f"{name} takes tensors, in tuples, lists and dicts, and got {type(values).__name__}")
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            raise UsageError(
                f"{name} takes tensors with examples in dim {dim}, and got one of shape {list(tensor.shape)}; sum(), "
                "mean() and gather() take numbers"
            )
    return tensors
