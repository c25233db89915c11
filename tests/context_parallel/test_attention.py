"""Attention over a divided sequence is torch's over the whole one, forward and backward, by every ring."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from collectives.seats import together
from headrace.collectives.base import Peers
from headrace.collectives.threads import ThreadCollective
from headrace.context_parallel import attention
from headrace.context_parallel.attention import attend
from headrace.context_parallel.placement import Zigzag
from headrace.context_parallel.ring import CollectiveRing, PeerRing, Ring, SharedRing
from headrace.errors import UsageError

WIDTH = 5


class ThreadPeers(Peers):
    """Sends between threads, and lets what is received be seen when it has been waited for alone."""

    def __init__(self, rank: int, wires: dict[tuple[int, int], queue.SimpleQueue[Tensor]]) -> None:
        self.rank, self.wires = rank, wires

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        for tensor, peer in sends:
            assert tensor.is_contiguous()
            self.wires[self.rank, peer].put(tensor.clone())

        def wait() -> None:
            for tensor, peer in receives:
                tensor.copy_(self.wires[peer, self.rank].get(timeout=60))

        return wait


def rings(kind: str, world: int) -> Callable[[ThreadCollective], Ring]:
    if kind == "shared":
        return SharedRing
    if kind == "collective":
        return CollectiveRing
    wires: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
        (one, other): queue.SimpleQueue() for one in range(world) for other in range(world)
    }
    return lambda group: PeerRing(group.rank, world, ThreadPeers(group.rank, wires))


def draw(length: int, heads: tuple[int, int] = (2, 2), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [
        (2, each, length, width) for each, width in zip((heads[0], *heads[1:] * 2), (WIDTH, WIDTH, 3), strict=True)
    ]
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def whole(values: list[Tensor], weight: Tensor, mask: Tensor | None = None, **how: object) -> list[Tensor]:
    """Returns torch's output and gradients."""
    given = [each.clone().requires_grad_() for each in values]
    out = F.scaled_dot_product_attention(*given, mask, **how)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]


def divided(
    values: list[Tensor],
    weight: Tensor,
    world: int,
    kind: str = "shared",
    mask: Callable[[Zigzag], Tensor] | None = None,
    rounds: int = 1,
    **how: object,
) -> list[Tensor]:
    """Returns what all ranks make together."""
    make, length = rings(kind, world), values[0].shape[-2]

    def rank(group: ThreadCollective) -> list[Tensor]:
        place, ring = Zigzag(length, group.rank, world), make(group)
        added = (place.positions() >= length)[:, None]
        for _ in range(rounds):
            given = [place.take(each, 2).requires_grad_() for each in values]
            settings = {"scale": None, "enable_gqa": False, "is_causal": False} | how
            out = attend(place, ring, *given, mask(place) if mask else None, 0.0, **settings)  # type: ignore[arg-type]
            own = place.take(weight, 2).masked_fill(added, 0.0)
            found = [out.detach(), *torch.autograd.grad((out * own).sum(), given)]
        return found

    every = together(world, rank)
    place = Zigzag(length, 0, world)
    return [place.join(parts, 2) for parts in zip(*every, strict=True)]


