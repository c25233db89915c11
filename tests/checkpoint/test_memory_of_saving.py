"""The trained model is written without a second one in memory."""

from __future__ import annotations

import torch
from torch import nn

from headrace.checkpoint.trained_model import in_memory_of_their_own
from headrace.modules import memory_of


def test_only_what_shares_memory_is_copied() -> None:
    whole = torch.arange(12.0)
    tied = nn.Parameter(torch.ones(3))
    tensors = {"alone": torch.ones(4), "half": whole[:6], "rest": whole[6:], "one": tied, "other": tied}
    found = in_memory_of_their_own({**tensors, "sparse": torch.eye(2).to_sparse()})
    same = {name for name in tensors if memory_of(found[name]) == memory_of(tensors[name])}
    assert same == {"alone", "one"}
    assert len({memory_of(each) for each in found.values()}) == len(found)
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
