"""Split layers compute what whole ones do, forward and backward; parts and wholes are made of each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective
from headrace.errors import UnknownName, UsageError
from headrace.tensor_parallel import RewrittenModel
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.rewriting import split
from headrace.training.optimizer import StatePiece

Rules = str | Mapping[str, str]


class Gated(nn.Module):
    """Two columns of one value, as in a SwiGLU block, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(F.silu(self.a(x)) * self.b(x))


class Attending(nn.Module):
    """Attention with masks, which shows its weights."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 6, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1 if self.attention.batch_first and x.dim() == 3 else 0]
        later = torch.ones(time, time, dtype=torch.bool).triu(1)
        out, mean = self.attention(x, x, 2 * x, attn_mask=later)
        _, every = self.attention(x, x, x, attn_mask=later.to(x.dtype) * -2, average_attn_weights=False)
        return torch.cat([out.flatten(), mean.flatten(), every.flatten()])


class Opaque(nn.Module):
    """It looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.outer = nn.Linear(4, 6)
        self.calls = 0
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.outer(self.inner(x) if x.sum() > -1e9 else x)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 6, 6, 6, dtype=torch.float64)


def vectors() -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64)


def words() -> Tensor:
    return torch.randint(0, 6, (3, 4))


def sequences() -> Tensor:
    return torch.randn(3, 5, 12, dtype=torch.float64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 12, padding_idx=4), nn.Linear(12, 6))
    model[1].weight = model[0].weight
    return model


def convolutional() -> nn.Sequential:
    body = nn.Sequential(nn.Conv2d(6, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 3))
    return nn.Sequential(body, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Slope(nn.Module):
    """Returns the gradient of an energy, which training differentiates once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
        return slope


@dataclass(frozen=True)
class Case:
    """Attributes:
    make: the model.
    data: its input.
    rules: how it is split.
    kinds: what became of them, where "auto" has chosen.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], Tensor]
    rules: Rules = "auto"
    kinds: Mapping[str, str] | None = None


TOWERS = {"0": "channels", "2": "channels", "4": "row"}
CASES = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 4), nn.Linear(4, 4)),
        vectors,
        kinds={"0": "column", "3": "row"},
    ),
    "gated": Case(Gated, vectors, kinds={"a": "column", "b": "column", "c": "row"}),
    "encoder": Case(
        encoder,
        sequences,
        kinds={f"layers.{i}.{n}": k for i in (0, 1) for n, k in (("self_attn", "heads"), ("linear1", "column"))}
        | {f"layers.{i}.linear2": "row" for i in (0, 1)},
    ),
    "attention": Case(lambda: Attending(True), sequences, kinds={"attention": "heads"}),
    "attention, time first": Case(lambda: Attending(False), sequences),
    "attention, no batch": Case(lambda: Attending(True), lambda: sequences()[0]),
    "convolutions": Case(
        lambda: nn.Sequential(nn.Conv2d(6, 12, 3, padding_mode="circular", padding=1), nn.ReLU(), nn.Conv2d(12, 4, 3)),
        images,
        kinds={"0": "channels", "2": "row"},
    ),
    "grouped": Case(
        lambda: nn.Sequential(
            nn.Conv2d(6, 12, 3, groups=6),
            nn.ReLU(),
            nn.Conv2d(12, 6, 3, groups=6, bias=False),
            nn.ReLU(),
            nn.Conv2d(6, 2, 2),
        ),
        images,
        TOWERS,
    ),
    "one weird trick": Case(convolutional, images, {"0": "batch", "3": "column", "5": "row"}),
    "fewer examples than devices": Case(convolutional, lambda: images(2), {"0": "batch", "3": "column", "5": "row"}),
    "part of a batch, gathered": Case(convolutional, images, {"0": "batch", "5": "row"}),
    "embedding by rows": Case(lambda: nn.Sequential(nn.Embedding(6, 4, padding_idx=4)), words, {"0": "row"}),
    "embedding by columns": Case(lambda: nn.Sequential(nn.Embedding(6, 6, padding_idx=4)), words, {"0": "column"}),
    "tied": Case(tied, words, {"0": "row", "1": "column"}),
    "alone": Case(lambda: nn.Linear(4, 6), vectors, kinds={"": "column"}),
    "opaque": Case(Opaque, vectors, kinds={"inner.0": "column", "inner.2": "row"}),
    "opaque, by hand": Case(Opaque, vectors, {"inner.0": "column", "outer": "column"}),
    "its own gradient, one sum": Case(Slope, vectors, {"inner.0": "column", "inner.2": "row"}),
    "its own gradient, gathered": Case(Slope, vectors, {"inner.0": "column", "inner.2": "column"}),
}