def assert_alike(found: list[Tensor], right: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= tolerance * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("kind", ["shared", "peers", "collective"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 16, 21, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_any_length_on_any_number_of_ranks_is_torchs(kind: str, world: int, length: int, causal: bool) -> None:
    values = draw(length)
    weight = torch.randn(2, 2, length, 3, dtype=torch.float64)
    # Twice, as memory that ranks share is used again.
    found = divided(values, weight, world, kind, rounds=2, is_causal=causal)
    assert_alike(found, whole(values, weight, is_causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_queries_share_those_of_keys(causal: bool) -> None:
    values, weight = draw(13, (6, 2)), torch.randn(2, 6, 13, 3, dtype=torch.float64)
    found = divided(values, weight, 3, is_causal=causal, enable_gqa=True, scale=0.3)
    assert_alike(found, whole(values, weight, is_causal=causal, enable_gqa=True, scale=0.3))


def test_few_scores_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SCORES", 50)
    values, weight = draw(23), torch.randn(2, 2, 23, 3, dtype=torch.float64)
    for causal in (False, True):
        assert_alike(divided(values, weight, 2, is_causal=causal), whole(values, weight, is_causal=causal))


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("kind", ["shared", "peers", "collective"])
def test_a_mask_of_keys_travels_with_them(boolean: bool, length: int, kind: str) -> None:
    values, weight = draw(length), torch.randn(2, 2, length, 3, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, length) > 0.4
    mask[0] = False  # an example of which no key counts
    mask[1, ..., -1] = True
    given = mask if boolean else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e3)
    # Expanded for every head, as torch's own layers do.
    found = divided(values, weight, 2, kind, lambda place: place.take(given, 3).expand(2, 2, 1, -1))
    assert_alike(found, whole(values, weight, given.expand(2, 2, length, length)))


@pytest.mark.parametrize("shape", [(2, 1, 13, 13), (13, 13), (2, 2, 13, 13)])
@pytest.mark.parametrize("boolean", [False, True])
def test_a_mask_of_pairs_has_a_ranks_rows_and_all_columns(shape: tuple[int, ...], boolean: bool) -> None:
    values, weight = draw(13), torch.randn(2, 2, 13, 3, dtype=torch.float64)
    mask = torch.rand(shape) > 0.5 if boolean else torch.randn(shape, dtype=torch.float64)
    found = divided(values, weight, 3, mask=lambda place: place.take(mask, len(shape) - 2))
    assert_alike(found, whole(values, weight, mask))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_other_types_are_near_torchs(dtype: torch.dtype, tolerance: float) -> None:
    values, weight = draw(40, dtype=dtype), torch.randn(2, 2, 40, 3, dtype=dtype)
    found = divided(values, weight, 4, is_causal=True)
    assert all(each.dtype == dtype for each in found)
    exact = whole([each.double() for each in values], weight.double(), is_causal=True)
    assert_alike([each.double() for each in found], exact, tolerance)


def test_a_derivative_of_a_derivative_is_refused() -> None:
    values = [each.requires_grad_() for each in draw(4)]
    ring = SharedRing(together(1, lambda group: group)[0])
    out = attend(Zigzag(4, 0, 1), ring, *values, None, 0.0, False, scale=None, enable_gqa=False)
    with pytest.raises(UsageError, match="derivative of a derivative"):
        torch.autograd.grad(out.sum(), values[:1], create_graph=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": torch.zeros(2, 2, 3, WIDTH), "value": torch.zeros(2, 2, 3, 3)}, "6 queries and 3 keys"),
        ({"dropout_p": 0.2}, r"dropout_p=0\.2"),
        ({"key": torch.zeros(2, 1, 6, WIDTH)}, "as many heads"),
        ({"attn_mask": torch.zeros(6, 6)}, "is_causal=True in its place"),
        ({"attn_mask": torch.zeros(1, 6, requires_grad=True)}, "has a gradient"),
    ],
)
def test_what_it_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, key, value = (each.float() for each in draw(6))
    usual = dict(zip(names, (query, key, value, None, 0.0, False, None, False), strict=True))
    with pytest.raises(UsageError, match=words):
        together(2, partial(_attend_of_12, usual | change))


def _attend_of_12(values: dict[str, object], group: ThreadCollective) -> None:
    attend(Zigzag(12, group.rank, 2), SharedRing(group), **values)  # type: ignore[arg-type]


def test_every_token_is_placed_once_and_ranks_compute_as_much() -> None:
    for length in range(1, 40):
        for world in range(1, 6):
            every = torch.cat([Zigzag(length, rank, world).positions() for rank in range(world)])
            assert sorted(every.tolist()) == list(range(len(every)))
            assert length <= len(every) < length + 2 * world
            pairs = [
                sum(
                    key <= query
                    for other in range(world)
                    for key in place.chunks(other)
                    for query in place.chunks(rank)
                )
                for rank in range(world)
                for place in [Zigzag(length, rank, world)]
            ]
            assert len(set(pairs)) == 1
