"""Trees of tensors keep their form."""

from __future__ import annotations

import json
from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.trees import as_bytes, as_json, cloned, from_json, map_leaves, map_tensors, nbytes
from training.block_state import Blocks, Nameless


class Pair(NamedTuple):
    first: Any
    second: Any


class Output(OrderedDict[str, Any]):
    """As some libraries' outputs: its items are attributes, its constructor is another, and it has no `update`."""

    def __init__(self, *, logits: Tensor) -> None:
        super().__init__()
        self["logits"] = logits

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return _remade, (self["logits"],)

    def update(self, *_: object, **__: object) -> None:  # type: ignore[override]
        raise TypeError("cannot be updated")


def _remade(logits: Tensor) -> Output:
    return Output(logits=logits)


def test_every_tensor_is_mapped_and_the_rest_stays() -> None:
    tree = {"a": (torch.ones(1), [torch.ones(2), None]), "b": Pair(torch.ones(3), "text"), "c": 4}
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped["a"]) is tuple
    assert type(mapped["a"][1]) is list
    assert type(mapped["b"]) is Pair
    assert [float(t[0]) for t in (mapped["a"][0], mapped["a"][1][0], mapped["b"].first)] == [2.0] * 3
    assert (mapped["a"][1][1], mapped["b"].second, mapped["c"]) == (None, "text", 4)
    assert float(tree["a"][0]) == 1.0  # type: ignore[index]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, MappingProxyType])
def test_mappings_stay_what_they_are_where_they_can(kind: Any) -> None:
    mapped = map_tensors(torch.neg, kind({"x": torch.ones(1)}))
    assert type(mapped) is (dict if kind is MappingProxyType else kind)
    assert float(mapped["x"]) == -1.0


def test_an_output_with_attributes_has_them_changed() -> None:
    mapped = map_tensors(torch.neg, Output(logits=torch.ones(1)))
    assert type(mapped) is Output
    assert float(mapped.logits) == float(mapped["logits"]) == -1.0


def test_sizes_and_sorted_results_are_tuples_too() -> None:
    assert map_tensors(torch.neg, torch.Size([2, 3])) == (2, 3)
    values, _ = map_tensors(torch.neg, torch.sort(torch.tensor([2.0, 1.0])))
    assert values.tolist() == [-1.0, -2.0]


def test_leaves_are_told_where_they_are() -> None:
    tree = {"image": [torch.ones(1), {"size": 3}], "pair": Pair(None, 1)}
    told: dict[str, Any] = {}
    map_leaves(told.__setitem__, tree)
    assert sorted(told) == ["batch['image'][0]", "batch['image'][1]['size']", "batch['pair'][0]", "batch['pair'][1]"]


def test_a_tensor_that_is_made_of_others_is_kept_as_these() -> None:
    blocks = Blocks.of(torch.arange(12.0, dtype=torch.float64).view(3, 4))
    assert nbytes({"state": [blocks]}) == 12 + 3 * 8
    tensors: list[Tensor] = []
    made = json.loads(json.dumps(as_json((blocks, torch.float16), tensors)))
    again, dtype = from_json(made, tensors.__getitem__)
    assert (type(again), again.dtype, again.shape, dtype) == (Blocks, torch.float64, (3, 4), torch.float16)
    assert torch.equal(again.numbers(), blocks.numbers())
    copied: Any = cloned(blocks)
    copied.codes.zero_()
    assert blocks.codes.any()


def test_only_named_classes_are_made_of_what_a_file_says() -> None:
    with pytest.raises(TypeError, match=r"a Nameless, which torch.serialization.add_safe_globals does not name"):
        as_json(Nameless.of(torch.ones(8)), [])
    made = as_json(Blocks.of(torch.ones(8)), [])
    made["wrapper"][0] = "os.system"
    with pytest.raises(UsageError, match=r"the state holds os.system, which this process does not know"):
        from_json(made, lambda _: torch.ones(1))


def test_the_bytes_of_one_value_are_those_of_its_memory_whatever_its_strides() -> None:
    several = torch.arange(6.0)
    for tensor in (several[3:4].as_strided((1,), (0,), 3), several[3], several[2:].view(2, 2)[:1, 1:], several[:0]):
        found = as_bytes(tensor)
        assert found.view(torch.float32).tolist() == tensor.flatten().tolist()
        assert tensor.numel() == 0 or found.data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match=r"shape \[2, 2\] and strides \(1, 3\) is not contiguous"):
        as_bytes(several.view(2, 3).T[:2])
