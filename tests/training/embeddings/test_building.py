"""Models with `sparse=True`: built without their tables, and refused where rows alone do not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import DataError, JobError
from headrace.spec.embedding import RowInit
from headrace.training.embeddings.constructing import deferred_tables, put_tables
from headrace.training.embeddings.layer import SparseEmbedding, sparse_layers


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with deferred_tables() as put:
        return put(make(), seed)


def test_a_table_of_100_gb_is_never_built_and_its_rows_are_there() -> None:
    model = build(lambda: nn.Sequential(nn.Embedding(400_000_000, 64, sparse=True), nn.Flatten(), nn.Linear(128, 1)))
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "2.bias"]
    assert model(torch.tensor([[7, 399_999_999]])).shape == (1, 1)


INITIALISERS: list[tuple[Callable[[nn.Embedding], object], RowInit]] = [
    (lambda layer: None, RowInit("normal", 0.0, 1.0)),
    (lambda layer: nn.init.uniform_(layer.weight, -0.5, 0.25), RowInit("uniform", -0.5, 0.25)),
    (lambda layer: layer.weight.data.normal_(1.0, 0.5), RowInit("normal", 1.0, 0.5)),
    (lambda layer: nn.init.constant_(layer.weight, 3.0), RowInit("constant", 3.0)),
    (lambda layer: nn.init.trunc_normal_(layer.weight, 0.5, 2.0), RowInit("truncated", 0.5, 2.0, (-2.0, 2.0))),
    (lambda layer: nn.init.zeros_(layer.weight), RowInit("constant", 0.0)),
    (lambda layer: nn.init.xavier_normal_(layer.weight), RowInit("normal", 0.0, (2 / (6 + 2)) ** 0.5)),
    (lambda layer: nn.init.normal_(layer.double().weight, 0.5, 0.25), RowInit("normal", 0.5, 0.25)),
    (lambda layer: (nn.init.uniform_(layer.weight, -0.5, 0.25), layer.double()), RowInit("uniform", -0.5, 0.25)),
    (
        lambda layer: (nn.init.trunc_normal_(layer.weight, 0.5), layer.bfloat16()),
        RowInit("truncated", 0.5, 1.0, (-2.0, 2.0)),
    ),
]


@pytest.mark.parametrize(("initialise", "expected"), INITIALISERS)
def test_the_layers_own_initialiser_is_done_row_by_row(
    initialise: Callable[[nn.Embedding], object], expected: RowInit
) -> None:
    def make() -> nn.Module:
        layer = nn.Embedding(6, 2, sparse=True, padding_idx=1)
        with torch.no_grad():
            initialise(layer)
        return nn.Sequential(layer)

    (layer,) = sparse_layers(build(make))
    assert layer.spec.init.kind == expected.kind
    assert (layer.spec.init.first, layer.spec.init.second if expected.kind != "constant" else 1.0) == pytest.approx(
        (expected.first, expected.second)
    )
    assert (layer.spec.init.bounds, layer.spec.padding) == (expected.bounds, 1)


def test_rows_of_numbers_that_were_computed_are_refused() -> None:
    def make() -> nn.Module:
        layer = nn.Embedding(6, 2, sparse=True)
        layer.weight = nn.Parameter(layer.weight.detach() * 0.02)
        return nn.Sequential(layer)

    with pytest.raises(JobError, match=r"'0' is initialised by numbers of its own, which cannot be done row by row"):
        build(make)


def test_other_layers_draw_the_same_numbers_with_and_without_a_sparse_one() -> None:
    def dense() -> nn.Module:
        return nn.ModuleDict({"tower": nn.Linear(4, 2), "plain": nn.Embedding(5, 2)})

    def both() -> nn.Module:
        return nn.ModuleDict({"item": nn.Embedding(90, 2, sparse=True), **dict(dense().items())})

    found = []
    for make in (dense, both):
        torch.manual_seed(4)
        found.append({name: each.detach() for name, each in build(make).named_parameters()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_weights_that_are_given_are_the_first_rows() -> None:
    given = torch.arange(12.0).view(6, 2)
    model = put_tables(nn.Sequential(nn.Embedding.from_pretrained(given, freeze=False, sparse=True)), 0)
    assert torch.equal(model(torch.tensor([5, 0])), given[[5, 0]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_gives_what_torchs_gives(mode: str) -> None:
    bag = nn.EmbeddingBag(9, 3, mode=mode, sparse=mode != "max", padding_idx=4)
    same = nn.EmbeddingBag.from_pretrained(bag.weight, mode=mode, sparse=True, padding_idx=4)
    model = put_tables(nn.Sequential(same), 0)
    ids, offsets = torch.tensor([1, 4, 1, 8, 3]), torch.tensor([0, 3])
    torch.testing.assert_close(model[0](ids, offsets), bag(ids, offsets))  # type: ignore[index]


def _tied() -> nn.Module:
    model = nn.ModuleDict({"item": nn.Embedding(8, 4, sparse=True), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["item"].weight
    return model


def _with(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({"item": nn.Embedding(8, 4, sparse=True, **options)})  # type: ignore[arg-type]


def _by(initialise: Callable[[Tensor], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Embedding(8, 4, sparse=True)
        with torch.no_grad():
            initialise(layer.weight)
        return nn.ModuleDict({"item": layer})

    return make


REFUSED = {
    "tied": (_tied, "'item' is tied: it is 'item.weight' and 'head.weight'.*untie them, or use sparse=False"),
    "max_norm": (_with(max_norm=1.0), "'item' has max_norm=1.0, which is not done row by row"),
    "by frequency": (_with(scale_grad_by_freq=True), "'item' has scale_grad_by_freq=True"),
    "orthogonal": (
        _by(lambda weight: nn.init.orthogonal_(weight)),
        "'item' is initialised by orthogonal_, which",
    ),
    "scaled": (_by(lambda weight: weight.mul_(2)), "'item' is initialised by mul_, .*; use nn.init.normal_"),
    "in part": (_by(lambda weight: weight[0].normal_()), "'item' is initialised by normal_ on a part of it"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_needs_the_whole_table_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(JobError, match=words):
        build(make)


def test_a_forward_that_takes_the_weight_itself_is_refused() -> None:
    (layer,) = sparse_layers(build(_with()))
    with pytest.raises(JobError, match="uses the weight of the sparse embedding 'item' itself"):
        _ = layer.weight


@pytest.mark.parametrize("bad", [-3, 8])
def test_an_index_out_of_range_is_refused_with_layer_value_and_size(bad: int) -> None:
    (layer,) = sparse_layers(build(_with()))
    with pytest.raises(DataError, match=f"'item' has 8 rows, and the batch has the index {bad};"):
        layer(torch.tensor([[0, bad]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_what_is_no_index_is_refused(dtype: torch.dtype) -> None:
    model = build(_with())
    words = f"'item' takes indices of rows.*the batch has {str(dtype).removeprefix('torch.')}; give it int64 or int32"
    with pytest.raises(DataError, match=words):
        model["item"](torch.ones(2, dtype=dtype))
    assert model["item"](torch.ones(2, dtype=torch.uint8)).shape == (2, 4)


def test_a_row_that_is_used_twice_gets_the_sum_and_the_padding_nothing() -> None:
    (layer,) = sparse_layers(build(_with(padding_idx=3)))
    assert isinstance(layer, SparseEmbedding)
    layer.collects = True
    (layer(torch.tensor([5, 3, 5])).sum() + 2 * layer(torch.tensor([1, 5])).sum()).backward()
    ids, gradient = layer.take()
    assert ids.tolist() == [1, 5]
    assert torch.equal(gradient, torch.tensor([[2.0], [4.0]]).expand(2, 4))
    assert layer.take()[0].tolist() == []
