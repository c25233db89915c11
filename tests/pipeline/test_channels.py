"""What crosses a cut comes as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.channels.mailbox import places
from headrace.errors import UsageError
from headrace.pipeline.channels import pack, unpack

VALUES: dict[str, Any] = {
    "matrix": torch.arange(6.0).view(2, 3).requires_grad_(),
    "turned": torch.arange(6).view(2, 3).T,
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 4, dtype=torch.float64),
    "mask": torch.tensor([True, False]),
    "length": 7,
    "half": 0.5,
    "shape": torch.Size([2, 3]),
    "flag": True,
    "none": None,
}


def carried(values: dict[str, Any]) -> tuple[dict[str, Any], list[bool]]:
    """Returns what comes of values that are sent, and which of the tensors were tracked."""
    note, tensors = pack(values, lambda tensor: tensor.requires_grad)
    begins, end = places([tensor.numel() * tensor.element_size() for tensor in tensors])
    data = torch.zeros(end, dtype=torch.uint8)
    for begin, tensor in zip(begins, tensors, strict=True):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        data[begin : begin + len(flat)] = flat
    marks: list[bool] = []

    def keep(tensor: Tensor, tracked: bool) -> Tensor:
        marks.append(tracked)
        return tensor.clone()

    return unpack(note, data, keep), marks


def test_tensors_numbers_and_shapes_come_as_they_were() -> None:
    got, marks = carried(VALUES)
    assert list(got) == list(VALUES)
    for name, value in VALUES.items():
        assert type(got[name]) is type(value)
        if isinstance(value, Tensor):
            assert got[name].dtype == value.dtype
            assert torch.equal(got[name], value)
        else:
            assert got[name] == value
    assert marks == [True, False, False, False, False]


def test_what_does_not_travel_is_named() -> None:
    with pytest.raises(UsageError, match="mixture is a dict and is needed behind a cut"):
        pack({"mixture": {}}, lambda tensor: False)


@pytest.mark.parametrize("note", [b'{"x":["float33",[1],false]}', b"no json", b'{"x":["__class__",[1],true]}'])
def test_a_note_of_something_else_is_refused(note: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        unpack(note, torch.zeros(64, dtype=torch.uint8), lambda tensor, tracked: tensor)
