"""Tensors without a form in safetensors: sparse, complex128, extra state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.checkpoint.forms import decode, encode, extra_states, load_extra_states, pack, unpack
from headrace.errors import UsageError

DENSE = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")


@pytest.mark.parametrize(
    "make",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        Tensor.to_sparse_csc,
        lambda tensor: tensor.to(torch.complex128).to_sparse(),
        lambda tensor: tensor.to(torch.complex128) * 1j,
        lambda tensor: (tensor.to(torch.complex128) * 1j).conj(),
        lambda tensor: torch.zeros(4, 0).to_sparse(),
        lambda tensor: torch.tensor(2.0 + 1j, dtype=torch.complex128),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor > 0,
    ],
    ids=["coo", "csr", "csc", "complex coo", "complex128", "conjugate", "no element", "scalar", "bfloat16", "bool"],
)
def test_every_form_comes_back(make: Any) -> None:
    tensor = make(DENSE)
    (back,) = unpack(pack({"a": tensor})).values()
    assert (back.layout, back.dtype, back.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_parts_that_do_not_fit_together_are_refused() -> None:
    parts = encode({"a": DENSE.to_sparse()})
    for name in parts:
        with pytest.raises(ValueError, match="do not fit together"):
            decode({other: tensor for other, tensor in parts.items() if other != name})
    beyond = {name: tensor + 5 if name.endswith("indices") else tensor for name, tensor in parts.items()}
    with pytest.raises(ValueError, match="do not fit together"):
        decode(beyond)


class Stateful(nn.Module):
    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_is_a_tree() -> None:
    state = {"steps": 3, 4: (None, True, [1.5, "x"]), "kept": {"tensor": torch.arange(3)}, "dict": ()}
    model = nn.Sequential(Stateful(state), nn.Linear(1, 1))
    saved = unpack(pack(extra_states(model)))
    fresh = nn.Sequential(Stateful(), nn.Linear(1, 1))
    load_extra_states(fresh, saved)
    found = fresh[0].state
    assert torch.equal(found["kept"].pop("tensor"), torch.arange(3))
    state["kept"] = {}
    assert found == state


def test_extra_state_that_would_be_pickled_is_refused() -> None:
    with pytest.raises(UsageError, match=r"module 'inner' has a set, and nothing is pickled; return tensors"):
        extra_states(nn.ModuleDict({"inner": Stateful({1})}))


def test_extra_state_that_is_missing_stays() -> None:
    model = Stateful(7)
    load_extra_states(model, {})
    assert model.state == 7
