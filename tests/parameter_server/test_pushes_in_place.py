"""Gradients that are made where they are pushed from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.exchange import GradientBuffer
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from headrace.spec.model import ModelSpec, ParameterSpec
from parameter_server.stands import Stand, standing

PARAMETERS = (ParameterSpec("weight", (4, 16)), ParameterSpec("bias", (3,)), ParameterSpec("odd", (6,)))
MODEL = ModelSpec(PARAMETERS)
PIECES = [
    ShardSpec("weight", 0, (1, 16)),
    ShardSpec("weight", 16, (3, 16)),
    ShardSpec("bias", 0, (3,)),
    # With a gap between them: every slot begins with a cache line.
    ShardSpec("odd", 0, (2,)),
    ShardSpec("odd", 2, (4,)),
]
WEIGHT, BIAS, ODD = range(3)


class Desk:
    """A client of a server of these parameters, and the buffer of its gradients."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        connection = stand.connection()
        self.client = Client([connection], 0)
        self.places = connection.places
        self.buffer = GradientBuffer([stand.layout], MODEL, [server.session for server in self.client.servers])
        self.client.pull()

    def place(self, index: int) -> Tensor:
        place = self.buffer.place(index)
        assert place is not None
        return place

    def push(self, lease: int) -> Reason | None:
        return self.client.push(self.buffer.by_shard(), lease, pull=True)

    @property
    def values(self) -> Tensor:
        return torch.cat(list(self.places))

    def in_their_slots(self) -> list[bool]:
        pairs = zip(self.buffer.by_shard()[0], self.client.servers[0].session.push_views, strict=True)
        return [own is not None and own.data_ptr() == slot.data_ptr() for own, slot in pairs]


@contextmanager
def desk_at(way: str, *codec: str) -> Iterator[Desk]:
    with standing(way, layout=ShardLayout(PIECES, *codec)) as stand:
        desk = Desk(stand)
        try:
            yield desk
        finally:
            desk.client.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with desk_at("local") as desk:
        yield desk


def gradients_in(desk: Desk, factor: float) -> list[Tensor]:
    """Returns gradients of which that of the weight is in its place."""
    place = desk.place(WEIGHT)
    place.copy_(factor * torch.arange(64.0).view(4, 16))
    return [place, torch.full((3,), factor), torch.full((6,), factor)]


def expected(total: float) -> Tensor:
    return -total * torch.cat([torch.arange(64.0), torch.ones(9)])


def test_a_gradient_in_its_place_is_applied_like_any_other(desk: Desk) -> None:
    for step, factor in enumerate((1.0, 2.0, 4.0)):
        desk.buffer.store(gradients_in(desk, factor))
        assert desk.in_their_slots() == [True, True, False, False, False]
        assert desk.push(step) is None
        assert torch.equal(desk.values, expected(2 * factor - 1))


def test_only_a_parameter_whose_slots_are_side_by_side_has_a_place(desk: Desk) -> None:
    assert desk.place(WEIGHT).shape == (4, 16)
    assert desk.place(BIAS).shape == (3,)
    assert desk.buffer.place(ODD) is None
    assert GradientBuffer([desk.stand.layout], MODEL).place(WEIGHT) is None


def test_a_parameter_on_two_servers_has_no_place(desk: Desk) -> None:
    one, other = ShardLayout(PIECES[:1]), ShardLayout(PIECES[1:])
    sessions = [desk.client.servers[0].session] * 2
    assert GradientBuffer([one, other], MODEL, sessions).place(WEIGHT) is None


@pytest.mark.parametrize("way", [("local", "bf16"), ("local", "int8"), ("remote",)], ids=str)
def test_what_is_encoded_or_sent_has_no_place(way: tuple[str, ...]) -> None:
    with desk_at(*way) as desk:
        assert desk.buffer.place(WEIGHT) is None


def test_there_is_no_place_while_a_push_is_not_answered(desk: Desk) -> None:
    desk.buffer.store(gradients_in(desk, 1.0))
    server = desk.client.servers[0]
    server.push(server.buckets[0], desk.buffer.by_shard()[0], Message(Kind.PUSH_PULL, 0, 1, 0, 1.0, 1.0))
    assert desk.buffer.place(WEIGHT) is None
    assert server.finish().reason is None
    assert desk.buffer.place(WEIGHT) is not None


def test_a_gradient_is_copied_to_the_place_of_the_next_connection(desk: Desk) -> None:
    """What was made before the connection broke is not where the new one sends from."""
    desk.buffer.store(gradients_in(desk, 1.0))
    old = desk.place(WEIGHT)
    desk.stand.cut()
    desk.client.ask(0, Message(Kind.ROUND_MEMBERS))
    assert desk.in_their_slots() == [False] * 5
    assert desk.push(0) is None
    assert torch.equal(desk.values, expected(1.0))
    assert desk.place(WEIGHT).data_ptr() != old.data_ptr()


def test_what_was_changed_after_it_was_made_is_pushed_as_it_is_then(desk: Desk) -> None:
    """As clipping does, into new memory."""
    desk.buffer.store(gradients_in(desk, 1.0))
    desk.buffer.clip(0.5, None)
    assert desk.in_their_slots() == [False] * 5
    assert desk.push(0) is None
    assert torch.equal(desk.values, expected(1.0).clamp(-0.5, 0.5))


def test_a_gradient_that_is_no_number_is_refused_and_its_place_used_again(desk: Desk) -> None:
    desk.buffer.store(gradients_in(desk, float("nan")))
    assert desk.push(0) == Reason.NOT_FINITE
    desk.buffer.store(gradients_in(desk, 1.0))
    assert desk.push(1) is None
    assert torch.equal(desk.values, expected(1.0))