def differentiated(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the output, and the gradient of the input if it has one; those of parameters are left."""
    x = x.clone().requires_grad_(x.is_floating_point())
    output = model(x)
    output.square().sum().backward()
    return output.detach(), x.grad


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_split_model_is_the_whole_one(name: str, world: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    whole, x = case.make().double(), case.data()

    def act(
        group: ThreadCollective,
    ) -> tuple[RewrittenModel, Tensor, Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        made = split(model, case.rules, group, Trial(x))
        output, gradient = differentiated(model, x)
        gradients = {n: whole_of(made, n, p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return made, output, gradient, gradients, dict(made.whole_tensors())

    results = together(world, act)
    expected, gradient = differentiated(whole, x)
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for made, output, own_gradient, own_gradients, _ in results:
        assert_close(output, expected)
        assert (gradient is None) == (own_gradient is None)
        if gradient is not None and own_gradient is not None:
            assert_close(own_gradient, gradient)
        assert own_gradients.keys() == gradients.keys()
        for parameter, each in gradients.items():
            assert_close(own_gradients[parameter], each)
            assert torch.equal(own_gradients[parameter], results[0][3][parameter])
        if case.kinds is not None:
            assert made.kinds == case.kinds
    for key, tensor in results[0][4].items():
        assert torch.allclose(tensor, dict(whole.state_dict())[key.partition("/")[2]].to(tensor.dtype))
    assert [len(tensors) for *_, tensors in results[1:]] == [0] * (world - 1)


def test_torch_s_encoder_layers_use_split_attention_in_evaluation_too() -> None:
    torch.manual_seed(0)
    whole, x = encoder().double().eval(), sequences()
    padded = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 5])

    def act(group: ThreadCollective) -> Tensor:
        model = copy.deepcopy(whole)
        split(model, "auto", group, Trial(x))
        with torch.no_grad():
            output: Tensor = model(x, src_key_padding_mask=padded)
        return output

    with torch.no_grad():
        expected = whole(x, src_key_padding_mask=padded)
    for output in together(2, act):
        assert_close(output[~padded], expected[~padded])


def whole_of(made: RewrittenModel, name: str, gradient: Tensor) -> Tensor:
    (piece,) = made.everywhere((StatePiece(name, "gradient", 0, gradient.flatten()),))
    return piece.value.view(made.shapes[name])


def assert_close(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert float((one - other).abs().max()) < 1e-11


def test_a_pair_needs_one_sum_forward_and_one_backward() -> None:
    x, whole = vectors(), Gated().double()

    def act(group: ThreadCollective) -> list[int]:
        model = copy.deepcopy(whole)
        split(model, "auto", group, Trial(x))
        counted = Counting(group)
        with counted:
            output = model(x.clone().requires_grad_())
            forward = counted.sums
            output.sum().backward()
        return [forward, counted.sums]

    assert together(2, act) == [[1, 2], [1, 2]]


class Counting:
    """Counts a group's sums of tensors."""

    def __init__(self, group: ThreadCollective) -> None:
        self._group = group
        self.sums = 0

    def __enter__(self) -> None:
        inner = self._group.all_reduce

        def counted(tensor: Tensor) -> None:
            self.sums += 1
            inner(tensor)

        self._group.all_reduce = counted  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._group.all_reduce


def test_each_rank_keeps_its_part_alone() -> None:
    whole, x = mlp(), vectors()

    def act(group: ThreadCollective) -> list[tuple[int, ...]]:
        model = copy.deepcopy(whole)
        split(model, "auto", group, Trial(x))
        return [tuple(parameter.shape) for parameter in model.parameters()]

    assert together(2, act) == [[(3, 4), (3,), (4, 3), (4,)]] * 2


def test_pieces_of_wholes_and_of_parts_are_made_of_each_other() -> None:
    model, x, whole = mlp(), vectors(), torch.arange(24.0)

    def act(group: ThreadCollective) -> tuple[list[StatePiece], list[StatePiece]]:
        made = split(copy.deepcopy(model), "auto", group, Trial(x))
        # As three owners have saved it, and a count of steps.
        given = [StatePiece("2.weight", "m", start, whole[start : start + 8]) for start in (16, 0, 8)]
        own = made.divide([*given, StatePiece("2.weight", "step", -1, torch.tensor(3.0))])
        return own, list(made.join(own))

    for rank, (own, joined) in enumerate(together(2, act)):
        parts = {piece.key: piece for piece in own}
        assert parts["step"].value == 3
        assert parts["m"].value.tolist() == whole.view(4, 6)[:, 3 * rank : 3 * rank + 3].flatten().tolist()
        assert {p.key: (p.start, p.value.tolist()) for p in joined} == (
            {} if rank else {"step": (-1, 3.0), "m": (0, whole.tolist())}
        )


@pytest.mark.parametrize(
    ("model", "rules", "kind", "words"),
    [
        (nn.Sequential(nn.Linear(4, 7)), {"0": "column"}, UsageError, "7 outputs, which 2 devices cannot share evenly"),
        (nn.Sequential(nn.Linear(5, 6)), {"0": "row"}, UsageError, "5 inputs, which 2 devices.*use 5 devices"),
        (Attending(True), {"attention": "row"}, UsageError, "is an attention layer.*use 'heads'"),
        (nn.Sequential(nn.Linear(4, 6)), {"1": "row"}, UnknownName, "there is no layer '1'.*known: 0"),
        (nn.Sequential(nn.Linear(4, 6)), {"head": "batch"}, UnknownName, "there is no module 'head'.*known: 0"),
        (nn.Sequential(nn.ReLU()), {"0": "column"}, UsageError, "'0' is a ReLU, which cannot be split"),
        (tied(), {"0": "row"}, UsageError, "belongs to several layers, of which one is split"),
        (tied(), {"0": "column", "1": "column"}, UsageError, "cut it along different dims"),
        (nn.Sequential(nn.Conv2d(6, 6, 1, groups=3)), {"*": "channels"}, UsageError, "3 groups, which 2 devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_the_numbers(
    model: nn.Module, rules: Rules, kind: type[Exception], words: str
) -> None:
    def act(group: ThreadCollective) -> None:
        split(copy.deepcopy(model), rules, group, Trial(vectors()))

    with pytest.raises(kind, match=words):
        together(2, act)


class Late(nn.Module):
    """Calls its layer for more than three examples alone; with fewer than two it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("one example is too few")
        return self.layer(x) if len(x) > 3 else x


@pytest.mark.parametrize("rule", ["batch", "column", "row"])
@pytest.mark.parametrize("examples", [3, 1])
def test_what_a_small_batch_does_not_show_is_whole_where_it_is_taken(rule: str, examples: int) -> None:
    whole, x = Late().double(), torch.randn(5, 4, dtype=torch.float64)

    def act(group: ThreadCollective) -> tuple[tuple[str, ...], Tensor]:
        model = copy.deepcopy(whole)
        made = split(model, {"layer": rule}, group, Trial(x[:examples]))
        return made.notices, model(x).detach()

    for notices, output in together(2, act):
        assert bool(notices) == (examples == 1)
        assert_close(output, whole(x).detach())


class Mean(nn.Module):
    """Returns one vector for all examples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout2d())), r"'0\.1' is a Dropout2d, and of what it draws"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), Mean())), r"returns a tensor of shape \(4,\), which has not one"),
    ],
)
def test_what_has_no_parts_of_a_batch_is_refused(model: nn.Module, words: str) -> None:
    x = torch.randn(6, 4)

    def act(group: ThreadCollective) -> None:
        split(copy.deepcopy(model), {"0": "batch"}, group, Trial(x))

    with pytest.raises(UsageError, match=words):
        together(2, act)
